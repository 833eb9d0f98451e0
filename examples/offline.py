#!/usr/bin/env python3
"""Drive Meridian's engine by hand for three steps, without vLLM, and print each plan.

    python examples/offline.py [POLICY.wasm]

Needs the `meridian` wheel and nothing else: `make wheel` prints the Python that it installed the wheel for. Without an
argument the policy is the native default; with one it is that component, which must order by phase for the
assertions to hold (`target/policies/output-first.wasm`, built by `make policies`).
"""

from __future__ import annotations

import sys
from pathlib import Path

from meridian import MeridianConfig, PolicyConfig, PolicyEngine, SlotConfig, StepPlan

# Made-up token ids; inside vLLM they come from the model's tokenizer.
THINK_START, THINK_END = 7, 8
TOKEN_BUDGET = 64


def configure(component: str | None) -> MeridianConfig:
    """The defaults, or the defaults with a component as the policy."""
    if component is None:
        return MeridianConfig()
    return MeridianConfig(policy=PolicyConfig(dispatch=SlotConfig(source=str(Path(component).resolve()))))


def show(engine: PolicyEngine, now_ms: float, plan: StepPlan) -> None:
    """Print one plan with the phase of each request."""
    order = ", ".join(f"{name} ({engine.phase(name)})" for name in plan.running + plan.waiting)
    print(f"t = {now_ms:3.0f} ms  budget {plan.token_budget:3d}  caps {plan.token_caps}  order: {order}")


def main() -> None:
    """Three requests: all are admitted, one leaves thinking, the other two take turns."""
    config = configure(sys.argv[1] if len(sys.argv) > 1 else None)
    engine = PolicyEngine(config, think_start=[THINK_START], think_end=[THINK_END])
    names = ["a", "b", "c"]
    for name in names:
        # The prompt ends with the start marker, so the request thinks from its first generated token on.
        engine.add(name, prompt=[1, 2, 3, THINK_START], max_tokens=100)

    plan = engine.plan([], names, token_budget=TOKEN_BUDGET, free_seats=4, now_ms=0.0)
    show(engine, 0.0, plan)
    assert plan.waiting == names, "requests in the same phase keep their order"
    assert [engine.phase(name) for name in names] == ["prefill"] * 3

    # All three prompts fit in the step. c ends its thinking at once.
    engine.scheduled(dict.fromkeys(names, 4))
    engine.generated({"a": [40], "b": [41], "c": [THINK_END]})
    assert [engine.phase(name) for name in names] == ["think", "think", "output"]

    plan = engine.plan(names, [], token_budget=TOKEN_BUDGET, free_seats=1, now_ms=10.0)
    show(engine, 10.0, plan)
    assert plan.running == ["c", "a", "b"], "the output phase goes first"
    assert 1 <= plan.token_budget <= TOKEN_BUDGET

    # This step leaves b out, so b is the thinking request that was served least recently.
    engine.scheduled({"c": 1, "a": 1})
    engine.generated({"c": [50], "a": [42]})

    plan = engine.plan(plan.running, [], token_budget=TOKEN_BUDGET, free_seats=1, now_ms=20.0)
    show(engine, 20.0, plan)
    assert plan.running == ["c", "b", "a"], "thinking rotates"

    stats = engine.stats()
    assert stats["decisions"] == stats["decided_by_policy"] == 3, stats
    assert not any(stats["faults"].values()), stats
    print(f"{stats['policy']} {stats['policy_version']} decided {stats['decisions']} steps, no faults")


if __name__ == "__main__":
    main()
