#!/bin/sh
# The main job, on the real engine: demo.sh [OPTION...]. The options are those of `meridian bench vllm`; with --trace or --scenario
# they say what is run, and with --policy what is compared.
set -eu
cd "$(dirname "$0")/.."
py=$(scripts/build-wheel.sh)
given=" $* "
json=
case $given in *" --json "*) json=--json ;; esac
case $given in *" --out"*) ;; *) set -- "$@" --out target/demo ;; esac
case $given in *" --policy"*) ;; *) set -- "$@" --policy stock:256 --policy target/policies/balanced.wasm ;; esac
case $given in
*" --trace"* | *" --scenario"* | *" --help "*) exec "$py" -m meridian._cli bench vllm "$@" ;;
esac
"$py" -m meridian._cli bench vllm --scenario loaded,kv-tight "$@"
# Another question: how much thinking can be saved.
"$py" -m meridian._cli bench vllm --scenario early-exit --quick --no-plot --out target/demo $json
