"""From vLLM's `schedule()` to a policy and back: what a step costs, its calls into the host, what a component costs,
whether decisions are those of before; and how large the house is."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checks.areas.house_size import LONG_FILE, of_folder, size
from checks.figures import Figure, Part, Row, over_pairs, table
from checks.run import MERIDIAN, POLICIES, ROOT, before, command_of, engine, example, meridian, output, package_of, say

SURFACE = ROOT / "python" / "tests" / "surface.py"


def house(_: int) -> Iterator[Figure]:
    """Lines, files, crates and public types."""
    found = size(of_folder(ROOT))
    source, tests = sum(found.source.values()), sum(found.tests.values())
    yield Figure("lines of source", source, "lines", "<= 100000")
    yield Figure("lines of tests", tests, "lines", "<= 52000")
    for kind, rooms in (("source", found.source), ("tests", found.tests)):
        for room, lines in sorted(rooms.items()):
            if lines:
                yield Figure(f"lines of {kind} in {room}", lines, "lines")
    yield Figure("files", found.files, "files")
    yield Figure(f"files of over {LONG_FILE} lines of source", found.long_files, "files", "<= 15")
    yield Figure(f"files of over {LONG_FILE} lines of tests", found.long_tests, "files")
    yield Figure("crates", found.crates, "crates")
    yield Figure("public types in Rust", found.public_types, "types")


MOST_ADDED = {"default": 1.08, "fcfs": 1.01}


def model() -> str:
    """Folder of the small model."""
    return output(sys.executable, "-m", "meridian.vllm.bench.model").splitlines()[-1]


def step(pairs: int, **options: Any) -> Iterator[Figure]:
    """Whole `schedule()` and `update_from_output()` of vLLM's scheduler, stock and with Meridian, and what of the
    difference `own_ns` says; a pair is a process."""
    runs = []
    for _ in range(pairs):
        rows = engine("house_step", model=model(), **options)["rows"]
        runs.append({(row["running"], row["contestant"]): row for row in rows})
    for running, contestant in runs[0]:
        rows = [run[running, contestant] for run in runs]
        where = f"{running} running, {contestant}"
        for method, title in (("schedule", "schedule()"), ("update", "update_from_output()")):
            yield over_pairs(f"{where}: {title}", [row[f"{method}_us"] for row in rows], "us")
        if contestant == "stock":
            continue
        for key, title in (("schedule", "schedule()"), ("update", "update_from_output()"), ("both", "both")):
            bound = None if key == "both" else f"<= {MOST_ADDED[contestant]}"
            yield over_pairs(f"{where}: {title} over stock", [row[f"{key}_ratio"] for row in rows], "ratio", bound)
        yield over_pairs(f"{where}: added to schedule()", [row["added_us"] for row in rows], "us")
        yield over_pairs(f"{where}: own_ns of a step", [row["own_us"] for row in rows], "us")
        if contestant == "default":
            off = [abs(row["own_us"] / row["added_us"] - 1) for row in rows]
            yield over_pairs(f"{where}: own_ns off what was added", off, "ratio", "<= 0.1")
        yield Figure(f"{where}: faults", sum(sum(row["faults"].values()) for row in rows), "faults", "<= 0")


# Kept by hand: the locks that each native call of a step takes. Correct `LOCKS` when a call takes others. H: handles of
# requests, D: driver, S: dispatch slot, E: eviction slot, L: lines of the log.
LOCKS = {
    **{"Engine.begin()": "HDS", "Engine.end()": "HD", "Engine.tokens()": "HD"},
    **{"Engine.add()": "DDH", "Engine.remove()": "DH", "Engine.preempted()": "D", "Engine.idle()": "D"},
    **{"Engine.chain_ends()": "D", "Engine.victim()": "HDE", "BlockPool.choose()": "D", "BlockPool.taken()": "D"},
    **{"BlockPool.leaving()": "DE", "BlockPool.matched()": "D", "BlockPool.touched()": "D"},
    **{"BlockPool.prefix_matched()": "D", "BlockPool.mark_dead()": "D", "take_log()": ""},
    **dict.fromkeys((".is_stock", ".is_watched", ".evicts_dead_thinking"), "D"),
    **dict.fromkeys((".reads_awaited", ".reads_chains", ".reads_victim_blocks"), "D"),
    # Fields of a plan that was made.
    **dict.fromkeys((".token_budget", ".caps", ".waiting_changed", ".preempted", ".orders", ".follows_thinking"), ""),
    **dict.fromkeys((".has_units", ".overdue", ".prompt_blocks", ".refused"), ""),
}
# Kept by hand, too: the type that each call from `schedule()` to a component belongs to, in the order of the calls.
PATH = (
    *("scheduler", "scheduler", "scheduler", "scheduler", "engine", "Driver", "MeridianScheduler", "slot", "slot"),
    *("slot's state", "guarded policy", "component", "component", "guest"),
)


def crossings(_: int) -> Iterator[Figure]:
    """What lies between Python's `schedule()` and a component: types and calls, native calls of a step, locks."""
    for what, now, most in (
        ("types from schedule() to the component", len(set(PATH)), 6),
        ("calls from schedule() to the component", len(PATH), 9),
    ):
        yield Figure(what, now, what.split()[0], f"<= {most}")
    counts = engine("house_path", model=model())
    for kind, title in (("steady", "a steady step"), ("turnover", "a step in which a request ends or comes")):
        calls = Counter(counts[kind])
        for name, number in sorted(calls.items()):
            say(f"    {title}: {name}: {number:.2f}")
        unknown = sorted(set(calls) - set(LOCKS))
        if unknown:
            sys.exit(f"error: LOCKS of {__file__}: no row for {', '.join(unknown)}")
        reads = sum(number for name, number in calls.items() if name.startswith("."))
        yield Figure(f"native calls of {title}, 64 running", calls.total() - reads, "calls", "<= 3")
        yield Figure(f"native properties read in {title}, 64 running", reads, "reads")
        taken = sum(number * len(LOCKS[name]) for name, number in calls.items())
        yield Figure(f"locks of {title}, 64 running", taken, "locks", "<= 1")
    yield Figure("locks of planning a step", len(LOCKS["Engine.begin()"]), "locks")


TRAP, LOOP = ("planning a step in which the policy traps, p99", "planning a step in which the policy loops, p99")
HELD = "time a swap held the slot, p99"
GUEST = (
    ("no-op", "no-op call", "ns", "<= 150"),
    ("ratio 64", "default policy, component over native, 64 candidates", "ratio", "<= 1.25"),
    ("ratio 1024", "default policy, component over native, 1,024 candidates", "ratio", "<= 1.10"),
    ("ratio 4096", "default policy, component over native, 4,096 candidates", "ratio", "<= 1.05"),
    (TRAP, TRAP, "us", "<= 70"),
    (LOOP, LOOP, "us", "<= 2800"),
    (HELD, "delay of a step by a swap, p99", "us", "<= 20"),
)
# Over all pairs.
NEVER = (
    "requests lost",
    "steps whose plan differs from that of an engine left alone",
    "decisions not made by the policy",
)


def runtime(what: str, count: int | None = None) -> dict[str, float]:
    """A part of the example `runtime_figures`: its values by name."""
    lines = example("runtime_figures", what, *(() if count is None else (str(count),)))
    return {line["name"]: line["value"] for line in lines}


def guest(pairs: int, faults: int = 2000, swaps: int = 10_000) -> Iterator[Figure]:
    """Calls of components, faults, and swaps between equal policies under load, without vLLM."""
    found: dict[str, list[float]] = {}
    for _ in range(pairs):
        report = meridian("bench", "micro", "--policies", POLICIES, "--candidates", "64,1024,4096")
        values = {f"ratio {row['candidates']}": row["ratio"] for row in report["rows"] if row["slot"] == "dispatch"}
        values |= {"no-op": report["noop_call_ns"], **runtime("fallback", faults), **runtime("swaps", swaps)}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    for name, title, unit, bound in GUEST:
        yield over_pairs(title, found[name], unit, bound)
    yield Figure("swaps without vLLM", sum(found["swaps"]), "swaps", f">= {swaps}")
    for name in NEVER:
        yield Figure(f"swaps without vLLM: {name}", sum(found[name]), name.split()[0], "<= 0")


FAULTS = ("trap", "deadline", "memory", "bad-answer", "init", "load")
endurance = table(
    # A million steps, one in a hundred with a fault, every kind in turn.
    lambda _: [runtime("endurance")],
    Row("endurance: steps", "steps", "steps", ">= 1e6"),
    Row("endurance: faults injected", "faults injected", "faults"),
    *(Row(f"endurance: {name}", name, "faults", ">= 1") for name in (f"faults counted: {kind}" for kind in FAULTS)),
    Row("endurance: steps not decided", lambda m: m["steps"] - m["steps decided by whomever"], "steps", "<= 0"),
    Row("endurance: requests lost", "requests lost", "requests", "<= 0"),
    Row(
        "endurance: resident memory at the end over that after a tenth",
        lambda m: m["resident memory at the end"] / m["resident memory after a tenth of the steps"],
        "ratio",
        "<= 1.05",
    ),
)

cached = table(
    # Meridian's share of a step of the real engine with 1e5 cached blocks and 2,000 sessions.
    lambda _: [
        {
            "name": "tiered-lru",
            "seats": seats,
            **engine("step_share", eviction="native:tiered-lru", seats=seats, steps=n),
        }
        for seats, n in ((128, 400), (1024, 100))
    ],
    Row("cost, {name}, {seats} seats: share of a step", "share_of_step", "ratio", "<= 0.03"),
    Row("cost, {name}, {seats} seats: own time of a step, mean", "own_ms_mean", "ms"),
    Row("cost, {name}, {seats} seats: own time of a step, p99", "own_ms_p99", "ms"),
    Row("cost, {name}, {seats} seats: step, median", "step_ms_p50", "ms"),
    Row("cost, {name}, {seats} seats: cached blocks", "cached_blocks", "blocks", ">= 1e5"),
)


# Little KV memory, so that the eviction policy decides too.
REPLAY = ("--workload", "reasoning-chat", "--requests", "100", "--rate", "3", "--kv-blocks", "3000")
REPLAY_SEEDS = ",".join(str(seed + 1) for seed in range(20))


def replayed(command: Path, slot: str, policy: str) -> list[dict[str, Any]]:
    """The runs of a replay under a policy: schedules take no time of this machine, so runs of equal ones are equal."""
    chosen = f"{slot}={policy}" if slot == "dispatch" else f"dispatch=balanced,{slot}={policy}"
    text = output(command, "--json", "bench", "replay", *REPLAY, "--seeds", REPLAY_SEEDS, "--policy", chosen)
    return [run for run in json.loads(text)["runs"] if run["policy"] != "fcfs" or policy == "native:fcfs"]


def decisions(_: int) -> Iterator[Figure]:
    """Simulated schedules and single decisions of every native policy, 20 seeds, by both builds; and recordings of this
    build's decisions, replayed."""
    then = before()
    if then is None:
        sys.exit("error: MERIDIAN_BEFORE: not set, expected a folder with what the commit before built")
    sys.path.insert(0, str(SURFACE.parent))
    from surface import policies

    old_command, old_package = command_of(then), package_of(then)
    shipped = [line.split()[1:] for line in policies(old_command)]
    differing = runs = 0
    for number, (slot, policy) in enumerate(shipped):
        say(f"  replay {number + 1} of {len(shipped)}: {slot} {policy}")
        was, now = (replayed(command, slot, policy) for command in (old_command, MERIDIAN))
        runs += len(was)
        differs = [old["seed"] for old, new in zip(was, now, strict=True) if old != new]
        differing += len(differs)
        if differs:
            say(f"    differs with seeds {differs}")
    yield Figure("policies that both builds replayed", len(shipped), "policies")
    yield Figure("simulated runs whose schedules differ", differing, f"of {runs}", "<= 0")
    names = [f"{slot}={policy}" for slot, policy in shipped]
    say("  single decisions of both builds")
    with tempfile.TemporaryDirectory() as folder:
        records = [Path(folder) / side for side in ("before", "now")]
        was, now = (
            engine("house_decide", environment, record=record, policies=names)
            for record, environment in zip(records, ({"PYTHONPATH": str(old_package)}, {}), strict=True)
        )
        for name in names:
            if was[name] != now[name]:
                say(f"    differs: {name}")
        unequal = sum(a != b for name in names for a, b in zip(was[name]["digests"], now[name]["digests"], strict=True))
        yield Figure("single decisions", sum(row["decisions"] for row in now.values()), "decisions")
        yield Figure("policies and seeds whose single decisions differ", unequal, f"of {20 * len(names)}", "<= 0")
        files = sorted(records[1].glob("*/*.arrow"))
        # A recording of one slot may lie beside empty ones of others.
        reports = [replayed_recording(file) for file in files]
        yield Figure("recorded decisions that were replayed", sum(r["decisions"] for r in reports), "decisions")
        different = sum(report["different"] for report in reports)
        yield Figure("recorded decisions that differ when replayed", different, "decisions", "<= 0")


def replayed_recording(file: Path) -> dict[str, Any]:
    """The report of `meridian replay`, which fails when a decision differs."""
    done = subprocess.run((MERIDIAN, "--json", "replay", file), stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    if "different" not in report:
        sys.exit(f"error: {file.name}: {report}")
    return report


SCHEDULING = ("python/meridian/vllm", "python/src", "host/core/src", "host/engine/src")
GUESTS = ("host/core/src", "host/wasm/src", "host/engine/src", "policies/shipped/src")

PARTS: dict[str, Part] = {
    "step": Part(step, SCHEDULING, lambda pairs: step(pairs, running=[64, 256], turns=20), 90),
    "crossings": Part(crossings, SCHEDULING, crossings, 20),
    "guest": Part(guest, GUESTS, lambda pairs: guest(pairs, 500, 1000), 50),
    "endurance": Part(endurance, GUESTS),
    "cached": Part(cached, SCHEDULING),
    "decisions": Part(decisions, (*SCHEDULING, "policies/shipped/src")),
    "house": Part(house, ("host", "policies", "python", "bench", "kernels", "examples", "checks"), house, 5),
}
