"""What the simulator is worth: how near it is to the real engine, and its speed."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from checks.figures import Figure, Part, over_pairs
from checks.run import (
    MERIDIAN,
    POLICIES,
    RESULTS,
    ROOT,
    WORK,
    before,
    command_of,
    compared,
    example,
    meridian,
    output,
    recorded,
    say,
)

RANKED_POLICIES = ("output-first", "priority", "pascal", "srpt", "fair-share", "edf", "qoe")
FITTED = (11, 13)  # seeds of the traces that the model is fitted to
TESTED = 12  # and of the one on which it is checked
TURNS = 3
# The headline metrics of a dispatch policy, by the key of `meridian bench calibrate --json`.
RANKED = {"TTFO": "ttfo_mean_ms", "output ITL p99": "itl_output_p99_ms"}


def trace(seed: int) -> str:
    """Requests for the small model, generated."""
    out = str(WORK / f"fidelity-{seed}.csv")
    workload = ROOT / "checks" / "engine" / "fidelity.toml"
    meridian("bench", "generate", "--workload", workload, "--requests", "160", "--seed", str(seed), "--out", out)
    return out


def real_run(label: str, seed: int, scheduler: str, *more: str, requests: str | None = None) -> str:
    """One run of the real engine; the file of its document. `requests` is a trace instead of the seed's own. With
    MERIDIAN_REUSE_RUNS a run that is there is not repeated: for figures of another simulator against the same runs."""
    label = label.replace(":", "-")
    if not (os.environ.get("MERIDIAN_REUSE_RUNS") and list((WORK / label).glob("*.results.json"))):
        flags = ("--max-num-seqs", "32", "--without-stock", "--policy", scheduler)
        compared(label, "--trace", requests or trace(seed), *flags, *more)
    return str(recorded(label, scheduler.removeprefix("native:"))[0])


def calibrated(fitted: list[str], tests: list[str]) -> list[dict[str, Any]]:
    """What `meridian bench calibrate` says of `tests`."""
    flags = [flag for path in tests for flag in ("--test", path)]
    return [e for e in meridian("bench", "calibrate", *fitted, *flags)["errors"] if not e["is_fitted"]]


def spread(values: list[float]) -> float:
    """Between the lowest and the highest, percent of the mean."""
    return 100 * (max(values) - min(values)) / mean(values)


def off(name: str, errors: list[dict[str, Any]], key: str, bound: str | None = None) -> Figure:
    """A mean error, with the lowest and the highest."""
    values = [e[key] for e in errors]
    return Figure(name, mean(values), "%", bound, min(values), max(values))


def below(turns: int, requests: int) -> tuple[list[str], list[dict[str, Any]]]:
    """Runs of the real CPU engine below what it can do, on traces that the model is fitted to and on another one, in
    turns; the former, and the errors of the latter.

    The machine's own speed drifts by several percent within minutes, so each run is checked with a model that was
    fitted to the runs of two other traces right before and after it.
    """
    args = ("--scale-time", "1.7", "--requests", str(requests))
    fits, tests = [], []
    for turn in range(turns + 1):
        fits.append(real_run(f"fidelity-below-{requests}-fit-{turn}", FITTED[turn % len(FITTED)], "stock", *args))
        if turn < turns:
            tests.append(real_run(f"fidelity-below-{requests}-{turn}", TESTED, "stock", *args))
    return fits, [calibrated(fits[i : i + 2], [test])[0] for i, test in enumerate(tests)]


def off_below(errors: list[dict[str, Any]]) -> Iterator[Figure]:
    """How far the simulator is off on the other trace."""
    for name, bound in {"end to end": "<= 5", "TTFO": "<= 12", "ITL": "<= 8", "TTFT": None}.items():
        key = "e2e" if name == "end to end" else name.lower()
        yield off(f"fidelity: MAPE {name}, another trace", errors, key, bound)


def fidelity_quick(_: int) -> Iterator[Figure]:
    """One turn of fewer requests."""
    return off_below(below(1, 60)[1])


def fidelity(_: int) -> Iterator[Figure]:
    """The real CPU engine against the simulator, below what it can do: above it, the queue adds up every percent."""
    fits, errors = below(TURNS, 110)
    meridian("bench", "calibrate", *fits, "--out", RESULTS / "fidelity-engine.toml")
    yield from off_below(errors)
    name = "fidelity: mean end to end of the real engine, the same run repeated: spread"
    yield Figure(name, spread([e["real"]["e2e_mean_ms"] for e in errors]), "%")
    once = [
        real_run("fidelity-once", TESTED, "stock", "--at-once"),
        real_run("fidelity-once-tight", TESTED, "stock", "--at-once", "--kv-blocks", "200"),
    ]
    whole = calibrated(fits, once)
    steps, same = sum(e["steps"] for e in whole), sum(e["same_steps"] for e in whole)
    yield Figure("fidelity: steps of stock vLLM, all requests at once, KV ample and short", steps, "steps")
    yield Figure("fidelity: of these, steps that the simulator has otherwise", steps - same, "steps", "<= 0")


def ranks(_: int) -> Iterator[Figure]:
    """Every shipped dispatch policy in the real engine and in the simulator, above what the engine can do."""
    fitted, tests = [], []
    schedulers = ("stock", *(f"native:{name}" for name in RANKED_POLICIES))
    for turn in range(TURNS):
        for seed in FITTED:
            fitted.append(real_run(f"fidelity-fit-{seed}-{turn}", seed, "stock"))
        # Back and forth, so that a machine that becomes slower or faster does so for all.
        for scheduler in schedulers if turn % 2 == 0 else reversed(schedulers):
            tests.append(real_run(f"fidelity-{scheduler.removeprefix('native:')}-{turn}", TESTED, scheduler))
    errors = calibrated(fitted, tests)
    # What the real engine's own repetitions differ by: no model can be nearer than that.
    repeated = [values for values in by_policy(errors, "e2e_mean_ms").values() if len(values) > 1]
    if repeated:
        name = "ranks: mean end to end of the real engine, the same run repeated: spread"
        yield Figure(name, median(map(spread, repeated)), "%")
    for name, key in (("end to end", "e2e"), ("TTFO", "ttfo"), ("ITL", "itl")):
        yield off(f"ranks: MAPE {name} of all runs above capacity", errors, key)
    for name, key in RANKED.items():
        real = by_policy(errors, key)
        simulated = {error["scheduler"]: error["simulated"][key] for error in errors}
        # Told apart: the ranges of their repetitions do not meet, and the means are 3 % apart.
        apart = [
            (a, b)
            for a, b in combinations(sorted(real, key=lambda p, real=real: mean(real[p])), 2)
            if max(real[a]) < min(real[b]) and mean(real[b]) > 1.03 * mean(real[a])
        ]
        alike = [pair for pair in apart if simulated[pair[0]] < simulated[pair[1]]]
        for a, b in sorted(set(apart) - set(alike)):
            say(f"  {name}: {a} before {b} in the real engine, not in the simulator")
        yield Figure(f"ranks: pairs of policies whose {name} the real engine tells apart", len(apart), "pairs")
        yield Figure(f"ranks: of these, ordered alike ({name})", len(alike) / len(apart), "share", ">= 1")


def by_policy(errors: list[dict[str, Any]], key: str) -> dict[str, list[float]]:
    """A metric of the real engine's runs by policy."""
    found: dict[str, list[float]] = {}
    for error in errors:
        found.setdefault(error["scheduler"], []).append(error["real"][key])
    return found


def speed(pairs: int) -> Iterator[Figure]:
    """Engine steps a second, and a million requests."""
    yield from speed_quick(pairs)
    (million,) = example("sim_figures", "million", POLICIES)
    yield Figure("speed: a million requests of plain chat", million["seconds"], "s", "<= 600")
    yield Figure("speed: a million requests of plain chat, most memory", million["peak_mib"], "MiB")


def speed_quick(pairs: int) -> Iterator[Figure]:
    """Engine steps a second at 64 running, output-first, native and WebAssembly in turns."""
    lines = example("sim_figures", "speed", POLICIES)
    sides = {key: [line[key] for line in lines] for key in ("native", "component", "stock")}
    yield over_pairs("speed: steps a second, native output-first", sides["native"], "steps/s", ">= 200000")
    yield over_pairs("speed: steps a second, output-first.wasm", sides["component"], "steps/s", ">= 140000")
    ratios = [wasm / native for wasm, native in zip(sides["component"], sides["native"], strict=True)]
    yield over_pairs("speed: WebAssembly over native", ratios, "ratio", ">= 0.7")
    yield over_pairs("speed: steps a second, stock", sides["stock"], "steps/s")
    if (then := before()) is not None:
        yield from over_before(pairs, {" before": command_of(then), "": MERIDIAN})


SIMULATED = ("--workload", "reasoning-chat", "--requests", "3000", "--rate", "2", "--policy", "balanced")


def over_before(pairs: int, commands: dict[str, Path]) -> Iterator[Figure]:
    """Steps that the simulator takes in a second of a processor, over the command of before, in turns."""
    found: dict[str, list[float]] = {side: [] for side in commands}
    for pair in range(pairs):
        for side, command in list(commands.items())[:: 1 if pair % 2 else -1]:
            began = resource.getrusage(resource.RUSAGE_CHILDREN)
            report = json.loads(output(command, "--json", "bench", "replay", *SIMULATED))
            over = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = over.ru_utime + over.ru_stime - began.ru_utime - began.ru_stime
            found[side].append(sum(run["metrics"]["steps"] for run in report["runs"]) / seconds)
    ratios = [new / old for new, old in zip(found[""], found[" before"], strict=True)]
    yield over_pairs("speed: simulated steps a second, over before", ratios, "ratio", ">= 1.5")


REAL = ("bench/src/sim", "bench/src/calibrate", "host/core/src", "python/meridian/vllm", "policies/shipped/src")

PARTS: dict[str, Part] = {
    "fidelity": Part(fidelity, REAL, fidelity_quick, 110),
    "ranks": Part(ranks, REAL),
    "speed": Part(speed, ("bench/src/sim", "host/core/src", "host/wasm/src"), speed_quick, 60),
}
