# make demo      sets up, then prepares the sample, pretrains on it, and shows what changed
# make check     sets up, then runs ruff, mypy and all tests: what has to pass before a merge
# make test      sets up, then runs the quick tests
# make test-all  sets up, then runs all tests but the walks
# make test-walks  sets up, then runs the longest: the commands of all pages, and two nodes under SLURM
# make lint      sets up, then runs ruff and mypy
# make results   sets up, then makes figures and tables of the pages from the records in benchmarks/results
# make docs      sets up, then builds the documentation as a site in build/site
# make setup     only sets up; skipped when nothing changed since
# make clean     removes what the others made, the environment included
#
# PYTHON=python3.12 chooses the interpreter for .venv. pip's own variables pass through: on a machine without a GPU,
# PIP_EXTRA_INDEX_URL=<index of CPU builds> saves the gigabytes of CUDA libraries that torch brings from PyPI.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CODE := multicls data_prep pretrain finetune benchmarks tools tests
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

.PHONY: setup demo check test test-all test-walks lint results docs clean
.DELETE_ON_ERROR:

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@rm -f $@
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON); install Python 3.11 or newer, or set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) is too old; set PYTHON=... to a Python 3.11 or newer" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "error: $(PYTHON) cannot make environments; install its venv package (Debian: apt install python3-venv)" >&2; exit 2; }
	@echo "setting up .venv with $$($(PYTHON) --version): some minutes the first time"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[sample,dev]' | \
	  awk -v terminal="$$(test -t 1 && echo yes || true)" '/^Collecting/ { n++; if (terminal) { printf "\r%d packages", n; fflush() } } \
	    /^Installing/ { printf "%s%d packages, installing\n", terminal ? "\r" : "", n; fflush() }'
	@touch $@

# Training on a CPU: glibc keeps freed memory instead of handing it back to the system at every free.
demo: export MALLOC_MMAP_MAX_ = 0
demo: export MALLOC_TRIM_THRESHOLD_ = -1
demo: setup
	$(BIN)/python data_prep/run.py --sample --output runs/sample_corpus
	@nvidia-smi -L >/dev/null 2>&1 || export DS_ACCELERATOR=cpu; set -x; $(BIN)/deepspeed --quiet pretrain/run.py
	@$(BIN)/python tools/first_look.py runs/sample | tail -n 1  # the verdict is above
	$(BIN)/python tools/try.py runs/sample "The river rises in the mountains and flows into the sea."

# Whole files to each of three processes, in the order of tests/conftest.py: on two cores, one of them waits at times.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder $(PYTEST_FLAGS)

# In one go, which leaves no process idle between quick tests and walks.
check: lint
	$(PYTEST)

test: setup
	$(PYTEST) -m "not slow and not walk"

test-all: setup
	$(PYTEST) -m "not walk"

test-walks: setup
	$(PYTEST) -m walk

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)

results: setup
	$(BIN)/python benchmarks/pages.py

docs: setup
	$(BIN)/zensical build --strict --clean

clean:
	rm -rf .venv runs build .cache *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
