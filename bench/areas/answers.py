"""Answers after tight thinking budgets: how many are empty, with Meridian, with vLLM's own budget and without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from areas.common import Bound, Figure

REQUESTS = 10_000
# Neither model stops early often by itself: the bias makes an end of sequence as likely as other tokens.
CASES = (("reasoner", 0.0), ("reasoner", 6.0), ("random", 6.0))
ARMS = {
    "meridian": "Meridian",
    "budget": "stock with its thinking_token_budget",
    "none": "stock without a budget",
}


def answers(script: Callable[..., dict[str, Any]], requests: int = REQUESTS) -> Iterator[Figure]:
    """Empty answers of the same requests in each arm; `script` runs a script of bench/vllm."""
    for model, bias in CASES:
        for arm, name in ARMS.items():
            args = ["--requests", str(requests), "--model", model, "--arm", arm, "--bias", str(bias)]
            found = script("answers.py", *args)
            biased = f", logit of the end +{bias:g}" if bias else ""
            what = f"{model} model, budgets of 0 to 24, {requests:,} requests{biased}, {name}"
            bound = Bound(0) if arm == "meridian" else None
            yield Figure(f"{what}: empty answers", 10_000 * found["empty"] / requests, "per 10,000", bound)
            if arm == "meridian":
                yield Figure(f"{what}: tokens missed", found["missed"], "tokens", Bound(0))
                if found["gave_up"]:
                    yield Figure(f"{what}: Meridian gave up", 1, "times", Bound(0))
