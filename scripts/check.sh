#!/usr/bin/env bash
# The fast gate: documentation, formatting, lints, dependencies, types. `make test` begins with it.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
tools=$(stage "fetching: tools" scripts/fetch.sh tools)
ruff() { "$tools/bin/ruff" "$@" --config python/pyproject.toml python bench checks models scripts examples; }
stage "documentation, workflows, licences" make -s docs
cargo fmt --all --check
cargo fmt --all --check --manifest-path policies/Cargo.toml
ruff format --check -q
ruff check -q
stage "clippy, compile" cargo clippy --release --locked --workspace --all-targets -- -D warnings
stage "clippy of the policies, compile" cargo clippy --release --locked --manifest-path policies/Cargo.toml --target-dir policies/target -q -- -D warnings
RUSTDOCFLAGS="-D warnings" stage "rustdoc, compile" cargo doc --release --locked --workspace --no-deps -q
py=$(stage "fetching: vllm" scripts/fetch.sh vllm)
stage "pyright" "$tools/bin/pyright" -p python/pyproject.toml --pythonpath "$py"
