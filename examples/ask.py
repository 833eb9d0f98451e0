#!/usr/bin/env python3
"""Asks the model that `make serve` serves for a sum, and shows its thinking, its answer and whether that is right.

The question is a chain such as "7 + 5 * 3", computed from left to right modulo 23. With --budget, Meridian ends the
thinking after at most so many tokens. Needs Python 3.10 or later, nothing else.

Exit codes: 0 the answer is right, 1 it is wrong, 2 bad input or no server.

    ask.py --budget 12 "7 + 5 * 3"
"""

from __future__ import annotations

import argparse
import http.client
import json
import operator
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

MODULUS = 23
# What the model was trained on.
FEWEST_OPERATIONS, MOST_OPERATIONS = 2, 10
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def solve(question: str) -> int:
    """The true answer.

    Raises:
        ValueError: the question is no chain.
    """
    words = question.split()
    if len(words) % 2 == 0:
        raise ValueError("an operation lacks its number" if words else "it is empty")
    if not FEWEST_OPERATIONS <= len(words) // 2 <= MOST_OPERATIONS:
        raise ValueError(f"operations: {len(words) // 2}, the model knows {FEWEST_OPERATIONS} to {MOST_OPERATIONS}")
    for number in words[::2]:
        if not (number.isdecimal() and int(number) < MODULUS):
            raise ValueError(f"{number!r} is not a number from 0 to {MODULUS - 1}")
    value = int(words[0])
    for sign, number in zip(words[1::2], words[2::2], strict=True):
        if sign not in OPERATIONS:
            raise ValueError(f"{sign!r} is not + - or *")
        value = OPERATIONS[sign](value, int(number))
    return value % MODULUS


def stream(port: int, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed chat completion.

    Raises:
        ValueError: the stream broke off.
    """
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    # A proxy of the environment is not for this machine.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=300) as response:
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)
    raise ValueError("the server's answer broke off")


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
    answer, think_tokens, field = "", 0, ""
    for chunk in stream(port, body):
        if "error" in chunk:
            raise ValueError(chunk["error"]["message"])
        if usage := chunk.get("usage"):
            details = usage.get("completion_tokens_details") or {}
            think_tokens = details.get("reasoning_tokens") or think_tokens
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
    return answer.strip(), think_tokens


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description="Ask the model of `make serve` for a chain such as '7 + 5 * 3', from left to right, modulo 23: "
        f"numbers from 0 to {MODULUS - 1}, {FEWEST_OPERATIONS} to {MOST_OPERATIONS} operations.",
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
        answer, think_tokens = ask(args.port, args.question, args.budget)
    except urllib.error.HTTPError as refused:
        sys.stderr.write(f"error: {refused.code}: {refused.read().decode(errors='replace')[:300]}\n")
        return 2
    except (urllib.error.URLError, OverflowError) as error:
        sys.stderr.write(f"error: port {args.port}: {error}; `make serve` starts the server\n")
        return 2
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        sys.stderr.write(f"error: port {args.port}: {error or type(error).__name__}\n")
        return 2
    right = answer == f"ans {expected}"
    print(f"{'right' if right else f'wrong, it is {expected}'}; {think_tokens} think tokens")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
