#!/usr/bin/env bash
# The cargo of maturin (pack-wheel.sh): what it asks for is a part of what build_host builds.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
[ "${1:-}" = rustc ] || exec cargo "$@"
exec cargo "${HOST[@]}" --message-format json-render-diagnostics
