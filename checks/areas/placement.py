"""Placement over data-parallel ranks; no parts yet."""

from checks.figures import Part

PARTS: dict[str, Part] = {}
