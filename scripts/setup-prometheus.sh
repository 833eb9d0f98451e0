#!/usr/bin/env bash
# Fetches Debian's prometheus (unpacked, not installed) into the cache and prints the folder of its programs, `prometheus` and
# `promtool`; the tests of dashboard and alert rules run them on loopback. Idempotent.
# MERIDIAN_PROMETHEUS names a folder that has them already.
set -euo pipefail
. "$(dirname "$0")/env.sh"

if [ -n "${MERIDIAN_PROMETHEUS:-}" ]; then printf '%s\n' "$MERIDIAN_PROMETHEUS"; exit 0; fi
lock prometheus
# One that was fetched once goes on serving: the package lists may move under it.
for made in "$MERIDIAN_CACHE"/prometheus-*/.done; do
  if [ -e "$made" ]; then printf '%s\n' "$(dirname "$made")/usr/bin"; exit 0; fi
done
command -v apt-get >/dev/null || die "no prometheus: install it (2.42 or newer) and set MERIDIAN_PROMETHEUS to the folder of its programs"
# Old lists may name packages that the archive no longer has.
apt-get update -qq >/dev/null 2>&1 || say "prometheus: apt-get update failed, going on with the lists that are there"
version=$(apt-cache policy prometheus | awk '/Candidate:/{print $2}')
[ -n "$version" ] && [ "$version" != "(none)" ] || die "no prometheus: apt has none; set MERIDIAN_PROMETHEUS to the folder of its programs"
dir=$MERIDIAN_CACHE/prometheus-$(printf '%s' "$version" | tr -c 'A-Za-z0-9.\n' '-')
rm -rf "$dir"; mkdir -p "$dir/debs"
say "prometheus: fetching $version"
( cd "$dir/debs" && apt-get download -o APT::Sandbox::User=root prometheus >/dev/null )
dpkg -x "$dir"/debs/*.deb "$dir"
rm -rf "$dir/debs"
touch "$dir/.done"
printf '%s\n' "$dir/usr/bin"
