#!/usr/bin/env bash
# Runs the tests: test.sh [--all]. Without --all the core, which `make test` and CI run (CONTRIBUTING.md says what it leaves out);
# with it every test. Ends with a table of its stages.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
all=${1:-}
[[ $all =~ ^(--all)?$ ]] || die "usage: test.sh [--all]"
export MERIDIAN_STAGES=$MERIDIAN_ROOT/target/stages/test$all.jsonl
mkdir -p target/stages target/hostile
rm -f "$MERIDIAN_STAGES"*
trap 'scripts/stage.py --table "$MERIDIAN_STAGES" >&2' EXIT
scripts/check.sh
stage "policies, compile" scripts/build-policies.sh
for name in cuda registry prometheus tokenizers; do stage "fetching: $name" scripts/fetch.sh $name >/dev/null; done
stage "host, compile" cargo test --release --locked --workspace --no-run
stage "host" cargo test --release --locked --workspace
stage "policies" cargo test --locked --manifest-path policies/Cargo.toml --target-dir policies/target
if [ "$all" ]; then
  stage "kernels with CUDA's compilers" scripts/check-kernels.sh
  RUSTFLAGS="--cfg loom" stage "threads in every order (loom)" cargo test --release --locked -p meridian-core -p meridian-memory \
    --no-default-features --test loom --test blocks_loom --test slot_loom --target-dir target/loom
  stage "fuzzing, 20 s a target, and its builds" scripts/fuzz.sh 20
fi
target/release/examples/hostile target/hostile > target/hostile/kinds.txt # built by the tests above
py=$(stage "wheel, compile" scripts/build-wheel.sh)
MERIDIAN_TOKENIZERS=$(scripts/fetch.sh tokenizers); export MERIDIAN_TOKENIZERS
stage "examples" scripts/run-examples.sh "$py"
scripts/test-python.sh "$py" ${all:+--all}
