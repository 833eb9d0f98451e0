"""Sessions and retention in the real engine: who comes back keeps its blocks, whoever names the session or not."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import KV_BLOCK_TOKENS, KV_BLOCKS, Engine, requests
from meridian import EvictionCandidate
from meridian.vllm import SessionMiddleware
from meridian.vllm.bench.request import TraceRequest

KEEPS = {"strips_reasoning": False}


class Seen:
    """Passes everything on to the native engine; keeps what it was told of chains."""

    def __init__(self, inner: Any, broken: str | None = None) -> None:
        self._inner = inner
        self._broken = broken
        self.stops: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        if name == self._broken:
            raise RuntimeError(f"{name} is broken")
        return getattr(self._inner, name)

    def chain_ends(self, request_id: str, stop: str, chains: list[Any], now_ms: float) -> None:
        if self._broken == "chain_ends":
            raise RuntimeError("chain_ends is broken")
        self.stops.append((stop, sum(len(blocks) for _, blocks in chains)))
        self._inner.chain_ends(request_id, stop, chains, now_ms)


def say(engine: Engine, name: str, prompt: list[int], **extra: object) -> list[int]:
    """Send a request and serve it to its end; returns its tokens."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=24, thinking_token_budget=4, extra_args=extra
    )
    engine.run.engine.add_request(name, {"prompt_token_ids": prompt}, params)
    tokens: list[int] = []
    while engine.run.engine.has_unfinished_requests():
        for output in engine.run.engine.step():
            tokens = list(output.outputs[0].token_ids)
    return tokens


def words(seed: object, engine: Engine, count: int) -> list[int]:
    rng = random.Random(str(seed))
    return [rng.choice(engine.run.vocabulary) for _ in range(count)]


def cached(engine: Engine, prompt: list[int]) -> int:
    """Blocks of a prompt that the cache has."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    scheduler = engine.scheduler
    hasher = engine.run.engine.engine_core.engine_core.request_block_hasher
    request = Request("probe", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
    return scheduler.kv_cache_manager.get_computed_blocks(request)[1] // KV_BLOCK_TOKENS


@pytest.fixture
def stand(clean: Engine) -> Iterator[Engine]:
    yield clean
    assert clean.scheduler._meridian_kv is None or not clean.scheduler._meridian_kv._awaited


@pytest.mark.parametrize("names", [True, False])
def test_a_session_that_waits_for_a_tool_outlasts_one_that_was_answered(
    stand: Engine, names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain of the older one stays, although least recently used would evict it first."""
    # However long the machine takes: `ttl` keeps the chain for seconds.
    now = time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter_ns=time.perf_counter_ns)
    monkeypatch.setattr("meridian.vllm.kv.time", clock)
    monkeypatch.setattr("meridian.vllm.scheduler.time", clock)
    prompts = {name: words(name, stand, 4 * KV_BLOCK_TOKENS) for name in ("tool", "answer")}
    native = stand.native("native:output-first", eviction="native:ttl", model=KEEPS)
    with stand.using(native):
        hook = stand.scheduler._meridian_kv
        hook.engine = seen = Seen(hook.engine)
        first = say(stand, "dry", prompts["tool"])
        stand.run.engine.reset_prefix_cache()
        # What the first one generates calls a tool.
        hook._tool_calls = [[first[-2]]]
        for name, prompt in prompts.items():
            given = {"meridian_session": name} if names else {}
            if name == "answer":
                hook._tool_calls = [[-1]]
            say(stand, name, prompt, **given)
        assert [stop for stop, _ in seen.stops] == ["turn", "tool", "turn"]
        assert min(blocks for _, blocks in seen.stops) > 4
        # A few more blocks than are free pass through the cache.
        for i in range(11):
            say(stand, f"other-{i}", words(i, stand, 4 * KV_BLOCK_TOKENS))
        assert (cached(stand, prompts["tool"]), cached(stand, prompts["answer"])) == (3, 0)
        for pool in hook.pools:
            pool.audit()


def test_gaps_of_sessions_reach_a_policy(stand: Engine) -> None:
    """Named by the client, by vLLM, or found by the prompt: the second request is the second turn."""
    native = stand.native("native:output-first", eviction="native:cost-aware", model=KEEPS)
    with stand.using(native):
        hook = stand.scheduler._meridian_kv
        for given in ({"meridian_session": "x"}, {}):
            prompt = words(given, stand, 3 * KV_BLOCK_TOKENS)
            say(stand, "one", prompt, **given)
            longer = [*prompt, *words("more", stand, KV_BLOCK_TOKENS)]
            say(stand, "two", longer, **given)
        assert stand.scheduler._meridian is native
        assert hook.engine.reads_chains
        assert hook.engine.reads_awaited


def test_what_a_session_has_in_the_cache_reaches_the_dispatch_policy(stand: Engine, monkeypatch: Any) -> None:
    """With one seat, `lpm` admits the turn of a session before one that came earlier and has nothing cached."""
    from vllm import SamplingParams

    native = stand.native("native:lpm", model=KEEPS, max_defer_ms=1e9)
    admitted: list[str] = []
    with stand.using(native):
        core = stand.run.engine
        monkeypatch.setattr(stand.scheduler, "max_num_running_reqs", 1)
        monkeypatch.setattr(stand.scheduler, "max_num_active_reqs", 1, raising=False)
        first = words("first", stand, 4 * KV_BLOCK_TOKENS)
        say(stand, "first", first, meridian_session="warm")
        assert native.reads_chains
        params = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, "max_tokens": 8}
        waiting = {"busy": words("busy", stand, 8), "cold": words("cold", stand, 64), "warm": [*first, 7, 7, 7]}
        for name, prompt in waiting.items():
            extra = {} if name == "busy" else {"meridian_session": name}
            core.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(**params, extra_args=extra))
            if name == "busy":
                core.step()
        while core.has_unfinished_requests():
            core.step()
            for request in stand.scheduler.running:
                name = request.request_id.partition("-")[0]
                if name not in admitted:
                    admitted.append(name)
        assert stand.scheduler._meridian is native
    assert admitted == ["busy", "warm", "cold"]


def test_what_a_request_needs_is_awaited_from_its_arrival_to_its_admission(stand: Engine) -> None:
    """Whether seats are free or not: it may wait for KV blocks, or for warm sessions."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=2)
    with stand.using(stand.native("native:output-first", eviction="native:cost-aware", model=KEEPS)):
        core, hook = stand.run.engine, stand.scheduler._meridian_kv
        prompt = words("first", stand, 4 * KV_BLOCK_TOKENS)
        say(stand, "first", prompt)
        core.add_request("second", {"prompt_token_ids": prompt}, params)
        assert [name.partition("-")[0] for name in hook._awaited] == ["second"]
        core.step()
        assert hook._awaited == {}
        while core.has_unfinished_requests():
            core.step()


@pytest.mark.parametrize("eviction", ["native:lru", "native:t-lru", "native:ttl", "native:cost-aware"])
def test_no_token_changes_under_a_full_engine(clean: Engine, stock_tokens: list[list[int]], eviction: str) -> None:
    native = clean.native("native:output-first", eviction=eviction, model=KEEPS, kv_memory={"growth_blocks": 0.0})
    with clean.using(native):
        assert clean.generate(requests(24)) == stock_tokens
        assert clean.scheduler._meridian is native
        for hook in clean.scheduler._meridian_kv.pools:
            hook.audit()
        assert clean.scheduler._meridian_kv._awaited == {}


@pytest.mark.parametrize("method", ["chain_ends", "reads_chains", "reads_awaited"])
def test_a_defect_leaves_stock_vllm(
    clean: Engine, stock_tokens: list[list[int]], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    native = clean.native("native:output-first", eviction="native:cost-aware", model=KEEPS)
    with clean.using(native), caplog.at_level(logging.ERROR, logger="vllm.meridian"):
        hook = clean.scheduler._meridian_kv
        hook.engine = Seen(hook.engine, broken=method)
        assert clean.generate(requests(24)) == stock_tokens
        assert clean.scheduler._meridian is None
        assert f"{method} is broken" in caplog.text


def test_an_urgent_request_takes_the_seat_of_the_least_urgent_one(clean: Engine) -> None:
    """With every seat taken, within two steps; outputs are those of a request that nobody disturbed."""
    long = [TraceRequest(0.0, 16, 8, 40, priority=i % 3) for i in range(16)]
    alone = clean.generate([TraceRequest(0.0, 16, 4, 4)])
    assert len(alone[0]) > 0
    native = clean.native("native:priority", preempt_for_waiting=True, max_defer_ms=1e9)
    steps: list[set[str]] = []

    def note() -> None:
        steps.append({r.request_id.partition("-")[0] for r in clean.scheduler.running})

    with clean.using(None):
        stock = clean.generate([*long, TraceRequest(0.0, 16, 4, 4, priority=-5)])
    clean.run.engine.reset_prefix_cache()
    with clean.using(native):
        assert clean.generate([*long, TraceRequest(0.0, 16, 4, 4, priority=-5)], note) == stock
        assert sum(native.stats()["preemptions"].values()) <= 3
    assert "16" in set().union(*steps[:3]), "it runs among the first"


def test_a_candidate_has_the_columns_of_the_contract(clean: Engine) -> None:
    """The Python class of candidates is complete: a policy that reads all columns is asked."""
    native = clean.native("native:output-first", eviction="native:cost-aware")
    ranking = native.policies.rank_evictions(
        "blocks", 5.0, (0, 2, 9), [EvictionCandidate(), EvictionCandidate(awaited=True)]
    )
    assert len(ranking[0]) == 2
    assert ranking[1][0] == 0.0
    assert ranking[1][1] > 0.0
    assert KV_BLOCKS > 0


def session_of(headers: list[tuple[str, str]]) -> str | None:
    """The session that vLLM finds in the headers of a request that went through the middleware."""
    from starlette.requests import Request

    found: list[str | None] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        found.append(Request(scope).headers.get("X-Session-ID"))

    sent = [(name.lower().encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": sent}
    asyncio.run(SessionMiddleware(app)(scope, None, None))
    assert scope["headers"] == sent, "the scope of whoever calls stays as it is"
    return found[0]


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ([], None),
        ([("X-Session-ID", "own"), ("thread-id", "t")], "own"),
        ([("X-Session-ID", ""), ("thread-id", "t")], "t"),
        ([("X-Session-ID", ""), ("X-Session-ID", "own"), ("thread-id", "t")], "t"),
        ([("X-Session-ID", "own"), ("X-Session-ID", ""), ("thread-id", "t")], "own"),
        ([("thread-id", "first"), ("thread-id", "second")], "first"),
        ([("thread-id", "t" * 129), ("x-litellm-session-id", "h")], "h"),
        ([("session-id", "s"), ("thread-id", "t")], "t"),
        ([("x-claude-code-session-id", "s")], "s"),
        ([("x-claude-code-session-id", "s"), ("x-claude-code-agent-id", "a")], "a;parent=s"),
        (
            [
                ("x-claude-code-session-id", "s"),
                ("x-claude-code-agent-id", "a"),
                ("x-claude-code-parent-agent-id", "p"),
            ],
            "a;parent=p",
        ),
        ([("X-Session-ID", "own"), ("x-claude-code-session-id", "s")], "own"),
        ([("x-dynamo-session-id", "d"), ("x-claude-code-session-id", "s")], "d"),
        ([("thread-id", "t"), ("x-codex-parent-thread-id", "p")], "t;parent=p"),
        ([("x-session-affinity", "o"), ("x-parent-session-id", "p")], "o;parent=p"),
        ([("X-Session-ID", "o"), ("x-parent-session-id", "p")], "o;parent=p"),
        ([("X-Session-ID", "o;parent=q"), ("x-parent-session-id", "p")], "o;parent=q"),
        ([("x-dynamo-session-id", "d"), ("x-dynamo-parent-session-id", "d")], "d"),
        ([("x-parent-session-id", "p")], None),
        ([("thread-id", "t" * 120), ("x-codex-parent-thread-id", "p")], "t" * 120),
        ([("x-litellm-session-id", "  ")], None),
        ([("X-LiteLLM-Session-Id", "h")], "h"),
        ([("x-user-id", "u"), ("x-request-id", "r"), ("x-correlation-id", "c")], None),
    ],
)
def test_the_session_of_an_agent_is_found_in_its_own_header(
    headers: list[tuple[str, str]], session: str | None
) -> None:
    assert session_of(headers) == session


def test_what_is_no_request_passes_the_middleware() -> None:
    seen: list[Any] = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope)

    scope = {"type": "lifespan"}
    asyncio.run(SessionMiddleware(app)(scope, None, None))
    assert seen == [scope]
