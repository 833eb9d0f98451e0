# Sourced by the other scripts: where caches live and which versions they hold. Sets variables, runs nothing.
# Everything below MERIDIAN_CACHE is safe to delete; it is made again on the next run.
MERIDIAN_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
MERIDIAN_CACHE=${MERIDIAN_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/meridian}
# The newest vLLM with a CPU build; MERIDIAN_VLLM chooses another one that has a lock file (make test-matrix), or for which
# MERIDIAN_VLLM_LOCK is one (make canary).
VLLM_NEWEST=0.32.0
VLLM_VERSION=${MERIDIAN_VLLM:-$VLLM_NEWEST}
VLLM_LOCK=${MERIDIAN_VLLM_LOCK:-$MERIDIAN_ROOT/scripts/vllm-$VLLM_VERSION.lock.txt}
TOOLS_KEY=$(sha256sum "$MERIDIAN_ROOT/scripts/tools.lock.txt" | cut -c1-12)
TOOLS_DIR=$MERIDIAN_CACHE/tools-$TOOLS_KEY
VLLM_KEY=$({ cat "$VLLM_LOCK" "$MERIDIAN_ROOT/scripts/make_cuda_stubs.py" 2>/dev/null || true; } | sha256sum | cut -c1-12)
VLLM_VENV=$MERIDIAN_CACHE/vllm-$VLLM_VERSION-$VLLM_KEY
# Components must not carry the paths of the machine that built them. The vector instructions are those that `meridian policy build`
# asks for where RUSTFLAGS is not set.
GUEST_RUSTFLAGS="-C target-feature=+simd128 --remap-path-prefix=$MERIDIAN_ROOT=. --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
# One set-up of a kind at a time: `make demo` fetches vLLM beside the compiler. Held until the script ends.
lock() { mkdir -p "$MERIDIAN_CACHE"; exec {LOCK}>"$MERIDIAN_CACHE/.$1.lock"; flock "$LOCK"; }
# What runs: the command line and the Python module. With these, dependencies have the features that they have in builds of
# the whole workspace, so that each is compiled once. Cargo shows how far it is.
HOST=(build --release --locked -p meridian-cli -p meridian-python)
build_host() { cargo "${HOST[@]}" "$@" >&2; }
say() { printf '\033[1m==>\033[0m %s\n' "$*" >&2; }
# A stage of a long command, which says how long it took (stage.py).
stage() { "$MERIDIAN_ROOT/scripts/stage.py" "$@"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
