"""What is measured: an area a module, whose `PARTS` are its parts by name."""

from __future__ import annotations

from importlib import import_module

from checks.figures import Part

AREAS = ("setup", "outputs", "path", "measured", "levels", "thinking", "operations", "placement", "oneline", "book")
# What a part that is only a function is about; and those of them that are quick as they are, in seconds.
BUILD = ("Makefile", "scripts", "Cargo.lock", "host", "python", "docs/src", "README.md")
AS_THEY_ARE = {"wheel": 30, "docs": 15}


def parts_of(area: str) -> dict[str, Part]:
    """The parts of an area by name."""
    found = {}
    for name, part in import_module(f"checks.areas.{area}").PARTS.items():
        if not isinstance(part, Part):
            seconds = AS_THEY_ARE.get(name, 0)
            part = Part(part, BUILD, part if seconds else None, seconds)
        found[name] = part
    return found
