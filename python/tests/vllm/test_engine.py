"""Meridian inside the real engine: same tokens, another order, and nothing a policy does can hurt."""

from __future__ import annotations

import logging
import math
import queue
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import meridian
import pytest
from harness import Engine, requests
from meridian._native import StepPlan
from meridian.vllm.bench.probe import SchedulerProbe
from meridian.vllm.bench.request import TraceRequest


def own_preemptions(native: Any) -> int:
    return sum(native.stats()["preemptions"].values())


def test_output_first_changes_the_order_but_no_token(engine: Engine, stock_tokens: list[list[int]]) -> None:
    # Without room to grow, which would spare the preemptions.
    source = engine.native("native:output-first", output_tpot_budget_ms=1.0, kv_memory={"growth_blocks": 0.0})
    with engine.using(source) as native:
        assert engine.generate(requests(24)) == stock_tokens
    stats = native.stats()
    assert stats["requests"] == 0
    assert stats["decided_by_policy"] == stats["decisions"] > 0
    assert stats["step_time_ms"] is not None
    assert own_preemptions(native) > 0, "the KV cache is meant to be too small"


def test_component_generates_the_same(engine: Engine, stock_tokens: list[list[int]], policies: Path) -> None:
    with engine.using(engine.native(str(policies / "output-first.wasm"))) as native:
        assert engine.generate(requests(24)) == stock_tokens
    assert not any(native.stats()["faults"].values())


def test_phases_follow_the_delivered_tokens(engine: Engine) -> None:
    with engine.using(engine.native("native:output-first")) as native:
        seen: set[str] = set()

        def compare() -> None:
            for request_id, observed in engine.run.seen.items():
                phase = native.phase(request_id)
                if observed.finished is None and observed.tokens:
                    assert phase == observed.phase, request_id
                    seen.add(phase)

        engine.generate(requests(12), compare)
        assert seen == {"think", "output"}


def test_looking_for_requests_that_vllm_has_dropped_takes_nobody_away(
    engine: Engine, stock_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meridian.vllm.following.REAP_STEPS", 1)
    with engine.using(engine.native("native:output-first")) as native:
        # One that vLLM never had.
        native.add(
            object(),
            "dropped",
            prompt=[1],
            prompt_tokens=1,
            max_tokens=1,
            arrival_ms=time.monotonic() * 1e3,
            deadline_ms=math.inf,
            priority=0,
            tenant="",
        )
        assert engine.generate(requests(24)) == stock_tokens
        assert native.stats()["requests"] == 1, "nothing was heard of it, for less than a minute"
        native.reap(time.monotonic() * 1e3 + 3e5, engine.scheduler.requests)
        assert native.stats()["requests"] == 0


def test_no_output_phase_request_is_preempted_while_thinking_holds_blocks(engine: Engine) -> None:
    with engine.using(engine.native("native:output-first", kv_memory={"growth_blocks": 0.0})):
        probe = SchedulerProbe(engine.scheduler, engine.run.seen)
        try:
            engine.generate(requests(32, seed=3))
        finally:
            # The probe wraps the instance; the class's own methods come back.
            del engine.scheduler.schedule, engine.scheduler._preempt_request
        assert sum(probe.preemptions.values()) > 0
        assert probe.output_preempted_while_think_held == 0


def test_every_hostile_component_is_survived(
    engine: Engine, stock_tokens: list[list[int]], hostile: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for line in (hostile / "kinds.txt").read_text().splitlines():
        name, kind = line.split()
        deadline_ms = 2.0 if kind == "deadline" else 1000.0
        with engine.using(engine.native(str(hostile / f"{name}.wasm"), deadline_ms=deadline_ms)) as native:
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="vllm.meridian"):
                assert engine.generate(requests(24)) == stock_tokens, name
            assert engine.scheduler._meridian is native, f"{name}: Meridian gave up"
            stats = native.stats()
            assert ("a policy faulted" in caplog.text) == any(stats["faults"].values()), name
            counted = {fault: count for fault, count in stats["faults"].items() if count}
            # A busy machine may not start an instance again within 5 ms of a fault. That is a fault as well, and until
            # it starts, steps fall back without a further one.
            restarts_failed = counted.pop("init", 0) if kind not in ("init", "none") else 0
            assert set(counted) == ({kind} if kind != "none" else set()), name
            if not restarts_failed:
                assert stats["decided_by_fallback"] == sum(counted.values()), name


def test_fcfs_is_stock(engine: Engine, stock_tokens: list[list[int]], policies: Path) -> None:
    def run(native: Any, n: int) -> tuple[list[list[int]], int, int]:
        steps = 0

        def count() -> None:
            nonlocal steps
            steps += 1

        with engine.using(native):
            # Whatever ran before must not be found in the cache.
            assert engine.scheduler.reset_prefix_cache()
            probe = SchedulerProbe(engine.scheduler, engine.run.seen)
            try:
                tokens = engine.generate(requests(n), count)
            finally:
                del engine.scheduler.schedule, engine.scheduler._preempt_request
        return tokens, steps, sum(probe.preemptions.values())

    assert engine.native("native:fcfs").is_stock
    # With room for all, a component that keeps the order changes nothing at all.
    stock = run(None, 8)
    assert stock[2] == 0
    fcfs = str(policies / "fcfs.wasm")
    assert run(engine.native(fcfs), 8) == stock
    # Nor does it where KV memory is short and left to vLLM.
    stock = run(None, 24)
    assert stock[2] > 0
    assert run(engine.native(fcfs, kv_memory={"enabled": False}), 24) == stock
    # Without, whom to preempt is the eviction policy's to say, and no token changes.
    tokens, _, preemptions = run(engine.native(fcfs, kv_memory={"growth_blocks": 0.0}), 24)
    assert tokens == stock_tokens
    assert preemptions > 0


def test_aborted_requests_are_forgotten(engine: Engine) -> None:
    with engine.using(engine.native("native:output-first")) as native:
        ids = [
            engine.run.engine.add_request(
                f"abort-{i}",
                {"prompt_token_ids": [random.Random(i).randint(20, 900) for _ in range(50)]},
                _params(max_tokens=200),
            )
            for i in range(20)
        ]
        for _ in range(5):
            engine.run.engine.step()
        assert native.stats()["requests"] == 20
        engine.run.engine.abort_request(ids, internal=True)
        assert native.stats()["requests"] == 0


def _params(**kwargs: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **kwargs)


def test_marker_in_user_text_does_not_open_thinking(engine: Engine) -> None:
    tokenizer: Any = engine.run.engine.get_tokenizer()
    inner = tokenizer.encode("say <think> and </think> and <think>", add_special_tokens=False)
    tail = tokenizer.encode("<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    with engine.using(engine.native("native:output-first")) as native:
        request_id = engine.run.engine.add_request("u", {"prompt_token_ids": inner + tail}, _params(max_tokens=6))
        engine.run.engine.step()
        assert native.phase(request_id) == "output"
        while engine.run.engine.has_unfinished_requests():
            engine.run.engine.step()


@pytest.mark.parametrize("comes", ["while the first runs", "after the first"])
def test_the_second_turn_of_a_streaming_session_is_followed_by_its_own_prompt(engine: Engine, comes: str) -> None:
    from vllm.v1.request import Request, RequestStatus

    encode = engine.run.engine.get_tokenizer().encode
    thinks, answers = (
        list(encode(f"<|im_start|>assistant\n{opening}", add_special_tokens=False)) for opening in ("<think>\n", "")
    )
    scheduler = engine.scheduler

    def turn(prompt: list[int], max_tokens: int, resumable: bool = True) -> None:
        hasher = engine.run.engine.engine_core.engine_core.request_block_hasher
        request = Request("s", prompt, _params(max_tokens=max_tokens), None, block_hasher=hasher, resumable=resumable)
        scheduler.add_request(request)

    seen: list[str] = []

    def step() -> None:
        seen.append(native.phase("s"))
        engine.run.engine.step()

    def run_until_it_waits_for_input() -> None:
        while scheduler.requests["s"].status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            step()

    with engine.using(engine.native("native:output-first")) as native:
        turn([*range(30, 90), *thinks], 4)
        step()
        if comes == "after the first":
            run_until_it_waits_for_input()
        turn([*range(90, 120), *answers], 6)
        run_until_it_waits_for_input()
        phases = [phase for phase, before in zip(seen, ["", *seen], strict=False) if phase != before]
        assert phases == ["prefill", "think", "prefill", "output"]
        assert native.stats()["requests"] == 1
        turn([], 1, resumable=False)
        assert native.stats()["requests"] == 0
        assert scheduler._meridian is native, "Meridian gave up"
        assert "s" not in scheduler.requests


class Scripted:
    """Stands in for the native engine, to make the scheduler apply a chosen plan."""

    is_stock = is_watched = False

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.given: list[dict[str, int]] = []

    def begin(self, running: list[Any], waiting: list[Any] | None, *facts: Any) -> Any:
        budget, caps, waiting_changed = self._plan(running, waiting, facts)
        # A plan that asks for nothing, in every field that a native one has.
        nothing = {name: None for name in vars(StepPlan) if not name.startswith("_")}
        return SimpleNamespace(**nothing | {"token_budget": budget, "caps": caps, "waiting_changed": waiting_changed})

    def end(self, output: Any, now_ms: float, corrects: bool, taken: list[Any]) -> None:
        self.given.append(dict(output.num_scheduled_tokens))

    def tokens(self, outputs: list[list[Any]], now_ms: float) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def test_caps_and_budget_are_kept(engine: Engine, stock_tokens: list[list[int]]) -> None:
    planned: list[tuple[int, dict[str, int]]] = []

    def plan(running: list[Any], waiting: list[Any] | None, facts: tuple[Any, ...]) -> Any:
        # Leave every third running request out, give waiting ones at most 8 tokens, and the step 40. Those left out
        # stand behind the others, as a planner puts them; never are they all, for such a step is served anyway.
        left_out = running[::3] if len(planned) % 2 and len(running) > 1 else []
        running[:] = [*(request for request in running if request not in left_out), *left_out]
        caps = {request.request_id: 0 for request in left_out}
        caps |= {request.request_id: 8 for request in waiting or []}
        planned.append((40, caps))
        return 40, caps or None, False

    with engine.using(Scripted(plan)) as scripted:
        assert engine.generate(requests(24)) == stock_tokens
    assert len(planned) == len(scripted.given)
    capped = 0
    for (budget, caps), given in zip(planned, scripted.given, strict=True):
        assert sum(given.values()) <= budget
        for request_id, cap in caps.items():
            assert given.get(request_id, 0) <= cap
            capped += 1
    assert capped > 100
    assert "_reserve_prefill_lookahead" not in engine.scheduler.__dict__
    assert engine.scheduler.max_num_scheduled_tokens == 256


def test_waiting_requests_are_admitted_in_the_planned_order(engine: Engine) -> None:
    first: list[str] = []

    def plan(running: list[Any], waiting: list[Any] | None, facts: tuple[Any, ...]) -> Any:
        if waiting and not first:
            waiting.reverse()
            first.extend(request.request_id for request in waiting)
            return facts[1], None, True
        return facts[1], None, False

    with engine.using(Scripted(plan)) as scripted:
        engine.generate([TraceRequest(0.0, 60, 2, 2) for _ in range(8)])
    assert list(scripted.given[0]) == first[: len(scripted.given[0])]


def test_a_defect_of_meridian_leaves_stock_vllm(
    engine: Engine, stock_tokens: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    from meridian._native import PanicException

    for defect in (RuntimeError("broken"), PanicException("panicked")):

        def plan(running: list[Any], waiting: list[Any] | None, facts: tuple[Any, ...], defect: Any = defect) -> Any:
            raise defect

        with engine.using(Scripted(plan)):
            assert engine.generate(requests(24)) == stock_tokens
            assert engine.scheduler._meridian is None


class Clock:
    """Stands in for the scheduler's module `time`: a step takes 10 ms."""

    perf_counter_ns = staticmethod(time.perf_counter_ns)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def tick(self) -> None:
        self.now_s += 0.010

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return 0.0


def test_long_waiting_requests_are_served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that prefers everybody who came later starves the first; `max_defer_ms` does not let it."""

    def steps_to_first_token(max_defer_ms: float) -> tuple[int, int]:
        """Of the request that the policy puts last, and of all."""
        clock = Clock()
        for module in ("scheduler", "following", "step"):
            monkeypatch.setattr(f"meridian.vllm.{module}.time", clock)
        native = engine.native("native:priority", max_defer_ms=max_defer_ms, kv_memory={"enabled": False})
        run = engine.run
        run.seen.clear()
        run.by_name.clear()
        rng = random.Random(0)
        with engine.using(native):
            last = run.add("last", TraceRequest(0.0, 40, 2, 2, priority=1), 0, 0.0, rng)
            for i in range(160):
                clock.tick()
                run.add(str(i), TraceRequest(0.0, 20, 2, 2), i + 1, 0.0, rng)
            steps = first = 0
            while run.engine.has_unfinished_requests():
                clock.tick()
                run.step()
                steps += 1
                first = first or (steps if last.tokens else 0)
        assert native.stats()["requests"] == 0
        return first, steps

    # Without the bound it is the last to get in.
    first, steps = steps_to_first_token(1e9)
    assert first > steps - 10
    # With one of 10 steps it waits for them, and for a seat.
    first, steps = steps_to_first_token(100.0)
    assert 10 < first < 24 < steps - 10


def test_a_request_becomes_a_span(engine: Engine) -> None:
    bodies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.put(self.path.encode() + b" " + self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    telemetry = meridian.TelemetryConfig(
        prometheus="", otlp_endpoint=f"http://127.0.0.1:{server.server_port}", service_name="traced"
    )
    config = meridian.MeridianConfig(telemetry=telemetry, admin=meridian.AdminConfig(listen=""))
    from meridian.vllm.parts import make_engine

    with engine.using(make_engine(config, engine.scheduler, serves=True)) as native:
        engine.generate(requests(3))
        native.policies.close()
    server.shutdown()
    spans = b"".join(bodies.get_nowait() for _ in range(bodies.qsize()))
    assert spans.startswith(b"/v1/traces ")
    for text in (
        b"traced",
        b"gen_ai.request.model",
        b"meridian.ttft_ms",
        b"meridian.ttfo_ms",
        b"length",
        b"think",
        b"answer",
    ):
        assert text in spans, text
    # A span and three phases each, and an event with the parts of the latency.
    assert spans.count(b"meridian.request.id") == 3
    assert spans.count(b"prefill") == 2 * 3
