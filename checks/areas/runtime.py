"""The policy runtime: what a swap, a fault and a long life of a policy cost."""

from __future__ import annotations

from typing import Any

from checks.figures import Part, Row, table
from checks.run import POLICIES, engine, example

TRAP, LOOP = "planning a step in which the policy traps", "planning a step in which the policy loops"
FAULTS = ("trap", "deadline", "memory", "bad-answer", "init", "load")


def values(what: str) -> list[dict[str, Any]]:
    """A part of the example `runtime_figures`: its values by name."""
    return [{line["name"]: line["value"] for line in example("runtime_figures", what)}]


def over(one: str, other: str) -> Any:
    """A value over another."""
    return lambda m: m[one] / m[other]


swaps = table(
    # 10,000 swaps between equal policies under load, without vLLM, by the whole path of an upload.
    lambda _: values("swaps"),
    Row("swaps without vLLM", "swaps", "swaps", ">= 10000"),
    Row("swaps without vLLM: steps served meanwhile", "steps served meanwhile", "steps"),
    Row("swaps without vLLM: requests lost", "requests lost", "requests", "<= 0"),
    *(
        Row(f"swaps without vLLM: {name}", name, name.split()[0], "<= 0")
        for name in (
            "steps whose plan differs from that of an engine left alone",
            "decisions not made by the policy",
        )
    ),
    Row("swaps without vLLM: delay of a step by a swap, p99", "time a swap held the slot, p99", "us", "<= 100"),
    Row("swaps without vLLM: the longest", "time a swap held the slot, longest", "us"),
    Row(
        "swaps without vLLM: p99 of planning a step, while swapping over without",
        over("planning a step while swapping, p99", "planning a step while nothing swaps, p99"),
        "ratio",
    ),
)

live_swaps = table(
    # 200 swaps between equal policies during a run of the real engine.
    lambda _: [engine("live_swaps", component=POLICIES / "output-first.wasm", swaps=200)],
    Row("swaps in vLLM", "swaps", "swaps", ">= 200"),
    Row("swaps in vLLM: requests served meanwhile", "requests", "requests"),
    Row("swaps in vLLM: outputs that differ from stock", "differing", "requests", "<= 0"),
    Row("swaps in vLLM: requests left behind", lambda m: sum(m["left"]), "requests", "<= 0"),
    Row("swaps in vLLM: faults", "faults", "faults", "<= 0"),
    Row("swaps in vLLM: delay of a step by a swap, p99", "held_us.p99", "us", "<= 100"),
    Row("swaps in vLLM: the longest", "held_us.longest", "us"),
)

fallback = table(
    # How long planning takes in a step in which the policy faults: the default decides it, a new instance is made.
    lambda _: values("fallback"),
    Row(f"fallback: {TRAP}, p99", f"{TRAP}, p99", "us", "<= 100"),
    Row(f"fallback: {TRAP}, median", f"{TRAP}, median", "us"),
    Row(f"fallback: {LOOP} for ever, p99", f"{LOOP}, p99", "us", "<= {deadline and two ticks}"),
    Row(f"fallback: {LOOP} for ever, median", f"{LOOP}, median", "us"),
)

endurance = table(
    # A million steps, one in a hundred with a fault, every kind in turn.
    lambda _: values("endurance"),
    Row("endurance: steps", "steps", "steps", ">= 1e6"),
    Row("endurance: faults injected", "faults injected", "faults"),
    *(Row(f"endurance: {name}", name, "faults", ">= 1") for name in (f"faults counted: {kind}" for kind in FAULTS)),
    Row("endurance: steps not decided", lambda m: m["steps"] - m["steps decided by whomever"], "steps", "<= 0"),
    Row("endurance: requests lost", "requests lost", "requests", "<= 0"),
    Row(
        "endurance: resident memory at the end over that after a tenth",
        over("resident memory at the end", "resident memory after a tenth of the steps"),
        "ratio",
        "<= 1.05",
    ),
)

PARTS: dict[str, Part] = {"swaps": swaps, "live-swaps": live_swaps, "fallback": fallback, "endurance": endurance}
