"""`[scheduler] preempt_for_waiting` in the real engine: who waits takes the place of who thinks for long."""

from __future__ import annotations

from typing import Any

from harness import Engine
from meridian.vllm.bench.request import TraceRequest
from vllm.v1.core.sched.interface import PauseState

SEATS = 16
# More than the engine has seats for: long ones first, then short ones.
LONG = [TraceRequest(0.0, 16, 32, 4) for _ in range(SEATS)]
SHORT = [TraceRequest(0.0, 16, 4, 4) for _ in range(8)]


def played(engine: Engine, native: Any) -> tuple[list[list[int]], list[int], set[str]]:
    """Tokens of each request, the step in which each ended, and who was preempted."""
    steps = 0
    ended: dict[str, int] = {}
    preempted: set[str] = set()

    def note() -> None:
        nonlocal steps
        steps += 1
        live = engine.scheduler.requests
        for i in range(len(LONG) + len(SHORT)):
            request = next((r for name, r in live.items() if name.partition("-")[0] == str(i)), None)
            if request is None:
                ended.setdefault(str(i), steps)
            elif request.num_preemptions:
                preempted.add(str(i))

    with engine.using(native):
        tokens = engine.generate([*LONG, *SHORT], note)
    return tokens, [ended[str(i)] for i in range(len(tokens))], preempted


def policy(engine: Engine, preempts: bool) -> Any:
    return engine.native(
        "native:srpt", options={"forecast": "attained"}, preempt_for_waiting=preempts, max_defer_ms=1e9
    )


def test_short_requests_pass_long_ones_and_outputs_are_the_same(clean: Engine) -> None:
    stock, _, _ = played(clean, None)
    clean.run.engine.reset_prefix_cache()
    patient, ends_patient, nobody = played(clean, policy(clean, preempts=False))
    clean.run.engine.reset_prefix_cache()
    ours, ends, preempted = played(clean, policy(clean, preempts=True))
    assert patient == ours == stock
    long, short = range(len(LONG)), range(len(LONG), len(LONG) + len(SHORT))
    assert not nobody
    assert preempted
    assert preempted <= {str(i) for i in long}
    assert max(ends[i] for i in short) < min(ends_patient[i] for i in short)
    assert not clean.scheduler._meridian_seams.is_changed


def test_nobody_gives_way_while_a_pause_admits_nobody(clean: Engine) -> None:
    """`pause_generation(mode="wait")`: those that run end with the weights with which they began."""
    stock, _, _ = played(clean, None)
    clean.run.engine.reset_prefix_cache()
    scheduler, early, late = clean.scheduler, set[str](), list[str]()

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if scheduler.pause_state == PauseState.UNPAUSED and not early:
            early.update(output.num_scheduled_tokens)
            scheduler.set_pause_state(PauseState.PAUSED_NEW)
        elif scheduler.pause_state == PauseState.PAUSED_NEW:
            late.extend(output.preempted_req_ids or ())
            assert early >= output.num_scheduled_tokens.keys()
            assert output.num_scheduled_tokens or not scheduler.running
        if not scheduler.running:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        return output

    schedule = scheduler.schedule
    scheduler.schedule = watched
    try:
        ours, _, preempted = played(clean, policy(clean, preempts=True))
    finally:
        del scheduler.schedule
        scheduler.set_pause_state(PauseState.UNPAUSED)
    assert ours == stock
    assert (late, preempted) == ([], set())
    assert len(early) == SEATS
