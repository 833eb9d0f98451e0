"""Experiments and predictions, on simulated engines: whether a known difference is found, whether none is claimed where
there is none, and how near a prediction is to what other traffic shows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from areas.common import ROOT, WORK, Bound, Figure, say

EXAMPLE = ROOT / "target" / "release" / "examples" / "experiment_figures"
RUNS = 20
ENOUGH = 18
PREDICTED_RUNS = 5
HEADLINES = {
    "output_itl_mean": "mean output ITL",
    "output_itl_p99": "p99 output ITL",
    "ttft_mean": "mean TTFT",
    "ttfo_mean": "mean TTFO",
}


def measured(what: str, runs: int) -> list[dict[str, Any]]:
    """The lines that the example prints."""
    folder = WORK / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["cargo", "build", "--release", "--locked", "--workspace", "--example", EXAMPLE.name],
        cwd=ROOT,
        check=True,
    )
    say(f"  experiment: {what}, {runs} runs")
    done = subprocess.run([EXAMPLE, what, str(runs), str(folder)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: {EXAMPLE.name} {what}: failed, see above")
    return [json.loads(line) for line in done.stdout.splitlines()]


def experiment(_pairs: int) -> Iterator[Figure]:
    """Twenty experiments with a known difference of 10 %, and twenty without any."""
    known, same = measured("known", RUNS), measured("same", RUNS)
    found = [line["finding"] for line in known]
    worse = sum(finding["verdict"] == "worse" for finding in found)
    yield Figure("experiment: a difference of 10 % found, of 20", worse, "runs", Bound(ENOUGH, at_most=False))
    ratios = sorted(finding["ratio"]["ratio"] for finding in found)
    yield Figure(
        "experiment: the difference as measured (lowest and highest run)",
        median(ratios),
        "ratio",
        low=ratios[0],
        high=ratios[-1],
    )
    claimed = sum(line["finding"]["verdict"] in ("better", "worse") for line in same)
    yield Figure(
        "experiment: no difference claimed between equal policies, of 20",
        RUNS - claimed,
        "runs",
        Bound(ENOUGH, at_most=False),
    )
    restored = sum(line["restored"] for line in known + same)
    yield Figure(
        "experiment: the old policy decides in the end, of 40", restored, "runs", Bound(2 * RUNS, at_most=False)
    )
    yield Figure("experiment: simulated time of one", median(line["seconds"] for line in known) / 60, "min")
    yield Figure("experiment: share of the time cut off as warm-up", known[0]["cut"], "share")


def predict(_pairs: int) -> Iterator[Figure]:
    """Predictions from a recording of ten minutes, against ten minutes of other traffic in the same engine."""
    lines = measured("predict", PREDICTED_RUNS)
    lines = [line for line in lines if line["predicted"]]
    for metric, name in HEADLINES.items():
        of = [line for line in lines if line["metric"] == metric]
        errors = sorted(abs(line["predicted"]["ratio"] / line["outcome"] - 1) for line in of)
        held = sum(line["predicted"]["low"] <= line["outcome"] <= line["predicted"]["high"] for line in of)
        yield Figure(
            f"prediction: {name}, new over old: off by (median, lowest and highest)",
            100 * median(errors),
            "%",
            low=100 * errors[0],
            high=100 * errors[-1],
        )
        yield Figure(
            f"prediction: {name}: outcomes inside the 95 % interval", held / len(of), "share", Bound(0.9, at_most=False)
        )
        off = [abs(line["simulated"] / line["recorded"] - 1) for line in of if line["recorded"]]
        if off:
            yield Figure(f"prediction: {name} of the old policy, simulated, off the recorded", 100 * median(off), "%")
    yield Figure("prediction: predictions held against an outcome", len(lines), "ratios")


PARTS = {"experiment": experiment, "predict": predict}
