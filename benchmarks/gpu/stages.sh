#!/usr/bin/env bash
# The stages of the GPU kit: run.sh reads this where it has unpacked it, and says what its words mean.

stage_host() {
  step host env -u PYTHONNOUSERSITE "PYTHONPATH=$HOST_PATH" "$BASE" "$CORE/host.py" describe \
    "$(command -v "$PYTHON" || printf '%s' "$PYTHON")"
}

# What ONNX Runtime needs alone is installed when it runs.
stage_install() {
  local name
  if [[ $INSTALLED ]]; then
    say "install: nothing, $INSTALLED has all"
  else
    for name in $(environments); do
      if [[ $name != ort-gpu ]]; then install "$name"; fi
    done
  fi
  if [[ -e $MODELS ]]; then step weights "$(any_python)" "$CORE/seeded.py" "$MODELS/base"; fi
}

install() {
  export -f make_environment
  export CORE WORK BASE
  # shellcheck disable=SC2016
  step "install-$1" bash -euo pipefail -c 'make_environment "$1"' - "$1"
}

# Whether this host runs plans at all: a small one, before minutes are spent on others.
stage_probe() {
  local env flavor model profile words
  find_gpu
  profile=$(sed -n 2p "$CORE/probe.build")
  # shellcheck disable=SC2016
  local code='"$1" "$2/seeded.py" "$3" >&2
    "$1" -m tformer_deploy $6 build "$3" --precision fp32 --profile "$4" --trt-flavor "$5" --json
    head -n 1 "$2/probe.text" | "$1" -m tformer_deploy $6 translate "$3" --backend trt:fp32 --max-tokens 4 >&2'
  while read -r env flavor; do
    if [[ $NO_GPU ]]; then
      skip "probe-$flavor" "$NO_GPU"
      continue
    fi
    model=$WORK/probe/$flavor
    mkdir -p "$WORK/probe"
    rm -rf "$model"
    cp -r "$CORE/probe" "$model"
    words=(bash -euo pipefail -c "$code" - "$(environment_python "$env")" "$CORE" "$model" "$profile" "$flavor")
    rm -f "$RESULTS/probe-$flavor.log"
    step "probe-$flavor" "${words[@]}" ''
    if ! worked "probe-$flavor"; then explain_probe "$flavor" "${words[@]}" --debug; fi
  done < <(flavors)
}

# explain_probe FLAVOR COMMAND...: the probe again, in what is left of its time, with all that TensorRT logs, into the results.
explain_probe() {
  local limit=$((STAGE_END - SECONDS))
  if ((limit <= 0)); then return; fi
  mkdir -p "$RESULTS"
  timeout -k 5 "$limit" "${@:2}" < /dev/null 2>&1 | tail -c 1000000 > "$RESULTS/probe-$1.log" || true
}

# Tokens of the trained model, in Python and in C++.
stage_trained() { on_each prove trained; }

# Of the model with random weights.
stage_base() { on_each prove base; }

# Batch 1, greedy: one plan of each model is enough.
stage_steps() { on_each measure_both steps; }

# Greedy, larger batches, and the trained model's text.
stage_batches() { on_each measure_both batches; }

stage_beams() { on_each measure_both beams; }

# on_each COMMAND...: with environment, flavor and precision of all that runs plans here.
on_each() {
  local env flavor precision
  find_gpu
  while read -r env flavor; do
    for precision in "${PRECISIONS[@]}"; do "$@" "$env" "$flavor" "$precision"; done
  done < <(flavors)
}

# prove MODEL ENVIRONMENT FLAVOR PRECISION: build all its plans, and compare their tokens with eager PyTorch's and C++'s.
prove() {
  local model=$1 text=$MODELS/$1.text python hindered
  shift
  python=$(environment_python "$1")
  profiles "$model"
  reference "$model"
  on_plans check "$model" "$@" "$python" -m tformer_deploy check "$MODELS/$model" --backend "trt:$3" \
    "${WORDS[@]}" --json
  if [[ ! -e $CORE/cpp/tensorrt ]]; then return; fi
  options "$model.build"
  hindered=$(without_cpp "$2")
  if [[ $hindered ]]; then
    skip "cpp-$2-$model-$3" "$hindered"
  else
    on_plans cpp "$model" "$@" "$python" "$CORE/in_cpp.py" --cpp "$CORE/cpp" --bundle "$MODELS/$model" \
      --text "$text" --precision "$3" --flavor "$2" "${WORDS[@]}"
  fi
}

# measure_both STAGE ENVIRONMENT FLAVOR PRECISION
measure_both() {
  measure "$1" base "${@:2}"
  measure "$1" trained "${@:2}"
}

# measure STAGE MODEL ENVIRONMENT FLAVOR PRECISION
measure() {
  profiles "$2"
  if [[ $1 == steps ]]; then PROFILES=("${PROFILES[0]}"); fi
  bench_options "$1" "$2"
  on_plans "$1" "${@:2}" "$(environment_python "$3")" -m tformer_deploy bench "$MODELS/$2" --backend "trt:$5" \
    "${WORDS[@]}" --json
}

# on_plans WHAT MODEL ENVIRONMENT FLAVOR PRECISION COMMAND...: a step that runs plans of PROFILES, which are built if need be.
on_plans() {
  local model=$2 env=$3 flavor=$4 precision=$5 name=$1-$4-$2-$5 hindered
  if ! worked "$name"; then build_plans "$model" "$env" "$flavor" "$precision"; fi
  hindered=$(hindrance "$flavor")
  if [[ ! $hindered ]] && ! has_plans "$model" "$flavor" "$precision"; then
    hindered="there are no plans: build-$flavor-$model-$precision has not worked"
  fi
  if [[ $hindered ]]; then
    skip "$name" "$hindered"
  else
    step "$name" "${@:6}"
  fi
}

# build_plans MODEL ENVIRONMENT FLAVOR PRECISION: of PROFILES, unless they are there; tried once in a run.
declare -A TRIED=()
build_plans() {
  local name=build-$3-$1-$4 hindered profile text=() words=()
  if [[ ${TRIED[$name ${PROFILES[*]}]:-} ]] || has_plans "$1" "$3" "$4"; then return; fi
  TRIED[$name ${PROFILES[*]}]=yes
  rm -f "$OUT/$name.done"  # of fewer profiles
  if [[ $4 != fp32 ]]; then text=(--calibrate "$MODELS/$1.text"); fi
  if [[ $3 == tensorrt ]]; then text+=(--timing-cache "$WORK/timing.cache"); fi  # so that another try goes on
  for profile in "${PROFILES[@]}"; do words+=(--profile "$profile"); done
  hindered=$([[ $NO_GPU ]] || hindrance "$3")  # TensorRT for RTX builds without a GPU
  if [[ $hindered ]]; then
    skip "$name" "$hindered"
  else
    step "$name" "$(environment_python "$2")" -m tformer_deploy build "$MODELS/$1" --precision "$4" "${text[@]}" \
      --trt-flavor "$3" "${words[@]}" --json
  fi
}

# has_plans MODEL FLAVOR PRECISION: of all PROFILES.
has_plans() {
  local version='[0-9]' profile
  if [[ $2 == rtx ]]; then version=for-rtx; fi
  for profile in "${PROFILES[@]}"; do
    compgen -G "$MODELS/$1/trt/plans/*-tensorrt-$version*-$3/decoder_step-$profile.plan" > /dev/null || return 1
  done
}

# hindrance FLAVOR: why its plans cannot run on this host, if so.
hindrance() {
  if [[ $NO_GPU ]]; then
    printf '%s' "$NO_GPU"
  elif [[ -e $OUT/probe-$1.done ]] && ! worked "probe-$1"; then
    printf 'probe-%s failed: %s' "$1" "$(tail -n 1 "$OUT/probe-$1.err")"
  fi
}

# without_cpp FLAVOR: why the C++ runtime does not run its plans, if so.
without_cpp() {
  local major
  major=$(< "$CORE/cpp/tensorrt")
  if [[ $1 == rtx && $major != 11 ]]; then
    printf 'the C++ runtime was built with the headers of TensorRT %s, and TensorRT for RTX has those of 11' "$major"
  elif [[ -e $WORK/trt86 && $1 == tensorrt ]]; then
    printf "the kit's TensorRT 8.6.0 has bindings of 8.6.1, which its plans are stamped with"
  fi
}

# options FILE: its lines as words, into WORDS.
options() { mapfile -t WORDS < "$MODELS/$1"; }

# profiles MODEL: those that its plans are built for, smallest first, into PROFILES.
profiles() { mapfile -t PROFILES < <(grep -v '^--' "$MODELS/$1.build"); }

# reference MODEL: what its check compares with, into WORDS.
reference() {
  WORDS=(--reference "$MODELS/$1.reference")
  if [[ -e $MODELS/$1.tgt ]]; then WORDS+=(--tgt "$MODELS/$1.tgt"); fi
}

# bench_options STAGE MODEL: into WORDS; the trained one's text is translated too.
bench_options() {
  options "$2.$1"
  if [[ $2 == trained && $1 != steps ]]; then WORDS+=(--src "$MODELS/trained.text"); fi
}

# ONNX Runtime's CUDA provider on the graphs for TensorRT; its CUDA libraries are those of the host's torch.
stage_ort_cuda() {
  local what model libraries verb wrong=''
  local -a there
  find_gpu
  if [[ ! $INSTALLED && ! -e $WORK/ort-gpu ]]; then
    wrong=$(problem ort-gpu)
  elif [[ ! $INSTALLED ]] && install ort-gpu && ! worked install-ort-gpu; then
    wrong='onnxruntime-gpu is not installed: install-ort-gpu has not worked'
  fi
  libraries=$(on_host "$CORE/host.py" libraries 2> /dev/null || true)  # without torch there are none
  there=(env "LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$(environment_python ort-gpu)" -m tformer_deploy)
  for what in check steps batches beams; do
    for model in trained base; do
      if [[ $what == check ]]; then
        verb=check
        reference "$model"
      else
        verb=bench
        bench_options "$what" "$model"
      fi
      if [[ $wrong || $NO_GPU ]]; then
        skip "$what-ort-cuda-$model" "${wrong:-$NO_GPU}"
      else
        step "$what-ort-cuda-$model" "${there[@]}" "$verb" "$MODELS/$model" --backend ort --variant trt --device cuda \
          "${WORDS[@]}" --json
      fi
    done
  done
}

# The host's own Python, as it is outside of this script.
on_host() { timeout -k 5 60 env -u PYTHONNOUSERSITE "PYTHONPATH=$HOST_PATH" "$PYTHON" "$@"; }

stage_eager() {
  local code=0 reason wheel
  if ! command -v "$PYTHON" > /dev/null; then
    skip eager "there is no $PYTHON here: name one with torch in KIT_PYTHON"
    return
  fi
  reason=$(on_host "$CORE/eager.py" --why-not 2>&1) || code=$?
  if ((code)); then
    skip eager "$(tail -n 1 <<< "$reason")"
  else
    wheel=$(compgen -G "$CORE/own/*.whl")
    step eager env -u PYTHONNOUSERSITE "PYTHONPATH=$wheel${HOST_PATH:+:$HOST_PATH}" "$PYTHON" \
      "$CORE/eager.py" "$MODELS/base.points"
  fi
}
