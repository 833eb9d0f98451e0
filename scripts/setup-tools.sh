#!/usr/bin/env bash
# Makes the build tools' environment (uv, maturin, ruff, pyright) in the cache and prints its folder. Idempotent.
set -euo pipefail
. "$(dirname "$0")/env.sh"
[ -e "$TOOLS_DIR/.done" ] || lock tools
if [ ! -e "$TOOLS_DIR/.done" ]; then
  command -v python3 >/dev/null || die "python3 not found: Python 3.10 or newer is needed"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "python3 is $(python3 --version): 3.10 or newer is needed"
  say "tools: installing maturin, ruff, pyright and uv into $TOOLS_DIR"
  rm -rf "$TOOLS_DIR"
  python3 -m venv "$TOOLS_DIR" || die "python3 -m venv failed (Debian: apt-get install python3-venv)"
  "$TOOLS_DIR/bin/pip" install -q --disable-pip-version-check --no-deps -r "$MERIDIAN_ROOT/scripts/tools.lock.txt"
  touch "$TOOLS_DIR/.done"
fi
printf '%s\n' "$TOOLS_DIR"
