"""The API server's route and the engine's side of it, without an engine: real sockets, and a client that vLLM's stands
in for."""

from __future__ import annotations

import asyncio
import json
import os
import socketserver
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from fastapi import FastAPI
from meridian import AdminConfig, ConfigError
from meridian.vllm import endpoint, relay
from meridian.vllm.endpoint import AdminEndpoint, Broadcast, admits, tokens_of
from meridian.vllm.relay import Answer, ask
from starlette.testclient import TestClient

TOKEN = "a-token-of-24-characters"
GIVEN = {"Authorization": f"Bearer {TOKEN}"}


class Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """An admin listener that repeats what it was asked."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                if "/early" in self.path:
                    self.send_error(404, "no such slot")
                    return
                length = int(self.headers.get("content-length", 0))
                said = {
                    "request": f"{self.command} {self.path}",
                    "headers": {name.lower(): value for name, value in self.headers.items()},
                    "body": self.rfile.read(length).decode("latin-1"),
                }
                text = json.dumps(said).encode()
                self.send_response(409 if "/refused" in self.path else 200)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def address_string(self) -> str:
                return "socket"

        super().__init__(str(path), Handler)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "s"
    with Listener(path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield str(path)
        server.shutdown()


def error(answer: Answer) -> str:
    said = json.loads(answer.text)
    assert list(said) == ["error"]
    assert "\n" not in said["error"]
    return said["error"]


def test_a_request_is_passed_on_as_it_is(listener: str) -> None:
    headers = {"authorization": "Bearer x", "meridian-config": '{"a": 1}', "cookie": "secret", "host": "evil"}
    code, text = ask(listener, "PUT", "/v1/policies/dispatch?mode=shadow", headers, b"\0asm")
    said = json.loads(text)
    assert (code, said["request"], said["body"]) == (200, "PUT /v1/policies/dispatch?mode=shadow", "\0asm")
    assert said["headers"]["authorization"] == "Bearer x"
    assert said["headers"]["meridian-config"] == '{"a": 1}'
    assert said["headers"]["host"] == "localhost"
    assert "cookie" not in said["headers"]
    # The listener then asks for the token, whatever the request.
    assert said["headers"]["meridian-forwarded"] == "unknown"
    assert ask(listener, "POST", "/v1/refused", {}, b"").code == 409


def test_a_refusal_before_the_body_was_read_is_the_answer(listener: str) -> None:
    # More than a socket holds: the listener hangs up while this is sent.
    code, text = ask(listener, "PUT", "/v1/early", {}, bytes(8 << 20))
    assert code == 404, text
    assert "no such slot" in text


@pytest.mark.parametrize(
    ("method", "target", "headers", "code", "why"),
    [
        ("PATCH", "/v1/status", {}, 404, "no such path"),
        ("GET", "/metrics", {}, 404, "no such path"),
        ("GET", "http://elsewhere/v1/status", {}, 404, "no such path"),
        ("GET", "/v1/a b", {}, 400, "the request is malformed"),
        ("GET", "/v1/a\r\nx: y", {}, 400, "the request is malformed"),
        ("GET", "/v1/status", {"authorization": "a\r\nx: y"}, 400, "the request is malformed"),
        ("GET", "/v1/status", {"authorization": "\u20ac"}, 400, "the request is malformed"),
    ],
)
def test_a_malformed_request_is_refused(
    listener: str, method: str, target: str, headers: dict[str, str], code: int, why: str
) -> None:
    answer = ask(listener, method, target, headers, b"")
    assert answer.code == code
    assert error(answer).startswith(why)


def test_an_engine_that_has_gone_is_an_answer(tmp_path: Path) -> None:
    answer = ask(str(tmp_path / "gone"), "GET", "/v1/status", {}, b"")
    assert answer.code == 502
    assert error(answer).startswith("the admin listener of this engine does not answer: ")


def core(socket: str | None, *, meridian: bool = True, rank: int = 0) -> Any:
    """An `EngineCore` with a scheduler whose listener has this private socket."""
    engine = SimpleNamespace(policies=SimpleNamespace(socket=socket)) if meridian else None
    parallel = SimpleNamespace(data_parallel_index=rank)
    return SimpleNamespace(
        scheduler=SimpleNamespace(_meridian_engine=engine),
        vllm_config=SimpleNamespace(parallel_config=parallel),
    )


def test_an_engine_without_meridian_or_without_a_listener_says_so() -> None:
    for engine_core, why in [
        (core(None, meridian=False), "this engine runs without Meridian: start vLLM with --scheduler-cls"),
        (SimpleNamespace(), "this engine runs without Meridian"),
        (core(None), "this engine has no admin listener: admin.listen must not be empty"),
    ]:
        code, text = relay._passed_on(engine_core, "GET", "/v1/status", {}, b"").result(0)
        assert code == 501
        assert json.loads(text)["error"].startswith(why)


def test_a_busy_engine_refuses_more_requests() -> None:
    calls = relay._Calls()
    go = threading.Event()

    def held() -> Answer:
        assert go.wait(60)
        return Answer(200, "{}")

    waiting = [calls.start(held) for _ in range(relay.MAX_CALLS)]
    code, text = calls.start(held).result(0)
    assert (code, json.loads(text)) == (503, {"error": "8 requests are under way at this engine"})
    go.set()
    assert [future.result(60) for future in waiting] == [[200, "{}"]] * relay.MAX_CALLS
    # A failure gives its place back, and is an answer.
    failed = [calls.start(lambda: 1 // 0) for _ in range(1)]  # type: ignore[arg-type, return-value]
    assert failed[0].result(60)[0] == 500
    assert calls.start(lambda: Answer(200, "")).result(60) == [200, ""]


def test_engine_core_has_the_method_once_and_keeps_its_own(listener: str) -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    relay.install()
    method, rpc = vars(EngineCore)[relay.METHOD], vars(EngineCore)["collective_rpc"]
    relay.install()
    assert (vars(EngineCore)[relay.METHOD], vars(EngineCore)["collective_rpc"]) == (method, rpc)

    def made(kind: type, **attributes: Any) -> Any:
        made = object.__new__(kind)
        vars(made).update(vars(core(listener, rank=3)), **attributes)
        return made

    workers = SimpleNamespace(collective_rpc=lambda *given: given)
    assert made(EngineCore, model_executor=workers).collective_rpc("other", 1.0, (2,), {"a": 3}) == (
        "other",
        1.0,
        (2,),
        {"a": 3},
    )
    # In the client's process the row itself, else what vLLM waits for.
    (row,) = made(EngineCore).collective_rpc(relay.METHOD, None, ("GET /v1/status", TOKEN))
    assert (row["dp_rank"], row["answer"]["request"]) == (3, "GET /v1/status")
    assert row["answer"]["headers"]["authorization"] == f"Bearer {TOKEN}"
    later = made(EngineCoreProc).collective_rpc(relay.METHOD, None, (), {"request": "POST /v1/refused"})
    assert isinstance(later, Future)
    with pytest.raises(RuntimeError, match=r"^dp_rank 3 on .*, process \d+: 409: "):
        later.result(60)
    for kwargs in ({"component": "?"}, {"nothing": 1}, {"request": 1}):
        with pytest.raises(RuntimeError, match=r"^meridian_admin: "):
            made(EngineCoreProc).collective_rpc(relay.METHOD, None, (), kwargs)


def test_another_vllm_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from meridian.vllm import plugin
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.delattr(EngineCore, relay.METHOD, raising=False)
    plugin.install()
    assert not hasattr(EngineCore, relay.METHOD)
    assert "no changes through vLLM's API server: vLLM 0.34.0 is not supported by this Meridian" in caplog.text


# The API server's side.


class Client:
    """vLLM's client of several engines; `answer` says what each of them does."""

    def __init__(self, ranks: list[int], answer: Callable[[int, tuple[Any, ...]], Any]) -> None:
        self.core_engines = [rank.to_bytes(2, "little") for rank in ranks]
        self.answer = answer

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        assert method == relay.METHOD
        said = self.answer(int.from_bytes(engine, "little"), args)
        return await said if asyncio.iscoroutine(said) else said


def changed(name: str) -> list[Any]:
    return [200, json.dumps({"action": "swap", "active": {"name": name}})]


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration with a token."""
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "meridian.toml").write_text('[admin]\ntoken_file = "token"\n')
    monkeypatch.setenv("MERIDIAN_CONFIG", str(tmp_path / "meridian.toml"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def served(client: Any) -> TestClient:
    """The routes over this client, as vLLM starts them."""
    plugin, app = AdminEndpoint(), FastAPI()
    plugin.attach_router(app)
    engine_client = None if client is None else SimpleNamespace(engine_core=client)
    asyncio.run(plugin.init_state(engine_client, app.state, SimpleNamespace()))  # type: ignore[arg-type]
    return TestClient(app)


def test_a_row_for_each_engine_and_which_version_decides_where(configured: Path) -> None:
    asked: list[tuple[int, tuple[Any, ...]]] = []

    def answer(rank: int, args: tuple[Any, ...]) -> Any:
        asked.append((rank, args))
        return changed("a" if rank < 2 else "b")

    api = served(Client([0, 1, 300], answer))
    said = api.put("/meridian/v1/policies/dispatch?mode=active", content=b"\0asm", headers=GIVEN | {"Cookie": "x"})
    assert said.status_code == 200
    assert [row["dp_rank"] for row in said.json()["engines"]] == [0, 1, 300]
    assert said.json()["active"] == [
        {"version": {"name": "a"}, "dp_ranks": [0, 1]},
        {"version": {"name": "b"}, "dp_ranks": [300]},
    ]
    for _, (method, target, headers, body) in asked:
        assert (method, target, body) == ("PUT", "/v1/policies/dispatch?mode=active", b"\0asm")
        assert headers == {"authorization": f"Bearer {TOKEN}", "meridian-forwarded": "testclient"}


def test_failures_of_some_engines_are_said(configured: Path) -> None:
    async def fails() -> Any:
        raise RuntimeError("the engine\nis dead")

    outcomes: dict[int, Any] = {0: changed("a"), 1: [409, '{"error": "nothing to promote"}'], 2: None, 3: [500, "x"]}

    def answer(rank: int, _: tuple[Any, ...]) -> Any:
        return fails() if outcomes[rank] is None else outcomes[rank]

    said = served(Client([0, 1, 2, 3], answer)).post("/meridian/v1/policies/dispatch/promote", headers=GIVEN)
    assert said.status_code == 502
    assert said.json()["error"] == (
        "3 of 4 engines did not do as asked: dp_rank 1: nothing to promote; dp_rank 2: the engine cannot be asked: the "
        "engine is dead; dp_rank 3: x"
    )
    assert [row["code"] for row in said.json()["engines"]] == [200, 409, 502, 500]
    # Where all agree, the code is theirs.
    outcomes = {0: outcomes[1], 1: outcomes[1]}
    assert served(Client([0, 1], answer)).post("/meridian/v1/policies/x/promote", headers=GIVEN).status_code == 409


def test_an_engine_without_the_plugin_names_the_variable(configured: Path) -> None:
    async def fails() -> Any:
        raise Exception(
            "Call to meridian_admin method failed: 'EngineCoreProc' object has no attribute 'meridian_admin'"
        )

    said = served(Client([0], lambda *_: fails())).get("/meridian/v1/status", headers=GIVEN)
    assert said.status_code == 502
    assert "VLLM_PLUGINS must name meridian as well as meridian_admin" in said.json()["error"]


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer \xe9",
        f"Bearer{TOKEN}",
    ],
)
@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE"])
def test_no_engine_is_asked_without_the_token(configured: Path, header: str | None, method: str) -> None:
    def answer(*_: Any) -> Any:
        raise AssertionError("an engine was asked")

    given = {} if header is None else {"Authorization": header.encode("latin-1")}
    said = served(Client([0], answer)).request(method, "/meridian/v1/policies/dispatch", headers=given)  # type: ignore[arg-type]
    assert (said.status_code, list(said.json()), said.headers["www-authenticate"]) == (401, ["error"], "Bearer")


def test_a_token_that_may_only_read_reaches_no_engine_with_a_change(configured: Path) -> None:
    (configured / "token").write_text(f"ops {TOKEN}\nprometheus {TOKEN}-reads read\n")
    client = served(Client([0], lambda *_: changed("a")))
    given = {"Authorization": f"Bearer {TOKEN}-reads"}
    assert client.get("/meridian/v1/status", headers=given).status_code == 200
    for method in ("PUT", "POST", "DELETE"):
        said = client.request(method, "/meridian/v1/policies/dispatch", headers=given)
        assert (said.status_code, said.json()) == (403, {"error": "this token may only read"})
    assert client.put("/meridian/v1/policies/dispatch", headers=GIVEN).status_code == 200


def test_without_a_token_file_nothing_can_be_changed(configured: Path) -> None:
    for text, why in [
        ("", "nothing can be changed: no admin.token_file is configured"),
        ('[admin]\ntoken_file = "absent"\n', "nothing can be changed: admin.token_file: "),
        ("[admin]\ntokens = 1\n", "nothing can be changed: "),
    ]:
        (configured / "meridian.toml").write_text(text)
        said = served(Client([0], lambda *_: changed("a"))).get("/meridian/v1/status", headers=GIVEN)
        assert said.status_code == 403
        assert said.json()["error"].startswith(why)


def test_another_vllm_is_refused_with_one_line(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = served(None).get("/meridian/v1/status", headers=GIVEN)
    assert (said.status_code, said.json()["error"]) == (501, "this server has no engine")
    said = served(SimpleNamespace(core_engines=[])).get("/meridian/v1/status", headers=GIVEN)
    assert said.status_code == 501
    assert said.json()["error"] == f"vLLM {vllm.__version__}: its client has no _call_utility_async"
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    said = served(Client([0], lambda *_: changed("a"))).get("/meridian/v1/status", headers=GIVEN)
    assert said.status_code == 501
    assert said.json()["error"] == "vLLM 0.34.0 is not supported by this Meridian, expected 0.30 to 0.33"


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, []),
        ("", []),
        ("meridian", []),
        ("meridian_admin", ["meridian_admin"]),
        ("x,meridian_admin", ["meridian_admin"]),
    ],
)
def test_vllm_loads_the_routes_only_by_name(
    monkeypatch: pytest.MonkeyPatch, named: str | None, found: list[str]
) -> None:
    from vllm import envs
    from vllm.plugins import load_endpoint_plugins

    # Not in the environment: vLLM keeps what it read there once an engine has run in this process.
    monkeypatch.setitem(vars(envs), "VLLM_PLUGINS", None if named is None else named.split(","))
    assert [plugin.name for plugin in load_endpoint_plugins(("generate",))] == found


def test_this_vllms_clients_have_what_the_route_uses() -> None:
    import inspect

    from vllm.v1.engine.core_client import AsyncMPClient, DPLBAsyncMPClient

    for client in (AsyncMPClient, DPLBAsyncMPClient):
        given = inspect.signature(client._call_utility_async)
        assert tuple(given.parameters) == ("self", "method", "args", "engine")
    assert "self.core_engines" in inspect.getsource(AsyncMPClient.__mro__[1])


def test_large_and_broken_bodies_are_refused(configured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 8)
    api = served(Client([0], lambda *_: changed("a")))
    path = "/meridian/v1/policies/dispatch"
    assert api.put(path, content=b"12345678", headers=GIVEN).status_code == 200
    assert api.put(path, content=b"123456789", headers=GIVEN).status_code == 413
    # Without a declared length.
    assert api.put(path, content=iter([b"12345", b"6789"]), headers=GIVEN).status_code == 413
    assert api.put(path, content=iter([b"1234", b"5678"]), headers=GIVEN).status_code == 200


def test_no_more_requests_than_places(configured: Path) -> None:
    plugin, app = AdminEndpoint(), FastAPI()
    plugin.attach_router(app)
    client = SimpleNamespace(engine_core=Client([0], lambda *_: changed("a")))
    asyncio.run(plugin.init_state(client, app.state, SimpleNamespace()))  # type: ignore[arg-type]
    plugin._under_way = endpoint.MAX_REQUESTS
    said = TestClient(app).get("/meridian/v1/status", headers=GIVEN)
    assert (said.status_code, said.headers["retry-after"]) == (503, "10")
    plugin._under_way = 0
    assert TestClient(app).get("/meridian/v1/status", headers=GIVEN).status_code == 200
    assert plugin._under_way == 0


def test_engines_make_the_changes_of_two_api_servers_in_one_order(configured: Path) -> None:
    order: dict[int, list[bytes]] = {0: [], 1: []}

    async def change(rank: int, body: bytes) -> Any:
        # The other server's change would come between, if it could.
        for _ in range(rank * 50):
            await asyncio.sleep(0)
        order[rank].append(body)
        return changed("a")

    async def server(name: bytes) -> None:
        client = Client([0, 1], lambda rank, args: change(rank, args[3]))
        broadcast = Broadcast(SimpleNamespace(engine_core=client))
        for _ in range(20):
            async with broadcast.turn():
                await broadcast.ask("PUT", "/v1/policies/dispatch", {}, name)

    # As in two processes: each has an event loop and a file of its own.
    servers = [threading.Thread(target=asyncio.run, args=(server(name),)) for name in (b"x", b"y")]
    for each in servers:
        each.start()
    for each in servers:
        each.join()
    assert order[0] == order[1]
    assert sorted(order[0]) == [b"x"] * 20 + [b"y"] * 20


def surroundings(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Path]:
    """The folders among which a private one is looked for, in this order."""
    for name in ("run", "temporary"):
        (folder / name).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "run"))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    last = folder / "temporary" / f"meridian-{os.getuid()}"
    return [folder / "run" / "meridian", folder / ".cache" / "meridian" / "run", last]


def test_the_lock_is_in_a_folder_of_the_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second, last = surroundings(monkeypatch, tmp_path)
    assert endpoint._private_folder() == first
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    for mode in (0o755, 0o750, 0o701, 0o770):
        first.chmod(mode)
        assert endpoint._private_folder() == second
        assert stat.S_IMODE(first.stat().st_mode) == mode, "it is left as it is"
    first.rmdir()
    (tmp_path / "private").mkdir(mode=0o700)
    first.symlink_to(tmp_path / "private")
    assert endpoint._private_folder() == second, "a link is not used, whatever it leads to"
    second.rmdir()
    second.write_text("")
    assert endpoint._private_folder() == last
    last.rmdir()
    last.write_text("")
    with pytest.raises(OSError, match=r"^no private folder among .*/run/meridian, .*/temporary/meridian-"):
        endpoint._private_folder()


def test_each_engine_may_have_a_token_of_its_own(tmp_path: Path) -> None:
    for rank in (0, 1):
        file = tmp_path / f"token-{rank}"
        file.write_text(f"{TOKEN}-{rank}")
        file.chmod(0o600)
    tokens = tokens_of(AdminConfig(token_file="token-{rank}"), str(tmp_path), [0, 1])
    assert tokens == [(f"{TOKEN}-{rank}".encode(), True) for rank in (0, 1)]
    assert all(admits(tokens, f"bearer  {TOKEN}-{rank} ") for rank in (0, 1))
    assert not admits(tokens, f"Bearer {TOKEN}")
    (tmp_path / "token-1").write_text(f"alice {TOKEN}-a\nbob {TOKEN}-b read\n")
    tokens = tokens_of(AdminConfig(token_file="token-{rank}"), str(tmp_path), [0, 1])
    assert all(admits(tokens, f"Bearer {TOKEN}-{of}") for of in ("0", "a", "b"))
    assert [admits(tokens, f"Bearer {TOKEN}-{of}", changes=True) for of in ("0", "a", "b")] == [True, True, False]
    (tmp_path / "token-1").chmod(0o644)
    with pytest.raises(ConfigError, match=r"^admin\.token_file: .*token-1: has mode 0644"):
        tokens_of(AdminConfig(token_file="token-{rank}"), str(tmp_path), [0, 1])
