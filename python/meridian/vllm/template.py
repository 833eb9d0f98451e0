"""Finds out how a model's chat template treats the reasoning of earlier turns, by rendering it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")

_THOUGHT = "meridian-thought-7f3a"
_ANSWER = "meridian-answer-7f3a"
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@dataclass(frozen=True)
class Reasoning:
    """Whether the next question's prompt leaves out reasoning, and the texts that begin a tool call, after which the
    prompt keeps it."""

    strips: bool
    shown: str
    tool_calls: list[str] = field(default_factory=list)


def reasoning_in_template(tokenizer: Any, start: str, end: str, *, tool_calls: Sequence[str]) -> Reasoning:
    """Find out how the tokenizer's chat template treats reasoning between `start` and `end`. `tool_calls` are texts
    that may begin a tool call.

    The function tries both forms in which a client returns an assistant's turn: reasoning inside the content, and in
    its own field. Reasoning counts as stripped only if neither form keeps it. In addition, a tool loop must not keep
    it, unless one of `tool_calls` identifies the tool call.
    """
    if getattr(tokenizer, "apply_chat_template", None) is None or not getattr(tokenizer, "chat_template", None):
        return Reasoning(False, "is not there, so earlier reasoning is taken as kept")
    inside = {"role": "assistant", "content": f"{start}\n{_THOUGHT}\n{end}\n\n{_ANSWER}"}
    apart = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "reasoning": _THOUGHT}
    loops = []
    for turn in (inside, apart):
        text = _render(tokenizer, [turn, {"role": "user", "content": "b"}])
        if text is None or _ANSWER not in text:
            return Reasoning(False, "does not tell whether it keeps earlier reasoning, so that is taken as kept")
        if _THOUGHT in text:
            return Reasoning(False, "keeps earlier reasoning")
        loops.append(_render(tokenizer, [{**turn, "tool_calls": [_CALL]}, {"role": "tool", "content": "1"}]))
    keeping = [text for text in loops if text is not None and _THOUGHT in text]
    begins = [call for call in tool_calls if any(call in text for text in keeping)]
    if keeping and not begins:
        return Reasoning(
            False, "keeps reasoning in tool loops, and what begins a tool call is not known (model.tool_call)"
        )
    return Reasoning(True, "strips earlier reasoning: its KV blocks go first when a request ends", begins)


def _render(tokenizer: Any, turns: list[dict[str, Any]]) -> str | None:
    try:
        chat = [{"role": "user", "content": "a"}, *turns]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a third-party program
        logger.debug("meridian: the chat template cannot be tried: %s", error)
        return None
    return text if isinstance(text, str) else None
