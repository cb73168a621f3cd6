# Everything a person or a build does by name. `make install` is quick when nothing changed.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$name -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEMO := $(VENV)/.installed-demo
PACKAGES := outrider draft_service/outrider_draft target_service/outrider_target coordinator/outrider_coordinator
CHECKED := $(PACKAGES) tests tools scripts
# One more than the two cores of CI: many tests wait for processes that start or for a deadline.
TEST_WORKERS ?= 3
# In the second tier most of the waiting is for processes.
INTEGRATION_WORKERS ?= 4
TESTS ?= tests
SCENARIO ?=
SEED ?=
SCALE ?=
# Bytecode is kept, even where the environment forbids it, as images of containers do: the tests start hundreds of
# processes, and without it each compiles torch again, which is half of its start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install release clients demo test test-integration test-tiers test-all soak check format proto docs golden

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

install: $(INSTALLED)  ## .venv with everything: services, SDK, tools

$(INSTALLED): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	PYTHON="$(PYTHON)" scripts/install.sh $(VENV) engine,gateway,telemetry,download,dev
	@touch $@ $(INSTALLED_DEMO)

$(INSTALLED_DEMO): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.14 is needed: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	PYTHON="$(PYTHON)" scripts/install.sh $(VENV) engine,gateway,telemetry
	@touch $@

CLIENTS := .venv-clients

clients: $(CLIENTS)/.installed  ## clients that need other versions than .venv has, for tests/end_to_end/test_other_clients.py

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/package.json
	"$(PYTHON)" -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check --no-compile --no-deps -r tests/clients/requirements.txt
	cp tests/clients/package.json $(CLIENTS)/
	! command -v npm > /dev/null || npm install --prefix $(CLIENTS) --no-package-lock --no-audit --no-fund --loglevel error
	@touch $@

demo: $(INSTALLED_DEMO)  ## starts the three services on the embedded pair, streams, proves, measures
	$(BIN)/outrider demo

release:  ## dist/: wheels, sdist, chart package; images where Docker is
	scripts/release.sh

# Files in their order, by folder: the last ones are short, so no worker is left with a long file at the end.
PYTEST = $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# In a fresh clone one process compiles what tests import: each worker would do it for itself, at the same time.
COMPILED := .pytest_cache/compiled

$(COMPILED): $(INSTALLED)
	-$(BIN)/python -m pytest --collect-only -q tests > /dev/null
	@mkdir -p $(@D) && touch $@

test: install $(COMPILED)  ## the first tier of the tests; TESTS=tests/cli for a part of it
	$(PYTEST) -m "not slow and not integration" $(TESTS)

test-integration: TEST_WORKERS := $(INTEGRATION_WORKERS)
test-integration: install  ## the second tier: real processes, faults, charts, training
	$(PYTEST) -m "integration and not slow" $(TESTS)

test-tiers: TEST_WORKERS := $(INTEGRATION_WORKERS)
test-tiers: install $(COMPILED)  ## both tiers, the first one first, by the same workers
	$(PYTEST) -m "not slow" $(TESTS)

test-all: install  ## both tiers and the slow tests: every statistical test with all its draws
	$(PYTEST) $(TESTS)

soak: install  ## faults done to real processes, the long form; SCENARIO=name for one row, SEED=, SCALE=0.1
	$(BIN)/python -m tests.faults $(SCENARIO) $(if $(SEED),--seed $(SEED)) $(if $(SCALE),--scale $(SCALE))

check: install  ## format, lint, types, import contracts, generated code, generated docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(CHECKED)
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check_generated.sh
	$(BIN)/python scripts/generate_configuration.py --check
	$(BIN)/python scripts/generate_metrics.py --check
	$(BIN)/python scripts/generate_models.py --check
	$(BIN)/python scripts/check_docstrings.py

format: install  ## formats the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: install  ## generates outrider/v1 from proto/
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/generate_protos.sh

docs: install  ## generates docs/configuration.md, docs/metrics.md and docs/models.md
	$(BIN)/python scripts/generate_configuration.py
	$(BIN)/python scripts/generate_metrics.py
	$(BIN)/python scripts/generate_models.py

golden: install  ## renders the chart's examples anew into tests/k8s/golden
	$(BIN)/python -m tests.k8s.update_golden
