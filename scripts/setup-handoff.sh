#!/usr/bin/env bash
# Fetches NIXL for the Python of vLLM into a folder of the cache, and prints the variables that an engine with
# HandoffConnector needs on this machine, one NAME=VALUE a line: env $(scripts/setup-handoff.sh) vllm serve ... Idempotent.
set -euo pipefail
. "$(dirname "$0")/env.sh"
lock_file=$MERIDIAN_ROOT/scripts/handoff.lock.txt
py=$("$MERIDIAN_ROOT/scripts/setup-vllm.sh")
tag=$("$py" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
dir=$MERIDIAN_CACHE/handoff-$tag-$(sha256sum "$lock_file" | cut -c1-12)
[ -e "$dir/.done" ] || lock handoff
if [ ! -e "$dir/.done" ]; then
  say "handoff: installing NIXL into $dir (69 MB to fetch)"
  rm -rf "$dir"
  "$TOOLS_DIR/bin/uv" pip install -q --python "$py" --target "$dir" --no-deps --require-hashes -r "$lock_file"
  touch "$dir/.done"
fi
# UCX speaks over loopback and shared memory only.
cat <<Y
PYTHONPATH=$dir${PYTHONPATH:+:$PYTHONPATH}
NIXL_PLUGIN_DIR=$dir/.nixl_cu13.mesonpy.libs/plugins
UCX_NET_DEVICES=lo
UCX_TLS=tcp,sysv,posix,cma
VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1
Y
