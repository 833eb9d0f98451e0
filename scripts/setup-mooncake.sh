#!/usr/bin/env bash
# Gets Mooncake's transfer engine from the package index, and Debian's libibverbs for it (unpacked, not installed), into the
# cache. Prints the words of a command that starts Meridian's Mooncake process; the tests and figures of the fabric use it.
# Nothing that is installed needs it. Idempotent.
set -euo pipefail
. "$(dirname "$0")/env.sh"

lock mooncake
pins=$MERIDIAN_ROOT/scripts/mooncake.lock.txt
folder=$MERIDIAN_CACHE/mooncake-$(sha256sum "$pins" | cut -c1-12)
python=$(command -v python3)
if [ ! -e "$folder/.done" ]; then
  "$MERIDIAN_ROOT/scripts/setup-tools.sh" >/dev/null
  say "mooncake: fetching the transfer engine (46 MB) and libibverbs"
  rm -rf "$folder"; mkdir -p "$folder/debs"
  "$TOOLS_DIR/bin/uv" pip install -q --no-deps --python "$python" --target "$folder/packages" -r "$pins" ||
    die "mooncake: no wheel for $("$python" --version)"
  command -v apt-get >/dev/null || die "no libibverbs: Mooncake needs it, and there is no apt-get to fetch it"
  apt-get update -qq >/dev/null 2>&1 || say "mooncake: apt-get update failed, going on with the lists that are there"
  ( cd "$folder/debs" && apt-get download -o APT::Sandbox::User=root libibverbs1 libnl-3-200 libnl-route-3-200 >/dev/null )
  for deb in "$folder"/debs/*.deb; do dpkg -x "$deb" "$folder"; done
  rm -rf "$folder/debs"
  touch "$folder/.done"
fi
libraries=$(find "$folder/lib" "$folder/usr/lib" -name '*.so*' -printf '%h\n' 2>/dev/null | sort -u | paste -sd:)
printf '%s\n' "env PYTHONPATH=$folder/packages LD_LIBRARY_PATH=$libraries MC_LOG_LEVEL=ERROR $python $MERIDIAN_ROOT/python/meridian/mooncake_process.py"
