"""Entry point `vllm.general_plugins`: what Meridian adds to every process of vLLM."""

from __future__ import annotations

import logging
from importlib import import_module

logger = logging.getLogger("vllm.meridian")

# Modules of this package whose `install` adds something, each with the effect of its failure.
_PARTS = {
    "speculation": "no thinking budgets with speculative decoding",
    "relay": "no changes through vLLM's API server",
    "answers": "a response of several choices has the report of one",
    "stops": "stop strings bind in thinking too",
    "refusals": "the stream of a refused request ends without a reason",
    "limits": "no limit of thinking in beam search, under masks and after tools of the server",
}


def install() -> None:
    """Add everything once; calling it again changes nothing. vLLM does not catch what a plugin raises, so it must not
    raise."""
    for part, without in _PARTS.items():
        try:
            import_module(f"meridian.vllm.{part}").install()
        except Exception as why:
            logger.warning("meridian: %s: %s", without, why)
