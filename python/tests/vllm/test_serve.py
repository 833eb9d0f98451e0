"""`make serve`, as a user runs it: the OpenAI server, the engine in a process of its own, Meridian inside."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import free_port

ROOT = Path(__file__).resolve().parents[3]
READY = "Application startup complete"
START_LIMIT_S = 240


class Server:
    """A running server, its address and what it printed until it was ready."""

    def __init__(self, port: int, config: Path) -> None:
        self.port = port
        self.base = f"http://127.0.0.1:{port}"
        env = {**os.environ, "MERIDIAN_CONFIG": str(config)}
        # The in-process mode that the other tests of this folder set is not what a server runs in.
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
            env.pop(name, None)
        self.process = subprocess.Popen(
            [str(ROOT / "scripts" / "serve.sh"), sys.executable, str(port)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_until_ready(self) -> None:
        watchdog = threading.Timer(START_LIMIT_S, self.kill)
        watchdog.start()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                break
        else:
            pytest.fail("the server did not start:\n" + "".join(self.lines[-20:]))
        # The pipe must not fill up while requests run.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()
        # The line comes before the socket listens, and nothing is printed when it does. The watchdog ends a server that
        # never listens.
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=10).close()
            except ConnectionRefusedError:
                assert self.process.poll() is None, "the server is up but does not listen"
                os.sched_yield()
            else:
                watchdog.cancel()
                return

    def stop(self) -> None:
        """Ctrl-C; fails when the server does not end. Its exit code is vLLM's affair."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(timeout=60)

    def kill(self) -> None:
        """End every process of it: one that is left would hold the pipe that its log comes through."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path, policies: Path) -> Iterator[Server]:
    config = tmp_path / "meridian.toml"
    config.write_text(f'[policy.dispatch]\nsource = "{policies / "output-first.wasm"}"\n')
    running = Server(free_port(), config)
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.kill()


def printed(server: Server, start: str) -> list[list[str]]:
    """The commands of its first lines that begin so, as words."""
    text = "".join(server.lines).replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.strip().startswith(start)]


def posted(server: Server, body: str) -> Any:
    """The answer to a chat completion."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.base}/v1/chat/completions", data=body.encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_the_printed_commands_work(server: Server) -> None:
    assert any("meridian: dispatch policy" in line and "output-first.wasm" in line for line in server.lines)
    free, cut = (
        subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        for words in printed(server, "examples/ask.py")
    )
    # (7 + 5) * 3 - 2 is 34, 11 modulo 23; the model thinks on after it has found that.
    assert free.returncode == 0, free.stdout + free.stderr
    assert "ans 11" in free.stdout
    assert "wait" in free.stdout
    *_, last = cut.stdout.splitlines()
    assert int(last.split()[-3]) <= 12
    assert int(free.stdout.split()[-3]) > 12
    ((*_, body),) = printed(server, "curl")
    assert posted(server, body)["choices"][0]["message"]["content"].strip().startswith("ans ")
    fields = {
        "model": "arith-reasoner",
        "messages": [{"role": "user", "content": "7 + 5 * 3 - 2"}],
        "max_tokens": 64,
        "thinking_token_budget": 32,
        "ignore_eos": True,
        "vllm_xargs": {"meridian_tenant": "a", "meridian_session": "chat-1", "meridian_deadline_ms": 5000},
    }
    assert posted(server, json.dumps(fields))["usage"]["completion_tokens"] == 64
    server.stop()
