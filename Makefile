# Everything a contributor runs. Needs only python3 (3.10 or newer) and a package index; other interpreter: make test PYTHON=python3.12
PYTHON ?= python3
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCHMARK_ARGS ?=
TARGETS ?= $(HOME)/.cache/jetspec-targets

VENV := .venv
OLDEST := .venv-oldest
TESTED := pyproject.toml constraints.txt
OFFLINE := HF_HUB_OFFLINE=1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-auto test-oldest lint format docs benchmark clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-demo  ## Prepare gemma-3-270m and generate with and without a draft head, side by side
	$(VENV)/bin/python examples/demo.py --folder "$(TARGETS)" $(DEMO_ARGS)

test: $(VENV)/.installed-dev  ## The test suite on the newest tested transformers, with coverage
	$(OFFLINE) $(VENV)/bin/python -m pytest -n auto -m "not slow" --cov --cov-report=term $(PYTEST_ARGS)

test-slow: $(VENV)/.installed-dev  ## The full grids of which `make test` takes every eleventh cell
	$(OFFLINE) $(VENV)/bin/python -m pytest -n auto -m slow $(PYTEST_ARGS)

test-auto: $(VENV)/.installed-dev  ## The exactness tests with automatic tree budgets, under costs that jump from step to step
	$(OFFLINE) $(VENV)/bin/python -m pytest -n auto -m "exactness and not slow" --auto-budget $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.installed-test  ## The contract and exactness tests on the oldest supported transformers
	$(OFFLINE) $(OLDEST)/bin/python -m pytest -n auto -m "(contract or exactness) and not slow" $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev  ## Format, lint, spelling, types, import layers
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/codespell
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed-dev  ## Rewrite the files as `make lint` wants them
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

docs: $(VENV)/.installed-docs  ## The documentation, in docs/_build/html; a warning is an error
	$(OFFLINE) $(VENV)/bin/sphinx-build -W --keep-going -b html docs docs/_build/html

benchmark: $(VENV)/.installed-demo  ## Seconds per phase of a step on gemma-3-270m in bfloat16 (slow without bfloat16 instructions)
	$(VENV)/bin/python examples/prepare_target.py gemma-3-270m --folder "$(TARGETS)"
	$(OFFLINE) $(VENV)/bin/python -m jetspec_hf.bench.phases --target "$(TARGETS)/gemma-3-270m" --untrained 1 $(BENCHMARK_ARGS)

clean:  ## Remove the environments, the built documentation and the caches
	rm -rf $(VENV) $(OLDEST) docs/_build .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache

# An environment is made once; each set of extras is installed when it is first needed and again when a pin changes.
$(VENV)/bin/python $(OLDEST)/bin/python: %/bin/python:
	$(PYTHON) -m venv --clear $*
	$*/bin/python -m pip install --quiet --upgrade pip

$(VENV)/.installed-%: $(TESTED) | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[$*]'
	touch $@

$(OLDEST)/.installed-%: pyproject.toml constraints-oldest.txt | $(OLDEST)/bin/python
	$(OLDEST)/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable '.[$*]'
	touch $@
