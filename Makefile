# What a person runs. Everything lives in .venv; nothing is installed outside this folder.
#
#   make demo         round robin against Trimtab, on this machine      (DEMO="--endpoints 8 --rate 20" for flags)
#   make local        the whole stack until Ctrl-C
#   make test         all tests, with the real Envoy and Valkey         (TEST="tests/core -k chain" for flags)
#   make check        lint, types, rings
#   make test-engine  the tests that need a real vLLM on the CPU        (VLLM=/path/to/bin/vllm)
#   make bench        the figures
#
# Needs make and Python >= 3.11 with venv. PYTHON=/path/to/python names another one than is found.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
VENV := .venv
BIN := $(VENV)/bin
DEMO ?=
TEST ?=
BENCH ?=
VLLM ?=

.DEFAULT_GOAL := help
.PHONY: help demo local test check format test-engine bench clean

help:
	@sed -n '3,10s/^# \{0,3\}//p' Makefile

# A stamp for each set of packages, so that a second run starts at once. The demo needs no test tools.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python >= 3.11 is needed: install it, or name it with PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: install its venv package (Debian: apt install python3-venv)" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "Installing into $(VENV), with test tools (once) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/trimtab demo $(DEMO)

local: $(VENV)/.demo
	@$(BIN)/trimtab local

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not engine' $(TEST)

test-engine: $(VENV)/.dev
	TRIMTAB_VLLM="$(VLLM)" $(BIN)/python -m pytest -m engine tests/engine $(TEST)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py $(BENCH)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
