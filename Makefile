# Two commands do everything on a fresh machine:
#   make train   environment, install, and the quickstart: real training in about a minute
#   make test    environment, install, and the tests
# `make docs` builds the documentation as a site, build/site.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1
# Containers often forbid it, and then each of the many processes that tests start compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

# `make compat` runs under a Python of 3.12 or 3.13: COMPAT_PYTHON, or the first of these that starts.
COMPAT_VENV ?= .venv-compat
COMPAT_PYTHON ?= $(shell for each in python3.12 python3.13 $(HOME)/.pyenv/versions/3.1[23].*/bin/python; do \
  "$$each" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null && echo "$$each" && break; done)
# The oldest torch and transformers that README.md promises. Where pip finds no torch for CPUs, it brings one for GPUs, of
# some gigabytes.
COMPAT_VERSIONS ?= "torch==2.11.*" "transformers==5.17.*"
COMPAT_TESTS ?= tests/test_import_graph.py tests/config tests/comm/test_collectives.py tests/schedule/test_predict.py \
  tests/data/readers/test_notes_are_read_whole.py tests/data/workers/test_pool_gives_every_sample_once.py \
  tests/data/text/test_prompts_match_transformers.py tests/data/media/test_media_units_match_transformers.py \
  tests/attention/test_model_hook.py tests/attention/test_blockwise_attention.py tests/models/test_building.py \
  tests/models/wholes/test_families.py tests/models/wholes/test_whole_inputs.py tests/models/test_lora.py \
  tests/models/test_saving.py tests/runtime/test_executor.py tests/runtime/parallel/test_tensor_parallel.py \
  tests/report/test_say.py tests/cli/test_one_line_start.py tests/cli/test_export.py

.PHONY: train test slow chaos mutants gpu compat docs lint install clean

train: install
	$(BIN)/python examples/digits.py data/digits
	$(BIN)/dilatant train examples/quickstart.yaml --overwrite

# Three processes take files in turn, those of the command line (long ones) early. Many tests wait, so three fill two
# cores; more would crowd the tests that start ranks of their own.
test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

slow: install
	$(BIN)/python -m pytest -m slow

# A thousand faults of agents, coordinators and connections; CHAOS_FAULTS and CHAOS_SEED choose others.
chaos: install
	$(BIN)/python -m pytest -m slow -s tests/resilience/test_light_chaos.py

# A part of the tests of every room (COMPAT_TESTS) with another Python and the oldest libraries that are promised, in an
# environment of its own.
compat: $(COMPAT_VENV)/.installed
	OMP_NUM_THREADS=1 $(COMPAT_VENV)/bin/python -m pytest -n 2 --dist loadfile $(COMPAT_TESTS)

$(COMPAT_VENV)/.installed: pyproject.toml
	@test -n "$(COMPAT_PYTHON)" || { \
	  echo "no Python 3.12 or 3.13 was found; name one: make compat COMPAT_PYTHON=/path/to/python3.12"; exit 1; }
	"$(COMPAT_PYTHON)" -m venv $(COMPAT_VENV)
	$(COMPAT_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(COMPAT_VENV)/bin/python -m pip install --quiet $(COMPAT_VERSIONS)
	$(COMPAT_VENV)/bin/python -m pip install --quiet --editable ".[dev]" $(COMPAT_VERSIONS)
	touch $@

# Plausible wrong changes, one at a time in a copy of the tree: which test notices? An hour or two; it goes on where it was
# left. MUTANTS="--match window" tries some, "--whole" survivors by the whole default run (tests/mutants/run.py).
mutants: install
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

# What only a GPU can tell, section by section; DATA is the folder of chartqa_mini. Without a GPU each section says what it
# would need.
gpu: install
	$(BIN)/python -m benchmarks.gpu_day $(if $(DATA),--data $(DATA))

# Strictly: a page that the navigation lacks, or a link or an anchor that leads nowhere, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

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
	$(BIN)/python -c "import dilatant.schedule.loaded_kernels"  # compiles what the first run would wait for
	touch $@

clean:
	rm -rf $(VENV) $(COMPAT_VENV) runs data build dist .pytest_cache .mypy_cache .ruff_cache
