"""Measures one thing on the real engine and prints what it found as a JSON object, the last line.

    python -m checks.engine                                       # what there is, with the options
    python -m checks.engine forced_ends requests=1000 scheduling=async marker="so much for that"

A module may also be one with a dotted name. Its function `measure` takes the options; a value is JSON where it can be
read as such, else a text.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from meridian.vllm.bench.run import ENVIRONMENT


def value(text: str) -> Any:
    """An option's value."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main() -> int:
    """Command line."""
    os.environ.update(ENVIRONMENT)
    if len(sys.argv) < 2:
        for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
            if not found.name.startswith("_"):
                measure = getattr(import_module(f"checks.engine.{found.name}"), "measure", None)
                if measure is not None:
                    print(f"{found.name}{inspect.signature(measure)}")
        return 0
    name, *given = sys.argv[1:]
    options = {key: value(text) for key, _, text in (word.partition("=") for word in given)}
    print(json.dumps(import_module(name if "." in name else f"checks.engine.{name}").measure(**options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
