# Two commands do everything on a fresh machine:
#   make train   environment, install, and the quickstart: real training in about a minute
#   make test    environment, install, and the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: train test slow chaos lint install clean

train: install
	$(BIN)/python examples/digits.py data/digits
	$(BIN)/dilatant train examples/quickstart.yaml --overwrite

# Two processes take files in turn, those of the command line (long ones) early: more processes would crowd the tests that
# start ranks of their own.
test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

slow: install
	$(BIN)/python -m pytest -m slow

# A thousand faults of agents, coordinators and connections; CHAOS_FAULTS and CHAOS_SEED choose others.
chaos: install
	$(BIN)/python -m pytest -m slow -s tests/resilience/test_light_chaos.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(VENV)/.installed

# The bounded torch range is installed first: a later step then finds it satisfied and fetches no other build.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs data build dist .pytest_cache .mypy_cache .ruff_cache
