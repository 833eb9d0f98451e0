#!/usr/bin/env bash
# Licences, sources and duplicates of all dependencies (deny.toml), and known advisories where the database can be reached.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
deny=$(scripts/fetch.sh check)/bin/cargo-deny
for manifest in Cargo.toml policies/Cargo.toml; do
  "$deny" --locked --log-level error --manifest-path "$manifest" check --hide-inclusion-graph bans licenses sources >&2
done
if timeout 60 "$deny" --log-level error fetch db >/dev/null 2>&1; then
  for manifest in Cargo.toml policies/Cargo.toml; do
    "$deny" --locked --log-level error --manifest-path "$manifest" check --disable-fetch advisories >&2
  done
else
  say "advisories: the database cannot be reached, not checked"
fi
