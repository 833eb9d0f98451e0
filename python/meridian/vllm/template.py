"""What a model's chat template does with the reasoning of earlier turns, found out by rendering it."""

from __future__ import annotations

import logging
from typing import Any

# Below vLLM's own logger, whose handlers and level it shares.
logger = logging.getLogger("vllm.meridian")

_THOUGHT = "meridian-thought-7f3a"
_ANSWER = "meridian-answer-7f3a"


def strips_reasoning(tokenizer: Any, start: str, end: str) -> bool | None:
    """Whether the tokenizer's chat template leaves the reasoning of an earlier turn out of the prompt, where `start` and
    `end` mark reasoning; None when that cannot be seen.

    Tried in both forms in which a client sends an assistant's turn back: reasoning inside the content, and in a field of
    its own. It counts as stripped only when no form keeps it.
    """
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None or not getattr(tokenizer, "chat_template", None):
        return None
    inside = {"role": "assistant", "content": f"{start}\n{_THOUGHT}\n{end}\n\n{_ANSWER}"}
    apart = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT, "reasoning": _THOUGHT}
    texts = []
    for turn in (inside, apart):
        chat = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]
        try:
            text = apply(chat, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of somebody else's
            logger.debug("meridian: the chat template cannot be tried: %s", error)
            return None
        if not isinstance(text, str) or _ANSWER not in text:
            return None
        texts.append(text)
    return not any(_THOUGHT in text for text in texts)
