#!/usr/bin/env bash
# Tests the crate of the kernels as a build with CUDA's compilers makes it: once with nvcc, once with NVRTC only. The build
# of everything else has neither, and compiles the kernels at their first use.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
home=$(scripts/fetch.sh cuda)
# A folder of builds for each, so that neither undoes the other's.
run() { cargo test -q --release --locked -p meridian-kernels --target-dir "target/kernels/$MERIDIAN_EXPECT_AHEAD" "$@"; }
MERIDIAN_EXPECT_AHEAD=nvcc CUDA_HOME=$home run --lib --test cuda
MERIDIAN_EXPECT_AHEAD=nvrtc CUDA_HOME=/nowhere LD_LIBRARY_PATH=$home/lib run --lib
