"""Nothing set, nothing changed; budgets end at their token in every form of serving; and what was repaired stays so."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checks.figures import Figure, Part, Row, over_pairs, table
from checks.run import POLICIES, ROOT, WORK, engine, meridian, output, say, tests

SUITE = ROOT / "python" / "tests" / "vllm" / "outputs"
SERVING = ("python/meridian/vllm", "python/src", "host/core/src", "host/engine/src")
PLANNING = ("python/meridian/vllm", "host/core/src", "policies/shipped/src")
# Of each pair of the random sequences.
SEQUENCES = 20_000
# Engines whose situations come first, and ways in which they run: a minute.
QUICK_ENGINES = ("parser", "in reasoning", "tight")
QUICK_WAYS = ("offline", "offline async")
# The engines that hold one thing each for long: 200,000 sampled tokens, and a thought beyond every limit.
LONGER = ("sampled", "long thought")
# Times the kinds of requests: a thousand on Model Runner V2.
BUDGETS, BUDGETS_OF_RUNNER_V2 = 1000, 36


def suite(script: str, *args: str | Path) -> list[dict[str, Any]]:
    """What a script of the equality suite writes."""
    made = WORK / f"outputs-{script}.json"
    output(sys.executable, SUITE / f"{script}.py", "--out", made, *args)
    return json.loads(made.read_text())


def words(option: str, values: tuple[str, ...]) -> list[str]:
    """An option for the command line, once for each value."""
    return [word for value in values for word in (option, value)]


def equality(rows: list[dict[str, Any]], prefix: str = "") -> Iterator[Figure]:
    """Situations with equal outputs in every way in which they run."""
    differing = [row for row in rows if not row["equal"]]
    for row in differing:
        for way, where in row["differences"].items():
            say(f"  {row['name']}, {way}: {where}")
    count, ways = len(rows), sum(len(row["ways"]) for row in rows)
    yield Figure(f"{prefix}situations with equal outputs", count - len(differing), f"of {count}", f">= {count}")
    wrong = sum(len(row["differences"]) for row in rows)
    yield Figure(f"{prefix}situations times ways that differ", wrong, f"of {ways}", "<= 0")


def equal(_: int) -> Iterator[Figure]:
    """The whole equality suite."""
    rows = suite("run")
    yield Figure("situations", len(rows), "situations", ">= 60")
    yield from equality(rows)
    yield from equality(suite("run", *words("--engine", LONGER)), "long outputs: ")


def equal_quick(_: int) -> Iterator[Figure]:
    """Three of its engines."""
    yield from equality(suite("run", *words("--engine", QUICK_ENGINES), *words("--way", QUICK_WAYS)))


def runner_v2(_: int) -> Iterator[Figure]:
    """Model Runner V2 with its kernels interpreted: outputs with nothing set, and budgets."""
    from checks.engine.cpu import REPLACED

    names = ", ".join(name for _, name in REPLACED)
    yield Figure(f"Model Runner V2: functions that are replaced ({names})", len(REPLACED), "functions", "<= 1")
    yield from equality(suite("run", "--runner", "v2"), "Model Runner V2: ")
    yield from asked("Model Runner V2: requests whose budget is right", BUDGETS_OF_RUNNER_V2, "--runner", "v2")


def asked(name: str, count: int, *args: str) -> Iterator[Figure]:
    """Requests that ask for a budget, or whose operator does, so many of each kind."""
    rows = suite("asked", "--count", str(count), *args)
    for row in rows:
        if row["right"] != row["requests"]:
            say(f"  {row['name']}: {row['wrong']}")
    right, sent = (sum(row[key] for row in rows) for key in ("right", "requests"))
    yield Figure(name, right, f"of {sent}", f">= {sent}")


def parallel(_: int) -> list[dict[str, Any]]:
    """Each form of serving."""
    from checks.engine.parallel import FORMS

    return [engine("parallel", component=POLICIES / "fair-share.wasm", form=form) for form in FORMS]


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


def whole(pairs: int, sequences: int = SEQUENCES) -> Iterator[Figure]:
    """Random sequences: prompts that must stay whole, state blocks, requests that vLLM passes over."""
    found = engine("repaired", sequences=sequences * pairs)
    for wrong in found["wrong"][:20]:
        say(f"  {wrong}")
    count = len(found["wrong"])
    yield Figure(
        "prompts cut or stalled, and other limits broken", count, f"in {found['sequences']:,} sequences", "<= 0"
    )
    for row in found["passed"]:
        bound = f"<= {row['bound_ms'] + 1000:g}"
        yield Figure(f"{row['name']}: until it is over, stock {row['stock_ms']:.0f} ms", row["ms"], "ms", bound)


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
    yield from hybrid_simulated(pairs)


def hybrid_simulated(_: int) -> Iterator[Figure]:
    """The same on simulated engines."""
    for block in (272, 528, 1056):
        for state_blocks, what in ((1, f"state blocks of {block} tokens"), (0, f"blocks of {block} tokens, no state")):
            p50, itl = simulated(block, state_blocks)
            bound = "<= 1.1" if state_blocks else None
            yield Figure(f"TTFO p50 of prompts over stock, simulated 8b-h200, {what}", p50, "x", bound)
            yield Figure(f"gap between tokens p99 over stock, simulated 8b-h200, {what}", itl, "x")


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


PARTS: dict[str, Part] = {
    "equal": Part(equal, SERVING, equal_quick, 90),
    "budgets": Part(lambda _: asked("requests whose budget is right", BUDGETS), SERVING),
    "runner-v2": Part(runner_v2, SERVING),
    "parallel": Part(
        table(
            parallel,
            Row("{form}: requests with a budget that were served", "served", "of {requests}", ">= {requests}"),
            Row("{form}: budgets missed", "missed", "of {requests}", "<= 0"),
            Row("{form}: requests that an order has ended", "ordered", "of {without}", ">= 1"),
            Row("{form}: answers as after the forced token", "same_answers", "of {answers}", ">= {answers}"),
            Row("{form}: swaps by `ctl --all` that every engine did", "swapped", "of {swaps}", ">= {swaps}"),
        ),
        SERVING,
    ),
    "repair-kept": Part(kept, SERVING),
    "repair-whole": Part(whole, PLANNING, lambda pairs: whole(pairs, 250), 60),
    "repair-hybrid": Part(hybrid, (*PLANNING, "bench/src/sim"), hybrid_simulated, 40),
}
