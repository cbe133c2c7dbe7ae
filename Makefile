# make demo and make test are all that a fresh machine needs: Python 3.11 (or newer) and make.
PYTHON ?= python3
BIN := .venv/bin
.DEFAULT_GOAL := help

.PHONY: help install demo test sglang lint check bench browser pictures clean

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
	$(BIN)/pytest -q -n 2 tests/compiler
	$(BIN)/pytest -q --ignore tests/compiler
	@$(MAKE) --no-print-directory sglang

# SGLang without a GPU wants an environment of its own; what a CUDA build would bring lies in runtime/serve/sglang/cpu
SGLANG := runtime/serve/sglang/cpu
.sglang/installed: $(SGLANG)/requirements.txt pyproject.toml
	$(PYTHON) -m venv .sglang
	.sglang/bin/pip install -q --disable-pip-version-check --no-deps -r $(SGLANG)/requirements.txt
	.sglang/bin/pip install -q --disable-pip-version-check -e '.[run]' hypothesis pytest-timeout
	@touch $@

sglang: .sglang/installed  ## Make .sglang with a real SGLang for the CPU, and run its tests (about 8 minutes)
	PYTHONPATH=$(SGLANG) .sglang/bin/python -m pytest -q tests/sglang

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint  ## Lint, types, and the compiler's tests: about a minute
	$(BIN)/pytest -q -n 2 tests/compiler

bench: demo .sglang/installed  ## Every benchmark, with its ratio (about 15 minutes)
	@for file in $(filter-out %_ops.py %/padded.py benchmarks/sglang_%,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done
	@for file in $(filter-out %_model.py,$(wildcard benchmarks/sglang_*.py)); do echo "== $$file"; PYTHONPATH=$(SGLANG) .sglang/bin/python $$file || exit 1; done

MERMAID := 11.17.2
browser:  ## Install what the tests of pages and pictures use: on Debian, as root; else they are skipped
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver \
	  fonts-dejavu-core graphviz $$(command -v npm > /dev/null || echo npm) > /dev/null
	cd .venv && npm pack --silent mermaid@$(MERMAID) > /dev/null
	cd .venv && tar xzf mermaid-$(MERMAID).tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-$(MERMAID).tgz

SHOT := chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,1180
pictures: demo  ## Make the pictures in docs/pictures anew (graphviz, chromium: make browser)
	mkdir -p build docs/pictures
	$(BIN)/rlgraph plan grpo --devices 8 -o docs/pictures/grpo.svg
	$(BIN)/rlgraph view grpo --cluster h100-8 -o build/grpo.html
	$(BIN)/rlgraph view runs/demo -o build/demo.html
	$(SHOT) --screenshot=docs/pictures/plan.png 'file://$(CURDIR)/build/grpo.html#plan'
	$(SHOT) --screenshot=docs/pictures/demo.png 'file://$(CURDIR)/build/demo.html#run'
	$(SHOT) --screenshot=docs/pictures/samples.png 'file://$(CURDIR)/build/demo.html#samples'

clean:  ## Remove what make made
	rm -rf .venv .sglang build dist runs demo_files demo_tool_files *.egg-info
