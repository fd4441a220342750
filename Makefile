# Everything sets itself up: a fresh machine needs Python 3.11, gcc and a package index.
PYTHON ?= python3
BIN := .venv/bin
BASE := .venv/.base
SETUP := .venv/.setup
# Keep bytecode whatever the environment says: without it each process compiles all that it imports.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test model core thorough rest lint exact load soak hostile conformance mutants bench bench-check format clean
.DEFAULT_GOAL := test

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt

$(BASE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing Freehold into .venv ..."
	@$(INSTALL) -e .
	@touch $@

$(SETUP): $(BASE)
	@echo "Installing what the tests need ..."
	@$(INSTALL) -e '.[test]'
	@touch $@

demo: $(BASE)  ## Serve the bundled model to several clients at once, and show where its memory went
	@$(BIN)/freehold demo

HOURS := not exact and not load and not soak and not hostile

# One process more than two cores: some tests wait.
PYTEST := $(BIN)/pytest -n 3 --dist worksteal -m "$(HOURS)"

test: $(SETUP)  ## Static checks beside the core of the tests: of large matrices a few cells, others with each commit
	@$(MAKE) --no-print-directory -j 2 lint core

model: $(SETUP)
	@$(BIN)/python -m freehold.models.loading.bundled

core: model
	@$(PYTEST)

thorough: lint model  ## Every cell of every test, sizes, storms, references: an hour
	@$(PYTEST) --thorough

PART ?= 8
rest: model  ## An eighth of what `make test` leaves out, others with each commit (PART=8)
	@$(PYTEST) --rest $(PART)

lint: $(SETUP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

exact: $(SETUP)  ## Tokens equal to transformers', over the full matrix
	@$(BIN)/pytest -m exact

load: $(SETUP)  ## 64 clients, 1,000 requests each, random aborts, a quarter of the memory
	@$(BIN)/pytest -m load

soak: $(SETUP)  ## Ten minutes of everything at once on a real server, its processes killed; days and kills with each store
	@$(BIN)/pytest -m soak

hostile: $(SETUP)  ## Hostile clients, attacks in turns, 10,000 faults, bodies from the schema: ten minutes or more each
	@$(BIN)/pytest -m hostile -s

conformance: $(SETUP)  ## Programs of others beside Freehold: Dynamo's indexer, SGLang's tests of constrained output and tools
	@test -x .venv-conformance/bin/python || $(PYTHON) -m venv .venv-conformance
	@.venv-conformance/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		ai-dynamo==1.4.2 ai-dynamo-runtime==1.4.2
	@.venv-conformance/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--dest .venv-conformance/wheels sglang==0.5.23
	@.venv-conformance/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
		--no-binary llama-cpp-python --dest .venv-conformance/wheels llama-cpp-python==0.3.36
	@CONFORMANCE_PYTHON=.venv-conformance/bin/python $(BIN)/pytest conformance

mutants: $(SETUP)  ## Bugs planted by hand, which tests must catch, and random ones (SAMPLE=200 SEED= FOLDERS= SHARE=1/3 MINUTES=)
	@$(BIN)/python tests/mutants $(SAMPLE:%=--sample %) $(SEED:%=--seed %) $(SHARE:%=--share %) \
		$(MINUTES:%=--minutes %) $(if $(FOLDERS),--folders $(FOLDERS))

PEERS ?= vllm openvino llama.cpp llama.cpp-q4_0
bench: $(SETUP)  ## Five workloads beside other engines (llama.cpp builds for half an hour, once: PEERS="vllm openvino")
	@$(INSTALL) -e '.[bench]'
	@$(BIN)/freehold bench peers $(PEERS:%=--peer %)

bench-check: $(SETUP)  ## Is anything slower than the last time on this kind of processor?
	@$(BIN)/freehold bench check

format: $(SETUP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-conformance
