#!/usr/bin/env bash
# Builds the wheel and installs it into the environment of the Python that setup-vllm.sh found; prints that Python.
set -euo pipefail
. "$(dirname "$0")/env.sh"
py=$("$MERIDIAN_ROOT/scripts/setup-vllm.sh")
tools=$("$MERIDIAN_ROOT/scripts/setup-tools.sh")
cd "$MERIDIAN_ROOT"
command -v cargo >/dev/null || die "cargo not found: Rust 1.95 or newer is needed"
say "wheel: building meridian (minutes the first time: it compiles wasmtime)"
build_host
rm -rf target/wheels
"$tools/bin/maturin" build --release --locked --quiet --manifest-path python/Cargo.toml --interpreter "$py" --out target/wheels >&2
"$tools/bin/uv" pip install -q --python "$py" --reinstall --no-deps target/wheels/*.whl
printf '%s\n' "$py"
