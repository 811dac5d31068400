#!/usr/bin/env bash
# The stages of the GPU kit: run.sh reads this where it has unpacked it, and says what its words mean.

stage_host() {
  step host env -u PYTHONNOUSERSITE "PYTHONPATH=$HOST_PATH" "$BASE" "$CORE/host.py" describe \
    "$(command -v "$PYTHON" || printf '%s' "$PYTHON")"
}

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
  step weights "$(any_python)" "$CORE/seeded.py" "$CORE/models/base"
}

# options FILE: its lines as words, into WORDS.
options() { mapfile -t WORDS < "$CORE/models/$1"; }

# Whether this host runs plans at all: a small one, before minutes are spent on others.
stage_probe() {
  local env flavor model
  find_gpu
  # shellcheck disable=SC2016
  local code='"$1" -m tformer_deploy build "$2" --precision fp32 --profile "$3" --trt-flavor "$4" --json
    head -n 1 "$2.text" | "$1" -m tformer_deploy translate "$2" --backend trt:fp32 --max-tokens 4 >&2'
  while read -r env flavor; do
    if [[ $NO_GPU ]]; then
      skip "probe-$flavor" "$NO_GPU"
      continue
    fi
    model=$WORK/probe/$flavor
    mkdir -p "$WORK/probe"
    rm -rf "$model"
    cp -r "$CORE/models/trained" "$model"
    cp "$CORE/models/trained.text" "$model.text"
    options trained.build
    step "probe-$flavor" bash -euo pipefail -c "$code" - "$(environment_python "$env")" "$model" "${WORDS[1]}" "$flavor"
  done < <(flavors)
}

# hindrance FLAVOR: why its plans cannot run on this host, if so.
hindrance() {
  if [[ $NO_GPU ]]; then
    printf '%s' "$NO_GPU"
  elif [[ -e $OUT/probe-$1.done ]] && ! worked "probe-$1"; then
    printf 'probe-%s failed: %s' "$1" "$(tail -n 1 "$OUT/probe-$1.err")"
  fi
}

stage_build_trained() { build_plans trained; }

stage_build_base() { build_plans base; }

stage_build() {
  stage_build_trained
  stage_build_base
}

build_plans() {
  local env flavor model=$1 precision name text hindered
  find_gpu
  while read -r env flavor; do
    hindered=$([[ $NO_GPU ]] || hindrance "$flavor")
    for precision in "${PRECISIONS[@]}"; do
      name=build-$flavor-$model-$precision
      options "$model.build"
      text=()
      if [[ $precision != fp32 ]]; then text=(--calibrate "$CORE/models/$model.text"); fi
      if [[ $hindered ]]; then
        skip "$name" "$hindered"
      else
        step "$name" "$(environment_python "$env")" -m tformer_deploy build "$CORE/models/$model" \
          --precision "$precision" "${text[@]}" --trt-flavor "$flavor" "${WORDS[@]}" --json
      fi
    done
  done < <(flavors)
}

# has_plans MODEL FLAVOR PRECISION
has_plans() {
  local version='[0-9]'
  if [[ $2 == rtx ]]; then version=for-rtx; fi
  compgen -G "$CORE/models/$1/trt/plans/*-tensorrt-$version*-$3/plans.json" > /dev/null
}

# on_plans NAME FLAVOR MODEL PRECISION COMMAND...: a step that runs these plans.
on_plans() {
  local hindered
  hindered=$(hindrance "$2")
  if [[ ! $hindered ]] && ! has_plans "$3" "$2" "$4"; then hindered='there are no plans: run the stage build'; fi
  if [[ $hindered ]]; then
    skip "$1" "$hindered"
  else
    step "$1" "${@:5}"
  fi
}

stage_check_trained() { check_plans trained; }

stage_check_base() { check_plans base; }

stage_check() {
  stage_check_trained
  stage_check_base
}

check_plans() {
  local env flavor precision model=$1
  find_gpu
  reference "$model"
  while read -r env flavor; do
    for precision in "${PRECISIONS[@]}"; do
      on_plans "check-$flavor-$model-$precision" "$flavor" "$model" "$precision" "$(environment_python "$env")" \
        -m tformer_deploy check "$CORE/models/$model" --backend "trt:$precision" "${WORDS[@]}" --json
    done
  done < <(flavors)
}

# reference MODEL: what its check compares with, into WORDS.
reference() {
  WORDS=(--reference "$CORE/models/$1.reference")
  if [[ -e $CORE/models/$1.tgt ]]; then WORDS+=(--tgt "$CORE/models/$1.tgt"); fi
}

# The C++ runtime on the same plans, where the kit has it: its tokens beside those of the Python package.
stage_cpp() {
  local env flavor model precision name wrong
  find_gpu
  while read -r env flavor; do
    for name in cpp-"$flavor"-{trained,base}; do
      model=${name##*-}
      options "$model.build"
      for precision in "${PRECISIONS[@]}"; do
        wrong=$(without_cpp "$flavor")
        if [[ $wrong ]]; then
          skip "$name-$precision" "$wrong"
        else
          on_plans "$name-$precision" "$flavor" "$model" "$precision" "$(environment_python "$env")" "$CORE/in_cpp.py" \
            --cpp "$CORE/cpp" --bundle "$CORE/models/$model" --text "$CORE/models/$model.text" \
            --precision "$precision" --flavor "$flavor" "${WORDS[@]}"
        fi
      done
    done
  done < <(flavors)
}

# without_cpp FLAVOR: why the C++ runtime does not run its plans, if so.
without_cpp() {
  local major
  if [[ ! -e $CORE/cpp/tensorrt ]]; then
    printf 'the C++ runtime is not in the kit: make it with TensorRT_ROOT'
    return
  fi
  major=$(< "$CORE/cpp/tensorrt")
  if [[ $1 == rtx && $major != 11 ]]; then
    printf 'the C++ runtime was built with the headers of TensorRT %s, and TensorRT for RTX has those of 11' "$major"
  elif [[ -e $WORK/trt86 && $1 == tensorrt ]]; then
    printf "the kit's TensorRT 8.6.0 has bindings of 8.6.1, which its plans are stamped with"
  fi
}

stage_bench() {
  local env flavor model precision
  find_gpu
  while read -r env flavor; do
    for model in base trained; do
      bench_options "$model"
      for precision in "${PRECISIONS[@]}"; do
        on_plans "bench-$flavor-$model-$precision" "$flavor" "$model" "$precision" "$(environment_python "$env")" \
          -m tformer_deploy bench "$CORE/models/$model" --backend "trt:$precision" "${WORDS[@]}" --json
      done
    done
  done < <(flavors)
}

# bench_options MODEL: into WORDS; the trained one's text is translated too.
bench_options() {
  options "$1.bench"
  if [[ $1 == trained ]]; then WORDS+=(--src "$CORE/models/trained.text"); fi
}

# ONNX Runtime's CUDA provider on the graphs for TensorRT; its CUDA libraries are those of the host's torch.
stage_ort_cuda() {
  local model libraries name
  local -a there
  find_gpu
  libraries=$(on_host "$CORE/host.py" libraries 2> /dev/null || true)  # without torch there are none
  there=(env "LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" "$(environment_python ort-gpu)" -m tformer_deploy)
  for name in {check,bench}-ort-cuda-{trained,base}; do
    model=${name##*-}
    if [[ ! $INSTALLED && ! -e $WORK/ort-gpu ]]; then
      skip "$name" 'onnxruntime-gpu is not in the kit, or not here: make the kit --with ort-gpu'
    elif [[ ! $INSTALLED ]] && ! worked install-ort-gpu; then
      skip "$name" 'onnxruntime-gpu is not installed: run the stage install'
    elif [[ $NO_GPU ]]; then
      skip "$name" "$NO_GPU"
    elif [[ $name == check-* ]]; then
      reference "$model"
      step "$name" "${there[@]}" check "$CORE/models/$model" --backend ort --variant trt --device cuda \
        "${WORDS[@]}" --json
    else
      bench_options "$model"
      step "$name" "${there[@]}" bench "$CORE/models/$model" --backend ort --variant trt --device cuda "${WORDS[@]}" --json
    fi
  done
}

# The host's own Python, as it is outside of this script.
on_host() { env -u PYTHONNOUSERSITE "PYTHONPATH=$HOST_PATH" "$PYTHON" "$@"; }

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
      "$CORE/eager.py" "$CORE/models/base.points"
  fi
}
