#!/usr/bin/env bash
# The main job, on the real engine: demo.sh [OPTION...]. The options are those of `meridian bench vllm`; with --trace or --scenario
# they say what is run, and with --policy what is compared.
set -euo pipefail
. "$(dirname "$0")/env.sh"
cd "$MERIDIAN_ROOT"
given=" $* "
export MERIDIAN_STAGES=$MERIDIAN_ROOT/target/stages/demo.jsonl
mkdir -p target/stages
rm -f "$MERIDIAN_STAGES"*
case $given in
*" --trace"* | *" --scenario"* | *" --json"* | *" --help "* | *" -h "*) ;;
*) # Before the components and the wheel are built: a table within a second, of the engine that this machine does not have.
  stage "command, compile" cargo "${HOST[@]}" --bin meridian
  day='A simulated 7B model on an H100, through a day with a burst of 15 minutes: stock vLLM (fcfs) and the default policy.'
  printf '%s\n' "$day"
  replayed=$(stage "simulated day" target/release/meridian bench replay --workload reasoning-chat --rate 2.5 --day 0.6x300,1.6x900,0.6x2700 --policy balanced)
  printf '%s\n' "$replayed"
  printf '\nIn vLLM itself, on this CPU:\n' ;;
esac
stage "policies, compile" scripts/build-policies.sh
py=$(stage "wheel, compile, with vLLM" scripts/build-wheel.sh)
case $given in *" --out"*) ;; *) set -- "$@" --out target/demo ;; esac
case $given in *" --policy"*) ;; *) set -- "$@" --policy stock:256 --policy target/policies/balanced.wasm ;; esac
case $given in
*" --trace"* | *" --scenario"* | *" --help "* | *" -h "*) exec "$py" -m meridian bench vllm "$@" ;;
*" --requests"*) ;;
*) set -- --requests 120 "$@" ;; # half of what `loaded` has: minutes count here
esac
stage "vLLM, three schedulers" "$py" -m meridian bench vllm --scenario loaded,kv-tight "$@"
scripts/stage.py --table "$MERIDIAN_STAGES" >&2
case $given in *" --json"*) exit ;; esac
printf '\n%s\n' "$day"
sed -n '/^requests in time/,/^$/p' <<< "$replayed"
cat <<Y
Next:

  cd '$MERIDIAN_ROOT'
  export PATH="$MERIDIAN_ROOT/target/release:\$PATH"
  meridian bench replay --workload reasoning-chat --policy balanced --policy srpt   # other policies, in simulated engines
  make serve                                                                        # vLLM's server, with a small model that thinks
Y
