# The two commands:  make demo  ·  make test.     make help  lists the rest.

PYTHON ?= python3
VENV ?= .venv
# What to test, and options of pytest; all tests by default.
PYTEST_ARGS ?=
# Five at a time, one for each cluster: tests of clusters often wait. Those that share one stay together and come first.
WORKERS ?= -n 5 --dist loadgroup --no-loadscope-reorder

# With it each of the workers would compile all tests at each run.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
FOR_DEMO := $(VENV)/.installed-recipes
FOR_TEST := $(VENV)/.installed-test
BENCHMARKS := $(filter-out %/harness.py %/__init__.py %/__main__.py,$(sort $(wildcard benchmarks/*.py)))

.DEFAULT_GOAL := help
# Two installations into one environment at the same time would break it, so -j changes nothing here.
.NOTPARALLEL:
.PHONY: help demo test smoke golden lint format bench cluster docs clean

help:  ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(FOR_DEMO)  ## Install, then train the MNIST recipe: on all GPUs, or with 2 ranks on the CPU
	@ranks=gpu; \
	$(BIN)/allranks plan recipes/mnist/job.yaml --nproc-per-node gpu >/dev/null 2>&1; \
	if [ $$? = 3 ]; then ranks=2; fi; \
	echo "allranks run recipes/mnist/job.yaml --nproc-per-node $$ranks"; \
	$(BIN)/allranks run recipes/mnist/job.yaml --nproc-per-node $$ranks

test: $(FOR_TEST)  ## Everything that this machine can test: style, types, layers, tests
	$(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

smoke: $(FOR_TEST)  ## One scenario of each kind of cluster and of each part, in five minutes
	$(BIN)/python -m pytest $(WORKERS) -m smoke $(PYTEST_ARGS)

golden: $(FOR_TEST)  ## Rewrite the expected plans, scripts and messages in tests/golden; review the diff
	ALLRANKS_UPDATE_GOLDEN=1 $(BIN)/python -m pytest tests/golden

lint: $(FOR_TEST)  ## Style, types and the layers of the design
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck --severity=style --exclude=SC1090,SC1091 $$(find src -name '*.sh')

format: $(FOR_TEST)  ## Put the source into its form
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(FOR_TEST)  ## Write the generated pages of docs/reference again, and build the site into site/
	$(BIN)/python docs/generate.py
	$(BIN)/python -m zensical build --strict

bench: $(FOR_TEST)  ## Measure against torchrun, side by side; some minutes on an idle machine
	@failed=; for benchmark in $(BENCHMARKS); do \
		echo "== $$benchmark"; $(BIN)/python $$benchmark || failed="$$failed $$benchmark"; \
	done; test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

cluster: $(FOR_TEST)  ## A Slurm cluster on this machine, as root, until Ctrl-C; CLUSTER_ARGS=--help
	@$(BIN)/python tests/cluster $(CLUSTER_ARGS)

clean:  ## Remove the virtual environment, caches and what was built; runs stay
	rm -rf $(VENV) build dist site .cache src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests recipes benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# pip comes last into a new environment: when it is there, the environment is whole.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(FOR_DEMO): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[recipes]'
	@touch $@

$(FOR_TEST): pyproject.toml constraints.txt | $(BIN)/pip
	$(INSTALL) -e '.[test]'
	@touch $@ $(FOR_DEMO)
