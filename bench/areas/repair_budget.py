"""Budgets and the samplers' channel: questions at boundaries, what they cost, swaps, and the longest drain."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from areas.common import ROOT, Bound, Figure, say

POLICIES = ROOT / "target" / "policies"
NATIVE_DEFAULT = "eat-rpdi"


def slot() -> Iterator[Figure]:
    """Components in the budget slot of the real engine, every signal off: where thinking ends, and the questions."""
    say("  budget_slot.py")
    script = ROOT / "bench" / "vllm" / "budget_slot.py"
    done = subprocess.run(
        [sys.executable, str(script), "--policies", str(POLICIES)], capture_output=True, text=True, timeout=600
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"error: bench/vllm/budget_slot.py failed with exit code {done.returncode}: {done.stderr[-400:]}")
    found = json.loads(lines[-1])
    names = {
        "fixed": "a component's limit",
        "equal": "another instance of the policy at each step",
        "lowered": "a policy with a lower limit swapped in while they think",
        "rolled_back": "a policy rolled back while they think",
        "loaded": "a load that grows while they think, signals off",
        "clients": "limits of clients under swaps",
    }
    for case, what in names.items():
        ends, expected = found[case]["found"], found[case]["expected"]
        exact = sum(one == other for one, other in zip(ends, expected, strict=True))
        yield Figure(f"{what}: thoughts that end at the token", exact, "requests", Bound(len(expected), False))
    asked, expected = found["questions"]["found"][0], found["questions"]["expected"][0]
    yield Figure("questions at boundaries with signals off, over those expected", asked / expected, "ratio", Bound(1.0))
    yield Figure("questions at boundaries with signals off: calls", asked, "calls", Bound(expected, False))
    yield Figure("swaps of the budget slot while requests think", found["swaps"], "swaps")
    yield Figure("faults of components in the budget slot", found["faults"], "faults", Bound(0))


def cost() -> Iterator[Figure]:
    """What following 256 thoughts costs a step, with and without ends of lines, every signal off."""
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    say("  budget_figures")
    example = ROOT / "target" / "release" / "examples" / "budget_figures"
    done = subprocess.run([example], stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    for name, line in found.items():
        policy = name.partition(":")[0]
        bound = None
        if name.endswith("over one without") and policy == NATIVE_DEFAULT:
            bound = Bound(1.1)
        if name.endswith("calls at boundaries"):
            bound = Bound(found[f"{policy}: calls expected"]["value"])
        if name.endswith("ends ordered"):
            bound = Bound(0)
        yield Figure(f"256 thoughts, {name}", line["value"], line["unit"], bound)


class _Flood:
    """A socket that is filled faster than it is emptied."""

    def __init__(self, size: int) -> None:
        self.size, self.taken = size, 0

    def recv(self, most: int) -> bytes:
        self.taken += 1
        if self.taken > 100_000:
            # What is not bounded ends here.
            raise BlockingIOError
        return bytes(min(self.size, most))


def drain() -> Iterator[Figure]:
    """The most that a step takes in of a socket that never runs dry: datagrams and bytes, no clock."""
    from meridian.vllm import channel

    most_datagrams = most_bytes = 0
    for size in (17, 34816, 65536):
        taken = channel._drain(_Flood(size))  # type: ignore[arg-type]
        most_datagrams = max(most_datagrams, len(taken))
        most_bytes = max(most_bytes, sum(map(len, taken)))
    yield Figure("datagrams that a step takes in of an endless flood", most_datagrams, "datagrams", Bound(256))
    # The last one may begin just below the bound.
    yield Figure("bytes that a step takes in of an endless flood", most_bytes, "bytes", Bound((1 << 18) + (1 << 16)))
