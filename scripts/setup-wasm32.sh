#!/usr/bin/env bash
# Makes a Rust that can build for wasm32-unknown-unknown and prints a file to source before cargo. Idempotent.
#
# 1. the installed toolchain, when it has the target;
# 2. `rustup target add`, when rustup can reach its server;
# 3. Debian's rustc-web (unpacked, not installed) with a std built once from the matching rust-web-src, in the cache.
#    MERIDIAN_WASM32=debian takes this route at once.
set -euo pipefail
. "$(dirname "$0")/env.sh"
target=wasm32-unknown-unknown
env_file=$MERIDIAN_CACHE/wasm32-rustup.env

has_target() { # rustc prints the path even when the target is missing, so the folder itself is tested
  ls "$(rustc --print target-libdir --target $target 2>/dev/null)"/libcore-*.rlib >/dev/null 2>&1
}
# Nothing here may make rustup fetch a toolchain; a target for the installed one is asked for with a short time limit.
if [ "${MERIDIAN_WASM32:-}" != debian ] && { has_target || { command -v rustup >/dev/null && timeout 60 rustup target add $target >/dev/null 2>&1 && has_target; }; }; then
  mkdir -p "$MERIDIAN_CACHE"; : > "$env_file"
  printf '%s\n' "$env_file"; exit 0
fi

[ "$(uname -m)" = x86_64 ] || die "no $target: run \`rustup target add $target\` (the Debian route is for x86-64)"
command -v apt-get >/dev/null || die "no $target: run \`rustup target add $target\`"
# A toolchain that was made once goes on serving: the package lists may move under it.
for made in "$MERIDIAN_CACHE"/wasm32-debian-*/.done; do
  if [ -e "$made" ]; then printf '%s\n' "$(dirname "$made")/env.sh"; exit 0; fi
done
started=$(date +%s)
say "wasm32: rustup has no $target to give; using Debian's rustc-web"
# Old lists may name packages that the archive no longer has.
apt-get update -qq >/dev/null 2>&1 || say "wasm32: apt-get update failed, going on with the lists that are there"
version=$(apt-cache policy rustc-web | awk '/Candidate:/{print $2}')
[ -n "$version" ] && [ "$version" != "(none)" ] || die "no $target: apt has no rustc-web either; run \`rustup target add $target\`"
dir=$MERIDIAN_CACHE/wasm32-debian-$(printf '%s' "$version" | tr -c 'A-Za-z0-9.\n' '-')
rm -rf "$dir"; mkdir -p "$dir/debs"
std=$(apt-cache depends libstd-rust-web-dev | grep -oE 'libstd-rust-web-[0-9]+\.[0-9]+' | head -n 1)
llvm=$(apt-cache depends "$std" | grep -oE 'libllvm[0-9]+' | head -n 1)
say "wasm32 1/3: fetching rustc-web $version, its std and sources, $llvm"
( cd "$dir/debs" && apt-get download -o APT::Sandbox::User=root rustc-web libstd-rust-web-dev rust-web-src "$std" "$llvm" >/dev/null )
say "wasm32 2/3: unpacking"
for deb in "$dir"/debs/*.deb; do dpkg -x "$deb" "$dir"; done
# rustup's toolchain lends cargo and the linker.
sysroot=$(env -u RUSTC rustc --print sysroot)
lld=$(ls "$sysroot"/lib/rustlib/*/bin/rust-lld | head -n 1)
cat > "$dir/env.sh" <<Y
export LD_LIBRARY_PATH=$dir/usr/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export RUSTC=$dir/usr/bin/rustc
export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$lld
export CARGO=$sysroot/bin/cargo
Y
say "wasm32 3/3: building std"
mkdir -p "$dir/mkstd/src"
printf '[package]\nname = "mkstd"\nversion = "0.0.0"\nedition = "2021"\n[profile.release]\npanic = "abort"\ncodegen-units = 1\n[workspace]\n' > "$dir/mkstd/Cargo.toml"
: > "$dir/mkstd/src/lib.rs"
( . "$dir/env.sh"; cd "$dir/mkstd"
  RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Cembed-bitcode=yes" CARGO_TARGET_DIR=$dir/mkstd/target \
    "$CARGO" build -q --release --target $target -Z build-std=std,panic_abort )
lib=$dir/usr/lib/rustlib/$target/lib
mkdir -p "$lib"; cp "$dir"/mkstd/target/$target/release/deps/*.rlib "$lib"/; rm -f "$lib"/libmkstd-*.rlib
rm -rf "$dir/mkstd" "$dir/debs"
touch "$dir/.done"
say "wasm32: ready after $(( $(date +%s) - started )) s"
printf '%s\n' "$dir/env.sh"
