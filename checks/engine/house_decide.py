"""What each native policy decides for made-up requests, without vLLM.

For each policy, a digest of the decisions of each seed, and how many there were. The package `meridian` is the one that
Python finds, so `PYTHONPATH` chooses between two versions; those that decide alike give equal digests.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import meridian

SEEDS, STEPS = 20, 60
SEATS, TOKEN_BUDGET, BLOCKS = 12, 256, 400
START, END, FILLER = 7, 8, 40


def engine_of(slot: str, source: str, record: Path | None) -> meridian.PolicyEngine:
    """An engine whose slot has this policy."""
    chosen: Any = {slot: meridian.SlotConfig(source)}
    policy = meridian.PolicyConfig(watch=False, record_dir="" if record is None else str(record), **chosen)
    config = meridian.MeridianConfig(policy=policy)
    return meridian.PolicyEngine(config, think_start=[START], think_end=[END])


def steps(engine: meridian.PolicyEngine, rng: random.Random) -> Iterator[Any]:
    """Plans of an engine with queues of its own."""
    running: list[str] = []
    waiting: list[str] = []
    left: dict[str, list[int]] = {}
    prompts: dict[str, int] = {}
    now_ms = 0.0
    for step in range(STEPS):
        now_ms += rng.uniform(4.0, 30.0)
        for _ in range(rng.choice((0, 0, 1, 1, 2))):
            name = str(len(prompts))
            prompt = [FILLER] * rng.randint(4, 120) + [START] * rng.choice((0, 1))
            deadline_ms = rng.choice((math.inf, now_ms + rng.uniform(100, 3000)))
            tenant, session = (rng.choice(("", "a", "b")) for _ in range(2))
            engine.add(
                name,
                prompt=prompt,
                max_tokens=rng.choice((40, 400, 4000)),
                now_ms=now_ms,
                deadline_ms=deadline_ms,
                priority=rng.choice((0, 0, 1, -3)),
                tenant=tenant,
                session=session,
            )
            prompts[name] = len(prompt)
            left[name] = [FILLER] * rng.randint(1, 15) + [END] + [FILLER] * rng.randint(1, 15)
            waiting.append(name)
        plan = engine.plan(
            running,
            waiting,
            token_budget=TOKEN_BUDGET,
            free_seats=SEATS - len(running),
            now_ms=now_ms,
            free_blocks=rng.randint(0, BLOCKS),
            total_blocks=BLOCKS,
        )
        yield asdict(plan)
        running, waiting = list(plan.running), list(plan.waiting)
        budget = plan.token_budget
        given: dict[str, int] = {}
        for name in (*running, *waiting):
            needed = prompts[name] or 1
            tokens = min(needed, plan.token_caps.get(name, needed), budget)
            if name in waiting and (tokens == 0 or len(running) == SEATS):
                continue
            if name in waiting:
                waiting.remove(name)
                running.append(name)
            if tokens:
                given[name] = tokens
                budget -= tokens
                prompts[name] = max(prompts[name] - tokens, 0)
        engine.scheduled(given)
        generated = {name: [left[name].pop(0)] for name in given if prompts[name] == 0}
        engine.generated(generated)
        for name in generated:
            if not left[name]:
                engine.remove(name)
                running.remove(name)
        if step % 20 == 19 and running:
            name = running.pop()
            engine.preempted(name)
            waiting.insert(0, name)


def rankings(engine: meridian.PolicyEngine, rng: random.Random) -> Iterator[Any]:
    """Rankings of blocks and requests."""
    for step in range(STEPS):
        subject: Any = rng.choice(("blocks", "requests"))
        candidates = [
            meridian.EvictionCandidate(
                tier=rng.randint(0, 2),
                blocks=rng.randint(1, 40),
                position=rng.randint(0, 60),
                hits=rng.randint(0, 9),
                age_ms=rng.uniform(0, 1e5),
                computed_tokens=rng.randint(0, 4000),
                chain_tokens=rng.randint(1, 8000),
                chain_blocks=rng.randint(1, 500),
                chain_hits=rng.randint(0, 30),
                is_generated=rng.random() < 0.5,
                session=rng.randint(0, 5),
                turn=rng.randint(0, 6),
                idle_ms=rng.uniform(0, 1e5),
                last_gap_ms=rng.choice((math.nan, rng.uniform(0, 1e5))),
                gap_ms=rng.choice((math.nan, rng.uniform(0, 1e5))),
                gap_spread_ms=rng.choice((math.nan, rng.uniform(0, 1e4))),
                gaps=rng.randint(0, 5),
                stopped_for_tool=rng.random() < 0.3,
                priority=rng.randint(-2, 2),
                recompute_ms=rng.uniform(0, 400),
                phase=0 if subject == "blocks" else rng.randint(0, 2),
                preemptions=rng.randint(0, 3),
                served_tokens=rng.randint(0, 64),
                awaited=rng.random() < 0.1,
            )
            for _ in range(rng.randint(0, 40))
        ]
        memory = {"free_blocks": rng.randint(0, 50), "cached_blocks": rng.randint(0, BLOCKS), "total_blocks": BLOCKS}
        yield asdict(engine.rank_evictions(candidates, subject=subject, now_ms=100.0 * step, **memory))


def budgets(engine: meridian.PolicyEngine, rng: random.Random) -> Iterator[Any]:
    """Thresholds and verdicts."""
    for step in range(STEPS):
        candidates = [
            meridian.ThinkingRequest(
                prompt_tokens=rng.randint(1, 4000),
                remaining_tokens=rng.randint(0, 9000),
                think_tokens=rng.randint(0, 9000),
                think_ms=rng.uniform(0, 1e5),
                slack_ms=rng.choice((math.inf, rng.uniform(-1e3, 1e5))),
                priority=rng.randint(-2, 2),
                tenant=rng.randint(0, 3),
                is_probed=rng.random() < 0.6,
                is_at_boundary=rng.random() < 0.5,
                probes=rng.randint(0, 30),
                eat=rng.choice((None, rng.uniform(0, 5))),
                eat_variance=rng.choice((None, rng.uniform(0, 0.4))),
                rpdi=rng.choice((None, rng.uniform(0, 9))),
                same_answers=rng.randint(0, 12),
                confidence=rng.choice((None, rng.random())),
                repetition=rng.choice((0, rng.randint(0, 400))),
                repetition_period=rng.randint(0, 50),
                request=rng.randint(0, 99),
                session=rng.randint(0, 5),
                turn=rng.randint(0, 6),
            )
            for _ in range(rng.randint(0, 12))
        ]
        load = meridian.EngineLoad(
            now_ms=100.0 * step,
            thinking=rng.randint(0, 60),
            answering=rng.randint(0, 60),
            waiting=rng.randint(0, 60),
            free_blocks=rng.randint(0, BLOCKS),
            total_blocks=BLOCKS,
        )
        yield engine.thresholds(candidates, load)
        yield engine.verdicts(candidates, load)


DRIVES: dict[str, Callable[[meridian.PolicyEngine, random.Random], Iterator[Any]]] = {
    "dispatch": steps,
    "eviction": rankings,
    "budget": budgets,
}


def decided(slot: str, source: str, seed: int, record: Path | None) -> tuple[str, int]:
    """Digest and number of the decisions of one seed."""
    engine = engine_of(slot, source, record)
    digest, count = hashlib.sha256(), 0
    for answer in DRIVES[slot](engine, random.Random(seed)):
        digest.update(json.dumps(answer, sort_keys=True).encode())
        count += 1
    faults = engine.faults()
    engine.close()
    if faults:
        sys.exit(f"error: {slot} {source}, seed {seed}: {faults[-1]}")
    return digest.hexdigest(), count


def measure(record: str, policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Digests and numbers of the decisions of each policy, such as "dispatch=native:balanced"; recordings of the first
    seed in the folder `record`."""
    found: dict[str, dict[str, Any]] = {}
    for policy in policies:
        slot, _, source = policy.partition("=")
        folder = Path(record).resolve() / policy.replace(":", "-")
        answers = [decided(slot, source, seed, None if seed else folder) for seed in range(SEEDS)]
        found[policy] = {"digests": [digest for digest, _ in answers], "decisions": sum(n for _, n in answers)}
    return found
