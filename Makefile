# `make ablate` does the main job from a fresh clone; `make test` passes the tests; `make help` lists the rest.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
MAKEFLAGS += --jobs=2 # the operations are compiled while the other packages arrive

.PHONY: help setup ablate claims docs test test-slow test-cluster check lint tune gpu-check clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

setup: .venv/packages .venv/ops ## .venv with the locked dependencies, this package and its compiled operations

# Bytecode is compiled when a module is first imported: far fewer modules are used than installed.
.venv/torch: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed; give it as make PYTHON=…") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv .venv
	$(PIP) --constraint requirements.lock torch numpy cmake ninja hatchling editables
	$(PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv/packages: .venv/torch
	$(PIP) --requirement requirements.lock
	touch $@

.venv/ops: .venv/torch
	$(BIN)/python -m andrea_ablate.ops --optional
	touch $@

ablate: setup ## the main job: sweep four designs over three seeds on real text, and compare them
	$(BIN)/python -m andrea_ablate -m norm=pre,post ffn=gelu4x,swiglu seed=0,1,2

docs: setup ## a page per section of the lecture, from the ledger and the results, as a site in site/
	$(PIP) 'mkdocs-material>=9.5'
	$(BIN)/python -m andrea_ablate.claims.site
	$(BIN)/mkdocs build --quiet --strict --config-file .ci/mkdocs.yml

test: setup ## the tests
	$(BIN)/pytest -n 2 --dist worksteal -m 'not slow'

test-slow: setup ## the tests that take long, and those against Hugging Face's models
	$(PIP) --requirement requirements-parity.lock
	$(BIN)/pytest -n 2 --dist worksteal -m slow

test-cluster: setup ## sweeps on a real SLURM (apt-get install slurmctld slurmd slurm-client munge) and a real Ray, disturbed midway
	$(PIP) '.[joblib,slurm,ray]' --no-build-isolation
	$(BIN)/pytest tests/cluster tests/test_sweep.py -m slow -k 'cluster or worker'

check: setup ## the linter, the form of the sources and the types
	$(BIN)/ruff check --quiet && $(BIN)/ruff format --check --quiet
	$(BIN)/mypy

lint: setup ## put the sources into their form and the list of choices into docs/, then check
	$(BIN)/ruff check --fix && $(BIN)/ruff format
	$(BIN)/python -m andrea_ablate.choices --markdown
	$(MAKE) check

claims: setup ## measure again the lecture's claims that a CPU can, and write docs/claims.md
	$(BIN)/python -m andrea_ablate.claims run --scale cpu --again --jobs 2; status=$$?; \
	$(BIN)/python -m andrea_ablate.claims report && exit $$status

tune: setup ## repeat the grid that the nano recipe was chosen from (about a quarter of an hour)
	$(BIN)/python -m andrea_ablate experiments=tune_nano
	$(BIN)/python experiments/tune_nano.py sweeps/norm-ffn-optim.lr-*/comparison.json > experiments/results/tune_nano.json

# With the Python whose torch has CUDA: make gpu-check PYTHON=/path/to/python
gpu-check: ## on a machine with a GPU: build, test and time the ops (under eight minutes)
	$(PYTHON) experiments/gpu/check.py

clean: ## remove what the tools left; runs and sweeps stay
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache
