# make setup | run | test | check. PYTHON picks the interpreter (3.11 or 3.12) that the environment is made with.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run test check

setup: .venv/installed

# torch first and by exactly this pin: a CPU build is used where the package index offers one
.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "Quintet needs Python 3.11 or 3.12: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

run: setup
	$(BIN)/python run.py

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py
