"""Chat sessions in a closed loop: each turn's prompt is made of what the engine generated in the turns before.

A session's next turn is due when its answer is complete, plus the time its user takes. Everything is token ids: user
tokens are random and depend only on seed, session and turn, so a conversation depends on nothing but the seed and the
tokens that the engine generates.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from meridian.bench.workload import TARGET, THINK_TOKENS, stratified

NAME = "multi-turn"
# Factor on the fitted thinking lengths (median 1,526): a median of 200.
THINK_FACTOR = 200 / 1526
LONGEST = 0.95  # quantile to which longer thinking is cut
ANSWER_TOKENS = (40, 80)
CONTEXT_STEP = 512


@dataclass(frozen=True)
class ChatScenario:
    """The sessions and the engine they run on; what a `Scenario` is to a trace."""

    about: str = "chat sessions whose next turn follows the answer, batch full"
    sessions: int = 30
    turns: int = 5
    user_tokens: int = 100
    context_tokens: int = 200  # that the first turn of a session has more: a document, what is known of the user
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None  # as long as the sessions need
    # Stock vLLM finds about half of the prompt tokens in its prefix cache.
    kv_blocks: int | None = 950
    block_size: int = 32
    settings: tuple[tuple[str, str], ...] = TARGET


MULTI_TURN = ChatScenario()


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


@dataclass(frozen=True)
class Turn:
    """Lengths in tokens; markers and the template's tail are not counted."""

    user_tokens: int
    think_tokens: int
    answer_tokens: int


def sessions(seed: int, n: int, turns: int, *, user_tokens: int = 100, context_tokens: int = 0) -> list[list[Turn]]:
    """``n`` sessions of ``turns`` turns. Lengths are stratified over all turns; the same seed gives the same list.

    The user says ``user_tokens`` in each turn and ``context_tokens`` more in the first.
    """
    rng = random.Random(seed)
    count = n * turns
    think = stratified(rng, THINK_TOKENS, count, THINK_FACTOR, LONGEST)
    low, high = ANSWER_TOKENS
    answer = stratified(rng, ((0, low), (1, high)), count, 1.0, 1.0)
    made = [
        Turn(user_tokens + (0 if i % turns else context_tokens), *lengths)
        for i, lengths in enumerate(zip(think, answer, strict=True))
    ]
    return [made[i * turns : (i + 1) * turns] for i in range(n)]


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


def longest_tokens(planned: Sequence[Sequence[Turn]], template: Template, *, preserve_thinking: bool) -> int:
    """Prompt and generated tokens of the longest turn."""
    longest = 0
    for turns in planned:
        kept = 0
        for turn in turns:
            thinking = turn.think_tokens + len(template.think_end)
            prompt_tokens = kept + turn.user_tokens + len(template.tail)
            longest = max(longest, prompt_tokens + thinking + turn.answer_tokens)
            kept = prompt_tokens + turn.answer_tokens
            kept += thinking if preserve_thinking else -len(template.think_start)
    return longest


def context_needed(planned: Sequence[Sequence[Turn]], *, preserve_thinking: bool) -> int:
    """A context length that holds every turn, whatever the template, within reason."""
    roomy = Template(opening=(0,) * 16, think_start=(0,) * 4, think_end=(0,) * 4)
    longest = longest_tokens(planned, roomy, preserve_thinking=preserve_thinking)
    return -(-longest // CONTEXT_STEP) * CONTEXT_STEP
