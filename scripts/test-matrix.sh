#!/usr/bin/env bash
# Runs the engine tests on every vLLM that has a CPU build, and the tests of the seams on vLLM 0.33, which has a CUDA build only.
# Each has an environment of its own in the cache. Tests that need no vLLM run in `make test` alone. Results: target/matrix/VERSION.xml (JUnit).
#
# usage: test-matrix.sh [VERSION...]      all versions without one
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
names=$(python3 -m checks.canary --seam-tests); mapfile -t SEAMS <<< "$names"
versions=("$@")
[ $# -gt 0 ] || versions=(0.30.0 0.31.0 0.32.0 0.33.0)
tools=$(scripts/fetch.sh tools)
[ -d target/policies ] || scripts/build-policies.sh >&2
scripts/build-wheel.sh >/dev/null
if [ ! -e target/hostile/kinds.txt ]; then
  cargo build --release --locked --workspace --example hostile >&2
  mkdir -p target/hostile; target/release/examples/hostile target/hostile > target/hostile/kinds.txt
fi
MERIDIAN_TOKENIZERS=$(scripts/fetch.sh tokenizers); export MERIDIAN_TOKENIZERS
mkdir -p target/matrix
failed=()
for version in "${versions[@]}"; do
  py=$(MERIDIAN_VLLM=$version scripts/fetch.sh vllm)
  "$tools/bin/uv" pip install -q --python "$py" --reinstall --no-deps target/wheels/*.whl
  tests=(python/tests/vllm)
  case $version in 0.33.*) tests=("${SEAMS[@]/#/python/tests/vllm/}") ;; esac
  say "matrix: vLLM $version, ${#tests[@]} files or folders of tests"
  "$py" -m pytest -c python/pyproject.toml --rootdir . --junitxml "target/matrix/$version.xml" "${tests[@]}" >&2 || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || die "tests failed on vLLM ${failed[*]}"
