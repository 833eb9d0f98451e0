#!/usr/bin/env bash
# Runs the Python tests: usage test-python.sh PYTHON [--all] [OPTION OR FILE OF PYTEST...]
# Without --all or a file, the tests marked `exhaustive` are left out.
# First in two processes, each with half of the cores: starting engines takes most of the time, and uses one core. Then the tests
# marked `whole_machine` run one by one.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
py=${1:?usage: test-python.sh PYTHON [--all] [OPTION OR FILE OF PYTEST...]}; shift
# A hang of the core is found within three times its longest test; parts of the whole suite take longer (pyproject.toml).
# Its process is not replaced: pytest-xdist would give the new one the same test again, without end.
core=" and not exhaustive" limit=(-o faulthandler_timeout=900)
if [ "${1:-}" = --all ]; then core= limit=(); shift; fi
has_file() { local given; for given in "$@"; do [ ! -e "${given%%::*}" ] || return 0; done; return 1; }
if has_file "$@"; then core= limit=(); else set -- python/tests "$@"; fi
codes=()
tests() {
  local name=$1 code=0; shift
  stage "$name" "$py" -m pytest -c python/pyproject.toml --rootdir . "${limit[@]}" "$@" || code=$?
  # Interrupted, or a file that cannot be imported.
  if [ $code = 2 ] || [ $code -ge 128 ]; then exit $code; fi
  codes+=($code)
}
tests "python, two processes" --durations 30 --durations-min 1 -m "not whole_machine$core" -n $(($(nproc) > 1 ? 2 : 1)) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder "$@"
tests "python, the whole machine" --durations 10 -m "whole_machine$core" "$@"
# 5: no such test, which one of the two may say.
case "${codes[*]}" in
  "0 0" | "0 5" | "5 0") ;;
  "5 5") die "python: no test was found for: $*" ;;
  *) die "python: tests failed, see above" ;;
esac
