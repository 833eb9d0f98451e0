#!/usr/bin/env python3
"""Measure the arithmetic reasoner: the tables of its card, as Markdown.

    models/arith-reasoner/evaluate.py

Thoughts are generated greedily and at a temperature. Each is then cut at many places at once, in one forward pass, and
the answer forced there: what it would be, and how uncertain it is. Runs on one thread in a few minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from train import HERE, ID, Sample, arith, ids, pack
from transformers import DynamicCache, Qwen3ForCausalLM

MAX_NEW_TOKENS = 320
BATCH = 500  # problems generated together
BUDGETS = (*range(4, 100, 4), *range(100, MAX_NEW_TOKENS, 20))
SHOWN_BUDGETS = (0, 10, 20, 30, 40, 60, 80)
BITS = (2.0, 1.0, 0.5, 0.2, 0.1, 0.05)
NEWLINE, WAIT, THINK_END = ID[arith.NEWLINE], ID["wait"], ID[arith.THINK_END]


@dataclass(frozen=True)
class Probe:
    """An answer forced after a part of the thought."""

    tokens: int  # of the thought that were kept
    line_end: bool
    right: float  # probability of the true answer, at the temperature of the run
    bits: float  # entropy of the answer at temperature 1, as an exit rule sees it


@dataclass(frozen=True)
class Run:
    """One problem: what was generated, and its probes by the tokens kept."""

    problem: arith.Problem
    completion: list[str]
    probes: dict[int, Probe]

    @property
    def ended(self) -> bool:
        return arith.THINK_END in self.completion

    @property
    def think_tokens(self) -> int:
        return self.completion.index(arith.THINK_END) if self.ended else len(self.completion)

    @property
    def right(self) -> bool:
        return self.ended and arith.answer_of(self.completion) == self.problem.answer

    @property
    def redundant_tokens(self) -> int:
        return max(0, self.think_tokens - self.problem.needed_tokens)

    def after(self, tokens: int) -> Probe:
        """The answer forced after so many tokens, or at the thought's own end if that comes first."""
        return self.probes[min(tokens, self.think_tokens)]


@torch.no_grad()
def generate(
    model: Qwen3ForCausalLM, problems: Sequence[arith.Problem], temperature: float, seed: int
) -> list[list[str]]:
    """Completions as words, without the end of the turn; prompts are padded on the left."""
    random = torch.Generator().manual_seed(seed)
    prompts = [ids(p.prompt) for p in problems]
    width = max(map(len, prompts))
    tokens = torch.tensor([[ID["<pad>"]] * (width - len(p)) + p for p in prompts])
    seen = (tokens != ID["<pad>"]).long()
    cache, done, made = DynamicCache(config=model.config), torch.zeros(len(prompts), dtype=torch.bool), []
    while len(made) < MAX_NEW_TOKENS and not done.all():
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        logits = model(
            input_ids=tokens, attention_mask=seen, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, 0]
        if temperature:
            tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        else:
            tokens = logits.argmax(-1, keepdim=True)
        made.append(tokens.where(~done[:, None], torch.tensor(ID["<eos>"])))
        done |= tokens[:, 0] == ID["<eos>"]
        seen = torch.cat((seen, torch.ones_like(tokens)), 1)
    words = {i: w for w, i in ID.items()}
    return [[words[i] for i in row if i != ID["<eos>"]] for row in torch.cat(made, 1).tolist()]


@torch.no_grad()
def probe(
    model: Qwen3ForCausalLM, problem: arith.Problem, completion: Sequence[str], temperature: float
) -> dict[int, Probe]:
    """Answers forced at every line end, at every budget and at the end of the thought."""
    prompt, thought = ids(problem.prompt), ids(completion)
    if THINK_END in thought:
        thought = thought[: thought.index(THINK_END)]
    lines = {i + 1 for i, token in enumerate(thought) if token == NEWLINE}
    cuts = sorted(lines | {n for n in (*BUDGETS, *SHOWN_BUDGETS) if n < len(thought)} | {len(thought)})
    suffix = [*ids(arith.PROBE), 0]  # the last one stands for the answer and is not fed
    sample = Sample([*prompt, *thought, 0], len(prompt), [(len(prompt) + cut, suffix) for cut in cuts])
    batch = pack([[sample]], sample.tokens)
    logits = model(
        input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
    ).logits[0, len(prompt) + len(thought) + 1 :: len(arith.PROBE)]
    logs = logits.log_softmax(-1)
    bits = -(logs.exp() * logs).sum(-1) / torch.log(torch.tensor(2.0))
    sampled = (logits / temperature).softmax(-1) if temperature else (logs == logs.amax(-1, keepdim=True)).float()
    right = sampled[:, ID[str(problem.answer)]]
    return {cut: Probe(cut, cut in lines, float(r), float(b)) for cut, r, b in zip(cuts, right, bits, strict=True)}


def measure(model: Qwen3ForCausalLM, problems: Sequence[arith.Problem], temperature: float, seed: int) -> list[Run]:
    """Generate and probe all problems."""
    runs = []
    for at in range(0, len(problems), BATCH):
        some = problems[at : at + BATCH]
        for problem, completion in zip(some, generate(model, some, temperature, seed + at), strict=True):
            runs.append(Run(problem, completion, probe(model, problem, completion, temperature)))
    return runs


def exit_below(bits: float) -> Callable[[Run], Probe]:
    """Exit at the first line end where the probe is more certain than this."""

    def rule(run: Run) -> Probe:
        certain = (p for p in run.probes.values() if p.line_end and p.bits < bits)
        return next(certain, run.after(run.think_tokens))

    return rule


def budget(tokens: int) -> Callable[[Run], Probe]:
    """The same number of tokens for all problems."""
    return lambda run: run.after(tokens)


def outcome(runs: Sequence[Run], rule: Callable[[Run], Probe]) -> tuple[float, float]:
    """Accuracy and mean think tokens."""
    exits = [rule(run) for run in runs]
    return mean(e.right for e in exits), mean(e.tokens for e in exits)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows))


def full_thoughts(greedy: Sequence[Run], sampled: Sequence[Run], temperature: float) -> str:
    """What the model does when nobody stops it."""
    rows = []
    for name, runs in (("greedy", greedy), (f"T={temperature:g}", sampled)):
        tokens = mean(r.think_tokens for r in runs)
        redundant = mean(r.redundant_tokens for r in runs)
        needed = mean(r.problem.needed_tokens for r in runs)
        rows.append(
            [name, f"{mean(r.right for r in runs):.3f}", f"{tokens:.1f}", f"{needed:.1f}", f"{redundant / tokens:.0%}"]
        )
    return table(["thoughts", "accuracy", "mean think tokens", "of a first pass", "redundant"], rows)


def by_length(runs: Sequence[Run]) -> str:
    """Accuracy by the length of the chain."""
    lengths = sorted({len(r.problem.operations) for r in runs})
    accuracies = [mean(r.right for r in runs if len(r.problem.operations) == n) for n in lengths]
    return table(["operations", *map(str, lengths)], [["accuracy", *(f"{a:.3f}" for a in accuracies)]])


def allowed(greedy: Sequence[Run], sampled: Sequence[Run], temperature: float) -> str:
    """Accuracy against thought allowed."""
    rows = [
        [name, *(f"{outcome(runs, budget(n))[0]:.3f}" for n in SHOWN_BUDGETS)]
        for name, runs in (("greedy", greedy), (f"T={temperature:g}", sampled))
    ]
    return table(["forced after", *map(str, SHOWN_BUDGETS)], rows)


def exits(runs: Sequence[Run]) -> str:
    """Exit rules against no rule and against the cheapest budget that is within a point of it."""
    full, full_tokens = outcome(runs, lambda run: run.after(run.think_tokens))
    cheapest = next(n for n in BUDGETS if outcome(runs, budget(n))[0] >= full - 0.01)
    rules = [("none", budget(MAX_NEW_TOKENS)), (f"{cheapest} tokens for all", budget(cheapest))]
    rules += [(f"probe below {bits:g} bits", exit_below(bits)) for bits in BITS]
    budget_tokens = outcome(runs, budget(cheapest))[1]
    rows = []
    for name, rule in rules:
        accuracy, tokens = outcome(runs, rule)
        against = [f"{tokens / other - 1:+.0%}" for other in (full_tokens, budget_tokens)]
        rows.append([name, f"{accuracy:.3f}", f"{tokens:.1f}", *against])
    return table(["rule", "accuracy", "mean think tokens", "against none", "against the budget"], rows)


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", type=Path, default=HERE, metavar="DIR", help="the model's folder (default: this one)")
    p.add_argument("--problems", type=int, default=1350, metavar="N", help="(default %(default)s)")
    p.add_argument("--temperature", type=float, default=0.6, metavar="T", help="(default %(default)s)")
    p.add_argument("--seed", type=int, default=1, help="of the problems and of sampling (default %(default)s)")
    a = p.parse_args()
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(a.model, dtype=torch.float32).eval()
    problems = arith.problems(a.seed, a.problems)
    greedy = measure(model, problems, 0.0, a.seed)
    sampled = measure(model, problems, a.temperature, a.seed)
    print(full_thoughts(greedy, sampled, a.temperature), by_length(sampled), sep="\n\n")
    print("", allowed(greedy, sampled, a.temperature), "", exits(sampled), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
