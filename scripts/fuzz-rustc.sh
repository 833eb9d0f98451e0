#!/usr/bin/env bash
# rustc for the crates of this workspace when they are fuzzed: with the coverage that libFuzzer follows, and with the checks
# that release builds leave out. Set as RUSTC_WORKSPACE_WRAPPER, so dependencies are those of every other build.
set -euo pipefail
rustc=$1; shift
case " $* " in
  # Asked for its version, or a program that cargo runs: nothing there is fuzzed, nor linked with the fuzzer.
  *" --crate-name build_script_"* | *" --crate-name ___ "* | *" -vV "*) exec "$rustc" "$@" ;;
esac
exec "$rustc" "$@" \
  -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
  -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares \
  -Cdebug-assertions=on -Coverflow-checks=on
