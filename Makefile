# Everything a clone needs: Python 3.11 or later, pip, make and gcc.
#   make PYTHON=python3.12 VENV=.venv312 test      another interpreter, in an environment of its own
#   make test ARGS="tests/unit -x"                 arguments for pytest (slow tests included), and likewise for demo and bench

PYTHON ?= python3
VENV ?= .venv
VENV_VERL ?= .venv-verl
VENV_VLLM ?= .venv-vllm
ARGS ?=
SLOW ?=
BENCH ?= sandbox

# Variables given on make's command line are exported by default; programs that tests start may read a PYTHON of their own.
unexport PYTHON VENV VENV_VERL VENV_VLLM ARGS SLOW BENCH
# Some images set it; each of the hundreds of processes that tests start would then compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

GUEST := src/toolyard/sandbox/guest/native
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-verl test-vllm soak soak-cluster drift check docs format bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-to-run $(GUEST)/guest.so ## the main job: a small model plays word problems, and its code runs in the sandbox; before and after training
	rm -rf rollouts/demo
	$(BIN)/toolyard rollout --out rollouts/demo/before $(ARGS)
	$(BIN)/toolyard rollout --out rollouts/demo/after --set engine.adapter=examples/learn_tool_use/adapter $(ARGS)
	$(BIN)/toolyard eval rollouts/demo/before rollouts/demo/after

# Tests marked `slow` show details, repeat, or train a real model; `exhaustive` ones take even longer, and show what others have
# shown. A plain `pytest` runs both. Tests marked `alone` have the machine to themselves; the others share it by file, and models
# then compute faster with one thread each than with threads that wait for each other.
PYTEST := $(BIN)/python -m pytest --durations 10 --tb short
# Two more than there are processors, since tests also wait.
WORKERS ?= $(shell processors=$$(nproc); echo $$((processors < 6 ? processors + 2 : 8)))
SHARING := OMP_NUM_THREADS=1 $(PYTEST) --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# SLOW=yes: with those marked `slow`, in the same run, so that what tests share is started once. SLOW=all: with all.
LEFT_OUT = $(if $(SLOW),$(if $(filter all,$(SLOW)),,not exhaustive and ),not slow and )
test: $(VENV)/.ready-to-develop $(GUEST)/guest.so ## run the tests that prove each claim once, in about ten minutes
ifeq ($(strip $(ARGS)),)
	$(SHARING) $(if $(filter all,$(SLOW)),,--hypothesis-profile quick) -m "$(LEFT_OUT)not alone"
	$(PYTEST) -m "$(LEFT_OUT)alone" tests/isolation
else
	$(BIN)/python -m pytest $(ARGS)
endif

test-all: ## run all tests: also details, repetitions, soaks, large sizes and real training
	$(MAKE) test SLOW=all

test-verl: $(VENV_VERL)/.ready $(VENV)/.ready-to-run ## our tools, rewards and agent loop under the released verl, in an environment of its own (Python < 3.13)
	$(VENV_VERL)/bin/python -m pytest --numprocesses 2 --dist loadfile tests/verl $(ARGS)

test-vllm: $(VENV_VLLM)/.ready ## our engines and rollouts at a real vLLM on the CPU, in an environment of its own (about 15 minutes)
	$(VENV_VLLM)/bin/python -m pytest tests/with_vllm $(ARGS)

soak: $(VENV)/.ready-to-develop $(GUEST)/guest.so ## 10,000 trajectories with faults, kills and restarts (ARGS="--trajectories 1000 --kills 3")
	PYTHONPATH=tests $(BIN)/python tests/e2e/soak.py $(ARGS)

soak-cluster: $(VENV)/.ready-to-develop $(GUEST)/guest.so ## 10,000 requests on four Ray nodes with 1,000 kills of workers, ledgers and drivers (ARGS="--requests 300 --kills 16")
	PYTHONPATH=tests:tests/cluster $(BIN)/python tests/cluster/soak_cluster.py $(ARGS)

drift: $(VENV)/.ready-to-develop ## 100,000 turns with hostile text over real tokenizers and templates: no token forged, lost or different (ARGS="--turns 1000", or --table)
	$(BIN)/python tests/drift.py $(ARGS)

check: $(VENV)/.ready-to-develop ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.ready-to-develop ## build the documentation into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # never --quiet: it would hide warnings from --strict

format: $(VENV)/.ready-to-develop ## format, and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-to-develop $(GUEST)/guest.so ## the sandbox against plain subprocesses; BENCH=security, rewards, rollout, scale, train, viewer, engine, limiter, tools
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)

clean: ## remove the environments, caches and builds
	rm -rf $(VENV) $(VENV_VERL) $(VENV_VLLM) $(GUEST)/guest.so dist build .pytest_cache .ruff_cache .hypothesis site
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(GUEST)/guest.so: $(GUEST)/guest.c $(GUEST)/guest.h $(GUEST)/build.py
	$(PYTHON) $(GUEST)/build.py --strict

# Environments ---------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Toolyard needs Python 3.11 or later, and $(PYTHON) is not: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-to-run: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[hf]'
	$(BIN)/toolyard models fetch
	@touch $@

$(VENV)/.ready-to-develop: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) --editable '.[dev,server,ray,mcp,hf,parquet,math,viewer,trl,otel,tensorboard,wandb,docs]'
	$(BIN)/toolyard models fetch
	$(BIN)/python tests/fetch_material.py || echo "tests with real tokenizers and templates will be skipped"
	@touch $@ $(VENV)/.ready-to-run

# torch first and with what it depends on, which differs from build to build of it. Few of the modules are imported, so they are
# not all compiled.
$(VENV_VERL)/.ready: PIP_VERL = $(VENV_VERL)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile
$(VENV_VERL)/.ready: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv $(VENV_VERL)
	$(PIP_VERL) --constraint constraints-verl.txt torch
	$(PIP_VERL) --no-deps --requirement constraints-verl.txt --editable .
	@touch $@

$(VENV_VLLM)/.ready: PIP_VLLM = $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check install --quiet
$(VENV_VLLM)/.ready: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(PIP_VLLM) --constraint constraints-vllm.txt torch
	$(PIP_VLLM) --no-deps --requirement constraints-vllm.txt --editable .
	$(VENV_VLLM)/bin/toolyard models fetch
	@touch $@
