# The commands a newcomer needs. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo test lint check docs bench clean

help:
	@echo "make demo    set up, train a small model with real workers on this machine, show it live"
	@echo "make test    set up and run every test"
	@echo "make check   style, types and the fast tests, in under a minute"
	@echo "make docs    build the documentation site into build/site; a broken link is an error"
	@echo "make bench   measure every figure beside its peers (ARGS=coordinator for one of them)"
	@echo "make setup   only make the virtual environment"

setup:
	@$(PYTHON) scripts/setup.py

setup-test:
	@$(PYTHON) scripts/setup.py --tests

demo: setup
	@$(BIN)/strata demo $(ARGS)

test: setup-test
	@$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),$(BIN)/python scripts/run_tests.py)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -q tests/core tests/test_tidy.py

docs: setup
	@$(BIN)/python scripts/build_docs.py

bench: setup
	@for part in $(or $(ARGS),coordinator data checkpoint recovery dashboard); do $(BIN)/strata bench $$part || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
