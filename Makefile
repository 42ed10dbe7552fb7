# Every target works as the first command on a fresh machine.
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
BENCHMARKS := $(filter-out benchmarks/common.py,$(sort $(wildcard benchmarks/*.py)))

.PHONY: help install demo demo-cluster cluster test test-fast test-unit test-engine test-ranks test-cluster lint format images figures docs pictures generate bench constraints clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: ## create .venv with the kvtier command, the engine and all tools
	@tools/install

ifdef KVTIER_VLLM
demo:
	@PYTHONPATH="connector:operator$${PYTHONPATH:+:$$PYTHONPATH}" $(KVTIER_VLLM) -m kvtier.cli.demo
else
demo: install ## run the main job: a real vLLM reloads what it computed (KVTIER_VLLM=python: use an installed vLLM)
	@$(PYTHON) -m kvtier.cli.demo
endif

demo-cluster: install ## run chart, operator and vLLM in pods on a real Kubernetes (root; 5 to 10 minutes)
	@tools/debian-packages
	@$(PYTHON) tests/cluster/demo_cluster.py

cluster: install ## keep a Kubernetes cluster on this machine to try KVTier on (root; see the README)
	@tools/debian-packages
	@$(PYTHON) tests/cluster/local_cluster.py start

test: install ## run lint, then every test, with the real engine and the real API server
	@tools/debian-packages
	@$(MAKE) --no-print-directory lint
	@$(PYTHON) -m pytest --numprocesses 3 --max-worker-restart 0

test-fast: install ## run the tests of pure functions and single modules (below 3 minutes)
	@$(PYTHON) -m pytest --numprocesses 2 -m "not engine and not cluster and not slow" tests/unit

test-unit: install ## run the tests that need neither engine nor cluster
	@$(PYTHON) -m pytest -m "not engine and not cluster"

test-engine: install ## run the tests with a real vLLM
	@$(PYTHON) -m pytest -m engine

test-ranks: install ## run the tests of engines with up to 8 ranks (3 minutes)
	@$(PYTHON) -m pytest tests/engine/test_ranks.py

test-cluster: install ## run the tests with a real Kubernetes API server
	@$(PYTHON) -m pytest -m cluster

lint: install ## check style, format, import layers, prose and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@PYTHONPATH=connector:operator .venv/bin/lint-imports
	@$(PYTHON) tools/prose.py
	@.venv/bin/mypy

format: install ## format the code with ruff
	@.venv/bin/ruff check --fix .
	@.venv/bin/ruff format .

images: ## build the container images and their bills of materials into dist/images (root, Debian)
	@tools/debian-packages
	@python3 tools/images

figures: install ## measure the layout of the code
	@$(PYTHON) tools/figures.py

bench: install ## run every benchmark; each ends with one ratio
	@set -e; for each in $(BENCHMARKS); do echo "== $$each"; $(PYTHON) $$each; done

docs: ## build the documentation as a site in build/site; a broken link or anchor is an error
	@tools/docs

pictures: install ## draw the panels of the dashboards from a real engine and Prometheus (docs/images)
	@KVTIER_PICTURES=docs/images $(PYTHON) -m pytest -q -m "engine or cluster" tests/engine/test_monitoring.py tests/cluster/test_monitoring.py

generate: install ## generate crds/, the reference pages, alerts, dashboards and the chart's files from the code
	@$(PYTHON) -m kvtier_operator.api.crd
	@$(PYTHON) -m kvtier_operator.api.reference
	@$(PYTHON) tools/chart_files.py
	@$(PYTHON) -m tools.monitoring
	@$(PYTHON) -m tools.sizing
	@$(PYTHON) -m tools.diagrams
	@$(PYTHON) -m tools.cli_reference
	@$(PYTHON) -m tools.chart_golden

constraints: ## write constraints.txt: the newest releases that pyproject.toml and overrides.txt allow
	@tools/uv pip compile --quiet --upgrade --all-extras --override overrides.txt --python-version 3.11 --no-emit-package kvtier --no-header --no-annotate --output-file constraints.txt pyproject.toml

clean: ## remove what the targets created
	rm -rf .venv .tools build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
