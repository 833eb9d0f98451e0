"""Thinking: forced endings are exact, early exit saves tokens, and kernels measure entropies."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from checks.figures import Figure, Part
from checks.gpu.answers import check
from checks.gpu.driver import Failed, Kernels
from checks.report import write_between
from checks.run import DOCS, POLICIES, RESULTS, ROOT, WORK, authored, bench_vllm, engine, example, provenance, say

REQUESTS = 1000
# The bundled model has one token for its end marker; a text of several shows the others.
MARKERS = ("</think>", "so much for that")
# Scheduling and drafts. vLLM has no asynchronous scheduling with n-grams on a CPU.
WAYS = (("sync", None), ("async", None), ("sync", "ngram"), ("sync", "draft"), ("async", "draft"))


def forced(_: int) -> Iterator[Figure]:
    """Endings in every way, with each marker; with drafts also inside them."""
    for scheduling, drafts in WAYS:
        for marker in MARKERS:
            yield from ended(scheduling, drafts, marker, REQUESTS)


def ended(scheduling: str, drafts: str | None, marker: str, requests: int) -> Iterator[Figure]:
    """Requests of every kind, each of which must end its thinking at a known token."""
    found = engine("forced_ends", requests=requests, marker=marker, scheduling=scheduling, speculate=drafts)
    for wrong in found["wrong"]:
        say(f"    wrong: {wrong}")
    where = f"{drafts}, {scheduling}" if drafts else scheduling
    what = f"forced endings, {where}, marker of {found['marker_tokens']}"
    yield Figure(f"{what}: requests that end at the token", found["exact"], f"of {requests:,}", f">= {requests}")
    yield Figure(f"{what}: tokens missed", found["missed"], "tokens", "<= 0")
    if drafts:
        accepted = found["accepted"] / found["proposed"]
        yield Figure(f"{what}: drafts accepted", accepted, "of those proposed")
    else:
        yield Figure(f"{what}: preemptions", found["preemptions"], "preemptions", ">= 1")


def cpu_kernels(_: int) -> Iterator[Figure]:
    """The entropy of rows against a pass that only reads them, in one run."""
    for line in example("entropy_over_sum"):
        # Every instruction set that the machine has; the bound is on the one it uses, for what vLLM samples from.
        bound = "<= 1.3" if line.get("best") and ": f32" in line["name"] else None
        yield Figure(f"CPU {line['name']}", line["value"], line["unit"], bound)


def emulated(_: int) -> Iterator[Figure]:
    """The CUDA kernels' own text run on the CPU, thread by thread, against float64."""
    import torch

    try:
        for found in check(Kernels.emulated(torch), seed=20261122, small=True):
            yield Figure(f"emulated on the CPU: {found['name']}", found["value"], found["unit"], found["bound"])
    except Failed as why:
        sys.exit(f"error: {why}")


NAME = "early-exit"  # of the scenario, and of its files
# The model errs in one of twenty answers: with so many problems the interval of a difference is within a point.
PROBLEMS = 6000
# The problems of the quick form, and those that its thresholds are chosen on.
QUICK_PROBLEMS = ("--problems", "200", "--tune", "100", "--budgets", "60", "--no-plot")
# Settings by the names that the document has for them.
NONE, CLAIMED = "none", "eat"


def early_exit(_: int) -> Iterator[Figure]:
    """Every rule against no limit and fixed budgets, thresholds from a split."""
    components = [f"--component={label}={file}" for label, file in deer_components().items()]
    document = exits(NAME, "--problems", str(PROBLEMS), *components)
    keep(document)
    yield from exit_figures(document)


def early_exit_quick(_: int) -> Iterator[Figure]:
    """The savings on a few problems; they are too few for accuracies and intervals."""
    settings = exits(f"{NAME}-quick", *QUICK_PROBLEMS)
    for key in settings["tuning"]["choices"]:
        found = settings["settings"][key]
        yield share(
            f"early exit: {found['title']}: think tokens saved", found["saving"], HALF if key == CLAIMED else None
        )


def exits(label: str, *args: str) -> dict[str, Any]:
    """The document of the scenario."""
    document = bench_vllm(label, "--scenario", NAME, *args)
    if document.get("scenario") != NAME:
        sys.exit(f"error: {label}: {document.get('error', 'see above')}")
    return document


def keep(document: Mapping[str, Any]) -> None:
    """The document among the results; table and plot in the page."""
    source, page = provenance(), DOCS / "results.md"
    (RESULTS / f"{NAME}.json").write_text(json.dumps({**document, **source}, indent=1, allow_nan=False) + "\n")
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


HALF, FIFTH, POINT = ">= 0.5", ">= 0.2", ">= -0.01"


def share(name: str, x: Mapping[str, float | None], bound: str | None = None) -> Figure:
    """A share with its interval; ends the part when it has no value."""
    if x["value"] is None:
        sys.exit(f"error: {name}: there is no value")
    return Figure(name, x["value"], "share (95 % interval)", bound, x["low"], x["high"])


def exit_figures(d: Mapping[str, Any]) -> Iterator[Figure]:
    """Every figure of one document."""
    settings = d["settings"]
    tokens = settings[NONE]["tokens"]
    yield share("early exit: accuracy with no limit", settings[NONE]["accuracy"])
    name = "early exit: think tokens with no limit"
    yield Figure(name, tokens["value"], "tokens", None, tokens["low"], tokens["high"])
    for key in d["tuning"]["choices"]:
        s, rule = settings[key], f"early exit: {settings[key]['title']}"
        half, fifth, point = (HALF, FIFTH, POINT) if key == CLAIMED else (None, None, None)
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


ENDING = ("host/core/src/budget", "host/core/src/phase*", "python/meridian/vllm", "python/src")
RULES = ("host/core/src/budget", "policies/shipped/src", "python/meridian/vllm", "bench/src/exit")

PARTS: dict[str, Part] = {
    "forced": Part(forced, ENDING, lambda _: ended("async", None, MARKERS[1], 200), 50),
    "early-exit": Part(early_exit, RULES, early_exit_quick, 240),
    "cpu-kernels": Part(cpu_kernels, ("kernels/src/cpu",), cpu_kernels, 15),
    "cuda-kernels": Part(emulated, ("kernels/cuda",), emulated, 35),
}
