"""Chat sessions on the real engine: the history is what the template would keep, and the prefix cache finds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import Engine
from meridian.bench.chat import Turn
from meridian.bench.engine_run import Chat, Options, TooLong, drive_chat
from meridian.bench.probe import Observed, SchedulerProbe
from meridian.bench.report import hit_rate_by_turn

SESSIONS = [[Turn(40, 12, 34), Turn(40, 30, 33), Turn(40, 5, 35)] for _ in range(3)]
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
    observed, prompts = play(engine, monkeypatch, Chat(SESSIONS, preserve_thinking))
    template = engine.run.template
    first, second, third = hit_rate_by_turn([o.row() for o in observed])
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
        thinking = SESSIONS[o.session][o.turn - 1].think_tokens + len(template.think_end)
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


@pytest.mark.usefixtures("unwrapped")
def test_a_turn_that_does_not_fit_is_refused(engine: Engine) -> None:
    probe = SchedulerProbe(engine.scheduler, engine.run.seen)
    with pytest.raises(TooLong, match=r"the longest turn has \d+ tokens, expected at most 1024"):
        drive_chat(engine.run, Chat([[Turn(1000, 10, 10)]]), probe, OPTIONS)
