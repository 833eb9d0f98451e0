"""Routes on vLLM's API server that reach every engine which this server manages.

VLLM_PLUGINS=meridian,meridian_admin vllm serve MODEL --scheduler-cls meridian.vllm.MeridianScheduler

`/meridian/v1/...` takes the requests of the admin listener's `/v1/...` and passes each to all engines. vLLM loads these
routes only if `VLLM_PLUGINS` names them. Every request needs the token, because the API server's clients may be
anywhere. The engines check the token again and carry the request out (`meridian.vllm.relay`).
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import json
import logging
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from starlette.responses import Response

from meridian._native import ConfigError, read_admin_tokens
from meridian._tables import AdminConfig
from meridian.config import MeridianConfig, load_config
from meridian.vllm.compat import check_version
from meridian.vllm.relay import ANSWER_S, HEADERS, METHOD, Answer, refusal

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State
    from starlette.requests import Request

logger = logging.getLogger("vllm.meridian")

PREFIX = "/meridian"
# As the admin listener: the largest component, and the longest wait for a body.
MAX_BODY_BYTES = 32 << 20
BODY_S = 30.0
# Requests with the token that wait for their turn or are under way, at one API server.
MAX_REQUESTS = 8
# The engine answers first, unless it is busy with a step for so long.
_ENGINE_S = ANSWER_S + 30.0
# `EngineCore` without the method (vllm/v1/engine/core.py: `_invoke_utility_method`).
_NO_METHOD = f"has no attribute '{METHOD}'"
_NAME_BOTH = "the engine has not loaded Meridian's plugin: VLLM_PLUGINS must name meridian as well as meridian_admin"


def _private_folder() -> Path:
    """A folder that only this user can enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(runtime) / "meridian"] if runtime and Path(runtime).is_dir() else []
    candidates += [Path.home() / ".cache" / "meridian" / "run"]
    candidates += [Path(tempfile.gettempdir()) / f"meridian-{os.getuid()}"]
    for folder in candidates:
        try:
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    raise OSError(f"no private folder among {', '.join(map(str, candidates))}")


def tokens_of(admin: AdminConfig, base_dir: str, ranks: Sequence[int]) -> list[tuple[bytes, bool]]:
    """The tokens in the files of the engines with these ranks, and whether their role allows changes.

    Raises:
        ConfigError: no token is configured, or a file cannot be used; names the file.
    """
    if not admin.token_file:
        raise ConfigError("no admin.token_file is configured")
    files = dict.fromkeys(admin.token_file.replace("{rank}", str(rank)) for rank in ranks)
    found = [pair for file in files for pair in read_admin_tokens(str(Path(base_dir) / file))]
    return [(token.encode(), may_change) for token, may_change in found]


def admits(tokens: Sequence[tuple[bytes, bool]], authorization: str | None, *, changes: bool = False) -> bool:
    """Whether the header carries one of the tokens, for a change one whose role allows it. The time does not depend on
    the contents."""
    scheme, _, given = (authorization or "").partition(" ")
    # Headers are Latin-1 on the wire.
    said = given.strip().encode("latin-1", "replace")
    found = False
    for token, may_change in tokens:
        found |= hmac.compare_digest(token, said) and (may_change or not changes)
    return found and scheme.lower() == "bearer"


@dataclass(frozen=True)
class _Row:
    """An engine, and its answer."""

    dp_rank: int
    answer: Answer

    def said(self) -> Any:
        try:
            return json.loads(self.answer.text)
        except ValueError:
            return self.answer.text

    def error(self) -> str | None:
        """One line if the engine did not do as asked."""
        if self.answer.code == 200:
            return None
        said = self.said()
        return str(said.get("error", self.answer.text) if isinstance(said, dict) else said)

    def shown(self) -> dict[str, Any]:
        error = self.error()
        outcome = {"answer": self.said()} if error is None else {"error": error}
        return {"dp_rank": self.dp_rank, "code": self.answer.code, **outcome}


def summed_up(rows: Sequence[_Row]) -> tuple[int, dict[str, Any]]:
    """The code and the body of the answer: a row for each engine, which version decides where, and what went wrong.

    The code is 200 only if every engine did as asked. It is the engines' own if they agree on another one, else 502.
    """
    body: dict[str, Any] = {"engines": [row.shown() for row in rows]}
    active: dict[str, tuple[Any, list[int]]] = {}
    for row in rows:
        said = row.said()
        version = said.get("active") if isinstance(said, dict) and row.error() is None else None
        if version is not None:
            active.setdefault(json.dumps(version, sort_keys=True), (version, []))[1].append(row.dp_rank)
    if active:
        body["active"] = [{"version": version, "dp_ranks": ranks} for version, ranks in active.values()]
    failed = [(row.dp_rank, error) for row in rows if (error := row.error()) is not None]
    if failed:
        reasons = "; ".join(f"dp_rank {rank}: {error}" for rank, error in failed)
        body["error"] = f"{len(failed)} of {len(rows)} engines did not do as asked: {reasons}"
    codes = {row.answer.code for row in rows}
    return (codes.pop() if len(codes) == 1 else 502), body


class Broadcast:
    """Passes requests on to every engine of an API server's client."""

    def __init__(self, engine_client: Any) -> None:
        """Take the client.

        Raises:
            RuntimeError: it is not the client that this Meridian knows.
        """
        # vLLM 0.30 and 0.31 have no public call to all engines (`call_utility_all_async`), and that of later versions
        # gives up at the first engine that fails.
        core: Any = getattr(engine_client, "engine_core", None)
        missing = [name for name in ("_call_utility_async", "core_engines") if not hasattr(core, name)]
        if missing:
            raise RuntimeError(f"vLLM {vllm.__version__}: its client has no {' and no '.join(missing)}")
        self._core: Any = core
        self._turn = asyncio.Lock()
        # Also with the other API servers of this machine, so that all engines make two changes in the same order.
        self._lock_file = _private_folder() / "changes.lock"

    @property
    def engines(self) -> dict[int, bytes]:
        """vLLM's names of the engines by data-parallel rank (vllm/v1/engine/core_client.py: `core_engines`)."""
        return {int.from_bytes(name, "little"): name for name in self._core.core_engines}

    async def ask(self, method: str, target: str, headers: dict[str, str], body: bytes) -> list[_Row]:
        """The answer of each engine, by rank."""
        calls = [
            self._answer(rank, name, (method, target, headers, body)) for rank, name in sorted(self.engines.items())
        ]
        return list(await asyncio.gather(*calls))

    async def _answer(self, rank: int, name: bytes, request: tuple[Any, ...]) -> _Row:
        try:
            call = self._core._call_utility_async(METHOD, *request, engine=name)
            code, text = await asyncio.wait_for(call, _ENGINE_S)
            return _Row(rank, Answer(int(code), str(text)))
        except asyncio.TimeoutError:
            why = "the engine does not answer; it may carry the request out later"
        except Exception as error:
            why = (
                _NAME_BOTH
                if _NO_METHOD in str(error)
                else f"the engine cannot be asked: {error or type(error).__name__}"
            )
        return _Row(rank, refusal(502, why))

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One change after the other, at every API server of this user and machine."""
        async with self._turn:
            file = os.open(self._lock_file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Waits for a change of another API server, which ends within the longest wait for an engine.
                await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
                yield
            finally:
                os.close(file)


class AdminEndpoint:
    """Entry point `vllm.endpoint_plugins` (vllm/plugins/endpoint_plugins/interface.py)."""

    name = "meridian_admin"
    required_tasks = None

    def __init__(self) -> None:
        self._broadcast: Broadcast | None = None
        self._tokens: list[tuple[bytes, bool]] = []
        self._under_way = 0
        # Why every request is refused: the code and one line.
        self._refused: tuple[int, str] = (503, "the API server is starting")

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.router.add_route(
            PREFIX + "/v1/{path:path}", self.answer, ["GET", "PUT", "POST", "DELETE"], include_in_schema=False
        )

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Take the API server's client of the engines. A problem does not end the server: each request is refused."""
        try:
            check_version(vllm.__version__)
            if engine_client is None:
                raise RuntimeError("this server has no engine")
            self._broadcast = Broadcast(engine_client)
            config = load_config()
        except (RuntimeError, OSError) as why:
            return self._refuse(501, str(why))
        except ConfigError as why:
            return self._refuse(403, f"nothing can be changed: {why}")
        self._read_tokens(config)

    def _read_tokens(self, config: MeridianConfig) -> None:
        assert self._broadcast is not None
        try:
            self._tokens = tokens_of(config.admin, config.base_dir, sorted(self._broadcast.engines))
        except ConfigError as why:
            self._refuse(403, f"nothing can be changed: {why}")

    def _refuse(self, code: int, why: str) -> None:
        self._refused = (code, why)
        logger.warning("meridian: %s/v1: every request is refused: %s", PREFIX, why)

    async def answer(self, request: Request) -> Response:
        """Answer a request of the admin interface with a row for each engine."""
        if self._broadcast is None or not self._tokens:
            return _json(*self._refused, reason=True)
        authorization = request.headers.get("authorization")
        if not admits(self._tokens, authorization):
            why = "requests through the API server need the token of admin.token_file: Authorization: Bearer TOKEN"
            return _json(401, why, reason=True)
        if request.method != "GET" and not admits(self._tokens, authorization, changes=True):
            # Before its body takes a place of those that may.
            return _json(403, "this token may only read", reason=True)
        if self._under_way >= MAX_REQUESTS:
            return _json(503, f"{MAX_REQUESTS} requests are under way at this API server", reason=True)
        self._under_way += 1
        try:
            return await self._pass_on(self._broadcast, request)
        finally:
            self._under_way -= 1

    async def _pass_on(self, broadcast: Broadcast, request: Request) -> Response:
        body = await _body(request)
        if isinstance(body, Response):
            return body
        query = request.url.query
        # As the client wrote it: the listener decodes it.
        path = request.scope.get("raw_path", request.url.path.encode()).decode("latin-1").partition("?")[0]
        target = path[path.index(PREFIX) + len(PREFIX) :] + (f"?{query}" if query else "")
        headers = {name: value for name in HEADERS if (value := request.headers.get(name)) is not None}
        headers["meridian-forwarded"] = request.client.host if request.client is not None else "unknown"
        if request.method == "GET":
            return _json(*summed_up(await broadcast.ask("GET", target, headers, b"")))
        async with broadcast.turn():
            rows = await broadcast.ask(request.method, target, headers, body)
        code, said = summed_up(rows)
        logger.info("meridian: %s %s: %s", request.method, target, said.get("error", f"{len(rows)} engines changed"))
        return _json(code, said)


def _json(code: int, said: Any, *, reason: bool = False) -> Response:
    text = json.dumps({"error": said} if reason else said)
    headers = {"x-content-type-options": "nosniff"}
    if code == 401:
        headers["www-authenticate"] = "Bearer"
    elif code == 503:
        headers["retry-after"] = "10"
    return Response(text, code, headers, "application/json")


async def _body(request: Request) -> bytes | Response:
    """The body, or the refusal of one that is too large or late."""
    too_large = _json(413, "the body must have at most 32 MiB", reason=True)
    declared = request.headers.get("content-length", "0")
    if not declared.isascii() or not declared.isdigit() or int(declared) > MAX_BODY_BYTES:
        return too_large

    async def received() -> bytes | Response:
        parts = bytearray()
        async for part in request.stream():
            parts += part
            if len(parts) > MAX_BODY_BYTES:
                return too_large
        return bytes(parts)

    try:
        return await asyncio.wait_for(received(), BODY_S)
    except asyncio.TimeoutError:
        return _json(408, "the body did not arrive in time", reason=True)
    except Exception:
        # The client hung up.
        return _json(400, "the body could not be read to its end", reason=True)
