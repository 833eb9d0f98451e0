#!/usr/bin/env bash
# Makes an environment of tools in the cache and prints its folder. Idempotent.
#
# usage: setup-tools.sh [tools|check|release|kubernetes]
#   tools       uv, maturin, ruff, pyright (the default; every command needs it)
#   check       cargo-deny, lychee, hadolint, zizmor
#   release     auditwheel, securesystemslib
#   kubernetes  the schemas of Kubernetes, to check manifests against
set -euo pipefail
. "$(dirname "$0")/env.sh"
set_name=${1:-tools}
lock_file=$MERIDIAN_ROOT/scripts/$set_name.lock.txt
[ -e "$lock_file" ] || die "set-up of tools: \"$set_name\": expected tools, check, release or kubernetes"
dir=$MERIDIAN_CACHE/$set_name-$(sha256sum "$lock_file" | cut -c1-12)
[ -e "$dir/.done" ] || lock "$set_name"
if [ ! -e "$dir/.done" ]; then
  command -v python3 >/dev/null || die "python3 not found: Python 3.10 or newer is needed"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "python3 is $(python3 --version): 3.10 or newer is needed"
  say "$set_name: installing $(cut -d= -f1 "$lock_file" | paste -sd ' ') into $dir"
  rm -rf "$dir"
  python3 -m venv "$dir" || die "python3 -m venv failed (Debian: apt-get install python3-venv)"
  "$dir/bin/pip" install -q --disable-pip-version-check --no-deps -r "$lock_file"
  touch "$dir/.done"
fi
printf '%s\n' "$dir"
