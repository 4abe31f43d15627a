# What people do here. `make serve` and `make test` need nothing but Python 3.11 or 3.12 with venv.
#
#   make serve   two routers and two CPU replicas of the embedded model, with a curl to paste
#   make test    the tests that run on any machine   (its parts: test-units, test-clusters)
#   make lint    ruff, formatting, types, the configuration
#   make docs    the documentation as a site in .cache/docs; a broken link or a warning is an error
#   make reference   regenerate the tables of docs/ that come from the code's schemas
#   make proto   regenerate protos/ from the .proto files
#   make bench   benchmarks          (ARGS="..." goes to the benchmark)
#   make gpu     tests that need an NVIDIA GPU
#   make gpu-1, gpu-2, gpu-3   everything to measure on a GPU, ten minutes each: docs/measuring_on_a_gpu.md
#                       (GPU_OUT, GPU_CARRY, QUIRE_COMMIT; GPU_REHEARSE=1 without a GPU)
#   make gpu-engine     the engine on a GPU and against transformers, parts of four minutes; ARGS="--rehearse" without one
#   make gpu-kernels    every kernel against the machine's roof, six minutes; ARGS="--rehearse" without a GPU
#   make gpu-rehearse   gpu-1 to gpu-3 without a GPU, with that machine's libraries: 5 GB to install, then some minutes
#   make kernels-table  compile every kernel for every architecture against the committed table, five minutes
#   make chaos   tests that kill processes   (SIZE=long for the long run)
#   make prefill  kills prefill replicas with a prompt, on a cluster of its own
#   make tp      kills ranks of tensor-parallel replicas under 100 streams, ten minutes
#   make families   which of transformers' causal model types are served, against `generate`, six minutes: docs/models.md
#   make many-routers   1, 4, 8 and 16 routers on real clusters, and the start of one, a quarter of an hour: docs/router.md
#   make node-pool   the pool that replicas of a node share: its cost, SIGKILL, sharing, damage, ten minutes: docs/engine.md
#   make real-model   SmolLM2 135M and Gemma 3 270M against transformers, on real text; downloads 330 MB once
#   make adapters  a hundred adapters over one model against the model alone; 1,000 changes of adapters; an interpreted GPU
#   make drafts    drafts change no token of 10,000 drawn requests, an hour   (QUIRE_NUM_DRAFTED_REQUESTS=500 for fewer)
#   make speculation  what drafts gain and cost with SmolLM2, in turns; downloads 130 MB once
#   make image     execute the Dockerfile without a container runtime, then start the pod in its root; some minutes
#                       (root, Python 3.11, debootstrap, network)
#   make lock      the image's packages, with hashes   (needs uv)
#   make clients   real clients against a real cluster: docs/clients.md   (CLIENTS_MODEL=./folder, ARGS="--only openai_python")

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help venv serve test test-units test-clusters lint docs reference proto bench gpu gpu-1 gpu-2 gpu-3 gpu-kernels gpu-engine gpu-rehearse kernels-table chaos tp prefill families many-routers real-model speculation clients image lock adapters drafts node-pool

IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
# The first of these that is at least 3.11; `make PYTHON=/path/to/python3.12` to choose.
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	"$$p" -c '$(IS_NEW_ENOUGH)' 2>/dev/null && { echo "$$p"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
NOT_COMPILED := /(tests?|testing|models|sympy|_inductor|ray/(data|llm|rllib|train|tune)|fontTools|hypothesis|lexers|mypyc?|pip|schemathesis|_vendor)/
PRINT_DEPENDENCIES := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	extras = project["optional-dependencies"]; \
	print(*project["dependencies"], *extras["dev"], *extras["docs"], sep="\n")
CONFIG ?= cluster.yaml
ARGS ?=
LOG ?=
SIZE ?= ci
HERE := not gpu and not soak and not slow
# Where tests start clusters, tests/chaos aside: collecting the others as well takes as long as starting one.
CLUSTERS := tests/system tests/cluster/test_cli.py tests/router/request/test_disconnects.py
# The files that have the mark: collecting all tests would take longer.
ALONE = $(shell grep -rl --include='test_*.py' 'mark\.alone' tests)

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

venv: $(INSTALLED)

# The links let editors and type checkers find `quire.*`, which pip's editable installation shows to Python alone.
# Without an NVIDIA driver torch comes before what depends on it, at one exact version: where pip is configured
# with an index of CPU builds, 2.13.0+cpu satisfies ==2.13.0 and is preferred, and the second
# command then keeps it, whereas the range in pyproject.toml could resolve to a newer CUDA build of
# several GB. The C libraries, which take a minute of two cores, are compiled while pip fetches torch and the rest.
# pip compiles files to bytecode in one process; compileall uses every core, and compiles Quire as well.
# NOT_COMPILED has half of the libraries' code, and hardly anything of it is ever imported: Python compiles that then.
# Some packages contain files that are no valid Python: compileall's exit status does not matter.
$(INSTALLED): pyproject.toml setup.py $(wildcard kernels/cpu/native/* router/native/*)
	@if ! "$(PYTHON)" -c '$(IS_NEW_ENOUGH)' 2>/dev/null; then \
		echo "Quire needs Python 3.11 or newer; found $$(python3 --version 2>&1)." >&2; \
		echo "Choose one with: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --no-input --no-compile 'setuptools>=77'
	$(BIN)/python -c '$(PRINT_DEPENDENCIES)' > $(VENV)/requirements.txt
	$(BIN)/python -m pip install --no-input --no-deps --no-build-isolation -e . & \
	if ! [ -e /proc/driver/nvidia/version ] && ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
		$(BIN)/python -m pip install --no-input --no-compile torch==2.13.0; \
	fi; \
	$(BIN)/python -m pip install --no-input --no-compile -r $(VENV)/requirements.txt; wait $$!
	$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_COMPILED)' $(VENV)/lib cluster kernels protos replica router || true
	mkdir -p $(VENV)/source/quire && for folder in cluster kernels protos replica router; do \
		ln -sfn "$(CURDIR)/$$folder" $(VENV)/source/quire/$$folder; done
	echo "$(abspath $(VENV))/source" \
		> "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/quire_source.pth"
	touch $@

serve: $(INSTALLED)
	@exec $(BIN)/quire serve $(CONFIG) $(ARGS)

# An engine on a CPU computes with as many threads as there are cores. By default OpenMP's threads spin while they wait
# for each other, so on a busy machine they mostly wait for a thread that has no core. Tests of speed keep the default.
test-units test-clusters: export OMP_WAIT_POLICY = passive

# Tests without a cluster take what the clusters leave: a cluster mostly waits for its processes. Their output goes to a
# file that is printed when they end, so the two do not mix. The cluster whose processes are killed and replaced is one
# for all of tests/chaos, and ends with that command. Tests that measure speed come last, when nothing else runs.
test: $(INSTALLED)
	@mkdir -p .cache
	@$(MAKE) --no-print-directory -j 2 test-clusters test-units LOG=.cache/test-clusters.log
	$(BIN)/python -m pytest -m "$(HERE) and alone" $(ALONE) $(ARGS)

test-units: $(INSTALLED)
	nice -n 19 $(BIN)/python -m pytest -m "$(HERE) and not (system or chaos or alone)" \
		-n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-clusters: $(INSTALLED)
	@run() { \
		$(BIN)/python -m pytest -m "$(HERE) and (system or chaos) and not alone" $(CLUSTERS) $(ARGS) && \
		$(BIN)/python -m pytest tests/chaos $(ARGS); \
	}; \
	if [ -z "$(LOG)" ]; then run; else status=0; run >"$(LOG)" 2>&1 || status=$$?; cat "$(LOG)"; exit $$status; fi

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/source $(BIN)/mypy | sed 's|$(VENV)/source/quire/||'
	$(BIN)/quire config check $(CONFIG)

# Nothing is fetched: fonts, scripts and search are in the site.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml
	@echo "open $(CURDIR)/.cache/docs/index.html"

reference: $(INSTALLED)
	$(BIN)/python docs/site/reference.py --write

proto: $(INSTALLED)
	$(BIN)/python -m quire.protos.generate

drafts: $(INSTALLED)
	$(BIN)/python -m pytest -s -m slow tests/replica/test_many_drafts.py $(ARGS)

adapters: $(INSTALLED)
	$(BIN)/python -m tests.perf lora $(ARGS)
	QUIRE_ADAPTER_SWAPS=1000 $(BIN)/python -m pytest -m "slow or not slow" tests/replica/adapters tests/kernels/adapters

families: $(INSTALLED)
	$(BIN)/python -m tests.perf families $(ARGS)

many-routers: $(INSTALLED)
	$(BIN)/python -m tests.perf router_rebuild
	$(BIN)/python -m tests.perf many_routers $(ARGS)

node-pool: $(INSTALLED)
	$(BIN)/python -m tests.perf node_pool $(ARGS)

real-model: $(INSTALLED)
	$(BIN)/python -m tests.perf real-models $(ARGS)

speculation: $(INSTALLED)
	$(BIN)/python -m tests.perf speculation $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python -m tests.perf $(ARGS)

# A machine with a GPU needs no installation, pip, network, Ray or git: a Python with torch, Triton, transformers, pytest,
# pytest-xdist, pytest-timeout, hypothesis, msgpack, protobuf and psutil, and a link named `quire` to this folder.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
GPU_OUT ?= gpu-out
GPU_CARRY ?= gpu-out
GPU_WORK ?= .cache/gpu
GPU_REHEARSE ?=
GPU_VENV ?= .venv-gpu
PYTHON312 ?= python3.12
WITH_QUIRE = link=$$(mktemp -d) && trap 'rm -r "$$link"' EXIT && ln -s "$(CURDIR)" "$$link/quire" && \
	PYTHONPATH="$$link$${PYTHONPATH:+:$$PYTHONPATH}"

gpu-1 gpu-2 gpu-3:
	@$(WITH_QUIRE) $(GPU_PYTHON) -m tests.perf gpu-plan $(@:gpu-%=%) --out "$(GPU_OUT)" --carry "$(GPU_CARRY)" \
		--work "$(GPU_WORK)" $(if $(filter-out 0,$(GPU_REHEARSE)),--rehearse)

# pytest's exit status 5, nothing collected, stays a failure.
gpu:
	@$(WITH_QUIRE) $(GPU_PYTHON) -m pytest -m gpu -p tests.perf.gpu.gpu_worker -p no:cacheprovider \
		tests/kernels tests/replica $(ARGS)

gpu-kernels gpu-engine:
	@$(WITH_QUIRE) $(GPU_PYTHON) -m tests.perf $@ $(ARGS)

gpu-rehearse: $(GPU_VENV)/.installed
	@$(WITH_QUIRE) $(GPU_VENV)/bin/python -m tests.perf gpu-rehearse $(ARGS)

$(GPU_VENV)/.installed: tests/perf/gpu/gpu_requirements.txt
	@if ! [ -x $(GPU_VENV)/bin/python ] && ! "$(PYTHON312)" -c '' 2>/dev/null; then \
		echo "The environment needs Python 3.12. Choose one with: make PYTHON312=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi
	test -x $(GPU_VENV)/bin/python || "$(PYTHON312)" -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --no-input -r $<
	touch $@

kernels-table: $(INSTALLED)
	$(BIN)/python -m tests.kernels.compile.compile_table --check tests/kernels/compile_table.json $(ARGS)

chaos: $(INSTALLED)
	CHAOS_SIZE=$(SIZE) CHAOS_OUT=tests/perf/results/chaos.json $(BIN)/python -m pytest -s -m "chaos and not soak" tests/chaos $(ARGS)
	CHAOS_SIZE=$(SIZE) CHAOS_OUT=tests/perf/results/chaos.json $(BIN)/python -m pytest -s -m chaos --ignore tests/chaos $(ARGS)
	CHAOS_SIZE=$(SIZE) CHAOS_OUT=tests/perf/results/chaos.json $(BIN)/python -m pytest -s -m soak $(ARGS)

prefill: $(INSTALLED)
	$(BIN)/python -m pytest -s -m slow tests/system/test_prefill_replicas.py $(ARGS)

tp: $(INSTALLED)
	TP_OUT=tests/perf/results/tp.json $(BIN)/python -m pytest -s -m slow tests/chaos/test_rank_kills.py $(ARGS)
	$(BIN)/python -m pytest -m slow tests/replica/ranks $(ARGS)

# Each client has an environment of its own in .cache/clients, about 9 GB together.
CLIENTS_MODEL ?=
clients: $(INSTALLED)
	$(BIN)/python tests/clients $(if $(CLIENTS_MODEL),--model "$(CLIENTS_MODEL)") $(ARGS)

# IMAGE_FOLDER: where the roots are made, 5 GB.
image: $(INSTALLED)
	IMAGE_OUT=tests/perf/results/image.json $(BIN)/python -m pytest -s -m slow tests/k8s/test_image.py $(ARGS)

# The packages of the image, with hashes (k8s/Dockerfile). For the CPU image uv needs PyTorch's index of CPU builds:
# UV_FIND_LINKS or UV_INDEX.
COMPILE := uv pip compile --quiet --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	--no-emit-index-url --no-emit-find-links --no-annotate
lock: export UV_CUSTOM_COMPILE_COMMAND = make lock
lock:
	$(COMPILE) pyproject.toml --extra otel --output-file k8s/requirements.lock
	torch=$$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' k8s/requirements.lock) && \
		$(COMPILE) pyproject.toml --extra otel --override <(echo "torch==$$torch+cpu") --output-file k8s/requirements-cpu.lock
	$(COMPILE) <(echo "setuptools>=77") --output-file k8s/requirements-build.lock
