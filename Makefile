# make demo and make test are all that a fresh machine needs: Python 3.11 (or newer) and make.
PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE  # where it is set, each process would compile all that it imports
.DEFAULT_GOAL := help

.PHONY: help install demo demo_smollm test nightly sglang peers newest cuda cuda-site cuda-wheels lint check lock lock-check sbom bench browser docs pictures clean

help:  ## Say what there is
	@grep -E '^[a-z_-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# What is installed has the hashes of requirements/, but for torch and what it brings: its builds differ from
# index to index. --no-deps: whatever needs torch would pull the CUDA build, gigabytes of it.
PIP_INSTALL = -m pip install -q --disable-pip-version-check
PINNED = $(PIP_INSTALL) --no-deps --require-hashes -r requirements
OWN = $(PIP_INSTALL) --no-deps --no-build-isolation -e .
.venv/installed: pyproject.toml requirements/dev.txt requirements/torch.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python $(PINNED)/build.txt
	$(BIN)/python $(OWN)
	$(BIN)/python $(PINNED)/dev.txt
	$(BIN)/python $(PIP_INSTALL) -r requirements/torch.txt
	@touch $@

install: .venv/installed  ## Make .venv with everything that running and testing needs

demo: install  ## Train a small model to add, by SFT and then GRPO (about 3 minutes)
	@rm -rf runs/demo_sft runs/demo
	@$(BIN)/python -m rlgraph.runtime.demo
	@$(BIN)/rlgraph run demo_sft --run-dir runs/demo_sft
	@$(BIN)/rlgraph run demo --run-dir runs/demo

demo_smollm: install  ## Train a real model, SmolLM2-135M-Instruct, on sums asked in words (93 MB are downloaded first)
	@$(BIN)/rlgraph demo smollm

# one thread each, as two workers share two cores; the tests of a file share what they make, and stay on one
SLOWEST = --durations=25 --durations-min=1
TWO = -q -n 2 --dist loadfile --no-loadscope-reorder $(SLOWEST)
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest $(TWO)
# AGAIN=1, for CI: what failed runs once more, with nothing beside it and however late, and what fails twice has failed
ALONE = -n 0 --last-failed --last-failed-no-failures none --until inf
again = $(1) || { [ "$(AGAIN)" ] && $(1) $(ALONE) && echo 'these tests failed and passed alone: mend them'; }
# SGLang's tests run beside the others, on one worker, so that no core waits for the last file; what they print comes last
SGLANG_TEXT := build/sglang-tests.txt
# ALL=1, for CI: the slow ones too, which take two seconds and more each: two thirds of the time
DAY = $(if $(ALL),,-m "not nightly and not slow")
test: install .sglang/installed  ## Lint, types, and tests within 10 minutes; with ALL=1 all but the nightly ones
	@$(MAKE) --no-print-directory lint
	@mkdir -p $(dir $(SGLANG_TEXT))
	{ $(call again,$(SGLANG_PYTEST) -n 1 $(DAY)); } > $(SGLANG_TEXT) 2>&1 & beside=$$!; \
	{ $(call again,$(PYTEST) $(DAY)); }; first=$$?; \
	wait $$beside; second=$$?; cat $(SGLANG_TEXT); \
	[ $$first = 0 ] && [ $$second = 0 ]

# Properties are tried on more examples, too. What MINUTES don't suffice for is named at the end; a fifth is SGLang's.
MINUTES ?= 60
NIGHTLY = -m "nightly or hypothesis" --hypothesis-profile nightly --until
nightly: install .sglang/installed .peers/installed .agents/installed  ## Tests that are slow or repeat, as far as MINUTES (60) go
	start=$$(date +%s); \
	{ $(call again,$(PYTEST) $(NIGHTLY) $$((start + 48 * $(MINUTES)))); } && \
	{ $(call again,$(SGLANG_PYTEST) $(NIGHTLY) $$((start + 60 * $(MINUTES)))); }

# SGLang without a GPU wants an environment of its own; what a CUDA build would bring lies in runtime/engines/sglang/cpu
SGLANG := runtime/engines/sglang/cpu
SGLANG_PYTEST = PYTHONPATH=$(SGLANG) OMP_NUM_THREADS=1 .sglang/bin/python -m pytest $(TWO) -o cache_dir=.pytest_cache/sglang tests/sglang
.sglang/installed: $(SGLANG)/requirements.txt requirements/sglang-cpu.txt pyproject.toml
	$(PYTHON) -m venv --clear .sglang
	.sglang/bin/python $(PINNED)/build.txt
	.sglang/bin/python $(OWN)
	.sglang/bin/python $(PINNED)/sglang-cpu.txt
	.sglang/bin/python $(PIP_INSTALL) --no-deps -r $(SGLANG)/requirements.txt
	@touch $@

sglang: .sglang/installed  ## Make .sglang with a real SGLang for the CPU, and run its tests (about 3 minutes)
	$(call again,$(SGLANG_PYTEST))

# TRL and verl, whose own functions say what is right: beside what .venv has, which a .pth leads to
.peers/installed: requirements/peers.txt .venv/installed
	$(PYTHON) -m venv --clear .peers
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > .peers/of_venv
	mv .peers/of_venv "$$(.peers/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_of_venv.pth"
	.peers/bin/python $(PINNED)/peers.txt
	@touch $@

# SDKs and frameworks of agents, which talk to the endpoint as they are (tests/agents)
.agents/installed: requirements/agents.txt
	$(PYTHON) -m venv --clear .agents
	.agents/bin/python $(PINNED)/agents.txt
	@touch $@

peers: .peers/installed  ## Ask TRL's and verl's own functions for right values, and record them for tests (tests/peers)
	.peers/bin/python tests/peers/record.py

# What a machine with a GPU and without internet needs beside torch and transformers travels as wheels
WHEELS := build/cuda-wheels
PLATFORMS := $(foreach n,28 17,--platform manylinux_2_$(n)_x86_64) --platform manylinux2014_x86_64
cuda-wheels: install  ## Collect the wheels for `make cuda` on a machine without internet, 64 MiB at most
	rm -rf $(WHEELS)
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
	  --implementation cp $(PLATFORMS) -d $(WHEELS) -r tests/cuda/wheels.txt
	@du -sm $(WHEELS) | awk '{print $$1 " MiB in $(WHEELS)"; exit $$1 > 64}'

# the checkout as a package, without building it, and the wheels beside it: only what is not there yet
SITE := build/cuda-site
LINKED := graphs nodes runtime
cuda-site:
	rm -rf $(SITE)
	mkdir -p $(SITE)/rlgraph
	ln -s $(addprefix $(CURDIR)/,$(filter-out $(LINKED:%=rlgraph/%),$(wildcard rlgraph/*)) $(LINKED)) $(SITE)/rlgraph
	if [ -d $(WHEELS) ]; then $(PYTHON) -m pip install -q --disable-pip-version-check --no-index --no-deps \
	  --no-compile --target $(SITE)/wheels $(WHEELS)/*.whl; fi

# PYTHONSAFEPATH: the folder rlgraph of this one is a part of the package, and must not be taken for it
CUDA = PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/$(SITE):$(CURDIR)/$(SITE)/wheels$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PYTHON)
cuda: cuda-site  ## On one GPU, with PYTHON's torch and transformers: tests, then benchmarks (10 minutes each)
	$(CUDA) -m pytest -q tests/cuda -p no:cacheprovider --import-mode=importlib -o addopts= -o filterwarnings=default
	$(CUDA) benchmarks/cuda.py --json build/cuda.json

# The newest releases of all that rlgraph runs on: what they deprecate is an error in tests
NEWEST_PYTEST = OMP_NUM_THREADS=1 .newest/bin/pytest $(TWO) tests/runtime tests/nodes
.newest/installed: pyproject.toml requirements/newest.txt requirements/newest-torch.txt
	$(PYTHON) -m venv --clear .newest
	.newest/bin/python $(PINNED)/build.txt
	.newest/bin/python $(OWN)
	.newest/bin/python $(PINNED)/newest.txt
	.newest/bin/python $(PIP_INSTALL) -r requirements/newest-torch.txt
	@touch $@

newest: .newest/installed  ## Make .newest with the newest torch and transformers, and run its tests and the demo there (at night)
	@$(MAKE) --no-print-directory demo BIN=.newest/bin
	$(call again,$(NEWEST_PYTEST))

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint  ## Lint, types, and the compiler's tests: less than a minute
	$(BIN)/pytest -q -n 2 tests/compiler

lock: install  ## Resolve anew what is installed for tests and into the container (requirements/)
	$(BIN)/python requirements/resolve.py

sbom: install  ## Write what is installed in .venv as a bill of materials, build/sbom.json (CycloneDX)
	$(BIN)/python requirements/sbom.py

lock-check: install  ## Check that requirements/ still fits pyproject.toml, as far as a registry can be reached
	$(BIN)/python requirements/resolve.py --check

bench: demo .sglang/installed  ## Every benchmark, with its ratio (about 15 minutes)
	@for file in $(filter-out %_ops.py %/padded.py %/cuda_rates.py %/fake_engine.py %/demo_smollm.py %/reward_model.py %/preferences.py %/import_scripts.py benchmarks/sglang_%,$(wildcard benchmarks/*.py)); do echo "== $$file"; $(BIN)/python $$file || exit 1; done
	@for file in $(filter-out %_model.py,$(wildcard benchmarks/sglang_*.py)); do echo "== $$file"; PYTHONPATH=$(SGLANG) .sglang/bin/python $$file || exit 1; done

MERMAID := 11.17.2
MERMAID_SHA512 := 57a2b70bc101744b0f1595d228c25eea9a50384371b87011afd1af1d7e21878ee501b84c443f6a7f8a042bb2e869143150b31af34feab798073bbdda0a578106
AXE := 4.14.1
AXE_SHA512 := 1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5
browser:  ## Install what the tests of pages and pictures use: on Debian, as root; else they are skipped
	apt-get update -qq
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver \
	  fonts-dejavu-core graphviz $$(command -v npm > /dev/null || echo npm) > /dev/null
	cd .venv && npm pack --silent mermaid@$(MERMAID) > /dev/null
	cd .venv && echo '$(MERMAID_SHA512)  mermaid-$(MERMAID).tgz' | sha512sum --check --quiet
	cd .venv && tar xzf mermaid-$(MERMAID).tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-$(MERMAID).tgz
	cd .venv && npm pack --silent axe-core@$(AXE) > /dev/null
	cd .venv && echo '$(AXE_SHA512)  axe-core-$(AXE).tgz' | sha512sum --check --quiet
	cd .venv && tar xzf axe-core-$(AXE).tgz --strip-components=1 package/axe.min.js && rm axe-core-$(AXE).tgz

SHOT := chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,1180
docs: install  ## Build the site of the documents, build/site/index.html; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: demo  ## Make the pictures in docs/pictures anew (graphviz, chromium: make browser)
	mkdir -p build docs/pictures
	$(BIN)/rlgraph plan grpo --devices 8 --direction right -o docs/pictures/grpo.svg
	$(BIN)/rlgraph view grpo models.policy.path=Qwen/Qwen3-8B --cluster h100-8 -o build/grpo.html
	$(BIN)/rlgraph view runs/demo -o build/demo.html
	$(SHOT) --screenshot=docs/pictures/plan.png 'file://$(CURDIR)/build/grpo.html#plan'
	$(SHOT) --screenshot=docs/pictures/demo.png 'file://$(CURDIR)/build/demo.html#run'
	$(SHOT) --screenshot=docs/pictures/samples.png 'file://$(CURDIR)/build/demo.html#samples'
	$(BIN)/rlgraph view grpo 'pools={train: {devices: 4}, gen: {devices: 4}}' 'schedule.buffer={staleness: 2}' prompts.batch=16 \
	  update_policy.in.old_logprobs=rollout_logprobs rollout.max_new_tokens=8192 models.policy.path=Qwen/Qwen3-8B \
	  --cluster h100-8 --response-tokens 1500 -o build/stream.html
	rm -rf runs/streaming
	$(BIN)/rlgraph run benchmarks/streaming.yaml models.policy.path=demo_files/model --run-dir runs/streaming \
	  'schedule={iterations: 14, buffer: {staleness: 2, chunk: 32}}' drawn.seconds=0.006 judged.seconds=0.3 update.seconds=0.5
	$(BIN)/rlgraph view runs/streaming -o build/streaming.html
	$(SHOT) --window-size=1400,700 --screenshot=docs/pictures/stream_plan.png 'file://$(CURDIR)/build/stream.html#predicted-groups'
	$(SHOT) --window-size=1400,820 --screenshot=docs/pictures/stream_run.png 'file://$(CURDIR)/build/streaming.html#groups'

clean:  ## Remove what make made
	rm -rf .venv .sglang .peers .newest build dist runs demo_files demo_tool_files *.egg-info
