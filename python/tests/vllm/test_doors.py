"""Efforts and budgets in the words of each API, over HTTP: they limit the thinking through every door, streamed or not.

The model says a script of single words, so the number of words in a thought is its number of tokens.
"""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import SCHEDULER, Fleet, configure

HERE = Path(__file__).resolve().parent
PROCESSORS = ("outputs.scripted:Script", "meridian.vllm:BudgetLogitsProcessor")
LOW, HIGH = 8, 24
WORD = " b"
# More words than a request may have tokens.
MOST = 60
ENDLESS = WORD * (MOST + 4)
MESSAGES = [{"role": "user", "content": "hi"}]
DOORS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A server with an operator's table of efforts."""
    folder = tmp_path_factory.mktemp("doors")
    config = configure(
        folder,
        f"[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 4096\n[entropy]\nenabled = false\n"
        f"[scheduler.reasoning_effort]\nlow.max_think_tokens = {LOW}\nhigh.max_think_tokens = {HIGH}\n",
    )
    options = (*SCHEDULER, "--logits-processors", *PROCESSORS, "--reasoning-parser", "qwen3", "--dtype", "float32")
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    running = Fleet(folder, config, options, {"PYTHONPATH": path}, engines=1)
    try:
        running.wait_until_ready()
        listens(running)
        yield running
    finally:
        running.kill()


def listens(server: Fleet) -> None:
    """Wait until its socket listens: it says that it is ready before."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", server.port), timeout=10).close()
            return
        except ConnectionRefusedError:
            assert server.process.poll() is None, "the server ended while it started"
            os.sched_yield()


def post(server: Fleet, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer, or the events of a stream."""
    request = urllib.request.Request(
        server.base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        if not body.get("stream"):
            return [json.load(response)]
        lines = (line.decode().strip().removeprefix("data: ") for line in response if line.startswith(b"data: "))
        return [json.loads(line) for line in lines if line != "[DONE]"]


def body(door: str, script: str, effort: str | None, stream: bool, most: int = MOST) -> dict[str, Any]:
    """A request with an effort as this API has it."""
    given: dict[str, Any] = {
        "model": "tiny-random",
        "temperature": 0,
        "stream": stream,
        "vllm_xargs": {"script": script},
    }
    if door == "/v1/responses":
        own = {"input": "hi", "max_output_tokens": most}
        return given | own | ({} if effort is None else {"reasoning": {"effort": effort}})
    own = {"messages": MESSAGES, "max_tokens": most}
    named = {"output_config": {"effort": effort}} if door == "/v1/messages" else {"reasoning_effort": effort}
    return given | own | ({} if effort is None else named)


def read(door: str, events: list[dict[str, Any]], stream: bool) -> tuple[str, str]:
    """The thinking and the answer."""
    thought, answer = [], []
    for event in events:
        if door == "/v1/chat/completions":
            for choice in event["choices"]:
                message = choice["delta" if stream else "message"]
                thought.append(message.get("reasoning") or "")
                answer.append(message.get("content") or "")
        elif door == "/v1/messages":
            for block in [event.get("delta") or {}] if stream else event["content"]:
                thought.append(block.get("thinking") or "")
                answer.append(block.get("text") or "")
        elif stream:
            kind, delta = event["type"], event.get("delta", "")
            thought.append(delta if kind == "response.reasoning_text.delta" else "")
            answer.append(delta if kind == "response.output_text.delta" else "")
        else:
            for item in event["output"]:
                text = "".join(part["text"] for part in item["content"])
                (thought if item["type"] == "reasoning" else answer).append(text)
    return "".join(thought), "".join(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_an_effort_limits_the_thinking(server: Fleet, door: str, stream: bool) -> None:
    for effort, words in (("low", LOW), ("high", HIGH), ("medium", None), (None, None)):
        thought, answer = read(door, post(server, door, body(door, ENDLESS, effort, stream)), stream)
        assert thought.split() == ["b"] * (MOST if words is None else words), (effort, thought, answer)
        # The forced end takes the place of one word.
        assert answer.split() == ["b"] * (0 if words is None else MOST - words - 1), effort


@pytest.mark.parametrize("door", DOORS)
def test_a_thought_that_ends_before_stays(server: Fleet, door: str) -> None:
    script = WORD * 3 + "</think>" + WORD * 5 + "<|im_end|>"
    thought, answer = read(door, post(server, door, body(door, script, "low", False)), False)
    assert (thought.split(), answer.split()) == (["b"] * 3, ["b"] * 5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_the_messages_api_holds(server: Fleet, stream: bool) -> None:
    """Its least is 1024. vLLM counts the line end that the template puts behind the start marker."""
    door, budget = "/v1/messages", 1024
    asked = body(door, WORD * (budget + MOST), None, stream, most=budget + 40)
    asked["thinking"] = {"type": "enabled", "budget_tokens": budget}
    thought, answer = read(door, post(server, door, asked), stream)
    assert thought.split() == ["b"] * (budget - 1)
    assert answer.split() == ["b"] * 40


def test_of_an_effort_and_a_budget_the_smaller_holds(server: Fleet) -> None:
    door = "/v1/messages"
    asked = body(door, ENDLESS + "<|im_end|>", "low", False, most=1100)
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    thought, _ = read(door, post(server, door, asked), False)
    assert thought.split() == ["b"] * LOW


def test_a_response_of_several_choices_reports_each(server: Fleet) -> None:
    door = "/v1/chat/completions"
    asked: dict[str, Any] = body(door, ENDLESS, "low", False) | {"n": 3, "temperature": 1}
    asked["vllm_xargs"]["meridian_think_report"] = 1
    (answer,) = post(server, door, asked)
    # The end marker counts.
    own = {"think_tokens": LOW + 1, "think_end": "hard-cap", "reopened": 0}
    assert len(answer["choices"]) == 3
    assert answer["kv_transfer_params"] == {"meridian": {**own, "choices": {str(i): own for i in range(3)}}}
    (answer,) = post(server, door, asked | {"n": 1})
    assert answer["kv_transfer_params"] == {"meridian": own}
