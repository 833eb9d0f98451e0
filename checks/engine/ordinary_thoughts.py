"""Thoughts that are no loops: those of the bundled reasoner, and texts as a model may write them while it thinks.
Half of them are sampled from the reasoner in the real engine: one thought, or many in a row, which are long enough to
be taken for a loop. The others are windows of text in the tokens of a real tokenizer (FOLDER/tokenizer.json): source
code of Python's standard library and of the crates that this workspace is built from, Markdown with tables, tables of
numbers (`traces`, a folder of CSV files), and long sums and lists that are written here. Windows begin at a random
line. Nothing of them is stored in the repository.

Writes one JSON object a thought, with its kind and tokens.
"""

from __future__ import annotations

import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import reasoner_dir

from checks.engine.llm import problem_ids

# Longer than what makes a loop certain by far.
MOST_TOKENS = 8192
# A token has at least one character, and rarely more than this.
MOST_CHARACTERS = 8 * MOST_TOKENS
KINDS = ("code in Python", "code in Rust", "Markdown", "tables of numbers", "sums and lists")


SEED = 77


def measure(tokenizer: str, traces: str, out: str, thoughts: int = 2000) -> dict[str, Any]:
    """Write so many thoughts; `tokenizer` is a folder with a tokenizer.json."""
    half = thoughts // 2
    single = list(reasoned(half))
    written = texts(Path(tokenizer), Path(traces), thoughts - half)
    found = [*written, *single[half // 2 :], *in_a_row(single, half // 2)]
    Path(out).write_text("".join(json.dumps(thought) + "\n" for thought in found))
    return {"thoughts": len(found), "tokens": sum(len(thought["tokens"]) for thought in found)}


def reasoned(count: int) -> Iterator[dict[str, Any]]:
    """Thoughts of the bundled reasoner."""
    from vllm import LLM, SamplingParams

    model: Any = LLM(
        model=str(reasoner_dir()), dtype="float32", max_model_len=512, max_num_seqs=128, enforce_eager=True, seed=SEED
    )
    tokenizer = model.get_tokenizer()
    end = tokenizer.convert_tokens_to_ids(arith.THINK_END)
    prompts = [{"prompt_token_ids": problem_ids(tokenizer, each)} for each in arith.problems(SEED, count)]
    for output in model.generate(prompts, SamplingParams(temperature=0.6, max_tokens=400), use_tqdm=False):
        tokens = list(output.outputs[0].token_ids)
        thought = tokens[: tokens.index(end)] if end in tokens else tokens
        yield {"kind": "the bundled reasoner", "tokens": thought}


def in_a_row(thoughts: list[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """Of thoughts drawn at random."""
    chosen = random.Random(SEED)
    for _ in range(count):
        tokens: list[int] = []
        while len(tokens) < MOST_TOKENS:
            tokens += chosen.choice(thoughts)["tokens"]
        yield {"kind": "the bundled reasoner, many in a row", "tokens": tokens[:MOST_TOKENS]}


def texts(folder: Path, traces: Path, count: int) -> Iterator[dict[str, Any]]:
    """Windows of text, as many of each kind."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    chosen = random.Random(SEED)
    library = Path(sysconfig.get_paths()["stdlib"])
    crates = Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo") / "registry" / "src"
    sources = {
        "code in Python": [path for path in library.rglob("*.py") if "site-packages" not in path.parts],
        "code in Rust": list(crates.rglob("*.rs")),
        "Markdown": list(crates.rglob("*.md")),
        "tables of numbers": list(traces.glob("*.csv")),
    }
    for kind in KINDS:
        files = sorted(sources.get(kind, []))
        if not files and kind in sources:
            sys.exit(f"error: {kind}: no such files")
        for number in range(count // len(KINDS) + (KINDS.index(kind) < count % len(KINDS))):
            text = window(chosen.choice(files), chosen) if files else written(number, chosen)
            yield {"kind": kind, "tokens": tokenizer.encode(text, add_special_tokens=False).ids[:MOST_TOKENS]}


def window(path: Path, chosen: random.Random) -> str:
    """A part of the file, from a random line on."""
    with path.open("rb") as file:
        file.seek(chosen.randrange(max(path.stat().st_size - MOST_CHARACTERS, 0) + 1))
        if file.tell():
            file.readline()
        return file.read(MOST_CHARACTERS).decode(errors="replace")


def written(number: int, chosen: random.Random) -> str:
    """A sum with its steps, a list that counts, or a table with borders, in turn."""
    count, step = chosen.randrange(100, 1500), chosen.randrange(1, 10)
    values = [chosen.randrange(1000) for _ in range(count)]
    if number % 4 == 0:
        sums = [sum(values[: i + 1]) for i in range(count)]
        return "".join(
            f"{before} + {value} = {after}\n" for before, value, after in zip([0, *sums], values, sums, strict=False)
        )
    if number % 4 == 1:
        return " + ".join(str(value) for value in values) + f" = {sum(values)}"
    if number % 4 == 2:
        return "".join(f"{i * step}. Check the case n = {i * step}: it does not hold.\n" for i in range(count))
    row = "+" + "-" * 38 + "+"
    return "".join(f"{row}\n| step {i:>5} | {value:>10} | {'ok':>10} |\n" for i, value in enumerate(values)) + row
