"""Many engines: one swap for all engines of a server, staged roll-outs, experiments and predictions."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

from checks.areas.rollout_kills import kills
from checks.figures import Figure, Part, Row, ranged, read, table
from checks.run import POLICIES, WORK, engine, example

RUNS = 20
# Of swaps between equal policies in two engines behind two API servers, while they serve.
NAME = "two engines, two API servers"
WAYS = {"ctl": "ctl --all", "route": "the API server's route, two clients at once"}
SWAPS = (
    Row("{by}", "swaps", "swaps", ">= 200"),
    Row("{by}: engines on different versions afterwards", "split", "times", "<= 0"),
    Row("{by}: not done by every engine", "failures", "swaps", "<= 0"),
    Row("{by}: time of one, median", lambda m: median(m["ms"]), "ms"),
)
SERVED = (
    Row(f"{NAME}: engines", "engines", "engines", ">= 2"),
    Row(f"{NAME}: requests served meanwhile", "requests", "requests", ">= 2000"),
    Row(f"{NAME}: fewest by one API server", lambda m: min(m["served"]), "requests", ">= 1"),
    Row(f"{NAME}: requests lost", "lost", "requests", "<= 0"),
    Row(f"{NAME}: outputs that differ from those before the swaps", "differing", "requests", "<= 0"),
    Row(f"{NAME}: faults", "faults", "faults", "<= 0"),
    Row(f"{NAME}: engines that gave up Meridian", "gave_up", "engines", "<= 0"),
)


def dp(_: int) -> Iterator[Figure]:
    """One swap reaches every engine of one `vllm serve`."""
    found = engine("data_parallel", component=POLICIES / "output-first.wasm", requests=2000, swaps=200)
    for way, swapped in found["ways"].items():
        yield from read({**swapped, "by": f"{NAME}: swaps by {WAYS[way]}"}, SWAPS)
    yield from read(found, SERVED)


def simulated(program: str, what: str, runs: int) -> list[dict[str, Any]]:
    """The lines of an example about simulated engines."""
    folder = WORK / program
    folder.mkdir(parents=True, exist_ok=True)
    return example(program, what, str(runs), folder)


def experiment(_: int) -> Iterator[Figure]:
    """Twenty experiments with a known difference of 10 %, and twenty without any."""
    known, same = (simulated("experiment_figures", what, RUNS) for what in ("known", "same"))
    worse = sum(line["finding"]["verdict"] == "worse" for line in known)
    yield Figure("experiment: a difference of 10 % found, of 20", worse, "runs", ">= 18")
    ratios = [line["finding"]["ratio"]["ratio"] for line in known]
    yield ranged("experiment: the difference as measured (lowest and highest run)", ratios, "ratio")
    claimed = sum(line["finding"]["verdict"] in ("better", "worse") for line in same)
    name = "experiment: no difference claimed between equal policies, of 20"
    yield Figure(name, RUNS - claimed, "runs", ">= 18")
    restored = sum(line["restored"] for line in known + same)
    yield Figure("experiment: the old policy decides in the end, of 40", restored, "runs", f">= {2 * RUNS}")
    yield Figure("experiment: simulated time of one", median(line["seconds"] for line in known) / 60, "min")
    yield Figure("experiment: share of the time cut off as warm-up", known[0]["cut"], "share")


HEADLINES = {
    "output_itl_mean": "mean output ITL",
    "output_itl_p99": "p99 output ITL",
    "ttft_mean": "mean TTFT",
    "ttfo_mean": "mean TTFO",
}


def predict(_: int) -> Iterator[Figure]:
    """Predictions from a recording of ten minutes, against ten minutes of other traffic in the same engine."""
    lines = [line for line in simulated("experiment_figures", "predict", 5) if line["predicted"]]
    for metric, title in HEADLINES.items():
        name, of = f"prediction: {title}", [line for line in lines if line["metric"] == metric]
        errors = [100 * abs(line["predicted"]["ratio"] / line["outcome"] - 1) for line in of]
        yield ranged(f"{name}, new over old: off by (median, lowest and highest)", errors, "%")
        held = sum(line["predicted"]["low"] <= line["outcome"] <= line["predicted"]["high"] for line in of)
        yield Figure(f"{name}: outcomes inside the 95 % interval", held / len(of), "share", ">= 0.9")
        off = [100 * abs(line["simulated"] / line["recorded"] - 1) for line in of if line["recorded"]]
        if off:
            yield Figure(f"{name} of the old policy, simulated, off the recorded", median(off), "%")
    yield Figure("prediction: predictions held against an outcome", len(lines), "ratios")


BAD = {"slow": "a policy that takes its deadline in every step", "starves": "a policy that starves output"}


def rollout(_: int) -> Iterator[Figure]:
    """Twenty roll-outs of each kind of policy."""
    for what, title in BAD.items():
        name, lines = f"roll-out: {title}", simulated("rollout_figures", what, RUNS)
        back = [line for line in lines if line["outcome"] == "rolled-back" and "exceeded" in line["why"]]
        in_time = sum(line["looks"] <= 3 for line in back)
        yield Figure(f"{name}: sent back by a guard in at most 3 intervals, of 20", in_time, "runs", f">= {RUNS}")
        yield ranged(f"{name}: intervals until it was sent back", [line["looks"] for line in lines], "intervals")
        wrong = sum(line["engines"] - line["right"] for line in lines)
        yield Figure(f"{name}: engines with another policy in the end", wrong, "engines", "<= 0")
    equal = simulated("rollout_figures", "equal", RUNS)
    kept = sum(line["outcome"] != "rolled-back" for line in equal)
    yield Figure("roll-out: an equal policy not sent back, of 20", kept, "runs", f">= {RUNS}")
    completed = sum(line["outcome"] == "completed" for line in equal)
    yield Figure("roll-out: an equal policy on every engine in the end, of 20", completed, "runs")
    minutes = median(line["seconds"] for line in equal) / 60
    yield Figure("roll-out: simulated time of a complete one, holds of a minute", minutes, "min")


PARTS: dict[str, Part] = {
    "dp": dp,
    "experiment": experiment,
    "predict": predict,
    "rollout": rollout,
    # What a roll-out over 1,000 engines costs.
    "many": table(
        lambda _: simulated("rollout_figures", "many", 1),
        Row("roll-out of 1,000 engines: engines with the new policy in the end", "right", "engines"),
        Row("roll-out of 1,000 engines: calls to engines", "messages", "calls"),
        Row("roll-out of 1,000 engines: calls to each engine", lambda m: m["messages"] / m["engines"], "calls"),
        Row("roll-out of 1,000 engines: duration, four holds of a minute", "seconds", "s"),
        Row("roll-out of 1,000 engines: the controller's own time", "own_s", "s"),
        Row("roll-out of 1,000 engines: state file", lambda m: m["state_bytes"] / 1e6, "MB"),
        Row("roll-out of 1,000 engines: measurements", lambda m: m["measured_bytes"] / 1e6, "MB"),
    ),
    "kills": kills,
}
