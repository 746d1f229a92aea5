# Every target sets up what it needs in .venv first, and only if pyproject.toml or the constraints changed.
#   PYTHON=python3.12     the interpreter that .venv is made with
#   CONSTRAINTS=my.txt    other pinned versions (CONSTRAINTS= for none), read when .venv is set up
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt

BIN := .venv/bin
# Files of tests at a time, more than cores: ranks wait for each other, for timeouts and for their own start.
WORKERS := $(shell echo $$(( $$(nproc) + 1 )))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20
# MINUTES=20 make test-all: no test begins later than 20 minutes from now; the summary has how many of each file did not.
PYTEST += $(if $(MINUTES),--until $(shell echo $$(( $$(date +%s) + 60 * $(MINUTES) ))))
# AGAIN=yes: those that failed the last time, one after the other, up to the first that fails again.
PYTEST += $(if $(AGAIN),-n 0 -x --last-failed --last-failed-no-failures none)
PIP := $(BIN)/python -m pip install --no-input --disable-pip-version-check $(addprefix -c ,$(CONSTRAINTS))

.PHONY: help demo test test-long test-all bench gpu lint conformance
.NOTPARALLEL:

help:
	@echo "make demo    train on two ranks under several compression settings, results in out/demo"
	@echo "make test    the tests, in minutes"
	@echo "make test-all      with those that are left out for their length"
	@echo "make bench   the benchmarks, results in out/bench and bench/results"
	@echo "make gpu     on a machine with a GPU, with its own Python: tests and benchmarks in half an hour, results in out/gpu"
	@echo "make lint    ruff and mypy"
	@echo "make conformance   torch's own DDP tests against our class, all of them"

demo: .venv/.stamp-demo
	$(BIN)/fastreduce compare --ranks 2 --settings none fp16 bf16 int8 int8:error_feedback --out out/demo

test: .venv/.stamp-dev
	$(PYTEST)

test-long: .venv/.stamp-dev
	$(PYTEST) -m long

test-all: test test-long

bench: .venv/.stamp-dev
	$(BIN)/python -m bench

# Nothing is set up: it runs with what a CUDA image holds. docs/gpu.md has it in five commands of ten minutes at most.
gpu:
	$(PYTHON) -m bench.gpu --out out/gpu
	$(PYTHON) -m bench.gpu --collect out/gpu --out out/gpu

# SHARDED=test/distributed/_composable/fsdp of a checkout of torch: its tests of FSDP2 too, which its wheel leaves out
conformance: .venv/.stamp-dev
	$(BIN)/python -m tests.conformance
	$(if $(SHARDED),$(BIN)/python -m tests.conformance --sharded $(SHARDED))

lint: .venv/.stamp-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

.venv/bin/python:
	$(PYTHON) -m venv .venv

# What mypy reads, and no more: torch comes without the libraries that it would load.
.venv/.stamp-lint: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	$(PIP) hypothesis mypy numpy pytest rich ruff typer
	$(PIP) --no-deps torch
	@touch $@

.venv/.stamp-demo: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	$(PIP) -e '.[demo]'
	@touch $@

.venv/.stamp-dev: pyproject.toml $(CONSTRAINTS) | .venv/bin/python
	$(PIP) -e '.[dev]'
	@touch .venv/.stamp-demo .venv/.stamp-lint $@
