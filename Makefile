# Every target sets up what it needs: a virtual environment with pinned packages, and a Java for Spark.
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GB ?= 1
ROWS ?= 2000000
HISTORIES ?= 100
KILLS ?= 1000
SEED ?= 1
REFRESHES ?= 500
REPETITIONS ?= 3
# Of `make example`.
NAME ?= dbt
# Containers often set it. Every Python that Spark, Dagster and the sandbox start would compile anew whatever it imports.
unexport PYTHONDONTWRITEBYTECODE
WITH_JAVA = JAVA_HOME="$$(scripts/find-java)" && export JAVA_HOME &&

# What every Spark of the tests loads, kept once: each of them starts in half the time.
CLASSES := build/classes/.ready

.PHONY: help setup java chromium lint format test demo dev bench bench-check profile audit docs docs-tables torture soak histories clients example clean
.DEFAULT_GOAL := help

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(READY) java ## virtual environment with pinned packages, Java check

$(READY): pyproject.toml constraints.txt
	@python=$$(scripts/find-python) && echo "Setting up $(VENV) with $$python (two to five minutes, 1.8 GB)…" && "$$python" -m venv $(VENV)
	@echo "Installing pinned packages: Dagster, pyspark, Hyper, the sandbox, tools for tests and docs…"
	@# Without --no-compile pip would compile for a minute, most of it for modules that nobody imports; the others are
	@# compiled when they are first imported.
	@$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[sandbox,dev,docs]'
	@touch $@
	@echo "$(VENV) is ready. Next: make demo, or source $(BIN)/activate and tir --help (docs/quick-start.md)."

java:
	@scripts/find-java >/dev/null

chromium:
	@scripts/find-chromium >/dev/null

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY) ## let ruff format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(CLASSES): $(READY)
	@rm -rf $(@D) && mkdir -p $(@D)
	@$(WITH_JAVA) TIR_HOME=$(@D) SPARK_SUBMIT_OPTS="$$($(BIN)/python -m tir_dagster_tests.jvm)" $(BIN)/tir warm-up >/dev/null
	@touch $@

test: setup chromium ## lint and all tests
	@$(MAKE) --no-print-directory --jobs 2 lint $(CLASSES)
	$(WITH_JAVA) $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

demo: setup ## a change and its refresh on the sandbox, slice by slice beside the source
	@$(WITH_JAVA) $(BIN)/tir demo

dev: setup ## Dagster's UI on the sandbox, with the history of what ran here
	@$(WITH_JAVA) $(BIN)/tir dev

bench: setup ## refreshes of ROWS=2000000 orders, each stage beside its bare limit; the contest with other ways (docs/benchmarks); a refresh in a new process; one dimension row of a joined extract and of a star; a package of GB=1 repacked beside a plain script; a load of files
	@$(WITH_JAVA) $(BIN)/python -m benchmarks --rows $(ROWS) --write-docs
	@$(WITH_JAVA) $(BIN)/python -m benchmarks contest --rows $(ROWS) --repetitions $(REPETITIONS) --write-docs
	@$(WITH_JAVA) $(BIN)/python -m benchmarks starts --write-docs
	@$(WITH_JAVA) $(BIN)/python -m benchmarks star --facts $(ROWS) --write-docs
	@$(BIN)/python -m benchmarks package --gb $(GB)
	@$(WITH_JAVA) $(BIN)/python -m benchmarks load

bench-check: setup ## what refreshes ask for (statements, rows, calls, events, files), beside the recorded budget (benchmarks/budget.json)
	@$(WITH_JAVA) $(BIN)/python -m benchmarks --check

profile: $(READY) ## what loading the definitions costs beyond importing Dagster, module by module
	@$(BIN)/python scripts/profile-definitions

torture: setup $(CLASSES) ## KILLS=1000 kills at every step of a refresh, a rollback and a load, full disks, cut networks; a table in build/torture.md; goes on where it was stopped
	@$(WITH_JAVA) $(BIN)/python -m tir_dagster_tests.torture --kills $(KILLS) --seed $(SEED)

histories: setup ## 10,000 random histories on the pure core, 300 through Hyper (docs/survival.md); goes on where it was stopped
	@$(WITH_JAVA) $(BIN)/python -m tir_dagster_tests.histories

LONG = $(patsubst %,orchestration/test_%.py,histories crashes twice faults server_histories server_ways server_delivery ranges views view_histories view_deliveries patch trigger many_extracts many_daemon cluster redefined_sources shared_state spark_server) refresh/state/test_workers.py test_deploy.py \
	sandbox/test_size.py sandbox/test_full_disk.py sandbox/warehouse/test_time_travel.py sandbox/warehouse/test_restart.py benchmarks/test_bench.py benchmarks/test_contest.py benchmarks/test_star.py cli/test_demo.py cli/setup

audit: $(READY) ## known vulnerabilities of the pinned packages, by pip-audit; exit code 2 if it or its data are not there
	@scripts/audit $(BIN)/python

docs: $(READY) ## the documentation as a site (build/site), every warning an error
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --conf-dir docs . build/site
	@echo "The site is built: open build/site/index.html"

docs-tables: setup ## write docs/reference and docs/bad-inputs.md anew, from what the code says
	TIR_WRITE_DOCS=1 $(BIN)/python -m pytest --quiet tir_dagster_tests/docs/test_reference.py
	$(WITH_JAVA) TIR_WRITE_DOCS=1 $(BIN)/python -m pytest tir_dagster_tests/orchestration/test_bad_inputs.py

soak: setup $(CLASSES) ## REFRESHES=500 refreshes of one extract, in which nothing grows (build/soak.svg); then the long forms of the tests: more random histories, every crash three times, two refreshes at once, every fault at every call, large tables
	@$(WITH_JAVA) $(BIN)/python -m tir_dagster_tests.soak --refreshes $(REFRESHES)
	$(WITH_JAVA) TIR_HISTORIES=$(HISTORIES) TIR_CRASHES=3 TIR_TWICE=20 TIR_FAULTS=all TIR_SIZE=full TIR_LONG=all $(BIN)/python -m pytest $(LONG:%=tir_dagster_tests/%)
	TIR_HISTORIES=$(HISTORIES) TIR_CRASHES=5 $(BIN)/python -m pytest tir_dagster_tests/loading
	$(WITH_JAVA) TIR_LONG=all $(BIN)/python -m pytest tir_dagster_tests/docs tir_dagster_tests/test_distribution.py
	@echo "soak: $(REFRESHES) refreshes and all long forms of the tests ran to their end, and all is well"

example: setup ## play an example on the sandbox: NAME=dbt, orders, star, entitlements, hints, teams, audit
	@test -x examples/$(NAME)/run.sh || { echo "There is no example $(NAME). Examples: $$(ls examples/*/run.sh | cut -d/ -f2 | xargs)" >&2; exit 2; }
	@examples/$(NAME)/run.sh

clients: setup ## foreign clients of the sandbox (dbt, …), each in a virtual environment of its own (build/clients)
	$(WITH_JAVA) TIR_CLIENTS=all $(BIN)/python -m pytest tir_dagster_tests/clients

clean: ## remove the virtual environment and caches (not the sandbox's data)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
