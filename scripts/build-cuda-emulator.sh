#!/usr/bin/env bash
# Builds a CUDA driver for machines without a GPU (kernels/tests/emulator) and prints the path of its libcuda.so. Only
# tests use it. Idempotent.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT/kernels"
sources=(cuda/entropy.cu tests/emulator/*)
key=$(cat "${sources[@]}" "$MERIDIAN_ROOT/scripts/build-cuda-emulator.sh" | sha256sum | cut -c1-12)
folder=$MERIDIAN_ROOT/target/cuda-emulator/$key
if [ ! -e "$folder/libcuda.so" ]; then
  command -v "${CXX:-c++}" >/dev/null || die "${CXX:-c++} not found (Debian: apt-get install g++)"
  mkdir -p "$folder"
  made=$(mktemp -d "$folder/XXXXXX")
  # Each operation rounds once, as on the device.
  "${CXX:-c++}" -std=c++17 -O2 -g1 -fPIC -shared -ffp-contract=off -U_FORTIFY_SOURCE -Wall -Wextra -Wno-unknown-pragmas -Werror \
    -DMERIDIAN_EMULATOR -Itests/emulator -Wl,-soname,libcuda.so -o "$made/libcuda.so" \
    tests/emulator/driver.cpp tests/emulator/threads.cpp
  mv "$made/libcuda.so" "$folder/libcuda.so"
  rmdir "$made"
fi
printf '%s\n' "$folder/libcuda.so"
