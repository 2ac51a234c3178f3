# Two commands matter: `make demo` and `make test`. Each creates what it needs on a fresh machine.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PEERS := transformers==5.24.0 fla-core==0.6.0 flash-linear-attention==0.6.0 triton==3.6.0
JOBS ?= 2

.PHONY: demo test lint types contracts unit kernels wheel format clean help

help:
	@echo "make demo     train a small KDA language model on this machine and sample from it"
	@echo "make test     everything CI runs: lint, types, contracts, tests, kernel compilation, wheel"
	@echo "make format   apply the formatter"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(PIP) "$(TORCH)" numpy
	$(PIP) -e ".[cli]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -e ".[dev,cute]" "$(TORCH)"
	$(PIP) $(PEERS) "$(TORCH)"
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/kernel-fun demo

test: lint types contracts unit kernels wheel

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/render.py --check

types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/pyright --pythonpath $(BIN)/python -p tests

contracts: $(VENV)/.dev
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests --ignore tests/_cute --ignore tests/kda/_kernels/sm90

kernels: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) tests/_cute tests/kda/_kernels/sm90

wheel: $(VENV)/.dev
	rm -rf dist build/wheel-env
	$(BIN)/python -m build --no-isolation --wheel --outdir dist . >/dev/null
	$(PYTHON) -m venv build/wheel-env
	build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dist/*.whl
	cd build && export PYTHONPATH=$$(echo $(abspath $(VENV))/lib/python3*/site-packages) && \
		wheel-env/bin/python -c "import kernel_fun, sys; assert 'wheel-env' in kernel_fun.__file__, kernel_fun.__file__; assert 'torch' not in sys.modules" && \
		wheel-env/bin/kernel-fun info >/dev/null && \
		wheel-env/bin/kernel-fun bench --list >/dev/null

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
