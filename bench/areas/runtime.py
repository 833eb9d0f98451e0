"""The policy runtime: what a swap, a fault and a long life of a policy cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

from areas.common import ROOT, Bound, Figure, say

OUTPUT_FIRST = ROOT / "target" / "policies" / "output-first.wasm"
Reader = Callable[[str], float]


def measured(what: str) -> tuple[Reader, dict[str, str]]:
    """Run a part of the example `runtime_figures`; returns a reader of its values, and their units."""
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    say(f"  runtime_figures {what}")
    example = ROOT / "target" / "release" / "examples" / "runtime_figures"
    done = subprocess.run([example, what], stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    values = {line["name"]: line["value"] for line in lines}
    return values.__getitem__, {line["name"]: line["unit"] for line in lines}


def swaps() -> Iterator[Figure]:
    """10,000 swaps between equal policies under load, without vLLM, by the whole path of an upload."""
    read, _ = measured("swaps")
    yield Figure("swaps without vLLM", read("swaps"), "swaps", Bound(10_000, at_most=False))
    for name, bound in (
        ("steps served meanwhile", None),
        ("requests lost", Bound(0)),
        ("steps whose plan differs from that of an engine left alone", Bound(0)),
        ("decisions not made by the policy", Bound(0)),
    ):
        yield Figure(f"swaps without vLLM: {name}", read(name), name.split()[0], bound)
    yield Figure(
        "swaps without vLLM: delay of a step by a swap, p99", read("time a swap held the slot, p99"), "us", Bound(100)
    )
    yield Figure("swaps without vLLM: the longest", read("time a swap held the slot, longest"), "us")
    quiet, during = (read(f"planning a step while {when}, p99") for when in ("nothing swaps", "swapping"))
    yield Figure("swaps without vLLM: p99 of planning a step, while swapping over without", during / quiet, "ratio")


def live_swaps() -> Iterator[Figure]:
    """200 swaps between equal policies during a run of the real engine."""
    say("  live_swaps.py")
    command = [sys.executable, str(ROOT / "bench" / "vllm" / "live_swaps.py"), "--component", str(OUTPUT_FIRST)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"error: live_swaps.py failed:\n{done.stderr[-4000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    held = found["held_us"]
    yield Figure("swaps in vLLM", found["swaps"], "swaps", Bound(200, at_most=False))
    yield Figure("swaps in vLLM: requests served meanwhile", found["requests"], "requests")
    yield Figure("swaps in vLLM: outputs that differ from stock", found["differing"], "requests", Bound(0))
    yield Figure("swaps in vLLM: requests left behind", sum(found["left"]), "requests", Bound(0))
    yield Figure("swaps in vLLM: faults", found["faults"], "faults", Bound(0))
    p99 = held[max(0, -(-len(held) * 99 // 100) - 1)]
    yield Figure("swaps in vLLM: delay of a step by a swap, p99", p99, "us", Bound(100))
    yield Figure("swaps in vLLM: the longest", held[-1], "us")


def fallback() -> Iterator[Figure]:
    """How long planning takes in a step in which the policy faults: the default decides it, a new instance is made."""
    read, _ = measured("fallback")
    trap, loop = ("planning a step in which the policy traps", "planning a step in which the policy loops")
    yield Figure(f"fallback: {trap}, p99", read(f"{trap}, p99"), "us", Bound(100))
    yield Figure(f"fallback: {trap}, median", read(f"{trap}, median"), "us")
    bound = Bound(read("deadline and two ticks"))
    yield Figure(f"fallback: {loop} for ever, p99", read(f"{loop}, p99"), "us", bound)
    yield Figure(f"fallback: {loop} for ever, median", read(f"{loop}, median"), "us")


def endurance() -> Iterator[Figure]:
    """A million steps, one in a hundred with a fault, every kind in turn."""
    read, units = measured("endurance")
    yield Figure("endurance: steps", read("steps"), "steps", Bound(1e6, at_most=False))
    for name in (name for name in units if name.startswith("faults")):
        least = Bound(1, at_most=False) if name.startswith("faults counted") else None
        yield Figure(f"endurance: {name}", read(name), "faults", least)
    undecided = read("steps") - read("steps decided by whomever")
    yield Figure("endurance: steps not decided", undecided, "steps", Bound(0))
    yield Figure("endurance: requests lost", read("requests lost"), "requests", Bound(0))
    early, late = read("resident memory after a tenth of the steps"), read("resident memory at the end")
    yield Figure("endurance: resident memory at the end over that after a tenth", late / early, "ratio", Bound(1.05))


def parts(_pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {"swaps": swaps, "live-swaps": live_swaps, "fallback": fallback, "endurance": endurance}
