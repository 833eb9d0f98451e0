#!/usr/bin/env bash
# Serves the bundled reasoner with Meridian on 127.0.0.1: serve.sh PYTHON PORT [OPTION...]. The options are vLLM's. Ends with Ctrl-C.
# Without a meridian.toml it makes one with a token, so that policies can be changed while it serves.
set -euo pipefail
here=$PWD
. "$(dirname "$0")/env.sh"
usage="usage: serve.sh PYTHON PORT [OPTION...]"
py=${1:?$usage}; port=${2:?$usage}; shift 2
# Paths are the caller's; what runs below runs in the repository.
case $py in /*) ;; */*) py=$here/$py ;; esac
config=${MERIDIAN_CONFIG:-}
case $config in
  /*) ;;
  "") for file in "$here/meridian.toml" "$MERIDIAN_ROOT/meridian.toml" "$HOME/.config/meridian/meridian.toml"; do
        if [ -e "$file" ]; then config=$file; break; fi
      done ;;
  *) config=$here/$config ;;
esac
if [ -z "$config" ]; then
  folder=$MERIDIAN_CACHE/serve
  mkdir -p "$folder"
  [ -s "$folder/token" ] || (umask 077; od -An -tx1 -N32 /dev/urandom | tr -d ' \n' > "$folder/token")
  config=$folder/meridian.toml
  printf '[admin]\ntoken_file = "token"\n' > "$config"
fi
export MERIDIAN_CONFIG=$config
cd "$MERIDIAN_ROOT"
# Whether policies can be changed; a configuration that cannot be read ends here, with its reason in one line.
token=$("$py" -c 'import sys, meridian
try:
    print(meridian.load_config().admin.token_file)
except meridian.ConfigError as error:
    sys.exit(f"error: {error}")')
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
if [ -n "$token" ]; then
  change="Change the policy while it serves:

  target/release/meridian ctl swap dispatch target/policies/srpt.wasm
  target/release/meridian ctl swap dispatch native:fcfs
  target/release/meridian ctl rollback dispatch"
else
  change="The policy cannot be changed while it serves: $config names no admin.token_file."
fi
cat >&2 <<Y
Ready in about half a minute. Then watch the model think and answer, in another terminal; the second time with at most 12 think tokens:

  cd '$MERIDIAN_ROOT'
  examples/ask.py --port $port "7 + 5 * 3 - 2"
  examples/ask.py --port $port "7 + 5 * 3 - 2" --budget 12

The API is OpenAI's:

  curl -s --noproxy '*' http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' -d \\
    '{"model": "arith-reasoner", "messages": [{"role": "user", "content": "7 + 5 * 3 - 2"}], "vllm_xargs": {"meridian_think_budget": 12}}'

$change

The model is tiny and real: it computes chains from left to right, modulo 23. Configuration: $config
Y
exec "$py" -m vllm.entrypoints.cli.main serve models/arith-reasoner --served-model-name arith-reasoner --host 127.0.0.1 --port "$port" \
  --dtype float32 --block-size 32 --enforce-eager --reasoning-parser qwen3 \
  --scheduler-cls meridian.vllm.MeridianScheduler --logits-processors meridian.vllm:BudgetLogitsProcessor "$@"
