# make demo   the main job on the bundled model     make test   everything CI checks
# Both make .venv on first use (a few minutes) and leave it alone until pyproject.toml or constraints.txt change.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
EXTRAS := hf,plot,docs,dev

# Runs pip with its output kept aside; shows it only where pip fails.
pip = $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(1) \
	>> $(LOG) 2>&1 || { cat $(LOG) >&2; echo "Installation failed: pip's output is above." >&2; exit 1; }

.PHONY: help demo test lint format docs docs-blocks record record-exports gpu-test clean

help:
	@echo "make demo      one batch on the bundled model: base and three adapters, text and check"
	@echo "make test      lint, types and tests, as CI runs them"
	@echo "make lint      ruff and pyright alone"
	@echo "make format    let ruff reformat"
	@echo "make docs      the pages of docs/ as a site, in site/; warnings are errors"
	@echo "make docs-blocks  write output of commands and tables on these pages anew"
	@echo "make record    compile kernels that have changed, so that make test need not"
	@echo "make record-exports  likewise exported kernels: a core second each, on all cores"
	@echo "make gpu-test  tests marked gpu, with the Python that has your CUDA torch (PYTHON=$(PYTHON))"
	@echo "make clean     remove .venv and caches"

# One thread: the model is so small that others would only wait for each other.
demo: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/fanfold demo

test: lint
	@echo "tests (two workers) ..."
	@OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

lint: $(STAMP)
	@echo "ruff ..."
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@echo "pyright ..."
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

format: $(STAMP)
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format .

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --clean
	@echo "site/index.html (its search needs a server: $(BIN)/python -m http.server --directory site)"

docs-blocks: $(STAMP)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/contracts/docs_blocks.py

# Compiles and checks kernels that have changed, so that make test need not; those that are gone leave the record.
record: $(STAMP)
	@rm -f $(VENV)/compiled.jsonl
	@OMP_NUM_THREADS=1 FANFOLD_RECORD=$(VENV)/compiled.jsonl $(BIN)/python -m pytest -q -n 2 --dist worksteal \
		tests/kernels tests/routing
	@LC_ALL=C sort -u $(VENV)/compiled.jsonl > tests/compiled.jsonl

# Keeps what it has done when it is stopped, and goes on there.
record-exports: $(STAMP)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/export/export_record.py

# Not in .venv: its torch may be a build without CUDA. Of the files only those that hold such tests, as that Python may
# lack packages of others; what these need and it lacks is an error, after all others have run.
gpu-test:
	@PYTHONPATH=src $(PYTHON) -m pytest -q -m gpu --continue-on-collection-errors \
		$$(grep -rlE 'mark\.gpu|device: str' tests --include='test_*.py')

clean:
	@rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build

# torch comes first and from the constraints, so that no other package's range draws in another build.
# A CUDA build of torch brings its own triton; only where there is none is one installed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "fanfold needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "[1/4] environment $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
		|| { echo "python3 -m venv failed; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@: > $(LOG)
	@echo "[2/4] $$(grep '^torch==' constraints.txt)"
	@$(call pip,torch)
	@echo "[3/4] triton"
	@$(BIN)/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("triton") is None)' \
		|| { $(call pip,triton==3.6.0); }
	@echo "[4/4] fanfold and its tools"
	@$(call pip,--editable '.[$(EXTRAS)]')
	@touch $(STAMP)
