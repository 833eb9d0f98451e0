"""`[service_levels]` in the real engine: who can still be in time goes before who is late, and nothing else changes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from harness import Engine
from meridian.vllm import step
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.seams import ListSeams

SEATS = 16
# As many as the engine has seats, which come free one after the other; then some whose level cannot be kept, and as
# many whose level can.
FIRST = [TraceRequest(0.0, 16, 4 + 4 * i, 4) for i in range(SEATS)]
LATE = [TraceRequest(0.0, 16, 8, 8, tenant="late") for _ in range(SEATS)]
IN_TIME = [TraceRequest(0.0, 16, 8, 8, tenant="in-time") for _ in range(SEATS)]
LEVELS = {
    "impossible": {"ttfo_ms": 0.001, "prompt_ms_per_token": 0, "think_ms_per_token": 0, "tenants": ["late"]},
    "lax": {"ttfo_ms": 600_000.0, "tenants": ["in-time"]},
}


def played(
    engine: Engine, native: Any, requests: tuple[TraceRequest, ...] = (*FIRST, *LATE, *IN_TIME)
) -> tuple[list[list[int]], list[int]]:
    """Tokens of each request, and the step in which each ended."""
    steps = 0
    ended: dict[int, int] = {}

    def note() -> None:
        nonlocal steps
        steps += 1
        live = {name.partition("-")[0] for name in engine.scheduler.requests}
        for i in range(len(requests)):
            if str(i) not in live:
                ended.setdefault(i, steps)

    with engine.using(native):
        tokens = engine.generate(list(requests), note)
    return tokens, [ended.get(i, steps) for i in range(len(tokens))]


def test_who_can_be_in_time_goes_before_who_is_late(clean: Engine) -> None:
    stock, _ = played(clean, None)
    clean.run.engine.reset_prefix_cache()
    plain, ends_plain = played(clean, clean.native("native:balanced"))
    clean.run.engine.reset_prefix_cache()
    ours, ends = played(clean, clean.native("native:balanced", service_levels=LEVELS))
    assert ours == plain == stock
    late, in_time = slice(SEATS, SEATS + len(LATE)), slice(SEATS + len(LATE), None)
    assert ends_plain[late][0] < ends_plain[in_time][0], "without a level, in order of arrival"
    assert sum(ends_plain[late]) < sum(ends_plain[in_time])
    assert max(ends[in_time]) <= min(ends[late])
    assert sum(ends[in_time]) < sum(ends[late])


def test_the_longest_wait_is_kept_for_those_who_are_late(clean: Engine) -> None:
    """Whose longest wait is over goes first again, whatever the policy says."""
    impatient = {**LEVELS, "impossible": {**LEVELS["impossible"], "longest_wait_ms": 0.001}}
    ours, ends = played(clean, clean.native("native:balanced", service_levels=impatient))
    assert len(ours) == len(FIRST) + len(LATE) + len(IN_TIME)
    late, in_time = ends[SEATS : SEATS + len(LATE)], ends[SEATS + len(LATE) :]
    assert sum(late) < sum(in_time)


def test_who_can_be_in_time_is_seen_behind_more_who_are_late_than_a_policy_sees(
    clean: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "WAITING_WINDOW", 40)
    requests = (*FIRST, *LATE, *LATE, *LATE, *LATE, *IN_TIME)
    stock, _ = played(clean, None, requests)
    clean.run.engine.reset_prefix_cache()
    ours, ends = played(clean, clean.native("native:balanced", service_levels=LEVELS), requests)
    assert ours == stock
    assert max(ends[-len(IN_TIME) :]) <= min(ends[SEATS : -len(IN_TIME)])


def test_a_window_of_both_ends_leaves_every_request_in_the_queue() -> None:
    requests: Any = [str(i) for i in range(9)]
    queue: Any = deque(requests)
    seams = ListSeams(SimpleNamespace(waiting=queue))
    seams.gather(4)
    assert "".join(queue) == "017823456"
    window = list(queue)[:4]
    newest = {id(request) for request in window[2:]}
    seams.spread(window, newest, 1)
    assert list(queue) == requests, "in the order of arrival where the plan changes nothing"
    seams.gather(4)
    seams.spread(window[::-1], newest, 1)
    assert "".join(queue) == "810234567", "one may be admitted, the oldest stay in front, the newest behind"
