# make setup | run | check | test | test-all | sanitize | runner. PYTHON picks the interpreter (3.11 or 3.12) that the environment is made with.
# test leaves out what is marked long: whole matrices, compiling for a GPU, other programs. test-all runs everything, as pytest alone does.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run check test test-all sanitize runner

# a process for each core, at most four; a file's tests stay in one process, whose fixtures they share
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

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

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

test: setup
	$(PYTEST) -m "not long"

test-all: setup
	$(PYTEST)

# The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, whose library a process must have from its start. Without the tests
# of torch's operators, and of leaks: Python's own memory is not given back.
sanitize: setup
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest -p tests.helpers.sanitize --capture=sys tests/kernels --ignore=tests/kernels/triton

# A program that runs what task=export writes, without Python: build/runner can be moved to machines of the same instruction set.
runner: setup
	$(BIN)/python -m runner.build build/runner
