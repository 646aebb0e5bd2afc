# What a person runs. Everything lives in .venv; nothing is installed outside this folder.
#
#   make demo         round robin against Trimtab, on this machine      (DEMO="--endpoints 8 --rate 20" for flags)
#   make local        the whole stack until Ctrl-C
#   make test         all tests, with the real Envoy and Valkey         (TEST="tests/core -k chain" for flags)
#   make check        lint, types, rings; with cargo the native core's lint and tests too
#   make test-engine  the tests that need a real vLLM on the CPU        (VLLM=/path/to/bin/vllm)
#   make bench        the figures
#
# Needs make and Python >= 3.11 with venv. PYTHON=/path/to/python names another one than is found.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
VENV := .venv
BIN := $(VENV)/bin
NATIVE := core/native
NATIVE_SOURCES := $(shell find $(NATIVE) -name target -prune -o \( -name '*.rs' -o -name 'Cargo.*' \) -print)
CARGO := $(shell command -v cargo)
DEMO ?=
TEST ?=
BENCH ?=
VLLM ?= $(shell command -v vllm)

.DEFAULT_GOAL := help
.PHONY: help demo local test check format test-engine bench clean

help:
	@sed -n '3,10s/^# \{0,3\}//p' Makefile

# A stamp for each set of packages, so that a second run starts at once. The demo needs no test tools.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python >= 3.11 is needed: install it, or name it with PYTHON=/path/to/python" >&2; exit 1; }
	@command -v "$(PYTHON)" >/dev/null || { echo "PYTHON=$(PYTHON): there is no such command" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "PYTHON=$(PYTHON) is no Python >= 3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: install its venv package (Debian: apt install python3-venv)" >&2; rm -rf $(VENV); exit 1; }

# With cargo this builds the native core as well, and again when its sources change; without, the reference runs.
SETUP := pyproject.toml setup.py $(NATIVE_SOURCES) $(if $(CARGO),$(VENV)/.cargo)
SAY_CORE := $(BIN)/python -m trimtab_core.selection

# Made when a cargo is first seen: what was installed before it is installed again.
$(VENV)/.cargo: | $(VENV)/bin/python
	@touch $@

$(VENV)/.demo: $(SETUP) | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once$(if $(CARGO),; building the native core takes a minute or two)) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@$(SAY_CORE)
	@touch $@

$(VENV)/.dev: $(SETUP) | $(VENV)/bin/python
	@echo "Installing into $(VENV), with test tools (once$(if $(CARGO),; building the native core takes a minute or two)) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(SAY_CORE)
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/trimtab demo $(DEMO)

local: $(VENV)/.demo
	@$(BIN)/trimtab local

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not engine' $(TEST)

test-engine: $(VENV)/.dev
	@test -x "$(VLLM)" || { echo "make test-engine needs a vLLM on the CPU: VLLM=/path/to/bin/vllm" >&2; exit 1; }
	TRIMTAB_VLLM="$(VLLM)" $(BIN)/python -m pytest -m engine tests $(TEST)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(CARGO),cd $(NATIVE) && cargo fmt --check && cargo clippy --locked --all-targets -- -D warnings,@echo "no cargo: the native core is not checked")
	$(if $(CARGO),cd $(NATIVE) && cargo test --locked --quiet)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py $(BENCH)

clean:
	rm -rf $(VENV) build dist $(NATIVE)/target core/trimtab_core/_native.*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
