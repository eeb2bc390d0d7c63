# make quickstart   install, run the example, show the table          make test    the tests
# make lint         ruff                                              make types   mypy, strict
# make peers        what is packaged, opened by the tools that it is for, and GPTQ beside GPTQModel:
#                   fetches them into build/
# make bench        the speeds that the documentation promises, 300 mutated files of each kind, 500 drawn
#                   ONNX graphs through the stages for third-party ones, and 420 drawn settings of
#                   generation against transformers
#                                                                  make clean   remove what was built
# make matrix       every two techniques one behind the other, on every family: 70 minutes,
#                   goes on where it was stopped; build/matrix/pairs.jsonl tells of each pair
# make docs       fill the settings tables of docs/ from the settings classes
# make messages   the pages that list every message with its code, written anew
# make golden       what each stage makes of fixed input, written anew; refused where no version was raised
#
# make PYTHON=python3.12 ...   takes another Python for a new environment
# make test ARGS="-k layers"   passes ARGS on to pytest, mypy or the benchmark
# make test ARGS="-m quick"    of every room what takes little: under a minute on two cores
# make test WORKERS=4          so many tests at once (default: one a core); 0: one process, for a debugger

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= auto

BIN := $(VENV)/bin
# Stamps: an environment is set up once, and again only when what it is made from has changed.
USER_READY := $(VENV)/.smelt-user
DEV_READY := $(VENV)/.smelt-dev
# setuptools warns of folders with data, which are named on purpose, and new versions of pip print it all.
PIP_INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help environment quickstart test peers lint types bench matrix golden docs messages clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

quickstart: $(USER_READY)
	$(BIN)/smelt run quickstart --out runs/quickstart
	@echo
	@echo 'Try it on your own words:'
	@echo '  $(BIN)/smelt predict runs/quickstart/artifacts/onnx-int8 "Monday, March 3, 2025 at 4:15 PM in Austria"'
	@echo 'Make a folder of it that answers without smelt:'
	@echo '  $(BIN)/smelt package runs/quickstart/artifacts/onnx-int8'

environment: $(DEV_READY)

test: $(DEV_READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not peers" $(ARGS)

peers: $(DEV_READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n 0 -m peers tests/export/package tests/compress/quantize/methods $(ARGS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_READY)
	$(BIN)/python tools/check_types.py $(ARGS)

bench: $(DEV_READY)
	$(BIN)/python benchmarks/speed.py $(ARGS)
	SMELT_FUZZ_DRAWS=300 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/pipeline/faults/test_fuzz.py
	SMELT_GRAPH_DRAWS=500 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 0 tests/export/foreign/test_drawn.py
	SMELT_GENERATION_DRAWS=60 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/export/loop/test_compose.py -k drawn

matrix: $(DEV_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests/support:tests/support/models:tests/support/pairs $(BIN)/python tests/support/pairs/every_pair.py $(ARGS)

docs: $(DEV_READY)
	$(BIN)/python tools/settings_tables.py

messages: $(DEV_READY)
	$(BIN)/python tools/list_messages.py

golden: $(DEV_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests/support:tests/support/models:tests/support/graphs:tests/support/goldens $(BIN)/python tests/support/goldens/golden.py $(ARGS)

clean:
	rm -rf build dist smelt.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# An environment that is there already is kept; one that was left half-made (no pip in it) is made again.
define make_environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo 'smelt needs Python 3.11 or newer; $(PYTHON) is not: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 2; }
@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
@echo 'Installing smelt and what it stands on into $(VENV) (minutes the first time) ...'
endef

$(USER_READY): pyproject.toml constraints.txt
	$(make_environment)
	@$(PIP_INSTALL) -e .
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt
	$(make_environment)
	@$(PIP_INSTALL) -e '.[dev]'
	@touch $(USER_READY) $@
