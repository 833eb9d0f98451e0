"""`SessionMiddleware`: names the session of a request that an agent's client names in a way of its own.

vllm serve MODEL --scheduler-cls meridian.vllm.MeridianScheduler --middleware meridian.vllm.SessionMiddleware

vLLM takes a session from the body (`session_id`), from `X-Session-ID`, or from `vllm_xargs`
(vllm/entrypoints/generate/base/serving.py, `_get_session_id`). Clients that send another header would be strangers in
every turn. A `session_id` in the body goes before the header, one in `vllm_xargs` behind it; `meridian_session` goes
before all. A sub-agent's session gets the name of the session that waits for it: `a;parent=b`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.engine import MAX_NAME_CHARACTERS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]

# What vLLM itself reads.
OWN = b"x-session-id"
# One id for each agent that runs, most specific first: a sub-agent has its own prompts, so it must not share the
# session of its parent. Left out: ids of users (`x-user-id`), of requests (`x-request-id`, and `x-correlation-id`,
# which some clients use so), of pods (`x-session-token`), and headers whose names say too little (`x-task-id`).
# Behind each, the headers of the same client that name the session which waits for a sub-agent.
HEADERS: dict[bytes, tuple[bytes, ...]] = {
    OWN: (b"x-parent-session-id",),  # opencode: packages/opencode/src/session/llm/request.ts
    # NVIDIA Dynamo: lib/llm/src/protocols/agents.rs, which has the next three, too
    b"x-dynamo-session-id": (b"x-dynamo-parent-session-id",),
    # Claude Code; where the first is missing, the session itself began the sub-agent
    b"x-claude-code-agent-id": (b"x-claude-code-parent-agent-id", b"x-claude-code-session-id"),
    b"x-claude-code-session-id": (),
    b"x-deepseek-harness-session-id": (b"x-deepseek-harness-parent-session-id",),  # DeepSeek's harness
    b"thread-id": (b"x-codex-parent-thread-id",),  # Codex CLI: codex-rs/core/src/client.rs
    b"x-session-affinity": (b"x-parent-session-id",),  # opencode
    b"x-litellm-session-id": (),  # OpenHands: openhands/sdk/llm/options/common.py
    b"x-openwebui-chat-id": (),  # Open WebUI: backend/open_webui/routers/openai.py
}
# Between the two; host/core/src/sessions.rs reads it.
PARENT = b";parent="


class SessionMiddleware:
    """ASGI middleware: adds `X-Session-ID` to a request without it, from the first of `HEADERS` that is there, and to a
    sub-agent's the session that waits for it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given: dict[bytes, bytes] = {}
            for name, value in scope["headers"]:
                # As vLLM does, the first of equal ones.
                given.setdefault(name.lower(), value.strip())
            own = given.get(OWN, b"")
            header = OWN if own else _first(given, HEADERS)
            session, parent = given.get(header, b""), given.get(_first(given, HEADERS.get(header, ())), b"")
            both = session + PARENT + parent
            if parent not in (b"", session) and PARENT not in session and len(both) <= MAX_NAME_CHARACTERS:
                session = both
            if session != own:
                # An empty one would still be the first.
                others = [header for header in scope["headers"] if header[0].lower() != OWN]
                scope = {**scope, "headers": [*others, (OWN, session)]}
        await self._app(scope, receive, send)


def _first(given: dict[bytes, bytes], names: Iterable[bytes]) -> bytes:
    """The first of these headers that holds a name; empty for none."""
    return next((name for name in names if 0 < len(given.get(name, b"")) <= MAX_NAME_CHARACTERS), b"")
