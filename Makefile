# Everything runs in an environment of its own: $(VENV), made on first use with the versions in constraints.txt.
#
#   make run     train a small model on generated click logs      make lint    style
#   make test    all tests; ARGS="-m 'not slow'" for a part       make types   static types
#   make docs    the documentation, its links checked             make clean   remove what these made
#   make bench   the measurements behind the figures

PYTHON ?= python3
VENV ?= .venv
CACHE ?= .cache
ARGS ?=

# Measurements that take from a quarter of an hour to three hours are run one by one.
LONG := $(addprefix benchmarks/,autotune_live.py calibrate_live.py crash_rate.py departures.py \
	fluid_against_discrete.py memory_simulated.py search_baselines.py soak.py tuners_live.py)

BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: run test lint types docs bench clean
.DELETE_ON_ERROR:

run: $(VENV)/.run-installed
	XDG_CACHE_HOME=$(abspath $(CACHE)) $(BIN)/intune train --epochs 1 --seconds 60 $(ARGS)

test: $(VENV)/.dev-installed
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev-installed
	$(BIN)/mypy

docs: $(VENV)/.dev-installed
	$(BIN)/mkdocs build --strict --quiet --site-dir $(abspath $(CACHE))/site

bench: $(VENV)/.run-installed
	set -e; for claim in $(filter-out $(LONG),$(wildcard benchmarks/[!_]*.py)); do echo "== $$claim"; $(BIN)/python $$claim; done

clean:
	rm -rf $(VENV) $(CACHE) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("intune needs Python 3.11 or newer, $(PYTHON) is %d.%d; say: make PYTHON=/path/to/python" % v[:2])'
	$(PYTHON) -m venv $(VENV)

# An environment with the development tools has all that a run needs, so one stamp may stand for the other.
$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[dev]'
	touch $@ $(VENV)/.run-installed

$(VENV)/.run-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[recsys]'
	touch $@
