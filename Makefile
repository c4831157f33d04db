# Everything works from a fresh checkout: each target sets up what it needs.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLUGINS := plugins/kvtierd-refengine
PYTEST_ARGS ?=

.PHONY: help setup demo test test-fast lint proto bench lock clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## make .venv with kvtierd, kvtierctl and the in-tree plugins

$(VENV)/.ready: pyproject.toml requirements.lock $(PLUGINS:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvtierd needs Python >= 3.11; name one with: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . $(PLUGINS:%=--editable %)
	touch $@

demo: setup  ## the main job: real MetaService, real pool, reference engine, in emulation
	$(BIN)/kvtierctl demo $(DEMO_ARGS)

test: setup  ## all tests that run within about 10 minutes, fast ones first
	$(BIN)/pytest -n 2 tests/unit $(PLUGINS:%=%/tests) $(PYTEST_ARGS)
	$(BIN)/pytest -n 3 tests/e2e $(PYTEST_ARGS)

test-fast: setup  ## unit tests only
	$(BIN)/pytest -n 2 tests/unit $(PLUGINS:%=%/tests) $(PYTEST_ARGS)

lint: setup  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

proto: setup  ## regenerate the gRPC code from proto/
	$(BIN)/python proto/generate.py

bench: setup  ## the benchmarks, printed as a table
	$(BIN)/python -m bench

lock:  ## renew requirements.lock (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate --no-emit-package kvtierd --no-emit-package kvtierd-refengine \
	  --extra memcache --group dev pyproject.toml $(PLUGINS:%=%/pyproject.toml) requirements.build.in -o requirements.lock

clean:  ## remove .venv and caches
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache
