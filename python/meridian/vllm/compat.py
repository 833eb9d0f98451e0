"""Which vLLM this works with."""

from __future__ import annotations

import re

SUPPORTED = ((0, 30), (0, 33))


def check_version(version: str) -> None:
    """Refuse a vLLM whose scheduler this was not written against: its seams are not a public interface.

    Raises:
        RuntimeError: names the version and what is supported.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release is None or not SUPPORTED[0] <= release <= SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise RuntimeError(f"vLLM {version} is not supported by this Meridian, expected {low} to {high}")
