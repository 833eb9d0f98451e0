"""HTTP 503 with `Retry-After` for the requests that the engine refuses (`late = "refuse"` of a service level).

vllm serve MODEL --scheduler-cls meridian.vllm.MeridianScheduler --middleware meridian.vllm.RefusalMiddleware

Without it, a refused request of `/v1/chat/completions` or `/v1/completions` ends with status 200, no tokens,
`finish_reason` "abort" and `stop_reason` "meridian_refused". vLLM leaves out chunks of a stream without tokens, and the
last one with them (vllm/entrypoints/openai/chat_completion/serving.py). The general plugin `meridian` therefore makes
this one count as a chunk with tokens.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Message = MutableMapping[str, Any]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[MutableMapping[str, Any], Callable[[], Awaitable[Message]], Send], Awaitable[None]]

# The `stop_reason` of a refused request.
REFUSED = "meridian_refused"
_PATHS = ("/v1/chat/completions", "/v1/completions")
# Answers that the rate of serving is measured by, at most and how recent, and the bounds of `Retry-After`, seconds.
_KEPT = 64
_RECENT_S = 60.0
_SOONEST, _LATEST = 1, 600
_BODY = json.dumps(
    {
        "error": {
            "message": "The engine ended this request before its first token. Please try again later.",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": 503,
        }
    }
).encode()


def install() -> None:
    """Make streams of refused requests say how they end; calling it again changes nothing.

    Raises:
        ImportError, AttributeError: this vLLM has no such place.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.output_processor import RequestState

    make = RequestState._new_completion_output
    if hasattr(make, "meridian"):
        return

    @functools.wraps(make)
    def made(self: Any, token_ids: Any, finish_reason: Any, stop_reason: Any, *args: Any, **kwargs: Any) -> Any:
        output = make(self, token_ids, finish_reason, stop_reason, *args, **kwargs)
        if stop_reason == REFUSED and self.output_kind is RequestOutputKind.DELTA:
            output.token_ids = _Said(output.token_ids)
        return output

    vars(made)["meridian"] = make
    setattr(RequestState, "_new_completion_output", made)  # noqa: B010


class _Said(list[int]):
    """No tokens, of which vLLM asks only whether there are any, before it says how a choice has ended."""

    def __bool__(self) -> bool:
        return True


class RefusalMiddleware:
    """ASGI middleware: holds back the status until the first token, and answers 503 if the request ends before it."""

    def __init__(self, app: App, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock
        # Requests before their first token (without `stream`: their answer), and the times of the latest of these.
        self._waiting = 0
        self._served: deque[float] = deque(maxlen=_KEPT)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            await self._app(scope, receive, send)
            return
        held = _Held(send, self._retry_after)
        self._waiting += 1
        try:
            await self._app(scope, receive, held.send)
        finally:
            if not held.is_decided:
                self._waiting -= 1

    def _retry_after(self, is_served: bool) -> int:
        """A request is decided. Seconds until as many requests are served as wait now."""
        now = self._clock()
        waiting = self._waiting
        self._waiting -= 1
        while self._served and now - self._served[0] > _RECENT_S:
            self._served.popleft()
        if is_served:
            self._served.append(now)
        if not self._served or now <= self._served[0]:
            return _SOONEST
        return min(max(math.ceil(waiting * (now - self._served[0]) / len(self._served)), _SOONEST), _LATEST)


class _Held:
    """One response, held back until it is known whether the request was refused."""

    def __init__(self, send: Send, decided: Callable[[bool], int]) -> None:
        self.is_decided = False
        self._send = send
        self._decided = decided
        self._is_refused = False
        self._held: list[Message] = []
        self._body = b""
        self._streams = False

    async def send(self, message: Message) -> None:
        """Pass a message on, hold it back, or drop what follows a refusal."""
        if self._is_refused:
            return
        if self.is_decided:
            await self._send(message)
            return
        self._held.append(message)
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
            if message["status"] != 200:
                await self._decide(False, is_served=False)
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            is_last = not message.get("more_body", False)
            is_refused = _of_stream(self._body, is_last) if self._streams else _of_answer(self._body, is_last)
            if is_refused is not None:
                await self._decide(is_refused, is_served=not is_refused)

    async def _decide(self, is_refused: bool, *, is_served: bool) -> None:
        self.is_decided, self._is_refused = True, is_refused
        retry_after = self._decided(is_served)
        held, self._held, self._body = self._held, [], b""
        if is_refused:
            own = {
                b"content-type": b"application/json",
                b"content-length": str(len(_BODY)).encode(),
                b"retry-after": str(retry_after).encode(),
            }
            # Others are those of the middleware inside this one.
            others = [(name, value) for name, value in held[0].get("headers", ()) if name.lower() not in own]
            held = [
                {"type": "http.response.start", "status": 503, "headers": [*others, *own.items()]},
                {"type": "http.response.body", "body": _BODY},
            ]
        for message in held:
            await self._send(message)


def _of_answer(body: bytes, is_last: bool) -> bool | None:
    """Whether an answer says that the request was refused, with each of its choices; None while it is not whole."""
    if not is_last:
        return None
    if REFUSED.encode() not in body:
        return False
    try:
        choices = json.loads(body)["choices"]
        return bool(choices) and all(choice["stop_reason"] == REFUSED for choice in choices)
    except (ValueError, LookupError, TypeError):
        return False


def _of_stream(events: bytes, is_last: bool) -> bool | None:
    """Whether a stream of server-sent events ends without a token; None while that is open."""
    *whole, rest = events.split(b"\n\n")
    try:
        for event in whole:
            data = event.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return True
            if not all(map(_is_empty, json.loads(data)["choices"])):
                return False
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return not rest.strip() if is_last else None


def _is_empty(choice: dict[str, Any]) -> bool:
    """Whether a chunk of a stream brings no token: only the role, as the first chunk of a chat, or a refusal."""
    if choice.get("stop_reason") == REFUSED:
        return True
    if choice.get("finish_reason") is not None or "delta" not in choice:
        return False
    return not any(value for key, value in choice["delta"].items() if key != "role")
