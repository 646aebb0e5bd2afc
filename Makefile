# What a person runs. Everything lives in .venv; nothing is installed outside this folder.
#
#   make demo         round robin against Trimtab, on this machine      (DEMO="--endpoints 8 --rate 20" for flags)
#   make local        the whole stack until Ctrl-C
#   make test         all tests, with the real Envoy and Valkey         (TEST="tests/core -k chain" for flags)
#   make check        lint, types, rings; with cargo those of the native modules too
#   make test-engine  the tests that need a real vLLM on the CPU        (VLLM=/path/to/bin/vllm)
#   make test-load    the tests that make load for minutes, and want a machine to themselves
#   make e2e          all of it in a Kubernetes cluster, one of its own where none is named (E2E=e2e/test_install.py)
#   make generate     what follows from definitions: our CRD, the reference pages, the dashboards
#   make pictures     the dashboards as docs/ shows them, from a live pool (needs Prometheus; three minutes)
#   make bench        the figures
#
# Needs make and Python >= 3.11 with venv. PYTHON=/path/to/python names another one than is found.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
VENV := .venv
BIN := $(VENV)/bin
NATIVE := core/native extproc/native
NATIVE_SOURCES := $(shell find $(NATIVE) -name target -prune -o \( -name '*.rs' -o -name 'Cargo.*' \) -print)
CARGO := $(shell command -v cargo)
DEMO ?=
TEST ?=
BENCH ?=
E2E ?=
VLLM ?= $(shell command -v vllm)

.DEFAULT_GOAL := help
.PHONY: help demo local test check format generate pictures test-engine test-load e2e bench clean

help:
	@sed -n '3,14s/^# \{0,3\}//p' Makefile

# A stamp for each set of packages, so that a second run starts at once. The demo needs no test tools.
$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "Python >= 3.11 is needed: install it, or name it with PYTHON=/path/to/python" >&2; exit 1; }
	@command -v "$(PYTHON)" >/dev/null || { echo "PYTHON=$(PYTHON): there is no such command" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "PYTHON=$(PYTHON) is no Python >= 3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment: install its venv package (Debian: apt install python3-venv)" >&2; rm -rf $(VENV); exit 1; }

# With cargo this builds the native core and front as well, and again when their sources change; without, what they
# stand for in Python runs.
SETUP := pyproject.toml setup.py $(NATIVE_SOURCES) $(if $(CARGO),$(VENV)/.cargo)
SAY_NATIVE := $(BIN)/python -m trimtab_core.selection && $(BIN)/python -m trimtab_extproc.front

# Made when a cargo is first seen: what was installed before it is installed again.
$(VENV)/.cargo: | $(VENV)/bin/python
	@touch $@

$(VENV)/.demo: $(SETUP) | $(VENV)/bin/python
	@echo "Installing into $(VENV) (once$(if $(CARGO),; building what is native takes 2 to 6 minutes)) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@$(SAY_NATIVE)
	@touch $@

$(VENV)/.dev: $(SETUP) | $(VENV)/bin/python
	@echo "Installing into $(VENV), with test tools (once$(if $(CARGO),; building what is native takes 2 to 6 minutes)) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@$(SAY_NATIVE)
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@$(BIN)/trimtab demo $(DEMO)

local: $(VENV)/.demo
	@$(BIN)/trimtab local

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not engine and not load' $(TEST)

test-load: $(VENV)/.dev
	$(BIN)/python -m pytest -m load tests $(TEST)

test-engine: $(VENV)/.dev
	@test -x "$(VLLM)" || { echo "make test-engine needs a vLLM on the CPU: VLLM=/path/to/bin/vllm" >&2; exit 1; }
	TRIMTAB_VLLM="$(VLLM)" $(BIN)/python -m pytest -m engine tests $(TEST)

e2e: $(VENV)/.dev
	e2e/run $(E2E)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(if $(CARGO),,@echo "no cargo: what is native is not checked")
	$(if $(CARGO),for crate in $(NATIVE); do (cd $$crate && cargo fmt --check && cargo clippy --locked --all-targets -- -D warnings && cargo test --locked --quiet) || exit 1; done)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.dev
	$(BIN)/python -m trimtab_operator.api.generate
	$(BIN)/python charts/values_reference.py
	PYTHONPATH=observability $(BIN)/python -m trimtab_observability.generate

pictures: $(VENV)/.dev
	PYTHONPATH=observability $(BIN)/python -m trimtab_observability.pictures

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py $(BENCH)

clean:
	rm -rf $(VENV) build dist $(addsuffix /target,$(NATIVE)) core/trimtab_core/_native.*.so extproc/trimtab_extproc/_front.*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
