"""Nothing set, nothing changed: outputs of vLLM with both classes of Meridian and no configuration, against its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checks.figures import Figure, Part, Row, over_pairs, table
from checks.run import RESULTS, ROOT, WORK, engine, meridian, output, say, tests

SUITE = ROOT / "python" / "tests" / "vllm" / "outputs"
COST_PAIRS = 5
# Of each pair.
SEQUENCES = 20_000


def suite(script: str, *args: str | Path) -> list[dict[str, Any]]:
    """What a script of the equality suite writes."""
    made = WORK / f"outputs-{script}.json"
    output(sys.executable, SUITE / f"{script}.py", "--out", made, *args)
    return json.loads(made.read_text())


def equal(_: int) -> Iterator[Figure]:
    """The equality suite: situations whose outputs are equal in every way in which they run."""
    rows = suite("run")
    kept = [{key: row[key] for key in ("name", "group", "ways", "equal")} for row in rows]
    (RESULTS / "outputs-equal.json").write_text(json.dumps(kept, indent=1) + "\n")
    differing = [row for row in rows if not row["equal"]]
    for row in differing:
        for way, where in row["differences"].items():
            say(f"  {row['name']}, {way}: {where}")
    count, ways = len(rows), sum(len(row["ways"]) for row in rows)
    yield Figure("situations", count, "situations", ">= 60")
    yield Figure("situations with equal outputs", count - len(differing), f"of {count}", f">= {count}")
    bad_ways = sum(len(row["differences"]) for row in rows)
    yield Figure("situations times ways that differ", bad_ways, f"of {ways}", "<= 0")
    for row in differing:
        yield Figure(f"differs: {row['name']}", len(row["differences"]), f"of {len(row['ways'])} ways", "<= 0")


def by_token(what: str) -> list[dict[str, Any]]:
    """Requests of one engine that is too long for the suite, token by token."""
    kept = WORK / f"outputs-{what.replace(' ', '-')}"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    suite("run", "--keep", kept, "--engine", what)
    sides: list[list[list[int]]] = []
    for side in ("a", "b"):
        path = kept / "00" / side / "answers.json"
        answers = next(iter(json.loads(path.read_text()).values()), []) if path.exists() else []
        if not answers:
            sys.exit(f"error: {path}: no answers, see log.txt beside it")
        sides.append([answer["outputs"][0]["ids"] for answer in answers])
    pairs = list(zip(*sides, strict=True))
    missing = sum(abs(len(one) - len(other)) for one, other in pairs)
    return [
        {
            "tokens": sum(len(one) for one, _ in pairs),
            "differing": missing + sum(a != b for pair in pairs for a, b in zip(*pair, strict=False)),
            "requests_differing": sum(one != other for one, other in pairs),
            "requests": len(pairs),
        }
    ]


def rows_by_token(what: str, least: int) -> tuple[Row, ...]:
    """The figures of such requests."""
    return (
        Row(f"{what}: tokens", "tokens", "tokens", f">= {least}"),
        Row(f"{what}: tokens that differ", "differing", "of {tokens:,}", "<= 0"),
        Row(f"{what}: requests that differ", "requests_differing", "of {requests}", "<= 0"),
    )


def cost(_: int) -> Iterator[Figure]:
    """Time a token over the commit before, whose package is in the folder `MERIDIAN_BEFORE`."""
    before = os.environ.get("MERIDIAN_BEFORE")
    if not before:
        sys.exit("error: MERIDIAN_BEFORE: not set, expected a folder with the package of the commit before")
    for what, budgets, bound in (("nothing set", False, "<= 1"), ("budgets", True, "<= 1.03")):
        ratios: dict[str, list[float]] = {"scheduler": [], "processor": []}
        for number in range(COST_PAIRS):
            say(f"  cost, {what}: pair {number + 1} of {COST_PAIRS}")
            # The order alternates.
            paths = ("", before) if number % 2 else (before, "")
            us = {path: engine("token_cost", budgets=budgets, package=path) for path in paths}
            for name, values in ratios.items():
                values.append(us[""][name] / us[before][name])
        for name, values in ratios.items():
            yield over_pairs(f"{what}: time of the {name} a token, over the commit before", values, "x", bound)


def kept(_: int) -> Iterator[Figure]:
    """Clocks of front ends, wrappers of other plug-ins, and budgets beside masks."""
    for what, file in (
        ("clocks from -3,600 to 3,600 s off: refusals, arrivals and histograms as without", "test_clocks.py"),
        ("wrappers of other plug-ins, over 1,000 steps, swaps, attach and detach", "test_wrappers.py"),
        ("limits beside masks, beams and tools: hold, or HTTP 400", "test_budget_limits.py"),
    ):
        passed, ran = tests(f"repair-{file}", SUITE.parent / file)
        yield Figure(f"{what}: tests passed", passed, f"of {ran}", f">= {ran}")
    rows = suite("run", "--engine", "parser", "--engine", "in reasoning", "--way", "offline")
    differing = sum(not row["equal"] for row in rows)
    yield Figure("nothing set, budgets and masks: situations that differ", differing, f"of {len(rows)}", "<= 0")


def whole(pairs: int) -> Iterator[Figure]:
    """Random sequences: prompts that must stay whole, state blocks, requests that vLLM passes over."""
    found = engine("repaired", sequences=SEQUENCES * pairs)
    for wrong in found["wrong"][:20]:
        say(f"  {wrong}")
    wrong = len(found["wrong"])
    yield Figure(
        "prompts cut or stalled, and other limits broken", wrong, f"in {found['sequences']:,} sequences", "<= 0"
    )
    for row in found["passed"]:
        bound = f"<= {row['bound_ms'] + 1000:g}"
        yield Figure(f"{row['name']}: until it is over, stock {row['stock_ms']:.0f} ms", row["ms"], "ms", bound)


def simulated(block: int, state_blocks: int) -> tuple[float, float]:
    """Of `balanced` over stock: the time to the answer of prompts of three blocks beside 300 answers, and gaps p99."""
    rows = [(0.0, "answers", 20, 1900)] * 300 + [(10 + 0.3 * i, "prompts", 3 * block + 16, 4) for i in range(40)]
    trace = WORK / f"hybrid-{block}.csv"
    lines = [f"{arrival},{tenant},{prompt},0,{answer}" for arrival, tenant, prompt, answer in rows]
    trace.write_text("\n".join(["arrival_s,tenant,prompt_tokens,think_tokens,output_tokens", *lines, ""]))
    engine = ("--engine", "8b-h200", "--block-tokens", str(block), "--state-blocks", str(state_blocks))
    runs = meridian("bench", "replay", "--trace", trace, *engine, "--policy", "balanced")["runs"]
    found = {}
    for run in runs:
        (prompts,) = (tenant for tenant in run["tenants"] if tenant["name"] == "prompts")
        found[run["policy"]] = (prompts["ttfo_p50_ms"], run["metrics"]["itl_output_p99_ms"])
    (p50, itl), (own_p50, own_itl) = found["balanced"], found["fcfs"]
    return p50 / own_p50, itl / own_itl


def hybrid(pairs: int) -> Iterator[Figure]:
    """TTFT of a hybrid model's prompts beside 300 answers, over stock: the real engine, and simulated ones."""
    for block in (32, 64, 256):
        ratios = []
        for number in range(pairs):
            # The order alternates.
            order = ("stock", "native:balanced")[:: 1 if number % 2 else -1]
            found = {scheduler: engine("hybrid", scheduler=scheduler, block=block) for scheduler in order}
            ratios.append(found["native:balanced"]["ttft_p50_ms"] / found["stock"]["ttft_p50_ms"])
        yield over_pairs(f"TTFT p50 over stock, real engine, blocks of at least {block} tokens", ratios, "x", "<= 1.1")
    for block in (272, 528, 1056):
        for state_blocks, what in ((1, f"state blocks of {block} tokens"), (0, f"blocks of {block} tokens, no state")):
            p50, itl = simulated(block, state_blocks)
            bound = "<= 1.1" if state_blocks else None
            yield Figure(f"TTFO p50 of prompts over stock, simulated 8b-h200, {what}", p50, "x", bound)
            yield Figure(f"gap between tokens p99 over stock, simulated 8b-h200, {what}", itl, "x")


PARTS: dict[str, Part] = {
    "equal": equal,
    # 100 requests of 2,000 sampled tokens, a seed each, in float32.
    "sampled": table(lambda _: by_token("sampled"), *rows_by_token("sampled", 200_000)),
    # One thought that is longer than any limit that Meridian has ever set by itself.
    "thought": table(lambda _: by_token("long thought"), *rows_by_token("a long thought", 33_000)),
    # Requests that ask for a budget, or whose operator does: each row of `asked.py`.
    "budgets": table(
        lambda _: suite("asked", "--count", "1000"), Row("right: {name}", "right", "of {requests}", ">= {requests}")
    ),
    "parsers": table(
        lambda _: [json.loads(output(sys.executable, "-m", "meridian.vllm.bench.parsers"))],
        Row("parsers of vLLM {vllm} that are followed or refused in a line", "right", "of {parsers}", ">= {parsers}"),
    ),
    "cost": cost,
    "repair-kept": kept,
    "repair-whole": whole,
    "repair-hybrid": hybrid,
}
