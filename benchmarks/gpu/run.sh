#!/usr/bin/env bash
# Builds, checks and measures on a GPU host without a network; docs/gpu.md says how.
# ./run.sh            everything that has not worked yet
# ./run.sh STAGE...   of: host install build check bench ort-cuda eager
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
WORK=${KIT_WORK:-$HERE/work}            # unpacked, installed and built here
RESULTS=${KIT_RESULTS:-$HERE/results}   # what is brought back
PYTHON=${KIT_PYTHON:-}                  # of the host, with torch if it has that
INSTALLED=${KIT_INSTALLED:-}            # a Python that has all packages: nothing is installed
LIMIT=${KIT_LIMIT_SECONDS:-1200}        # of one step
CORE=$WORK/core
OUT=$WORK/out
PRECISIONS=(fp16 fp32)
FAILED=()
GPU='' NO_GPU=''
export XDG_CACHE_HOME=$WORK/cache       # of compiled kernels

say() { printf '%s\n' "$*" | tee -a "$OUT/run.log"; }

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# step NAME COMMAND...: run it, unless it has worked before; its output goes into the results.
step() {
  local name=$1 code=0 start=$SECONDS
  shift
  if worked "$name"; then
    say "$name: done before"
    return
  fi
  rm -f "$OUT/$name".*
  timeout "$LIMIT" "$@" > "$OUT/$name.out" 2> "$OUT/$name.err" || code=$?
  printf '%s %s\n' "$code" "$((SECONDS - start))" > "$OUT/$name.done"
  if ((code == 0)); then
    say "$name: ok, $((SECONDS - start)) s"
  else
    failed "$name" "code $code after $((SECONDS - start)) s: $(tail -n 1 "$OUT/$name.err")"
  fi
}

failed() {
  say "$1: FAILED, $2"
  FAILED+=("$1")
}

# What this host cannot do is no failure of the kit, but it is not done either.
skip() {
  rm -f "$OUT/$1".*
  printf '%s\n' "$2" > "$OUT/$1.skipped"
  failed "$1" "not run: $2"
}

worked() { [[ -e $OUT/$1.done && $(< "$OUT/$1.done") == '0 '* ]]; }

# --- the pieces -----------------------------------------------------------------------------------------------------

kit_stages() { sed -E 's/^[^ ]+ +//; s/\.tar.*//' "$HERE/SHA256SUMS" | uniq; }

# problem STAGE: the first piece that is missing or damaged, in words.
problem() {
  local sum name missing=()
  while read -r sum name; do
    [[ -f $HERE/$name ]] || missing+=("$name")
  done < <(grep -E " $1\.tar" "$HERE/SHA256SUMS")
  if ((${#missing[@]})); then
    printf '%s missing: copy to %s' "${missing[*]}" "$HERE"
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
  if [[ -e $WORK/SHA256SUMS ]] && ! cmp -s "$HERE/SHA256SUMS" "$WORK/SHA256SUMS"; then
    rm -rf "$WORK"/{core,rtx,trt86,ort-gpu,python,env,out,.part}
  fi
  cp "$HERE/SHA256SUMS" "$WORK/SHA256SUMS"
  mkdir -p "$OUT"
  for stage in $(kit_stages); do
    [[ -e $WORK/$stage ]] && continue
    found=$(problem "$stage")
    if [[ $found ]]; then
      [[ $stage == core ]] && die "$stage: $found"
      failed "unpack-$stage" "$found"
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
    BASE=$INSTALLED
    return
  fi
  unset PYTHONPATH PYTHONHOME
  export PYTHONNOUSERSITE=1
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
  local packages=(tformer-deploy onnx polygraphy cuda-python) links=(--find-links "$CORE/own" --find-links "$CORE/wheels")
  case $name in
    rtx) packages+=(onnxruntime tensorrt_rtx_cu13) ;;
    ort-gpu) packages+=(onnxruntime-gpu) ;;
    *) packages+=(onnxruntime) ;;
  esac
  [[ -e $WORK/$name/wheels ]] && links+=(--find-links "$WORK/$name/wheels")
  pip=$(compgen -G "$CORE/wheels/pip-*.whl")/pip
  export PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
  rm -rf "$env"
  "$BASE" -m venv --without-pip "$env"
  "$env/bin/python" "$pip" install -q --no-index "${links[@]}" "${packages[@]}" >&2
  if [[ $name == trt86 ]]; then
    cp -r "$WORK/trt86/tensorrt" "$env/lib/python$(< "$CORE/python")/site-packages/"
  fi
  "$env/bin/python" "$pip" list --format json
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
    "$INSTALLED" -c 'from tformer_deploy.engines.trt_api import installed; print("plain", installed()[0])'
    return
  fi
  if worked install-rtx; then printf 'rtx rtx\n'; fi
  if worked install-trt86; then printf 'trt86 tensorrt\n'; fi
}

find_gpu() {
  local code='from tformer_deploy.engines.trt_api import find_gpu; print(find_gpu("this stage").name)' found python
  [[ $GPU || $NO_GPU ]] && return
  python=$(environment_python "$(environments | head -n 1)")
  if found=$("$python" -c "$code" 2>&1); then
    GPU=$found
  else
    found=$(tail -n 1 <<< "$found")
    NO_GPU=${found#*: }
  fi
}

# --- the stages -----------------------------------------------------------------------------------------------------

stage_host() { step host "$BASE" "$CORE/host.py" describe "$(command -v "$PYTHON" || printf '%s' "$PYTHON")"; }

stage_install() {
  local name
  export -f make_environment
  export CORE WORK BASE
  if [[ $INSTALLED ]]; then
    say "install: nothing, $INSTALLED has all"
  else
    for name in $(environments); do
      # shellcheck disable=SC2016
      step "install-$name" bash -euo pipefail -c 'make_environment "$1"' - "$name"
    done
  fi
  step weights "$(environment_python "$(environments | head -n 1)")" "$CORE/seeded.py" "$CORE/models/base"
}

# options FILE: its lines as words, into WORDS.
options() { mapfile -t WORDS < "$CORE/models/$1"; }

stage_build() {
  local env flavor model precision python
  while read -r env flavor; do
    python=$(environment_python "$env")
    for precision in "${PRECISIONS[@]}"; do
      for model in trained base; do
        options "$model.build"
        step "build-$flavor-$model-$precision" "$python" -m tformer_deploy build "$CORE/models/$model" \
          --precision "$precision" --calibrate "$CORE/models/$model.text" --trt-flavor "$flavor" "${WORDS[@]}" --json
      done
    done
  done < <(flavors)
}

# has_plans MODEL FLAVOR PRECISION
has_plans() {
  local version='[0-9]'
  if [[ $2 == rtx ]]; then version=for-rtx; fi
  compgen -G "$CORE/models/$1/trt/plans/*-tensorrt-$version*-$3/plans.json" > /dev/null
}

stage_check() {
  local env flavor precision name
  find_gpu
  while read -r env flavor; do
    for precision in "${PRECISIONS[@]}"; do
      name=check-$flavor-$precision
      if ! has_plans trained "$flavor" "$precision"; then
        skip "$name" 'there are no plans: run the stage build'
      elif [[ $NO_GPU ]]; then
        skip "$name" "$NO_GPU"
      else
        step "$name" "$(environment_python "$env")" -m tformer_deploy check "$CORE/models/trained" \
          --backend "trt:$precision" --reference "$CORE/models/trained.reference" --json
      fi
    done
  done < <(flavors)
}

stage_bench() {
  local env flavor model precision backends text
  find_gpu
  while read -r env flavor; do
    for model in base trained; do
      backends=() text=()
      for precision in "${PRECISIONS[@]}"; do
        if has_plans "$model" "$flavor" "$precision"; then backends+=(--backend "trt:$precision"); fi
      done
      [[ $model == trained ]] && text=(--src "$CORE/models/trained.text")
      options "$model.bench"
      if ((${#backends[@]} == 0)); then
        skip "bench-$flavor-$model" 'there are no plans: run the stage build'
      elif [[ $NO_GPU ]]; then
        skip "bench-$flavor-$model" "$NO_GPU"
      else
        step "bench-$flavor-$model" "$(environment_python "$env")" -m tformer_deploy bench "$CORE/models/$model" \
          "${backends[@]}" "${WORDS[@]}" "${text[@]}" --json
      fi
    done
  done < <(flavors)
}

# ONNX Runtime's CUDA provider on the graphs for TensorRT; its CUDA libraries are those of the host's torch.
stage_ort_cuda() {
  local model libraries name
  local -a there
  find_gpu
  libraries=$("$PYTHON" "$CORE/host.py" libraries 2> /dev/null || true)  # without torch there are none
  there=(env "LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$(environment_python ort-gpu)" -m tformer_deploy)
  for name in check-ort-cuda bench-ort-cuda-base bench-ort-cuda-trained; do
    model=${name##*-}
    if [[ ! $INSTALLED ]] && ! worked install-ort-gpu; then
      skip "$name" 'onnxruntime-gpu is not installed: make the kit --with ort-gpu'
    elif [[ $NO_GPU ]]; then
      skip "$name" "$NO_GPU"
    elif [[ $name == check-* ]]; then
      step "$name" "${there[@]}" check "$CORE/models/trained" --backend ort --variant trt --device cuda \
        --reference "$CORE/models/trained.reference" --json
    else
      options "$model.bench"
      step "$name" "${there[@]}" bench "$CORE/models/$model" --backend ort --variant trt --device cuda "${WORDS[@]}" --json
    fi
  done
}

stage_eager() {
  local code=0 reason
  if ! command -v "$PYTHON" > /dev/null; then
    skip eager "there is no $PYTHON here: name one with torch in KIT_PYTHON"
    return
  fi
  reason=$("$PYTHON" "$CORE/eager.py" --why-not 2>&1) || code=$?
  if ((code)); then
    skip eager "$(tail -n 1 <<< "$reason")"
  else
    step eager env "PYTHONPATH=$(compgen -G "$CORE/own/*.whl")" "$PYTHON" "$CORE/eager.py" "$CORE/models/base.points"
  fi
}

main() {
  local stage known=' host install build check bench ort-cuda eager '
  for stage in "$@"; do
    [[ $known == *" $stage "* || $stage == unpack ]] || die "there is no stage '$stage': take of unpack$known"
  done
  unpack
  find_python
  if (($# == 0)); then
    set -- host install build check bench
    if [[ $INSTALLED || -e $WORK/ort-gpu ]]; then set -- "$@" ort-cuda; fi
    set -- "$@" eager
  fi
  for stage in "$@"; do
    if [[ $stage != unpack ]]; then "stage_${stage//-/_}"; fi
  done
  mkdir -p "$RESULTS"
  "$BASE" "$CORE/host.py" collect "$OUT" "$CORE/kit.json" "$RESULTS/results.json"
  cp "$OUT/run.log" "$RESULTS/run.log"
  say "results: $RESULTS"
  if ((${#FAILED[@]})); then
    say "${#FAILED[@]} not done: ${FAILED[*]}"
    exit 1
  fi
}

main "$@"
