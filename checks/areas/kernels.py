"""The CUDA kernels: what they answer on the emulated device. `make gpu` measures them on a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from checks.figures import Figure, Part
from checks.gpu.answers import check
from checks.gpu.driver import Failed, Kernels


def emulated(_: int) -> Iterator[Figure]:
    """The kernels' own text run on the CPU, thread by thread, against float64."""
    import torch

    for found in check(Kernels.emulated(torch), seed=20261122, small=True):
        yield Figure(f"emulated on the CPU: {found['name']}", found["value"], found["unit"], found["bound"])


def or_end(part: Part) -> Part:
    """The part; ends the program with what a compiler or the driver says."""

    def run(pairs: int) -> Iterator[Figure]:
        try:
            yield from part(pairs)
        except Failed as why:
            sys.exit(f"error: {why}")

    return run


PARTS: dict[str, Part] = {"emulated": or_end(emulated)}
