"""`PolicyEngine`: the host engine driven by hand, with native policies and components."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import meridian
import pytest
from meridian import MeridianConfig, PolicyConfig, PolicyEngine, SlotConfig


def config(source: str, **dispatch: object) -> MeridianConfig:
    return MeridianConfig(policy=PolicyConfig(dispatch=SlotConfig(source=source, **dispatch)))  # type: ignore[arg-type]


def engine_with_phases(source: str) -> PolicyEngine:
    """Requests a (prefill), b (think), c (output), all running since 0 ms."""
    engine = PolicyEngine(config(source), think_start=[7], think_end=[8])
    for name in "abc":
        engine.add(name, prompt=[1, 2, 3, 7], max_tokens=50)
    engine.plan([], list("abc"), token_budget=64, free_seats=3)
    engine.scheduled({"a": 2, "b": 4, "c": 4})
    engine.generated({"b": [20], "c": [8, 21]})
    return engine


@pytest.mark.parametrize("component", [False, True])
def test_output_first_orders_by_phase(component: bool, policies: Path) -> None:
    engine = engine_with_phases(str(policies / "output-first.wasm") if component else "native:output-first")
    assert [engine.phase(name) for name in "abc"] == ["prefill", "think", "output"]
    plan = engine.plan(list("abc"), [], token_budget=64, free_seats=0, now_ms=5.0)
    assert plan.running == ["c", "b", "a"]
    assert plan.token_budget == 64, "no step time is known yet, so the engine's own budget stands"
    stats = engine.stats()
    assert stats["decided_by_policy"] == 2
    assert stats["policy"] == "output-first"


def test_fcfs_keeps_the_order() -> None:
    engine = engine_with_phases("native:fcfs")
    plan = engine.plan(list("bca"), [], token_budget=64, free_seats=0, now_ms=5.0)
    assert plan.running == list("bca")
    assert plan.token_caps == {}


def test_noop_leaves_steps_to_the_default(policies: Path) -> None:
    engine = engine_with_phases(str(policies / "noop.wasm"))
    assert engine.plan(list("abc"), [], token_budget=64, free_seats=0, now_ms=5.0).running == ["c", "b", "a"]
    assert engine.stats()["left_to_default"] == 2
    assert engine.stats()["last_source"] == "default"


def test_step_budget_follows_the_learned_step_time() -> None:
    scheduler = meridian.SchedulerConfig(output_tpot_budget_ms=20.0)
    engine = PolicyEngine(replace(config("native:output-first"), scheduler=scheduler), think_start=[7], think_end=[8])
    names = [f"r{i}" for i in range(40)]
    for name in names:
        engine.add(name, prompt=[1, 7], max_tokens=10_000)
    rng = random.Random(0)
    running: list[str] = []
    now_ms = 0.0
    for step in range(60):
        waiting = [name for name in names if name not in running]
        plan = engine.plan(running, waiting, token_budget=4096, free_seats=len(waiting), now_ms=now_ms)
        assert plan.token_budget <= 4096
        # One admission in four steps; the engine takes 3 ms, 0.2 ms a decode and 0.05 ms a prefill token.
        given = dict.fromkeys(running, 1)
        prefill = 0
        if waiting and step % 4 == 0:
            given[waiting[0]] = 2
            running.append(waiting[0])
            prefill = 2
        if step % 3 == 0:
            extra = f"p{step}"
            prefill += (tokens := rng.randint(50, 200))
            engine.add(extra, prompt=[1] * tokens, max_tokens=1, now_ms=now_ms)
            given[extra] = tokens
        engine.scheduled(given)
        engine.generated({name: [20] for name in given if name.startswith("r")})
        for name in list(given):
            if name.startswith("p"):
                engine.remove(name)
        now_ms += 3.0 + 0.2 * (len(given) - (prefill > 0)) + 0.05 * prefill
    fit = engine.stats()["step_time_ms"]
    assert fit is not None
    assert fit[2] == pytest.approx(0.05, rel=0.3)
    engine.generated({running[0]: [8]})
    plan = engine.plan(running, [], token_budget=4096, free_seats=0, now_ms=now_ms)
    predicted = fit[0] + fit[1] * len(running) + fit[2] * (plan.token_budget - len(running))
    assert plan.token_budget < 4096
    assert predicted <= 20.5


def test_every_fault_is_survived_and_named(hostile: Path) -> None:
    for line in (hostile / "kinds.txt").read_text().splitlines():
        name, kind = line.split()
        engine = engine_with_phases(str(hostile / f"{name}.wasm"))
        for step in range(6):
            plan = engine.plan(list("abc"), [], token_budget=64, free_seats=0, now_ms=5.0 + step)
            assert sorted(plan.running) == ["a", "b", "c"]
        stats = engine.stats()
        faults = {fault: count for fault, count in stats["faults"].items() if count}
        if kind == "none":
            assert not faults, name
        else:
            assert set(faults) == {kind}, name
            assert stats["decided_by_fallback"] == faults[kind], name
            assert kind in (stats["last_fault"] or ""), name


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("absent.wasm", "cannot read"),
        ("pyproject.toml", "not a component"),
    ],
)
def test_refused_policies_say_why(source: str, expected: str) -> None:
    base = Path(__file__).resolve().parents[1]
    with pytest.raises(meridian.PolicyError, match=r"^policy\.dispatch\.source: ") as refused:
        PolicyEngine(replace(config(source), base_dir=str(base)))
    assert expected in str(refused.value)


def test_an_unknown_native_policy_and_its_options_are_refused() -> None:
    with pytest.raises(meridian.ConfigError) as refused:
        PolicyEngine(config("native:best"))
    assert str(refused.value) == (
        'policy.dispatch.source: "native:best": unknown native policy, expected one of native:balanced, '
        "native:output-first, native:fcfs, native:noop, native:priority, native:pascal, native:srpt, "
        "native:fair-share, native:edf, native:qoe, native:mlfq, native:qoserve, native:scorpio, native:jitserve, "
        "native:lpm"
    )
    with pytest.raises(meridian.ConfigError, match=r"^policy\.dispatch\.config: .*takes no options"):
        PolicyEngine(config("native:output-first", config={"speed": 9}))


def test_any_integer_is_taken_as_a_limit_or_a_priority() -> None:
    engine = PolicyEngine()
    for index, number in enumerate((2**32, 2**63, 10**40, -(2**63) - 1)):
        engine.add(f"r{index}", prompt=[1], max_tokens=number, priority=number)
    assert engine.stats()["requests"] == 4
    # The highest numbers are the least urgent, as in vLLM.
    order = [f"r{index}" for index in range(4)]
    plan = engine.plan([], order, token_budget=64, free_seats=4)
    assert plan.waiting == ["r3", "r0", "r1", "r2"]


def test_markers_may_have_alternatives() -> None:
    engine = PolicyEngine(think_start=[[7], [5, 6]], think_end=[[8], (9,)])
    for name, prompt, ends in (("a", [1, 7], [8]), ("b", [1, 5, 6], [9])):
        engine.add(name, prompt=prompt, max_tokens=50)
        engine.plan([], [name], token_budget=64, free_seats=1)
        engine.scheduled({name: len(prompt)})
        engine.generated({name: [20]})
        assert engine.phase(name) == "think"
        engine.generated({name: [*ends, 21]})
        assert engine.phase(name) == "output"
    with pytest.raises(TypeError, match="not both"):
        PolicyEngine(think_start=[7, [5, 6]], think_end=[8])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"tenant": "t" * 129}, "tenant: 129 characters: must be at most 128"),
        ({"session": "s" * 129}, "session: 129 characters: must be at most 128"),
        ({"now_ms": math.nan}, "now_ms: nan: must be finite"),
        ({"now_ms": math.inf}, "now_ms: inf: must be finite"),
        ({"deadline_ms": math.nan}, "deadline_ms: nan: must be a number"),
    ],
)
def test_facts_that_make_no_sense_are_refused(facts: dict[str, Any], expected: str) -> None:
    engine = PolicyEngine()
    with pytest.raises(ValueError, match=f"^{expected}"):
        engine.add("a", prompt=[1], max_tokens=1, **facts)
    engine.add("a", prompt=[1], max_tokens=1, tenant="t" * 128, session="s" * 128)
    with pytest.raises(ValueError, match="now_ms: nan: must be finite"):
        engine.plan(["a"], [], token_budget=8, free_seats=1, now_ms=math.nan)


def test_duplicate_and_unknown_requests() -> None:
    engine = PolicyEngine()
    engine.add("a", prompt=[1], max_tokens=1)
    with pytest.raises(ValueError, match="already there"):
        engine.add("a", prompt=[1], max_tokens=1)
    with pytest.raises(KeyError):
        engine.plan(["b"], [], token_budget=8, free_seats=1)
    engine.remove("b")
    engine.remove("a")
    assert engine.stats()["requests"] == 0
