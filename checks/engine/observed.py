"""One real engine under a steady load, with Meridian's listeners on, for whoever looks at it from outside.

    python -m checks.engine.observed --out rows.json --requests 1000 --in-flight 64 --toml meridian.toml

Prints `ready` when the load begins and `done` when the requests are over, each on a line of its own. It then waits for
the end of its standard input, so that listeners can still be asked. With `--until-eof` it sends requests until then.
With `--against other.toml` the same requests run in turns under both configurations, and only the times are written.
The rows have what a client measured of each request, from the call that sent it to the tokens it got.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import meridian.vllm.bench.run as bench_run
from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.probe import Observed
from meridian.vllm.bench.request import TraceRequest
from meridian.vllm.bench.run import Options, Run, build, end_with_parent, warm_up

TENANTS = ("", "blue", "green", "red")
SCHEDULER = "native:balanced"


def planned(rng: random.Random, index: int, scale: float) -> TraceRequest:
    """A request of mixed lengths; one in six does little but answer."""
    think = rng.randint(2, 8) if index % 6 == 0 else rng.randint(20, 80)
    length = max(4, int(scale * rng.randint(16, 160)))
    tenant = TENANTS[index % len(TENANTS)]
    return TraceRequest(0.0, length, max(2, int(scale * think)), max(2, int(scale * rng.randint(8, 40))), tenant=tenant)


def row_of(name: str, observed: Observed) -> dict[str, Any]:
    """What a client measured, milliseconds; gaps as their sum and number."""
    times, end = observed.times, observed.think_end
    assert end is not None
    assert observed.finished is not None

    def since(then: float) -> float:
        return 1e3 * (then - observed.arrival)

    def gaps(moments: list[float]) -> tuple[float, int]:
        return 1e3 * (moments[-1] - moments[0]) if moments else 0.0, max(len(moments) - 1, 0)

    return {
        "id": name,
        # On the clock of the host's own times.
        "arrival_ms": 1e3 * observed.arrival,
        "ttft_ms": since(times[0]),
        "ttfo_ms": since(times[end + 1]),
        "ttot_ms": 1e3 * (times[end + 1] - times[end]),
        "e2e_ms": since(observed.finished),
        "think_gaps": gaps(times[: end + 1]),
        "output_gaps": gaps(times[end + 1 :]),
        "tokens": len(times),
    }


def drive(run: Run, a: argparse.Namespace, ended: threading.Event) -> list[dict[str, Any]]:
    """Keep so many requests in flight until all are over."""
    rng = random.Random(0)
    names: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    sent = 0
    while True:
        more = not ended.is_set() if a.until_eof else sent < a.requests
        is_lull = a.lull_s > 0 and time.perf_counter() // a.lull_s % 2 == 1
        while more and len(run.by_name) < (a.in_flight // 3 if is_lull else a.in_flight):
            request = planned(rng, sent, a.scale)
            if a.sessions:
                request = replace(request, session=sent % a.sessions)
            arrival = time.perf_counter()
            # A prompt is as many of the numbers as it is long: prompts of one session begin alike.
            own = random.Random(f"0 {request.session}") if request.session is not None else rng
            observed = run.add(str(sent), request, sent, arrival, own)
            names[str(sent)] = next(reversed(run.seen))
            assert run.seen[names[str(sent)]] is observed
            sent += 1
            more = a.until_eof or sent < a.requests
        if not run.engine.has_unfinished_requests():
            return rows
        for observed in run.step():
            name = str(observed.index)
            rows.append(row_of(names.pop(name), observed))
            del run.by_name[name]


def turns(run: Run, a: argparse.Namespace) -> list[dict[str, Any]]:
    """The same requests under both configurations, in turns; the first turn of each is a warm-up."""
    from meridian import load_config
    from meridian.vllm.parts import make_engine

    engines = [make_engine(load_config(path), run.scheduler, serves=True) for path in (a.toml, a.against)]
    found = []
    for pair in range(a.pairs + 1):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        times = [0.0, 0.0]
        tokens = 0
        for which in order:
            run.scheduler._meridian_use(engines[which])
            assert run.engine.reset_prefix_cache() is not False
            start = time.perf_counter()
            rows = drive(run, a, threading.Event())
            times[which] = time.perf_counter() - start
            tokens = sum(row["tokens"] for row in rows)
        if pair > 0:
            found.append({"times_s": times, "tokens": tokens})
    return found


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--toml", type=Path, required=True, help="configuration of the engine")
    p.add_argument("--out", type=Path, help="write the rows here")
    p.add_argument("--requests", type=int, default=100)
    p.add_argument("--in-flight", type=int, default=24)
    p.add_argument("--max-num-seqs", type=int, default=16)
    p.add_argument("--kv-blocks", type=int, default=96)
    p.add_argument("--scale", type=float, default=1.0, help="factor of all lengths")
    p.add_argument(
        "--sessions", type=int, default=0, help="so many conversations, whose prompts begin alike, take turns"
    )
    p.add_argument(
        "--lull-s", type=float, default=0.0, help="every other so many seconds, a third of --in-flight is sent"
    )
    p.add_argument("--budgets", action="store_true", help="load the logits processor: thinking ends as the toml says")
    p.add_argument("--against", type=Path, help="another configuration, which takes turns with the first")
    p.add_argument("--pairs", type=int, default=5, help="turns of each with --against")
    p.add_argument("--on-go", action="store_true", help="begin when standard input has a line")
    p.add_argument("--traceparent", help="header of the caller's trace, which every request joins")
    p.add_argument("--until-eof", action="store_true", help="send requests until standard input ends")
    a = p.parse_args()
    end_with_parent()
    options = Options(
        model=model_dir(),
        scheduler=SCHEDULER,
        meridian_toml=a.toml.read_text(),
        kv_blocks=a.kv_blocks,
        max_num_seqs=a.max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=1024,
        logits_processors=("meridian.vllm:BudgetLogitsProcessor",) if a.budgets else (),
    )
    facts = bench_run.client_facts

    def more_facts(request: TraceRequest) -> dict[str, Any] | None:
        found = facts(request) or {}
        if a.traceparent is not None:
            found["meridian_traceparent"] = a.traceparent
        if request.session is not None:
            found["meridian_session"] = str(request.session)
        return found or None

    bench_run.client_facts = more_facts
    run = build(options)
    warm_up(run, options.max_model_len)
    if a.against is not None:
        a.out.write_text(json.dumps(turns(run, a)))
        return 0
    ended = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        ended.set()

    print("ready", flush=True)
    if a.on_go:
        sys.stdin.readline()
    threading.Thread(target=wait, daemon=True).start()
    rows = drive(run, a, ended)
    if a.out is not None:
        a.out.write_text(json.dumps({"rows": rows}))
    print("done", flush=True)
    ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
