# Everything below sets itself up in a fresh clone: a virtual environment in .venv, torch first, then the package.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: all setup demo test slow check format bench clean

all: check test

setup: $(READY)

# torch goes first and pinned: an open range would pull a build with gigabytes of CUDA libraries.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[cli,dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/memfit demo

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow"

slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m slow

check: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks
	$(BIN)/ruff format src tests benchmarks

bench: $(READY)
	$(BIN)/python benchmarks/evaluator.py
	$(BIN)/python benchmarks/codecs.py
	$(BIN)/python benchmarks/stand_ins.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
