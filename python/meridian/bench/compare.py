"""`meridian bench vllm`: stock vLLM's scheduler and Meridian's in the real engine, side by side, in pairs of runs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from meridian._native import ConfigError
from meridian.bench.arguments import Parser, at_least_1, natural, sizes
from meridian.bench.chat import MULTI_TURN
from meridian.bench.chat import NAME as MULTI_TURN_NAME
from meridian.bench.child import Failed, engine_run, say
from meridian.bench.comparison import LEGEND, Pair, document, table
from meridian.bench.engine_run import STOCK, engine_defaults, meridian_toml, setting
from meridian.bench.model import NoModel, model_dir
from meridian.bench.workload import SCENARIOS
from meridian.config import MeridianConfig

EXAMPLE = """\
Example: meridian bench vllm --scenario multi-turn --kv-blocks 600,900 --pairs 3

Another question, with options of its own: meridian bench vllm --scenario early-exit --help

Exit code: 0 done, 1 a run failed, 2 bad input."""
EARLY_EXIT_NAME = "early-exit"
CHAT_FLAGS = ("sessions", "turns", "context_tokens", "gap_s")


@dataclass(frozen=True)
class Comparison:
    """What the runs of all pairs have in common. ``settings`` are Meridian's, as (dotted field, value)."""

    scenario: str
    model: Path
    out: Path
    policy: str = "native:output-first"
    eviction: str | None = None
    settings: tuple[tuple[str, str], ...] = ()
    dtype: str = "bfloat16"
    seed: int = 1
    sessions: int = MULTI_TURN.sessions
    turns: int = MULTI_TURN.turns
    context_tokens: int = MULTI_TURN.context_tokens
    gap_s: float = 0.0
    preserve_thinking: bool = False

    @property
    def meridian_settings(self) -> tuple[tuple[str, str], ...]:
        """The settings, with the eviction policy among them."""
        if self.eviction is None:
            return self.settings
        source = self.eviction if ":" in self.eviction else str(Path(self.eviction).resolve())
        return (("policy.eviction.source", source), *self.settings)

    def arguments(self, scheduler: str, seed: int, kv_blocks: int | None) -> list[str]:
        """The command line of one run."""
        args = ["--model", str(self.model), "--scenario", self.scenario, "--dtype", self.dtype, "--seed", str(seed)]
        args += ["--scheduler", scheduler]
        args += ["--kv-blocks", str(kv_blocks)] if kv_blocks is not None else []
        if self.scenario == MULTI_TURN_NAME:
            args += ["--sessions", str(self.sessions), "--turns", str(self.turns), "--gap-s", str(self.gap_s)]
            args += ["--context-tokens", str(self.context_tokens)]
            args += ["--preserve-thinking"] if self.preserve_thinking else []
        if scheduler != STOCK:
            args += [x for field, value in self.meridian_settings for x in ("--set", f"{field}={value}")]
        return args


def differing(one: dict[str, list[int]], other: dict[str, list[int]]) -> int:
    """Requests whose token ids are not the same in both runs."""
    return sum(one.get(k) != other.get(k) for k in one.keys() | other.keys())


def run_pairs(c: Comparison, pairs: int, kv_blocks: int | None = None) -> list[Pair]:
    """Runs stock and Meridian ``pairs`` times, a seed a pair, in turns the one and the other first.

    Outputs are compared in float32 only: in bfloat16 batches of different size round differently.

    Raises:
        Failed: a run failed; names its log.
    """
    c.out.mkdir(parents=True, exist_ok=True)
    size = f", {kv_blocks} KV blocks" if kv_blocks is not None else ""
    found = []
    for pair in range(pairs):
        seed = c.seed + pair
        summaries: dict[str, dict[str, Any]] = {}
        outputs: dict[str, Path] = {}
        columns = (("stock", STOCK), ("meridian", c.policy))
        for name, scheduler in columns if pair % 2 == 0 else columns[::-1]:
            what = f"{c.scenario}{size}, pair {pair + 1} of {pairs}, {name}"
            say(f"{what} ...")
            started = time.monotonic()
            stem = c.out / f"{c.scenario}-{kv_blocks or 'default'}-{seed}-{name}"
            outputs[name] = Path(f"{stem}-outputs.json")
            args = c.arguments(scheduler, seed, kv_blocks)
            run = engine_run(stem, what, [*args, "--greedy-outputs", str(outputs[name])])
            s = summaries[name] = {**run["summary"], **({"kv": run["kv"]} if "kv" in run else {})}
            say(
                f"  {time.monotonic() - started:.0f} s: {s['requests']} requests, {s['throughput_tok_s']:,.0f} tok/s, "
                f"prefix hit rate {s['hit_rate']:.1f} %, {s['preemptions']} preemptions"
            )
        same = None
        if c.dtype == "float32":
            same = differing(*(json.loads(outputs[name].read_text()) for name, _ in columns))
        found.append(Pair(seed, summaries["stock"], summaries["meridian"], same))
    return found


def notes(pairs: Sequence[Pair]) -> list[str]:
    """What a reader must know before believing the table."""
    out = []
    for pair in pairs:
        for name, s in (("stock", pair.stock), ("Meridian", pair.meridian)):
            missed = s["requests"] - s["think_forced_ok"]
            if missed:
                out.append(f"seed {pair.seed}, {name}: {missed} requests did not end thinking where planned")
        if pair.meridian.get("policy_faults"):
            out.append(f"seed {pair.seed}: the policy faulted {pair.meridian['policy_faults']} times")
    compared = [pair.differing for pair in pairs if pair.differing is not None]
    if compared:
        requests = sum(p.stock["requests"] for p in pairs)
        out.append(f"requests whose greedy outputs differ: {sum(compared)} of {requests}")
    return out


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 3600:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds, 0 to 3600")
    return seconds


def _source(text: str) -> str:
    if not text.startswith("native:") and not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: no such file, expected a component or native:NAME")
    return text


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with code 2 and one line when it makes no sense."""
    p = Parser(
        prog="meridian bench vllm",
        description="Compare stock vLLM's scheduler with Meridian's in the real engine on this machine",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = (*SCENARIOS, MULTI_TURN_NAME, EARLY_EXIT_NAME)
    p.add_argument("--scenario", choices=names, default=MULTI_TURN_NAME, help=f"default {MULTI_TURN_NAME}")
    p.add_argument("--pairs", type=at_least_1, default=1, metavar="N", help="pairs of runs, a seed a pair (default 1)")
    p.add_argument("--kv-blocks", type=sizes, metavar="N[,N...]", help="KV cache sizes (default: the scenario's)")
    p.add_argument(
        "--policy", type=_source, default="native:output-first", metavar="SOURCE",
        help="dispatch: FILE.wasm or native:NAME (default native:output-first)",
    )  # fmt: skip
    p.add_argument("--eviction", type=_source, metavar="SOURCE", help="eviction: FILE.wasm or native:NAME")
    p.add_argument("--set", type=setting, action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings",
                   help="a field of Meridian's configuration; may be given again")  # fmt: skip
    p.add_argument("--model", type=Path, metavar="DIR", help="model (default, in the repository: a small random one)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32 compares outputs too")
    p.add_argument("--sessions", type=at_least_1, metavar="N", help=f"{MULTI_TURN_NAME}: default {MULTI_TURN.sessions}")
    p.add_argument("--turns", type=at_least_1, metavar="N", help=f"{MULTI_TURN_NAME}: default {MULTI_TURN.turns}")
    p.add_argument(
        "--context-tokens", type=natural, metavar="N",
        help=f"{MULTI_TURN_NAME}: tokens that a session opens with (default {MULTI_TURN.context_tokens})",
    )  # fmt: skip
    p.add_argument("--gap-s", type=_seconds, metavar="S", help=f"{MULTI_TURN_NAME}: answer to next turn (default 0)")
    p.add_argument(
        "--preserve-thinking", action="store_true", help=f"{MULTI_TURN_NAME}: the history keeps the thinking"
    )
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of the first pair (default 1)")
    p.add_argument("--out", type=Path, metavar="DIR", help="keep every run's rows and log here")
    p.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of tables")
    a = p.parse_args(list(argv))
    if a.scenario != MULTI_TURN_NAME:
        for flag in (*CHAT_FLAGS, "preserve_thinking"):
            if getattr(a, flag) not in (None, False):
                p.error(f"--{flag.replace('_', '-')}: only {MULTI_TURN_NAME} has sessions, got {a.scenario}")
    if a.model is not None and not (a.model / "config.json").is_file():
        p.error(f"--model: {a.model}: no config.json there, expected a model's folder")
    if a.out is not None and a.out.exists() and not a.out.is_dir():
        p.error(f"--out: {a.out}: not a folder")
    return a


def comparison(a: argparse.Namespace, model: Path, out: Path) -> Comparison:
    """What the command line asks for.

    Raises:
        ConfigError: Meridian refuses a setting.
    """
    given = {k: getattr(a, k) for k in CHAT_FLAGS if getattr(a, k) is not None}
    c = Comparison(
        a.scenario,
        model,
        out,
        a.policy,
        a.eviction,
        tuple(a.settings),
        a.dtype,
        a.seed,
        preserve_thinking=a.preserve_thinking,
        **given,
    )
    MeridianConfig.from_toml(meridian_toml(c.policy, (*engine_defaults(a.scenario).settings, *c.meridian_settings)))
    return c


def _heading(c: Comparison, kv_blocks: int | None, pairs: int) -> str:
    d = engine_defaults(c.scenario)
    blocks = kv_blocks if kv_blocks is not None else "default"
    chat = f", {c.sessions} sessions of {c.turns} turns" if c.scenario == MULTI_TURN_NAME else ""
    chat += ", thinking preserved" if c.preserve_thinking else ""
    policies = c.policy + (f", eviction {c.eviction}" if c.eviction else "")
    return (
        f"{c.scenario}: {d.about}{chat}\n"
        f"{pairs} pair{'s' if pairs > 1 else ''} from seed {c.seed}, {c.dtype}, Meridian: {policies}\n"
        f"KV blocks: {blocks} of {d.block_size}, at most {d.max_num_seqs} running"
    )


def _compare(a: argparse.Namespace, c: Comparison) -> None:
    sizes = a.kv_blocks or [engine_defaults(c.scenario).kv_blocks]
    printed = []
    for kv_blocks in sizes:
        pairs = run_pairs(c, a.pairs, kv_blocks)
        if a.json:
            printed.append({"kv_blocks": kv_blocks, **document(pairs), "notes": notes(pairs)})
            continue
        print(f"\n{_heading(c, kv_blocks, a.pairs)}\n\n{table(pairs)}", flush=True)
        for note in notes(pairs):
            print(note, flush=True)
    if a.json:
        settings = {"policy": c.policy, "eviction": c.eviction, "dtype": c.dtype, "seed": c.seed}
        if c.scenario == MULTI_TURN_NAME:
            settings |= {k: getattr(c, k) for k in (*CHAT_FLAGS, "preserve_thinking")}
        print(json.dumps({"scenario": c.scenario, **settings, "sizes": printed}))
    else:
        print(f"\n{LEGEND}")


def _is_early_exit(argv: Sequence[str]) -> bool:
    """Whether the scenario asked for is the one that compares no schedulers."""
    return f"--scenario={EARLY_EXIT_NAME}" in argv or ("--scenario", EARLY_EXIT_NAME) in pairwise(argv)


def main(argv: Sequence[str]) -> int:
    """`meridian bench vllm` with these arguments; returns the exit code."""
    if _is_early_exit(argv):
        from meridian.bench import early_exit  # needs NumPy

        return early_exit.main(argv)
    a = parse(argv)
    if importlib.util.find_spec("vllm") is None:
        print("error: vLLM is not installed beside this Python", file=sys.stderr)
        return 1
    out = a.out or Path(tempfile.mkdtemp(prefix="meridian-bench-"))
    try:
        c = comparison(a, a.model or model_dir(), out)
        _compare(a, c)
    except (ConfigError, NoModel) as e:
        print(f"error: {e}", file=sys.stderr)
        code = 2
    except Failed as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except OSError as e:
        print(f"error: {e.filename or out}: {e.strerror}", file=sys.stderr)
        code = 2
    else:
        code = 0
        if a.out:
            say(f"Raw rows: {os.path.relpath(a.out)}")
    # The log of a run that failed stays.
    if a.out is None:
        shutil.rmtree(out, ignore_errors=True)
    return code
