"""Chat sessions in a closed loop: each turn's prompt is made of what the engine generated in the turns before.

Everything is token ids: user tokens are random and depend only on seed, session and turn, so a conversation depends on
nothing but the seed and the tokens that the engine generates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """What the chat template puts around a turn, as token ids."""

    opening: tuple[int, ...]  # the generation prompt, up to the start of thinking
    think_start: tuple[int, ...]  # the start marker and what follows it in the prompt
    think_end: tuple[int, ...]

    @property
    def tail(self) -> tuple[int, ...]:
        """What every prompt ends with."""
        return self.opening + self.think_start


def user_ids(seed: int, session: int, turn: int, n: int, vocabulary: Sequence[int]) -> tuple[int, ...]:
    """What the user of a session says in a turn: the same on every run, in whatever order turns arrive."""
    rng = random.Random(f"{seed}/{session}/{turn}")
    return tuple(rng.choice(vocabulary) for _ in range(n))


def next_prompt(history: Sequence[int], user: Sequence[int], template: Template) -> tuple[int, ...]:
    """A turn's prompt: what was said before, what the user says now, the template's tail."""
    return (*history, *user, *template.tail)


def history_after(
    prompt_ids: Sequence[int], generated: Sequence[int], template: Template, *, preserve_thinking: bool
) -> tuple[int, ...]:
    """What the next turn's prompt starts with, after ``prompt_ids`` was answered with ``generated``.

    A template that strips reasoning leaves out everything from the start marker to the end marker, both included.

    Raises:
        ValueError: the prompt does not end with the tail, or thinking never ended.
    """
    tail = template.tail
    if tuple(prompt_ids[-len(tail) :]) != tail:
        raise ValueError("the prompt does not end with the template's tail")
    if preserve_thinking:
        return (*prompt_ids, *generated)
    end = template.think_end
    for at in range(len(generated) - len(end) + 1):
        if tuple(generated[at : at + len(end)]) == end:
            answer = generated[at + len(end) :]
            return (*prompt_ids[: len(prompt_ids) - len(template.think_start)], *answer)
    raise ValueError("no end of thinking among the generated tokens")
