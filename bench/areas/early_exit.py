"""Early exit of thinking in the real vLLM engine, for the area of the budget slot: what the rules save and lose."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from meridian.vllm.bench import early_exit as scenario
from meridian.vllm.bench.child import Failed
from meridian.vllm.bench.exit_report import CLAIMED, NONE, markdown
from meridian.vllm.bench.exit_rules import FAMILIES
from meridian.vllm.bench.model import NoModel, reasoner_dir

from areas.common import RESULTS, ROOT, WORK, Bound, Figure, provenance

PAGE = ROOT / "docs" / "src" / "early-exit.md"
MARKERS = ("<!-- early-exit -->", "<!-- /early-exit -->")
SHARE = "share (95 % interval)"


def within_markers(page: str, text: str) -> str:
    """The page with ``text`` between its markers, in place of what was there."""
    start, end = MARKERS
    before, found, inner = page.partition(start)
    _, closed, after = inner.partition(end)
    if not found or not closed:
        sys.exit(f"error: {PAGE.relative_to(ROOT)} has no {start} markers")
    return f"{before}{start}\n{text}\n{end}{after}"


def keep(d: Mapping[str, Any]) -> None:
    """The document among the results; table and plot in the page."""
    source = provenance()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{scenario.NAME}.json").write_text(json.dumps({**d, **source}, indent=1, allow_nan=False) + "\n")
    picture = ""
    folder = WORK / scenario.NAME
    if scenario.write(d, folder, with_plot=True):
        shutil.copyfile(folder / f"{scenario.NAME}.svg", PAGE.with_suffix(".svg"))
        picture = f"![Accuracy against mean think tokens]({scenario.NAME}.svg)\n\n"
    measured = f"Measured {source['measured']} at {source['commit']} on {source['machine']}."
    PAGE.write_text(within_markers(PAGE.read_text(), f"{picture}{markdown(d)}\n\n{measured}"))


def figure(name: str, x: Mapping[str, float | None], bound: Bound | None = None) -> Figure:
    """A share with its interval; ends the program when it has no value."""
    value = x["value"]
    if value is None:
        sys.exit(f"error: {name}: there is no value")
    return Figure(name, value, SHARE, bound, x["low"], x["high"])


def figures(d: Mapping[str, Any]) -> Iterator[Figure]:
    """Every figure of one document."""
    settings = d["settings"]
    none = settings[NONE]
    yield figure("early exit: accuracy with no limit", none["accuracy"])
    tokens = none["tokens"]
    yield Figure(
        "early exit: think tokens with no limit", tokens["value"], "tokens", None, tokens["low"], tokens["high"]
    )
    for key, family in FAMILIES.items():
        s, claimed = settings[key], key == CLAIMED

        def bound(limit: float, held: bool = claimed) -> Bound | None:
            return Bound(limit, at_most=False) if held else None

        yield figure(f"early exit: {family.title}: think tokens saved", s["saving"], bound(0.5))
        yield figure(f"early exit: {family.title}: accuracy less that of no limit", s["difference"])
        low = s["difference"]["low"]
        if claimed and low is not None:
            name = f"early exit: {family.title}: the same, lower end of its interval"
            yield Figure(name, low, "share", bound(-0.01))
        name = f"early exit: {family.title}: saved against the cheapest fixed budget"
        yield figure(f"{name} of equal accuracy", s["saving_fixed"], bound(0.2))
        yield figure(f"{name} at most {100 * d['within']:g} point less accurate", s["saving_fixed_within"], bound(0.2))
        if s["probe_tokens"] and s["computed_saving"] is not None:
            name = f"early exit: {family.title}: tokens computed saved, probes counted"
            yield Figure(name, s["computed_saving"], "share")
        if s["wall_ratio"] is not None:
            yield Figure(f"early exit: {family.title}: wall time over that of no limit", s["wall_ratio"], "ratio")
    cost = d["overhead"]
    for name, key, unit in (
        ("probe tokens a generated token", "probe_tokens_per_generated_token", "tokens"),
        ("wall time of a token over that without probes", "wall_ratio", "ratio"),
    ):
        if cost[key] is not None:
            yield Figure(f"early exit: probing at every line, ending nothing: {name}", cost[key], unit)


def early_exit(problems: int = scenario.PROBLEMS, repeats: int = 1) -> Iterator[Figure]:
    """EAT with and without a guard, RPDI and patience against no limit and fixed budgets, thresholds from a split."""
    try:
        x = scenario.Experiment(reasoner_dir(), WORK / scenario.NAME, problems, repeats=repeats)
        d = scenario.experiment(x)
    except (Failed, NoModel) as e:
        sys.exit(f"error: {e}")
    keep(d)
    yield from figures(d)
