"""One engine of the scenario `early-exit`: solves arithmetic problems, counts think tokens and right answers.

    python -m meridian.vllm.bench.early_exit_run --model DIR --problems 2000 --budget none --budget 40 --out run.json
    python -m meridian.vllm.bench.early_exit_run --model DIR --split tune --record --set entropy.probe_at=newline \\
        --out run.json

`meridian bench vllm --scenario early-exit` starts it, and reads what it writes: raw rows, no figures. Each ``--budget``
is a pass over all problems in the same engine; ``none`` leaves the end to the policy. Sampling has no seed of its own a
request: vLLM's sampler on a CPU then works request by request.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.run import Options, Run, build, end_with_parent, machine_facts, setting

TEMPERATURE = 0.6
TUNE_PROBLEMS = 800
MAX_MODEL_LEN = 512  # the longest prompt has 24 tokens, a thought of four passes about 260
PROMPT_ROOM = 32
IN_FLIGHT = 128
# A probe takes a seat of its own, and only one that nobody waits for: what is in flight must not fill them.
MAX_NUM_SEQS = 2 * IN_FLIGHT
BLOCK_SIZE = 32
KV_BLOCKS = 8192  # memory is not what is measured
WARM_UP = 64  # problems; more passes than one, so that both kinds of step are past their first use
PROCESSOR = "meridian.vllm:BudgetLogitsProcessor"
BUDGET_ARGUMENT = "meridian_think_budget"
SPLITS = ("tune", "report")


def splits(seed: int, tune: int, report: int) -> dict[str, list[arith.Problem]]:
    """The problems to choose thresholds on, and others to report on: no chain is in both."""
    tuning = arith.problems(2 * seed, tune)
    known = {p.text for p in tuning}
    others = [p for p in arith.problems(2 * seed + 1, report + tune) if p.text not in known]
    return {"tune": tuning, "report": others[:report]}


@dataclass
class Solving:
    """One request while it runs."""

    problem: arith.Problem
    tokens: list[int] = field(default_factory=list)


def think_tokens(tokens: Sequence[int], end: Sequence[int]) -> int | None:
    """Tokens before the end marker; None if it never came."""
    for at in range(len(tokens) - len(end) + 1):
        if tuple(tokens[at : at + len(end)]) == tuple(end):
            return at
    return None


def difference(after: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What nested counters gained. A counter that was not there before was 0."""
    out: dict[str, Any] = {}
    for key, value in after.items():
        was = before.get(key)
        if isinstance(value, Mapping):
            out[key] = difference(value, was if isinstance(was, Mapping) else {})
        elif isinstance(value, int | float) and not isinstance(value, bool):
            out[key] = value - (was or 0)
    return out


class Solver:
    """A built engine that solves problems, a closed loop of as many requests as run at once."""

    def __init__(self, run: Run, temperature: float) -> None:
        self.run = run
        self.temperature = temperature
        self.tokenizer = run.engine.get_tokenizer()
        self.sent = 0

    def words(self, tokens: Sequence[int]) -> list[str]:
        """Tokens as the words of `arith`."""
        return [str(w) for w in self.tokenizer.convert_ids_to_tokens(list(tokens))]

    def prompt(self, problem: arith.Problem) -> list[int]:
        """Token ids of what the chat template makes of a problem."""
        chat = [{"role": "user", "content": problem.text}]
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def counters(self) -> dict[str, Any]:
        """Of the budget slot, since the engine was built."""
        return dict(self.run.scheduler.meridian_stats().get("budget") or {})

    def solve(
        self, problems: Sequence[arith.Problem], budget: int | None, signals: dict[str, list[Any]] | None = None
    ) -> tuple[list[Solving], list[str]]:
        """Solve all; returns them in order, with their ids in the engine. Collects the signals, if asked."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.run.engine
        todo = [(p, self.prompt(p)) for p in problems]
        by_name: dict[str, Solving] = {}
        requests: list[Solving] = []
        ids: list[str] = []
        running = 0
        while len(requests) < len(todo) or running:
            while len(requests) < len(todo) and running < IN_FLIGHT:
                problem, prompt = todo[len(requests)]
                params = SamplingParams(
                    temperature=self.temperature,
                    max_tokens=MAX_MODEL_LEN - PROMPT_ROOM,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                    extra_args=None if budget is None else {BUDGET_ARGUMENT: budget},
                )
                name = f"problem-{self.sent}"
                self.sent += 1
                by_name[name] = Solving(problem)
                requests.append(by_name[name])
                ids.append(engine.add_request(name, {"prompt_token_ids": prompt}, params) or name)
                running += 1
            for out in engine.step():
                by_name[out.request_id].tokens.extend(out.outputs[0].token_ids)
                running -= bool(out.finished)
            if signals is not None:
                for request, *signal in self.run.scheduler.meridian_take_signals():
                    signals.setdefault(request, []).append(signal)
        return requests, ids

    def solved(self, s: Solving) -> tuple[int, bool]:
        """Think tokens, and whether the answer is right. A thought that never ended is as long as it got, and wrong."""
        thought = think_tokens(s.tokens, self.run.end_ids)
        if thought is None:
            return len(s.tokens), False
        answer = arith.answer_of(self.words(s.tokens[thought + len(self.run.end_ids) :]))
        return thought, answer == s.problem.answer

    def one_pass(self, problems: Sequence[arith.Problem], repeats: int, budget: int | None) -> dict[str, Any]:
        """Solve every problem ``repeats`` times; a list a problem of think tokens and of right or wrong."""
        before = self.counters()
        started = time.perf_counter()
        requests, _ = self.solve([p for p in problems for _ in range(repeats)], budget)
        wall_s = time.perf_counter() - started
        rows = [self.solved(s) for s in requests]
        return {
            "budget": budget,
            "wall_s": wall_s,
            "think_tokens": [[t for t, _ in rows[i : i + repeats]] for i in range(0, len(rows), repeats)],
            "right": [[int(r) for _, r in rows[i : i + repeats]] for i in range(0, len(rows), repeats)],
            "generated_tokens": sum(len(s.tokens) for s in requests),
            "unended": sum(think_tokens(s.tokens, self.run.end_ids) is None for s in requests),
            "counters": difference(self.counters(), before),
        }

    def answer_number(self, token: int | None) -> int | None:
        """The number that an answer token stands for."""
        word = None if token is None else self.words([token])[0]
        return int(word) if word is not None and word.isascii() and word.isdigit() else None

    def record(self, problems: Sequence[arith.Problem]) -> dict[str, Any]:
        """Solve every problem once and keep what the engine measured on the way.

        A thought's points are ``[think tokens, bits, answer, rpdi, confidence]``.
        """
        scheduler = self.run.scheduler
        before = self.counters()
        scheduler.meridian_record_signals(True)
        signals: dict[str, list[Any]] = {}
        started = time.perf_counter()
        requests, ids = self.solve(problems, None, signals)
        wall_s = time.perf_counter() - started
        scheduler.meridian_record_signals(False)
        rows = []
        for request, name in zip(requests, ids, strict=True):
            tokens, right = self.solved(request)
            points = [[n, bits, self.answer_number(token), *rest] for n, bits, token, *rest in signals.pop(name, ())]
            rows.append({"truth": request.problem.answer, "end_tokens": tokens, "end_right": right, "points": points})
        if signals:
            raise RuntimeError(f"signals of unknown requests: {sorted(signals)[:4]}")
        return {"wall_s": wall_s, "counters": difference(self.counters(), before), "trajectories": rows}


def _budget(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected none or a whole number of tokens, at least 1")
    return int(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(prog="early_exit_run", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", type=Path, required=True, metavar="DIR")
    p.add_argument("--split", choices=SPLITS, default="report")
    p.add_argument("--seed", type=int, default=1, help="of the problems")
    p.add_argument("--tune", type=int, default=TUNE_PROBLEMS, help="problems of the tuning split")
    p.add_argument("--problems", type=int, default=2000, help="problems of the report split")
    p.add_argument("--repeats", type=int, default=1, help="samples a problem")
    p.add_argument("--engine-seed", type=int, default=0, help="of sampling; give each run another")
    p.add_argument("--temperature", type=float, default=TEMPERATURE)
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    p.add_argument("--budget", type=_budget, action="append", dest="budgets", metavar="N|none", help="a pass each")
    p.add_argument("--record", action="store_true", help="one pass, keeping every probe")
    p.add_argument("--set", type=setting, action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings")
    p.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    a = p.parse_args(argv)
    if a.record and a.budgets:
        p.error("--record: no --budget beside it, expected one pass without a limit")
    return a


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    a = parse(argv)
    end_with_parent()
    if importlib.util.find_spec("vllm") is None:
        print("error: vLLM is not installed beside this Python", file=sys.stderr)
        return 1
    problems = splits(a.seed, a.tune, a.problems)[a.split]
    options = Options(
        a.model,
        # Keeps vLLM's order and leaves its KV memory alone: what changes is thinking.
        "native:fcfs",
        kv_blocks=KV_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        dtype=a.dtype,
        settings=(("kv_memory.enabled", "false"), *a.settings),
        seed=a.engine_seed,
        logits_processors=(PROCESSOR,),
    )
    solver = Solver(build(options), a.temperature)
    solver.solve(arith.problems(-1 - a.seed, WARM_UP), None)
    gc.collect()
    gc.freeze()
    document: dict[str, Any] = {
        "machine": machine_facts(),
        "engine": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "split": a.split,
        "operations": [len(p.operations) for p in problems],
    }
    if a.record:
        document["recording"] = solver.record(problems)
    else:
        document["passes"] = []
        for budget in a.budgets or [None]:
            made = solver.one_pass(problems, a.repeats, budget)
            document["passes"].append(made)
            tokens = sum(map(sum, made["think_tokens"])) / (len(problems) * a.repeats)
            name = "no limit" if budget is None else f"budget {budget}"
            print(f"{name}: {tokens:.1f} think tokens in {made['wall_s']:.1f} s", file=sys.stderr, flush=True)
    stats = solver.run.scheduler.meridian_stats()
    document["faults"] = dict(Counter(stats.get("faults") or {}))
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
