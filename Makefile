# Everything runs in .venv, which the first target that needs it sets up: the tools, then the package with its extension.
#   make train [RANKS=2] [STEPS=300] [RESUME=1] [RESTARTS=3] [ARGS='--dtype fp16 ...']
#   make test | test-slow | test-install | bench | lint | gpu-check | clean

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A machine without a GPU needs one known version and not the newest that its driver could run.
TORCH ?= $(if $(shell command -v nvidia-smi),torch>=2.10,torch==2.13.0)

RANKS ?= 2
RESTARTS ?= 0
# the cores are shared out, one thread at least
THREADS := $(shell n=$$(( $$(nproc) / $(RANKS) )); echo $$(( n > 0 ? n : 1 )))

CXX_SOURCES := $(shell find csrc -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: train test test-slow test-install bench lint gpu-check clean

# Restarted ranks must not find the addresses of the dead ones, hence a store of its own for every attempt.
train: $(VENV)/.built
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
	$(BIN)/torchrun --standalone --nproc-per-node=$(RANKS) --max-restarts=$(RESTARTS) examples/train_gpt.py \
	$(if $(STEPS),--steps $(STEPS)) $(if $(filter-out 0,$(RESUME)),--resume) $(ARGS)

test: $(VENV)/.built
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(VENV)/.clients
	$(BIN)/python -m pytest -m slow $(ARGS)

test-install: $(VENV)/.built
	$(BIN)/python tests/install_matrix.py $(ARGS)

bench: $(VENV)/.built
	mkdir -p runs/bench
	$(BIN)/python -m zero1_cuda bench --json runs/bench/kernels.json $(ARGS)
	$(BIN)/python bench/collectives.py --json runs/bench/collectives.json

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict zero1_cuda
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)

# Builds by itself, in place, so it also runs where nothing can be downloaded: with any python3 that has torch.
gpu-check:
	@python=$(BIN)/python; \
	if [ ! -x $$python ]; then \
		if $(PYTHON) -c 'import torch, setuptools' 2>/dev/null; then python=$(PYTHON); else $(MAKE) $(VENV)/.tools; fi; \
	fi; \
	$$python bench/gpu_check.py $(ARGS)

clean:
	rm -rf build dist *.egg-info zero1_cuda/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)/.built

# torch and the build tools come first: the package is built against the torch that is there, without isolation.
$(VENV)/.tools:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install '$(TORCH)' setuptools wheel ninja pybind11 tqdm pytest
	touch $@

$(VENV)/.built: $(VENV)/.tools pyproject.toml setup.py $(CXX_SOURCES)
	$(BIN)/python -m pip install --no-build-isolation -e '.[test,lint]'
	touch $@

# what the tests of real clients train with; a test whose client is missing is skipped
$(VENV)/.clients: $(VENV)/.built
	$(BIN)/python -m pip install --no-build-isolation -e '.[clients]'
	touch $@
