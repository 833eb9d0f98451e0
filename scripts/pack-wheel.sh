#!/usr/bin/env bash
# Builds the wheel: pack-wheel.sh FOLDER [OPTION OF maturin build...]. It has the Python package, with the engine as its module
# `_native`, and the `meridian` command, a binary that installers put beside Python. Each has a bill of materials.
set -euo pipefail
. "$(dirname "$0")/env.sh"
out=$(realpath -m "${1:?usage: pack-wheel.sh FOLDER [OPTION OF maturin build...]}"); shift
tools=$("$MERIDIAN_ROOT/scripts/fetch.sh" tools)
cd "$MERIDIAN_ROOT"
build_host
# maturin calls `cargo rustc`, which takes one crate: its dependencies would be compiled once more, with that crate's features.
export CARGO=$MERIDIAN_ROOT/scripts/cargo-host.sh
build() { "$tools/bin/maturin" build --release --locked --quiet "$@" >&2; }
# maturin takes the binary from a folder of this name, and bills of materials from below the crate only.
data=python/meridian._native.data
bills=python/target/bills
rm -rf "$data" "$bills"
build --manifest-path host/cli/Cargo.toml --compression-method stored --out "$bills"
command=$(basename "$bills"/meridian_cli-*.whl .whl)
python3 -m zipfile -e "$bills/$command.whl" "$bills"
install -D --strip -m 755 "$bills"/*.data/scripts/meridian "$data/scripts/meridian"
# The glibc that the command needs, for the whole: maturin would look at the module alone.
platform=${command##*-}; platform=${platform%%.*}
build --manifest-path python/Cargo.toml --compatibility "${platform%_"$(uname -m)"}" \
  --sbom-include "$(cd python && echo target/bills/*.dist-info/sboms/meridian-cli.*.json)" --out "$out" "$@"
