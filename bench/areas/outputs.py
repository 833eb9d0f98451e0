"""Nothing set, nothing changed: outputs of vLLM with both classes of Meridian and no configuration, against its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from areas.common import RESULTS, ROOT, WORK, Bound, Figure, over_pairs, say

RUN = ROOT / "python" / "tests" / "vllm" / "outputs" / "run.py"
ASKED = RUN.with_name("asked.py")
COST = ROOT / "bench" / "vllm" / "outputs_cost.py"
ASKED_REQUESTS, COST_PAIRS = 1000, 5
LEAST_SITUATIONS, TOKENS, THOUGHT_TOKENS = 60, 200_000, 33_000


def equal() -> Iterator[Figure]:
    """The equality suite: situations whose outputs are equal in every way in which they run."""
    WORK.mkdir(parents=True, exist_ok=True)
    made = WORK / "outputs-equal.json"
    subprocess.run((sys.executable, str(RUN), "--out", str(made)), stdout=sys.stderr, check=True)
    rows: list[dict[str, Any]] = json.loads(made.read_text())
    table = [{key: row[key] for key in ("name", "group", "ways", "equal")} for row in rows]
    (RESULTS / "outputs-equal.json").write_text(json.dumps(table, indent=1) + "\n")
    differing = [row for row in rows if not row["equal"]]
    for row in differing:
        for way, where in row["differences"].items():
            say(f"  {row['name']}, {way}: {where}")
    yield Figure("situations", len(rows), "situations", Bound(LEAST_SITUATIONS, at_most=False))
    yield Figure(
        "situations with equal outputs", len(rows) - len(differing), f"of {len(rows)}", Bound(len(rows), False)
    )
    ways = [way for row in rows for way in row["ways"]]
    bad_ways = sum(len(row["differences"]) for row in rows)
    yield Figure("situations times ways that differ", bad_ways, f"of {len(ways)}", Bound(0))
    for row in differing:
        yield Figure(f"differs: {row['name']}", len(row["differences"]), f"of {len(row['ways'])} ways", Bound(0))


def _differing(engine: str, what: str, least: int) -> Iterator[Figure]:
    """Requests of one engine that is too long for the suite, token by token."""
    kept = WORK / f"outputs-{engine.replace(' ', '-')}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    command = (sys.executable, str(RUN), "--out", str(kept / "rows.json"), "--keep", str(kept), "--engine", engine)
    subprocess.run(command, stdout=sys.stderr, check=True)
    sides: list[list[list[int]]] = []
    for side in ("a", "b"):
        path = kept / "00" / side / "answers.json"
        answers = next(iter(json.loads(path.read_text()).values()), []) if path.exists() else []
        if not answers:
            sys.exit(f"error: {path}: no answers, see log.txt beside it")
        sides.append([answer["outputs"][0]["ids"] for answer in answers])
    pairs = list(zip(*sides, strict=True))
    tokens = sum(len(one) for one, _ in pairs)
    missing = sum(abs(len(one) - len(other)) for one, other in pairs)
    differing = missing + sum(a != b for one, other in pairs for a, b in zip(one, other, strict=False))
    yield Figure(f"{what}: tokens", tokens, "tokens", Bound(least, at_most=False))
    yield Figure(f"{what}: tokens that differ", differing, f"of {tokens:,}", Bound(0))
    requests = sum(one != other for one, other in pairs)
    yield Figure(f"{what}: requests that differ", requests, f"of {len(pairs)}", Bound(0))


def sampled() -> Iterator[Figure]:
    """100 requests of 2,000 sampled tokens, a seed each, in float32: stock against Meridian with nothing set."""
    yield from _differing("sampled", "sampled", TOKENS)


def thought() -> Iterator[Figure]:
    """One thought that is longer than any limit that Meridian has ever set by itself."""
    yield from _differing("long thought", "a long thought", THOUGHT_TOKENS)


def budgets() -> Iterator[Figure]:
    """Requests that ask for a budget, or whose operator does: each row of `asked.py`, 1,000 requests."""
    WORK.mkdir(parents=True, exist_ok=True)
    made = WORK / "outputs-asked.json"
    command = (sys.executable, str(ASKED), "--out", str(made), "--count", str(ASKED_REQUESTS))
    subprocess.run(command, stdout=sys.stderr, check=True)
    for row in json.loads(made.read_text()):
        yield Figure(f"right: {row['name']}", row["right"], f"of {row['requests']}", Bound(row["requests"], False))


def parsers() -> Iterator[Figure]:
    """Reasoning parsers of this vLLM that are followed, or refused with one line."""
    command = (sys.executable, "-m", "meridian.vllm.bench.parsers")
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    yield Figure(
        f"parsers of vLLM {found['vllm']} that are followed or refused in a line",
        found["right"],
        f"of {found['parsers']}",
        Bound(found["parsers"], at_most=False),
    )


def cost() -> Iterator[Figure]:
    """Time a token over the commit before, whose package is in the folder `MERIDIAN_BEFORE`."""
    before = os.environ.get("MERIDIAN_BEFORE")
    if not before:
        sys.exit("error: MERIDIAN_BEFORE: not set, expected a folder with the package of the commit before")
    for what, options, bound in (("nothing set", (), 1.0), ("budgets", ("--budgets",), 1.03)):
        ratios: dict[str, list[float]] = {"scheduler_us": [], "processor_us": []}
        for number in range(COST_PAIRS):
            say(f"  cost, {what}: pair {number + 1} of {COST_PAIRS}")
            sides: list[dict[str, float]] = []
            # The order alternates.
            for path in (None, before)[:: 1 if number % 2 else -1]:
                environment = {**os.environ, **({"PYTHONPATH": path} if path else {})}
                made = WORK / "outputs-cost.json"
                WORK.mkdir(parents=True, exist_ok=True)
                command = (sys.executable, str(COST), "--out", str(made), *options)
                subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
                sides.append(json.loads(made.read_text()))
            now, then = sides if number % 2 else sides[::-1]
            for name, values in ratios.items():
                values.append(now[name] / then[name])
        for name, shown in (("scheduler_us", "scheduler"), ("processor_us", "processor")):
            yield over_pairs(
                f"{what}: time of the {shown} a token, over the commit before", ratios[name], "x", Bound(bound)
            )


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """The parts of the area."""
    del pairs
    return {
        "equal": equal,
        "sampled": sampled,
        "thought": thought,
        "budgets": budgets,
        "parsers": parsers,
        "cost": cost,
    }
