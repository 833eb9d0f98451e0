"""The whole house against the commit that it is compared with: size, names, step, path, guests, decisions.

`MERIDIAN_BEFORE` is a folder with builds of that commit: the package (`meridian/`, or a copy of `python/meridian` named
`py` with the library beside it as `lib_native.so`), the command (`meridian`, or `bin/meridian` beside a package), the
`examples`, and its components (`policies`). Without it, the parts that can measure this build alone do so.
`MERIDIAN_BEFORE_TREE` is a folder with its sources; by default, they come from git.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checks.areas.house_size import LONG_FILE, of_commit, of_folder, size
from checks.figures import Figure, over_pairs
from checks.run import MERIDIAN, POLICIES, RELEASE, RESULTS, ROOT, WORK, build, lines, output, say

BEFORE = "f855fe9"
EXAMPLES = RELEASE / "examples"
SURFACE = ROOT / "python" / "tests" / "surface.py"


def before() -> Path | None:
    """The folder of what the commit before built."""
    given = os.environ.get("MERIDIAN_BEFORE")
    return Path(given).resolve() if given else None


def needed() -> Path:
    """The same, where nothing can be measured without it."""
    found = before()
    if found is None:
        sys.exit("error: MERIDIAN_BEFORE: not set, expected a folder with what the commit before built")
    return found


def package_of(folder: Path) -> Path:
    """What `PYTHONPATH` must be for the package of that folder."""
    if (folder / "meridian" / "__init__.py").is_file():
        return folder
    made = WORK / "house-before"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(folder / "py", made / "meridian")
    shutil.copy(folder / "lib_native.so", made / "meridian" / "_native.abi3.so")
    return made


def command_of(folder: Path) -> Path:
    """The command of that folder."""
    found = folder / "meridian"
    return found if found.is_file() else folder / "bin" / "meridian"


def measured(name: str, package: Path | None = None, **options: Any) -> Any:
    """What `checks.engine.NAME` measures, with the installed package or another one."""
    given = [f"{key}={json.dumps(value, default=str)}" for key, value in options.items()]
    environment = {"PYTHONPATH": str(package)} if package else {}
    return lines(sys.executable, "-m", "checks.engine", name, *given, env=environment)[-1]


def model() -> str:
    """Folder of the small model."""
    return output(sys.executable, "-m", "meridian.vllm.bench.model").splitlines()[-1]


def alternating(what: str, pairs: int, measure: Callable[[Path | None], Any]) -> tuple[list[Any], list[Any]]:
    """Runs of this package, and of the one before if there is one, in turns; the first one changes."""
    then = before()
    packages = [None, *([package_of(then)] if then else [])]
    found: dict[Path | None, list[Any]] = {package: [] for package in packages}
    for pair in range(pairs):
        for package in packages[:: 1 if pair % 2 else -1]:
            say(f"  {what}: pair {pair + 1} of {pairs}, {'before' if package else 'now'}")
            found[package].append(measure(package))
    return found[None], [run for package in packages[1:] for run in found[package]]


def count() -> Iterator[Figure]:
    """Lines, files, crates and public types of the two trees."""
    tree = os.environ.get("MERIDIAN_BEFORE_TREE")
    was, now = size(of_folder(Path(tree)) if tree else of_commit(ROOT, BEFORE)), size(of_folder(ROOT))

    def compared(name: str, old: float, new: float, unit: str, bound: str | None = None) -> Iterator[Figure]:
        yield Figure(f"{name} before", old, unit)
        yield Figure(name, new, unit)
        if old:
            yield Figure(f"{name}, over before", new / old, "ratio", bound)

    source = (sum(was.source.values()), sum(now.source.values()))
    yield from compared("lines of source", *source, "lines", "<= 0.88")
    yield from compared("lines of tests", sum(was.tests.values()), sum(now.tests.values()), "lines")
    for kind, old, new in (("source", was.source, now.source), ("tests", was.tests, now.tests)):
        for room in sorted({*old, *now.source}):
            if old[room] or new[room]:
                yield from compared(f"lines of {kind} in {room}", old[room], new[room], "lines")
    yield from compared("files", was.files, now.files, "files")
    yield from compared(f"files of over {LONG_FILE} lines of source", was.long_files, now.long_files, "files")
    yield from compared(f"files of over {LONG_FILE} lines of tests", was.long_tests, now.long_tests, "files")
    yield from compared("crates", was.crates, now.crates, "crates")
    yield from compared("public types in Rust", was.public_types, now.public_types, "types")


def surface() -> Iterator[Figure]:
    """Names that users can write: those of the stored list that are gone."""
    sys.path.insert(0, str(SURFACE.parent))
    from test_surface import REMOVED, lost

    stored = (RESULTS / "surface.txt").read_text().splitlines()
    found = output(sys.executable, SURFACE, "--command", MERIDIAN).splitlines()
    missing = lost(stored, found)
    for name in missing:
        say(f"  lost: {name}")
    for name in sorted(set(found) - set(stored)):
        say(f"  new: {name}")
    yield Figure("names before", len(stored), "names")
    yield Figure("names", len(found), "names")
    yield Figure("names removed on purpose", sum(map(len, REMOVED.values())), "names")
    yield Figure("names lost", len(missing), "names", "<= 0")


MOST_ADDED = {"default": 1.08, "fcfs": 1.01}


def step(pairs: int) -> Iterator[Figure]:
    """Whole `schedule()` and `update_from_output()` of vLLM's scheduler, stock and with Meridian, and what of the
    difference `own_ns` says."""
    folder = model()

    def measure(package: Path | None) -> dict[tuple[int, str], dict[str, float]]:
        rows = measured("house_step", package, model=folder)["rows"]
        return {(row["running"], row["contestant"]): row for row in rows}

    runs, runs_before = alternating("step", pairs, measure)
    for running, contestant in runs[0]:
        rows, rows_before = ([run[running, contestant] for run in side] for side in (runs, runs_before))
        where = f"{running} running, {contestant}"
        for method, title in (("schedule", "schedule()"), ("update", "update_from_output()")):
            yield over_pairs(f"{where}: {title}", [row[f"{method}_us"] for row in rows], "us")
        if contestant == "stock":
            continue
        for key, title in (("schedule", "schedule()"), ("update", "update_from_output()"), ("both", "both")):
            ratios = [row[f"{key}_ratio"] for row in rows]
            bound = None if key == "both" else f"<= {MOST_ADDED[contestant]}"
            yield over_pairs(f"{where}: {title} over stock", ratios, "ratio", bound)
            if rows_before:
                # Each over stock of its own process: both builds had the same vLLM beside them.
                of_before = [row[f"{key}_ratio"] for row in rows_before]
                yield over_pairs(f"{where}: {title} over stock, before", of_before, "ratio")
                changes = [new / old for new, old in zip(ratios, of_before, strict=True)]
                yield over_pairs(f"{where}: {title} over that before", changes, "ratio")
        yield over_pairs(f"{where}: added to schedule()", [row["added_us"] for row in rows], "us")
        yield over_pairs(f"{where}: own_ns of a step", [row["own_us"] for row in rows], "us")
        if contestant == "default":
            off = [abs(row["own_us"] / row["added_us"] - 1) for row in rows]
            yield over_pairs(f"{where}: own_ns off what was added", off, "ratio", "<= 0.1")
        yield Figure(f"{where}: faults", sum(sum(row["faults"].values()) for row in rows), "faults", "<= 0")


def processor(pairs: int) -> Iterator[Figure]:
    """The logits processor's time a token over that before, on the real engine."""
    needed()
    for what, budgets in (("nothing set", False), ("budgets", True)):
        now, then = alternating(
            f"processor, {what}",
            pairs,
            lambda package, budgets=budgets: measured("token_cost", package, budgets=budgets),
        )
        yield over_pairs(f"{what}: time of the processor a token", [row["processor"] for row in now], "us")
        ratios = [new["processor"] / old["processor"] for new, old in zip(now, then, strict=True)]
        yield over_pairs(f"{what}: time of the processor a token, over that before", ratios, "ratio", "<= 0.7")


# Kept by hand: the locks that each native call of a step takes. Correct `LOCKS` when a call takes others. H: handles of
# requests, D: driver, S: dispatch slot, E: eviction slot, L: lines of the log.
LOCKS_BEFORE = {
    **{"Engine.plan()": "HDES", "Engine.scheduled()": "HD", "Engine.generated()": "HD", "Engine.admitted()": "D"},
    **{"Engine.add()": "DDH", "Engine.remove()": "DH", "Engine.set_computed()": "D", "Engine.preempted()": "D"},
    **{"Engine.chain_ends()": "D", "Engine.victim()": "HDE", "Engine.idle()": "D", "Engine.keep()": "DS"},
    **{"BlockPool.choose()": "D", "BlockPool.taken()": "D", "BlockPool.leaving()": "DE", "BlockPool.matched()": "D"},
    **{"BlockPool.touched()": "D", "BlockPool.prefix_matched()": "D", "BlockPool.mark_dead()": "D"},
    **{".is_stock": "DS", ".is_watched": "DS", ".fault_count": "DS", ".evicts_dead_thinking": "D"},
    **{".reads_awaited": "DE", ".reads_chains": "DE", ".reads_victim_blocks": "DE", "take_log()": "L"},
}
LOCKS = {
    **{"Engine.begin()": "HDS", "Engine.end()": "HD", "Engine.tokens()": "HD"},
    **{"Engine.add()": "DDH", "Engine.remove()": "DH", "Engine.preempted()": "D", "Engine.idle()": "D"},
    **{"Engine.chain_ends()": "D", "Engine.victim()": "HDE", "BlockPool.choose()": "D", "BlockPool.taken()": "D"},
    **{"BlockPool.leaving()": "DE", "BlockPool.matched()": "D", "BlockPool.touched()": "D"},
    **{"BlockPool.prefix_matched()": "D", "BlockPool.mark_dead()": "D", "take_log()": ""},
    **dict.fromkeys((".is_stock", ".is_watched", ".evicts_dead_thinking"), "D"),
    **dict.fromkeys((".reads_awaited", ".reads_chains", ".reads_victim_blocks"), "D"),
    **dict.fromkeys((".token_budget", ".caps", ".waiting_changed", ".preempted", ".orders", ".follows_thinking"), ""),
}
# Kept by hand, too: the type that each call from `schedule()` to a component belongs to, in the order of the calls.
PATH_BEFORE = (
    *("scheduler", "scheduler", "scheduler", "engine", "Driver", "MeridianScheduler", "slot", "slot"),
    *("slot's state", "guarded policy", "component", "component", "guest"),
)
PATH = (
    *("scheduler", "scheduler", "scheduler", "scheduler", "engine", "Driver", "MeridianScheduler", "slot", "slot"),
    *("slot's state", "guarded policy", "component", "component", "guest"),
)


def path() -> Iterator[Figure]:
    """What lies between Python's `schedule()` and a component: types and calls, native calls of a step, locks."""
    for what, was, now, most in (
        ("types from schedule() to the component", len(set(PATH_BEFORE)), len(set(PATH)), 6),
        ("calls from schedule() to the component", len(PATH_BEFORE), len(PATH), 9),
    ):
        yield Figure(f"{what} before", was, what.split()[0])
        yield Figure(what, now, what.split()[0], f"<= {most}")
    folder, then = model(), before()
    sides = [("", None, LOCKS)] + ([(" before", package_of(then), LOCKS_BEFORE)] if then else [])
    for side, package, locks in sides:
        say(f"  path: counting{side}")
        counts = measured("house_path", package, model=folder)
        for kind, title in (("steady", "a steady step"), ("turnover", "a step in which a request ends or comes")):
            calls = Counter(counts[kind])
            for name, number in sorted(calls.items()):
                say(f"    {title}{side}: {name}: {number:.2f}")
            unknown = sorted(set(calls) - set(locks))
            if unknown:
                sys.exit(f"error: LOCKS{'_BEFORE' if side else ''} of {__file__}: no row for {', '.join(unknown)}")
            reads = sum(number for name, number in calls.items() if name.startswith("."))
            bound = None if side else "<= 3"
            yield Figure(f"native calls of {title}, 64 running{side}", calls.total() - reads, "calls", bound)
            yield Figure(f"native properties read in {title}, 64 running{side}", reads, "reads")
            taken = sum(number * len(locks[name]) for name, number in calls.items())
            yield Figure(f"locks of {title}, 64 running{side}", taken, "locks", None if side else "<= 1")
        decision = locks.get("Engine.begin()") or locks["Engine.plan()"]
        yield Figure(f"locks of planning a step{side}", len(decision), "locks")


def micro(command: Path, components: Path) -> dict[str, float]:
    """What `meridian bench micro` measures of the components of the defaults."""
    candidates = ("--candidates", "64,1024,4096")
    report = json.loads(output(command, "--json", "bench", "micro", "--policies", components, *candidates))
    rows = {f"ratio {row['candidates']}": row["ratio"] for row in report["rows"] if row["slot"] == "dispatch"}
    return {"no-op": report["noop_call_ns"], **rows}


def runtime(examples: Path, what: str) -> dict[str, float]:
    """A part of the example `runtime_figures`."""
    lines = map(json.loads, output(examples / "runtime_figures", what).splitlines())
    return {line["name"]: line["value"] for line in lines}


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


def guest(pairs: int) -> Iterator[Figure]:
    """Calls of components, faults and swaps without vLLM; two builds in turns."""
    build()
    then = before()
    sides = {"": (MERIDIAN, POLICIES, EXAMPLES)}
    if then:
        sides[" before"] = (command_of(then), then / "policies", then / "examples")
    found: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for pair in range(pairs):
        for side, (command, components, examples) in list(sides.items())[:: 1 if pair % 2 else -1]:
            say(f"  guest: pair {pair + 1} of {pairs}{side}")
            values = runtime(examples, "fallback")
            # The components of another contract do not run in this one, and the example reads those of its own tree.
            if components.is_dir():
                values |= micro(command, components) | runtime(examples, "swaps")
            for name, value in values.items():
                found[side].setdefault(name, []).append(value)
    for name, title, unit, bound in GUEST:
        yield over_pairs(title, found[""][name], unit, bound)
        old = found.get(" before", {}).get(name)
        if old:
            yield over_pairs(f"{title}, before", old, unit)
            yield over_pairs(
                f"{title}, over before", [a / b for a, b in zip(found[""][name], old, strict=True)], "ratio"
            )


def wheel() -> Iterator[Figure]:
    """Bytes of the installed package and of the command."""

    def megabytes(path: Path) -> float:
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and p.suffix != ".pyc"]
        return sum(file.stat().st_size for file in files) / 1e6

    import meridian

    yield Figure("the installed package", megabytes(Path(meridian.__file__ or "").parent), "MB", "<= 25")
    yield Figure("the command", megabytes(MERIDIAN), "MB")
    if then := before():
        yield Figure("the installed package before", megabytes(package_of(then) / "meridian"), "MB")
        yield Figure("the command before", megabytes(command_of(then)), "MB")


# Little KV memory, so that the eviction policy decides too.
REPLAY = ("--workload", "reasoning-chat", "--requests", "100", "--rate", "3", "--kv-blocks", "3000")
REPLAY_SEEDS = ",".join(str(seed + 1) for seed in range(20))


def replayed(command: Path, slot: str, policy: str) -> list[dict[str, Any]]:
    """The runs of a replay under a policy: schedules take no time of this machine, so runs of equal ones are equal."""
    chosen = f"{slot}={policy}" if slot == "dispatch" else f"dispatch=balanced,{slot}={policy}"
    text = output(command, "--json", "bench", "replay", *REPLAY, "--seeds", REPLAY_SEEDS, "--policy", chosen)
    return [run for run in json.loads(text)["runs"] if run["policy"] != "fcfs" or policy == "native:fcfs"]


def decisions() -> Iterator[Figure]:
    """Simulated schedules and single decisions of every native policy, 20 seeds, by both builds; and recordings of this
    build's decisions, replayed."""
    then = needed()
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
            measured("house_decide", package, record=record, policies=names)
            for record, package in zip(records, (old_package, None), strict=True)
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


SIMULATED = ("--workload", "reasoning-chat", "--requests", "3000", "--rate", "2", "--policy", "balanced")


def simulator(pairs: int) -> Iterator[Figure]:
    """Steps that the simulator takes in a second of a processor, over the command of before, in turns."""
    sides = {" before": command_of(needed()), "": MERIDIAN}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side, command in list(sides.items())[:: 1 if pair % 2 else -1]:
            say(f"  simulator: pair {pair + 1} of {pairs}{side}")
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            report = json.loads(output(command, "--json", "bench", "replay", *SIMULATED))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found[side].append(sum(run["metrics"]["steps"] for run in report["runs"]) / seconds)
    for side, rates in found.items():
        yield over_pairs(f"simulated steps a second{side}", rates, "steps/s")
    ratios = [new / old for new, old in zip(found[""], found[" before"], strict=True)]
    yield over_pairs("simulated steps a second, over before", ratios, "ratio", ">= 1.5")


def replayed_recording(file: Path) -> dict[str, Any]:
    """The report of `meridian replay`, which fails when a decision differs."""
    done = subprocess.run((MERIDIAN, "--json", "replay", file), stdout=subprocess.PIPE, text=True)
    report = json.loads(done.stdout)
    if "different" not in report:
        sys.exit(f"error: {file.name}: {report}")
    return report


PARTS = {
    "size": lambda _: count(),
    "surface": lambda _: surface(),
    "step": step,
    "processor": processor,
    "path": lambda _: path(),
    "guest": guest,
    "wheel": lambda _: wheel(),
    "decisions": lambda _: decisions(),
    "simulator": simulator,
}
