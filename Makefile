# Every verb does its own set-up: nothing is needed but make and Python 3.11 to 3.14.
.DEFAULT_GOAL := help
.PHONY: help demo test lint typecheck bench docs clean

BIN := .venv/bin
CODE := src tests recipes benchmarks
BENCH ?= $(wildcard benchmarks/*.py)
TORCH := torch>=2.9,<2.14
SUITABLE := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))

help: ## say what can be done
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/ready ## train the text-to-SQL agent and watch its reward climb
	@$(BIN)/lightningrl demo

test: .venv/ready ## run all tests (ARGS="-k name" for some)
	@$(BIN)/python -m pytest $(ARGS)

lint: .venv/ready ## check style, format and the walls between the packages
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

typecheck: .venv/ready ## check types
	@$(BIN)/pyright

bench: .venv/ready ## measure what the README claims (BENCH=benchmarks/engine.py for one)
	@for script in $(BENCH); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

docs: .venv/ready ## check that what the docs name exists
	@$(BIN)/python -m pytest tests/docs

clean: ## remove everything that was installed or built, but no runs
	@rm -rf .venv dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

# Torch comes first, with the bound of pyproject.toml: on its own line pip picks the build that fits its own settings (see the README).
.venv/ready: pyproject.toml
	@for python in "$(PYTHON)" python3 python3.14 python3.13 python3.12 python3.11 python; do \
	  test -n "$$python" && "$$python" -c '$(SUITABLE)' 2>/dev/null && break; \
	done || { echo "error: no Python 3.11 to 3.14 with venv found" >&2; \
	  echo "hint: install one (Debian, Ubuntu: apt install python3-venv), or name it: make PYTHON=/path/to/python" >&2; exit 2; }; \
	echo "setting up .venv with $$python (once; takes minutes)"; \
	test -x $(BIN)/python || "$$python" -m venv .venv
	@$(BIN)/python -m pip install -qq --disable-pip-version-check '$(TORCH)'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@
