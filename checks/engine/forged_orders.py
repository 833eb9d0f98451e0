"""Does anything but the scheduler give a sampler an order, in the real engine?

It solves problems three times: alone, while another process floods its sockets with forged orders and reports for every
request, and with a forged `meridian_row` in every request, which bypasses the check of the front end. Its outputs must
be the same each time.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.model import reasoner_dir
from meridian.vllm.bench.run import MERIDIAN_CLASS

from checks.engine.llm import QUIET, engine_of, finished, params, problem_ids, scheduler_of

PROBLEMS = 64
# Keys of requests that an engine may use: the engine's number in the process, and the request's.
KEYS = [(engine << 40) + request for engine in (1, 2, 3) for request in range(4 * PROBLEMS)]


def end_now(key: int) -> bytes:
    """meridian-core's `Order::Limit`: end the thinking at once."""
    return struct.pack("<BQII", 0, key, 0, 0)


def report(key: int) -> bytes:
    """meridian-core's `Report`: a probe that is certain."""
    return struct.pack("<BQIfB", 2, key, 32, 0.0, 0)


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for the sockets of this process."""
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as folder:
        Path(folder).chmod(0o700)
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield Path(folder) / "meridian"


def cost() -> dict[str, float]:
    """Microseconds to sign and to check a datagram with 40 orders."""
    from meridian.vllm.signing import ORDERS, Signer, Verifier

    signer, verifier, key, payload = Signer(ORDERS), Verifier(ORDERS), os.urandom(32), bytes(17 * 40)
    signs, checks = [], []
    for _ in range(20_000):
        begun = time.perf_counter_ns()
        datagram = signer.signed(key, payload)
        signed = time.perf_counter_ns()
        verifier.opened(key, datagram)
        checks.append((time.perf_counter_ns() - signed) / 1e3)
        signs.append((signed - begun) / 1e3)
    return {"sign": statistics.median(signs), "check": statistics.median(checks)}


def solve(
    meridian: bool = True, rows: Callable[[int], Any] | None = None, flood: Callable[[str, str], Any] | None = None
) -> dict[str, Any]:
    """The outputs of the real engine; `rows` gives what a client puts into `meridian_row`."""
    from meridian.vllm.channel import _engine_name
    from meridian.vllm.processor import BudgetLogitsProcessor
    from vllm.exceptions import VLLMClientError

    config = "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 60\n[entropy]\nrpdi_threshold = 2.0\n"
    engine = engine_of(
        config + QUIET,
        model=str(reasoner_dir()),
        max_num_seqs=PROBLEMS,
        scheduler_cls=MERIDIAN_CLASS if meridian else None,
    )
    refused = 0
    name = Path(os.environ["XDG_RUNTIME_DIR"]) / "meridian" / _engine_name(engine.vllm_config)
    flooding = None if flood is None else flood(f"{name}-0.sample", f"{name}.schedule")
    for i, problem in enumerate(arith.problems(9, 4 * PROBLEMS, (8, 10))):
        prompt = {"prompt_token_ids": problem_ids(engine.get_tokenizer(), problem)}
        extra = {} if rows is None else {"meridian_row": rows(i)}
        sampling = params(max_tokens=100, ignore_eos=False, extra_args=extra)
        try:
            engine.add_request(str(i), prompt, sampling)
        except (ValueError, VLLMClientError):
            refused += 1
            validate = BudgetLogitsProcessor.validate_params
            BudgetLogitsProcessor.validate_params = classmethod(lambda cls, params: None)  # type: ignore[assignment]
            try:
                engine.add_request(str(i), prompt, sampling)
            finally:
                BudgetLogitsProcessor.validate_params = validate  # type: ignore[method-assign]
    outputs = dict(finished(engine))
    stats = scheduler_of(engine).meridian_stats() if meridian else {}
    if flooding is not None:
        flooding.kill()
        flooding.wait()
    engine.engine_core.shutdown()
    return {
        "outputs": outputs,
        "refused": refused,
        "missed": (stats.get("budget") or {}).get("missed", 0),
        "refused_reports": stats.get("refused_datagrams", 0),
    }


def flooded(sampler: str, scheduler: str) -> subprocess.Popen[bytes]:
    """Another process that forges until it is killed."""
    return subprocess.Popen([sys.executable, "-m", "checks.engine.forged_orders", sampler, scheduler])


def flood(sampler: str, scheduler: str) -> None:
    """Send an order and a report for each key, unsigned and signed with a key of one's own, again and again."""
    from meridian.vllm.signing import ORDERS, REPORTS, Signer

    orders, reports, key = Signer(ORDERS), Signer(REPORTS), os.urandom(32)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anybody:
        while True:
            for request in KEYS:
                for path, payload, signer in (
                    (sampler, end_now(request), orders),
                    (scheduler, report(request), reports),
                ):
                    try:
                        anybody.sendto(payload, path)
                        anybody.sendto(signer.signed(key, payload), path)
                    except OSError:
                        return
                time.sleep(0.0005)


def forged_row(number: int) -> Any:
    """What a client may put in the scheduler's place."""
    row = {"key": KEYS[number], "limit": 0, "interrupts": [], "measured": False}
    return [row, {"probe": number, "at": 0}, "row", [1, 2], {**row, "key": None}, 7][number % 6]


def measure() -> dict[str, Any]:
    """Outputs under attack, and microseconds to sign and to check."""
    with own_folder():
        costs = cost()
        honest, attacked, rows = solve(), solve(flood=flooded), solve(rows=forged_row)
        stock, rows_stock = solve(meridian=False), solve(meridian=False, rows=forged_row)

    def changed(one: dict[str, Any], other: dict[str, Any]) -> int:
        return sum(one["outputs"].get(number) != tokens for number, tokens in other["outputs"].items())

    return {
        "flood_changed": changed(attacked, honest),
        "rows_changed": changed(rows, honest),
        "rows_stock_changed": changed(rows_stock, stock),
        "us": costs,
        "requests": len(honest["outputs"]),
        "rows_sent": 2 * len(honest["outputs"]),
        "rows_refused": rows["refused"] + rows_stock["refused"],
        "missed": attacked["missed"] + rows["missed"],
        "refused_reports": attacked["refused_reports"],
    }


if __name__ == "__main__":
    # The other process.
    flood(*sys.argv[1:])
