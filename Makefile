# `make demo` and `make test` each work alone on a fresh clone: they create .venv, install the
# tested set of packages into it, then run. Nothing is installed again until pyproject.toml,
# constraints.txt or a lock file changes.

PYTHON ?= python3
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
LOCKED := $(PIP) --require-hashes --no-deps
PACKAGE := $(PIP) --no-build-isolation --no-deps -e .
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
INSTALLED_FOR_DEMO := $(VENV)/.installed-demo
INSTALLED_FOR_BENCH := $(VENV)/.installed-bench

# One torch thread a worker: two workers with two threads each would fight over two cores. The third
# worker computes while the others wait for processes and browsers. With work stealing neighbours
# stay on one worker, so that what the tests of a file share is made once.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help setup check test lint types format demo bench docs wheel wheel-test chromium deploy-tools web-runtime clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      see what Engram does"
	@echo "make check     lint and the fast tests: after every change (a minute)"
	@echo "make test      lint, types and all tests: before a change lands"
	@echo "make setup     create $(VENV) and install, nothing else"
	@echo "make lint      ruff, the import contract and hadolint     make format   let ruff fix and format"
	@echo "make types     mypy --strict"
	@echo "make bench     speed compared with other libraries: benchmarks/results/speed.md (45 minutes)"
	@echo "make docs      build the documentation into site/"
	@echo "make wheel     build the wheel and the sdist into dist/"
	@echo "make wheel-test   the wheel in an empty environment outside of this folder (a minute)"
	@echo "make chromium  install the browser that page tests drive"
	@echo "make deploy-tools  install the proxy and the systemd tools that tests of deploy/ run"
	@echo "make web-runtime   fetch onnxruntime-web, with which tests run exported pages"
	@echo "make clean     remove $(VENV) and everything that was built"

setup: $(INSTALLED)

$(READY): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "There is no '$(PYTHON)' on the PATH: name a Python of version 3.11 or newer, as in 'make setup PYTHON=python3.12'." >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Engram needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name another one, as in make setup PYTHON=python3.12." % sys.version_info[:2])'
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(INSTALLED): $(INSTALLED_FOR_DEMO) locks/dev.txt
	$(LOCKED) -r locks/dev.txt
	@test -e $(INSTALLED_FOR_BENCH) || $(BIN)/python -m pip check
	@touch $@

# The demo needs less than development does, and whoever wants to see it should not wait for more.
# torch comes after the lock file, so that what it needs is there already, with its hashes checked.
# torch itself has none: its builds for CPU and for each version of CUDA have different hashes.
# The build tools are locked too, so the build is not isolated from them.
$(INSTALLED_FOR_DEMO): $(READY) locks/demo.txt
	$(LOCKED) -r locks/demo.txt
	$(PIP) -c constraints.txt torch
	$(PACKAGE)
	@touch $@

# vit-pytorch declares torchvision, which it needs for nothing that is measured here and which
# does not import beside a CPU torch: it is installed without its dependencies.
$(INSTALLED_FOR_BENCH): $(INSTALLED) locks/bench.txt
	$(LOCKED) -r locks/bench.txt
	@touch $@

check: lint
	$(TESTS) -m fast

test: lint types
	$(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/hadolint deploy/Dockerfile

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(INSTALLED_FOR_DEMO)
	$(BIN)/engram demo

# ARGS=--resume continues an interrupted run, ARGS=--quick only shows that everything runs.
bench: $(INSTALLED_FOR_BENCH)
	$(BIN)/python -m benchmarks.speed $(ARGS)

# site/try/ is the demo's bundle as a page that runs in a browser, from a server (python -m http.server -d site).
docs: setup web-runtime
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@test -d demo/bundle || $(BIN)/engram demo >/dev/null
	@package=$$(ls $(VENV)/onnxruntime-web-*.tgz 2>/dev/null); \
		$(BIN)/engram export demo/bundle --web site/try $${package:+--runtime $$package} >/dev/null
	@echo "The documentation is in site/index.html, and the demo to try in site/try/."

wheel: setup
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

# As somebody who has only the wheel would do it; the constraints keep other builds of torch out.
wheel-test: wheel
	PYTHON="$(PYTHON)" scripts/try_wheel.sh dist/*.whl

# Only what drives a page needs a browser: without one those tests are skipped, and say so.
chromium:
	@command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 \
		|| echo "There is no chromium here and apt-get cannot install it: tests that open pages will be skipped." >&2

# Only tests of deploy/ need a proxy and systemd's tools: without them those are skipped, and say so.
deploy-tools:
	@command -v caddy >/dev/null && command -v systemd-analyze >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends caddy systemd; } >/dev/null 2>&1 \
		|| echo "caddy or systemd-analyze is missing and apt-get cannot install it: tests that run them will be skipped." >&2

# Only tests that run an exported page need it: without it those are skipped, and say so.
web-runtime: setup
	@$(BIN)/python scripts/fetch_web_runtime.py $(VENV) >/dev/null \
		|| echo "Tests that run models in a browser will be skipped." >&2

clean:
	rm -rf $(VENV) site dist build demo .import_linter_cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
