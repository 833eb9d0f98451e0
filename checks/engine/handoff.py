"""Does a handoff change a token or lose a request, how even are its answers, and do all finish when an engine dies?
Two engines with `meridian handoff` before them, each with all its processes on a core of its own, and for comparison
one stock engine of both cores. All run the bundled reasoner in float32. Part `equal` compares tokens with those of one
engine, the gaps between the tokens of an answer under the same load, and tokens a second. Part `kills` kills the engine
that answers while it answers, again and again, until so many answers were cut.
"""

from __future__ import annotations

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

from meridian.vllm.bench.model import reasoner_dir

from checks.run import MERIDIAN, build, fetched
from python.tests.vllm.serving import CONNECTOR, Fleet, configure, free_port

IN_FLIGHT = 16
# The cores of two engines, and of one.
FIRST, SECOND, BOTH = ("0", "1", "0-1") if (os.cpu_count() or 1) > 1 else ("0", "0", "0")
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
            environment |= dict(line.split("=", 1) for line in fetched("handoff").splitlines())
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
def front(think: Fleet, answer: Fleet) -> Iterator[str]:
    """The address of `meridian handoff` before two engines."""
    command = [MERIDIAN, "handoff", "--think", think.base, "--answer", answer.base, "--listen", "127.0.0.1:0"]
    command += ["--think-end", "</think>", "--threshold-blocks", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MERIDIAN_CONFIG": ""})
    try:
        assert process.stdout is not None
        yield "http://" + process.stdout.readline().split()[2].rstrip(";")
    finally:
        process.kill()
        process.wait()


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


async def load(base: str, seed: int, requests: int, at: Callable[[int], None]) -> Seen:
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
                            at(answering)
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
        await asyncio.gather(*(client(session) for _ in range(IN_FLIGHT)))
    seen.seconds = time.perf_counter() - begun
    return seen


def run(base: str, seed: int, requests: int = IN_FLIGHT, at: Callable[[int], None] = lambda answering: None) -> Seen:
    return asyncio.run(load(base, seed, requests, at))


def compared(one: Seen, both: Seen) -> dict[str, int]:
    pairs = [(a, b) for a, b in zip(one.tokens, both.tokens, strict=True) if b is not None]
    return {"lost": both.tokens.count(None), "differing": sum(a != b for a, b in pairs)}


def equal(requests: int) -> dict[str, Any]:
    """Two engines with a handoff between them against one."""
    with engine(BOTH, connector=False) as stock:
        run(stock.base, WARM_UP_SEED)
        one = run(stock.base, 0, requests)
    with ExitStack() as stack:
        think = stack.enter_context(engine(FIRST, connector=True))
        answer = stack.enter_context(engine(SECOND, connector=True))
        base = stack.enter_context(front(think, answer))
        run(base, WARM_UP_SEED)
        before = counted(base, HANDED_OVER)
        both = run(base, 0, requests)
        moved = counted(base, HANDED_OVER) - before
    sides = {"stock": one.summary(), "handoff": both.summary()}
    return {"requests": requests, **compared(one, both), "handed_over": moved, **sides}


HANDED_OVER = re.compile("handed_over_total")
# Answers that the killed engine was asked for; the others stayed, or came when it was known to fail.
CUT = re.compile(r'first_engine_total{reason="(broken|refused|stalled|unreachable)"}')


def counted(base: str, what: re.Pattern[str]) -> int:
    """The sum of some counters."""
    with urllib.request.urlopen(f"{base}/metrics") as response:
        lines = [x.rsplit(" ", 1) for x in response.read().decode().splitlines() if not x.startswith("#")]
    return int(sum(float(value) for name, value in lines if what.search(name)))


def killed_round(think: Fleet, seed: int) -> tuple[Seen, int]:
    """Requests whose answering engine is killed once a quarter of them has a first token: the transfers of others are
    under way. With the number of answers that this cut."""
    with engine(SECOND, connector=True) as answer:

        def at(answering: int) -> None:
            if answering >= IN_FLIGHT // 4:
                answer.kill()

        with front(think, answer) as base:
            return run(base, seed, at=at), counted(base, CUT)


def kills(killed: int) -> dict[str, Any]:
    """Kill engines until so many answers were cut."""
    cut = lost = differing = rounds = 0
    with engine(FIRST, connector=True) as think:
        while cut < killed:
            one = run(think.base, rounds)
            both, more = killed_round(think, rounds)
            found = compared(one, both)
            lost, differing = lost + found["lost"], differing + found["differing"]
            rounds, cut = rounds + 1, cut + more
            print(f"round {rounds}: {cut} of {killed} answers cut", file=sys.stderr)
            if more == 0:
                sys.exit("error: a round cut no answer, so there would be no end")
    return {"rounds": rounds, "cut": cut, "lost": lost, "differing": differing}


def measure(part: str = "equal", requests: int = 500, killed: int = 200) -> dict[str, Any]:
    """One part."""
    build()
    return equal(requests) if part == "equal" else kills(killed)
