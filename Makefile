# `make demo` and `make test` need nothing but Python 3.10 or later: each makes the virtual environment it runs in.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
OPT_LEVEL ?= O1
OUT ?= out/demo
# Small networks: few CPUs compute float16 convolutions natively, and all others are ten times slower at it.
DEMO := --dataset digits --imageSize 32 --ngf 8 --ndf 8 --lr 0.0005 --niter 60 --workers 0 --minutes 4

BIN := $(VENV)/bin
TYPED := build/typed

.DEFAULT_GOAL := help
.PHONY: help demo test check format clean

help:
	@echo "make demo    train a DCGAN on handwritten digits in mixed precision (OPT_LEVEL=O0|O1|O2|O3, OUT=folder)"
	@echo "make test    run all tests (WORKERS=2)"
	@echo "make check   lint, format check, strict type check"
	@echo "make format  format the code and fix what the linter can fix"
	@echo "make clean   remove the virtual environment and everything built"

# Waiting threads sleep: on a busy machine, spinning ones cost more than the second core gains.
demo: $(VENV)/.installed-examples
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m examples.dcgan --opt_level $(OPT_LEVEL) --outf $(OUT) $(DEMO)

# One thread a worker: tensors are small here, and two workers with two threads each are slower on two cores.
test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# Type checkers read folders, not setuptools' package-dir: links show them the package as a wheel lays it out.
check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/lightning_amp
	@ln -s $(CURDIR)/examples $(TYPED)/examples
	@ln -s $(CURDIR)/lightning_amp/* $(CURDIR)/kernels $(TYPED)/lightning_amp
	MYPYPATH=$(TYPED) $(BIN)/mypy -p lightning_amp -p examples

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# A stamp for each set of extras, so that nothing is installed twice; `dev` holds all of `examples`.
$(VENV)/.installed-%: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
