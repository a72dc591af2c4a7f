# `make demo` and `make test` need python3 (3.11 or newer) with pip, and nothing else: both create .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
N      ?= 1000
JOBS   ?= 2
STAMP  := $(VENV)/.installed-dev-demo-docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check docs fuzz format install clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP)  ## train a small network on embedded data, prune, fine-tune, compare (under a minute)
	@echo "==> sosp demo"
	@$(BIN)/sosp demo

test: check  ## format check, lint, types, quick tests (under five minutes on two cores)
	@echo "==> pytest, without slow tests"
	@$(BIN)/python -m pytest -n auto -m 'not slow'

test-all: check  ## the same with slow tests: long fuzzing, killed processes, the code of the pages, a browser
	@echo "==> pytest"
	@$(BIN)/python -m pytest -n auto

check: $(STAMP)
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> mypy"
	@$(BIN)/mypy

docs: $(STAMP)  ## build the documentation into site/, strictly and without a network
	@echo "==> mkdocs build"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

fuzz: $(STAMP)  ## shrink N random networks and compare them with the masked ones (make fuzz N=10000 JOBS=2)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/surgery/fuzz.py $(N) --jobs $(JOBS)

format: $(STAMP)  ## rewrite the code as `make test` wants it
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

install: $(STAMP)  ## only create .venv

# The stamp makes this run once, and again when what is to be installed changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name another one: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || { echo "==> creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing sosp[dev,demo,docs] into $(VENV), versions from constraints.txt (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo,docs]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchvision timm
	@touch $@

clean:  ## remove .venv, caches and build results
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
