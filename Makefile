# Every target can be the first command on a fresh machine.
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
BENCHMARKS := $(filter-out benchmarks/common.py,$(sort $(wildcard benchmarks/*.py)))

.PHONY: help install demo demo-cluster test test-unit test-engine test-cluster lint format generate bench constraints clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: ## make .venv with the kvtier command, the engine and all tools
	@tools/install

ifdef KVTIER_VLLM
demo:
	@PYTHONPATH="connector:operator$${PYTHONPATH:+:$$PYTHONPATH}" $(KVTIER_VLLM) -m kvtier.cli.demo
else
demo: install ## the main job: a real vLLM reloads what it already computed (KVTIER_VLLM=python: with an installed vLLM)
	@$(PYTHON) -m kvtier.cli.demo
endif

demo-cluster: install ## the whole loop on a real Kubernetes: chart, operator, vLLM in pods (root; about 5 minutes)
	@tools/debian-packages
	@$(PYTHON) tests/cluster/demo_cluster.py

test: install ## lint, then every test, the real engine and the real API server included
	@tools/debian-packages
	@$(MAKE) --no-print-directory lint
	@$(PYTHON) -m pytest --numprocesses 2 --max-worker-restart 0

test-unit: install ## the tests that need neither engine nor cluster
	@$(PYTHON) -m pytest -m "not engine and not cluster"

test-engine: install ## the tests with a real vLLM
	@$(PYTHON) -m pytest -m engine

test-cluster: install ## the tests with a real Kubernetes API server
	@$(PYTHON) -m pytest -m cluster

lint: install ## ruff, formatting, layers, types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@PYTHONPATH=connector:operator .venv/bin/lint-imports
	@.venv/bin/mypy

format: install ## let ruff put everything in order
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

bench: install ## every benchmark; each ends with one ratio
	@set -e; for each in $(BENCHMARKS); do echo "== $$each"; $(PYTHON) $$each; done

generate: install ## write crds/, the reference page and the chart's files anew from the code
	@$(PYTHON) -m kvtier_operator.api.crd
	@$(PYTHON) -m kvtier_operator.api.reference
	@$(PYTHON) tools/chart_files.py

constraints: ## write constraints.txt anew: the newest releases that pyproject.toml and overrides.txt allow
	@tools/uv pip compile --quiet --upgrade --all-extras --override overrides.txt --python-version 3.11 --no-emit-package kvtier --no-header --no-annotate --output-file constraints.txt pyproject.toml

clean: ## remove what the targets made
	rm -rf .venv .tools build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
