#!/usr/bin/env python3
"""Asks the model that `make serve` serves for a sum, and shows its thinking, its answer and whether that is right.

The question is a chain such as "7 + 5 * 3", computed from left to right modulo 23. With --budget, Meridian ends the
thinking after at most so many tokens. Needs a Python 3.10, nothing else.

Exit codes: 0 the answer is right, 1 it is wrong, 2 bad input or no server.

    ask.py --budget 12 "7 + 5 * 3"
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

MODULUS = 23
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def solve(question: str) -> int:
    """The true answer.

    Raises:
        ValueError: the question is no chain.
    """
    first, *rest = question.split()
    if len(rest) % 2:
        raise ValueError("an operation lacks its number")
    value = int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        if sign not in OPERATIONS:
            raise ValueError(f"{sign!r} is not + - or *")
        value = OPERATIONS[sign](value, int(number))
    return value % MODULUS


def stream(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed chat completion."""
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data and data != "[DONE]":
                yield json.loads(data)


def ask(port: int, question: str, budget: int | None) -> tuple[str, int]:
    """Print thinking and answer as they come; the answer, and the think tokens."""
    body: dict[str, Any] = {
        "model": "arith-reasoner",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if budget is not None:
        body["vllm_xargs"] = {"meridian_think_budget": budget}
    answer, thought, field = "", 0, ""
    for chunk in stream(port, body):
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        if usage := chunk.get("usage"):
            details = usage.get("completion_tokens_details") or {}
            thought = details.get("reasoning_tokens") or thought
        for choice in chunk["choices"]:
            for name, title in (("reasoning", "thinks:"), ("content", "answers:")):
                text = choice["delta"].get(name)
                if not text:
                    continue
                if name != field:
                    print(f"\n{title}" if field else title)
                    field, text = name, text.lstrip()
                print(text, end="", flush=True)
                answer += text if name == "content" else ""
    print()
    return answer.strip(), thought


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Ask the model of `make serve` for a chain such as '7 + 5 * 3', from left to right, modulo 23.",
        epilog='Example: ask.py --budget 12 "7 + 5 * 3"',
    )
    parser.add_argument("question")
    parser.add_argument("--port", type=int, default=8000, help="of the server (default 8000)")
    parser.add_argument("--budget", type=int, help="most think tokens (default: no limit)")
    args = parser.parse_args()
    try:
        expected = solve(args.question)
    except ValueError as error:
        parser.error(f"QUESTION: {args.question!r}: {error}; expected a chain such as '7 + 5 * 3'")
    try:
        answer, thought = ask(args.port, args.question, args.budget)
    except urllib.error.HTTPError as refused:
        sys.stderr.write(f"error: {refused.code}: {refused.read().decode(errors='replace')[:300]}\n")
        return 2
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: port {args.port}: {error}; `make serve` starts the server\n")
        return 2
    right = answer == f"ans {expected}"
    print(f"{'right' if right else f'wrong, it is {expected}'}; {thought} think tokens")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
