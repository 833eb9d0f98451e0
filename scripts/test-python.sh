#!/usr/bin/env bash
# Runs the Python tests: usage test-python.sh PYTHON [OPTION OR FILE OF PYTEST...]
# First in two processes, each with half of the cores: most of the time is the start of engines, which uses one. Then one by
# one those that need all cores (marked `whole_machine`).
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
py=${1:?usage: test-python.sh PYTHON [OPTION OR FILE OF PYTEST...]}; shift
tests() {
  "$py" -m pytest -c python/pyproject.toml --rootdir . "$@" && return
  local code=$?
  [ $code = 5 ] || return $code # 5: of the files that were asked for, none has such tests
}
say "python: tests of the package and of vLLM with it, in two processes"
[ $# -gt 0 ] || set -- python/tests
tests -m "not whole_machine" -n $(($(nproc) > 1 ? 2 : 1)) --dist loadfile --no-loadscope-reorder "$@"
say "python: tests that need the whole machine"
tests -m whole_machine "$@"
