"""`--scheduling-policy priority`: stock's own order with `native:fcfs`, and the first key of every policy.

vLLM's real scheduler and KV cache, with a model runner that is made up: what a step gives to whom does not depend on
the tokens, so nothing has to be computed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from harness import Engine
from test_async import model_output
from test_start import configure, make

SEEDS = range(24)


def stock_scheduler(engine: Engine) -> Any:
    """vLLM's own scheduler for the same engine."""
    from vllm.v1.core.sched.scheduler import Scheduler

    of = make(engine, policy="priority", async_scheduling=False)
    of.shutdown()
    return Scheduler(
        vllm_config=of.vllm_config,
        kv_cache_config=of.kv_cache_config,
        structured_output_manager=of.structured_output_manager,
        block_size=of.block_size,
        log_stats=False,
    )


def new_request(engine: Engine, name: str, prompt: list[int], max_tokens: int, **of: Any) -> Any:
    """A request of vLLM's, which generates `max_tokens`."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, 2)
    hasher = engine.run.engine.engine_core.engine_core.request_block_hasher
    return Request(name, [*prompt, *engine.run.template.tail], params, None, block_hasher=hasher, **of)


def play(engine: Engine, scheduler: Any, seed: int, check: Any = lambda scheduler, output: None) -> list[Any]:
    """A random sequence of arrivals, aborts and steps; returns what every step did, and the queue after it."""
    from vllm.v1.request import RequestStatus

    rng = random.Random(seed)
    end = engine.run.end_ids[0]
    generated: dict[str, int] = {}
    requests: dict[str, Any] = {}
    log: list[Any] = []
    count = rng.randint(12, 30)
    for step in range(3000):
        for _ in range(rng.choice((0, 0, 1, 3)) if step else 6):
            if len(requests) == count:
                break
            prompt = [rng.randint(20, 900) for _ in range(rng.randint(20, 200))]
            name, max_tokens, priority = f"r{len(requests)}", rng.randint(1, 60), rng.choice((-1, 0, 0, 3))
            # Several arrive at one time: then the id decides.
            arrival = float(step // 4)
            request = new_request(engine, name, prompt, max_tokens, arrival_time=arrival, priority=priority)
            requests[name] = request
            scheduler.add_request(request)
        if rng.random() < 0.03:
            live = sorted(scheduler.requests)
            if live:
                scheduler.finish_requests(rng.choice(live), RequestStatus.FINISHED_ABORTED)
        if len(requests) == count and not scheduler.has_unfinished_requests():
            break
        output = scheduler.schedule()
        check(scheduler, output)
        output.finishing_prefill = {name for name in output.num_scheduled_tokens if not requests[name].is_prefill_chunk}
        blocks = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in output.num_scheduled_tokens}
        log.append(
            (
                list(output.num_scheduled_tokens.items()),
                blocks,
                sorted(output.preempted_req_ids or ()),
                [request.request_id for request in scheduler.running],
                [request.request_id for request in scheduler.waiting],
            )
        )
        scheduler.update_from_output(output, model_output(output, generated, end))
    else:
        pytest.fail("requests are not over")
    assert len(requests) == count
    assert all(request.is_finished() for request in requests.values())
    return log


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No listeners."""
    configure(monkeypatch, tmp_path, text("native:fcfs"))


def text(source: str) -> str:
    return f"""
[policy.dispatch]
source = "{source}"
deadline_ms = 1000
[admin]
listen = ""
[telemetry]
prometheus = ""
"""


def test_native_fcfs_is_stock_with_priorities(engine: Engine) -> None:
    preemptions = 0
    for seed in SEEDS:
        scheduler = make(engine, policy="priority", async_scheduling=False)
        stock = play(engine, stock_scheduler(engine), seed)
        assert play(engine, scheduler, seed) == stock, seed
        assert scheduler._meridian is not None, "Meridian gave up"
        assert scheduler.meridian_stats()["decisions"] == len(stock)
        preemptions += sum(len(step[2]) for step in stock)
        scheduler.shutdown()
    assert preemptions > 0


@pytest.mark.parametrize("source", ["fcfs.wasm", "output-first.wasm", "native:output-first", "native:srpt"])
def test_priority_is_the_first_key(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policies: Path, source: str
) -> None:
    path = source if source.startswith("native:") else str(policies / source)
    # How long the machine takes decides nothing.
    unhurried = "[scheduler]\noutput_tpot_budget_ms = 1e9\nthink_tpot_budget_ms = 1e9\nmax_defer_ms = 1e9\n"
    configure(monkeypatch, tmp_path, text(path) + unhurried + "[kv_memory]\ngrowth_blocks = 0\n")
    admitted = preempted = 0

    def check(scheduler: Any, output: Any) -> None:
        """Whoever was admitted comes before whoever waits, and vLLM's own rule says who was preempted."""
        nonlocal admitted, preempted
        running = {request.request_id: request for request in scheduler.running}
        new = [running[data.req_id] for data in output.scheduled_new_reqs if data.req_id in running]
        names = set(output.preempted_req_ids or ())
        waits = [request.priority for request in scheduler.waiting if request.request_id not in names]
        for request in new:
            admitted += 1
            assert not waits or request.priority <= min(waits)
        for name in names:
            preempted += 1
            victim = scheduler.requests[name]
            key = (victim.priority, victim.arrival_time)
            assert all(key >= (request.priority, request.arrival_time) for request in running.values())
        # vLLM ends a step in which a request preempts itself.
        assert output.total_num_scheduled_tokens > 0 or names or not scheduler.has_unfinished_requests()

    for seed in SEEDS:
        scheduler = make(engine, policy="priority", async_scheduling=False)
        play(engine, scheduler, seed, check)
        assert scheduler._meridian is not None, "Meridian gave up"
        assert sum(scheduler.meridian_stats()["faults"].values()) == 0
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1
        scheduler.shutdown()
    assert admitted > 0
    assert preempted > 0


@pytest.mark.parametrize("source", ["native:balanced", "native:fair-share", "output-first.wasm"])
@pytest.mark.parametrize("preempts", [False, True])
def test_an_urgent_request_takes_a_seat(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policies: Path, source: str, preempts: bool
) -> None:
    path = source if source.startswith("native:") else str(policies / source)
    unhurried = "[scheduler]\noutput_tpot_budget_ms = 1e9\nthink_tpot_budget_ms = 1e9\nmax_defer_ms = 1e9\n"
    configure(monkeypatch, tmp_path, text(path) + f"{unhurried}preempt_for_waiting = {str(preempts).lower()}\n")
    scheduler = make(engine, policy="priority", async_scheduling=False, max_num_seqs=4)
    end = engine.run.end_ids[0]
    generated: dict[str, int] = {}

    def step() -> Any:
        output = scheduler.schedule()
        output.finishing_prefill = {
            name for name in output.num_scheduled_tokens if not scheduler.requests[name].is_prefill_chunk
        }
        scheduler.update_from_output(output, model_output(output, generated, end))
        return output

    for i in range(6):
        scheduler.add_request(new_request(engine, f"r{i}", [20 + i] * 40, 200, arrival_time=float(i), priority=2))
    step()
    step()
    assert {request.request_id for request in scheduler.running} == {"r0", "r1", "r2", "r3"}
    scheduler.add_request(new_request(engine, "urgent", [90] * 40, 20, arrival_time=9.0, priority=-1))
    output = step()
    is_admitted = [data.req_id for data in output.scheduled_new_reqs] == ["urgent"]
    assert is_admitted == preempts
    assert len(scheduler.running) == 4
    waits = [request.request_id for request in scheduler.waiting]
    if preempts:
        # Who gave way is as urgent as those that waited already, and stands where vLLM's own queue puts it.
        (gave_way,) = {"r0", "r1", "r2", "r3"} - {request.request_id for request in scheduler.running}
        assert waits == [gave_way, "r4", "r5"]
        assert scheduler.requests[gave_way].num_preemptions == 1
    else:
        assert waits == ["urgent", "r4", "r5"]
    for _ in range(400):
        if not scheduler.has_unfinished_requests():
            break
        # Requests of one priority do not take each other's places.
        assert all(request.num_preemptions <= 1 for request in scheduler.requests.values())
        step()
    assert not scheduler.has_unfinished_requests()
    assert scheduler._meridian is not None, "Meridian gave up"
    scheduler.shutdown()


def test_the_queue_pops_what_vllms_heap_pops() -> None:
    from meridian.vllm.queue import PlannedPriorityQueue
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue
    from vllm.v1.request import Request

    class Waiting:
        """As much of a request as a queue looks at."""

        __lt__ = Request.__lt__

        def __init__(self, priority: int, arrival_time: float, request_id: str) -> None:
            self.priority, self.arrival_time, self.request_id = priority, arrival_time, request_id

    rng = random.Random(0)
    ours, heap = PlannedPriorityQueue(), PriorityRequestQueue()
    inside: list[Any] = []
    for i in range(1500):
        kind = rng.random()
        if kind < 0.6 or not inside:
            request: Any = Waiting(rng.randint(0, 3), rng.randint(0, 50), str(i))
            for queue in (ours, heap):
                queue.prepend_requests([request]) if kind < 0.1 else queue.add_request(request)
            inside.append(request)
        elif kind < 0.85:
            assert ours.peek_request() is heap.peek_request()
            popped = ours.pop_request()
            assert popped is heap.pop_request()
            inside.remove(popped)
        else:
            removed = rng.sample(inside, min(len(inside), 2))
            for queue in (ours, heap):
                queue.remove_requests(removed)
            inside = [request for request in inside if request not in removed]
        assert len(ours) == len(heap) == len(inside)
        if i % 50 == 0:
            assert list(ours) == list(heap)
    window = list(ours)[:8]
    rng.shuffle(window)
    ours.plan(window)
    assert [ours.pop_request() for _ in range(8)] == window
    ours.plan(reversed(list(ours)[:4]))
    ours.plan_ends()
    for _ in range(8):
        heap.remove_request(window.pop())
    assert [ours.pop_request() for _ in range(len(ours))] == list(heap)
    with pytest.raises(IndexError):
        ours.pop_request()
