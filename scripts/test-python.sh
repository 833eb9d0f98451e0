#!/usr/bin/env bash
# Runs the Python tests: usage test-python.sh PYTHON [OPTION OR FILE OF PYTEST...]
# First in two processes, each with half of the cores: starting engines takes most of the time, and uses one core. Then the tests
# marked `whole_machine` run one by one.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
py=${1:?usage: test-python.sh PYTHON [OPTION OR FILE OF PYTEST...]}; shift
has_file() { local given; for given in "$@"; do [ ! -e "${given%%::*}" ] || return 0; done; return 1; }
has_file "$@" || set -- python/tests "$@"
codes=()
tests() {
  local code=0
  "$py" -m pytest -c python/pyproject.toml --rootdir . "$@" || code=$?
  [ $code != 2 ] || exit 2 # interrupted, or a file that cannot be imported
  codes+=($code)
}
say "python: tests of the package and of vLLM with it, in two processes"
tests -m "not whole_machine" -n $(($(nproc) > 1 ? 2 : 1)) --dist loadfile --no-loadscope-reorder "$@"
say "python: tests that need the whole machine"
tests -m whole_machine "$@"
# 5: no such test, which one of the two may say.
case "${codes[*]}" in
  "0 0" | "0 5" | "5 0") ;;
  "5 5") die "python: no test was found for: $*" ;;
  *) die "python: tests failed, see above" ;;
esac
