"""Stock vLLM against Meridian's native and WebAssembly schedulers, side by side, on this machine's CPU: `make demo`.

Each run is a process of its own (`engine_run`). One table a scenario on stdout, progress on stderr, raw rows under
`target/demo/`. Run it in the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from meridian.bench.child import Failed, engine_run, say
from meridian.bench.early_exit import NAME as EARLY_EXIT
from meridian.bench.early_exit import QUICK_BUDGETS, QUICK_PROBLEMS, QUICK_TUNE, Experiment, experiment
from meridian.bench.exit_report import table as exit_table
from meridian.bench.model import NoModel, model_dir, reasoner_dir
from meridian.bench.report import LEGEND, table, write_rows_csv
from meridian.bench.workload import SCENARIOS, read_trace

POLICY = Path("target") / "policies" / "output-first.wasm"
RUN_LIMIT_S = 300


def run_scenario(a: argparse.Namespace, scenario: str, model: Path, policy: Path) -> list[dict[str, Any]]:
    """Run all schedulers over one scenario, one after the other; returns their documents."""
    documents = []
    columns = (("stock", "stock"), ("native", "native:output-first"), (policy.name, str(policy)))
    for name, scheduler in columns:
        stem = a.out / f"{scenario}-{name.removesuffix('.wasm') + '-wasm' if name.endswith('.wasm') else name}"
        command = ["--model", str(model), "--scenario", scenario, "--scheduler", scheduler, "--seed", str(a.seed)]
        command += ["--scale-tokens", str(a.scale_tokens), "--scale-time", str(a.scale_time)]
        command += ["--trace", str(a.trace)] if a.trace else []
        command += ["--limit", str(a.limit)] if a.limit else []
        if scheduler != "stock":
            command += [x for s in a.settings for x in ("--set", s)]
        started = time.monotonic()
        document = engine_run(stem, f"{scenario}, {name}", command, RUN_LIMIT_S)
        documents.append(document | {"name": name, "scenario": scenario})
        s, took = document["summary"], time.monotonic() - started
        say(
            f"{scenario:9} {name:18} {took:5.1f} s in all, {s['makespan_s']:5.1f} s of traffic, "
            f"{s['requests']} requests, {s['delivered_tokens']:,} tokens"
        )
    return documents


def heading(documents: list[dict[str, Any]]) -> str:
    """What was run, on what; names every request that was altered or did not think as long as planned."""
    d = documents[0]
    machine, engine, workload = d["machine"], d["engine"], d["workload"]
    blocks = engine["kv_blocks"] or "default"
    lines = [
        f"{d['scenario']}: {SCENARIOS[d['scenario']].about} ({workload['source']}, {workload['requests']} requests)",
        f"vLLM {machine['vllm']}, {machine['cores']} cores of {machine['cpu']}, KV blocks: {blocks} of "
        f"{engine['block_size']}, at most {engine['max_num_seqs']} running and "
        f"{engine['max_num_batched_tokens']:,} tokens a step",
    ]
    if workload["clipped"]:
        lines.append(f"{workload['clipped']} requests were clipped to {engine['max_model_len']} tokens")
    for doc in documents:
        missed = doc["summary"]["requests"] - doc["summary"]["think_forced_ok"]
        if missed:
            lines.append(f"{doc['name']}: {missed} requests did not end thinking where the trace says")
    return "\n".join(lines)


def early_exit(a: argparse.Namespace) -> dict[str, Any]:
    """A trial of early exit on the bundled reasoner, printed; `meridian bench vllm` measures it."""
    try:
        out = a.out / EARLY_EXIT
        d = experiment(Experiment(reasoner_dir(), out, QUICK_PROBLEMS, QUICK_TUNE, budgets=QUICK_BUDGETS, seed=a.seed))
    except NoModel as e:
        raise Failed(str(e)) from e
    if not a.json:
        what = f"{QUICK_PROBLEMS} problems, a trial (meridian bench vllm --scenario {EARLY_EXIT} measures)"
        print(f"\n{EARLY_EXIT}: a small reasoning model, its thinking ended when its answer has settled; {what}")
        print(f"\n{exit_table(d)}", flush=True)
    return dict(d)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--trace", type=Path, metavar="FILE", help="CSV or JSONL requests instead of generated ones")
    p.add_argument("--limit", type=int, metavar="N", help="use only the first N requests of the trace")
    p.add_argument("--scale-tokens", type=float, default=1.0, help="multiply every length (default 1)")
    p.add_argument("--scale-time", type=float, default=1.0, help="multiply every arrival time (default 1)")
    p.add_argument("--policy", type=Path, metavar="FILE.wasm", help=f"dispatch policy (default {POLICY})")
    p.add_argument("--scenario", choices=(*SCENARIOS, EARLY_EXIT, "all"), default="all")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings")
    p.add_argument("--out", type=Path, default=Path("target") / "demo", metavar="DIR", help="raw rows and logs")
    p.add_argument("--json", action="store_true", help="print the summaries as JSON instead of tables")
    return p.parse_args(argv)


def demo(a: argparse.Namespace) -> None:
    """Run what the command line asks for and print it."""
    policy = a.policy or POLICY
    if not policy.is_file():
        raise Failed(f"policy {policy}: no such file (make policies builds the bundled ones)")
    if a.trace:
        try:
            read_trace(a.trace)
        except (OSError, ValueError) as e:
            raise Failed(f"trace: {e}") from e
    a.out.mkdir(parents=True, exist_ok=True)
    try:
        model = model_dir()
    except NoModel as e:
        raise Failed(str(e)) from e
    printed: dict[str, Any] = {}
    # A trace has no answers that could be right.
    everything = tuple(SCENARIOS) if a.trace else (*SCENARIOS, EARLY_EXIT)
    chosen = everything if a.scenario == "all" else (a.scenario,)
    for scenario in chosen:
        if scenario == EARLY_EXIT:
            printed[scenario] = early_exit(a)
            continue
        documents = run_scenario(a, scenario, model, policy.resolve())
        write_rows_csv(a.out / f"{scenario}.csv", [(d["name"], d["rows"]) for d in documents])
        if a.json:
            kept = ("summary", "machine", "engine", "workload", "meridian")
            printed[scenario] = {d["name"]: {k: d[k] for k in kept if k in d} for d in documents}
        else:
            runs = [(d["name"], d["summary"]) for d in documents]
            print(f"\n{heading(documents)}\n\n{table(runs)}", flush=True)
    if a.json:
        print(json.dumps(printed, indent=1))
    else:
        print(f"\n{LEGEND}\nRaw rows: {os.path.relpath(a.out)}")


def main(argv: list[str] | None = None) -> int:
    """Command line; exit code 1 with one clear line when something failed."""
    try:
        demo(parse(argv))
    except Failed as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
