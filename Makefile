# make quickstart   install smelt, run the example, show the table
# make test         run the tests
# make lint         run ruff
# make types        run mypy in strict mode
# make peers        open packages in the tools that they are for, and compare GPTQ with GPTQModel;
#                   downloads them to build/
# make bench        check the speeds in the documentation, 300 mutated files of each kind, 500 random ONNX
#                   graphs in the stages for third-party models, 420 random generation settings
#                   against transformers
# make matrix       run every pair of techniques on every family (70 minutes); resumes after an interruption,
#                   results are in build/matrix/pairs.jsonl
# make docs         generate the settings tables in docs/ and the picture of a report
# make messages     generate the lists of messages with their codes
# make layouts      generate the layouts of the model families from tiny models; NAME=albert: of one family
# make family NAME=albert   check one family: its layout, its description, its graphs against transformers
# make golden       generate the expected outputs of the stages; fails if no version was increased
# make clean        remove build results
#
# make PYTHON=python3.12 ...   use another Python for a new environment
# make test ARGS="-k layers"   pass ARGS to pytest, mypy or the benchmark
# make test ARGS="-m quick"    run only the quick tests: under a minute on two cores
# make test WORKERS=4          number of parallel tests (default: cores + 1, since some wait); 0: for debugging

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# nproc would count OMP_NUM_THREADS instead of cores
WORKERS ?= $(shell expr $$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)

BIN := $(VENV)/bin
# Stamp files: the environment is set up again only if its requirements changed.
USER_READY := $(VENV)/.smelt-user
DEV_READY := $(VENV)/.smelt-dev
# Hides setuptools' warnings about folders with data, which are intended. Not compiled: a quarter of the
# installed modules is ever imported, and Python compiles those at their first import.
PIP_INSTALL := PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

.PHONY: help environment quickstart test peers lint types bench matrix family layouts golden docs messages clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

quickstart: $(USER_READY)
	$(BIN)/smelt run quickstart --out runs/quickstart

environment: $(DEV_READY)

test: $(DEV_READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not peers" $(ARGS)

peers: $(DEV_READY)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n 0 -m peers tests/export/package tests/compress/quantize $(ARGS)

lint: $(DEV_READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_READY)
	$(BIN)/python tools/check_types.py $(ARGS)

bench: $(DEV_READY)
	$(BIN)/python benchmarks/speed.py $(ARGS)
	SMELT_FUZZ_DRAWS=300 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/pipeline/faults/test_fuzz.py
	SMELT_GRAPH_DRAWS=500 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 0 tests/export/onnx_models/test_drawn.py
	SMELT_GENERATION_DRAWS=60 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) tests/export/generation_graph/test_compose_graph.py -k random_settings

matrix: $(DEV_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.support.pairs.run_all_pairs $(ARGS)

layouts: $(DEV_READY)
	$(BIN)/python -m tools.family_layouts $(NAME)

# The tests of graphs are named one by one: a family that they leave out is an error, not a pass.
FAMILY_TESTS := tests/models/families tests/models/test_hidden_axes.py
GRAPH_TESTS = tests/export/graphs/test_replaced_forwards.py::test_replaced_forwards_equal_the_model[$(NAME)] \
  tests/export/graphs/test_every_family.py::test_runners_equal_transformers_outputs[$(NAME)]

family: layouts
	@test -n '$(NAME)' || { echo 'Name the family: make family NAME=albert' >&2; exit 2; }
	$(MAKE) test ARGS='$(FAMILY_TESTS) -k $(NAME)'
	SMELT_MATRIX=all $(MAKE) test ARGS='$(foreach test,$(GRAPH_TESTS),"$(test)")'

docs: $(DEV_READY)
	$(BIN)/python tools/settings_tables.py
	$(BIN)/python -m tools.report_picture

messages: $(DEV_READY)
	$(BIN)/python tools/list_messages.py

golden: $(DEV_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m tests.support.goldens.golden $(ARGS)

clean:
	rm -rf build dist smelt.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# An existing environment is reused; an incomplete one (without pip) is created again. The pip that comes with
# Python 3.11 takes four times as long to choose the versions as the newest.
define make_environment
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo 'smelt needs Python 3.11 or newer; $(PYTHON) is not: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 2; }
@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
@echo 'Installing smelt and its dependencies into $(VENV) (takes minutes the first time) ...'
@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
endef

$(USER_READY): pyproject.toml constraints.txt
	$(make_environment)
	@$(PIP_INSTALL) -e .
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt
	$(make_environment)
	@$(PIP_INSTALL) -e '.[dev]'
	@$(BIN)/python tools/check_types.py --link
	@touch $(USER_READY) $@
