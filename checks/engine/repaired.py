"""Is a prompt ever cut that must stay whole, does every prompt go on, and does a request that vLLM passes over get in?

vLLM's own scheduler and KV cache manager without a model, as the tests drive them (random_sequences.py): random
prefix caches, adapters, grammars, KV loads and aborts, with seeds and with a hybrid model, under every native policy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir

from checks.run import DRIVES, say

DEFER_MS = 200.0
CHUNK = 250


def drives(chunk: int) -> list[str]:
    """What should not have been in so many sequences."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    sys.path.insert(0, str(DRIVES))
    from random_engine import FEATURES
    from random_sequences import POLICIES, decided, stock

    model = str(model_dir())
    features = [feature for feature in FEATURES if feature.seeds or feature.hybrid or not feature.chunked_prefill]
    policies = [policy for policy in POLICIES if policy.source.startswith("native:")]
    wrong: list[str] = []
    for i in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        feature, policy = features[i % len(features)], policies[i // len(features) % len(policies)]
        drive = decided(policy, feature, i, model, Path())
        wrong += [f"{policy.name}: {violation}" for violation in drive.violations]
        # Requests that are overdue together take turns: three steps of the most tokens that these engines have.
        bound_ms = policy.max_defer_ms + 3 * 43.0
        if drive.stalled_ms > bound_ms and drive.stalled_ms > bound_ms + stock(feature, i, model).stalled_ms:
            wrong.append(f"{policy.name}, {feature.name}, seed {i}: no prompt went on for {drive.stalled_ms:.0f} ms")
    return wrong


def passed(model: str) -> Iterator[dict[str, Any]]:
    """How long requests wait that vLLM passes over, milliseconds; of each, under the policy that keeps it longest."""
    sys.path.insert(0, str(DRIVES))
    from random_sequences import PASSED_OVER, Policy, passed_over

    for name, lone in PASSED_OVER.items():
        policies = [
            Policy(s, f"native:{s}", max_defer_ms=DEFER_MS) for s in ("balanced", "output-first", "qoe", "srpt")
        ]
        waits = [passed_over(lone, model, policy)[0] for policy in policies]
        yield {"name": name, "bound_ms": DEFER_MS, "ms": max(waits), "stock_ms": passed_over(lone, model)[0]}


def measure(sequences: int = 100_000) -> dict[str, Any]:
    """Of so many sequences, those with a violation; and the requests that vLLM passes over."""
    wrong: list[str] = []
    with ProcessPoolExecutor(2) as pool:
        for done, found in enumerate(pool.map(drives, range(-(-sequences // CHUNK))), 1):
            wrong += found
            if done % 8 == 0:
                say(f"  {done * CHUNK} sequences, {len(wrong)} wrong")
    return {"sequences": sequences, "wrong": wrong, "passed": list(passed(str(model_dir())))}
