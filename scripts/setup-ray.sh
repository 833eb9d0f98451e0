#!/usr/bin/env bash
# Fetches Ray with Ray Serve for the Python of vLLM 0.32 into a folder of the cache, and prints that folder. Idempotent.
# The folder has only what vLLM's environment lacks: PYTHONPATH=FOLDER adds Ray to it.
set -euo pipefail
. "$(dirname "$0")/env.sh"
lock_file=$MERIDIAN_ROOT/scripts/ray.lock.txt
py=$("$MERIDIAN_ROOT/scripts/setup-vllm.sh")
tag=$("$py" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
dir=$MERIDIAN_CACHE/ray-$tag-$(sha256sum "$lock_file" | cut -c1-12)
[ -e "$dir/.done" ] || lock ray
if [ ! -e "$dir/.done" ]; then
  say "ray: installing $(grep '^ray==' "$lock_file") and Ray Serve into $dir (about 140 MB to fetch)"
  rm -rf "$dir"
  "$TOOLS_DIR/bin/uv" pip install -q --python "$py" --target "$dir" --no-deps -r "$lock_file"
  touch "$dir/.done"
fi
printf '%s\n' "$dir"
