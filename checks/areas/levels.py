"""What policies gain and lose: over engines, traffic and loads, through days with a burst under a service level, with
sessions of agents, and in KV memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from checks.areas import agents, day, grid
from checks.areas.picture import picture
from checks.figures import Figure, Part, over_pairs
from checks.run import POLICIES, compared, metrics_of, say, seeds

# Keeps the engine's order, so that what changes in a chat is what the eviction policy does, and nothing else.
FCFS = POLICIES / "fcfs.wasm"
FALLBACK = 0.01  # share of the steps that the policy may leave undecided
# A chat that opens with a long prompt, as assistants with instructions and documents do: there a prompt takes long
# enough for its prefill to be seen in the TTFT. Stock finds 46 and 42 % of the prompt tokens in the cache at 1,575
# blocks (seeds 1 and 2), and 74 % is all there is to find.
STRIPPED = ("--dtype", "float32", "--context-tokens", "1000", "--kv-blocks", "1575")
# With the thinking preserved stock finds half at 1,500 blocks.
PRESERVED = ("--preserve-thinking", "--kv-blocks", "1500")
# Hit rates depend on lengths alone: the real scheduler and pools give the same without the model. The deadline is no
# subject here, and a busy machine may pause any call for longer than it is.
NO_MODEL = ("--no-model", "--set", "policy.dispatch.deadline_ms=1000")
# The metrics of stock and of Meridian over the same requests.
Pair = tuple[dict[str, Any], dict[str, Any]]


def chats(label: str, pairs: int, *more: str) -> list[Pair]:
    """A pair a seed; ends the part when Meridian's policy did not decide."""
    args = ("--scenario", "multi-turn", "--seeds", seeds(pairs), "--policy", FCFS)
    (comparison,) = compared(label, *args, *more)
    found = list(zip(metrics_of(comparison, "stock"), metrics_of(comparison, "fcfs.wasm"), strict=True))
    for note in comparison.get("notes", ()):
        say(f"  {note}")
    # On a busy machine a step may run into the deadline; a note says how many did.
    if any(ours["decided_by_policy"] < (1 - FALLBACK) * ours["decisions"] for _, ours in found):
        sys.exit("error: the policy did not decide this run")
    return found


def hits(name: str, pairs: list[Pair], bound: str) -> Iterator[Figure]:
    """Prefix hit rate above stock's, within a pair, and of both."""
    points = [100 * (ours["hit_rate"] - stock["hit_rate"]) for stock, ours in pairs]
    yield over_pairs(f"{name}: hit rate above stock", points, "points", bound)
    for who, side in (("stock", 0), ("Meridian", 1)):
        yield over_pairs(f"{name}: hit rate, {who}", [100 * pair[side]["hit_rate"] for pair in pairs], "%")


def multi_turn(pairs: int) -> Iterator[Figure]:
    """Chats whose template strips the thinking, in float32, so that outputs can be compared."""
    runs = chats("multi-turn", pairs, *STRIPPED)
    yield from hits("multi-turn", runs, ">= 15")
    for title, key, bound in (
        ("TTFT p50", "ttft_p50_ms", "< 1"),
        ("TTFT p99", "ttft_p99_ms", None),
        ("TTFO p50", "ttfo_p50_ms", None),
        ("p99 output ITL", "itl_output_p99_ms", None),
        ("throughput", "throughput_tok_s", None),
    ):
        ratios = [ours[key] / stock[key] for stock, ours in runs]
        yield over_pairs(f"multi-turn: {title}, Meridian over stock", ratios, "ratio", bound)
    differing = sum(ours["outputs_differ"] for _, ours in runs)
    of = sum(stock["requests"] for stock, _ in runs)
    yield Figure("multi-turn: requests whose outputs differ", differing, f"of {of} requests", "<= 0")


def preserve(pairs: int) -> Iterator[Figure]:
    """Chats whose template keeps the thinking: what is not dead must not be evicted first."""
    return hits("thinking preserved", chats("preserve", pairs, *PRESERVED, *NO_MODEL), ">= 0")


def multi_turn_quick(pairs: int) -> Iterator[Figure]:
    """The hit rates of the first."""
    return hits("multi-turn", chats("multi-turn-quick", pairs, *STRIPPED, *NO_MODEL), ">= 15")


ENGINE = ("host/core/src", "python/meridian/vllm", "policies/shipped/src")
KV = ("host/core/src", "python/meridian/vllm/kv*", "policies/shipped/src/tiered_lru*", "python/meridian/vllm/bench")
SESSIONS = ("bench/src/sim", "bench/src/replay.rs", "host/core/src", "policies/shipped/src/balanced*")

PARTS: dict[str, Part] = {
    "policies": Part(grid.policies, grid.SUBJECT, grid.policies_quick, 75),
    "days": Part(grid.days, grid.SUBJECT, grid.days_quick, 75),
    "refuse": Part(grid.refuse, grid.SUBJECT),
    "day-engine": Part(day.engine, ENGINE),
    "picture": Part(picture, grid.SUBJECT),
    "agents-grid": Part(agents.grid, SESSIONS, agents.grid_quick, 70),
    "agents-levels": Part(grid.agents, grid.SUBJECT),
    "agents-engine": Part(agents.closed_loop, ENGINE),
    "agents-offload": Part(agents.offloaded, ENGINE),
    "kv-multi-turn": Part(multi_turn, KV, multi_turn_quick, 70),
    "kv-preserve": Part(preserve, KV, preserve, 70),
}
