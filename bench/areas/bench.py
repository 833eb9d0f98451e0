"""The simulator: how near it is to the real engine, whether native and WebAssembly policies decide alike, its speed,
and what the shipped dispatch policies do to recorded traffic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from areas.common import RESULTS, ROOT, WORK, Bound, Figure, compared, over_pairs, recorded, say

MERIDIAN = ROOT / "target" / "release" / "meridian"
COMPONENTS = ROOT / "target" / "policies"
# Recorded traces are not part of the repository.
TRACES = Path(os.environ.get("MERIDIAN_TRACES") or ROOT.parent / "shared" / "data")
POLICIES = ("output-first", "priority", "pascal", "srpt", "fair-share", "edf", "qoe")
FITTED = (11, 13)  # seeds of the traces that the model is fitted to
TESTED = 12  # and of the one on which it is checked
TURNS = 3
# The headline metrics of a dispatch policy, by the key of `meridian bench calibrate --json`.
RANKED = (("TTFO", "ttfo_mean_ms"), ("output ITL p99", "itl_output_p99_ms"))


def meridian(*args: str) -> dict[str, Any]:
    """One command with `--json`."""
    done = subprocess.run([MERIDIAN, "--json", "bench", *args], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: meridian bench {' '.join(args)}: {done.stdout.strip()}")
    return json.loads(done.stdout)


def trace(seed: int) -> str:
    """Requests for the small model, generated."""
    WORK.mkdir(parents=True, exist_ok=True)
    out = WORK / f"fidelity-{seed}.csv"
    workload = str(ROOT / "bench" / "vllm" / "fidelity.toml")
    meridian("generate", "--workload", workload, "--requests", "160", "--seed", str(seed), "--out", str(out))
    return str(out)


def real_run(label: str, seed: int, scheduler: str, *more: str) -> str:
    """One run of the real engine; the file of its document. With MERIDIAN_REUSE_RUNS a run that is there is not
    repeated: for figures of another simulator against the same runs."""
    label, policy = label.replace(":", "-"), scheduler.removeprefix("native:")
    if not (os.environ.get("MERIDIAN_REUSE_RUNS") and list((WORK / label).glob("*.results.json"))):
        flags = ("--max-num-seqs", "32", "--without-stock", "--policy", scheduler)
        compared(label, "--trace", trace(seed), *flags, *more)
    return str(recorded(label, policy)[0])


def calibrated(fitted: list[str], tests: list[str], *more: str) -> list[dict[str, Any]]:
    """What `meridian bench calibrate` says of `tests`."""
    flags = [flag for path in tests for flag in ("--test", path)]
    return [e for e in meridian("calibrate", *fitted, *flags, *more)["errors"] if not e["is_fitted"]]


def fidelity() -> Iterator[Figure]:
    """The real CPU engine against the simulator, on a trace that the step time was not fitted to.

    The machine's own speed drifts by several percent within minutes, so each run is checked with a model that was
    fitted to the runs of two other traces right before and after it. The load is below what the engine can do: above
    it, the queue adds up every percent of speed.
    """
    below = ("--scale-time", "1.7", "--requests", "110")
    fits, tests = [], []
    for turn in range(TURNS + 1):
        seed = FITTED[turn % len(FITTED)]
        fits.append(real_run(f"fidelity-below-fit-{turn}", seed, "stock", *below))
        if turn < TURNS:
            tests.append(real_run(f"fidelity-below-{turn}", TESTED, "stock", *below))
    errors = [calibrated(fits[i : i + 2], [test])[0] for i, test in enumerate(tests)]
    meridian("calibrate", *fits, "--out", str(RESULTS / "fidelity-engine.toml"))
    for name, key, limit in (("end to end", "e2e", 5), ("TTFO", "ttfo", 12), ("ITL", "itl", 8), ("TTFT", "ttft", None)):
        bound = None if limit is None else Bound(limit)
        values = [e[key] for e in errors]
        yield Figure(f"fidelity: MAPE {name}, another trace", mean(values), "%", bound, min(values), max(values))
    means = [e["real"]["e2e_mean_ms"] for e in errors]
    spread = 100 * (max(means) - min(means)) / mean(means)
    yield Figure("fidelity: mean end to end of the real engine, the same run repeated: spread", spread, "%")
    once = [
        real_run("fidelity-once", TESTED, "stock", "--at-once"),
        real_run("fidelity-once-tight", TESTED, "stock", "--at-once", "--kv-blocks", "200"),
    ]
    whole = calibrated(fits, once)
    steps, same = sum(e["steps"] for e in whole), sum(e["same_steps"] for e in whole)
    yield Figure("fidelity: steps of stock vLLM, all requests at once, KV ample and short", steps, "steps")
    yield Figure("fidelity: of these, steps that the simulator has otherwise", steps - same, "steps", Bound(0))


def ranks() -> Iterator[Figure]:
    """Every shipped dispatch policy in the real engine and in the simulator, above what the engine can do."""
    fitted, tests = [], []
    schedulers = ("stock", *(f"native:{name}" for name in POLICIES))
    for turn in range(TURNS):
        for seed in FITTED:
            fitted.append(real_run(f"fidelity-fit-{seed}-{turn}", seed, "stock"))
        # Back and forth, so that a machine that becomes slower or faster does so for all.
        for scheduler in schedulers if turn % 2 == 0 else reversed(schedulers):
            tests.append(real_run(f"fidelity-{scheduler.removeprefix('native:')}-{turn}", TESTED, scheduler))
    errors = calibrated(fitted, tests)
    yield from noise(errors)
    for name, key in (("end to end", "e2e"), ("TTFO", "ttfo"), ("ITL", "itl")):
        values = [e[key] for e in errors]
        label = f"ranks: MAPE {name} of all runs above capacity"
        yield Figure(label, mean(values), "%", None, min(values), max(values))
    yield from order(errors)


def noise(errors: list[dict[str, Any]]) -> Iterator[Figure]:
    """What the real engine's own repetitions differ by: no model can be nearer than that."""
    by_policy: dict[str, list[float]] = {}
    for error in errors:
        by_policy.setdefault(error["scheduler"], []).append(error["real"]["e2e_mean_ms"])
    spreads = [100 * (max(v) - min(v)) / mean(v) for v in by_policy.values() if len(v) > 1]
    if spreads:
        yield Figure("ranks: mean end to end of the real engine, the same run repeated: spread", median(spreads), "%")


def order(errors: list[dict[str, Any]]) -> Iterator[Figure]:
    """Pairs of policies that the real engine tells apart, and how many of them the simulator orders alike. Told apart:
    the ranges of their repetitions do not meet, and the means are 3 % apart."""
    for name, key in RANKED:
        real: dict[str, list[float]] = {}
        simulated: dict[str, float] = {}
        for error in errors:
            real.setdefault(error["scheduler"], []).append(error["real"][key])
            simulated[error["scheduler"]] = error["simulated"][key]
        apart = [
            (a, b)
            for a, b in combinations(sorted(real, key=lambda p: mean(real[p])), 2)
            if max(real[a]) < min(real[b]) and mean(real[b]) > 1.03 * mean(real[a])
        ]
        alike = sum(simulated[a] < simulated[b] for a, b in apart)
        for a, b in apart:
            if simulated[a] >= simulated[b]:
                say(f"  {name}: {a} before {b} in the real engine, not in the simulator")
        yield Figure(f"ranks: pairs of policies whose {name} the real engine tells apart", len(apart), "pairs")
        yield Figure(f"ranks: of these, ordered alike ({name})", alike / len(apart), "share", Bound(1, at_most=False))


def example(what: str) -> list[dict[str, Any]]:
    """A part of the example `sim_figures`: its lines."""
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    say(f"  sim_figures {what}")
    done = subprocess.run(
        [ROOT / "target" / "release" / "examples" / "sim_figures", what, COMPONENTS],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def identical() -> Iterator[Figure]:
    """Native and WebAssembly builds of every shipped dispatch policy over the same requests."""
    lines = example("identical")
    yield Figure(
        "identical: decisions made by both builds",
        sum(x["decisions"] for x in lines),
        "decisions",
        Bound(1e6, at_most=False),
    )
    yield Figure("identical: policies", len(lines), "policies")
    differing = sum(x["native"] != x["component"] for x in lines)
    yield Figure("identical: policies whose schedules differ", differing, "policies", Bound(0))
    yield Figure("identical: faults", sum(x["faults"] for x in lines), "faults", Bound(0))


def speed() -> Iterator[Figure]:
    """Engine steps a second at 64 running, output-first, native and WebAssembly in turns; and a million requests."""
    lines = example("speed")
    native = sorted(x["native"] for x in lines)
    yield over_pairs("speed: steps a second, native output-first", native, "steps/s", Bound(200_000, at_most=False))
    wasm = [x["component"] for x in lines]
    yield over_pairs("speed: steps a second, output-first.wasm", wasm, "steps/s", Bound(140_000, at_most=False))
    ratios = [x["component"] / x["native"] for x in lines]
    yield over_pairs("speed: WebAssembly over native", ratios, "ratio", Bound(0.7, at_most=False))
    yield over_pairs("speed: steps a second, stock", [x["stock"] for x in lines], "steps/s")
    (million,) = example("million")
    yield Figure("speed: a million requests of plain chat", million["seconds"], "s", Bound(600))
    yield Figure("speed: a million requests of plain chat, most memory", million["peak_mib"], "MiB")
    yield Figure("speed: a tenth of them, most memory", million["tenth_peak_mib"], "MiB")


SERVEGEN = TRACES / "servegen_r1.csv"
SEEDS = "1,2,3"
CALM, LOADED = 1.8, 2.6  # requests a second, below and above what the engine can do
# What is shown of each policy: title, key, and whether a ratio to fcfs means something.
COLUMNS = (
    ("output ITL p50, ms", "itl_output_p50_ms"),
    ("output ITL p99, ms", "itl_output_p99_ms"),
    ("TTOT p99, ms", "ttot_p99_ms"),
    ("TTFO p50, s", "ttfo_p50_ms"),
    ("TTFO p99, s", "ttfo_p99_ms"),
    ("TTFT p50, s", "ttft_p50_ms"),
    ("throughput, tok/s", "throughput_tok_s"),
    ("goodput, req/s", "goodput_rps"),
    ("SLO", "slo_attainment"),
    ("QoE >= 0.95", "qoe_attainment"),
    ("fairness", "fairness_jain"),
    ("preempted", "preemptions"),
)
# Policies of the table, as the command line takes them.
SHOWN = (
    "balanced",
    "output-first",
    "priority",
    "pascal",
    'pascal{"tpot_ms": 100}',
    'srpt{"forecast": "attained"}',
    "fair-share",
    "edf",
    "qoe",
)
# Seats and KV memory for all, few tokens a step: what is short is the time of the engine, not its memory.
TIME_SHARED = ("--max-num-batched-tokens", "96", "--max-num-seqs", "2048", "--kv-blocks", "2000000")


def replayed(*args: str) -> list[dict[str, Any]]:
    """Runs of a replay of the recorded traffic on the preset."""
    if not SERVEGEN.is_file():
        sys.exit(f"error: {SERVEGEN.name}: no such trace, expected in the folder that MERIDIAN_TRACES names")
    say(f"  replay {' '.join(args)}")
    flags = ("--trace", str(SERVEGEN), "--engine", "7b-h100", "--seeds", SEEDS, "--slo-ttfo-ms", "20000")
    return meridian("replay", *flags, *args)["runs"]


def over_seeds(runs: list[dict[str, Any]], rate: float, policy: str) -> dict[str, float]:
    """A policy's metrics at a rate: the mean over seeds."""
    chosen = [r["metrics"] for r in runs if abs(r["rate"] - rate) < 1e-9 and r["policy"] == policy]
    keys = set.intersection(*(set(m) for m in chosen))
    out = {key: mean(m[key] for m in chosen) for key in keys}
    out["preemptions"] = sum(out[f"preemptions_{phase}"] for phase in ("prefill", "think", "output"))
    return out


def shown(key: str, value: float) -> str:
    """A cell of the table."""
    if key.startswith(("ttfo", "ttft")):
        return f"{value / 1e3:.3g}" if value < 1e6 else f"{value / 1e3:,.0f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(rows: list[tuple[float, str, dict[str, float]]]) -> list[str]:
    """Markdown: a table a rate, a row a policy."""
    lines = []
    for rate in sorted({rate for rate, _, _ in rows}):
        lines += ["", f"**{rate} requests a second**", "", f"| policy | {' | '.join(title for title, _ in COLUMNS)} |"]
        lines.append("|---" * (len(COLUMNS) + 1) + "|")
        for _, policy, metrics in (row for row in rows if row[0] == rate):
            cells = [shown(key, metrics[key]) for _, key in COLUMNS]
            lines.append(f"| `{policy}` | {' | '.join(cells)} |")
    return lines


def policies() -> Iterator[Figure]:
    """Every shipped dispatch policy on two hours of DeepSeek-R1 requests, 7B on an H100, below and above capacity."""
    flags = [flag for policy in SHOWN for flag in ("--policy", policy)]
    runs = replayed("--rate", f"{CALM},{LOADED}", *flags)
    known = replayed("--rate", f"{CALM},{LOADED}", "--max-tokens", "exact", "--policy", "srpt")
    rows = [(rate, name, over_seeds(runs, rate, name)) for rate in (CALM, LOADED) for name in ("fcfs", *SHOWN)]
    rows += [(rate, "srpt, lengths known", over_seeds(known, rate, "srpt")) for rate in (CALM, LOADED)]
    (RESULTS / "servegen.json").write_text(
        json.dumps([{"rate": rate, "policy": name, **metrics} for rate, name, metrics in rows], indent=1) + "\n"
    )
    write_between(ROOT / "docs" / "src" / "policies.md", "servegen", table(rows))
    at = {(rate, name): metrics for rate, name, metrics in rows}
    for label, key, bound in (
        ("output ITL p50", "itl_output_p50_ms", Bound(1, below=True)),
        ("output ITL p99", "itl_output_p99_ms", Bound(1, below=True)),
        ("TTOT p99", "ttot_p99_ms", Bound(1, below=True)),
        ("TTFO p50", "ttfo_p50_ms", None),
        ("TTFO p99", "ttfo_p99_ms", None),
        ("throughput", "throughput_tok_s", None),
    ):
        ratio = at[LOADED, "output-first"][key] / at[LOADED, "fcfs"][key]
        yield Figure(f"servegen, {LOADED}/s: {label}, output-first over fcfs", ratio, "ratio", bound)
    for label, key, bound in (
        ("TTFO p99", "ttfo_p99_ms", Bound(0.5)),
        ("TTFO p50", "ttfo_p50_ms", None),
        ("throughput", "throughput_tok_s", Bound(0.97, at_most=False)),
    ):
        ratio = at[LOADED, "pascal"][key] / at[LOADED, "fcfs"][key]
        yield Figure(f"servegen, {LOADED}/s: {label}, pascal over fcfs", ratio, "ratio", bound)
    shared = replayed("--rate", str(CALM), *TIME_SHARED, "--policy", "pascal")
    ours, stock = over_seeds(shared, CALM, "pascal"), over_seeds(shared, CALM, "fcfs")
    for label, key in (
        ("TTFO p50", "ttfo_p50_ms"),
        ("TTFO mean", "ttfo_mean_ms"),
        ("TTFO p95", "ttfo_p95_ms"),
        ("TTFO p99", "ttfo_p99_ms"),
        ("throughput", "throughput_tok_s"),
    ):
        name = f"servegen, {CALM}/s, 96 tokens a step, memory for all: {label}, pascal over fcfs"
        yield Figure(name, ours[key] / stock[key], "ratio")


def write_between(page: Path, name: str, lines: list[str]) -> None:
    """Replace what stands between a page's markers."""
    before, start, inner = page.read_text().partition(f"<!-- table:{name} -->")
    _, end, after = inner.partition(f"<!-- /table:{name} -->")
    if not start or not end:
        sys.exit(f"error: {page.name} has no <!-- table:{name} --> markers")
    page.write_text(before + start + "\n" + "\n".join(lines) + "\n\n" + end + after)


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """The parts of the area."""
    del pairs
    return {"fidelity": fidelity, "ranks": ranks, "identical": identical, "speed": speed, "policies": policies}
