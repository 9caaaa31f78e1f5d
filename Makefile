# Every target does its own set-up, in .venv and build/. `make help` lists them.
#
#   TORCH=torch==2.11.0     the torch to install into .venv
#   PYTHON=python3.12       the interpreter of .venv, when it is made
#   VENV=path               another environment instead of .venv; set up like .venv
#   CUDA_TORCH=torch==2.11.0   the torch to install into .venv-cuda, of the nvcc's major version
#   MAX_JOBS=n              compile at most n files at a time
#   REQUIRE_CPP_TESTS=1     fail where GoogleTest is missing, instead of testing without it

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
NPROC ?= 2
TRAIN_ARGS ?=
BENCH ?= all
BENCH_ARGS ?=
PYTEST_ARGS ?=
GPU_CHECK_ARGS ?=
PLANTED_ARGS ?=
FAULTS_ARGS ?=
PART ?= all
WHEELS_ARGS ?=
CUDA_VENV ?= .venv-cuda
PEERS_VENV ?= .venv-peers
ECOSYSTEM_VENV ?= .venv-ecosystem
REHEARSAL_VENV ?= .venv-rehearsal
CUDA_TORCH ?= torch==2.11.0
REQUIRE_CPP_TESTS ?=

JOBS := $(or $(MAX_JOBS),$(shell nproc))
BIN := $(abspath $(VENV))/bin
CMAKE = "$(BIN)/cmake" -S . -G Ninja -DCMAKE_MAKE_PROGRAM="$(BIN)/ninja" --no-warn-unused-cli \
  -DPython_EXECUTABLE="$(BIN)/python" -DFSDP_BUILD_TESTS=ON -DFSDP_WERROR=ON
# Tests that follow each other in a file share processes, so a worker takes neighbours.
PYTEST_WORKERS = -n $(JOBS) --dist worksteal
CTEST = "$(BIN)/ctest" --output-on-failure --no-tests=error --parallel $(JOBS)
CPP_FILES = $(shell find csrc tests/cpp tests/emulated_gpu -name '*.h' -o -name '*.cpp' -o -name '*.cu')
CUDA_BIN := $(abspath $(CUDA_VENV))/bin
PEERS_BIN := $(abspath $(PEERS_VENV))/bin
ECOSYSTEM_BIN := $(abspath $(ECOSYSTEM_VENV))/bin
REHEARSAL_BIN := $(abspath $(REHEARSAL_VENV))/bin

.PHONY: help
help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

# ---- Set-up --------------------------------------------------------------------------------------

# Each stamp in the environment adds to the one before: what builds, trains, tests and lints.
$(VENV)/.tools: pyproject.toml
	@echo "=== set-up: build tools into $(VENV)"
	test -x "$(BIN)/python" || "$(PYTHON)" -m venv "$(VENV)"
	"$(BIN)/pip" install --quiet "setuptools>=77" wheel cmake ninja
	touch "$@"

# A stamp $(1) contains the torch that was installed. Another torch, $(2), is installed over it.
if_another = $(if $(subst [$(2)],,[$(shell cat "$(1)" 2>/dev/null)]),FORCE)
.PHONY: FORCE

$(VENV)/.torch: $(VENV)/.tools $(call if_another,$(VENV)/.torch,$(TORCH))
	@echo "=== set-up: $(TORCH) into $(VENV)"
	"$(BIN)/pip" install --quiet "$(TORCH)"
	echo "$(TORCH)" > "$@"

# torch comes first, so that pip does not choose one of its own. The build comes before the install,
# which would hide its progress.
$(VENV)/.train: $(VENV)/.torch
	@echo "=== set-up: what the examples need into $(VENV)"
	FSDP_WERROR=1 "$(BIN)/python" setup.py --quiet build_ext --inplace
	"$(BIN)/pip" install --quiet --no-build-isolation --editable ".[examples]"
	touch "$@"

$(VENV)/.test: $(VENV)/.train
	@echo "=== set-up: test tools into $(VENV)"
	"$(BIN)/pip" install --quiet --no-build-isolation --editable ".[test]"
	touch "$@"

$(VENV)/.dev: $(VENV)/.test
	@echo "=== set-up: linters into $(VENV)"
	"$(BIN)/pip" install --quiet --no-build-isolation --editable ".[dev]"
	touch "$@"

# Ninja knows what has changed, so this always asks it. With nothing to do it takes seconds.
.PHONY: extension
extension: $(VENV)/.train  ## (re)build the extension in place
	FSDP_WERROR=1 "$(BIN)/python" setup.py --quiet build_ext --inplace

.PHONY: develop
develop: $(VENV)/.dev extension  ## set up .venv with all tools and (re)build the extension

# ---- Run -----------------------------------------------------------------------------------------

.PHONY: train
train: extension  ## train a GPT sharded over NPROC ranks (TRAIN_ARGS="--steps 20")
	OMP_NUM_THREADS=1 "$(BIN)/torchrun" --standalone --nproc-per-node $(NPROC) \
	  examples/train_gpt.py $(TRAIN_ARGS)

.PHONY: bench
bench: $(VENV)/.test extension  ## measure beside PyTorch's: all benchmarks, or BENCH=pack (BENCH_ARGS="--quick")
	"$(BIN)/python" -m bench $(BENCH) $(BENCH_ARGS)

.PHONY: bench-hosts
bench-hosts: extension  ## measure between two hosts, which are namespaces of this machine; needs root
	"$(BIN)/python" -m bench overlap --hosts 2 --rate 1gbit 4gbit 10gbit unlimited $(BENCH_ARGS)
	"$(BIN)/python" -m bench predict --hosts 2 --rate 4gbit $(BENCH_ARGS)
	"$(BIN)/python" -m bench tune --hosts 2 --rate 4gbit $(BENCH_ARGS)

# Two of the peers build themselves against the torch that is there, and with pkg_resources, which
# setuptools 82 has no more.
$(PEERS_VENV)/.ready: pyproject.toml $(call if_another,$(PEERS_VENV)/.ready,$(TORCH))
	test -x "$(PEERS_BIN)/python" || "$(PYTHON)" -m venv "$(PEERS_VENV)"
	"$(PEERS_BIN)/pip" install --quiet "setuptools>=77,<82" wheel cmake ninja
	"$(PEERS_BIN)/pip" install --quiet "$(TORCH)"
	"$(PEERS_BIN)/pip" install --quiet --no-build-isolation ".[peers]"
	echo "$(TORCH)" > "$@"

.PHONY: bench-peers
bench-peers: $(PEERS_VENV)/.ready  ## measure a step beside DeepSpeed, Megatron-FSDP and FairScale, too, in .venv-peers
	"$(PEERS_BIN)/pip" install --quiet --no-build-isolation --no-deps --force-reinstall .
	"$(PEERS_BIN)/python" -m bench step --ranks $(NPROC) --peers $(BENCH_ARGS)

.PHONY: docs-figures
docs-figures: extension  ## draw docs/figures anew, from steps that run (simulated links, two ranks)
	"$(BIN)/python" tools/docs_figures.py --out docs/figures

# ---- Test ----------------------------------------------------------------------------------------

# What `make test` leaves to `make test-all`.
MORE = 1, 3 and 4 ranks in most tests, long random programs, soak, fuzz, every benchmark, libraries that use FSDP, the sanitizers, the CUDA build, the emulated GPU

.PHONY: test
test:  ## run the C++ tests and pytest on 2 ranks, in 8 to 11 minutes on two cores
	@if tools/ensure_gtest.sh; then ran="the C++ tests, " not=""; \
	elif [ -n "$(REQUIRE_CPP_TESTS)" ]; then echo "FAILED: the C++ tests need GoogleTest"; exit 1; \
	else ran="" not="the C++ tests (GoogleTest is missing), "; fi; \
	$(MAKE) --no-print-directory $(VENV)/.test extension; \
	if [ -n "$$ran" ]; then $(MAKE) --no-print-directory test-cpp; fi; \
	$(MAKE) --no-print-directory test-python; \
	echo "make test ran $${ran}the Python tests. It did not run $${not}$(MORE): make test-all does."

.PHONY: test-all
test-all: test test-exhaustive test-ecosystem sanitize  ## run what make test runs, the exhaustive matrix, libraries, sanitizers
	@if command -v nvcc >/dev/null; then \
	  $(MAKE) --no-print-directory cuda-build rehearse rehearse-ecosystem; \
	  echo "make test-all ran everything."; \
	else echo "make test-all ran everything but the CUDA build and the emulated GPU: there is no nvcc on the PATH."; fi

.PHONY: test-python
test-python: $(VENV)/.test
	@echo "=== test: the Python tests"
	"$(BIN)/python" -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

.PHONY: test-exhaustive
test-exhaustive: $(VENV)/.test extension
	@echo "=== test: the exhaustive Python tests"
	"$(BIN)/python" -m pytest -m exhaustive $(PYTEST_WORKERS) $(PYTEST_ARGS)

# Both run with a small budget in test-exhaustive, too.
SOAK_STEPS ?= 3000
SOAK_SEED ?= 0
SOAK_SYSTEM ?= fsdp_ext
FUZZ_SECONDS ?= 3600
FUZZ_SEED ?=

.PHONY: soak
soak: $(VENV)/.test extension  ## train at random for SOAK_STEPS steps; memory and the like stay flat
	FSDP_EXT_SOAK_STEPS=$(SOAK_STEPS) FSDP_EXT_SOAK_SEED=$(SOAK_SEED) \
	  FSDP_EXT_SOAK_SYSTEM=$(SOAK_SYSTEM) \
	  "$(BIN)/python" -m pytest -s -m exhaustive tests/train/test_soak.py $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.test extension  ## train random models beside unsharded ones for FUZZ_SECONDS
	FSDP_EXT_FUZZ_SECONDS=$(FUZZ_SECONDS) FSDP_EXT_FUZZ_SEED=$(FUZZ_SEED) "$(BIN)/python" -m pytest -s -m exhaustive \
	  tests/train/test_fuzz.py $(PYTEST_ARGS)

# The libraries lie in an environment of their own, which sees .venv's packages as well: so .venv
# stays as users of torch alone have it, and torch is not installed twice.
PURELIB = import sysconfig; print(sysconfig.get_path("purelib"))
$(ECOSYSTEM_VENV)/.ready: $(VENV)/.test tests/ecosystem/requirements.txt
	@echo "=== set-up: libraries that train with FSDP into $(ECOSYSTEM_VENV)"
	test -x "$(ECOSYSTEM_BIN)/python" || "$(BIN)/python" -m venv "$(ECOSYSTEM_VENV)"
	echo "import site; site.addsitedir('$$("$(BIN)/python" -c '$(PURELIB)')')" \
	  > "$$("$(ECOSYSTEM_BIN)/python" -c '$(PURELIB)')/of_venv.pth"
	"$(ECOSYSTEM_BIN)/python" -m pip install --quiet --requirement tests/ecosystem/requirements.txt
	touch "$@"

.PHONY: test-ecosystem
test-ecosystem: $(ECOSYSTEM_VENV)/.ready extension  ## train with transformers, accelerate, Lightning and others
	@echo "=== test: libraries that train with FSDP"
	@# Not in parallel: the tests share one pair of ranks, which imports the libraries once.
	"$(ECOSYSTEM_BIN)/python" -m pytest tests/ecosystem $(PYTEST_ARGS)

# build/cpp is a link to the extension's build for CPUs, if there is one, which has the same core.
.PHONY: test-cpp
test-cpp: extension  ## run only the C++ tests, and check that the packer is vectorised
	@echo "=== test: the C++ tests"
	$(CMAKE) -B "$$(realpath -m build/cpp)"
	"$(BIN)/cmake" --build build/cpp --parallel $(JOBS)
	$(CTEST) --test-dir build/cpp

.PHONY: check-vectorised
check-vectorised: extension  ## show which of the packer's loops the compiler vectorised
	$(CMAKE) -B "$$(realpath -m build/cpp)"
	"$(BIN)/cmake" --build build/cpp --parallel $(JOBS) --target fsdp_core
	"$(BIN)/python" tools/check_vectorised.py build/cpp csrc/pack/pack_host.cpp \
		csrc/comm/shared_memory/rank_order_sum.cpp

.PHONY: sanitize sanitize-thread sanitize-address
sanitize: sanitize-thread sanitize-address  ## run the C++ tests under the sanitizers

sanitize-thread sanitize-address: sanitize-%: $(VENV)/.tools
	@tools/ensure_gtest.sh || { echo "FAILED: the sanitizers run the C++ tests"; exit 1; }
	@echo "=== test: the C++ tests under the $* sanitizer"
	$(CMAKE) -B build/sanitize-$* -DFSDP_SANITIZE=$(if $(filter thread,$*),thread,address,undefined)
	"$(BIN)/cmake" --build build/sanitize-$* --parallel $(JOBS)
	@# Some kernels randomise addresses more than ThreadSanitizer can take.
	$(if $(filter thread,$*),$(shell setarch -R true 2>/dev/null && echo setarch -R)) env \
	TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 \
	ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1 \
	UBSAN_OPTIONS=print_stacktrace=1 \
	$(CTEST) --test-dir build/sanitize-$*

.PHONY: plant-faults
plant-faults: $(VENV)/.test  ## plant faults of logic in a copy; the tests see them (FAULTS_ARGS="--only slot --jobs 2")
	@tools/ensure_gtest.sh || { echo "FAILED: half of the faults need the C++ tests"; exit 1; }
	PYTHONPATH=tests "$(BIN)/python" tools/plant_faults.py $(FAULTS_ARGS)

# ---- CUDA ----------------------------------------------------------------------------------------

$(CUDA_VENV)/.ready: pyproject.toml $(call if_another,$(CUDA_VENV)/.ready,$(CUDA_TORCH))
	test -x "$(CUDA_BIN)/python" || "$(PYTHON)" -m venv "$(CUDA_VENV)"
	"$(CUDA_BIN)/pip" install --quiet "setuptools>=77" wheel cmake ninja \
	  nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm
	"$(CUDA_BIN)/pip" install --quiet "$(CUDA_TORCH)"
	echo "$(CUDA_TORCH)" > "$@"

# Installed, not in place: this directory's own build, for the CPU, stays as it is.
.PHONY: cuda-install
cuda-install: $(CUDA_VENV)/.ready
	@command -v nvcc >/dev/null || { echo "FAILED: the CUDA build expects nvcc on the PATH"; exit 1; }
	"$(CUDA_BIN)/pip" uninstall --quiet --yes fsdp_ext 2>/dev/null || true
	FORCE_CUDA=1 "$(CUDA_BIN)/pip" install --quiet --no-build-isolation ".[test,examples]"

# Tests of what differs between builds and versions of torch, beside those that `make rehearse` runs.
CUDA_TESTS = bad_arguments buckets compile composed errors extension_methods freed_parameters \
  fsdp1_bad_arguments fsdp1_flat_parameters fsdp1_state_dict_types fsdp1_summon fsdp1_training \
  function_transforms hot_path hybrid_sharding model_lifetime packer parts_of_units profile \
  shared_memory tensor_extensions tensor_parallel tools_bad_arguments torch_profiler \
  torch_surface trained_parameters unused_parameters verify

.PHONY: cuda-build
cuda-build: cuda-install  ## make the CUDA build in .venv-cuda, look into it, run tests on the CPU
	cd "$(CUDA_VENV)" && "$(CUDA_BIN)/python" -m fsdp_ext
	cd "$(CUDA_VENV)" && "$(CUDA_BIN)/python" ../tools/check_cuda_binary.py
	@if tools/ensure_gtest.sh; then $(MAKE) --no-print-directory translated-kernels; else \
	  echo "FAILED: the tests of the compiled kernels need GoogleTest"; exit 1; fi
	"$(CUDA_BIN)/pytest" $(PYTEST_WORKERS) $(CUDA_TESTS:%=tests/*/test_%.py) $(PYTEST_ARGS)

# nvcc's PTX as C++, under AddressSanitizer: tests/cpp/translated.
.PHONY: translated-kernels
translated-kernels: $(CUDA_VENV)/.ready  ## run the kernels that nvcc compiled, without a GPU
	"$(CUDA_BIN)/cmake" -S . -B build/translated -G Ninja \
	  -DCMAKE_MAKE_PROGRAM="$(CUDA_BIN)/ninja" -DPython_EXECUTABLE="$(CUDA_BIN)/python" \
	  -DFSDP_TRANSLATED_KERNELS=ON -DFSDP_WERROR=ON
	"$(CUDA_BIN)/cmake" --build build/translated --parallel $(JOBS)
	"$(CUDA_BIN)/ctest" --test-dir build/translated --output-on-failure --no-tests=error

# An environment that sees the packages of .venv-cuda, whose own files stay as they are.
$(REHEARSAL_VENV)/.ready: tests/emulated_gpu/make_environment.py $(CUDA_VENV)/.ready
	"$(CUDA_BIN)/python" tests/emulated_gpu/make_environment.py "$(CUDA_BIN)/python" "$(REHEARSAL_VENV)"
	touch "$@"

TORCH_DIRECTORY = import importlib.util; print(importlib.util.find_spec("torch").submodule_search_locations[0])
.PHONY: emulated-gpu
emulated-gpu: $(REHEARSAL_VENV)/.ready
	@command -v nvcc >/dev/null || { echo "FAILED: the emulated GPU expects nvcc on the PATH"; exit 1; }
	"$(CUDA_BIN)/cmake" -S . -B build/emulated_gpu -G Ninja --no-warn-unused-cli --log-level=NOTICE \
	  -DCMAKE_MAKE_PROGRAM="$(CUDA_BIN)/ninja" -DPython_EXECUTABLE="$(CUDA_BIN)/python" \
	  -DFSDP_EMULATED_GPU="$$("$(CUDA_BIN)/python" -c '$(TORCH_DIRECTORY)')" -DFSDP_WERROR=ON
	"$(CUDA_BIN)/cmake" --build build/emulated_gpu --parallel $(JOBS) --target emulated_gpu

# -P and PYTHONPATH: the installed CUDA build is imported, not this directory's.
REHEARSED = LD_AUDIT="$(abspath build/emulated_gpu/tests/emulated_gpu/lib/libredirect_libraries.so)" \
  FSDP_EXT_TEST_NEEDS_GPU=1 OMP_NUM_THREADS=1 PYTHONPATH=tests "$(REHEARSAL_BIN)/python" -P -m pytest
.PHONY: rehearse
rehearse: emulated-gpu
	@echo "=== test: the GPU tests, over an emulated GPU"
	$(REHEARSED) tests/gpu -rs $(PYTEST_ARGS)
	$(REHEARSED) $(PYTEST_WORKERS) tests/emulated_gpu -rs $(PYTEST_ARGS)
	EMULATED_GPU_DEVICES=2 $(REHEARSED) tests/gpu/test_gpu_streams.py tests/gpu/test_gpu_checkpoint.py -k another_gpu $(PYTEST_ARGS)
	EMULATED_GPU_DEVICES=4 $(REHEARSED) tests/gpu/test_gpu_several.py -k 'replicas or auto' $(PYTEST_ARGS)

.PHONY: rehearse-ecosystem
rehearse-ecosystem: emulated-gpu $(ECOSYSTEM_VENV)/.ready
	@echo "=== test: libraries that train with FSDP, over an emulated GPU"
	FSDP_EXT_TEST_PACKAGES="$$("$(ECOSYSTEM_BIN)/python" -c '$(PURELIB)')" \
	  $(REHEARSED) tests/ecosystem/test_on_a_gpu.py $(PYTEST_ARGS)

.PHONY: rehearsal
rehearsal: cuda-install  ## run the GPU tests on the CUDA build over an emulated GPU
	$(MAKE) --no-print-directory rehearse

.PHONY: planted-races
planted-races: emulated-gpu  ## plant faults of ordering in a copy; tests over an emulated GPU see them (an hour)
	PYTHONPATH=tests "$(CUDA_BIN)/python" tests/emulated_gpu/planted_faults.py $(PLANTED_ARGS)

# It uses what is installed: no environment of its own, no network.
.PHONY: gpu-check
gpu-check:  ## on a machine with one GPU, in calls of nine minutes: PART=all, tests, bench, more; AFTER=results of earlier calls
	"$(PYTHON)" tools/gpu_check.py --part $(PART) $(AFTER:%=--after %) $(GPU_CHECK_ARGS)

# Wheels for users without a compiler: WHEELS_ARGS="--python 3.12 --torch 2.11 --kind cu130".
.PHONY: wheels
wheels:  ## build wheels for each supported torch and Python, CPU and CUDA, and try each
	"$(PYTHON)" tools/make_wheels.py $(WHEELS_ARGS)

# ---- Style ---------------------------------------------------------------------------------------

.PHONY: lint
lint: $(VENV)/.dev  ## ruff, mypy --strict, clang-format
	@status=0; set -x; \
	"$(BIN)/ruff" check . || status=1; \
	"$(BIN)/ruff" format --check . || status=1; \
	"$(BIN)/mypy" --strict fsdp_ext || status=1; \
	"$(BIN)/clang-format" --dry-run -Werror $(CPP_FILES) || status=1; \
	exit $$status

.PHONY: format
format: $(VENV)/.dev  ## rewrite the sources as lint wants them
	"$(BIN)/ruff" check --fix --exit-zero .
	"$(BIN)/ruff" format .
	"$(BIN)/clang-format" -i $(CPP_FILES)

.PHONY: clean
clean:  ## remove everything that was built, .venv included
	rm -rf build dist *.egg-info .venv .venv-cuda .venv-peers .venv-ecosystem .venv-rehearsal .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -f fsdp_ext/*.so fsdp_ext/_build_info.py
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
