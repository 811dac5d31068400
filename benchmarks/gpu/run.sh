#!/usr/bin/env bash
# Builds, checks and measures on a GPU host without a network; docs/gpu.md says how.
# ./run.sh            everything that has not worked yet
# ./run.sh STAGE...   of: unpack host install probe trained steps ort-cuda eager base batches beams
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${KIT_WORK:-$HERE/work}            # unpacked, installed and built here
RESULTS=${KIT_RESULTS:-$HERE/results}   # what is brought back
PYTHON=${KIT_PYTHON:-}                  # of the host, with torch if it has that
INSTALLED=${KIT_INSTALLED:-}            # a Python that has all packages: nothing is installed
LIMIT=${KIT_LIMIT_SECONDS:-}            # of every stage, in place of its own
TOTAL=${KIT_TOTAL_SECONDS:-0}           # of the whole run; 0: as long as it takes
CORE=$WORK/core
MODELS=$WORK/models
OUT=$WORK/out
read -ra PRECISIONS <<< "${KIT_PRECISIONS:-fp16 fp32}"
HOST_PATH=${PYTHONPATH:-}
FAILED=()
GPU='' NO_GPU=''
export XDG_CACHE_HOME=$WORK/cache       # of compiled kernels

# The stages in their order, and the seconds that each may take: 25 minutes in all.
STAGES=(host install probe trained steps ort-cuda eager base batches beams)
declare -A SECONDS_OF=([host]=30 [install]=60 [probe]=90 [trained]=270 [steps]=150 [ort-cuda]=210 [eager]=120
  [base]=300 [batches]=120 [beams]=150)
STAGE='' STAGE_END=0

say() { printf '%s\n' "$*" | tee -a "$OUT/run.log"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# run_stage NAME: its steps, for as long as it may take. It is not begun where a run of limited time might cut it off.
run_stage() {
  local seconds=${LIMIT:-${SECONDS_OF[$1]}} left=$((TOTAL - SECONDS))
  if [[ $1 != host && $1 != install && $1 != probe && ! -e $MODELS ]]; then
    say "$1: not begun: $(problem models)"
    FAILED+=("$1")
    return
  fi
  if ((TOTAL && left < seconds)); then
    say "$1: not begun: it may take $seconds s, and $left s are left of $TOTAL: run it again"
    FAILED+=("$1")
    return
  fi
  STAGE=$1 STAGE_END=$((SECONDS + seconds))
  "stage_${1//-/_}"
}

# step NAME COMMAND...: run it, unless it has worked before; its output goes into the results, at once.
step() {
  local name=$1 code=0 start=$SECONDS limit=$((STAGE_END - SECONDS))
  shift
  if over "$name"; then return; fi
  if ((limit <= 0)); then
    skip "$name" "no time was left of what the stage $STAGE may take: run it again"
    return
  fi
  rm -f "$OUT/$name".*
  KIT_STEP=$name timeout --foreground -k 10 "$limit" "$@" < /dev/null > "$OUT/$name.out" 2> "$OUT/$name.err" || code=$?
  if ((code == 124 || code == 137)); then
    end_children "$name"
    printf 'stopped after %s s\n' "$((SECONDS - start))" >> "$OUT/$name.err"
  fi
  printf '%s %s\n' "$code" "$((SECONDS - start))" > "$OUT/$name.done"
  if ((code == 0)); then
    say "$name: ok, $((SECONDS - start)) s"
  else
    failed "$name" "code $code after $((SECONDS - start)) s: $(tail -n 1 "$OUT/$name.err")"
  fi
  collect || true
}

# end_children NAME: what a step that was stopped had started would go on, and disturb the next one.
end_children() {
  local process
  for process in /proc/[0-9]*; do
    if grep -qzx "KIT_STEP=$1" "$process/environ" 2> /dev/null; then kill -KILL "${process#/proc/}" 2> /dev/null || true; fi
  done
}

# What there is so far, to bring back.
collect() {
  mkdir -p "$RESULTS"
  cp "$OUT/run.log" "$RESULTS/run.log"
  "$BASE" "$CORE/host.py" collect "$OUT" "$CORE/kit.json" "$RESULTS/results.json"
}

failed() {
  say "$1: FAILED, $2"
  FAILED+=("$1")
}

# What this host cannot do now is no failure of the kit, but it is not done either, unless it was before.
skip() {
  if over "$1"; then return; fi
  rm -f "$OUT/$1".*
  printf '%s\n' "$2" > "$OUT/$1.skipped"
  say "$1: not run: $2"
  FAILED+=("$1")
}

# over NAME: whether it has worked, or found what is wrong, which it would find again.
over() {
  if worked "$1"; then
    say "$1: done before"
  elif [[ -e $OUT/$1.done && $(< "$OUT/$1.done") == '3 '* ]]; then
    failed "$1" 'code 3 before'
  else
    return 1
  fi
}

worked() { [[ -e $OUT/$1.done && $(< "$OUT/$1.done") == '0 '* ]]; }

# --- the pieces -----------------------------------------------------------------------------------------------------

kit_stages() { sed -E 's/^[^ ]+ +//; s/\.tar.*//' "$HERE/SHA256SUMS" | uniq; }

# in_kit STAGE: whether it has pieces, here or not.
in_kit() { kit_stages | grep -qx "$1"; }

# problem STAGE: the first piece that is missing or damaged, in words.
problem() {
  local sum name missing=()
  while read -r sum name; do
    [[ -f $HERE/$name ]] || missing+=("$name")
  done < <(grep -E " $1\.tar" "$HERE/SHA256SUMS")
  if ((${#missing[@]})); then
    printf '%s not here: copy to %s' "${missing[*]}" "$HERE"
    return
  fi
  while read -r sum name; do
    if ! printf '%s  %s\n' "$sum" "$HERE/$name" | sha256sum --check --status; then
      printf '%s does not match SHA256SUMS: copy it again' "$name"
      return
    fi
  done < <(grep -E " $1\.tar" "$HERE/SHA256SUMS")
}

unpack() {
  local stage found part=$WORK/.part
  [[ -f $HERE/SHA256SUMS ]] || die "$HERE/SHA256SUMS is missing: copy it there"
  mkdir -p "$WORK"
  if command -v flock > /dev/null; then  # what a run that was killed left behind has it too
    exec 9> "$WORK/.lock"
    flock -n 9 || die "another run.sh, or what one has left, works in $WORK: wait for it or end it"
  fi
  if [[ -e $WORK/SHA256SUMS ]] && ! cmp -s "$HERE/SHA256SUMS" "$WORK/SHA256SUMS"; then
    echo "another kit: what was unpacked, installed and built in $WORK before goes"
    rm -rf "$WORK"/{core,models,probe,rtx,trt86,ort-gpu,python,env,out,.part}
  fi
  cp "$HERE/SHA256SUMS" "$WORK/SHA256SUMS"
  mkdir -p "$OUT"
  for stage in $(kit_stages); do
    [[ -e $WORK/$stage ]] && continue
    found=$(problem "$stage")
    if [[ $found ]]; then
      [[ $stage == core ]] && die "$stage: $found"
      if [[ $found == *' not here: '* ]]; then  # they may come later
        say "unpack-$stage: $found"
      else
        failed "unpack-$stage" "$found"
      fi
      continue
    fi
    rm -rf "$part" && mkdir "$part"
    if cat "$HERE/$stage".tar* | plain "$stage" | tar -x -C "$part"; then
      mv "$part/$stage" "$WORK/$stage"
      say "unpack-$stage: ok"
    else
      [[ $stage == core ]] && die "core: tar cannot unpack it to $part"
      failed "unpack-$stage" "tar cannot unpack it to $part"
    fi
  done
}

# plain STAGE: what is compressed on the way in is not on the way out.
plain() {
  local each code='import lzma, shutil, sys; shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)'
  if ! compgen -G "$HERE/$1.tar.xz.*" > /dev/null; then
    cat
  elif command -v xz > /dev/null; then
    xz -dc
  else
    for each in "${PYTHON:-python3}" "$WORK"/python/usr/bin/python3*; do
      if command -v "$each" > /dev/null; then
        "$each" -c "$code"
        return
      fi
    done
    printf 'neither xz nor a Python is here\n' >&2
  fi
}

# --- Python ---------------------------------------------------------------------------------------------------------

find_python() {
  local wanted each
  wanted=$(< "$CORE/python")
  PYTHON=${PYTHON:-python3}
  if [[ $INSTALLED ]]; then
    command -v "$INSTALLED" > /dev/null || die "KIT_INSTALLED: there is no $INSTALLED"
    BASE=$INSTALLED
    return
  fi
  unset PYTHONPATH PYTHONHOME
  export PYTHONNOUSERSITE=1  # but for the host's own, which may have its torch there
  for each in "$PYTHON" "python$wanted" "$WORK/python/usr/bin/python$wanted"; do
    if [[ $("$each" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) == "$wanted" ]]; then
      BASE=$each
      return
    fi
  done
  die "there is no Python $wanted: name one in KIT_PYTHON, or make the kit with --python"
}

# Every engine has an environment of its own, so that no other TensorRT or ONNX Runtime of the host is met.
environments() {
  local name found=()
  for name in rtx trt86 ort-gpu; do
    [[ -e $WORK/$name ]] && found+=("$name")
  done
  printf '%s\n' "${found[@]:-plain}"
}

make_environment() {
  local name=$1 env=$WORK/env/$1 pip
  local packages=(tformer-deploy onnx polygraphy cuda-bindings sacrebleu) links=(--find-links "$CORE/own" --find-links "$CORE/wheels")
  case $name in
    rtx) packages+=(onnxruntime tensorrt_rtx_cu13) ;;
    ort-gpu) packages+=(onnxruntime-gpu) ;;
    *) packages+=(onnxruntime) ;;
  esac
  [[ -e $WORK/$name/wheels ]] && links+=(--find-links "$WORK/$name/wheels")
  pip=$(compgen -G "$CORE/wheels/pip-*.whl")/pip
  unset "${!PIP_@}"  # of the host, which may name other places
  export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
  rm -rf "$env"
  "$BASE" -m venv --without-pip "$env"
  "$env/bin/python" "$pip" install -q --no-compile --no-index "${links[@]}" "${packages[@]}" >&2
  if [[ $name == trt86 ]]; then
    ln -s "$(cd "$WORK/trt86" && pwd)/tensorrt" "$env/lib/python$(< "$CORE/python")/site-packages/tensorrt"
  fi
  "$env/bin/python" "$pip" list --format json
}

# The first whose installation has worked.
any_python() {
  local name
  for name in $(environments); do
    if [[ $INSTALLED ]] || worked "install-$name"; then
      environment_python "$name"
      return
    fi
  done
  printf 'python-that-is-not-installed'
}

environment_python() {
  if [[ $INSTALLED ]]; then
    printf '%s' "$INSTALLED"
  else
    printf '%s' "$WORK/env/$1/bin/python"
  fi
}

# flavors: environment and flavor of each TensorRT.
flavors() {
  if [[ $INSTALLED ]]; then
    "$INSTALLED" -c 'from tformer_deploy.engines.trt.api import installed; print("plain", installed()[0])'
    return
  fi
  if worked install-rtx; then printf 'rtx rtx\n'; fi
  if worked install-trt86; then printf 'trt86 tensorrt\n'; fi
}

find_gpu() {
  local code='from tformer_deploy.engines.trt.api import require_gpu; print(require_gpu("this stage").name)' found python
  [[ $GPU || $NO_GPU ]] && return
  python=$(any_python)
  if found=$(timeout -k 5 60 "$python" -c "$code" 2>&1); then
    GPU=$found
  else
    found=$(tail -n 1 <<< "$found")
    NO_GPU=${found#*: }
  fi
}

main() {
  local stage asked=()
  if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /s/^# //p' "${BASH_SOURCE[0]}"
    exit
  fi
  for stage in "$@"; do
    [[ " unpack ${STAGES[*]} " == *" $stage "* ]] || die "there is no stage '$stage': take of unpack ${STAGES[*]}"
    if [[ $stage != unpack && $stage != host && $stage != install ]]; then asked+=("$stage"); fi
  done
  unpack
  # shellcheck source=stages.sh
  source "$CORE/stages.sh"
  find_python
  if (($# == 0)); then asked=("${STAGES[@]:2}"); fi
  if [[ $* != unpack ]]; then asked=(host install "${asked[@]}"); fi
  for stage in "${asked[@]}"; do
    if [[ $stage == ort-cuda && ! $INSTALLED ]] && ! in_kit ort-gpu; then continue; fi
    run_stage "$stage"
  done
  collect || FAILED+=(results)
  say "results: $RESULTS"
  if ((${#FAILED[@]})); then
    say "${#FAILED[@]} not done: ${FAILED[*]}"
    exit 1
  fi
}

main "$@"
