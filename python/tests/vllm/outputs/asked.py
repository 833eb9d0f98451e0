#!/usr/bin/env python3
"""Requests that ask for a budget, or whose operator does: what vLLM promises their clients still holds.

asked.py --count 1000 --out FILE
asked.py --count 24 --out FILE --only "a tool call stays whole"

Each row is an engine, a `meridian.toml` and a kind of request of which the count is sent; a check says what is wrong
with an answer. Rows whose budget vLLM enforces itself are compared with stock vLLM, request by request. FILE is a JSON
list: name, requests, right, the first thing that was wrong, and the tokens that were forced against a mask.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parents[1]
# A script's own folder comes first, and its modules have the names of others.
sys.path[:0] = [str(TESTS), str(TESTS.parents[2])]
sys.path.remove(str(Path(__file__).resolve().parent))

from outputs import FOLLOWS  # noqa: E402
from outputs.engines import Offline, Sessions, options_of  # noqa: E402
from outputs.run import RUNNERS, V1, V2, prepare  # noqa: E402
from outputs.situations import ENGINES, HARMONY_USER, OBJECT, SCHEMA, TAG, THINKS, USER, Ask, Engine, Session, Situation  # noqa: E402

WORDS = "abcde fghij klmno pqrst uvwxy " * 6
CALL = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
START, CLOSE, OPEN_CALL, CLOSE_CALL = 600, 601, 602, 603
EOS = 2
PHRASE = "\\n\\nConsidering the limited time by the user, I have to give the solution now.\\n</think>\\n\\n"
GUARDED = '[scheduler]\nthinking = "guarded"\nmax_think_tokens = 8\nmin_think_tokens = 0\n'
LIMIT = "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 8\n"
OTHER = {"reasoning_start_str": "[BEGIN]", "reasoning_end_str": "Time is up. [END]"}

# The folder of an engine: what each process wrote.
LOG, STOCK, FOUND = "log.txt", "stock.json", "found.json"
Check = Callable[[Any, int, "Tools"], str | None]


@dataclass(frozen=True)
class Tools:
    """What a check needs besides the answer."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Row:
    """A kind of request, by its number, and the check of its answer; None compares it with stock vLLM."""

    name: str
    make: Callable[[int], Any]
    check: Check | None
    engine: Engine = field(default_factory=lambda: ENGINES["plain"])
    toml: str = ""
    runners: tuple[str, ...] = RUNNERS


def ask(prompt: str, script: str, *, follows: bool = True, **params: Any) -> Ask:
    """A request whose model says the script, and goes on with it behind whatever is forced."""
    extra = {FOLLOWS: 1} if follows else {}
    return Ask(prompt, {"script": script, "extra_args": extra | params.pop("extra", {}), **params})


def own(tokens: int) -> dict[str, Any]:
    """Meridian's option."""
    return {"extra": {"meridian_think_budget": tokens}}


def ends_at(tokens: Callable[[int], int], close: Sequence[int] = (CLOSE,)) -> Check:
    """The end marker begins behind so many tokens."""

    def check(answer: Any, number: int, _: Tools) -> str | None:
        ids = answer["outputs"][0]["ids"]
        at = next((i for i in range(len(ids)) if ids[i : i + len(close)] == list(close)), None)
        return None if at == tokens(number) else f"ends at {at}, not {tokens(number)}: {ids[:40]}"

    return check


def all_end_at(tokens: Callable[[int], int]) -> Check:
    """The end marker of each choice stands behind so many tokens."""

    def check(answer: Any, number: int, _: Tools) -> str | None:
        wrong = [x["ids"][:40] for x in answer["outputs"] if x["ids"].index(CLOSE) != tokens(number)]
        return f"{wrong}" if wrong else None

    return check


def is_json(answer: Any, _: int, __: Tools) -> str | None:
    """The answer is JSON that has ended by itself."""
    if "error" in answer:
        return answer["text"]
    output = answer["outputs"][0]
    try:
        json.loads(output["text"])
    except ValueError:
        return f"not JSON: {output['text'][:60]!r}"
    return None if output["finish"] == "stop" else f"ended by {output['finish']}"


def says(text: str) -> Check:
    """The answer is the text, and ends by itself."""

    def check(answer: Any, _: int, __: Tools) -> str | None:
        output = answer["outputs"][0]
        return None if (output["text"], output["finish"]) == (text, "stop") else f"{output['text']!r}"

    return check


def keeps(text: str, *, ends: bool = True) -> Check:
    """The text is in the answer as one piece, and the answer ends by itself."""

    def check(answer: Any, _: int, tools: Tools) -> str | None:
        output = answer["outputs"][0]
        shown = tools.decode(output["ids"])
        if text not in shown:
            return f"not whole: {shown[:100]!r}"
        return None if not ends or output["finish"] == "stop" else f"ended by {output['finish']}"

    return check


def is_not_cut(answer: Any, _: int, tools: Tools) -> str | None:
    """The thinking was ended, and no stop string ended the request inside what was forced."""
    output = answer["outputs"][0]
    shown = tools.decode(output["ids"])
    if "</think>" not in shown or output["stop"] is not None:
        return f"stopped by {output['stop']!r}: {shown[:80]!r}"
    return None


def both_turns_end(answer: Any, _: int, __: Tools) -> str | None:
    """Both turns of a session end their thinking at the eighth token."""
    ends = [turn["ids"].index(CLOSE) if CLOSE in turn["ids"] else None for turn in answer]
    return None if ends == [7, 7] or ends == [8, 8] else f"the turns end at {ends}"


def _letters(number: int) -> list[int]:
    return list(range(35 + number % 5, 90))


_PARSER = ENGINES["parser"]
_NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
_DRAFTS = Engine(options={"speculative_config": _NGRAMS, "reasoning_parser": "qwen3"})
_PAUSES = Engine(options={"reasoning_parser": "qwen3"}, pauses=True)
LOOP = "abcde fghij " * 20
_MANY: dict[str, Any] = {"max_num_seqs": 64, "max_model_len": 1024}
SPENT = {"json": {"type": "integer"}}

ROWS = (
    Row(
        "JSON without a parser, its budget spent",
        lambda i: ask(THINKS, "12345<|im_end|>", structured_outputs=SPENT, **own(1 + i % 3)),
        is_json,
    ),
    Row(
        "JSON without a parser, the operator's limit spent",
        lambda i: ask(THINKS, "12345678901234<|im_end|>", structured_outputs=SPENT),
        is_json,
        toml=LIMIT,
    ),
    Row(
        "JSON in reasoning, its budget spent",
        lambda i: ask(THINKS, "true", structured_outputs={"json": {"type": "boolean"}}, **own(i % 3)),
        is_json,
        ENGINES["in reasoning"],
    ),
    Row(
        "a logit_bias of -99 of the end marker",
        lambda i: ask(THINKS, WORDS, logit_bias={CLOSE: -99}, **own(i % 9)),
        ends_at(lambda i: i % 9),
    ),
    Row(
        "JSON with a text, without a parser, its budget spent",
        lambda i: ask(THINKS, f"{OBJECT}<|im_end|>", structured_outputs={"json": SCHEMA}, **own(i)),
        says(OBJECT),
    ),
    Row(
        "JSON with a text, in reasoning, its budget spent",
        lambda i: ask(THINKS, f"{OBJECT}<|im_end|>", structured_outputs={"json": SCHEMA}, **own(i)),
        says(OBJECT),
        ENGINES["in reasoning"],
    ),
    Row(
        "JSON with a text, in reasoning, the operator's limit spent",
        lambda i: ask(THINKS, f"{OBJECT}<|im_end|>", structured_outputs={"json": SCHEMA}),
        says(OBJECT),
        ENGINES["in reasoning"],
        LIMIT,
    ),
    Row(
        "a grammar with the end marker, in reasoning",
        lambda i: ask(THINKS, "a" * 40, structured_outputs={"regex": "a{0,30}</think>yes"}, **own(i % 30)),
        ends_at(lambda i: i % 30),
        ENGINES["in reasoning"],
    ),
    Row(
        "text before structural tags, without a parser",
        lambda i: ask(THINKS, WORDS, structured_outputs={"structural_tag": json.dumps(TAG)}, **own(i % 9)),
        ends_at(lambda i: i % 9),
    ),
    Row(
        "several choices",
        lambda i: ask(THINKS, WORDS, n=3, temperature=0.5, seed=i, **own(i % 9)),
        all_end_at(lambda i: i % 9),
    ),
    Row(
        "min_tokens with the end marker as a stop",
        lambda i: ask(THINKS, WORDS, stop_token_ids=[CLOSE], min_tokens=20, **own(i % 9)),
        ends_at(lambda i: 20),
    ),
    Row(
        "a prompt that ends inside a thought",
        lambda i: ask(THINKS + "partial " * 3, WORDS, **own(i % 30)),
        ends_at(lambda i: i % 30),
    ),
    Row(
        "a long thought in the prompt, the operator's limit",
        lambda i: ask(THINKS + "w " * (50 + i % 150), WORDS),
        ends_at(lambda i: 8),
        _PARSER,
        LIMIT,
    ),
    Row(
        "text before the start marker",
        lambda i: ask(USER, "ok <think>" + WORDS, **own(i % 20)),
        lambda answer, i, tools: ends_at(lambda i: answer["outputs"][0]["ids"].index(START) + 1 + i % 20)(
            answer, i, tools
        ),
    ),
    Row(
        "vLLM's own budget, as in stock",
        lambda i: ask(
            (THINKS, USER)[i % 2], ("", "<think>")[i % 2] + WORDS, thinking_token_budget=i % 45, max_tokens=64
        ),
        None,
        _PARSER,
    ),
    Row(
        "vLLM's own budget inside a thought or behind text, as in stock",
        lambda i: ask(
            (THINKS + "partial\n", USER)[i % 2], ("", "ok <think>")[i % 2] + WORDS, thinking_token_budget=i % 45
        ),
        None,
        _PARSER,
    ),
    Row(
        "vLLM's own budget and an answer that ends empty, as in stock",
        lambda i: ask(THINKS, f"one</think><|im_end|>{WORDS}", thinking_token_budget=20 + i % 9, max_tokens=64),
        None,
        _PARSER,
    ),
    Row(
        "--reasoning-config with other markers, as in stock",
        lambda i: ask(USER + "[BEGIN]", WORDS, thinking_token_budget=i % 25),
        None,
        Engine("no-markers", {"reasoning_config": OTHER}),
    ),
    Row("a tool call stays whole", lambda i: ask(THINKS, f"x{CALL}<|im_end|>", **own(i % 40)), keeps(CALL), _PARSER),
    Row(
        "a tool call stays whole where its parser is not known",
        lambda i: ask(THINKS, f"x{CALL}y<|im_end|>", **own(2 + i % 30)),
        keeps(CALL),
    ),
    Row(
        "a turn ends with a tool call, everything guarded",
        lambda i: ask(THINKS, f"{WORDS[: i % 7]}{CALL}<|im_end|>"),
        keeps(f"{CALL}<|im_end|>"),
        toml=GUARDED.replace("= 8", "= 4096"),
    ),
    Row(
        "gpt-oss: what is forced is a whole message",
        lambda i: ask(HARMONY_USER, "<|channel|>analysis<|message|>" + "abc " * 20, **own(1 + i % 9)),
        keeps("<|end|><|start|>assistant<|channel|>final<|message|>", ends=False),
        ENGINES["harmony parser"],
    ),
    Row(
        "gpt-oss: a commentary call after analysis stays whole",
        lambda i: ask(
            HARMONY_USER,
            "<|channel|>analysis<|message|>abc<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            follows=False,
            max_tokens=80,
            **own(4 + i % 40),
        ),
        keeps("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"),
        ENGINES["harmony parser"],
    ),
    Row(
        "a stop string inside the operator's phrase",
        lambda i: ask(THINKS, WORDS, stop=[("\n\n", "limited time", "solution", "now.")[i % 4]], **own(i % 9)),
        is_not_cut,
        toml=f'[model]\nforce_phrase = "{PHRASE}"\n',
    ),
    Row(
        "a streaming session, both turns",
        lambda i: Session(
            (
                (THINKS, {"script": WORDS, "max_tokens": 24}),
                (f"<|im_end|>\n{THINKS}", {"script": WORDS, "max_tokens": 24}),
            )
        ),
        both_turns_end,
        ENGINES["sessions"],
        LIMIT,
    ),
    Row(
        "a budget, paused and resumed",
        lambda i: ask(THINKS, WORDS, **own(i % 40)),
        ends_at(lambda i: i % 40),
        _PAUSES,
        "[scheduler]\npreempt_for_waiting = true\n",
    ),
    Row(
        "vLLM's own budget, paused and resumed, as in stock",
        lambda i: ask(THINKS, WORDS, thinking_token_budget=i % 45, max_tokens=64),
        None,
        _PAUSES,
    ),
    # The model runner V1 refuses the script beside drafts.
    Row(
        "a budget, with drafts",
        lambda i: ask(THINKS, LOOP, **own(i % 40)),
        ends_at(lambda i: i % 40),
        _DRAFTS,
        runners=(V2,),
    ),
    Row(
        "the operator's limit, with drafts",
        lambda i: ask(THINKS, LOOP),
        ends_at(lambda i: 8),
        _DRAFTS,
        LIMIT,
        runners=(V2,),
    ),
    Row(
        "a tool call stays whole, with drafts",
        lambda i: ask(THINKS, f"{LOOP[: i % 20]}{CALL}<|im_end|>", **own(i % 40)),
        keeps(CALL),
        _DRAFTS,
        runners=(V2,),
    ),
    Row(
        "vLLM's own budget, with drafts, as in stock",
        lambda i: ask(THINKS, LOOP, thinking_token_budget=i % 45, max_tokens=64),
        None,
        _DRAFTS,
        runners=(V2,),
    ),
)


def _play(rows: Sequence[Row], count: int, side: str) -> tuple[list[list[Any]], Tools]:
    """The answers to each row, of one fresh engine."""
    from transformers import AutoTokenizer

    engine = rows[0].engine
    # So few seats that requests wait during a pause.
    seats = {"max_num_seqs": max(count // 2, 1)} if engine.pauses else {}
    engine = replace(engine, options={**_MANY, **engine.options, **seats})
    made = (Sessions if engine.has_sessions or engine.pauses else Offline)(engine, side)
    answers: list[list[Any]] = []
    for row in rows:
        requests = tuple(row.make(i) for i in range(count))
        # Sessions are kept open at once; few of them at a time.
        some = 32 if engine.has_sessions else count
        parts = [(at, requests[at : at + some]) for at in range(0, count, some)]
        answers.append([x for at, part in parts for x in made.play(Situation(f"{row.name}-{at}", "asked", (), part))])
    if isinstance(made, Offline) and "speculative_config" in engine.options:
        assert made.accepted() > count, "hardly a draft was accepted"
    tokenizer: Any = AutoTokenizer.from_pretrained(options_of(engine, side)["model"])
    made.close()
    return answers, Tools(
        lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
    )


def _judge(row: Row, answers: list[Any], stock: list[Any] | None, tools: Tools) -> dict[str, Any]:
    wrong: list[str] = []
    for number, answer in enumerate(answers):
        if row.check is None:
            assert stock is not None
            same = "error" not in answer and answer["outputs"][0]["ids"] == stock[number]["outputs"][0]["ids"]
            fault = None if same else f"{answer} is not {stock[number]}"[:600]
        else:
            fault = (
                answer.get("text")
                if isinstance(answer, dict) and "error" in answer
                else row.check(answer, number, tools)
            )
        if fault is not None:
            wrong.append(f"request {number}: {fault}")
    return {"name": row.name, "requests": len(answers), "right": len(answers) - len(wrong), "wrong": wrong[:1]}


def _child(rows: Sequence[Row], count: int, side: str, folder: Path, runner: str) -> NoReturn:
    """A process with surroundings of its own."""
    status = 1
    run = tempfile.mkdtemp(prefix="m", dir="/tmp")
    try:
        empty = folder / side
        empty.mkdir(parents=True)
        log = os.open(empty / LOG, os.O_RDWR | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(empty)
        if rows[0].toml:
            (empty / "meridian.toml").write_text(rows[0].toml)
        os.environ |= {"HOME": str(empty), "XDG_RUNTIME_DIR": run}
        if side == "stock":
            os.environ["VLLM_PLUGINS"] = ""
        from checks.engine import cpu

        cpu.install(asynchronous=runner == V2)
        answers, tools = _play(rows, count, side)
        if side == "stock":
            kept = {row.name: own for row, own in zip(rows, answers, strict=True)}
            (folder / STOCK).write_text(json.dumps(kept))
        else:
            stock = json.loads((folder / STOCK).read_text()) if (folder / STOCK).exists() else {}
            found = [_judge(row, own, stock.get(row.name), tools) for row, own in zip(rows, answers, strict=True)]
            (folder / FOUND).write_text(json.dumps(found))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        shutil.rmtree(run, ignore_errors=True)
        os._exit(status)


def _run(rows: Sequence[Row], count: int, folder: Path, runner: str) -> list[dict[str, Any]]:
    """Rows of one engine and configuration."""
    compared = [row for row in rows if row.check is None]
    for side, own in (("stock", compared), ("meridian", rows)):
        if own:
            pid = os.fork()
            if not pid:
                _child(own, count, side, folder, runner)
            os.waitpid(pid, 0)
    if (folder / FOUND).exists():
        return json.loads((folder / FOUND).read_text())
    log = (folder / "meridian" / LOG).read_text().splitlines()[-8:]
    return [{"name": row.name, "requests": count, "right": 0, "wrong": [" | ".join(log)]} for row in rows]


def main() -> int:
    """Command line; the exit code is 0 also if a row is wrong."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--count", type=int, default=24, help="requests of each row")
    p.add_argument("--out", type=Path, required=True, help="write the rows to this file")
    p.add_argument("--only", action="append", help="only this row; may be given again")
    p.add_argument("--runner", choices=RUNNERS, default=V1, help="vLLM's model runner; v2 schedules asynchronously")
    a = p.parse_args()
    prepare(a.runner)
    groups: dict[str, list[Row]] = {}
    for row in ROWS:
        if a.runner in row.runners and (not a.only or row.name in a.only):
            groups.setdefault(f"{row.engine} {row.toml}", []).append(row)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="asked") as kept:
        for number, rows in enumerate(groups.values()):
            for last in _run(rows, a.count, Path(kept) / f"{number:02}", a.runner):
                found.append(last)
                shown = f"{last['right']} of {last['requests']}: {last['name']} {''.join(last['wrong'])}"
                print(shown, file=sys.stderr, flush=True)
    a.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
