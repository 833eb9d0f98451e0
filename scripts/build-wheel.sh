#!/usr/bin/env bash
# Builds the wheel and installs it into the environment of the Python that `fetch.sh vllm` found; prints that Python.
set -euo pipefail
. "$(dirname "$0")/env.sh"
py=$("$MERIDIAN_ROOT/scripts/fetch.sh" vllm)
tools=$("$MERIDIAN_ROOT/scripts/fetch.sh" tools)
cd "$MERIDIAN_ROOT"
command -v cargo >/dev/null || die "cargo not found: Rust 1.95 or newer is needed"
say "wheel: building meridian (minutes the first time: it compiles wasmtime)"
rm -rf target/wheels
scripts/pack-wheel.sh target/wheels --interpreter "$py"
"$tools/bin/uv" pip install -q --python "$py" --reinstall --no-deps target/wheels/*.whl
printf '%s\n' "$py"
