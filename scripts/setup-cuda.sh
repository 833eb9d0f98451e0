#!/usr/bin/env bash
# Gets CUDA's compilers (nvcc, ptxas, cuobjdump, NVRTC) from the package index into the cache and prints their folder, the
# one that CUDA calls its home. Tests compile the kernels with them; nothing that is installed needs them. Idempotent.
set -euo pipefail
. "$(dirname "$0")/env.sh"
lock=$MERIDIAN_ROOT/scripts/cuda.lock.txt
folder=$MERIDIAN_CACHE/cuda-$(sha256sum "$lock" | cut -c1-12)
home=$folder/nvidia/cu13
if [ ! -e "$folder/.done" ]; then
  "$MERIDIAN_ROOT/scripts/setup-tools.sh" >/dev/null
  say "cuda: nvcc and NVRTC (about 190 MB to fetch)"
  rm -rf "$folder"
  "$TOOLS_DIR/bin/uv" pip install -q --no-deps --python "$(command -v python3)" --target "$folder" -r "$lock"
  rm -f "$home"/lib/*.a "$home"/lib/*.alt.*
  chmod +x "$home"/bin/* "$home"/nvvm/bin/*
  "$home/bin/nvcc" --version >/dev/null || die "nvcc was installed but does not run; delete $folder and try again"
  touch "$folder/.done"
fi
printf '%s\n' "$home"
