#!/usr/bin/env python3
"""Train the arithmetic reasoner and write its folder: weights, configuration, tokenizer, chat template.

    models/arith-reasoner/train.py --out /tmp/arith-reasoner

Needs torch and transformers, which every vLLM environment has. One thread, a fixed seed and a fixed number of optimizer
steps: two runs on one machine take the same steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent

if TYPE_CHECKING:
    from meridian.vllm.bench import arith
else:
    # By file: the package's own __init__ needs the native module, which training does not.
    _spec = importlib.util.spec_from_file_location("arith", HERE.parents[1] / "python/meridian/vllm/bench/arith.py")
    arith = sys.modules["arith"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(arith)

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
THINK = (arith.THINK_START, arith.THINK_END)
WORDS = (*map(str, range(arith.MODULUS)), *arith.OPERATORS, "=", "?", "so", "wait", "ans", arith.NEWLINE)
ID = {word: i for i, word in enumerate((*WORDS, *SPECIAL, *THINK))}
CONTEXT = 1024  # positions that the model says it has

# The generation prompt opens thinking. Reasoning of earlier turns is left out, as the model was trained.
CHAT_TEMPLATE = (
    "<bos>{% for m in messages %}"
    "{% if m['role'] == 'user' %} {{ m['content'] | trim }} ?"
    "{% elif m['role'] == 'assistant' %} {{ m['content'].split('</think>')[-1] | trim }} <eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} <think>{% endif %}"
)

IGNORED = -100  # target that costs nothing
WIDTH = 320  # tokens of a row; the longest sample has 304
CUTS = 2  # forced endings of each thought; early ones cannot be answered, so they are noise to the arithmetic
LINE_END_CUTS = 0.75  # share of them moved back to the end of a line; the others are anywhere
FIRST_PASS_ONLY = 0.75  # share of thoughts trained up to the end of the first pass and the token that follows it
EARLIER_TURN = 0.1  # share of samples with an answered question before the chain
WARMUP_STEPS = 100
DECAY_FROM = 0.6  # share of the steps after which the learning rate falls


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One word, one token; a line break is a word and survives decoding, which joins words with spaces."""
    words = Tokenizer(models.WordLevel({w: ID[w] for w in (*WORDS, *SPECIAL)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|[^ \n]+"), "removed", invert=True)  # type: ignore[assignment]
    words.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    # Not special, as in Qwen3: a decoded completion shows where thinking ended.
    words.add_tokens([AddedToken(t, special=False, normalized=False) for t in THINK])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model() -> Qwen3ForCausalLM:
    """Random weights. vLLM's CPU attention rejects heads of 16."""
    config = Qwen3Config(
        vocab_size=len(ID),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.05,
        use_cache=True,
        bos_token_id=ID["<bos>"],
        eos_token_id=ID["<eos>"],
        pad_token_id=ID["<pad>"],
    )
    model = Qwen3ForCausalLM(config)
    # Layers write little into the residual stream at first, as in GPT-2: without it, training starts slowly.
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(1 / math.sqrt(2 * config.num_hidden_layers))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        bos_token_id=ID["<bos>"],
        eos_token_id=ID["<eos>"],
        pad_token_id=ID["<pad>"],
    )
    return model


@dataclass(frozen=True)
class Sample:
    """Token ids of a trunk, and branches that leave it: each sees the trunk up to its cut, and itself.

    One forward pass over trunk and branches gives what a pass for each cut thought would give.
    """

    trunk: list[int]
    prompt_tokens: int  # of the trunk; not trained
    branches: list[tuple[int, list[int]]]  # (trunk tokens seen, tokens that follow them)

    @property
    def tokens(self) -> int:
        return len(self.trunk) - 1 + sum(len(ids) - 1 for _, ids in self.branches)


def ids(words: Sequence[str]) -> list[int]:
    return [ID[w] for w in words]


def training_sample(rng: random.Random) -> Sample:
    """A chain with its thought, and forced endings anywhere in it that give the true answer.

    What a cut thought does not tell stays unknown, so the best the model can learn there is its honest guess.
    """
    chain = arith.problem(rng, rng.randint(*arith.OPERATIONS))
    prompt = chain.prompt
    if rng.random() < EARLIER_TURN:
        earlier = arith.problem(rng, rng.randint(1, 4))
        prompt = ["<bos>", *earlier.text.split(), "?", "ans", str(earlier.answer), "<eos>", *prompt[1:]]
    thought = arith.thought(rng, chain)
    ending = [*arith.PROBE, str(chain.answer), "<eos>"]
    trunk = [*thought, *ending]
    if rng.random() < FIRST_PASS_ONLY:
        # Later passes teach little more than copying. That one follows is still taught as often as it is to happen.
        trunk = trunk[: chain.needed_tokens + 1]
    branches = []
    for _ in range(CUTS):
        cut = rng.randint(0, min(len(thought), len(trunk) - 1))
        if rng.random() < LINE_END_CUTS:
            while cut and thought[cut - 1] != arith.NEWLINE:
                cut -= 1
        # The end marker itself is the host's doing. It is in the input, never a target: cuts teach no early ending.
        branches.append((len(prompt) + cut, ids(ending)))
    return Sample(ids([*prompt, *trunk]), len(prompt), branches)


@dataclass(frozen=True)
class Batch:
    """Packed rows; the shape of each is (rows, width), that of the mask (rows, 1, width, width)."""

    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def pack(rows: Sequence[Sequence[Sample]], width: int) -> Batch:
    """Samples side by side in rows, no token seeing another sample's or another branch's.

    The last token of a trunk and of a branch is a target only.
    """
    filled = torch.zeros(5, len(rows), width, dtype=torch.long)
    token, position, sample_no, branch_no, seen = filled
    token.fill_(ID["<pad>"])
    targets = torch.full((len(rows), width), IGNORED)
    for r, samples in enumerate(rows):
        at = 0
        for s, sample in enumerate(samples, 1):
            n, p = len(sample.trunk) - 1, sample.prompt_tokens
            columns = [sample.trunk[:-1], list(range(n)), [s] * n, [0] * n, list(range(1, n + 1))]
            target = [IGNORED] * (p - 1) + sample.trunk[p:]
            for b, (cut, tail) in enumerate(sample.branches, 1):
                m = len(tail) - 1
                new = (tail[:-1], range(cut, cut + m), [s] * m, [b] * m, [cut] * m)
                for column, values in zip(columns, new, strict=True):
                    column.extend(values)
                target += tail[1:]
            filled[:, r, at : at + len(target)] = torch.tensor(columns)
            targets[r, at : at + len(target)] = torch.tensor(target)
            at += len(target)
    same = sample_no[:, :, None] == sample_no[:, None, :]
    trunk = (branch_no == 0)[:, None, :] & (position[:, None, :] < seen[:, :, None])
    own = (branch_no[:, :, None] == branch_no[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    return Batch(token, targets, position, (same & (trunk | own))[:, None])


def batches(seed: int, rows: int) -> Iterator[Batch]:
    """Endless packed samples."""
    rng = random.Random(f"train/{seed}")
    sample = training_sample(rng)
    while True:
        packed: list[list[Sample]] = [[] for _ in range(rows)]
        room = [WIDTH] * rows
        while max(room) >= sample.tokens:  # each into the first row that has room
            row = next(r for r in range(rows) if room[r] >= sample.tokens)
            packed[row].append(sample)
            room[row] -= sample.tokens
            sample = training_sample(rng)
        yield pack(packed, WIDTH)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up, plateau, linear fall to 2 % of the peak."""
    done = step / steps
    fall = 1.0 if done < DECAY_FROM else max(0.02, (1 - done) / (1 - DECAY_FROM))
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * fall


def train(model: Qwen3ForCausalLM, a: argparse.Namespace) -> None:
    """Optimize in place; prints the loss every so often."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.98))
    started, losses = time.monotonic(), list[tuple[float, float]]()
    for step, batch in zip(range(a.steps), batches(a.seed, a.rows), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, a.steps, a.lr)
        logits = model(
            input_ids=batch.ids, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
        ).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results = batch.targets.where(batch.ids == ID["="], torch.tensor(IGNORED))
        computed = cross_entropy(logits.detach().flatten(0, 1), results.flatten(), ignore_index=IGNORED)
        losses.append((loss.item(), computed.item()))
        if (step + 1) % a.report_every == 0:
            recent = losses[-a.report_every :]
            mean, computed = (sum(column) / len(recent) for column in zip(*recent, strict=True))
            # The loss has a floor, what cut thoughts do not tell; that of results after "=" has none.
            progress = f"loss {mean:.4f}, of results {computed:.4f}"
            print(f"step {step + 1:5} of {a.steps}  {time.monotonic() - started:5.0f} s  {progress}", flush=True)


def main() -> int:
    """Command line."""
    example = "example: nice models/arith-reasoner/train.py --out /tmp/arith-reasoner"
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], epilog=example)
    p.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="the model's folder (default: this one)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--steps", type=int, default=870, help="optimizer steps (default %(default)s)")
    p.add_argument("--rows", type=int, default=14, help=f"rows of {WIDTH} tokens a step (default %(default)s)")
    p.add_argument("--lr", type=float, default=1.5e-3, help="peak learning rate (default %(default)s)")
    p.add_argument("--report-every", type=int, default=50, metavar="STEPS")
    a = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(a.seed)
    model = make_model()
    print(f"{sum(w.numel() for w in model.parameters()):,} parameters", flush=True)
    train(model, a)
    model.save_pretrained(a.out)
    make_tokenizer().save_pretrained(a.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
