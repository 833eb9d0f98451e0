#!/usr/bin/env bash
# Fetches Debian's docker-registry (unpacked, not installed) into the cache and prints the path of its program; the tests of
# `meridian policy push` and `pull` run it on loopback. Idempotent.
# MERIDIAN_REGISTRY names a program that is there already.
set -euo pipefail
. "$(dirname "$0")/env.sh"

if [ -n "${MERIDIAN_REGISTRY:-}" ]; then printf '%s\n' "$MERIDIAN_REGISTRY"; exit 0; fi
lock registry
# One that was fetched once goes on serving: the package lists may move under it.
for made in "$MERIDIAN_CACHE"/registry-*/.done; do
  if [ -e "$made" ]; then printf '%s\n' "$(dirname "$made")/usr/bin/docker-registry"; exit 0; fi
done
command -v apt-get >/dev/null || die "no docker-registry: install it (distribution 2.8 or newer) and set MERIDIAN_REGISTRY to its program"
# Old lists may name packages that the archive no longer has.
apt-get update -qq >/dev/null 2>&1 || say "registry: apt-get update failed, going on with the lists that are there"
version=$(apt-cache policy docker-registry | awk '/Candidate:/{print $2}')
[ -n "$version" ] && [ "$version" != "(none)" ] || die "no docker-registry: apt has none; set MERIDIAN_REGISTRY to the program of one"
dir=$MERIDIAN_CACHE/registry-$(printf '%s' "$version" | tr -c 'A-Za-z0-9.\n' '-')
rm -rf "$dir"; mkdir -p "$dir/debs"
say "registry: fetching docker-registry $version"
( cd "$dir/debs" && apt-get download -o APT::Sandbox::User=root docker-registry >/dev/null )
dpkg -x "$dir"/debs/*.deb "$dir"
rm -rf "$dir/debs"
touch "$dir/.done"
printf '%s\n' "$dir/usr/bin/docker-registry"
