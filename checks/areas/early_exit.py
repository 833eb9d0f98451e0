"""Early exit of thinking in the real vLLM engine, for the area `budget`: what the rules save and lose."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checks.figures import Figure
from checks.report import write_between
from checks.run import DOCS, POLICIES, RESULTS, ROOT, WORK, authored, bench_vllm, provenance

NAME = "early-exit"  # of the scenario, and of its files
# The model errs in one of twenty answers: with so many problems the interval of a difference is within a point.
PROBLEMS = 6000
# Settings by the names that the document has for them.
NONE, CLAIMED = "none", "eat"


def keep(d: Mapping[str, Any]) -> None:
    """The document among the results; table and plot in the page."""
    source, page = provenance(), DOCS / "results.md"
    (RESULTS / f"{NAME}.json").write_text(json.dumps({**d, **source}, indent=1, allow_nan=False) + "\n")
    folder = WORK / NAME
    shutil.copyfile(folder / f"{NAME}.svg", DOCS / f"{NAME}.svg")
    picture = f"![Accuracy against mean think tokens]({NAME}.svg)"
    measured = f"Measured {source['measured']} at {source['commit']} on {source['machine']}."
    write_between(page, NAME, [picture, "", (folder / f"{NAME}.md").read_text().rstrip(), "", measured])


def deer_components() -> dict[str, Path]:
    """DEER as a component, by language: the shipped one in Rust, and one in C that is built here."""
    folder = WORK / "deer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    authored("policy", "new", "deer-c", "--lang", "c", "--slot", "budget", cwd=folder)
    shutil.copyfile(ROOT / "checks" / "engine" / "deer.c", folder / "deer-c" / "policy.c")
    authored("policy", "build", "deer-c", "--out", ".", cwd=folder)
    return {"Rust": POLICIES / "deer.wasm", "C": folder / "deer-c.wasm"}


def share(name: str, x: Mapping[str, float | None], bound: str | None = None) -> Figure:
    """A share with its interval; ends the program when it has no value."""
    if x["value"] is None:
        sys.exit(f"error: {name}: there is no value")
    return Figure(name, x["value"], "share (95 % interval)", bound, x["low"], x["high"])


def figures(d: Mapping[str, Any]) -> Iterator[Figure]:
    """Every figure of one document."""
    settings = d["settings"]
    tokens = settings[NONE]["tokens"]
    yield share("early exit: accuracy with no limit", settings[NONE]["accuracy"])
    name = "early exit: think tokens with no limit"
    yield Figure(name, tokens["value"], "tokens", None, tokens["low"], tokens["high"])
    for key in d["tuning"]["choices"]:
        s, rule = settings[key], f"early exit: {settings[key]['title']}"
        half, fifth, point = (">= 0.5", ">= 0.2", ">= -0.01") if key == CLAIMED else (None, None, None)
        yield share(f"{rule}: think tokens saved", s["saving"], half)
        yield share(f"{rule}: accuracy less that of no limit", s["difference"])
        if key == CLAIMED and s["difference"]["low"] is not None:
            yield Figure(f"{rule}: the same, lower end of its interval", s["difference"]["low"], "share", point)
        name = f"{rule}: saved against the cheapest fixed budget"
        yield share(f"{name} of equal accuracy", s["saving_fixed"], fifth)
        yield share(f"{name} at most {100 * d['within']:g} point less accurate", s["saving_fixed_within"], fifth)
        if s["probe_tokens"] and s["computed_saving"] is not None:
            yield Figure(f"{rule}: tokens computed saved, probes counted", s["computed_saving"], "share")
        if s["wall_ratio"] is not None:
            yield Figure(f"{rule}: wall time over that of no limit", s["wall_ratio"], "ratio")
    for name, key, unit in (
        ("probe tokens a generated token", "probe_tokens_per_generated_token", "tokens"),
        ("wall time of a token over that without probes", "wall_ratio", "ratio"),
    ):
        if d["overhead"][key] is not None:
            name = f"early exit: probing at every line, ending nothing: {name}"
            yield Figure(name, d["overhead"][key], unit)


def early_exit(_: int) -> Iterator[Figure]:
    """Every rule against no limit and fixed budgets, thresholds from a split."""
    components = [f"--component={label}={file}" for label, file in deer_components().items()]
    d = bench_vllm(NAME, "--scenario", NAME, "--problems", str(PROBLEMS), *components)
    if d.get("scenario") != NAME:
        sys.exit(f"error: {NAME}: {d.get('error', 'see above')}")
    keep(d)
    yield from figures(d)
