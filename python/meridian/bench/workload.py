"""Requests for the engine benchmarks: a seeded generator, the scenarios it fills, and readers of recorded traces.

Lengths are tokens, times are seconds from the start of the run.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

Knots = Sequence[tuple[float, float]]

# Quantiles (probability, tokens) of DeepSeek-R1 requests: alibaba/ServeGen data/reason/deepseek-r1 (Apache-2.0, commit
# f891d118), 7,551 requests over 2 h with the fields drawn independently. Between knots the length is log-linear, which
# gives means of 939 / 2,486 / 559 tokens (sample: 937 / 2,480 / 557) and the sample's p95 of 5,034 / 8,008 / 2,045. A
# log-normal misses the means by 40 %: prompts have a far longer tail, and thinking is bimodal.
PROMPT_TOKENS: Knots = (
    (0, 4), (0.01, 9), (0.05, 16), (0.1, 26), (0.25, 56), (0.5, 117), (0.75, 273), (0.85, 786), (0.9, 1240),
    (0.925, 2145), (0.95, 5033), (0.97, 8902), (0.98, 11839), (0.99, 18278), (0.995, 24211), (0.999, 30095), (1, 51840),
)  # fmt: skip
THINK_TOKENS: Knots = (
    (0, 7), (0.01, 128), (0.05, 210), (0.1, 279), (0.25, 465), (0.5, 1526), (0.75, 3502), (0.85, 4796), (0.9, 6017),
    (0.925, 6809), (0.95, 8007), (0.97, 9660), (0.98, 10910), (0.99, 13441), (0.995, 15982), (0.999, 20448), (1, 25942),
)  # fmt: skip
OUTPUT_TOKENS: Knots = (
    (0, 1), (0.01, 4), (0.05, 10), (0.1, 22), (0.25, 100), (0.5, 305), (0.75, 660), (0.85, 973), (0.9, 1316),
    (0.925, 1608), (0.95, 2045), (0.97, 2619), (0.98, 3192), (0.99, 4056), (0.995, 5111), (0.999, 7437), (1, 16140),
)  # fmt: skip
# Gaps between arrivals: coefficient of variation of the same sample. Its drift over minutes is left out, because a run
# lasts seconds.
GAP_CV = 1.26
# Share of requests of the sample's eight busiest clients; the last name stands for all others.
TENANTS: Mapping[str, float] = {
    "a": 0.520, "b": 0.092, "c": 0.068, "d": 0.043, "e": 0.036, "f": 0.029, "g": 0.029, "h": 0.025, "other": 0.158,
}  # fmt: skip
FIELDS = ("arrival_s", "prompt_tokens", "think_tokens", "output_tokens", "tenant")


@dataclass(frozen=True)
class TraceRequest:
    """One request: when it arrives (s) and how many tokens each phase has; the end marker is not counted."""

    arrival_s: float
    prompt_tokens: int
    think_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0  # lower is more urgent
    deadline_ms: float | None = None  # after arrival; None for none


@dataclass(frozen=True)
class Scenario:
    """A generated workload and the engine it runs on; token factors multiply the fitted lengths."""

    about: str
    requests: int
    rate_per_s: float
    prompt_factor: float
    think_factor: float
    output_factor: float
    longest: float  # quantile to which longer lengths are cut
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_blocks: int | None  # None: as many as the engine's default memory holds
    block_size: int = 32
    # (dotted field, value) of meridian.toml: what an operator of this engine would set.
    settings: tuple[tuple[str, str], ...] = ()


# Chosen by experiment with vLLM 0.32's own scheduler on two cores and the tiny random model, where a run takes 13-25 s.
# - Thinking and output share one factor, so their ratio is the sample's; it only shortens the run.
# - Prompts of `loaded` shrink less. A token of prefill there costs 0.06 ms and a decode step of a full batch about
#   15 ms: a long prompt holds up running decodes several-fold, as it does on a GPU.
# - Lengths are cut at the fitted p95: one longer request would outlive all others and be half of the run alone.
# With the stock scheduler `loaded` fills the batch while arrivals last, its output ITL is several times larger at p99
# than at p50, and nothing is preempted; `kv-tight` preempts tens of requests, some of them in the output phase.
# What an operator of this engine would set: a full batch decodes in about 13 ms, and a step that carries prefill takes
# longer than its tokens account for, so a target near 13 ms would spend its time on many small prefill chunks.
TARGET = (("scheduler.output_tpot_budget_ms", "24"),)

SCENARIOS: Mapping[str, Scenario] = {
    "loaded": Scenario(
        about="KV ample, batch full",
        requests=240,
        rate_per_s=22.0,
        prompt_factor=0.6,
        think_factor=0.08,
        output_factor=0.08,
        longest=0.95,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        kv_blocks=None,
        settings=TARGET,
    ),
    "kv-tight": Scenario(
        about="KV short, requests are preempted",
        requests=120,
        rate_per_s=12.0,
        prompt_factor=0.2,
        think_factor=0.08,
        output_factor=0.08,
        longest=0.95,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        kv_blocks=160,
        settings=TARGET,
    ),
}


def quantile(knots: Knots, p: float) -> float:
    """Length in tokens at probability ``p`` in [0, 1], log-linear between knots."""
    for (p0, v0), (p1, v1) in pairwise(knots):
        if p <= p1:
            return v0 * (v1 / v0) ** ((p - p0) / (p1 - p0))
    return knots[-1][1]


def stratified(rng: random.Random, knots: Knots, n: int, factor: float, longest: float) -> list[int]:
    """One draw from each of ``n`` equal shares of the distribution, shuffled.

    Plain draws of so heavy a tail differ several-fold in total work from seed to seed at n = 120; these differ little.
    """
    lengths = [max(1, round(factor * quantile(knots, min(longest, (i + rng.random()) / n)))) for i in range(n)]
    rng.shuffle(lengths)
    return lengths


def generate(
    seed: int,
    n: int,
    rate_per_s: float,
    *,
    prompt_factor: float = 1.0,
    think_factor: float = 1.0,
    output_factor: float = 1.0,
    longest: float = 1.0,
) -> list[TraceRequest]:
    """``n`` requests in order of arrival, the last at ``n / rate_per_s`` seconds; the same seed gives the same list.

    The factors multiply the fitted lengths; lengths past the fitted quantile ``longest`` are cut to it.
    """
    rng = random.Random(seed)
    shape = 1 / GAP_CV**2
    gaps = [rng.gammavariate(shape, 1 / shape) for _ in range(n)]
    stretch = n / rate_per_s / sum(gaps)
    columns = zip(
        gaps,
        stratified(rng, PROMPT_TOKENS, n, prompt_factor, longest),
        stratified(rng, THINK_TOKENS, n, think_factor, longest),
        stratified(rng, OUTPUT_TOKENS, n, output_factor, longest),
        rng.choices(list(TENANTS), list(TENANTS.values()), k=n),
        strict=True,
    )
    now_s, out = 0.0, []
    for gap, prompt, think, output, tenant in columns:
        now_s += gap * stretch
        out.append(TraceRequest(round(now_s, 6), prompt, think, output, tenant))
    return out


def scenario_requests(name: str, seed: int) -> list[TraceRequest]:
    """The generated requests of a scenario, before ``fit`` clips them to its context length."""
    s = SCENARIOS[name]
    return generate(
        seed,
        s.requests,
        s.rate_per_s,
        prompt_factor=s.prompt_factor,
        think_factor=s.think_factor,
        output_factor=s.output_factor,
        longest=s.longest,
    )


def _bad(path: Path, line: int, column: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{path}:{line}: column {column}: got {value!r}, expected {expected}")


def _number(path: Path, line: int, row: Mapping[str, object], column: str) -> float:
    value = row.get(column)
    if value is None or value == "":
        raise _bad(path, line, column, value, "a value")
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise _bad(path, line, column, value, "a finite number, not negative")
    return number


def _priority(path: Path, line: int, row: Mapping[str, object]) -> int:
    value = row.get("priority")
    try:
        return 0 if value in (None, "") else int(str(value))
    except ValueError:
        raise _bad(path, line, "priority", value, "a whole number") from None


def _tokens(path: Path, line: int, row: Mapping[str, object], column: str, least: int) -> int:
    number = _number(path, line, row, column)
    if number != int(number) or number < least:
        raise _bad(path, line, column, row[column], f"a whole number of tokens, at least {least}")
    return int(number)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, object]]]:
    with path.open(newline="", encoding="utf-8") as f:
        if path.suffix in (".jsonl", ".json", ".ndjson"):
            for line, text in enumerate(f, 1):
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except json.JSONDecodeError as e:
                    raise _bad(path, line, "(all)", text.strip()[:60], f"one JSON object a line ({e.msg})") from e
                if not isinstance(row, dict):
                    raise _bad(path, line, "(all)", text.strip()[:60], "one JSON object a line")
                yield line, row
            return
        reader = csv.DictReader(f)
        missing = [c for c in FIELDS[:4] if c not in (reader.fieldnames or ())]
        if missing:
            header = ",".join(reader.fieldnames or ())
            raise _bad(path, 1, missing[0], header, f"a header with {','.join(FIELDS[:4])}[,tenant]")
        for row in reader:
            yield reader.line_num, row


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests of a CSV (header ``arrival_s,prompt_tokens,think_tokens,output_tokens``, and perhaps ``tenant``,
    ``priority`` and ``deadline_ms``) or of a JSONL file.

    JSONL is chosen by the suffix ``.jsonl``, ``.ndjson`` or ``.json``. Sorted by arrival. Raises ``ValueError`` with
    file, line, column, value and what was expected; ``OSError`` when the file cannot be read.
    """
    out = [
        TraceRequest(
            _number(path, line, row, "arrival_s"),
            _tokens(path, line, row, "prompt_tokens", 1),
            _tokens(path, line, row, "think_tokens", 0),
            _tokens(path, line, row, "output_tokens", 1),
            str(row.get("tenant") or ""),
            _priority(path, line, row),
            _number(path, line, row, "deadline_ms") if row.get("deadline_ms") not in (None, "") else None,
        )
        for line, row in _rows(path)
    ]
    if not out:
        raise ValueError(f"{path}: no requests, expected at least one row")
    return sorted(out, key=lambda r: r.arrival_s)


def fit(
    requests: Sequence[TraceRequest], max_tokens: int, *, scale_tokens: float = 1.0, scale_time: float = 1.0
) -> tuple[list[TraceRequest], int]:
    """Scale a trace and clip each request to ``max_tokens`` in all; returns it with the number of requests clipped.

    All lengths are multiplied by ``scale_tokens`` and arrivals, counted from the first, by ``scale_time``. A request
    that is still too long loses prompt first, down to a quarter of ``max_tokens``; then both other phases shrink alike.
    """
    out, clipped = [], 0
    start_s = min((r.arrival_s for r in requests), default=0.0)
    for r in requests:
        prompt = max(1, round(r.prompt_tokens * scale_tokens))
        think = round(r.think_tokens * scale_tokens)
        output = max(1, round(r.output_tokens * scale_tokens))
        over = prompt + think + output - max_tokens
        if over > 0:
            clipped += 1
            prompt -= min(over, max(0, prompt - max_tokens // 4))
            room = max_tokens - prompt
            if think + output > room:
                output = max(1, round(output * room / (think + output)))
                think = room - output
        arrival_s = (r.arrival_s - start_s) * scale_time
        out.append(replace(r, arrival_s=arrival_s, prompt_tokens=prompt, think_tokens=think, output_tokens=output))
    return out, clipped
