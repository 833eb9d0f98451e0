#!/usr/bin/env python3
"""Does a handoff change a token or lose a request, how even are its answers, and do all finish when an engine dies?

    python bench/vllm/handoff.py --meridian target/release/meridian --requests 500 --killed 200

Two engines with `meridian handoff` before them, each with all its processes on a core of its own, and for comparison
one stock engine of both cores. All run the bundled reasoner in float32. Part `equal` compares tokens with those of one
engine. Part `itl` measures the gaps between the tokens of an answer under the same load, and the cost in tokens for
each second. Part `kills` kills the engine that answers while it answers, again and again, until so many answers were
cut. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests" / "vllm"))

from meridian.vllm.bench.model import reasoner_dir
from serving import CONNECTOR, Fleet, configure, free_port

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("equal", "itl", "kills")
QUESTION, BOS, THINK, THINK_END = 27, 33, 36, 37
MAX_TOKENS = (160, 280)
# Requests of this seed come before those that are measured: the engines meet at the first transfer.
WARM_UP_SEED = 10_000


def prompt(rng: random.Random) -> list[int]:
    """A question of the reasoner."""
    chain = [rng.randrange(23)]
    for _ in range(rng.randint(2, 6)):
        chain += [rng.choice((23, 24, 25)), rng.randrange(23)]
    return [BOS, *chain, QUESTION, THINK]


@contextmanager
def engine(cores: str, connector: bool) -> Iterator[Fleet]:
    """A ready engine with all its processes on these cores.

    A process of vLLM that waits for another one yields its core in a loop, and Linux 6.18 moves it behind all others of
    the core each time. Where engines share cores, a process then reads its messages up to a quarter of a second late.
    """
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        environment = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_PLUGINS": ""}
        options = ["--dtype", "float32"]
        if connector:
            lines = subprocess.check_output([ROOT / "scripts" / "setup-handoff.sh"], text=True).splitlines()
            environment |= dict(line.split("=", 1) for line in lines)
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            options += ["--kv-transfer-config", json.dumps(CONNECTOR)]
        ours = os.sched_getaffinity(0)
        first, _, last = cores.partition("-")
        os.sched_setaffinity(0, range(int(first), int(last or first) + 1))
        try:
            running = Fleet(Path(name), configure(Path(name)), options, environment, 1, reasoner_dir())
        finally:
            os.sched_setaffinity(0, ours)
        try:
            running.wait_until_ready()
            yield running
        finally:
            running.kill()


@contextmanager
def front(meridian: Path, think: Fleet, answer: Fleet) -> Iterator[str]:
    """The address of `meridian handoff` before two engines."""
    command = [meridian, "handoff", "--think", think.base, "--answer", answer.base, "--listen", "127.0.0.1:0"]
    command += ["--think-end", "</think>", "--threshold-blocks", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MERIDIAN_CONFIG": ""})
    try:
        assert process.stdout is not None
        yield "http://" + process.stdout.readline().split()[2].rstrip(";")
    finally:
        process.kill()
        process.wait()


def counters(base: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{base}/metrics") as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


@dataclass
class Seen:
    """Tokens of each request in their order, None for a lost one, and times in milliseconds."""

    tokens: list[list[int] | None] = field(default_factory=list)
    output_itl_ms: list[float] = field(default_factory=list)
    ttot_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        count = sum(len(tokens) for tokens in self.tokens if tokens is not None)
        p99 = statistics.quantiles(self.output_itl_ms, n=100)[98]
        return {
            "output_itl_p50_ms": statistics.median(self.output_itl_ms),
            "output_itl_p99_ms": p99,
            "ttot_p50_ms": statistics.median(self.ttot_ms),
            "tokens_per_s": count / self.seconds,
        }


async def load(base: str, seed: int, requests: int, in_flight: int, at: Callable[[Seen, int], None] | None) -> Seen:
    """Stream so many requests, some at a time; `at` is called with the number of answers under way."""
    import aiohttp

    rng = random.Random(seed)
    bodies = [{"prompt": prompt(rng), "max_tokens": rng.randint(*MAX_TOKENS)} for _ in range(requests)]
    common = {"model": "tiny-random", "temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
    seen = Seen(tokens=[None] * requests)
    waiting = iter(range(requests))
    answering = 0

    async def one(session: Any, i: int) -> None:
        nonlocal answering
        tokens: list[int] = []
        ended_at = last_at = None
        finished = False
        try:
            async with session.post(f"{base}/v1/completions", json={**common, **bodies[i]}) as response:
                async for line in response.content:
                    text = line.decode().removeprefix("data: ").strip()
                    if not text or text == "[DONE]":
                        finished |= text == "[DONE]"
                        continue
                    new = (json.loads(text).get("choices") or [{}])[0].get("token_ids") or []
                    now = 1e3 * time.perf_counter()
                    if ended_at is None and THINK_END in new:
                        ended_at = now
                    elif ended_at is not None and new:
                        if last_at is None:
                            seen.ttot_ms.append(now - ended_at)
                            answering += 1
                            if at is not None:
                                at(seen, answering)
                        else:
                            seen.output_itl_ms.append((now - last_at) / len(new))
                        last_at = now
                    tokens += new
        except aiohttp.ClientError as error:
            print(f"request lost: {error}", file=sys.stderr)
        if last_at is not None:
            answering -= 1
        if finished and len(tokens) == bodies[i]["max_tokens"]:
            seen.tokens[i] = tokens

    async def client(session: Any) -> None:
        for i in waiting:
            await one(session, i)

    begun = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(1200)) as session:
        await asyncio.gather(*(client(session) for _ in range(in_flight)))
    seen.seconds = time.perf_counter() - begun
    return seen


def run(base: str, seed: int, requests: int, in_flight: int, at: Callable[[Seen, int], None] | None = None) -> Seen:
    return asyncio.run(load(base, seed, requests, in_flight, at))


def compared(one: Seen, both: Seen) -> dict[str, int]:
    pairs = [(a, b) for a, b in zip(one.tokens, both.tokens, strict=True) if b is not None]
    return {"lost": both.tokens.count(None), "differing": sum(a != b for a, b in pairs)}


def equal_and_itl(a: argparse.Namespace) -> dict[str, Any]:
    with engine("0-1" if (os.cpu_count() or 1) > 1 else "0", connector=False) as stock:
        run(stock.base, WARM_UP_SEED, a.in_flight, a.in_flight)
        one = run(stock.base, 0, a.requests, a.in_flight)
    with ExitStack() as stack:
        think = stack.enter_context(engine("0", connector=True))
        answer = stack.enter_context(engine("1" if (os.cpu_count() or 1) > 1 else "0", connector=True))
        base = stack.enter_context(front(a.meridian, think, answer))
        run(base, WARM_UP_SEED, a.in_flight, a.in_flight)
        before = handed_over(base)
        both = run(base, 0, a.requests, a.in_flight)
        moved = handed_over(base) - before
        counted = counters(base)
    went_on = {name: value for name, value in counted.items() if "first_engine" in name}
    return {
        "equal": {"requests": a.requests, **compared(one, both), "handed_over": moved, "went_on": went_on},
        "itl": {"stock": one.summary(), "handoff": both.summary()},
    }


def handed_over(base: str) -> float:
    return sum(value for name, value in counters(base).items() if "handed_over_total" in name)


# Answers that the killed engine was asked for; the others stayed, or came when it was known to fail.
CUT = re.compile(r'first_engine_total{reason="(broken|refused|stalled|unreachable)"}')


def killed_round(a: argparse.Namespace, think: Fleet, seed: int) -> tuple[Seen, dict[str, float]]:
    """Requests whose answering engine is killed once a quarter of them has a first token: the transfers of others are
    under way."""
    with engine("1" if (os.cpu_count() or 1) > 1 else "0", connector=True) as answer:

        def at(_: Seen, answering: int) -> None:
            if answering >= max(1, a.in_flight // 4):
                answer.kill()

        with front(a.meridian, think, answer) as base:
            return run(base, seed, a.in_flight, a.in_flight, at), counters(base)


def kills(a: argparse.Namespace) -> dict[str, Any]:
    cut = lost = differing = rounds = requests = 0
    with engine("0", connector=True) as think:
        while cut < a.killed:
            one = run(think.base, rounds, a.in_flight, a.in_flight)
            both, counted = killed_round(a, think, rounds)
            went_on = sum(value for name, value in counted.items() if CUT.search(name))
            cut += int(went_on)
            found = compared(one, both)
            lost, differing = lost + found["lost"], differing + found["differing"]
            rounds, requests = rounds + 1, requests + a.in_flight
            print(f"round {rounds}: {cut} of {a.killed} answers cut", file=sys.stderr)
            if went_on == 0:
                sys.exit("error: a round cut no answer, so there would be no end")
    return {"kills": {"rounds": rounds, "requests": requests, "cut": cut, "lost": lost, "differing": differing}}


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--meridian", type=Path, default=ROOT / "target" / "release" / "meridian", help="the command")
    p.add_argument("--requests", type=int, default=500, help="requests of `equal` and `itl`")
    p.add_argument("--in-flight", type=int, default=16, help="requests at a time")
    p.add_argument("--killed", type=int, default=200, help="answers to cut in `kills`")
    p.add_argument("--part", action="append", choices=PARTS, help="what to measure; by default, all")
    a = p.parse_args()
    if min(a.requests, a.in_flight, a.killed) < 1:
        p.error("--requests, --in-flight, --killed: expected at least 1")
    parts = set(a.part or PARTS)
    result: dict[str, Any] = {}
    if parts & {"equal", "itl"}:
        result |= equal_and_itl(a)
    if "kills" in parts:
        result |= kills(a)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
