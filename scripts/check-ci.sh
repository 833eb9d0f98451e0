#!/usr/bin/env bash
# Lints the workflows, the image and the development container, which CI builds where Docker or Podman is (.github/workflows).
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
check=$(scripts/fetch.sh check)
"$check/bin/hadolint" .devcontainer/Dockerfile deploy/docker/Dockerfile >&2
python3 -m json.tool .devcontainer/devcontainer.json >/dev/null
"$check/bin/zizmor" --offline --quiet --no-progress --config .github/zizmor.yml .github/workflows >&2
