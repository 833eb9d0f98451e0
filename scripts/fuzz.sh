#!/usr/bin/env bash
# usage: fuzz.sh SECONDS [TARGET...]
# Fuzzes each target for that long, the checked-in corpus first. What it finds to be new is kept in target/fuzz/TARGET/corpus,
# an input that the host does not withstand in target/fuzz/TARGET; it then belongs into host/fuzz/corpus/TARGET.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
seconds=${1:?usage: fuzz.sh SECONDS [TARGET...]}; shift
[ $# -gt 0 ] || set -- $(ls host/fuzz/corpus)
command -v c++ >/dev/null || die "c++ not found: libFuzzer is compiled from source (Debian: apt-get install g++)"
bins=()
for target in "$@"; do
  [ -d "host/fuzz/corpus/$target" ] || die "$target: no such target, expected one of: $(ls host/fuzz/corpus | xargs)"
  bins+=(--bin "fuzz-$target")
done
# The same set of packages as every other build, so that dependencies are compiled once.
RUSTC_WORKSPACE_WRAPPER=$MERIDIAN_ROOT/scripts/fuzz-rustc.sh \
  cargo build --release --locked --quiet --workspace --features meridian-fuzz/libfuzzer "${bins[@]}"
for target in "$@"; do
  out=target/fuzz/$target
  mkdir -p "$out/corpus"
  dict=host/fuzz/$target.dict
  # A crash, more than 10 seconds over one input, or more than 4 GiB ends it with another exit code than 0.
  if ! target/release/fuzz-"$target" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -max_len=8192 \
    -print_final_stats=1 -artifact_prefix="$out/" $([ ! -e "$dict" ] || echo "-dict=$dict") \
    "$out/corpus" "host/fuzz/corpus/$target" >"$out/log" 2>&1; then
    tail -n 60 "$out/log" >&2
    die "fuzz $target: an input was not withstood; see $out, and copy it to host/fuzz/corpus/$target once it is mended"
  fi
  say "fuzz $target: $(sed -n 's/^stat::number_of_executed_units: */inputs /p; s/^stat::average_exec_per_sec: */a second /p' "$out/log" | xargs)," \
    "$(grep -o 'cov: [0-9]*' "$out/log" | tail -n 1)"
done
