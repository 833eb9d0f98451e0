"""`late = "refuse"`: who cannot be in time is refused before its prompt is computed, and its client gets a 503."""

from __future__ import annotations

import asyncio
import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import Engine
from meridian.vllm import RefusalMiddleware
from meridian.vllm.bench.request import TraceRequest
from test_budget_serve import BudgetServer

SEATS = 16
REFUSING = {
    "ttfo_ms": 0.001,
    "prompt_ms_per_token": 0,
    "think_ms_per_token": 0,
    "late": "refuse",
    "tenants": ["late"],
}


def test_late_requests_end_without_a_token_and_the_others_as_stock(clean: Engine) -> None:
    first = [TraceRequest(0.0, 16, 4 + 4 * i, 4) for i in range(SEATS)]
    late = [TraceRequest(0.0, 16, 8, 8, tenant="late") for _ in range(SEATS)]
    others = [TraceRequest(0.0, 16, 8, 8) for _ in range(SEATS)]
    requests = [*first, *late, *others]
    with clean.using(None):
        stock = clean.generate(requests)
    clean.run.engine.reset_prefix_cache()
    native = clean.native("native:balanced", service_levels={"impossible": REFUSING})
    with clean.using(native):
        ours = clean.generate(requests, refuses=True)
    assert [not tokens for tokens in ours] == [False] * SEATS + [True] * SEATS + [False] * SEATS
    assert [*ours[:SEATS], *ours[2 * SEATS :]] == [*stock[:SEATS], *stock[2 * SEATS :]]
    assert "refused" in native.outputs
    assert clean.scheduler.kv_cache_manager.usage == 0


def test_a_late_request_alone_is_served(clean: Engine) -> None:
    requests = [TraceRequest(0.0, 16, 8, 8, tenant="late")]
    with clean.using(clean.native("native:fcfs", service_levels={"impossible": REFUSING})):
        (tokens,) = clean.generate(requests)
    assert tokens


UNHELD = """
from meridian.vllm import RefusalMiddleware

class Unheld(RefusalMiddleware):
    async def __call__(self, scope, receive, send):
        is_plain = (b"plain", b"1") in scope.get("headers", ())
        await (self._app if is_plain else super().__call__)(scope, receive, send)
"""


class RefusingServer(BudgetServer):
    """A server with one seat, a level that cannot be kept while somebody runs, and both kinds of middleware. Requests
    with the header `plain` pass by the one of refusals."""

    def __init__(self, folder: Path) -> None:
        (folder / "unheld.py").write_text(UNHELD)
        kinds = ("unheld.Unheld", "meridian.vllm.SessionMiddleware")
        middleware = [word for kind in kinds for word in ("--middleware", kind)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
            super().__init__(folder, *middleware, "--max-num-seqs", "1")

    def config(self, listener: int) -> str:
        """A level that no request keeps."""
        fields = "\n".join(f"{name} = {json.dumps(value)}" for name, value in REFUSING.items())
        return (
            f'[telemetry]\nprometheus = "127.0.0.1:{listener}"\n[admin]\nlisten = ""\n'
            f"[service_levels.impossible]\n{fields}\n"
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RefusingServer]:
    """A running server."""
    running = RefusingServer(tmp_path_factory.mktemp("serve"))
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.kill()


def asked(
    server: RefusingServer, route: str, tenant: str, sent: dict[str, str] | None = None, **more: Any
) -> tuple[int, str | None, str]:
    """Status, `Retry-After` and body of the answer to a request."""
    what = {"messages": [{"role": "user", "content": "hello"}]} if "chat" in route else {"prompt": "hello"}
    body = {"model": "m", "max_tokens": 8, "temperature": 0.0, **what, **more}
    body["vllm_xargs"] = {"meridian_tenant": tenant}
    headers = {"Content-Type": "application/json", **(sent or {})}
    request = urllib.request.Request(f"{server.base}/v1/{route}", data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.headers["Retry-After"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"], error.read().decode()


def ends(body: str) -> dict[int, tuple[str, str]]:
    """How each choice of an answer, streamed or not, says that it has ended."""
    events = [body] if body.startswith("{") else body.replace("data: [DONE]", "").split("data: ")
    choices = [choice for event in events if event.strip() for choice in json.loads(event)["choices"]]
    return {
        choice["index"]: (choice["finish_reason"], choice["stop_reason"])
        for choice in choices
        if choice["finish_reason"]
    }


def test_a_client_gets_503_and_a_time_to_try_again(server: RefusingServer) -> None:
    status, _, _ = asked(server, "completions", "late")
    assert status == 200, "nobody else runs"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asked, server, "chat/completions", "", max_tokens=900, ignore_eos=True)
        while server.metric(server.base, "vllm:num_requests_running") == 0:
            assert not running.done()
        for route in ("chat/completions", "completions"):
            for streams in (False, True):
                status, retry_after, body = asked(server, route, "late", stream=streams, logprobs="chat" in route)
                assert status == 503, body
                assert retry_after is not None
                assert 1 <= int(retry_after) <= 600
                assert json.loads(body)["error"]["code"] == 503
                more = {"n": 2, "temperature": 1.0, "logprobs": "chat" in route or 1}
                status, _, body = asked(server, route, "late", {"plain": "1"}, stream=streams, **more)
                assert status == 200
                assert ends(body) == dict.fromkeys((0, 1), ("abort", "meridian_refused")), body
        assert not running.done(), "the engine was busy all the time"
        assert running.result()[0] == 200
    status, _, body = asked(server, "chat/completions", "", stream=True)
    assert (status, body.rstrip().endswith("data: [DONE]")) == (200, True)
    assert server.metric(server.base, "vllm:request_queue_time_seconds_sum") >= 0
    refused = 'meridian_service_level_requests_total{level="impossible",outcome="refused"}'
    assert server.metric(server.listener, refused) == 4 + 8


def test_the_engine_learns_the_session_that_an_agent_names(server: RefusingServer) -> None:
    def ask(session: str) -> int:
        return asked(server, "completions", "", {"thread-id": session}, max_tokens=400, ignore_eos=True)[0]

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, session) for session in ("a", "a", "b")]
        while server.metric(server.listener, "meridian_sessions") < 2:
            assert not all(answer.done() for answer in answers), "the engine saw no two sessions"
        assert [answer.result() for answer in answers] == [200, 200, 200]


def through(messages: list[dict[str, Any]], clock: Iterator[float], path: str = "/v1/chat/completions") -> list[Any]:
    """What the middleware sends on of an application's messages."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    async def note(message: Any) -> None:
        sent.append(message)

    middleware = RefusalMiddleware(app, lambda: next(clock))
    asyncio.run(middleware({"type": "http", "method": "POST", "path": path}, None, note))
    return sent


def response(content_type: bytes, *bodies: bytes, status: int = 200) -> list[dict[str, Any]]:
    """The messages of a response."""
    parts = [{"type": "http.response.body", "body": body, "more_body": True} for body in bodies]
    start = {"type": "http.response.start", "status": status, "headers": [(b"Content-Type", content_type)]}
    return [start, *parts, {"type": "http.response.body", "body": b""}]


ROLE = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
TOKEN = b'data: {"choices": [{"index": 0, "delta": {"reasoning": "a"}, "finish_reason": null}]}\n\n'
ENDED = (
    b'data: {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "abort", '
    b'"stop_reason": "meridian_refused"}]}\n\n'
)
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "messages",
    [
        response(b"text/event-stream; charset=utf-8", ROLE, TOKEN, DONE),
        response(b"text/event-stream", ROLE + TOKEN[:9], TOKEN[9:], DONE),
        response(b"text/event-stream", b"data: nonsense\n\n", DONE),
        response(b"text/event-stream", ENDED, TOKEN, DONE),
        response(b"text/event-stream", b'data: {"error": {"code": 500}}\n\n', DONE),
        response(b"text/event-stream", b'data: {"choices": [{"index": 0, "text": ""}]}\n\n', DONE),
        response(b"application/json", b'{"choices": [{"text": "meridian_refused", "stop_reason": null}]}'),
        response(b"application/json", b'{"choices": [{"stop_reason": "meridian_refused"}, {"stop_reason": null}]}'),
        response(b"application/json", b'"meridian_refused"'),
        response(b"application/json", b'{"error": "meridian_refused"}', status=400),
    ],
)
def test_what_was_not_refused_passes_unchanged(messages: list[dict[str, Any]]) -> None:
    assert through(messages, iter(range(99))) == messages


@pytest.mark.parametrize(
    "messages",
    [
        response(b"text/event-stream", ROLE, DONE),
        response(b"text/event-stream", ROLE + USAGE + DONE),
        response(b"text/event-stream", ROLE),
        response(b"text/event-stream", ROLE, ENDED, DONE),
        response(b"application/json", b'{"choices": [{"stop_reason": "meridian_refused"}]}'),
    ],
)
def test_what_was_refused_becomes_one_503(messages: list[dict[str, Any]]) -> None:
    start, body = through(messages, iter(range(99)))
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert json.loads(body["body"])["error"]["type"] == "ServiceUnavailableError"
    elsewhere = through(messages, iter(range(99)), "/v1/embeddings")
    assert elsewhere == messages


def test_the_time_to_try_again_is_what_those_who_wait_take() -> None:
    """A request is served every 10 s, and three wait when one of them is refused."""

    async def played() -> int:
        gates = [asyncio.Event() for _ in range(6)]
        now = 0.0
        retry_after = 0

        async def app(scope: Any, _receive: Any, send: Any) -> None:
            await gates[scope["number"]].wait()
            for message in response(b"text/event-stream", DONE if scope["number"] == 5 else TOKEN):
                await send(message)

        async def note(message: Any) -> None:
            nonlocal retry_after
            retry_after = int(dict(message.get("headers", ())).get(b"retry-after", retry_after))

        middleware = RefusalMiddleware(app, lambda: now)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        tasks = [asyncio.create_task(middleware({**scope, "number": i}, None, note)) for i in range(6)]
        await asyncio.sleep(0)
        for number in (0, 1, 2, 5):
            now += 10.0
            gates[number].set()
            await tasks[number]
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks)
        return retry_after

    # 30 s since the first of three.
    assert asyncio.run(played()) == 30
