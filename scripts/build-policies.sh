#!/usr/bin/env bash
# Builds the shipped policies into components under target/policies.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
command -v cargo >/dev/null || die "cargo not found: Rust 1.95 or newer is needed"
env_file=$("$MERIDIAN_ROOT/scripts/fetch.sh" wasm32)
say "policies: building the host's command line (minutes the first time: it compiles wasmtime)"
build_host
say "policies: building components"
. "$env_file"
# The guests' target folder follows the compiler: artifacts of another rustc are not reused.
CARGO_TARGET_DIR=$MERIDIAN_ROOT/policies/target RUSTFLAGS=$GUEST_RUSTFLAGS \
  target/release/meridian policy build policies --out target/policies >&2
