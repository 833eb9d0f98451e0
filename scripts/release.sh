#!/usr/bin/env bash
# Makes the release folder: wheel, sdist, shipped policies, SBOM, checksums, signed provenance. Needs a clean tree.
#
# usage: MERIDIAN_RELEASE_KEY=FILE scripts/release.sh [FOLDER]     (FOLDER: dist)
#        scripts/release.sh --new-key FILE                         an ed25519 key; keep FILE, publish FILE.pub
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
MOST_WHEEL_BYTES=18000000
MOST_GLIBC=2_34
reproducibly=(--sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner)
release=$(scripts/fetch.sh release)
if [ "${1:-}" = --new-key ]; then
  [ -n "${2:-}" ] || die "--new-key: expected the name of a file"
  exec "$release/bin/python" scripts/provenance.py new-key "$2"
fi
out=${1:-dist}
[ -n "${MERIDIAN_RELEASE_KEY:-}" ] || die "MERIDIAN_RELEASE_KEY: not set: expected the file, or the PEM text, of an ed25519 key (scripts/release.sh --new-key FILE)"
[ -z "$(git status --porcelain)" ] || die "the working tree has changes: a release is made of a commit"
tools=$(scripts/fetch.sh tools)
rm -rf "$out"; mkdir -p "$out"
scripts/build-policies.sh >&2
say "release 1/6: wheel"
scripts/pack-wheel.sh "$out"
wheel=$(echo "$out"/meridian-*.whl)
"$release/bin/auditwheel" show "$wheel" >&2
case "$wheel" in *manylinux_"$MOST_GLIBC"_*|*manylinux_2_17_*|*manylinux_2_28_*) ;; *) die "$wheel: expected manylinux_$MOST_GLIBC or older" ;; esac
bytes=$(stat -c %s "$wheel")
[ "$bytes" -le "$MOST_WHEEL_BYTES" ] || die "$wheel: $bytes bytes, expected at most $MOST_WHEEL_BYTES"
say "release 2/6: sdist"
"$tools/bin/maturin" sdist --manifest-path python/Cargo.toml --out "$out" >&2
version=$(basename "$wheel" | cut -d- -f2)
# maturin takes the crates that the wheel needs. The others are added, and what all read beside their folders.
sdist=$out/meridian-$version.tar.gz
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tar -xzf "$sdist" -C "$work"
git archive HEAD Cargo.toml Cargo.lock host bench kernels examples python/Cargo.toml python/src wit policies 'models/*.toml' LICENSE NOTICE | tar -x -C "$work/meridian-$version"
tar "${reproducibly[@]}" -czf "$sdist" -C "$work" "meridian-$version"
say "release 3/6: policies"
tar "${reproducibly[@]}" -czf "$out/meridian-policies-$version.tar.gz" -C target/policies .
tar "${reproducibly[@]}" -czf "$out/meridian-wit-$version.tar.gz" wit
say "release 4/6: SBOM (CycloneDX)"
"$release/bin/python" - "$wheel" "$out" "$version" <<'Y'
import pathlib, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    for name in wheel.namelist():
        part, dot, _ = pathlib.Path(name).name.partition(".cyclonedx.json")
        if dot:
            pathlib.Path(sys.argv[2], f"{part}-{sys.argv[3]}.cdx.json").write_bytes(wheel.read(name))
Y
say "release 5/6: checksums"
(cd "$out" && sha256sum -- * > SHA256SUMS)
say "release 6/6: provenance"
"$release/bin/python" scripts/provenance.py sign "$out" "$MERIDIAN_RELEASE_KEY"
ls -l "$out" >&2
