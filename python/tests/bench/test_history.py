"""Prompts of a chat are made of what was generated before, with and without the thinking."""

import pytest
from meridian.vllm.bench.history import Template, history_after, next_prompt, user_ids

TEMPLATE = Template(opening=(1, 2), think_start=(3, 4), think_end=(5,))


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
