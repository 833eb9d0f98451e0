"""Sessions of coding agents in the real engine, in a closed loop and scaled down.
The sessions of the trace are played one turn after the other: the next request of a session arrives its gap after the
last one ended. A block of the trace's prompts, 64 tokens, becomes two; gaps and lengths of outputs
become shorter too. A request that stopped for a tool in the trace ends with the model's tool-call token here. Sampling
is greedy and in float32, so that every policy must generate the same tokens.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.probe import Observed, SchedulerProbe
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import PROGRESS_S, STOCK, Options, Run, build, warm_up

from checks.engine.cpu_offload import transfer_config
from checks.engine.llm import QUIET, ids, params, percentile

BLOCK_SIZE = 32
SESSIONS, TURNS = 40, 10
# Tokens for a block of 64 of the trace, and what lengths and gaps become.
BLOCK_TOKENS, OUTPUT_SCALE, GAP_SCALE = 2, 0.03, 0.01
LONGEST_GAP_S = 100.0
START_GAP_S = 0.05  # mean time between two starts
MAX_MODEL_LEN = 4096
# Calls a tool with its last token: a request whose `vllm_xargs` say so.
CALLS_TOOL = "bench_calls_tool"


@dataclass(frozen=True)
class Turn:
    """One request of a session, scaled down."""

    prompt: tuple[int, ...]
    output_tokens: int
    thinks: bool
    gap_s: float
    calls_tool: bool
    reusable_tokens: int
    """Tokens at the head of the prompt that the turns before had, in whole blocks."""


@dataclass
class Session:
    """A session, and what was seen of it."""

    name: str
    turns: list[Turn]
    starts_s: float
    started: float = 0.0
    ended: float = 0.0
    seen: list[Observed] = field(default_factory=list)


def block_ids(ranges: list[Any]) -> Iterator[int]:
    """The ids of prefix blocks, written as numbers or as first and last."""
    for part in ranges:
        if isinstance(part, int):
            yield part
        else:
            yield from range(part[0], part[1] + 1)


def turns_of(row: dict[str, Any], vocabulary: range, tail: tuple[int, ...]) -> list[Turn]:
    """The first turns of a session, as tokens."""
    texts: dict[int, tuple[int, ...]] = {}

    def text(block: int) -> tuple[int, ...]:
        if block not in texts:
            rng = random.Random(f"{row['id']}/{block}")
            texts[block] = tuple(rng.choice(vocabulary) for _ in range(BLOCK_TOKENS))
        return texts[block]

    most = MAX_MODEL_LEN - 64
    before: list[tuple[int, ...]] = []
    turns = []
    for request in row["requests"][:TURNS]:
        _, _, output, _, gap_s, stop, thinks, ranges = request
        prompt = tuple(itertools.chain.from_iterable(text(block) for block in block_ids(ranges)))
        if len(prompt) > most:
            break
        shared = max((common(prompt, earlier) for earlier in before), default=0)
        reusable = min(shared, len(prompt)) // BLOCK_SIZE * BLOCK_SIZE
        turns.append(
            Turn(
                (*prompt, *tail),
                max(2, min(round(output * OUTPUT_SCALE), 48)),
                bool(thinks),
                # The trace does not know every gap.
                min(gap_s or 0.0, LONGEST_GAP_S) * GAP_SCALE,
                stop == "tool_use",
                reusable,
            )
        )
        before = [*before[-3:], prompt]
    return turns


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common beginning."""
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)


def sessions_of(trace: Path, run: Run) -> list[Session]:
    """The sessions to play, the first of the trace that have several turns."""
    sessions: list[Session] = []
    rng = random.Random(1)
    starts_s = 0.0
    with trace.open() as file:
        for row in map(json.loads, file):
            turns = turns_of(row, run.vocabulary, run.template.tail)
            if len(turns) >= 3:
                sessions.append(Session(row["id"], turns, starts_s))
                starts_s += rng.expovariate(1.0) * START_GAP_S
            if len(sessions) == SESSIONS:
                break
    return sessions


def play(run: Run, sessions: list[Session]) -> None:
    """Play all sessions to their end."""
    start = time.perf_counter()
    due = [(start + session.starts_s, i, 0) for i, session in enumerate(sessions)]
    heapq.heapify(due)
    live: dict[int, tuple[Session, int]] = {}
    SchedulerProbe(run.scheduler, run.seen)
    last_said = start
    while due or run.engine.has_unfinished_requests():
        while due and due[0][0] <= time.perf_counter():
            arrival, number, at = heapq.heappop(due)
            session, turn = sessions[number], sessions[number].turns[at]
            if at == 0:
                session.started = arrival
            planned = TraceRequest(0.0, len(turn.prompt), 4 if turn.thinks else 0, turn.output_tokens)
            seen = Observed(number, planned, arrival, run.end_ids, session=number, turn=at)
            session.seen.append(seen)
            send(run, f"{number}-{at}", turn, session.name, seen)
            live[id(seen)] = (session, at)
        if not run.engine.has_unfinished_requests():
            time.sleep(max(0.0, due[0][0] - time.perf_counter()))
            continue
        for seen in run.step():
            session, at = live.pop(id(seen))
            if at + 1 < len(session.turns):
                gap_s = session.turns[at + 1].gap_s
                heapq.heappush(due, (time.perf_counter() + gap_s, seen.index, at + 1))
            else:
                session.ended = time.perf_counter()
        if time.perf_counter() - last_said > PROGRESS_S:
            last_said = time.perf_counter()
            done = sum(len(s.seen) for s in sessions)
            print(f"{done} of {sum(len(s.turns) for s in sessions)} turns", file=sys.stderr, flush=True)


def send(run: Run, name: str, turn: Turn, session: str, seen: Observed) -> None:
    """Send a turn, with its session's name."""
    from vllm.sampling_params import RequestOutputKind

    planned = seen.planned
    sampling = params(
        max_tokens=planned.think_tokens + len(run.end_ids) + planned.output_tokens,
        thinking_token_budget=planned.think_tokens + run.tokens_before_think,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"meridian_session": session, CALLS_TOOL: turn.calls_tool},
    )
    run.by_name[name] = seen
    run.seen[run.engine.add_request(name, {"prompt_token_ids": list(turn.prompt)}, sampling)] = seen


def end_with_tool_calls(run: Run) -> None:
    """Make the last token of a request that calls a tool the one that begins a tool call."""
    marker = ids(run.engine.get_tokenizer(), "<tool_call>")[-1]
    requests = run.scheduler.requests
    update = run.scheduler.update_from_output

    def with_tool_call(output: Any, result: Any) -> Any:
        for request_id, at in result.req_id_to_index.items():
            request, tokens = requests.get(request_id), result.sampled_token_ids[at]
            if request is None or not len(tokens) or not (request.sampling_params.extra_args or {}).get(CALLS_TOOL):
                continue
            if request.num_output_tokens + len(tokens) >= request.sampling_params.max_tokens:
                tokens[-1] = marker
        return update(output, result)

    run.scheduler.update_from_output = with_tool_call


def measure(
    trace: str,
    kv_blocks: int = 900,
    scheduler: str = STOCK,
    eviction: str = "native:tiered-lru",
    offload: str | None = None,
    offload_blocks: int = 0,
) -> dict[str, Any]:
    """Play the first sessions of a trace under stock, or under a dispatch and an eviction policy.

    With `offload`, vLLM's offloading connector keeps so many blocks in host memory, in the order of that policy.
    """
    run = build(
        Options(
            model=model_dir(),
            scheduler=scheduler,
            kv_blocks=kv_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            max_model_len=MAX_MODEL_LEN,
            dtype="float32",
            kv_transfer_config=transfer_config(offload_blocks, offload) if offload else None,
            meridian_toml=f'[policy.dispatch]\nsource = "{scheduler}"\ndeadline_ms = 1000.0\n'
            f'[policy.eviction]\nsource = "{eviction}"\n{QUIET}',
        )
    )
    warm_up(run, MAX_MODEL_LEN)
    run.engine.reset_prefix_cache()
    end_with_tool_calls(run)
    sessions = sessions_of(Path(trace), run)
    play(run, sessions)
    turns = [(t, s.seen[i], s.seen[i].cached_tokens or 0) for s in sessions for i, t in enumerate(s.turns)]
    ttft_ms = [1e3 * (seen.times[0] - seen.arrival) for _, seen, _ in turns]
    completions = [session.ended - session.started for session in sessions]
    prompt = sum(len(turn.prompt) for turn, _, _ in turns)
    return {
        "turns": len(turns),
        "hit_rate": sum(cached for *_, cached in turns) / prompt,
        "hit_rate_unlimited": sum(turn.reusable_tokens for turn, *_ in turns) / prompt,
        "recomputed_tokens": sum(max(0, turn.reusable_tokens - cached) for turn, _, cached in turns),
        "completion_mean_s": statistics.fmean(completions),
        "completion_p50_s": percentile(completions, 0.5),
        "completion_p95_s": percentile(completions, 0.95),
        "ttft_p50_ms": percentile(ttft_ms, 0.5),
        "ttft_p95_ms": percentile(ttft_ms, 0.95),
        "outputs": [[seen.tokens for seen in session.seen] for session in sessions],
    }
