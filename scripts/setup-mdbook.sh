#!/usr/bin/env bash
# Builds mdBook into the cache and prints its path. Idempotent. No registry that we use carries it as a binary.
set -euo pipefail
. "$(dirname "$0")/env.sh"
MDBOOK_VERSION=0.5.4
dir=$MERIDIAN_CACHE/mdbook-$MDBOOK_VERSION
[ -e "$dir/.done" ] || lock mdbook
if [ ! -e "$dir/.done" ]; then
  say "mdbook: building mdBook $MDBOOK_VERSION (a minute or two, once)"
  cargo install --quiet --locked --no-default-features --root "$dir" --target-dir "$dir/build" mdbook@$MDBOOK_VERSION >&2
  rm -rf "$dir/build"
  touch "$dir/.done"
fi
printf '%s\n' "$dir/bin/mdbook"
