# `make demo` is the way in; `make help` lists the rest.
# Settings: SOURCE=pypi:NAME (what the demo works on), PYTHON=python3.12, PYTEST='-k name'.

SOURCE ?= pypi:boltons
VENV := .venv/bin
NOT_HERE := not services and not cluster and not gpu
export PATH := $(CURDIR)/$(VENV):$(PATH)

.PHONY: demo test test-services lint bench clean help

help:  ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/stamp  ## a package becomes tasks, an agent works on them and learns
	@posttrain demo --source $(SOURCE)

test: lint  ## lint, types and every test that needs no service (10 minutes on two cores)
	pytest -n 2 --dist worksteal -m "$(NOT_HERE)" $(PYTEST)

test-services: .venv/stamp  ## the tests that need services or toolchains
	.ci/services pytest -m "services" $(PYTEST)

lint: .venv/stamp  ## style, layers between rooms, types
	ruff check .
	ruff format --check .
	lint-imports
	pyright

bench: .venv/stamp  ## every benchmark that needs no finished demo prints its table
	@for file in benchmarks/*.py; do \
	    name=$$(basename $$file .py); \
	    case $$name in _*|demo_*|formats|hacks|ngram|packages) ;; *) echo "== $$name"; python -m benchmarks.$$name || exit 1;; esac; \
	done

clean:  ## remove the environment, caches and the demo's run
	rm -rf .venv .pytest_cache .ruff_cache runs/demo build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/stamp: pyproject.toml .ci/setup
	@.ci/setup
