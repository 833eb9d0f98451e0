"""Stop strings of clients that bind only in the answer: `[model] stop_strings = "answer"`.

vLLM seeks stop strings in the process that talks to clients, in all generated text
(vllm/v1/engine/detokenizer.py, `BaseIncrementalDetokenizer.update`). A thought that quotes one of them then ends the
request without an answer. The general plugin `meridian` therefore wraps the constructors of the two front ends, if
`meridian.toml` asks for it. A request with stop strings then gets a detokenizer that passes its tokens to vLLM's own
in stretches: those of thinking without stop strings, those of the answer with them. All else stays vLLM's: the text,
the text that a stream holds back, `min_tokens`, `include_stop_str_in_output`.

Markers belong to thinking, so `</think>` as a stop string has no effect. The tokens of a start marker of several tokens
are thinking from the last of them on, because no token before it shows that the model begins to think. Sessions of
streamed input keep vLLM's own rule: their later prompts do not reach the detokenizer.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from meridian import _native
from meridian.config import MeridianConfig, ModelConfig
from meridian.vllm.markers import last_turn, resolve

if TYPE_CHECKING:
    from meridian.vllm.markers import TokenMarkers

logger = logging.getLogger("vllm.meridian")


def install() -> None:
    """Wrap vLLM's front ends if the configuration of this process asks for it; calling it again changes nothing.

    Raises:
        ConfigError: `meridian.toml` is not valid.
        ImportError, AttributeError: this vLLM has no such place.
    """
    model = configured().model
    if model.stop_strings != "answer":
        return
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    for front_end in (AsyncLLM, LLMEngine):
        if not hasattr(front_end.__init__, "meridian"):
            setattr(front_end, "__init__", _following(front_end.__init__, model))  # noqa: B010


def configured() -> MeridianConfig:
    """The configuration of this process. Quietly: the engine's own process logs what is odd about it."""
    text, base_dir, _, _ = _native.load_config(None)
    return MeridianConfig.from_native(text, base_dir)


def _following(init: Callable[..., None], model: ModelConfig) -> Callable[..., None]:
    """The constructor of a front end, whose requests then follow their thinking."""

    @functools.wraps(init)
    def made(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        try:
            processor = self.output_processor
            # Quietly: the engine's own process logs which markers there are.
            markers = resolve(model, processor.tokenizer, vllm_config, quiet=True)
            if markers.starts and markers.ends:
                follow(processor, Rules.of(markers))
            elif markers.problem:
                logger.warning("meridian: stop strings bind in thinking too: %s", markers.problem)
        except Exception as why:
            logger.warning("meridian: stop strings bind in thinking too: %s", why)

    vars(made)["meridian"] = init
    return made


def follow(processor: Any, rules: Rules) -> None:
    """Make the requests that this output processor takes in follow their thinking."""
    add = processor.add_request

    def added(request: Any, *args: Any, **kwargs: Any) -> None:
        is_new = request.request_id not in processor.request_states
        add(request, *args, **kwargs)
        if is_new and not request.resumable and getattr(request.sampling_params, "stop", None):
            try:
                detokenizer = processor.request_states[request.request_id].detokenizer
                # Without a tokenizer, vLLM seeks no stop strings.
                if getattr(detokenizer, "stop", None):
                    _bind(detokenizer, Thought(rules, request.prompt_token_ids or []))
            except Exception:
                logger.exception("meridian: the stop strings of request %s bind everywhere", request.request_id)

    processor.add_request = added


@dataclass(frozen=True)
class Rules:
    """How a model's thinking is told from its answers."""

    # Markers by their last token.
    starts: dict[int, list[tuple[int, ...]]]
    ends: dict[int, list[tuple[int, ...]]]
    boundaries: frozenset[int]
    # Whether the model may think again after a thought has ended.
    resumes: bool
    # Tokens of the longest marker.
    longest: int

    @classmethod
    def of(cls, markers: TokenMarkers) -> Rules:
        """The rules of a model with these markers."""
        calls = [begin for begin, _ in markers.calls] if markers.call_ends_thinking else []
        starts, ends = _by_last_token(markers.starts), _by_last_token([*markers.ends, *calls])
        longest = max(len(marker) for marker in (*markers.starts, *markers.ends, *calls))
        return cls(starts, ends, markers.boundaries, markers.model.resumes, longest)


def _by_last_token(markers: Iterable[Sequence[int]]) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    for marker in markers:
        found.setdefault(marker[-1], []).append(tuple(marker))
    return found


class Thought:
    """Where one request stands: in its thinking, or outside of it."""

    def __init__(self, rules: Rules, prompt: Sequence[int]) -> None:
        self._rules = rules
        self._is_open = self._has_ended = False
        # The latest tokens since thinking last began or ended.
        self._recent: deque[int] = deque(maxlen=rules.longest)
        turn = last_turn(prompt, rules.boundaries)
        if not rules.starts.keys().isdisjoint(turn):
            for token in turn:
                self.takes(token)
        if not rules.resumes and not self._is_open:
            # A template may close thinking that it did not open.
            self._has_ended |= any(_contains(turn, marker) for ends in rules.ends.values() for marker in ends)
        self._recent.clear()

    @property
    def is_open(self) -> bool:
        """Whether it is in its thinking."""
        return self._is_open

    def takes(self, token: int) -> bool:
        """Take in a token; returns whether it belongs to the thinking, as markers do."""
        was_open = self._is_open
        self._recent.append(token)
        sought = self._rules.ends if was_open else self._rules.starts
        if token in sought and (was_open or self._rules.resumes or not self._has_ended):
            recent = tuple(self._recent)
            if any(recent[-len(marker) :] == marker for marker in sought[token]):
                self._is_open = not was_open
                self._has_ended |= was_open
                self._recent.clear()
        return was_open or self._is_open


def _contains(tokens: Sequence[int], marker: tuple[int, ...]) -> bool:
    ends = (at + 1 for at, token in enumerate(tokens) if token == marker[-1])
    return any(tuple(tokens[max(end - len(marker), 0) : end]) == marker for end in ends)


class _AnswerStops:
    """Mixin over one of vLLM's detokenizers: its stop strings lie within one stretch of the answer."""

    stop: list[str]
    output_text: str
    meridian_thought: Thought
    # Where in the text the present stretch of the answer begins.
    meridian_answer_from = 0
    # Characters of the longest stop string.
    meridian_longest = 0

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Take in new tokens; returns the stop string that they complete."""
        vllms: Callable[[list[int], bool], str | None] = super().update  # type: ignore[misc]
        takes = self.meridian_thought.takes
        marked = [(takes(token), token) for token in new_token_ids]
        stretches = [(thinks, [token for _, token in of]) for thinks, of in groupby(marked, key=itemgetter(0))]
        for number, (thinks, tokens) in enumerate(stretches, 1):
            # Only the last token can be the one that ended the request.
            ends = stop_terminated and number == len(stretches)
            found = self._think(vllms, tokens, ends) if thinks else self._answer(vllms, tokens, ends)
            if found is not None:
                return found
        return None

    def _think(self, vllms: Callable[[list[int], bool], str | None], tokens: list[int], ends: bool) -> str | None:
        stop, self.stop = self.stop, []
        try:
            return vllms(tokens, ends)
        finally:
            self.stop = stop
            self.meridian_answer_from = len(self.output_text)

    def _answer(self, vllms: Callable[[list[int], bool], str | None], tokens: list[int], ends: bool) -> str | None:
        begin = self.meridian_answer_from
        if begin == 0 or len(self.output_text) - begin >= self.meridian_longest:
            return vllms(tokens, ends)
        # vLLM would find a stop string that begins before this stretch.
        before, self.output_text = self.output_text[:begin], self.output_text[begin:]
        try:
            return vllms(tokens, ends)
        finally:
            self.output_text = before + self.output_text


@functools.cache
def _answering(detokenizer: type) -> type:
    return type(f"Meridian{detokenizer.__name__}", (_AnswerStops, detokenizer), {})


def _bind(detokenizer: Any, thought: Thought) -> None:
    """Make the stop strings of a detokenizer bind only outside of the thinking."""
    detokenizer.meridian_thought = thought
    detokenizer.meridian_longest = max(map(len, detokenizer.stop))
    detokenizer.__class__ = _answering(type(detokenizer))
