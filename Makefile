# Everything starts from a bare python3 (3.11 or newer) with pip: `make run`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_SECONDS ?= 600

.PHONY: help setup run test test-gpu lint format clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP) ## create the virtual environment and install the package with its tools

# Installed again only when what it would install has changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $(STAMP)

run: $(STAMP) ## read a long document on this machine and answer questions about it
	$(BIN)/cairn demo

# One thread a worker: two workers that both use every core wait for each other.
test: $(STAMP) ## the CPU suite: at most ten minutes, no GPU, nothing marked slow
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --timeout=300 --session-timeout=$(TEST_SECONDS) -m 'not slow and not gpu'

# Uses the python3 at hand, not the virtual environment: a GPU machine brings its own torch and triton.
# It needs pytest, hypothesis, click, rich, safetensors, transformers, msgspec and llguidance beside
# them; the package is taken from this folder. The server's tests, which need more, have no GPU part.
test-gpu: ## the GPU suite, with the torch and triton that `python3` already has
	python3 -m pytest -m gpu tests/ops tests/runner tests/engine/test_goldens.py

lint: $(STAMP) ## ruff, mypy and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what was built, the virtual environment included
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
