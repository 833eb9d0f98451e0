"""How often a step of vLLM's scheduler under Meridian's defaults goes from Python into the native module.

A profiler counts calls of native methods and functions, and a tracer counts reads of native properties in the code of
the package. FILE is a JSON object: counts by name, means of steps in which no request ended or came, and of the others.
The package `meridian` is the one that Python finds.
"""

from __future__ import annotations

import dis
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, GetSetDescriptorType
from typing import Any

from checks.engine.house_load import ENVIRONMENT, Load

STEPS, WARM_UP_STEPS = 300, 600


class Crossings:
    """Counts what runs between `begin` and `end`."""

    def __init__(self) -> None:
        import meridian
        from meridian import _native

        self.counts: Counter[str] = Counter()
        self._folder = str(Path(meridian.__file__ or "").parent)
        self._types = {kind for kind in vars(_native).values() if isinstance(kind, type)}
        self._functions = {id(one) for one in vars(_native).values() if isinstance(one, BuiltinFunctionType)}
        # vLLM's outputs have a field of the same name.
        self._properties = {
            name
            for kind in self._types
            for name, value in vars(kind).items()
            if isinstance(value, GetSetDescriptorType) and name != "outputs"
        }
        self._instructions: dict[CodeType, dict[int, str]] = {}

    def _native_type(self, value: object) -> bool:
        return type(value) in self._types

    def called(self, frame: FrameType, event: str, called: Any) -> None:
        """Of `sys.setprofile`."""
        if event != "c_call":
            return
        owner = getattr(called, "__self__", None)
        if self._native_type(owner) or id(called) in self._functions:
            self.counts[f"{called.__qualname__}()"] += 1

    def traced(self, frame: FrameType, event: str, _: Any) -> Any:
        """Of `sys.settrace`: only the package's own code is looked at."""
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if frame.f_code not in self._instructions:
                reads = (x for x in dis.get_instructions(frame.f_code) if x.opname == "LOAD_ATTR")
                self._instructions[frame.f_code] = {x.offset: x.argval for x in reads}
        elif event == "opcode":
            name = self._instructions[frame.f_code].get(frame.f_lasti)
            if name in self._properties:
                self.counts[f".{name}"] += 1
        return self.traced

    def begin(self) -> None:
        sys.setprofile(self.called)
        sys.settrace(self.traced)

    def end(self) -> Counter[str]:
        sys.settrace(None)
        sys.setprofile(None)
        counts, self.counts = self.counts, Counter()
        return counts


def measure(model: str, running: int = 64, contestant: str = "default") -> dict[str, dict[str, float]]:
    """Native calls and reads of a steady step, and of one in which a request ends or comes."""
    os.environ |= ENVIRONMENT
    # Both run folders and configuration are nobody's.
    os.chdir(tempfile.mkdtemp())
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="m", dir="/tmp")
    load = Load(contestant, running, model, 1)
    for _ in range(WARM_UP_STEPS):
        load.step()
    crossings = Crossings()
    counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    steps: Counter[bool] = Counter()
    for _ in range(STEPS):
        crossings.begin()
        load.step()
        found = crossings.end()
        counts[load.turnover[-1]].update(found)
        steps[load.turnover[-1]] += 1
    return {
        name: {what: count / steps[is_turnover] for what, count in sorted(counts[is_turnover].items())}
        for name, is_turnover in (("steady", False), ("turnover", True))
    }
