"""Entry point `vllm.general_plugins`: what Meridian adds to every process of vLLM."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.meridian")


def install() -> None:
    """Add everything once; calling it again changes nothing. vLLM does not catch what a plugin raises, so it must not
    raise."""
    from meridian.vllm import relay, speculation

    speculation.install()
    try:
        relay.install()
    except Exception as why:
        logger.warning("meridian: no changes through vLLM's API server: %s", why)
