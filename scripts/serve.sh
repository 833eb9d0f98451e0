#!/usr/bin/env bash
# Serves the demo's model with Meridian on 127.0.0.1: serve.sh PYTHON PORT. Ends with Ctrl-C.
set -euo pipefail
. "$(dirname "$0")/env.sh"
py=${1:?usage: serve.sh PYTHON PORT}; port=${2:?usage: serve.sh PYTHON PORT}
cd "$MERIDIAN_ROOT"
model=$("$py" -m meridian.bench.model)
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
cat >&2 <<Y
Ready in about half a minute. Then, in another terminal:

  curl -sN http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' -d \\
    '{"model": "tiny-random", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 64, "vllm_xargs": {"meridian_think_budget": 32}, "ignore_eos": true, "stream": true}'

The model has random weights: the text is noise, the scheduling is real. Policy: ${MERIDIAN_CONFIG:-native:output-first (no meridian.toml)}
Y
exec "$(dirname "$py")/vllm" serve "$model" --served-model-name tiny-random --host 127.0.0.1 --port "$port" \
  --dtype bfloat16 --max-model-len 2048 --block-size 32 --enforce-eager --reasoning-parser qwen3 \
  --scheduler-cls meridian.vllm.MeridianScheduler --logits-processors meridian.vllm:BudgetLogitsProcessor
