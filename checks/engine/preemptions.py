"""Whom does a shortage of KV blocks cost its blocks, and is a step ever empty for it?

vLLM's own scheduler and KV cache manager without a model, as the tests drive them (random_sequences.py):
a prompt of 2,000 blocks beside 50 short requests in 2,048 blocks, and random sequences of requests.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir

from checks.run import HOSTILE, ROOT

DRIVES = ROOT / "python" / "tests" / "vllm"
FEATURES = ("plain", "caching-off", "priority", "priority-aborts-caching-off")
SHORT = 50


def measure(sequences: int = 1000) -> dict[str, Any]:
    """The long prompt first and last, and so many random sequences."""
    logging.getLogger("vllm").setLevel(logging.ERROR)
    sys.path.insert(0, str(DRIVES))
    from random_drive import Arrival
    from random_engine import BLOCK_TOKENS, Limits
    from random_engine import FEATURES as EVERY
    from random_sequences import POLICIES, Policy, decided, scripted

    model = str(model_dir())
    limits = Limits(64, 256, 2049, adapters=1, encoder=0, long_prefill=0, model_len=33_000)
    long, others = Arrival(1, 2000 * BLOCK_TOKENS, 8), tuple(Arrival(1, 10 + i, 400) for i in range(SHORT))
    found: dict[str, Any] = {"over": [], "preemptions": 0}
    for arrivals, name in (((long, *others), "0"), ((*others, long), str(SHORT))):
        stock, _ = scripted(limits, arrivals, model)
        ours, _ = scripted(limits, arrivals, model, Policy("balanced", "native:balanced"))
        found["over"].append(ours.over_ms[name] / stock.over_ms[name])
        found["preemptions"] += ours.requests[name].num_preemptions
    features = [feature for feature in EVERY if feature.name in FEATURES]
    violations: list[str] = []
    for i in range(sequences):
        policy, feature = POLICIES[i % len(POLICIES)], features[i // len(POLICIES) % len(features)]
        violations += decided(policy, feature, 100 + i, model, Path(HOSTILE)).violations
    return {**found, "sequences": sequences, "violations": violations}
