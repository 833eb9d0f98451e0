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
    from collections.abc import Awaitable, Callable, MutableMapping

    App = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]

# What vLLM itself reads.
OWN = b"x-session-id"
# One id for each agent that runs, most specific first: a sub-agent has its own prompts, so it must not share the
# session of its parent. Left out: ids of users (`x-user-id`), of requests (`x-request-id`, and `x-correlation-id`,
# which some clients use so), of pods (`x-session-token`), and headers whose names say too little (`x-task-id`).
HEADERS = (
    b"x-dynamo-session-id",  # NVIDIA Dynamo: lib/llm/src/protocols/agents.rs
    b"x-claude-code-agent-id",  # Claude Code, sub-agents: the same file
    b"x-claude-code-session-id",
    b"x-deepseek-harness-session-id",  # DeepSeek's harness: the same file
    b"thread-id",  # Codex CLI: codex-rs/core/src/client.rs
    b"x-session-affinity",  # opencode: packages/opencode/src/session/llm/request.ts
    b"x-litellm-session-id",  # OpenHands: openhands/sdk/llm/options/common.py
    b"x-openwebui-chat-id",  # Open WebUI: backend/open_webui/routers/openai.py
)
# Of a sub-agent, the session that waits for it. All of them in the first file above; a sub-agent of Claude Code without
# the second was begun by the session itself.
PARENT_HEADERS = (
    b"x-dynamo-parent-session-id",
    b"x-claude-code-parent-agent-id",
    b"x-deepseek-harness-parent-session-id",
    b"x-codex-parent-thread-id",
    b"x-parent-session-id",  # opencode
    b"x-claude-code-session-id",
)
# Between the two; host/core/src/sessions.rs reads it.
PARENT = b";parent="


class SessionMiddleware:
    """ASGI middleware: adds `X-Session-ID` to a request without it, from the first of `HEADERS` that is there, and to a
    sub-agent's the session that waits for it, from the first of `PARENT_HEADERS`."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            given: dict[bytes, bytes] = {}
            for name, value in scope["headers"]:
                # As vLLM does, the first of equal ones.
                given.setdefault(name.lower(), value.strip())
            own = given.get(OWN, b"")
            session = own or _first(given, HEADERS)
            parent = _first(given, PARENT_HEADERS)
            both = session + PARENT + parent
            if session and parent not in (b"", session) and PARENT not in session and len(both) <= MAX_NAME_CHARACTERS:
                session = both
            if session != own:
                # An empty one would still be the first.
                others = [header for header in scope["headers"] if header[0].lower() != OWN]
                scope = {**scope, "headers": [*others, (OWN, session)]}
        await self._app(scope, receive, send)


def _first(given: dict[bytes, bytes], names: tuple[bytes, ...]) -> bytes:
    """The first of these headers that holds a name."""
    return next((id for name in names if 0 < len(id := given.get(name, b"")) <= MAX_NAME_CHARACTERS), b"")
