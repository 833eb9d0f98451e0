#!/usr/bin/env bash
# Builds the wheel: pack-wheel.sh FOLDER [OPTION OF maturin build...]. It has the Python package, with the engine and the `meridian`
# command in one module, `_native`, and a bill of materials.
set -euo pipefail
. "$(dirname "$0")/env.sh"
out=$(realpath -m "${1:?usage: pack-wheel.sh FOLDER [OPTION OF maturin build...]}"); shift
tools=$("$MERIDIAN_ROOT/scripts/fetch.sh" tools)
cd "$MERIDIAN_ROOT"
# An earlier build's command, which maturin would take for data of the package.
rm -rf python/meridian._native.data
build_host
# maturin calls `cargo rustc`, which takes one crate: its dependencies would be compiled once more, with that crate's features.
export CARGO=$MERIDIAN_ROOT/scripts/cargo-host.sh
"$tools/bin/maturin" build --release --locked --quiet --manifest-path python/Cargo.toml --out "$out" "$@" >&2
