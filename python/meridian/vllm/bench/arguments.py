"""What the command lines of the benchmarks share: one-line errors, and kinds of values."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Errors are one line, as those of the rest of the `meridian` command."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message.removeprefix('argument ')}", file=sys.stderr)
        raise SystemExit(2)


def at_least_1(text: str) -> int:
    """A whole number, 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number, at least 1")
    return int(text)


def sizes(text: str) -> list[int]:
    """Whole numbers of 1 or more with commas between them."""
    return [at_least_1(part.strip()) for part in text.split(",")]
