# make demo and make test are all that a fresh machine needs: Python 3.11 (or newer) and make.
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help install demo test lint check bench clean

help:  ## Say what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# torch first: where none is installed, what needs it would pull the CUDA build, gigabytes of it
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -e '.[run,dev]'
	@touch $@

install: .venv/installed  ## Make .venv with everything that running and testing needs

demo: install  ## Train a small model to add, by SFT and then GRPO (about 3 minutes)
	@rm -rf runs/demo_sft runs/demo
	@$(BIN)/python -m rlgraph.runtime.demo
	@$(BIN)/rlgraph run demo_sft --run-dir runs/demo_sft
	@$(BIN)/rlgraph run demo --run-dir runs/demo

test: install  ## Lint, types, and all tests
	@$(MAKE) --no-print-directory lint
	$(BIN)/pytest -q

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint  ## Lint, types, and the compiler's tests: under a minute
	$(BIN)/pytest -q tests/compiler

bench: demo  ## Every benchmark, with its ratio (about 15 minutes)
	@for file in $(filter-out %_ops.py %/padded.py,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean:  ## Remove what make made
	rm -rf .venv build dist runs demo_files *.egg-info
