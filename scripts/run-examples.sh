#!/usr/bin/env bash
# Runs everything under examples/ with the Python given: usage run-examples.sh PYTHON
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
say "examples: offline.py"
"${1:?usage: run-examples.sh PYTHON}" examples/offline.py >/dev/null
say "examples: embed"
target/release/examples/embed >/dev/null # built by cargo test
say "examples: own-memory"
target/release/examples/own-memory >/dev/null
say "examples: shortest-prompt"
env_file=$(scripts/fetch.sh wasm32)
( . "$env_file"
  CARGO_TARGET_DIR=$MERIDIAN_ROOT/policies/target RUSTFLAGS=$GUEST_RUSTFLAGS target/release/meridian policy build examples/shortest-prompt --out target/examples >/dev/null )
target/release/meridian policy check target/examples/shortest-prompt.wasm >/dev/null
target/release/meridian bench replay --workload reasoning-chat --requests 200 --policy balanced --policy target/examples/shortest-prompt.wasm >/dev/null
