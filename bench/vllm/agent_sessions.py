"""Sessions of coding agents in the real engine, in a closed loop and scaled down.

    python bench/vllm/agent_sessions.py --trace agentic_sessions.jsonl --sessions 40 --eviction native:cost-aware

The sessions of the trace are played one turn after the other: the next request of a session arrives its gap after the
last one ended. A block of the trace's prompts, 64 tokens, becomes `--block-tokens` tokens; gaps and lengths of outputs
become shorter too. A request that stopped for a tool in the trace ends with the model's tool-call token here. Sampling
is greedy and in float32, so that every policy must generate the same tokens. Prints one JSON object.
"""

from __future__ import annotations

import argparse
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

sys.path.insert(0, str(Path(__file__).resolve().parent))

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.probe import Observed, SchedulerProbe
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import STOCK, Options, Run, build, warm_up

PROGRESS_S = 10
BLOCK_SIZE = 32
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


def turns_of(
    row: dict[str, Any],
    args: argparse.Namespace,
    vocabulary: range,
    tail: tuple[int, ...],
) -> list[Turn]:
    """The first turns of a session, as tokens."""
    texts: dict[int, tuple[int, ...]] = {}

    def text(block: int) -> tuple[int, ...]:
        if block not in texts:
            rng = random.Random(f"{row['id']}/{block}")
            texts[block] = tuple(rng.choice(vocabulary) for _ in range(args.block_tokens))
        return texts[block]

    most = args.max_model_len - 64
    before: list[tuple[int, ...]] = []
    turns = []
    for request in row["requests"][: args.turns]:
        _, _, output, _, gap_s, stop, thinks, ranges = request
        prompt = tuple(itertools.chain.from_iterable(text(block) for block in block_ids(ranges)))
        if len(prompt) > most:
            break
        shared = max((common(prompt, earlier) for earlier in before), default=0)
        reusable = min(shared, len(prompt)) // BLOCK_SIZE * BLOCK_SIZE
        turns.append(
            Turn(
                (*prompt, *tail),
                max(2, min(round(output * args.output_scale), 48)),
                bool(thinks),
                # The trace does not know every gap.
                min(gap_s or 0.0, args.longest_gap_s) * args.gap_scale,
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


def sessions_of(args: argparse.Namespace, run: Run) -> list[Session]:
    """The sessions to play: `--sessions` of the trace, from `--skip` on."""
    sessions = []
    rng = random.Random(args.seed)
    starts_s = 0.0
    with args.trace.open() as file:
        rows = (json.loads(line) for line in itertools.islice(file, args.skip, None))
        for row in rows:
            turns = turns_of(row, args, run.vocabulary, run.template.tail)
            if len(turns) >= 3:
                sessions.append(Session(row["id"], turns, starts_s))
                starts_s += rng.expovariate(1.0) * args.start_gap_s
            if len(sessions) == args.sessions:
                break
    return sessions


def play(run: Run, sessions: list[Session]) -> float:
    """Play all sessions to their end; returns the makespan in seconds."""
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
            done, of = (
                sum(len(s.seen) for s in sessions),
                sum(len(s.turns) for s in sessions),
            )
            print(f"{done} of {of} turns", file=sys.stderr, flush=True)
    return time.perf_counter() - start


def send(run: Run, name: str, turn: Turn, session: str, seen: Observed) -> None:
    """Send a turn, with its session's name."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    planned = seen.planned
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        max_tokens=planned.think_tokens + len(run.end_ids) + planned.output_tokens,
        thinking_token_budget=planned.think_tokens + run.tokens_before_think,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"meridian_session": session, CALLS_TOOL: turn.calls_tool},
    )
    run.by_name[name] = seen
    run.seen[run.engine.add_request(name, {"prompt_token_ids": list(turn.prompt)}, params)] = seen


def tool_calls(run: Run) -> tuple[int, ...]:
    """The token that begins a tool call in this model."""
    tokenizer = run.engine.get_tokenizer()
    return tuple(tokenizer.encode("<tool_call>", add_special_tokens=False))


def end_with_tool_calls(run: Run) -> None:
    """Make the last token of a request that calls a tool the one that begins a tool call."""
    marker = tool_calls(run)[-1]
    requests = run.scheduler.requests
    update = run.scheduler.update_from_output

    def with_tool_call(output: Any, result: Any) -> Any:
        for request_id, at in result.req_id_to_index.items():
            request, tokens = requests.get(request_id), result.sampled_token_ids[at]
            params = None if request is None else request.sampling_params
            if request is None or params is None or not len(tokens) or not (params.extra_args or {}).get(CALLS_TOOL):
                continue
            if request.num_output_tokens + len(tokens) >= params.max_tokens:
                tokens[-1] = marker
        return update(output, result)

    run.scheduler.update_from_output = with_tool_call


def percentile(values: list[float], share: float) -> float:
    """A percentile, by the nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(args: argparse.Namespace, run: Run, sessions: list[Session], makespan_s: float) -> dict[str, Any]:
    """What was seen."""
    turns = [(t, s.seen[i], s.seen[i].cached_tokens or 0) for s in sessions for i, t in enumerate(s.turns)]
    ttft = [1e3 * (seen.times[0] - seen.arrival) for _, seen, _ in turns]
    completions = [session.ended - session.started for session in sessions]
    recomputed = sum(max(0, turn.reusable_tokens - cached) for turn, _, cached in turns)
    prompt = sum(len(turn.prompt) for turn, _, _ in turns)
    document = {
        "scheduler": args.scheduler,
        "eviction": args.eviction,
        "sessions": len(sessions),
        "turns": len(turns),
        "kv_blocks": args.kv_blocks,
        "prompt_tokens": prompt,
        "hit_rate": sum(cached for *_, cached in turns) / prompt,
        "hit_rate_unlimited": sum(turn.reusable_tokens for turn, *_ in turns) / prompt,
        "recomputed_tokens": recomputed,
        "evicted_and_needed_blocks": recomputed // BLOCK_SIZE,
        "completion_p50_s": percentile(completions, 0.5),
        "completion_p95_s": percentile(completions, 0.95),
        "ttft_p50_ms": percentile(ttft, 0.5),
        "ttft_p95_ms": percentile(ttft, 0.95),
        "ttft_mean_ms": statistics.fmean(ttft),
        "makespan_s": makespan_s,
        "outputs": [[o.tokens for o in session.seen] for session in sessions] if args.outputs else None,
    }
    if args.scheduler != STOCK:
        document["kv"] = run.scheduler.meridian_stats()["kv"]
        document["faults"] = run.scheduler.meridian_stats()["faults"]
    return document


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="agentic_sessions.jsonl")
    parser.add_argument(
        "--scheduler",
        default=STOCK,
        help="stock, or a dispatch policy such as native:fcfs",
    )
    parser.add_argument(
        "--eviction",
        default="native:tiered-lru",
        help="an eviction policy, unless stock",
    )
    parser.add_argument("--eviction-config", default="{}", help="its options, as a TOML inline table")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument(
        "--skip",
        type=int,
        default=0,
        help="sessions of the trace to leave out at its beginning",
    )
    parser.add_argument("--turns", type=int, default=10, help="most turns of a session")
    parser.add_argument("--block-tokens", type=int, default=2, help="tokens for 64 of the trace")
    parser.add_argument("--output-scale", type=float, default=0.03)
    parser.add_argument("--gap-scale", type=float, default=0.01)
    parser.add_argument("--longest-gap-s", type=float, default=100.0)
    parser.add_argument("--start-gap-s", type=float, default=0.05, help="mean time between two starts")
    parser.add_argument("--kv-blocks", type=int, default=900)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--outputs", action="store_true", help="print the tokens of every turn too")
    return parser.parse_args()


def source(policy: str) -> str:
    """A policy as a configuration names it: the path of a component made absolute."""
    return policy if ":" in policy else str(Path(policy).resolve())


def main() -> int:
    """Command line."""
    args = arguments()
    if not args.trace.is_file():
        sys.exit(f"error: --trace: {args.trace}: no such file, expected agentic_sessions.jsonl")
    toml = (
        f'[policy.dispatch]\nsource = "{source(args.scheduler)}"\ndeadline_ms = 1000.0\n'
        f'[policy.eviction]\nsource = "{source(args.eviction)}"\nconfig = {args.eviction_config}\n'
        '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
    )
    run = build(
        Options(
            model=model_dir(),
            scheduler=args.scheduler,
            kv_blocks=args.kv_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            max_model_len=args.max_model_len,
            dtype="float32",
            meridian_toml=toml,
        )
    )
    warm_up(run, args.max_model_len)
    run.engine.reset_prefix_cache()
    end_with_tool_calls(run)
    sessions = sessions_of(args, run)
    makespan_s = play(run, sessions)
    print(json.dumps(report(args, run, sessions, makespan_s)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
