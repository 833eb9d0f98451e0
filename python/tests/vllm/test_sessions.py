"""Chat sessions on the real engine: the history is what the template would keep, and the prefix cache finds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Engine
from meridian.vllm.bench.probe import Observed, SchedulerProbe
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import Chat, Options, chat_of, drive_chat

LENGTHS = ((12, 34), (30, 33), (5, 35))  # think and answer tokens of each turn
OPTIONS = Options(model=Path(), dtype="float32", max_model_len=1024, seed=5)


@pytest.fixture
def unwrapped(engine: Engine) -> Iterator[None]:
    """Takes a probe off the scheduler again, and forgets what other tests left in the prefix cache."""
    engine.run.engine.reset_prefix_cache()
    engine.run.seen.clear()
    engine.run.by_name.clear()
    yield
    for name in ("schedule", "_preempt_request"):
        engine.scheduler.__dict__.pop(name, None)


def chat(engine: Engine, *, preserve_thinking: bool) -> Chat:
    """Three conversations in which the user says about forty tokens a turn."""
    requests = []
    for session in range(3):
        prompt_tokens = len(engine.run.template.tail)
        for turn, (think_tokens, output_tokens) in enumerate(LENGTHS):
            prompt_tokens += 40
            lengths = (prompt_tokens, think_tokens, output_tokens)
            requests.append(TraceRequest(0.0, *lengths, session=session, turn=turn))
            prompt_tokens += output_tokens + (think_tokens if preserve_thinking else 0)
    return chat_of(requests, preserve_thinking=preserve_thinking, gap_s=0.0)


def hit_rate(rows: list[dict[str, Any]], turn: int) -> float:
    """Percent of the prompt tokens of a turn that were found in the prefix cache."""
    of = [row for row in rows if row["turn"] == turn]
    return 100 * sum(row["cached_tokens"] for row in of) / sum(row["prompt_tokens"] for row in of)


def play(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, chat: Chat
) -> tuple[list[Observed], dict[int, tuple[int, ...]]]:
    """The turns in order, and the prompt of each."""
    prompts: dict[int, tuple[int, ...]] = {}
    send = engine.run.send

    def keep(name: str, prompt: Sequence[int], observed: Observed) -> Any:
        prompts[observed.index] = tuple(prompt)
        return send(name, prompt, observed)

    monkeypatch.setattr(engine.run, "send", keep)
    with engine.using(None):
        observed, _ = drive_chat(engine.run, chat, SchedulerProbe(engine.scheduler, engine.run.seen), OPTIONS)
    return observed, prompts


@pytest.mark.usefixtures("unwrapped")
@pytest.mark.parametrize("preserve_thinking", [False, True])
def test_a_chat_finds_its_history_in_the_cache(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, preserve_thinking: bool
) -> None:
    observed, prompts = play(engine, monkeypatch, chat(engine, preserve_thinking=preserve_thinking))
    template = engine.run.template
    rows = [o.row() for o in observed]
    first, second, third = (hit_rate(rows, turn) for turn in range(3))
    assert first == 0
    assert min(second, third) > 20
    assert all(o.row()["think_forced_ok"] for o in observed)
    for o in observed:
        assert o.session is not None
        assert o.turn is not None
        prompt = prompts[o.index]
        assert o.planned.prompt_tokens == len(prompt)
        assert prompt[-len(template.tail) :] == template.tail
        if o.turn == 0:
            continue
        before, said = prompts[o.index - 1], tuple(observed[o.index - 1].tokens)
        thinking = LENGTHS[o.turn - 1][0] + len(template.think_end)
        if preserve_thinking:
            history = before + said
        else:
            history = before[: -len(template.think_start)] + said[thinking:]
            assert prompt.count(template.think_start[0]) == 1, "the tail's own"
            assert not set(template.think_end) & set(prompt)
        assert prompt[: len(history)] == history
        # Whole blocks of the history are found as far as they were computed in the same places before.
        found = len(before) + len(said) - 1 if preserve_thinking else len(before) - len(template.think_start)
        block = engine.scheduler.block_size
        assert o.cached_tokens == found // block * block
