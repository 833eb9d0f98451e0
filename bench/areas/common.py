"""What the areas share: figures, their bounds, where a measurement comes from."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from meridian.bench import child
from meridian.bench.model import NoModel, model_dir

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
WORK = ROOT / "target" / "figures"


def rounded(value: float) -> float:
    """Four decimals, or four digits of what is smaller."""
    return round(value, 4) if abs(value) >= 1e-2 else float(f"{value:.4g}")


@dataclass(frozen=True)
class Bound:
    """What a figure is held against; `at_most` (`below`: and not equal to) or at least `limit`."""

    limit: float
    at_most: bool = True
    below: bool = False

    def holds(self, value: float) -> bool:
        if self.below:
            return value < self.limit
        return value <= self.limit if self.at_most else value >= self.limit

    def __str__(self) -> str:
        return f"{'<' if self.below else '<=' if self.at_most else '>='} {self.limit:g}"


@dataclass(frozen=True)
class Figure:
    """One measured figure; without a bound it is printed for the reader's judgement."""

    name: str
    value: float
    unit: str
    bound: Bound | None = None
    low: float | None = None
    high: float | None = None

    def record(self, area: str, part: str) -> dict[str, Any]:
        line: dict[str, Any] = {
            "area": area,
            "name": self.name,
            "value": rounded(self.value),
            "unit": self.unit,
            "bound": str(self.bound) if self.bound else None,
            "holds": self.bound.holds(self.value) if self.bound else None,
            "command": f"make figures ONLY={area} PART={part}",
        }
        if self.low is not None and self.high is not None:
            line |= {"low": rounded(self.low), "high": rounded(self.high)}
        return line


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def over_pairs(name: str, ratios: list[float], unit: str, bound: Bound | None = None) -> Figure:
    """Median and quartiles of one figure over several pairs of runs."""
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return Figure(name, median(ratios), unit, bound, low, high)


def model() -> str:
    """Folder of the model that every engine run uses."""
    try:
        return str(model_dir())
    except NoModel as e:
        sys.exit(f"error: {e}")


def engine_run(label: str, *args: str) -> dict[str, Any]:
    """One run of the real engine in a process of its own; returns its document."""
    WORK.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        document = child.engine_run(WORK / label, label, ["--model", model(), *args])
    except child.Failed as e:
        sys.exit(f"error: {e}")
    say(f"  {label}: {time.monotonic() - started:.0f} s")
    return document


def provenance() -> dict[str, str]:
    """Commit and machine of a measurement."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    # Results of this very run do not make the tree another one.
    changed = [line for line in git("status", "--porcelain").splitlines() if "bench/results/" not in line]
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else "unknown"
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else ""),
        "machine": f"{os.cpu_count()} cores of {cpu}",
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
    }
