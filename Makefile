# What people do here. `make serve` and `make test` need nothing but Python 3.11 or 3.12 with venv.
#
#   make serve   two routers and two CPU replicas of the embedded model, with a curl to paste
#   make test    the tests that run on any machine
#   make lint    ruff, formatting, the configuration
#   make proto   regenerate protos/ from the .proto files
#   make bench   benchmarks          (ARGS="..." goes to the benchmark)
#   make gpu     tests that need an NVIDIA GPU, then gpu-kernels
#   make gpu-engine     the engine on a GPU and against transformers, parts of four minutes; ARGS="--rehearse" without one
#   make gpu-kernels    every kernel against the machine's roof, six minutes; ARGS="--rehearse" without a GPU
#   make kernels-table  compile every kernel for every architecture against the committed table, five minutes
#   make chaos   tests that kill processes   (SIZE=long for the long run)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv serve test lint proto bench gpu gpu-kernels gpu-engine kernels-table chaos

IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# The first of these that is at least 3.11; `make PYTHON=/path/to/python3.12` to choose.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	"$$p" -c '$(IS_NEW_ENOUGH)' 2>/dev/null && { echo "$$p"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CONFIG ?= cluster.yaml
ARGS ?=
SIZE ?= ci
HERE := not gpu and not soak and not slow
BY_ITSELF := system or chaos or alone

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

venv: $(INSTALLED)

# Without an NVIDIA driver torch goes first and alone, at one exact version: where pip is configured
# with an index of CPU builds, 2.13.0+cpu satisfies ==2.13.0 and is preferred, and the second
# command then keeps it, whereas the range in pyproject.toml could resolve to a newer CUDA build of
# several GB.
$(INSTALLED): pyproject.toml $(wildcard kernels/native/* router/native/*)
	@if ! "$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then \
		echo "Quire needs Python 3.11 or newer; found $$(python3 --version 2>&1)." >&2; \
		echo "Choose one with: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	if ! [ -e /proc/driver/nvidia/version ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
		$(BIN)/python -m pip install --no-input torch==2.13.0; \
	fi
	$(BIN)/python -m pip install --no-input -e '.[dev]'
	touch $@

serve: $(INSTALLED)
	@exec $(BIN)/quire serve $(CONFIG) $(ARGS)

# What starts no cluster and measures nothing runs on all cores. The cluster whose processes are killed and replaced
# is one for all of tests/chaos, and ends with that command.
test: $(INSTALLED)
	$(BIN)/python -m pytest -m "$(HERE) and not ($(BY_ITSELF))" -n auto --maxprocesses 4 --dist worksteal $(ARGS)
	$(BIN)/python -m pytest -m "$(HERE) and ($(BY_ITSELF))" --ignore tests/chaos $(ARGS)
	$(BIN)/python -m pytest tests/chaos $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/quire config check $(CONFIG)

proto: $(INSTALLED)
	$(BIN)/python -m quire.protos.generate

bench: $(INSTALLED)
	$(BIN)/python -m quire.bench $(ARGS)

# pytest's exit status 5, nothing collected, stays a failure.
gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu $(ARGS)
	$(BIN)/python -m quire.bench gpu-kernels

# In an environment that has torch, Triton, pytest and hypothesis already:
# pip install --no-deps -e . && make gpu-kernels INSTALLED= BIN=/path/to/its/bin
gpu-kernels: $(INSTALLED)
	$(BIN)/python -m quire.bench gpu-kernels $(ARGS)

gpu-engine: $(INSTALLED)
	$(BIN)/python -m quire.bench gpu-engine $(ARGS)

kernels-table: $(INSTALLED)
	$(BIN)/python -m quire.kernels.compile_table --check tests/kernels/compile_table.json $(ARGS)

chaos: $(INSTALLED)
	CHAOS_SIZE=$(SIZE) CHAOS_OUT=bench/results/chaos.json $(BIN)/python -m pytest -s -m "chaos and not soak" tests/chaos $(ARGS)
	CHAOS_SIZE=$(SIZE) CHAOS_OUT=bench/results/chaos.json $(BIN)/python -m pytest -s -m chaos --ignore tests/chaos $(ARGS)
	CHAOS_SIZE=$(SIZE) CHAOS_OUT=bench/results/chaos.json $(BIN)/python -m pytest -s -m soak $(ARGS)
