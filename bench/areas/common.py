"""What the areas share: figures, their bounds, where a measurement comes from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

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


def bench_vllm(label: str, *args: str) -> dict[str, Any]:
    """`meridian bench vllm` with these arguments: its JSON object. Every run's rows stay in a folder of that name."""
    say(f"  {label}: meridian bench vllm {' '.join(args)}")
    command = [sys.executable, "-m", "meridian._cli", "--json", "bench", "vllm", "--out", str(WORK / label), *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    # 1 is also the code of runs in which a policy faulted: who asks judges how often.
    if done.returncode > 1 or not done.stdout.startswith("{"):
        sys.exit(f"error: {label}: {done.stdout.strip()[-2000:] or 'see above'}")
    return json.loads(done.stdout)


def compared(label: str, *args: str) -> list[dict[str, Any]]:
    """The comparisons of `meridian bench vllm` with these arguments."""
    said = bench_vllm(label, *args)
    if "comparisons" not in said:
        sys.exit(f"error: {label}: {said.get('error', 'see above')}")
    return said["comparisons"]


def metrics_of(comparison: dict[str, Any], policy: str) -> list[dict[str, Any]]:
    """The metrics of a policy's runs, a seed each."""
    return [run["metrics"] for run in comparison["runs"] if run["policy"] == policy]


def recorded(label: str, policy: str) -> tuple[Path, dict[str, Any]]:
    """What the one run of a policy under that label recorded, and its file."""
    found = [p for p in (WORK / label).glob(f"*-{policy}.json") if not p.name.endswith(".job.json")]
    if len(found) != 1:
        sys.exit(f"error: {label}: {len(found)} recorded runs of {policy} in {WORK / label}, expected one")
    (path,) = found
    return path, json.loads(path.read_text())


def seeds(count: int) -> str:
    """So many seeds, for the command line."""
    return ",".join(str(i + 1) for i in range(count))


def provenance() -> dict[str, str]:
    """Commit and machine of a measurement."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    # Results of this very run, and the tables that it writes, do not make the tree another one.
    results = ("bench/results/", "docs/src/", "README.md")
    paths = [line.split(maxsplit=1)[1] for line in git("status", "--porcelain").splitlines()]
    changed = [path for path in paths if not path.startswith(results)]
    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else "unknown"
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else ""),
        "machine": f"{os.cpu_count()} cores of {cpu}",
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
    }
