"""The real engine on the CPU through a day of a minute with a service level, for the area `levels`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from checks.areas.grid import DEFAULT, STOCK
from checks.figures import Figure, over_pairs, ranged
from checks.run import ROOT, WORK, authored, compared, meridian, recorded, say

# Requests of the simulator's check, but as a Poisson process: the course alone makes the burst.
WORKLOAD = ROOT / "checks" / "engine" / "fidelity.toml"
POISSON = "\n[arrivals]\ngap_cv = 1.0\n"
# Factors of what stock vLLM serves, and seconds. The burst leaves 9 s of work; 0.4 of the engine clears it in 23 s.
DAY, CALM = "0.6x10,1.6x15,0.6x35", "0.6x30"
SPEED_REQUESTS = 160
# In float32, outputs do not depend on the batch; in bfloat16, sums of another batch round differently.
ENGINE = ("--max-num-seqs", "32", "--dtype", "float32")
# A token of the prompt, the thinking and the answer may take so many times what it takes alone, about as in the default
# level on 7b-h100. Beside these, TTFO may take the allowance of so many tokens of thinking.
SLOWDOWN, BASE_TOKENS = 6.0, 25
# Steps of so many tokens are prompts but for a few percent.
PROMPT_TOKENS = 512
# Longer than the burst and the time that clears its backlog, 38 s.
LONGEST_WAIT_MS = 45_000.0
# The interpreter's memory is that of a new folder's `policy.toml`; a busy machine says nothing about a policy.
PYTHON_LIMITS = {"memory_mib": 128, "deadline_ms": 100}


@dataclass(frozen=True)
class Promised:
    """What stock vLLM serves in this engine, requests a second, and the level, as in `[service_levels]`."""

    rate: float
    ttfo_ms: float
    prompt_ms_per_token: float
    think_ms_per_token: float
    tpot_ms: float

    def due_ms(self, row: dict[str, Any]) -> float:
        """The longest TTFO. The marker is a token of thinking, as in `bench replay`."""
        thought = self.think_ms_per_token * (row["think_tokens"] + 1)
        return self.ttfo_ms + self.prompt_ms_per_token * row["prompt_tokens"] + thought

    def in_time(self, rows: list[dict[str, Any]]) -> float:
        """The share of requests that have the level."""

        def is_kept(row: dict[str, Any]) -> bool:
            tpot_ms = (row["e2e_ms"] - row["ttfo_ms"]) / max(1, row["output_tokens"] - 1)
            return row["ttfo_ms"] <= self.due_ms(row) and tpot_ms <= self.tpot_ms

        return fmean(map(is_kept, rows))

    def slo(self) -> tuple[str, ...]:
        """For `meridian bench replay`: the level."""
        level = {
            "ttfo-ms": self.ttfo_ms,
            "prompt-ms": self.prompt_ms_per_token,
            "think-ms": self.think_ms_per_token,
            "tpot-ms": self.tpot_ms,
        }
        return tuple(word for key, value in level.items() for word in (f"--slo-{key}", str(value)))

    def flags(self) -> tuple[str, ...]:
        """For `meridian bench vllm`: the level for every request, and what a policy in Python needs."""
        level = {key: value for key, value in vars(self).items() if key != "rate"}
        level |= {"longest_wait_ms": LONGEST_WAIT_MS, "default": "true"}
        settings = {f"service_levels.all.{key}": value for key, value in level.items()}
        settings |= {f"policy.dispatch.{key}": value for key, value in PYTHON_LIMITS.items()}
        return tuple(word for key, value in settings.items() for word in ("--set", f"{key}={value}"))


@dataclass(frozen=True)
class Ran:
    """A run of the real engine: where it is kept, what it recorded, its metrics."""

    path: str
    document: dict[str, Any]
    metrics: dict[str, float]


def engine(pairs: int) -> Iterator[Figure]:
    """The real engine on the CPU through a day of a minute: stock vLLM, Meridian with a level, and a policy in Python
    with the same level. Then a load of 0.6 throughout.

    Rate and level are multiples of what this engine serves, and of what a request takes alone in it. The offline bound
    is that of the engine as fitted to the pair's runs.
    """
    level, component = measured_level(), keeps_levels()
    python = component.name
    days, calms, mosts = [], [], []
    for pair in range(pairs):
        found = ran(f"levels-day-{pair}", pair, level, DAY, (STOCK, DEFAULT, str(component)))
        days.append(found)
        mosts.append(most_in_time(f"levels-day-{pair}", found.values(), level))
        calms.append(ran(f"levels-calm-{pair}", pair, level, CALM, (STOCK, DEFAULT)))
        shares = {name: round(level.in_time(of.document["rows"]), 3) for name, of in found.items()}
        say(f"  pair {pair + 1} of {pairs}: in time: {shares}, any scheduler at most {mosts[-1]:.3f}")
    yield Figure("engine: requests that stock vLLM serves", level.rate, "requests/s")
    yield Figure("engine: allowance of a thinking token", level.think_ms_per_token, "ms")
    yield ranged("engine: attainment that any scheduler could have, at most", mosts, "share")
    yield ranged("engine: attainment of stock", [level.in_time(of[STOCK].document["rows"]) for of in days], "share")
    for name, prefix in ((DEFAULT, "engine: "), (python, "engine, a policy in Python: ")):
        yield ranged(f"{prefix}attainment", [level.in_time(of[name].document["rows"]) for of in days], "share")
        late = []
        for of, most in zip(days, mosts, strict=True):
            ours, theirs = (most - level.in_time(of[which].document["rows"]) for which in (name, STOCK))
            # A day through which stock vLLM has nobody late has nothing to show.
            if theirs > 0:
                late.append(ours / theirs)
        yield over_pairs(f"{prefix}late requests beyond the offline bound, over stock's", late, "ratio", "<= 0.5")
        waits = [of[name].metrics["ttfo_p99_ms"] / LONGEST_WAIT_MS for of in days]
        yield over_pairs(f"{prefix}TTFO p99, of the longest wait", waits, "share", "<= 1.0")
        runs = [of for of in (*days, *calms) if name in of]
        sides = [tuple(of[which].document["outputs"] for which in (name, STOCK)) for of in runs]
        differ = sum(one != other for ours, theirs in sides for one, other in zip(ours, theirs, strict=True))
        count = sum(len(theirs) for _, theirs in sides)
        yield Figure(f"{prefix}outputs that differ from stock's", differ, f"of {count}", "<= 0")
        faults = sum(of[name].metrics["faults"] for of in runs)
        yield Figure(f"{prefix}faults of the policies", faults, "faults", "<= 0")
    decided = [of[python].metrics["decided_by_policy"] / of[python].metrics["decisions"] for of in days]
    yield over_pairs("engine, a policy in Python: decisions by it", decided, "share", ">= 1")
    for title, key, bound in (
        ("throughput", "throughput_tok_s", ">= 0.99"),
        ("attainment", "", ">= 0.99"),
        ("TTFT p99", "ttft_p99_ms", "<= 1.15"),
        ("output ITL p99", "itl_output_p99_ms", "<= 1.03"),
    ):
        values = []
        for of in calms:
            ours, theirs = (
                of[which].metrics[key] if key else level.in_time(of[which].document["rows"])
                for which in (DEFAULT, STOCK)
            )
            values.append(ours / theirs)
        yield over_pairs(f"engine, below capacity: {title} over stock's", values, "ratio", bound)


def ran(label: str, seed: int, level: Promised | None, course: str | None, policies: tuple[str, ...]) -> dict[str, Ran]:
    """The runs of these policies over the same requests, with every second seed from the last to the first. Without a
    course, all requests are there from the start. With MERIDIAN_REUSE_RUNS, runs that are there are not repeated."""
    results = WORK / label / f"{label}.csv.results.json"
    if not (os.environ.get("MERIDIAN_REUSE_RUNS") and results.exists()):
        workload, trace = WORK / f"{label}.toml", WORK / f"{label}.csv"
        text = WORKLOAD.read_text().replace("requests_per_s = 6.0", f"requests_per_s = {level.rate if level else 6.0}")
        workload.write_text(text + POISSON)
        length = ("--day", course) if course else ("--requests", str(SPEED_REQUESTS))
        meridian("bench", "generate", "--workload", workload, "--seed", str(seed + 1), *length, "--out", trace)
        order = policies[:: -1 if seed % 2 else 1]
        args = (*(level.flags() if level else ()), *(() if course else ("--at-once",)))
        named = (word for policy in order for word in ("--policy", policy))
        compared(label, "--trace", trace, *ENGINE, *args, *named)
    metrics = {run["policy"]: run["metrics"] for run in json.loads(results.read_text())["runs"]}
    found = {}
    for policy in (Path(policy).name for policy in policies):
        path, document = recorded(label, policy)
        found[policy] = Ran(str(path), document, metrics[policy])
    return found


def measured_level() -> Promised:
    """The level, by a run of stock vLLM with every request there from the start: at its end, one is left alone."""
    run = ran("levels-speed", 0, None, None, (STOCK,))[STOCK]
    rows, steps = run.document["rows"], run.document["steps"]
    work = list(zip(steps["ms"], steps["requests"], steps["tokens"], strict=True))
    pace_ms = round(SLOWDOWN * median(ms for ms, requests, tokens in work if requests == tokens == 1), 1)
    prompt_ms = SLOWDOWN * median(ms / tokens for ms, _, tokens in work if tokens >= PROMPT_TOKENS)
    return Promised(
        rate=round(len(rows) / run.document["makespan_s"], 2),
        ttfo_ms=BASE_TOKENS * pace_ms,
        prompt_ms_per_token=round(prompt_ms, 2),
        think_ms_per_token=pace_ms,
        tpot_ms=pace_ms,
    )


def keeps_levels() -> Path:
    """The policy in Python as a component."""
    name = "keeps-levels"
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    authored("policy", "new", name, "--lang", "python", cwd=WORK)
    shutil.copy(ROOT / "checks" / "engine" / "policies" / "keeps_levels.py", folder / "policy.py")
    authored("policy", "build", name, "--out", WORK, cwd=WORK)
    return WORK / f"{name}.wasm"


def most_in_time(label: str, runs: Iterable[Ran], level: Promised) -> float:
    """The share of these requests that any scheduler could have in time, at most, in the engine that is fitted to these
    runs (bench/src/bound.rs)."""
    fitted = WORK / f"{label}.toml"
    meridian("bench", "calibrate", *(of.path for of in runs), "--out", fitted)
    trace = ("--trace", WORK / f"{label}.csv", "--engine", fitted, "--promise")
    found = meridian("bench", "replay", *trace, *level.slo())
    return found["most_in_time"]
