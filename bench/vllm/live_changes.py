"""Do changes of live requests' budgets end thinking at the token that they name, while the engine is busy?

    python bench/vllm/live_changes.py --changes 1000

The engine solves problems with `models/arith-reasoner`. A client in another process lists the requests that think and
changes the limit of each once, over HTTP, to a number of think tokens. Meanwhile it changes all requests to a limit
that they have anyway. A request must end its thinking at the named token, or at the token after those that it had
thought when the change was made, if that is later. Some end their thinking by themselves before.

Prints one JSON object; exit code 0 only when every ending is exact.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.run import ENVIRONMENT, MERIDIAN_CLASS

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "arith-reasoner"
IN_FLIGHT = 64
OPERATORS_LIMIT = 400


def ask(base: str, token: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """Ask the admin listener; an answer that refuses has `error`."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/budgets", data, headers, method="GET" if body is None else "PUT")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as refused:
        return json.load(refused)
    except urllib.error.URLError:
        return {"error": "gone"}


def client(base: str, token: str, changes: int) -> None:
    """Change each request that thinks once; print what the engine acknowledged."""
    rng = random.Random(1)
    changed: set[str] = set()
    while len(changed) < changes:
        listed = ask(base, token, None)
        if "error" in listed:
            return
        for live in listed["requests"]:
            name = live["request"]
            if name in changed or live["phase"] != "think" or live["ends_by"] is not None:
                continue
            named = rng.randint(0, 90)
            done = ask(base, token, {"request": name, "max_think_tokens": named})
            if done.get("changed") == 1:
                changed.add(name)
                print(json.dumps([name, named, done["requests"][0]["think_tokens"]]), flush=True)
        ask(base, token, {"all": True, "min_think_tokens": 0})


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--client", nargs=2, metavar=("BASE", "TOKEN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.changes < 1:
        parser.error(f"--changes: {args.changes}: expected at least 1")
    if args.client:
        client(args.client[0], args.client[1], args.changes)
        return 0
    os.environ.update(ENVIRONMENT)
    found = drive(args.changes)
    print(json.dumps(found))
    return 0 if found["wrong"] == [] and found["missed"] == 0 else 1


def build(listener: str, token: str) -> Any:
    """The engine, with its admin listener."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    folder = Path(tempfile.mkdtemp(prefix="meridian-live-"))
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    (folder / "meridian.toml").write_text(
        f"[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = {OPERATORS_LIMIT}\n[entropy]\nenabled = false\n"
        f'[telemetry]\nprometheus = ""\n[admin]\nlisten = "{listener}"\ntoken_file = "token"\n'
    )
    os.environ["MERIDIAN_CONFIG"] = str(folder / "meridian.toml")
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(MODEL),
            dtype="float32",
            max_model_len=1024,
            block_size=32,  # type: ignore[arg-type]
            max_num_seqs=IN_FLIGHT,
            enforce_eager=True,
            disable_log_stats=True,
            scheduler_cls=MERIDIAN_CLASS,
            logits_processors=["meridian.vllm:BudgetLogitsProcessor"],
        )
    )


def drive(changes: int) -> dict[str, Any]:
    """Solve problems until the client has made its changes."""
    from vllm import SamplingParams

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listener = f"127.0.0.1:{free.getsockname()[1]}"
    token = secrets.token_hex(16)
    engine = build(listener, token)
    scheduler = engine.engine_core.engine_core.scheduler
    tokenizer = engine.get_tokenizer()
    (end,) = tokenizer.encode(arith.THINK_END, add_special_tokens=False)
    # Microseconds in which each step takes in changes and asks the policy.
    waits: list[float] = []
    decide = scheduler._meridian_think.decide

    def timed(now_ms: float) -> None:
        begun = time.perf_counter_ns()
        decide(now_ms)
        waits.append((time.perf_counter_ns() - begun) / 1e3)

    scheduler._meridian_think.decide = timed
    thoughts: dict[str, list[int]] = {}
    problems = iter(arith.problems(5, 40 * changes, (8, 10)))

    def solve(until: Any) -> None:
        """Keep the engine full while `until` says so, then empty it."""
        live = 0
        while live or until():
            while live < IN_FLIGHT and until():
                chat = [{"role": "user", "content": next(problems).text}]
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                prompt = list(tokenizer.encode(text, add_special_tokens=False))
                params = SamplingParams(temperature=0.6, max_tokens=500, detokenize=False)
                engine.add_request(f"problem-{len(thoughts)}", {"prompt_token_ids": prompt}, params)
                thoughts[f"problem-{len(thoughts)}"] = []
                live += 1
            for output in engine.step():
                if output.finished:
                    thoughts[output.request_id] = list(output.outputs[0].token_ids)
                    live -= 1

    # Without changes, for as many requests as are in flight several times over.
    solve(lambda: len(thoughts) < 4 * IN_FLIGHT)
    quiet, waits[:] = sorted(waits), []
    command = [sys.executable, __file__, "--changes", str(changes), "--client", f"http://{listener}", token]
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
    gave_up = scheduler._meridian is None or scheduler._meridian_think is None
    engine.engine_core.shutdown()
    return {
        "changes": len(acknowledged),
        "exact": exact,
        "at_once": at_once,
        "by_themselves": by_themselves,
        "wrong": ["Meridian gave up"] if gave_up else wrong[:5],
        "wrong_count": len(wrong),
        "missed": stats["budget"]["missed"],
        "steps": len(busy),
        "quiet_us": {"median": quiet[len(quiet) // 2], "longest": quiet[-1]},
        "busy_us": {"median": busy[len(busy) // 2], "p99": busy[len(busy) * 99 // 100], "longest": busy[-1]},
    }


if __name__ == "__main__":
    sys.exit(main())
