# Everything starts from a bare python3 (3.11 or newer) with pip: `make run`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_SECONDS ?= 1200

.PHONY: help setup run test test-gpu sanitize-gpu lint format docs docs-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## create the virtual environment and install the package with its tools

# Installed again only when what it would install has changed.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]' --constraint constraints.txt
	touch $(STAMP)

run: $(STAMP) ## read a long document on this machine and answer questions about it
	$(BIN)/cairn demo

# One thread a worker: two workers that both use every core wait for each other. Each takes a half of
# the files, with the servers and engines that they share, and then what the other has left. Bytecode
# is kept whatever the environment says: a hundred processes start.
test: $(STAMP) ## the CPU suite: about 12 minutes on two cores, no GPU, nothing marked slow
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist=worksteal --timeout=300 --session-timeout=$(TEST_SECONDS) -m 'not slow and not gpu'

# These use the python3 at hand, not the virtual environment: a GPU machine brings its own torch and
# triton. They need pytest, hypothesis, click, rich, safetensors, transformers, Pillow, msgspec and llguidance
# beside them; the package is taken from this folder. The server's tests, which need more, have no GPU
# part. Compiling kernels takes most of the time and happens on the CPU: with pytest-xdist several
# processes share the GPU.
GPU_TESTS := tests/ops tests/runner tests/failures $(addprefix tests/engine/test_, \
	goldens.py invariance.py selection.py overlap.py kv_cache_dtype.py dsa_gpu.py dsv4_gpu.py dense.py \
	draft_head.py speculation.py trees.py images_gpu.py qwen35_gpu.py records_gpu.py host_tier.py \
	warmup.py window_pages.py) tests/bench/test_timing.py \
	tests/models/test_quantised.py tests/train
GPU_WORKERS ?= 12
GPU_PARALLEL = $$(python3 -c 'import xdist' 2>/dev/null && echo --numprocesses=$(GPU_WORKERS) --dist=worksteal)

test-gpu: ## the GPU suite, with the torch and triton that `python3` already has
	OMP_NUM_THREADS=1 python3 -m pytest $(GPU_PARALLEL) -m gpu $(GPU_TESTS)

# Memory is not pooled, so that every overrun of a tensor is one of its allocation. Kernels are
# compiled once into Triton's cache: run test-gpu first, what compute-sanitizer runs is slow enough.
SANITIZE = PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) $(NOT_OURS) --error-exitcode=1 --print-limit=20
SANITIZER ?= compute-sanitizer
# at::native: PyTorch's own kernels.
NOT_OURS := --kernel-name-exclude kns=native
SANITIZED := -m gpu tests/ops/test_every_op.py -k

sanitize-gpu: ## memory errors and races in the kernels, by CUDA's compute-sanitizer
	$(SANITIZE) --tool=memcheck python3 -m pytest $(SANITIZED) agrees_with_definition
	$(SANITIZE) --tool=racecheck python3 -m pytest $(SANITIZED) 'landmark_attention or select_pages'

lint: $(STAMP) ## ruff, mypy and the import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP) ## generate the pages of docs/ that are made from options, records, tests and docstrings
	$(BIN)/python -m tools.docs
	$(BIN)/cairn ops --docs docs/ops $(addprefix --measured=,$(sort $(wildcard benchmarks/results/*-ops.json)))

docs-check: $(STAMP) ## generated pages are current, and every command and snippet of the documentation works
	$(BIN)/python -m tools.docs --check
	$(BIN)/python -m tools.docs.snippets

clean: ## remove what was built, the virtual environment included
	find cairn tests -name "*.nb[ic]" -delete
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
