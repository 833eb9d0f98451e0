"""Early exit of thinking in the real vLLM engine, for the area of the budget slot: what the rules save and lose."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areas.common import RESULTS, ROOT, WORK, Bound, Figure, bench_vllm, provenance

NAME = "early-exit"  # of the scenario, and of its files
PAGE = ROOT / "docs" / "src" / f"{NAME}.md"
MARKERS = (f"<!-- {NAME} -->", f"<!-- /{NAME} -->")
SHARE = "share (95 % interval)"
# Settings by the names that the document has for them.
NONE, CLAIMED = "none", "eat"


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
    (RESULTS / f"{NAME}.json").write_text(json.dumps({**d, **source}, indent=1, allow_nan=False) + "\n")
    folder = WORK / NAME
    shutil.copyfile(folder / f"{NAME}.svg", PAGE.with_suffix(".svg"))
    picture = f"![Accuracy against mean think tokens]({NAME}.svg)"
    measured = f"Measured {source['measured']} at {source['commit']} on {source['machine']}."
    table = (folder / f"{NAME}.md").read_text().rstrip()
    PAGE.write_text(within_markers(PAGE.read_text(), f"{picture}\n\n{table}\n\n{measured}"))


def deer_components() -> dict[str, Path]:
    """DEER as a component, by language: the shipped one in Rust, and one in C that is built here."""
    folder = WORK / "deer"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = f'. "$({ROOT}/scripts/setup-wasm32.sh)"; exec {ROOT}/target/release/meridian "$@"'

    def meridian(*args: str) -> None:
        subprocess.run(("bash", "-c", command, "bash", *args), cwd=folder, check=True, stdout=sys.stderr)

    meridian("policy", "new", "deer-c", "--lang", "c", "--slot", "budget")
    shutil.copyfile(ROOT / "bench" / "vllm" / "deer.c", folder / "deer-c" / "policy.c")
    meridian("policy", "build", "deer-c", "--out", ".")
    return {"Rust": ROOT / "target" / "policies" / "deer.wasm", "C": folder / "deer-c.wasm"}


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
    for key in d["tuning"]["choices"]:
        s, claimed = settings[key], key == CLAIMED
        rule = f"early exit: {s['title']}"

        def bound(limit: float, held: bool = claimed) -> Bound | None:
            return Bound(limit, at_most=False) if held else None

        yield figure(f"{rule}: think tokens saved", s["saving"], bound(0.5))
        yield figure(f"{rule}: accuracy less that of no limit", s["difference"])
        low = s["difference"]["low"]
        if claimed and low is not None:
            yield Figure(f"{rule}: the same, lower end of its interval", low, "share", bound(-0.01))
        name = f"{rule}: saved against the cheapest fixed budget"
        yield figure(f"{name} of equal accuracy", s["saving_fixed"], bound(0.2))
        yield figure(f"{name} at most {100 * d['within']:g} point less accurate", s["saving_fixed_within"], bound(0.2))
        if s["probe_tokens"] and s["computed_saving"] is not None:
            yield Figure(f"{rule}: tokens computed saved, probes counted", s["computed_saving"], "share")
        if s["wall_ratio"] is not None:
            yield Figure(f"{rule}: wall time over that of no limit", s["wall_ratio"], "ratio")
    cost = d["overhead"]
    for name, key, unit in (
        ("probe tokens a generated token", "probe_tokens_per_generated_token", "tokens"),
        ("wall time of a token over that without probes", "wall_ratio", "ratio"),
    ):
        if cost[key] is not None:
            yield Figure(f"early exit: probing at every line, ending nothing: {name}", cost[key], unit)


def early_exit(problems: int) -> Iterator[Figure]:
    """Every rule against no limit and fixed budgets, thresholds from a split."""
    components = [f"--component={label}={file}" for label, file in deer_components().items()]
    d = bench_vllm(NAME, "--scenario", NAME, "--problems", str(problems), *components)
    if d.get("scenario") != NAME:
        sys.exit(f"error: {NAME}: {d.get('error', 'see above')}")
    keep(d)
    yield from figures(d)
