"""Does the host's memory stay flat over a million turns?

Sessions of 50 turns come and go, 2,000 at a time, through the native engine and its mirror of a block pool, without
vLLM. Every turn arrives, is planned, computed, ends, and leaves its KV blocks to the cache, where later turns evict
them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

BLOCKS, BLOCK_TOKENS = 20_000, 16
SESSIONS, TURNS_OF_A_SESSION, BLOCKS_OF_A_TURN = 2000, 50, 8
# What the host keeps is there by then: the cache is full, and sessions have ended.
SETTLED = 200_000


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def measure(turns: int = 1_000_000) -> dict[str, Any]:
    """Play the turns."""
    from meridian import MeridianConfig, PolicyConfig, PolicyEngine, SlotConfig

    policies = PolicyConfig(eviction=SlotConfig("native:cost-aware", deadline_ms=1000.0))
    engine = PolicyEngine(MeridianConfig(policy=policies), think_start=[7], think_end=[8])
    native = engine._engine
    native.keep_answers_ahead(1, 0)
    pool = native.pool(BLOCKS, BLOCK_TOKENS, False)
    pool.resync(list(range(BLOCKS)), [None] * BLOCKS)
    rng = random.Random(1)
    left = dict.fromkeys(range(SESSIONS), TURNS_OF_A_SESSION)
    last_session, first_mib, most_mib = SESSIONS, 0.0, 0.0
    names = list(left)
    prompt = [1] * (BLOCKS_OF_A_TURN * BLOCK_TOKENS)
    for turn in range(turns):
        now_ms = 10.0 * turn
        place = rng.randrange(SESSIONS)
        session, name = names[place], f"turn-{turn}"
        engine.add(name, prompt=prompt, max_tokens=100, now_ms=now_ms, session=str(session))
        engine.plan(
            [], [name], token_budget=2048, free_seats=8, now_ms=now_ms, free_blocks=BLOCKS - 1, total_blocks=BLOCKS
        )
        engine.scheduled({name: len(prompt)})
        chain = [(turn * BLOCKS_OF_A_TURN + i) % BLOCKS for i in range(BLOCKS_OF_A_TURN)]
        pool.taken(chain, now_ms)
        native.chain_ends(name, "tool", [(pool, chain)], now_ms)
        tokens: list[int | None] = [BLOCK_TOKENS * (i + 1) for i in reversed(range(BLOCKS_OF_A_TURN))]
        pool.leaving(chain[::-1], tokens, now_ms)
        engine.remove(name)
        left[session] -= 1
        if left[session] == 0:
            del left[session]
            last_session += 1
            names[place] = last_session
            left[last_session] = TURNS_OF_A_SESSION
        if turn == SETTLED:
            first_mib = resident_mib()
        elif turn > SETTLED and turn % 10_000 == 0:
            most_mib = max(most_mib, resident_mib())
    kv = engine.stats()["kv"]
    assert kv is not None
    evictions = sum(kv["evictions"].values())
    engine.close()
    assert most_mib > 0.0, f"turns={turns}: expected more than {SETTLED + 10_000}"
    return {
        "turns": turns,
        "sessions": last_session,
        "evictions": evictions,
        "settled_mib": first_mib,
        "growth_mib": most_mib - first_mib,
    }
