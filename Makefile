# Everything runs in .venv, which is made on demand; only git, make and Python with venv are assumed.
#   make demo                                 the whole system on this machine, with three real prompts
#   make test                                 what gates a change: pure tests, the simulator, smokes with real processes
#   make test-all                             and what takes longer: real clusters, processes killed, many seeds, mutants
#   make proof                                an hour of it: every fault in every phase, 2,000 seeds, soak, times and memory
#   make soak MINUTES=10                      random faults and cancellations over a tiny model
#   make loadgen                              guidellm, a public load generator, against the HTTP API
#   make clients                              openai, instructor, LangChain, LiteLLM and Node's openai, each in a script
#   make vllm                                 vLLM in an environment of its own, for --engine vllm (make test-vllm: its tests)
#   make sim SEEDS=100000 JOBS=2              the simulation of a cluster under faults; goes on where it was stopped
#   make wheel, make release                  into dist/: wheels that need no compiler; all that a release has
#   make install PYTHON=python3.13            another interpreter (3.11 or newer)
#   make install TORCH_INDEX="--extra-index-url URL"   torch from another index (docs/installing.md)

PYTHON ?= python3
TORCH_INDEX ?=
PYTEST_ARGS ?=
# pytest's status 5, no tests: right only if somebody has chosen some by PYTEST_ARGS, and none of these.
NONE_CHOSEN = $(if $(PYTEST_ARGS), || test $$? = 5)
MINUTES ?= 10
SEEDS ?= 10000
START ?= 0
JOBS ?= 2
# Processes that run tests: one more than cores on a small machine, since tests wait now and then.
TEST_JOBS ?= 3
# One that dies ends the run: pytest-xdist would wait for the rest of its file for ever.
SIDE_BY_SIDE = -n $(TEST_JOBS) --dist loadfile --max-worker-restart 0
# Where the tests of the gate are (tests/conftest.py): asking there is quicker than looking through all.
GATE := tests/sim tests/contract tests/unit tests/deploy
BENCH_ARGS ?=
PROOF_ARGS ?=
SIM_ARGS ?=
DEMO_ARGS ?=
LOADGEN_ARGS ?=

# Commands and tests start many processes; each would compile the whole tree again.
export PYTHONDONTWRITEBYTECODE :=
# As `baton` has it: gRPC tells of each connection that a test breaks.
export GRPC_VERBOSITY ?= NONE

VENV := .venv
BIN := $(VENV)/bin
LOADGEN := out/loadgen-venv
CLIENTS := out/clients-venv
VLLM := out/vllm-venv
# What runs, and beside it what tests and checks need.
INSTALLED := $(VENV)/.installed
DEVELOPS := $(VENV)/.installed-dev
PATIENTLY := $(BIN)/python scripts/patiently.py
PIP_INSTALL = $(PATIENTLY) $(BIN)/python -m pip install --disable-pip-version-check --no-compile $(TORCH_INDEX) \
	--constraint requirements/constraints.txt --editable ./client
# Exits with 3 if it is too old; whatever cannot be run exits with something else.
IS_NEW_ENOUGH := 'import sys; sys.exit(3 * (sys.version_info < (3, 11)))'

.PHONY: help install packages kernels model protos format lint types contracts test test-all proof faults sim soak demo bench loadgen clients vllm test-vllm wheel release clean

help:
	@sed -n '2,14s/^#   //p' $(MAKEFILE_LIST)
	@echo "also: faults bench model protos format lint types contracts clean"

# Tests and benchmarks try instruction sets that are plainer than this processor's best, which all else takes.
test test-all bench: export BATON_KERNELS ?= processor

# A checkout may come to another processor: the kernels for this one are asked for each time, and mostly there.
install: $(INSTALLED)
	@$(PATIENTLY) $(BIN)/python -m services.engine.native.build --fetch-compiler || true

# The client is installed with a copy of what is generated from the protos.
$(INSTALLED): pyproject.toml client/pyproject.toml requirements/constraints.txt $(wildcard protos/baton/v1/*.proto)
	@$(PYTHON) -c $(IS_NEW_ENOUGH) 2>/dev/null || { \
		test $$? = 3 && what="$(PYTHON) is older" || what="there is no $(PYTHON) that runs"; \
		echo "Baton needs Python 3.11 or newer, and $$what. Try: make install PYTHON=python3.13" >&2; exit 1; }
	@test ! -e $(BIN)/python && test ! -L $(BIN)/python || $(BIN)/python -c $(IS_NEW_ENOUGH) 2>/dev/null || { \
		test $$? = 3 && what="was made by a Python older than 3.11" || what="has a Python that does not run"; \
		echo "$(VENV) $$what. Remove it, and it is made anew: rm -r $(VENV)" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) scripts/patiently.py $(PYTHON) -m venv $(VENV)
# Of what is installed little is ever imported: that is compiled then, and not all of it here, which took 40 s.
# Beside pip, which keeps one core busy at most, the kernels are compiled if a compiler is there; `install` says so.
	$(MAKE) --no-print-directory -j 2 packages kernels
	touch $@

packages:
	$(PIP_INSTALL) --editable '.[worker]'

kernels:
	@$(PYTHON) -m services.engine.native.build >/dev/null 2>&1 || true

$(DEVELOPS): $(INSTALLED)
	$(PIP_INSTALL) --editable '.[dev]'
	touch $@

model: install
	$(BIN)/baton models pull

protos: $(DEVELOPS)
	PYTHON=$(BIN)/python scripts/gen_protos.sh

format: $(DEVELOPS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: $(DEVELOPS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint
	$(BIN)/python scripts/config_table.py --check
	$(BIN)/python scripts/compose_table.py --check
	$(BIN)/python scripts/slo_rules.py --check

types: $(DEVELOPS)
	$(BIN)/mypy
	$(BIN)/mypy --implicit-reexport --cache-dir .mypy_cache/tests tests benchmarks scripts examples

contracts: $(DEVELOPS)
	$(BIN)/lint-imports
	PYTHON=$(BIN)/python scripts/gen_protos.sh --check

# tests/conftest.py says which test is in which tier. Tests run side by side where they wait or compute, one by one where
# they start processes or measure time or memory. No test of the gate measures anything; a smoke that may have failed
# because the machine is busy runs once more (tests/smoke/conftest.py).
test: install $(DEVELOPS)
	$(BIN)/python -m pytest -m gate $(SIDE_BY_SIDE) $(PYTEST_ARGS) $(GATE)$(NONE_CHOSEN)
	$(BIN)/python -m pytest tests/smoke $(PYTEST_ARGS) || case $$? in \
		1) echo "== once more:"; $(BIN)/python -m pytest tests/smoke --last-failed -rA $(PYTEST_ARGS) ;; \
		5) test -n "$(PYTEST_ARGS)" ;; \
		*) exit 1 ;; \
		esac

test-all: export BATON_EXAMPLES = all
test-all: test model
	$(BIN)/python -m pytest -m "not gate and not process and not clock and not proof" $(SIDE_BY_SIDE) \
		--durations 15 $(PYTEST_ARGS)$(NONE_CHOSEN)
	$(BIN)/python -m pytest -m "process and not clock and not smoke and not proof" --durations 15 $(PYTEST_ARGS)$(NONE_CHOSEN)

# An hour of it: what is found goes into a file under benchmarks/results. It goes on where it was ended.
proof: model $(DEVELOPS)
	PYTHONPATH=.:gen $(BIN)/python -m tests.proof $(PROOF_ARGS)

# Real processes killed, stopped and cut off: all of it. On a busy machine it takes its time.
faults: model $(DEVELOPS)
	$(BIN)/python -m pytest -m faults tests/integration/faults $(PYTEST_ARGS)

sim: $(DEVELOPS)
	PYTHONPATH=.:gen $(BIN)/python -m tests.sim --seeds $(SEEDS) --start $(START) --jobs $(JOBS) \
		--resume out/sim-$(START)-$(SEEDS).jsonl $(SIM_ARGS)

soak: install $(DEVELOPS)
	PYTHONPATH=.:gen $(BIN)/python -m tests.soak --minutes $(MINUTES)

demo: model
	$(BIN)/python scripts/demo.py $(DEMO_ARGS)

bench: install $(DEVELOPS)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# In an environment of its own: what a load generator needs differs from what Baton needs.
loadgen: model $(LOADGEN)/.installed
	$(BIN)/python scripts/loadgen.py $(LOADGEN_ARGS)

$(LOADGEN)/.installed: requirements/loadgen.txt
	test -x $(LOADGEN)/bin/pip || $(PYTHON) -m venv $(LOADGEN)
	$(LOADGEN)/bin/python -m pip install --disable-pip-version-check $(TORCH_INDEX) --requirement requirements/loadgen.txt
	touch $@

# Clients that nobody here wrote, in an environment of their own; the tests skip what is not installed.
clients: $(DEVELOPS) $(CLIENTS)/.installed
	$(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

$(CLIENTS)/.installed: requirements/clients.txt tests/clients/node/package-lock.json
	test -x $(CLIENTS)/bin/pip || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --requirement requirements/clients.txt
	command -v npm >/dev/null && npm ci --prefix tests/clients/node --no-audit --no-fund --ignore-scripts || \
		echo 'no npm: the clients in Node are left out'
	touch $@

# vLLM needs other packages than Baton does. Of Baton's own code, which is not installed there, it gets what runs there.
vllm: $(VLLM)/.installed

test-vllm: model $(VLLM)/.installed $(DEVELOPS)
	$(BIN)/python -m pytest tests/vllm $(PYTEST_ARGS)$(NONE_CHOSEN)

$(VLLM)/.installed: requirements/vllm.txt
	test -x $(VLLM)/bin/pip || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check $(TORCH_INDEX) --requirement requirements/vllm.txt
	$(VLLM)/bin/python -m pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -c 'import vllm'
	touch $@

# The kernels in it are for every processor of this architecture, and for systems as old as torch runs on.
wheel: $(DEVELOPS)
	$(BIN)/python scripts/wheels.py dist

# Whatever lies in dist/ goes into the digests, so it begins empty. Nothing is published.
release: $(DEVELOPS)
	@test -z "$$(git status --porcelain)" || { echo "make release: there are changes that are not committed" >&2; exit 1; }
	rm -rf dist
	$(BIN)/python scripts/wheels.py dist
	$(BIN)/python scripts/release.py dist

clean:
	rm -rf out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo-trace.jsonl
	find . -path ./$(VENV) -prune -o -type d -name __pycache__ -exec rm -rf {} +
