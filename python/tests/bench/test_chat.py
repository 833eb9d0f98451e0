"""Chat sessions: seeded lengths, and prompts made of what was generated before, with and without the thinking."""

import statistics

import pytest
from meridian.bench.chat import (
    Template,
    Turn,
    context_needed,
    history_after,
    longest_tokens,
    next_prompt,
    sessions,
    user_ids,
)
from meridian.bench.engine_run import MULTI_TURN, parse

TEMPLATE = Template(opening=(1, 2), think_start=(3, 4), think_end=(5,))


def test_same_seed_same_sessions() -> None:
    assert sessions(7, 6, 3) == sessions(7, 6, 3) != sessions(8, 6, 3)
    assert [len(turns) for turns in sessions(7, 6, 3)] == [3] * 6


def test_lengths_are_those_of_the_scenario() -> None:
    turns = [turn for session in sessions(1, 30, 5, context_tokens=200) for turn in session]
    assert statistics.median(t.think_tokens for t in turns) == pytest.approx(200, rel=0.1)
    assert {t.user_tokens for t in turns} == {100, 300}
    assert [t.user_tokens for t in turns[:6]] == [300, 100, 100, 100, 100, 300]
    answers = [t.answer_tokens for t in turns]
    assert (min(answers) >= 40, max(answers) <= 80) == (True, True)
    totals = [sum(t.think_tokens for session in sessions(seed, 30, 5) for t in session) for seed in range(8)]
    assert max(totals) < 1.1 * min(totals), "seeds differ little in total work"


def test_what_a_user_says_depends_on_seed_session_and_turn_only() -> None:
    vocabulary = range(16, 1000)
    said = user_ids(1, 2, 3, 50, vocabulary)
    assert said == user_ids(1, 2, 3, 50, vocabulary)
    assert len(said) == 50
    others = [user_ids(2, 2, 3, 50, vocabulary), user_ids(1, 3, 2, 50, vocabulary), user_ids(1, 2, 4, 50, vocabulary)]
    assert said not in others
    assert said[:20] == user_ids(1, 2, 3, 20, vocabulary)


def test_a_stripping_template_keeps_opening_and_answer() -> None:
    prompt = next_prompt((), (50, 51), TEMPLATE)
    assert prompt == (50, 51, 1, 2, 3, 4)
    history = history_after(prompt, [60, 61, 5, 70, 71], TEMPLATE, preserve_thinking=False)
    assert history == (50, 51, 1, 2, 70, 71)
    assert next_prompt(history, (52,), TEMPLATE) == (50, 51, 1, 2, 70, 71, 52, 1, 2, 3, 4)


def test_a_preserving_template_keeps_all() -> None:
    prompt = next_prompt((9,), (50,), TEMPLATE)
    history = history_after(prompt, [60, 5, 70], TEMPLATE, preserve_thinking=True)
    assert history == (9, 50, 1, 2, 3, 4, 60, 5, 70)


def test_the_first_end_marker_ends_thinking_also_when_it_has_two_tokens() -> None:
    template = Template((1,), (3,), (5, 6))
    history = history_after((1, 3), [5, 7, 5, 6, 8, 5, 6], template, preserve_thinking=False)
    assert history == (1, 8, 5, 6)


def test_a_history_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="no end of thinking"):
        history_after((1, 2, 3, 4), [60, 61], TEMPLATE, preserve_thinking=False)
    with pytest.raises(ValueError, match="tail"):
        history_after((1, 2), [5], TEMPLATE, preserve_thinking=True)


@pytest.mark.parametrize("preserve_thinking", [False, True])
def test_longest_is_what_the_last_turn_has_in_the_engine(preserve_thinking: bool) -> None:
    planned = [Turn(10, 20, 5), Turn(10, 2, 5), Turn(10, 3, 5)]
    history: tuple[int, ...] = ()
    lengths = []
    for turn in planned:
        prompt = next_prompt(history, [50] * turn.user_tokens, TEMPLATE)
        generated = [60] * turn.think_tokens + [5] + [70] * turn.answer_tokens
        lengths.append(len(prompt) + len(generated))
        history = history_after(prompt, generated, TEMPLATE, preserve_thinking=preserve_thinking)
    assert longest_tokens([planned], TEMPLATE, preserve_thinking=preserve_thinking) == max(lengths)


@pytest.mark.parametrize("preserve_thinking", [False, True])
def test_the_context_holds_every_turn(preserve_thinking: bool) -> None:
    s = MULTI_TURN
    for seed in range(1, 8):
        planned = sessions(seed, s.sessions, s.turns, user_tokens=s.user_tokens, context_tokens=s.context_tokens)
        context = context_needed(planned, preserve_thinking=preserve_thinking)
        assert context % 512 == 0
        assert longest_tokens(planned, TEMPLATE, preserve_thinking=preserve_thinking) < context <= 8192


@pytest.mark.parametrize(
    "flags",
    [["--sessions", "0"], ["--turns", "0"], ["--gap-s", "-1"], ["--scenario", "multi-turn", "--trace", "x.csv"]],
)
def test_a_run_refuses_what_makes_no_sense(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(["--model", "m", "--out", "o", *flags])
    assert refused.value.code == 2
