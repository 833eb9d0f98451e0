"""`meridian bench vllm --scenario early-exit`: accuracy against think tokens, for fixed budgets and for exit rules.

Thresholds are chosen on one split of the problems (`exit_rules`), from one recorded run in which nothing is forced.
Everything reported is measured in the engine on the other split, a setting at a time, and compared problem by problem
(`exit_stats`). The model is the bundled reasoner, the problems are those of `arith`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meridian._native import ConfigError
from meridian.config import MeridianConfig
from meridian.vllm.bench.arguments import Parser, at_least_1, sizes
from meridian.vllm.bench.child import Failed, engine_run, say
from meridian.vllm.bench.early_exit_run import TEMPERATURE, TUNE_PROBLEMS
from meridian.vllm.bench.exit_report import FIXED, NONE, PROBES, Measured, Tuning, claims, document, notes, plot, table
from meridian.vllm.bench.exit_rules import (
    FAMILIES,
    LITERATURE,
    NO_GUARD_BITS,
    RPDI_OFF,
    RPDI_WINDOW,
    Choice,
    Eat,
    Point,
    Recorded,
    Trajectory,
    choose,
    evaluate,
    no_limit,
    recorded,
)
from meridian.vllm.bench.exit_stats import Sample, compare
from meridian.vllm.bench.model import NoModel, reasoner_dir
from meridian.vllm.bench.run import meridian_toml

NAME = "early-exit"
EXAMPLE = """\
Example: meridian bench vllm --scenario early-exit --out runs

Exit code: 0 measured (whether or not the claims hold), 1 a run failed or the plot could not be written, 2 bad input."""
PROBLEMS = 2000
# The last result of a first pass comes after 11 to 59 tokens, so that the curve is flat from 60 on.
BUDGETS = (16, 28, 36, 44, 52, 56, 60, 72)
QUICK_PROBLEMS, QUICK_TUNE, QUICK_BUDGETS = 48, 48, (16, 40, 64)
RUN_LIMIT_S = 1800
NEVER = 1_000_000  # tokens, above every context
# A rule is also held against the cheapest fixed budget that is at most so much less accurate than the rule.
WITHIN = 0.005
# While an answer streams, probes get only the time that its latency target leaves; here no target is to be held.
NO_TARGET = {"scheduler.output_tpot_budget_ms": 10_000, "scheduler.think_tpot_budget_ms": 10_000}
UNLIMITED = {**NO_TARGET, "scheduler.min_think_tokens": 0, "scheduler.max_think_tokens": NEVER}
NEVER_FORCE = {**NO_TARGET, "scheduler.min_think_tokens": NEVER, "scheduler.max_think_tokens": NEVER}
PROBED = {
    "entropy.enabled": True,
    "entropy.unit": "bits",
    "entropy.probe_at": "newline",
    "entropy.eat_probe_interval_tokens": 1,  # at every line, however short
    # The thought ends with a line break where it is probed, and the model's answer is `ans N`.
    "entropy.probe_newline": False,
    "entropy.probe_suffix": "ans",
    "entropy.eat_max_bits": NO_GUARD_BITS,
    "entropy.rpdi_window": RPDI_WINDOW,
    "entropy.rpdi_threshold": RPDI_OFF,
}


@dataclass(frozen=True)
class Experiment:
    """What the command line asks for."""

    model: Path
    out: Path
    problems: int = PROBLEMS
    tune: int = TUNE_PROBLEMS
    repeats: int = 1
    budgets: tuple[int, ...] = BUDGETS
    temperature: float = TEMPERATURE
    dtype: str = "float32"
    seed: int = 1


@dataclass
class Engines:
    """Runs of the engine, each in a process of its own and with its own seed of sampling."""

    x: Experiment
    started: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def run(self, name: str, settings: Mapping[str, Any], *more: str, split: str = "report") -> dict[str, Any]:
        """One process; raises ``Failed``."""
        x = self.x
        say(f"{name} ...")
        started = time.monotonic()
        args = ["--model", str(x.model), "--split", split, "--seed", str(x.seed), "--temperature", str(x.temperature)]
        args += ["--tune", str(x.tune), "--problems", str(x.problems), "--repeats", str(x.repeats)]
        args += ["--dtype", x.dtype, "--engine-seed", str(1000 * x.seed + self.started)]
        args += [part for field_value in flags(settings) for part in ("--set", field_value)]
        self.started += 1
        run = engine_run(x.out / f"{NAME}-{name}", name, [*args, *more], RUN_LIMIT_S, driver="early_exit_run")
        for kind, n in run["faults"].items():
            self.faults[kind] = self.faults.get(kind, 0) + n
        for p in run.get("passes", ()):
            right, tokens = np.mean(p["right"]), np.mean(p["think_tokens"])
            budget = "" if p["budget"] is None else f"budget {p['budget']}: "
            say(f"  {budget}{100 * right:.1f} % right, {tokens:.1f} think tokens, {p['wall_s']:.1f} s")
        say(f"  {time.monotonic() - started:.0f} s in all")
        return run


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as ``section.key=value``, a number as TOML writes it."""
    return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]


def trajectories(rows: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """The recorded thoughts of a run's document, their points in order of think tokens."""
    return [
        Trajectory(
            tuple(
                Point(int(n), bits, answer, rpdi) for n, bits, answer, rpdi in sorted(r["points"], key=lambda p: p[0])
            ),
            r["truth"],
            r["end_tokens"],
            bool(r["end_right"]),
        )
        for r in rows
    ]


def answered(thoughts: Sequence[Trajectory]) -> list[Trajectory]:
    """The same, where a boundary without a probe of its own has the answer of the probe at the same place."""
    out = []
    for t in thoughts:
        answers = {p.tokens: p.answer for p in t.points if p.answer is not None}
        points = tuple(
            Point(p.tokens, p.bits, answers.get(p.tokens) if p.answer is None else p.answer, p.rpdi) for p in t.points
        )
        out.append(Trajectory(points, t.truth, t.end_tokens, t.end_right))
    return out


def tuned(r: Recorded) -> Tuning:
    """The setting of each rule that the tuning split chooses.

    Raises:
        Failed: the engine measured nothing there.
    """
    if not r.probes.has.any():
        raise Failed("the recorded run has no probe: the model ends no line of its thoughts, or probes are off")
    choices = {key: choose(family.rules, r) for key, family in FAMILIES.items()}
    literature = [(rule, evaluate(rule, r)) for rule in (Eat(*x) for x in LITERATURE)]
    return Tuning(no_limit(r), choices, literature)


def measured(name: str, title: str, p: Mapping[str, Any]) -> Measured:
    """One pass of a run's document."""
    tokens, right = np.array(p["think_tokens"], float), np.array(p["right"], float)
    sample = Sample(tokens.mean(1), right.mean(1))
    return Measured(
        name, title, sample, p["wall_s"], p["generated_tokens"], p["unended"], p["counters"], budget=p["budget"]
    )


def configurations(choices: Mapping[str, Choice]) -> dict[str, dict[str, Any]]:
    """What to set in each engine of the report, by the name of its run."""
    return {
        FIXED: {**UNLIMITED, "entropy.enabled": False},
        PROBES: {**PROBED, **NEVER_FORCE},
        **{key: {**PROBED, **UNLIMITED, **choice.rule.settings()} for key, choice in choices.items()},
    }


def check(settings: Mapping[str, Any]) -> None:
    """Raises ``ConfigError`` when Meridian refuses a configuration."""
    pairs = tuple((x.partition("=")[0], x.partition("=")[2]) for x in flags(settings))
    MeridianConfig.from_toml(meridian_toml("native:fcfs", pairs))


def experiment(x: Experiment) -> dict[str, Any]:
    """Record, choose, measure, compare; returns the document.

    Raises:
        ConfigError: Meridian refuses a setting.
        Failed: a run failed.
    """
    x.out.mkdir(parents=True, exist_ok=True)
    engines = Engines(x)
    recording_settings = {**PROBED, **NEVER_FORCE}
    check(recording_settings)
    tuning = engines.run("tune", recording_settings, "--record", split="tune")
    r = recorded(answered(trajectories(tuning["recording"]["trajectories"])))
    chosen = tuned(r)
    natural = chosen.no_limit
    say(f"  {len(r)} thoughts, {100 * natural.accuracy:.1f} % right, {natural.mean_tokens:.1f} think tokens")
    for key, c in chosen.choices.items():
        margin = "" if c.within_margin else ", none within the margin"
        say(f"  {FAMILIES[key].title}: {c.rule}, {100 * c.accuracy:.1f} %, {c.tokens:.1f} think tokens{margin}")

    runs = configurations(chosen.choices)
    for settings in runs.values():
        check(settings)
    passes = [part for b in ("none", *map(str, x.budgets)) for part in ("--budget", b)]
    fixed = engines.run(FIXED, runs.pop(FIXED), *passes)
    found = []
    for p in fixed["passes"]:
        budget = p["budget"]
        name, title = (NONE, "no limit") if budget is None else (f"{FIXED}-{budget}", f"fixed budget {budget}")
        found.append(measured(name, title, p))
    curve = [m.name for m in found if m.budget is not None] + [NONE]
    for name, settings in runs.items():
        title = FAMILIES[name].title if name in FAMILIES else "probes, nothing ended"
        found.append(measured(name, title, engines.run(name, settings)["passes"][0]))
    results = compare({m.name: m.sample for m in found}, NONE, curve, within=WITHIN, seed=x.seed)
    facts = {k: v for k, v in asdict(x).items() if k not in ("model", "out")}
    return document(
        {**facts, "machine": fixed["machine"], "engine_settings": {k: flags(v) for k, v in runs.items()}},
        chosen,
        found,
        results,
        engines.faults,
    )


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a temperature, 0 to 2")
    return value


def _budgets(text: str) -> tuple[int, ...]:
    found = sizes(text)
    if len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected different budgets")
    return tuple(sorted(found))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and one line when it makes no sense."""
    p = Parser(
        prog=f"meridian bench vllm --scenario {NAME}",
        description="Accuracy against think tokens in the real engine: fixed budgets, EAT, RPDI and patience",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--scenario", choices=(NAME,), default=NAME, help=argparse.SUPPRESS)
    p.add_argument("--problems", type=at_least_1, metavar="N", help=f"reported on (default {PROBLEMS:,})")
    p.add_argument("--tune", type=at_least_1, metavar="N", help=f"thresholds chosen on (default {TUNE_PROBLEMS})")
    p.add_argument("--repeats", type=at_least_1, default=1, metavar="N", help="samples a problem (default 1)")
    p.add_argument("--budgets", type=_budgets, metavar="N[,N...]",
                   help=f"think tokens of the fixed budgets (default {','.join(map(str, BUDGETS))})")  # fmt: skip
    p.add_argument("--temperature", type=_temperature, default=TEMPERATURE, metavar="T", help=f"default {TEMPERATURE}")
    p.add_argument("--quick", action="store_true", help=f"{QUICK_PROBLEMS} problems, few budgets: a trial, no result")
    p.add_argument("--model", type=Path, metavar="DIR", help="model (default, in the repository: the bundled reasoner)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="default float32")
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of problems, sampling, intervals (default 1)")
    p.add_argument("--out", type=Path, metavar="DIR", help=f"write {NAME}.json, {NAME}.svg, and every run and log")
    p.add_argument("--no-plot", action="store_true", help=f"write no {NAME}.svg")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of the table")
    a = p.parse_args(list(argv))
    if a.seed < 0:
        p.error(f"--seed: got {a.seed}, expected a whole number, at least 0")
    if a.model is not None and not (a.model / "config.json").is_file():
        p.error(f"--model: {a.model}: no config.json there, expected a model's folder")
    if a.out is not None and a.out.exists() and not a.out.is_dir():
        p.error(f"--out: {a.out}: not a folder")
    a.problems = a.problems or (QUICK_PROBLEMS if a.quick else PROBLEMS)
    a.tune = a.tune or (QUICK_TUNE if a.quick else TUNE_PROBLEMS)
    a.budgets = a.budgets or (QUICK_BUDGETS if a.quick else BUDGETS)
    return a


def write(d: Mapping[str, Any], out: Path, *, with_plot: bool) -> bool:
    """Write JSON and plot into a folder; False, and one line, when the plot's library is missing."""
    (out / f"{NAME}.json").write_text(json.dumps(d, indent=1, allow_nan=False) + "\n")
    if not with_plot:
        return True
    try:
        plot(d, out / f"{NAME}.svg")
    except ImportError as e:
        print(f"error: {NAME}.svg: {e}: pip install 'meridian[bench]', or pass --no-plot", file=sys.stderr)
        return False
    return True


def main(argv: Sequence[str]) -> int:
    """The scenario with these arguments; returns the exit code."""
    a = parse(argv)
    if importlib.util.find_spec("vllm") is None:
        print("error: vLLM is not installed beside this Python", file=sys.stderr)
        return 1
    with_plot = a.out is not None and not a.no_plot
    if with_plot and importlib.util.find_spec("matplotlib") is None:
        say(f"matplotlib is not installed: {NAME}.svg will be missing (pip install 'meridian[bench]')")
    out = a.out or Path(tempfile.mkdtemp(prefix="meridian-bench-"))
    try:
        model = a.model or reasoner_dir()
        x = Experiment(model, out, a.problems, a.tune, a.repeats, a.budgets, a.temperature, a.dtype, a.seed)
        d = experiment(x)
        if a.json:
            print(json.dumps(d, allow_nan=False))
        else:
            print(f"\n{table(d)}\n")
            for line in (*claims(d), *notes(d)):
                print(line)
        complete = write(d, a.out, with_plot=with_plot) if a.out else True
    except (ConfigError, NoModel) as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except Failed as e:
        # The log of a run that failed stays.
        print(f"error: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"error: {e.filename or out}: {e.strerror}", file=sys.stderr)
        code = 2
    else:
        code = 0 if complete else 1
        if a.out:
            say(f"Results, raw rows and logs: {os.path.relpath(a.out)}")
    if a.out is None:
        shutil.rmtree(out, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
