"""What the scenario `early-exit` prints and writes: pure functions over what was measured, and the plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meridian.vllm.bench.exit_rules import (
    EQUALLY_CHEAP,
    FAMILIES,
    MARGIN,
    NO_GUARD_BITS,
    RPDI_WINDOW,
    Choice,
    Eat,
    Outcome,
)
from meridian.vllm.bench.exit_stats import RESAMPLES, Interval, Result, Sample

NONE, FIXED, PROBES = "none", "fixed", "probes"  # names of settings that are no rule; fixed budgets are `fixed-N`
ENOUGH_PROBLEMS = 2000
# What early exit with EAT is held to: (title, where it stands in the setting's document, limit, at least; unit). Fixed
# budgets of equal accuracy are a matter of chance where their curve is flat, so both readings of "equal" must hold.
CLAIMS: Sequence[tuple[str, tuple[str, str], float, str]] = (
    ("think tokens saved against no limit", ("saving", "value"), 0.5, "%"),
    ("accuracy less that of no limit, lower end of the interval", ("difference", "low"), -0.01, "points"),
    ("think tokens saved against the cheapest equally accurate fixed budget", ("saving_fixed", "value"), 0.2, "%"),
    ("the same with a little less accuracy allowed to the budget", ("saving_fixed_within", "value"), 0.2, "%"),
)
CLAIMED = "eat"


@dataclass(frozen=True)
class Measured:
    """One setting in the engine, over the report split."""

    name: str
    title: str
    sample: Sample
    wall_s: float
    generated_tokens: int
    unended: int  # thoughts that the context ended
    counters: Mapping[str, Any]
    budget: int | None = None


@dataclass(frozen=True)
class Tuning:
    """The tuning split: what was chosen there, and what settings of the literature reach there without a choice."""

    no_limit: Outcome
    choices: Mapping[str, Choice]
    literature: Sequence[tuple[Eat, Outcome]]


def _offline(o: Outcome) -> dict[str, float]:
    return {"tokens": o.mean_tokens, "accuracy": o.accuracy, "thoughts": len(o.tokens), "fired": o.fired}


def _interval(x: Interval) -> dict[str, float | None]:
    return {k: v if math.isfinite(v) else None for k, v in vars(x).items()}


def _setting(m: Measured, r: Result, none: Measured) -> dict[str, Any]:
    probes = m.counters.get("probes") or {}
    return {
        "title": m.title,
        "budget": m.budget,
        "tokens": _interval(r.tokens),
        "accuracy": _interval(r.accuracy),
        "difference": _interval(r.difference),
        "saving": _interval(r.saving),
        "saving_fixed": _interval(r.saving_fixed),
        "saving_fixed_within": _interval(r.saving_fixed_within),
        "reference": vars(r.reference),
        "wall_s": m.wall_s,
        "generated_tokens": m.generated_tokens,
        "unended": m.unended,
        "forced": dict(m.counters.get("forced") or {}),
        "missed": m.counters.get("missed", 0),  # ends that came too late to be forced
        "probes": {k: probes.get(k, 0) for k in ("asked", "done", "dropped")},
        "probe_tokens": (probed := m.counters.get("probe_tokens", 0)),
        # Every token that the engine computed after the prompts, against no limit: what a probe costs is part of it.
        "computed_saving": 1 - (m.generated_tokens + probed) / none.generated_tokens if none.generated_tokens else None,
        "wall_ratio": m.wall_s / none.wall_s if none.wall_s else None,
    }


def overhead(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """What probing costs by itself: the run that probes and ends nothing, against the run that does neither."""
    probed, plain = settings[PROBES], settings[NONE]
    generated = probed["generated_tokens"]
    # Sampled apart, the two runs differ a little in length, so the time of a token is compared.
    each = [s["wall_s"] / s["generated_tokens"] if s["generated_tokens"] else math.nan for s in (probed, plain)]
    ratio = each[0] / each[1] if each[1] else math.nan
    return {
        "probe_tokens_per_generated_token": probed["probe_tokens"] / generated if generated else None,
        "probes_per_generated_token": probed["probes"]["done"] / generated if generated else None,
        "wall_ratio": ratio if math.isfinite(ratio) else None,
    }


def document(
    facts: Mapping[str, Any],
    tuning: Tuning,
    found: Sequence[Measured],
    results: Mapping[str, Result],
    faults: Mapping[str, int],
) -> dict[str, Any]:
    """All of it as JSON; a figure without a value is null."""
    none = next(m for m in found if m.name == NONE)
    settings = {m.name: _setting(m, results[m.name], none) for m in found}
    return {
        "scenario": "early-exit",
        **facts,
        "margin": MARGIN,
        "equally_cheap": EQUALLY_CHEAP,
        "rpdi_window": RPDI_WINDOW,
        "resamples": RESAMPLES,
        "within": next(iter(results.values())).within,
        "tuning": {
            "no_limit": _offline(tuning.no_limit),
            "choices": {k: c.document() for k, c in tuning.choices.items()},
            "literature": [{"setting": vars(rule), **_offline(o)} for rule, o in tuning.literature],
        },
        "settings": settings,
        "overhead": overhead(settings),
        "claims": claimed(settings),
        "faults": dict(faults),
    }


def claimed(settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each claim with what was measured and whether it holds; a figure without a value does not."""
    out = []
    for title, (figure, end), limit, unit in CLAIMS:
        value = settings[CLAIMED][figure][end]
        holds = value is not None and value >= limit
        out.append({"claim": title, "value": value, "at_least": limit, "unit": unit, "holds": holds})
    return out


def _percent(x: float | None, digits: int = 1) -> str:
    return "-" if x is None else f"{100 * x:.{digits}f}"


def _points(x: Mapping[str, float | None]) -> str:
    """A difference of shares in points, with its interval."""
    if x["value"] is None:
        return "-"
    ends = "" if x["low"] is None or x["high"] is None else f" ({100 * x['low']:+.1f} to {100 * x['high']:+.1f})"
    return f"{100 * x['value']:+.1f}{ends}"


def _share(x: Mapping[str, float | None]) -> str:
    """A share in percent, with its interval."""
    if x["value"] is None:
        return "-"
    ends = "" if x["low"] is None or x["high"] is None else f" ({100 * x['low']:.1f} to {100 * x['high']:.1f})"
    return f"{100 * x['value']:.1f}{ends}"


HEAD = (
    "", "accuracy, %", "against no limit, points", "think tokens", "saved, %", "saved against fixed, %",
    "probes", "probe tokens", "time, s",
)  # fmt: skip


def rows(d: Mapping[str, Any]) -> list[list[str]]:
    """The cells of the table, a row a setting."""
    out = []
    for name, s in d["settings"].items():
        rule = name in FAMILIES
        tokens = s["tokens"]["value"]
        out.append(
            [
                s["title"],
                _percent(s["accuracy"]["value"]),
                "" if name == NONE else _points(s["difference"]),
                f"{tokens:.1f}",
                "" if name == NONE else _share(s["saving"]),
                _share(s["saving_fixed"]) if rule else "",
                f"{s['probes']['done']:,}" if s["probes"]["done"] else "",
                f"{s['probe_tokens']:,}" if s["probe_tokens"] else "",
                f"{s['wall_s']:.1f}",
            ]
        )
    return out


def _heading(d: Mapping[str, Any]) -> str:
    machine, samples = d["machine"], f", {d['repeats']} samples each" if d["repeats"] > 1 else ""
    return (
        f"{d['problems']:,} problems{samples}, T={d['temperature']:g}, {d['dtype']}, seed {d['seed']}; "
        f"thresholds chosen on {d['tune']:,} others\n"
        f"vLLM {machine['vllm']}, {machine['cores']} cores of {machine['cpu']}; in brackets 95 % paired intervals"
    )


def table(d: Mapping[str, Any]) -> str:
    """For a terminal."""
    lines = [list(HEAD), *rows(d)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    out = []
    for first, *others in lines:
        cells = [f"{c:>{w}}" for c, w in zip(others, widths[1:], strict=True)]
        out.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    out.insert(1, "-" * max(map(len, out)))
    return f"{_heading(d)}\n\n" + "\n".join(out)


def markdown(d: Mapping[str, Any]) -> str:
    """The same for a page, with the chosen settings, the claims and the notes below it."""
    head = ["setting", *HEAD[1:]]
    lines = ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows(d))]
    out = [_heading(d).replace("\n", ". ") + ".", "", *lines, "", "Chosen on the tuning split:", ""]
    for key, c in d["tuning"]["choices"].items():
        setting = ", ".join(f"`{k}={v:g}`" for k, v in c["setting"].items() if v != NO_GUARD_BITS)
        accuracy, tokens = _percent(c["accuracy"]), f"{c['tokens']:.1f}"
        out.append(f"- {FAMILIES[key].title}: {setting}; there {accuracy} % and {tokens} think tokens.")
    out += ["", *(f"- {line}" for line in (*claims(d), *notes(d)))]
    return "\n".join(out)


def claims(d: Mapping[str, Any]) -> list[str]:
    """One line a claim: yes or no."""
    title = FAMILIES[CLAIMED].title
    return [
        f"{title}: {c['claim']}: {_percent(c['value'], 2)} {c['unit']}, expected at least "
        f"{_percent(c['at_least'], 0)}: {'holds' if c['holds'] else 'DOES NOT HOLD'}"
        for c in d["claims"]
    ]


def notes(d: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the table, losses first."""
    out = []
    settings = d["settings"]
    for key, c in d["tuning"]["choices"].items():
        s, title = settings[key], FAMILIES[key].title
        margin = 100 * d["margin"]
        if not c["within_margin"]:
            out.append(
                f"{title}: none of {c['settings_tried']} settings was within {margin:g} point of no limit on the "
                f"tuning split; the most accurate is reported"
            )
        if s["difference"]["low"] is not None and s["difference"]["low"] < -0.01:
            out.append(f"{title}: may be more than a point less accurate than no limit: {_points(s['difference'])}")
        if s["saving"]["value"] is not None and s["saving"]["value"] <= 0:
            out.append(f"{title}: saves no think tokens")
        elif s["saving_fixed"]["value"] is not None and s["saving_fixed"]["value"] <= 0:
            out.append(
                f"{title}: a fixed budget of equal accuracy is as cheap: saves {_share(s['saving_fixed'])} % of it"
            )
        if not s["reference"]["reached"]:
            out.append(f"{title}: more accurate than every budget measured; held against the most accurate of them")
        elif s["reference"]["at_smallest"]:
            out.append(f"{title}: the smallest budget measured is as accurate; a smaller one might be too")
        out.append(
            f"{title}: {_share(s['saving_fixed_within'])} % saved against the cheapest fixed budget at most "
            f"{100 * d['within']:g} point less accurate"
        )
        if s["probe_tokens"] and s["computed_saving"] is not None and s["wall_ratio"] is not None:
            out.append(
                f"{title}: {_percent(s['computed_saving'])} % fewer tokens computed with its probes counted, "
                f"{s['wall_ratio']:.2f} times the wall time of no limit"
            )
    for found in d["tuning"]["literature"]:
        setting = ", ".join(f"{k} {v:g}" for k, v in found["setting"].items() if v != NO_GUARD_BITS)
        out.append(
            f"EAT as published with constants from the literature ({setting}), on the tuning split: "
            f"{_percent(found['accuracy'])} % right after {found['tokens']:.1f} think tokens"
        )
    same = settings[PROBES]["difference"]
    if same["low"] is not None and same["high"] is not None and not same["low"] <= 0 <= same["high"]:
        out.append(f"probing alone should change nothing, but accuracy differs by {_points(same)} points")
    cost = d["overhead"]
    if cost["wall_ratio"] is not None and cost["probe_tokens_per_generated_token"] is not None:
        out.append(
            f"probing at every line, ending nothing: {cost['probe_tokens_per_generated_token']:.2f} probe tokens for "
            f"each generated one, {cost['wall_ratio']:.2f} times the wall time of a token"
        )
    unended = [f"{s['title']} {s['unended']}" for s in settings.values() if s["unended"]]
    if unended:
        out.append(f"thoughts that never ended and count as wrong: {', '.join(unended)}")
    for s in settings.values():
        if s["probes"]["dropped"]:
            out.append(f"{s['title']}: {s['probes']['dropped']:,} of {s['probes']['asked']:,} probes were dropped")
    if d["faults"]:
        out.append("policy faults: " + ", ".join(f"{n} {kind}" for kind, n in d["faults"].items()))
    if d["problems"] < ENOUGH_PROBLEMS:
        out.append(f"{d['problems']} problems are a trial: a result needs at least {ENOUGH_PROBLEMS:,}")
    return out


def plot(d: Mapping[str, Any], path: Path) -> None:
    """Accuracy against mean think tokens as SVG: the fixed budgets a line, the rules points with their intervals.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    def whiskers(x: Mapping[str, float | None], factor: float) -> list[list[float]]:
        value, low, high = x["value"], x["low"], x["high"]
        if value is None or low is None or high is None:
            return [[0.0], [0.0]]
        # An interval of resamples may, in a degenerate sample, leave out the value itself.
        return [[factor * max(0.0, value - low)], [factor * max(0.0, high - value)]]

    settings = d["settings"]
    # The same figures give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "early-exit", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        curve = [s for name, s in settings.items() if s["budget"] is not None] + [settings[NONE]]
        x = [s["tokens"]["value"] for s in curve]
        y = [100 * s["accuracy"]["value"] for s in curve]
        axes.plot(x, y, color="0.45", marker=".", label="fixed budgets, no limit")
        for s in curve:
            at = (s["tokens"]["value"], 100 * s["accuracy"]["value"])
            axes.errorbar(*at, yerr=whiskers(s["accuracy"], 100), color="0.45", fmt="none", capsize=2)
            axes.annotate(str(s["budget"] or "no limit"), at, (4, -11), textcoords="offset points", fontsize=8)
        for (name, family), marker in zip(FAMILIES.items(), "osDv^", strict=True):
            s = settings[name]
            axes.errorbar(
                s["tokens"]["value"],
                100 * s["accuracy"]["value"],
                xerr=whiskers(s["tokens"], 1),
                yerr=whiskers(s["accuracy"], 100),
                fmt=marker,
                capsize=2,
                label=family.title,
            )
        axes.margins(x=0.08)
        axes.set_xlabel("mean think tokens")
        axes.set_ylabel("accuracy, %")
        axes.set_title(f"{d['problems']:,} problems, T={d['temperature']:g}, 95 % intervals", fontsize=10)
        axes.legend(loc="lower right", fontsize=9)
        axes.grid(alpha=0.3)
        figure.savefig(path, format="svg", metadata={"Date": None})
