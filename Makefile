# Every target sets up its own virtual environment, .venv, the first time.
#   make demo        a small video with full and with sparse attention, side by side in demo/ (three minutes)
#   make test        lint, type-check and test (minutes)
#   make test-all    the same with the long fuzz and the slow matrices
#   make test-gpu    the suite for an NVIDIA GPU, on a machine with one
#   make test-hosts  with the real hosts, each in an environment of its own in .hosts (a GB to fetch, minutes)
#   make docs        the documentation site, into site/; stops at a warning or a dead link (seconds)
#   make bench       time named shapes on this machine

PYTHON ?= python3
PIP_ARGS ?=
HOSTS ?=
BIN := .venv/bin

.PHONY: demo test test-all test-gpu test-hosts docs bench lint clean

# passive: threads that wait do not spin, which would take the cores from one another on a busy machine
demo: .venv/ready
	OMP_WAIT_POLICY=passive $(BIN)/rainfusion demo --out demo

test: lint
	$(BIN)/pytest -m "not slow and not gpu"

test-all: lint
	RAINFUSION_FUZZ=20 $(BIN)/pytest -m "not gpu" --timeout 1800

test-gpu: .venv/ready
	$(BIN)/python tests/gpu/run.py --only tests

test-hosts:
	PIP_ARGS="$(PIP_ARGS)" $(PYTHON) tests/hosts/run.py $(HOSTS)

docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/ready
	$(BIN)/rainfusion bench

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .hosts demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis
