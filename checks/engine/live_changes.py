"""Do changes of live requests' budgets end thinking at the token that they name, while the engine is busy?

The engine solves problems with `models/arith-reasoner`. A client in another process lists the requests that think and
changes the limit of each once, over HTTP, to a number of think tokens. Meanwhile it changes all requests to a limit
that they have anyway. A request must end its thinking at the named token, or at the token after those that it had
thought when the change was made, if that is later. Some end their thinking by themselves before.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
import urllib.error
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import reasoner_dir

from checks.engine.llm import configure, engine_of, gave_up, ids, params, percentile, problem_ids, scheduler_of
from python.tests.vllm.serving import TOKEN, ask, free_port

IN_FLIGHT = 64
OPERATORS_LIMIT = 400


def client(base: str, changes: int) -> None:
    """Change each request that thinks once; print what the engine acknowledged."""

    def budgets(method: str, body: dict[str, Any] | None = None) -> Any:
        return ask(base, method, "/v1/budgets", body, {"Authorization": f"Bearer {TOKEN}"})[1]

    rng = random.Random(1)
    changed: set[str] = set()
    while len(changed) < changes:
        for live in budgets("GET")["requests"]:
            name = live["request"]
            if name in changed or live["phase"] != "think" or live["ends_by"] is not None:
                continue
            named = rng.randint(0, 90)
            done = budgets("PUT", {"request": name, "max_think_tokens": named})
            if done.get("changed") == 1:
                changed.add(name)
                print(json.dumps([name, named, done["requests"][0]["think_tokens"]]), flush=True)
        budgets("PUT", {"all": True, "min_think_tokens": 0})


def timed(scheduler: Any) -> list[float]:
    """Microseconds in which each step takes in changes and asks the policy, as they come."""
    waits: list[float] = []
    decide = scheduler._meridian_think.decide

    def watched(now_ms: float) -> None:
        begun = time.perf_counter_ns()
        decide(now_ms)
        waits.append((time.perf_counter_ns() - begun) / 1e3)

    scheduler._meridian_think.decide = watched
    return waits


def measure(changes: int = 200) -> dict[str, Any]:
    """Solve problems until the client has made its changes."""
    listener = f"127.0.0.1:{free_port()}"
    folder = configure(
        f"[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = {OPERATORS_LIMIT}\n[entropy]\nenabled = false\n"
        f'[telemetry]\nprometheus = ""\n[admin]\nlisten = "{listener}"\ntoken_file = "token"\n'
    )
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    engine = engine_of(None, model=str(reasoner_dir()), max_model_len=1024, max_num_seqs=IN_FLIGHT)
    scheduler, tokenizer = scheduler_of(engine), engine.get_tokenizer()
    (end,) = ids(tokenizer, arith.THINK_END)
    waits = timed(scheduler)
    thoughts: dict[str, list[int]] = {}
    problems = iter(arith.problems(5, 40 * changes, (8, 10)))

    def solve(until: Any) -> None:
        """Keep the engine full while `until` says so, then empty it."""
        live = 0
        while live or until():
            while live < IN_FLIGHT and until():
                name, prompt = f"problem-{len(thoughts)}", problem_ids(tokenizer, next(problems))
                sampling = params(temperature=0.6, max_tokens=500, ignore_eos=False)
                engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
                thoughts[name] = []
                live += 1
            for output in engine.step():
                if output.finished:
                    thoughts[output.request_id] = list(output.outputs[0].token_ids)
                    live -= 1

    # Without changes, for as many requests as are in flight several times over.
    solve(lambda: len(thoughts) < 4 * IN_FLIGHT)
    quiet, waits[:] = sorted(waits), []
    command = [sys.executable, "-m", "checks.engine.live_changes", f"http://{listener}", str(changes)]
    with tempfile.TemporaryFile("w+") as told:
        asking = subprocess.Popen(command, stdout=told)
        solve(lambda: asking.poll() is None)
        busy = sorted(waits)
        told.seek(0)
        acknowledged = [json.loads(line) for line in told]
    exact = by_themselves = at_once = 0
    wrong: list[str] = []
    for name, named, thought in acknowledged:
        tokens = thoughts[name.rpartition("-")[0]]
        ended = tokens.index(end) if end in tokens else len(tokens)
        due = max(named, thought)
        at_once += named <= thought
        exact += ended == due
        by_themselves += ended < due
        if ended > due:
            wrong.append(f"{name}: ended at {ended}, named {named} when it had thought {thought}")
    stats = scheduler.meridian_stats()
    engine.engine_core.shutdown()
    return {
        "changes": len(acknowledged),
        "exact": exact,
        "at_once": at_once,
        "by_themselves": by_themselves,
        "wrong": ["Meridian gave up"] if gave_up(scheduler) else wrong[:5],
        "missed": stats["budget"]["missed"],
        "quiet_us": {"median": percentile(quiet, 0.5), "longest": quiet[-1]},
        "busy_us": {"median": percentile(busy, 0.5), "p99": percentile(busy, 0.99), "longest": busy[-1]},
    }


if __name__ == "__main__":
    # The client. The engine may be gone before it.
    with contextlib.suppress(urllib.error.URLError):
        client(sys.argv[1], int(sys.argv[2]))
