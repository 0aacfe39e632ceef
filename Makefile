# make setup | demo | test | check; everything lives in .venv, and nothing needs a GPU.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test check lint types imports clean

setup: $(READY)

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/python launch/demo.py

test: $(READY)
	$(BIN)/python -m pytest

check: lint types imports test

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

clean:
	rm -rf .venv demo build *.egg-info
