"""The engine's side of changes that come through vLLM's API server, or through `collective_rpc`.

The general plugin gives every `EngineCore` the method `meridian_admin`. It passes one request on to the admin listener
of the same process, over its private socket. The listener alone reads, checks and carries out the request, and it asks
for the token. `EngineCore` calls the method between two steps, on the thread that schedules, so the method returns at
once: a thread of its own waits for the answer, which may take as long as a component compiles.

`collective_rpc` reaches workers, and a worker is another process than the scheduler's on a CPU and with tensor
parallelism. Its call for this method therefore ends in `EngineCore`, before any worker.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import http.client
import inspect
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

logger = logging.getLogger("vllm.meridian")

# The method of `EngineCore`, and its name for `collective_rpc`.
METHOD = "meridian_admin"
# Headers of a client that the listener reads.
HEADERS = ("authorization", "content-type", "meridian-config", "meridian-signature")
# Calls that one engine passes on at a time.
MAX_CALLS = 8
# Longest wait for an answer: a timeline takes up to 300 s.
ANSWER_S = 330.0
_MAX_ANSWER_BYTES = 64 << 20
_METHODS = ("GET", "PUT", "POST", "DELETE")
_WITHOUT_MERIDIAN = "this engine runs without Meridian: start vLLM with --scheduler-cls meridian.vllm.MeridianScheduler"
_WITHOUT_LISTENER = "this engine has no admin listener: admin.listen must not be empty"


class Answer(NamedTuple):
    """An answer of the admin listener: its code and its text."""

    code: int
    text: str


def refusal(code: int, why: str) -> Answer:
    """An answer in the form of the listener's own refusals."""
    return Answer(code, json.dumps({"error": " ".join(why.split())}))


class _PrivateSocket(http.client.HTTPConnection):
    """HTTP over the private socket of a process."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def ask(path: str, method: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
    """Ask the admin listener with this private socket. Never raises: the answer says what was wrong."""
    if method not in _METHODS or not target.startswith("/v1/"):
        return refusal(404, "no such path")
    sent = {name: value for name, value in headers.items() if name in (*HEADERS, "meridian-forwarded")}
    connection = _PrivateSocket(path)
    try:
        # A refusal may come before the body was read; the answer is there all the same.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, target, body, {"meridian-forwarded": "unknown", **sent})
        response = connection.getresponse()
        text = response.read(_MAX_ANSWER_BYTES + 1)
    except (http.client.InvalidURL, ValueError) as why:
        return refusal(400, f"the request is malformed: {why}")
    except (OSError, http.client.HTTPException) as why:
        return refusal(502, f"the admin listener of this engine does not answer: {why or type(why).__name__}")
    finally:
        connection.close()
    if len(text) > _MAX_ANSWER_BYTES:
        return refusal(502, "the answer of this engine is too large")
    return Answer(response.status, text.decode(errors="replace"))


class _Calls:
    """Calls that wait for their answer, each on a thread of its own that does not keep the process alive."""

    def __init__(self) -> None:
        self._seats = threading.BoundedSemaphore(MAX_CALLS)

    def start(self, call: Callable[[], Answer]) -> Future[Any]:
        """The future answer as a list, which vLLM can serialize."""
        future: Future[Any] = Future()
        if not self._seats.acquire(blocking=False):
            future.set_result(list(refusal(503, f"{MAX_CALLS} requests are under way at this engine")))
            return future

        def answer() -> None:
            try:
                answered = call()
            except Exception as why:
                logger.exception("meridian: failed while passing on a request")
                answered = refusal(500, f"failed: {type(why).__name__}")
            finally:
                self._seats.release()
            future.set_result(list(answered))

        threading.Thread(target=answer, name="meridian-relay", daemon=True).start()
        return future


_CALLS = _Calls()


def _passed_on(engine_core: Any, method: str, target: str, headers: dict[str, str], body: bytes) -> Future[Any]:
    engine = getattr(getattr(engine_core, "scheduler", None), "_meridian_engine", None)
    path = None if engine is None else engine.policies.socket
    if path is None:
        future: Future[Any] = Future()
        future.set_result(list(refusal(501, _WITHOUT_MERIDIAN if engine is None else _WITHOUT_LISTENER)))
        return future
    return _CALLS.start(lambda: ask(path, method, target, headers, body))


def _of_rpc(
    request: str = "GET /v1/policies",
    token: str = "",
    body: str = "",
    component: str = "",
    config: str = "",
    signature: str = "",
) -> tuple[str, str, dict[str, str], bytes]:
    """The request of a `collective_rpc`, whose arguments are texts: `component` is in base64."""
    method, _, target = request.partition(" ")
    given = {
        "authorization": token and f"Bearer {token}",
        "content-type": "" if component else "application/json",
        "meridian-config": config,
        "meridian-signature": signature,
        "meridian-forwarded": "collective_rpc",
    }
    sent = base64.b64decode(component, validate=True) if component else body.encode()
    return method, target, {name: value for name, value in given.items() if value}, sent


def _row(engine_core: Any, answer: Answer) -> list[dict[str, Any]]:
    """The one result of an engine.

    Raises:
        RuntimeError: the engine did not do as asked. vLLM returns the results of one engine only, but raises the errors
            of all.
    """
    rank = engine_core.vllm_config.parallel_config.data_parallel_index
    where = {"dp_rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        said = json.loads(answer.text)
    except ValueError:
        said = answer.text
    if answer.code != 200:
        why = said.get("error", answer.text) if isinstance(said, dict) else answer.text
        raise RuntimeError(f"dp_rank {rank} on {where['host']}, process {where['pid']}: {answer.code}: {why}")
    return [{**where, "answer": said}]


def _row_later(engine_core: Any, asked: Future[Any]) -> Future[Any]:
    later: Future[Any] = Future()

    def done(answered: Future[Any]) -> None:
        try:
            later.set_result(_row(engine_core, Answer(*answered.result())))
        except Exception as why:
            later.set_exception(why)

    asked.add_done_callback(done)
    return later


def install() -> None:
    """Give `EngineCore` the method, once in a process.

    Raises:
        RuntimeError: this vLLM is not supported.
    """
    import vllm
    from vllm.v1.engine import core

    from meridian.vllm.compat import check_version

    check_version(vllm.__version__)
    if METHOD in vars(core.EngineCore):
        return
    call = core.EngineCore.collective_rpc
    given = tuple(inspect.signature(call).parameters)
    if given != ("self", "method", "timeout", "args", "kwargs"):
        raise RuntimeError(
            f"vLLM {vllm.__version__} is not supported by this Meridian: EngineCore.collective_rpc({', '.join(given)})"
        )

    @functools.wraps(call)
    def collective_rpc(
        self: Any, method: Any, timeout: float | None = None, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if method != METHOD:
            return call(self, method, timeout, args, kwargs)
        try:
            asked = _passed_on(self, *_of_rpc(*args, **(kwargs or {})))
        except (TypeError, AttributeError, binascii.Error) as why:
            raise RuntimeError(f"{METHOD}: {why}") from None
        row = _row_later(self, asked)
        # Only the client of another process waits for a future.
        return row if isinstance(self, core.EngineCoreProc) else row.result(timeout)

    setattr(core.EngineCore, METHOD, _passed_on)
    setattr(core.EngineCore, "collective_rpc", collective_rpc)  # noqa: B010
