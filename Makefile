# Every command works on a fresh machine with Python >= 3.10 and a C++ compiler: the first one makes .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Two workers with one thread each: much of the time goes into compilers, which use one. A file stays on one worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv demo test check docs fuzz zoo format clean

help:  ## list these commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | sort | awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'

venv: $(READY)  ## create .venv and install fxfuse with all that its development needs

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("fxfuse needs Python 3.10 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)  ## train a small language model with fxfuse and with Inductor, and report
	$(BIN)/python examples/quickstart.py

test: $(READY)  ## run all tests
	$(PYTEST)

check: $(READY)  ## formatting, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow"

docs: $(READY)  ## write docs/api.md, the reference, from the docstrings
	$(BIN)/python docs/api.py

zoo: $(READY)  ## run every language model of transformers under fxfuse, and write docs/zoo.md
	OMP_NUM_THREADS=1 $(BIN)/python tests/zoo.py

fuzz: $(READY)  ## compare FUZZ_EXAMPLES random programs (2000), new ones each time, with eager
	FUZZ_EXAMPLES=$${FUZZ_EXAMPLES:-2000} OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s tests/test_generated.py

format: $(READY)  ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
