#!/usr/bin/env bash
# usage: [MERIDIAN_FUZZ_WORKERS=N] fuzz.sh SECONDS [TARGET...]
# Fuzzes each target for that long, the checked-in corpus first, with N processes each (1). New inputs are kept in
# target/fuzz/TARGET/corpus, an input that the host does not withstand in target/fuzz/TARGET; it then belongs into
# host/fuzz/corpus/TARGET.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
workers=${MERIDIAN_FUZZ_WORKERS:-1}
[[ $workers =~ ^[1-9][0-9]*$ ]] || die "MERIDIAN_FUZZ_WORKERS=$workers: expected a number of processes, 1 or more"
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
fuzz() {
  local target=$1 out=target/fuzz/$1 dict=host/fuzz/$1.dict
  local options=(-max_total_time="$seconds" -timeout=10 -rss_limit_mb=4096 -max_len=8192 -print_final_stats=1)
  options+=(-artifact_prefix="$out/")
  [ ! -e "$dict" ] || options+=(-dict="$dict")
  mkdir -p "$out/corpus"
  if [ "$workers" != 1 ]; then
    # Processes that are started by another one would skip an input of the corpus that crashes, and pass over slow ones.
    target/release/fuzz-"$target" "${options[@]}" -runs=0 "host/fuzz/corpus/$target" >"$out/log" 2>&1 ||
      { tail -n 60 "$out/log" >&2; die "fuzz $target: an input of host/fuzz/corpus/$target was not withstood"; }
    options+=(-fork="$workers" -ignore_timeouts=0 -ignore_ooms=0 -ignore_crashes=0)
  fi
  # A crash, more than 10 seconds over one input, or more than 4 GiB ends it with another exit code than 0.
  if ! target/release/fuzz-"$target" "${options[@]}" "$out/corpus" "host/fuzz/corpus/$target" >"$out/log" 2>&1; then
    tail -n 60 "$out/log" >&2
    die "fuzz $target: an input was not withstood; see $out, and copy it to host/fuzz/corpus/$target once the host is fixed"
  fi
  say "fuzz $target: $(sed -n 's/^stat::number_of_executed_units: */inputs /p; s/^stat::average_exec_per_sec: */a second /p' "$out/log" | xargs)," \
    "$(grep -o 'cov: [0-9]*' "$out/log" | tail -n 1)"
}
# As many targets at a time as the cores allow. After the first that fails, no other is started.
running=0
for target in "$@"; do
  [ "$running" = 0 ] || [ $(((running + 1) * workers)) -le "$(nproc)" ] || { wait -n; running=$((running - 1)); }
  fuzz "$target" &
  running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
  wait -n
  running=$((running - 1))
done
