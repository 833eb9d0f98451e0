# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Caches (tools, vLLM, the wasm32 compiler) live in ~/.cache/meridian, keyed by version, safe to delete.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# vLLM's environment keeps the byte code that it compiles.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help fetch demo test test-all test-matrix canary check docs fuzz serve figures gpu policies wheel release clean

ARGS ?=
ONLY ?= quick
PART ?=
PORT ?= 8000
SECONDS ?= 30
TARGETS ?=
VERSIONS ?=

help: ## List the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

fetch: # vLLM, beside the compiler, which leaves the network idle
	@scripts/fetch.sh vllm >/dev/null &

demo: fetch ## Run the real vLLM engine three times (stock, stock with smaller steps, Meridian) and compare; ARGS="--trace FILE --policy FILE.wasm"
	@scripts/demo.sh $(ARGS)

test: fetch ## Run the core of the tests, the real engine included; CI runs this
	@scripts/test.sh

test-all: fetch ## Run every test; nightly, and before a release
	@scripts/test.sh --all

test-matrix: policies ## Run the engine tests on every supported vLLM; VERSIONS="0.30.0 0.31.0" for some
	scripts/test-matrix.sh $(VERSIONS)

canary: fetch policies ## Report what the newest vLLM of the index has moved, places and tests; ARGS="--checkout DIR"
	@py=$$(scripts/build-wheel.sh); cargo build --release --locked --workspace --example hostile; mkdir -p target/hostile; \
	target/release/examples/hostile target/hostile > target/hostile/kinds.txt; "$$py" -m checks.canary $(ARGS)

check: ## The fast gate: formatting, lints, documentation, dependencies, types
	@scripts/check.sh

docs: ## Build the book into target/book; look up links, marks of commands, workflows and the licences of dependencies
	scripts/check-docs.sh
	scripts/check-ci.sh
	scripts/check-deps.sh

fuzz: ## Fuzz each target for so many seconds, its checked-in corpus first; SECONDS=30 TARGETS="admin answer"
	scripts/fuzz.sh $(SECONDS) $(TARGETS)

serve: fetch policies ## Start the OpenAI server with the plugin on 127.0.0.1:$(PORT), with a small model that thinks; ARGS="--max-num-seqs 8"
	@py=$$(scripts/build-wheel.sh); scripts/serve.sh "$$py" $(PORT) $(ARGS)

figures: fetch policies ## Measure the must-show figures, one JSON line each: the quick form of all areas, or ONLY=levels
	@py=$$(scripts/build-wheel.sh); "$$py" -m checks --only $(ONLY) $(addprefix --part ,$(PART))

gpu: fetch policies ## Check and measure everything on a GPU; ARGS="--model DIR --small"; ARGS="--dry-run" without one
	@py=$$(scripts/build-wheel.sh); "$$py" -m checks.gpu $(ARGS)

policies: ## Build the shipped policies into target/policies
	@scripts/build-policies.sh >&2

wheel: ## Build the wheel and install it beside vLLM
	@scripts/build-wheel.sh

release: ## Make the release folder dist/ from a clean commit; MERIDIAN_RELEASE_KEY=FILE
	scripts/release.sh

clean: ## Remove build results; caches stay
	rm -rf target policies/target
