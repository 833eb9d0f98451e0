"""Does anything but the scheduler give a sampler an order? Forged datagrams over real sockets, and forged requests.

    python bench/vllm/forged_orders.py --each 1000

Another process sends datagrams of ten kinds to a sampler's socket and to the scheduler's. Between them, the real ones
must arrive. Then the real engine solves problems three times: alone, while another process floods its sockets with
forged orders and reports for every request, and with a forged `meridian_row` in every request, which bypasses the check
of the front end. Its outputs must be the same each time.

Prints one JSON object; exit code 0 only when nothing forged was taken.
"""

from __future__ import annotations

import argparse
import json
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
from types import SimpleNamespace
from typing import Any

from meridian.vllm.bench import arith
from meridian.vllm.bench.run import ENVIRONMENT, MERIDIAN_CLASS

MODEL = Path(__file__).resolve().parents[2] / "models" / "arith-reasoner"
PROBLEMS = 64
# Keys of requests that an engine may use: the engine's number in the process, and the request's.
KEYS = [(engine << 40) + request for engine in (1, 2, 3) for request in range(4 * PROBLEMS)]


def end_now(key: int) -> bytes:
    """meridian-core's `Order::Limit`: end the thinking at once."""
    return struct.pack("<BQII", 0, key, 0, 0)


def report(key: int) -> bytes:
    """meridian-core's `Report`: a probe that is certain."""
    return struct.pack("<BQIfB", 2, key, 32, 0.0, 0)


def kinds(
    genuine: list[bytes], use: bytes, other_use: bytes, payload: Callable[[int], bytes]
) -> dict[str, list[bytes]]:
    """Forged datagrams of every kind, as many as there are genuine ones."""
    from meridian.vllm.signing import Signer

    numbers = range(len(genuine))
    signer, other = Signer(use), Signer(other_use)
    key = os.urandom(32)
    return {
        "unsigned": [payload(i) for i in numbers],
        "another key": [signer.signed(os.urandom(32), payload(i)) for i in numbers],
        "the other direction": [other.signed(key, payload(i)) for i in numbers],
        "replayed": genuine,
        "another payload": [one[:32] + payload(i)[: len(one) - 32] for i, one in enumerate(genuine)],
        "a later number": [one[:24] + (1 << 60).to_bytes(8, "big") + one[32:] for one in genuine],
        "another session": [one[:16] + os.urandom(8) + one[24:] for one in genuine],
        "cut": [one[: 1 + i % (len(one) - 1)] for i, one in enumerate(genuine)],
        "longer": [one + payload(i) for i, one in enumerate(genuine)],
        "random": [os.urandom(1 + i % 400) for i in numbers],
    }


def send(path: str) -> None:
    """Send the datagrams on standard input, one a line in hexadecimal digits."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as anybody:
        for line in sys.stdin:
            anybody.sendto(bytes.fromhex(line), path)


def from_another_process(path: str, datagrams: list[bytes], receive: Callable[[], list[bytes]]) -> list[bytes]:
    """The payloads that were taken while another process sent these."""
    with tempfile.TemporaryFile("w+") as lines:
        lines.writelines(f"{datagram.hex()}\n" for datagram in datagrams)
        lines.seek(0)
        sender = subprocess.Popen([sys.executable, __file__, "--send", path], stdin=lines)
        taken: list[bytes] = []
        while sender.poll() is None:
            taken += receive()
    if sender.returncode:
        sys.exit(f"error: the sender failed with exit code {sender.returncode}")
    return taken + receive() + receive()


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for the sockets of this process."""
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as folder:
        Path(folder).chmod(0o700)
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield Path(folder) / "meridian"


def channel(each: int) -> dict[str, Any]:
    """Forged datagrams to both ends of a channel."""
    from meridian.vllm.channel import ToSamplers, ToScheduler
    from meridian.vllm.signing import ORDERS, REPORTS

    config: Any = SimpleNamespace(instance_id="forge", parallel_config=SimpleNamespace(data_parallel_index=0))
    rank = ToScheduler(config, 0)
    samplers = ToSamplers(config)
    found: dict[str, Any] = {"taken": {}, "sent": 0, "lost": 0}
    ends: list[tuple[str, Any, Any, bytes, bytes, Callable[[int], bytes]]] = [
        ("orders", samplers, rank, ORDERS, REPORTS, end_now),
        ("reports", rank, samplers, REPORTS, ORDERS, report),
    ]
    for what, sender, receiver, use, other_use, payload in ends:
        genuine: list[bytes] = []
        real = sender._signer.signed

        def signed(key: bytes, text: bytes, real: Any = real, genuine: list[bytes] = genuine) -> bytes:
            genuine.append(real(key, text))
            return genuine[-1]

        sender._signer.signed = signed
        arrived: list[bytes] = []
        for i in range(each):
            sender.tell(payload(i))
            arrived += receiver.received()
        found["lost"] += each - len(arrived)
        for kind, datagrams in kinds(list(genuine), use, other_use, payload).items():
            taken = from_another_process(str(receiver._own), datagrams, receiver.received)
            sender.tell(payload(7))
            found["lost"] += receiver.received() != [payload(7)]
            found["taken"][f"{what}, {kind}"] = len(taken)
            found["sent"] += len(datagrams)
    found["refused"] = rank.refused + samplers.refused
    found["us"] = cost(rank._key)
    return found


def cost(key: bytes) -> dict[str, float]:
    """Microseconds to sign and to check a datagram with 40 orders."""
    from meridian.vllm.signing import ORDERS, Signer, Verifier

    signer, verifier, payload = Signer(ORDERS), Verifier(ORDERS), bytes(17 * 40)
    signs, checks = [], []
    for _ in range(20_000):
        begun = time.perf_counter_ns()
        datagram = signer.signed(key, payload)
        signed = time.perf_counter_ns()
        verifier.opened(key, datagram)
        checks.append((time.perf_counter_ns() - signed) / 1e3)
        signs.append((signed - begun) / 1e3)
    return {"sign": statistics.median(signs), "check": statistics.median(checks)}


def solve(scheduler_cls: str | None, rows: Any, flood: Callable[[str, str], Any] | None) -> dict[str, Any]:
    """The outputs of the real engine; `rows` gives what a client puts into `meridian_row`."""
    from meridian.vllm.budget import BudgetLogitsProcessor
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.llm_engine import LLMEngine

    config = Path(tempfile.mkdtemp(prefix="meridian-forged-")) / "meridian.toml"
    config.write_text(
        "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 60\n[entropy]\nrpdi_threshold = 2.0\n"
        '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n'
    )
    os.environ["MERIDIAN_CONFIG"] = str(config)
    own: dict[str, Any] = {} if scheduler_cls is None else {"scheduler_cls": scheduler_cls}
    engine: Any = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(MODEL),
            dtype="float32",
            max_model_len=512,
            block_size=32,  # type: ignore[arg-type]
            max_num_seqs=PROBLEMS,
            enforce_eager=True,
            disable_log_stats=True,
            logits_processors=["meridian.vllm:BudgetLogitsProcessor"],
            **own,
        )
    )
    tokenizer = engine.get_tokenizer()
    refused = 0
    outputs: dict[str, list[int]] = {}
    scheduler = engine.engine_core.engine_core.scheduler
    name = _channel_name(engine.vllm_config)
    flooding = None if flood is None else flood(f"{name}-0.sample", f"{name}.schedule")
    for i, problem in enumerate(arith.problems(9, 4 * PROBLEMS, (8, 10))):
        chat = [{"role": "user", "content": problem.text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompt = {"prompt_token_ids": list(tokenizer.encode(text, add_special_tokens=False))}
        extra = {} if rows is None else {"meridian_row": rows(i)}
        params = SamplingParams(temperature=0.0, max_tokens=100, detokenize=False, extra_args=extra)
        try:
            engine.add_request(str(i), prompt, params)
        except (ValueError, VLLMClientError):
            refused += 1
            validate = BudgetLogitsProcessor.validate_params
            BudgetLogitsProcessor.validate_params = classmethod(lambda cls, params: None)  # type: ignore[assignment]
            try:
                engine.add_request(str(i), prompt, params)
            finally:
                BudgetLogitsProcessor.validate_params = validate  # type: ignore[method-assign]
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                outputs[output.request_id] = list(output.outputs[0].token_ids)
    stats = scheduler.meridian_stats() if scheduler_cls else {}
    if flooding is not None:
        flooding.kill()
        flooding.wait()
    engine.engine_core.shutdown()
    budget = stats.get("budget") or {}
    return {
        "outputs": outputs,
        "refused": refused,
        "missed": budget.get("missed", 0),
        "probes": budget.get("probes", 0),
        "refused_reports": stats.get("refused_datagrams", 0),
    }


def _channel_name(vllm_config: Any) -> str:
    from meridian.vllm.channel import _engine_name

    return str(Path(os.environ["XDG_RUNTIME_DIR"]) / "meridian" / _engine_name(vllm_config))


def flooded(sampler: str, scheduler: str) -> subprocess.Popen[bytes]:
    """Another process that forges until it is killed."""
    return subprocess.Popen([sys.executable, __file__, "--flood", sampler, scheduler])


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


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=1000, help="datagrams of each kind and direction")
    parser.add_argument("--send", help=argparse.SUPPRESS)
    parser.add_argument("--flood", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send:
        send(args.send)
        return 0
    if args.flood:
        flood(*args.flood)
        return 0
    if args.each < 1:
        parser.error(f"--each: {args.each}: expected at least 1")
    os.environ.update(ENVIRONMENT)
    with own_folder():
        found = channel(args.each)
        honest = solve(MERIDIAN_CLASS, None, None)
        attacked = solve(MERIDIAN_CLASS, None, flooded)
        rows = solve(MERIDIAN_CLASS, forged_row, None)
        stock = solve(None, None, None)
        rows_stock = solve(None, forged_row, None)
    found["requests"] = len(honest["outputs"])
    for name, one, other in (
        ("flood", attacked, honest),
        ("rows", rows, honest),
        ("rows_stock", rows_stock, stock),
    ):
        same = sum(one["outputs"].get(number) == tokens for number, tokens in other["outputs"].items())
        found[f"{name}_changed"] = len(other["outputs"]) - same
    found["rows_refused"] = rows["refused"] + rows_stock["refused"]
    found["missed"] = attacked["missed"] + rows["missed"]
    found["refused_reports"] = attacked["refused_reports"]
    print(json.dumps(found))
    changed = sum(found[f"{name}_changed"] for name in ("flood", "rows", "rows_stock"))
    return 0 if sum(found["taken"].values()) + found["lost"] + changed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
