# make serve         install into $(VENV), fetch the default model, serve on 127.0.0.1:8000
# make quick         format, lint, types, import contracts and the fast tests: for every change
# make test          install with the development tools, run every check and every CPU test
# make docs          regenerate docs/tree.md, configs/default.yaml and docs/openapi.sha256
# make fmt           format the code and apply ruff's fixes
# make test-long     more random tests: of the scheduler, more than 100,000 operations; of the models' options
# make test-clients  published clients against a real server, in a separate environment: minutes, a few GB
# make test-gpu      the tests that need an NVIDIA GPU
# make gpu-check     those tests, then the speed table, as text and in gpu-check.json
#
# INTERPRETER=python3 runs the last two with that Python as it is and installs nothing.
# Settings reach the server as MONOLOOP_<NAME> (`make serve MONOLOOP_PORT=9000`) or as flags
# (`make serve ARGS="--port 9000"`). PYTHON selects the interpreter, VENV the folder to install into.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
INTERPRETER ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
REQUIREMENTS := pyproject.toml constraints.txt

.PHONY: help serve quick test docs check pytest test-long test-clients test-gpu gpu-check fmt clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make /make /p' Makefile

serve: $(VENV)/.installed
	@$(BIN)/monoloop serve $(ARGS)

test: check pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# $(call beside,LOG,COMMAND,COMMAND): run both commands at once. The output of the first goes to LOG, which is
# printed if that command fails.
define beside
@$(2) >$(1) 2>&1 & background=$$!; code=0; \
trap 'kill $$background 2>/dev/null' EXIT; trap 'exit 130' INT; trap 'exit 143' TERM; \
$(3) || code=$$?; \
wait $$background || { code=$$?; cat $(1); }; \
exit $$code
endef

# Left out: what is marked slow (tests that load the default model, start server processes or send generated
# requests to every route), Triton's interpreter and GPUs. 100 s of CPU time, about a minute on 2 idle cores.
QUICK := -m pytest -q -rfE -p no:cacheprovider -m "not gpu and not slow"
QUICK_LOG := .pytest-quick.log

quick: check
	$(call beside,$(QUICK_LOG),$(BIN)/python $(QUICK) tests/engine,$(BIN)/python $(QUICK) --ignore=tests/engine)

# The kernel tests under Triton's interpreter run in parallel with the others, which seldom use both cores.
INTERPRETED := tests/kernels tests/engine/device/test_mixed_graphs.py
KERNELS_LOG := .pytest-kernels.log
INTERPRET := -m pytest -p no:cacheprovider -m "not gpu" $(INTERPRETED)

pytest: $(VENV)/.installed-dev
	$(call beside,$(KERNELS_LOG),TRITON_INTERPRET=1 $(BIN)/python $(INTERPRET),$(BIN)/python -m pytest -m "not gpu")

GPU_PYTHON = $(or $(INTERPRETER),$(BIN)/python)
GPU_NEEDS = $(if $(INTERPRETER),,$(VENV)/.installed-dev)

test-gpu: $(GPU_NEEDS)
	$(GPU_PYTHON) -m benchmarks.gpu_check --only tests

gpu-check: $(GPU_NEEDS)
	$(GPU_PYTHON) -m benchmarks.gpu_check --json gpu-check.json

test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -s --hypothesis-profile=long tests/engine/schedule/test_scheduler_machine.py \
		tests/models/test_option_changes.py

CLIENTS := .venv-clients
CLIENT_FILES := tests/clients/requirements.txt tests/clients/node/package.json

test-clients: $(VENV)/.installed-dev $(CLIENTS)/.installed
	MONOLOOP=$(abspath $(BIN)/monoloop) LITELLM_LOCAL_MODEL_COST_MAP=True $(CLIENTS)/bin/python -m pytest -c tests/clients/pytest.ini \
	  --rootdir tests/clients --confcutdir tests/clients tests/clients

$(CLIENTS)/.installed: $(CLIENT_FILES) | $(BIN)/python
	@for program in node npm curl; do \
	  command -v $$program >/dev/null || { echo "make: the clients' tests need $$program" >&2; exit 1; }; done
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -r tests/clients/requirements.txt
	npm --prefix tests/clients/node install --no-audit --no-fund --no-package-lock
	@touch $@

# Tests compare each of these with what its module prints.
docs: $(VENV)/.installed
	$(BIN)/python docs/tree.py >docs/tree.md
	$(BIN)/python -m docs.models_page --write
	$(BIN)/python -m server.settings >configs/default.yaml
	$(BIN)/python -m server.openapi --write

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist $(KERNELS_LOG) $(QUICK_LOG) *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# A stamp newer than the requirements means that nothing is installed and no network is used. The openai client
# is installed for README's second example.
$(VENV)/.installed: $(REQUIREMENTS) | $(BIN)/python
	@$(NEED_PIP)
	$(PIP) install -c constraints.txt -e . openai
	@touch $@

$(VENV)/.installed-dev: $(REQUIREMENTS) | $(BIN)/python
	@$(NEED_PIP)
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

# A virtual environment that another tool made may have no pip.
NEED_PIP = $(PIP) --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip >/dev/null 2>&1 || { \
	  echo "make: $(VENV) holds no pip and its Python cannot install one (no ensurepip)." >&2; \
	  echo "      Remove $(VENV) and run make again, or name another folder: make VENV=.venv2" >&2; \
	  exit 1; }

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: no $(PYTHON) here; name a Python 3.11 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: monoloop needs Python 3.11 or newer and $(PYTHON) is older; name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make: $(PYTHON) cannot make virtual environments with pip in them." >&2; \
	  echo "      Debian, Ubuntu: apt-get install python3-venv; or name another Python: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)
