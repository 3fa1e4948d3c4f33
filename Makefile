# Needs python3 (3.11 or newer) and make; everything else goes into .venv.
#   make quickstart   set up, run notebooks/quickstart.ipynb here and print what its cells printed
#   make test         set up, then lint, types, every test and every notebook
#   make lint         only lint and types
#   make lab          JupyterLab on the notebooks (as root: make lab LAB_ARGS=--allow-root)
PYTHON ?= python3
PYTEST_ARGS ?=
LAB_ARGS ?=
TEST_WORKERS ?= 2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
NOTEBOOKS := $(wildcard notebooks/*.ipynb)
LABEXTENSION := $(wildcard hatch_build.py jupyter-config/labextension/* air_nb/sidebar/static/*)

.PHONY: help quickstart test test-python test-notebooks lint lab clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,5s/^# *//p' Makefile

# A stamp says which set-up .venv holds; it is older than its inputs as soon as they change.
.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "air_nb needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@[ -x $(BIN)/python ] || { echo "Creating .venv"; $(PYTHON) -m venv .venv; } || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv, then run make again." >&2; \
	  rm -rf .venv; exit 1; }
	@touch $@

.venv/.notebooks: .venv/.made pyproject.toml constraints.txt $(LABEXTENSION)
	@echo "Installing air_nb and what its notebooks need into .venv (the first time: minutes, PyTorch is large)"
	@$(PIP) 'pip>=25.1' # the first pip that reads dependency groups
	@$(PIP) --editable . --group notebooks
	@touch $@

.venv/.lab: .venv/.notebooks
	@echo "Installing MLflow into .venv"
	@$(PIP) --editable '.[mlflow]'
	@touch $@

.venv/.dev: .venv/.lab
	@echo "Installing the test and lint tools into .venv"
	@$(PIP) --editable '.[mlflow]' --group dev
	@touch $@

quickstart: .venv/.notebooks
	@$(BIN)/python tools/run_notebook.py notebooks/quickstart.ipynb

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@$(BIN)/lint-imports

test: lint test-python test-notebooks

test-python: .venv/.dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# Compared with their saved outputs, on CPU ranks wherever they run; they keep their runs to themselves.
test-notebooks: .venv/.dev
	@home=$$(mktemp -d) && trap 'rm -rf "$$home"' EXIT && \
	  export AIR_NB_HOME="$$home" AIR_NB_DEVICE=cpu AIR_NB_TRACKING=0 IPYTHONDIR="$$home/ipython" && \
	  $(BIN)/python -m pytest --nbval $(NOTEBOOKS) --nbval-sanitize-with tests/notebooks/sanitize.cfg

lab: .venv/.lab
	$(BIN)/jupyter lab $(LAB_ARGS) notebooks

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
