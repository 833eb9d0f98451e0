"""What is measured: an area a module, whose `PARTS` are its parts by name."""

from __future__ import annotations

from importlib import import_module

from checks.figures import Part

AREAS = ("setup", "outputs", "path", "measured", "levels", "thinking", "operations", "placement", "oneline", "book")


def parts_of(area: str) -> dict[str, Part]:
    """The parts of an area by name."""
    return import_module(f"checks.areas.{area}").PARTS
