#!/usr/bin/env bash
# Gets NIXL's library with its UCX backend from the package index into the cache and prints the path of libnixl_capi.so; the
# tests and figures of the fabric load it. Nothing that is installed needs it. Idempotent.
# MERIDIAN_NIXL names a library that is there already.
set -euo pipefail
. "$(dirname "$0")/env.sh"

if [ -n "${MERIDIAN_NIXL:-}" ]; then printf '%s\n' "$MERIDIAN_NIXL"; exit 0; fi
lock nixl
pins=$MERIDIAN_ROOT/scripts/nixl.lock.txt
folder=$MERIDIAN_CACHE/nixl-$(sha256sum "$pins" | cut -c1-12)
library=$folder/.nixl_cu12.mesonpy.libs/libnixl_capi.so
if [ ! -e "$folder/.done" ]; then
  "$MERIDIAN_ROOT/scripts/setup-tools.sh" >/dev/null
  say "nixl: fetching NIXL (69 MB)"
  rm -rf "$folder"
  # The wheel is for one Python, its library for none.
  "$TOOLS_DIR/bin/uv" pip install -q --no-deps --python-version 3.11 --python "$(command -v python3)" --target "$folder" -r "$pins"
  [ -e "$library" ] || die "nixl: the wheel has no ${library#"$folder"/}; delete $folder and try again"
  touch "$folder/.done"
fi
printf '%s\n' "$library"
