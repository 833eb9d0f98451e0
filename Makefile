# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Caches (tools, vLLM, the wasm32 compiler) live in ~/.cache/meridian, keyed by version, safe to delete.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
# vLLM's environment keeps the byte code that it compiles.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help fetch demo test test-matrix canary check docs fuzz serve figures gpu policies wheel release clean

# What a stage of a long command is about to do.
say = @printf '\033[1m==>\033[0m %s\n' "$(1)" >&2

ARGS ?=
ONLY ?= component
PART ?=
PORT ?= 8000
SECONDS ?= 30
TARGETS ?=
VERSIONS ?=

help: ## List the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

fetch: # vLLM, beside the compiler, which leaves the network idle
	@scripts/fetch.sh vllm >/dev/null &

demo: fetch ## Run the real vLLM engine three times (stock, stock with smaller steps, Meridian) and compare; ARGS="--trace FILE --policy FILE.wasm"
	@scripts/demo.sh $(ARGS)

test: fetch check policies ## Run every test, the real engine included
	scripts/fetch.sh cuda >/dev/null
	scripts/fetch.sh registry >/dev/null
	scripts/fetch.sh prometheus >/dev/null
	$(call say,host: tests of the workspace)
	cargo test --release --locked --workspace
	$(call say,kernels: tests of builds with CUDA's compilers)
	scripts/check-kernels.sh
	$(call say,loom: threads in every order)
	RUSTFLAGS="--cfg loom" cargo test --release --locked -p meridian-core -p meridian-memory --no-default-features --test loom --test blocks_loom --test slot_loom --target-dir target/loom
	$(call say,guests: tests of the policies)
	cargo test --locked --manifest-path policies/Cargo.toml --target-dir policies/target
	$(call say,fuzz: each target for 20 s)
	scripts/fuzz.sh 20
	@mkdir -p target/hostile
	target/release/examples/hostile target/hostile > target/hostile/kinds.txt # built by the tests above
	@py=$$(scripts/build-wheel.sh); MERIDIAN_TOKENIZERS=$$(scripts/fetch.sh tokenizers); export MERIDIAN_TOKENIZERS; \
	scripts/run-examples.sh "$$py"; scripts/test-python.sh "$$py"

test-matrix: policies ## Run the engine tests on every supported vLLM; VERSIONS="0.30.0 0.31.0" for some
	scripts/test-matrix.sh $(VERSIONS)

canary: fetch policies ## Report what the newest vLLM of the index has moved, places and tests; ARGS="--checkout DIR"
	@py=$$(scripts/build-wheel.sh); cargo build --release --locked --workspace --example hostile; mkdir -p target/hostile; \
	target/release/examples/hostile target/hostile > target/hostile/kinds.txt; "$$py" -m checks.canary $(ARGS)

check: docs ## The fast gate: formatting, lints, documentation, dependencies, types
	$(call say,lints: code and documentation and types)
	@tools=$$(scripts/fetch.sh tools); \
	cargo fmt --all --check; \
	cargo fmt --all --check --manifest-path policies/Cargo.toml; \
	cargo clippy --release --locked --workspace --all-targets -- -D warnings; \
	cargo clippy --release --locked --manifest-path policies/Cargo.toml --target-dir policies/target -q -- -D warnings; \
	RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --workspace --no-deps -q; \
	"$$tools/bin/ruff" format --check -q --config python/pyproject.toml python bench checks models scripts examples; \
	"$$tools/bin/ruff" check -q --config python/pyproject.toml python bench checks models scripts examples; \
	py=$$(scripts/fetch.sh vllm); "$$tools/bin/pyright" -p python/pyproject.toml --pythonpath "$$py"

docs: ## Build the book into target/book; look up links, marks of commands, workflows and the licences of dependencies
	scripts/check-docs.sh
	scripts/check-ci.sh
	scripts/check-deps.sh

fuzz: ## Fuzz each target for so many seconds, its checked-in corpus first; SECONDS=30 TARGETS="admin answer"
	scripts/fuzz.sh $(SECONDS) $(TARGETS)

serve: fetch policies ## Start the OpenAI server with the plugin on 127.0.0.1:$(PORT), with a small model that thinks; ARGS="--max-num-seqs 8"
	@py=$$(scripts/build-wheel.sh); scripts/serve.sh "$$py" $(PORT) $(ARGS)

figures: fetch policies ## Measure the must-show figures, one JSON line each; ONLY=component
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
