# Everything starts from a fresh clone with python3 and make; nothing needs root.
#
#   make demo    install, train the built-in English-Italian demo, measure it, translate with it
#   make test    install with the test tools, then lint, types and all tests but test-outside
#   make test-fast      the core's tests and the shape of the code, for every save: under a minute
#   make test-gpu       the tests that need a GPU
#   make test-outside   the tests against other projects: transformers, CTranslate2, API clients, LibreOffice
#   make lint    lint and types only
#   make bench   the speed figures of benchmarks/
#   make docs    the pages made from the code
#   make clean   remove the environment and the caches; runs/ stays
#
# HYPOTHESIS_PROFILE=random make test-fast draws new examples in every run.

PYTHON ?= python3
VENV   ?= .venv
RUN    ?= runs/demo
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install -qq --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-gpu test-outside lint bench docs clean

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed
	if [ -e $(RUN)/run.json ]; then $(BIN)/qkv train --resume --run $(RUN); else $(BIN)/qkv train demo --run $(RUN); fi
	$(BIN)/qkv evaluate $(RUN) demo:test.en demo:test.it
	printf '%s\n' "Your cat is a lovely cat." "I love you very much." | $(BIN)/qkv translate $(RUN)
	$(BIN)/qkv explain $(RUN) "Your cat is a lovely cat." -o $(RUN)/attention.html

# pytest comes last, so that its summary is the last line.
test: lint
	$(BIN)/python -m pytest -n auto --ignore tests/outside

test-fast: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n auto -m "not slow" tests/core tests/promises/test_shape_of_code.py

test-gpu: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/gpu

test-outside: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto tests/outside

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/qkv lab speed train
	$(BIN)/qkv lab speed decode --batch 64 --seconds 4

docs: $(VENV)/.installed
	$(BIN)/python docs/make_options.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests docs -name __pycache__ -prune -exec rm -rf {} +

# torch goes first and by itself: it is the largest part, and its exact build is the machine's choice. It brings
# setuptools, so the project is then built in this environment instead of an isolated one that would be downloaded.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qkv needs Python 3.11 or newer, this is " \
	  + sys.version.split()[0] + ": set PYTHON, e.g. make PYTHON=python3.12")'
	@echo "making $(VENV) and installing torch (the largest part: it may take minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) torch setuptools
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing qkv and what it needs into $(VENV) ..."
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing the test tools into $(VENV) ..."
	@$(PIP) --no-build-isolation --editable '.[test]'
	@touch $@
