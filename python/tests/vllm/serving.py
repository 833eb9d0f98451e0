"""`vllm serve` with the small model, several engines and several API servers, for tests and figures."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir

from checks import started

# What a Python API server says, and vLLM's front end in Rust.
READY = ("Application startup complete", "OpenAI server is ready")
START_LIMIT_S = 300
TOKEN = "a-token-of-24-characters"
SCHEDULER = ("--scheduler-cls", "meridian.vllm.MeridianScheduler")
# The value of --kv-transfer-config for a handoff.
CONNECTOR = {
    "kv_connector": "HandoffConnector",
    "kv_connector_module_path": "meridian.vllm.handoff",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
BUDGETS = ("--logits-processors", "meridian.vllm:BudgetLogitsProcessor", "--reasoning-parser", "qwen3")


def free_port() -> int:
    """A port that nobody has now, below those that Linux gives to connections, which could take it meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, max(lowest, 12_000)), 1000):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port from 10000 to {lowest}")


def configure(folder: Path, extra: str = "") -> Path:
    """A `meridian.toml` with a token, beside it; `extra` is appended."""
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    config = folder / "meridian.toml"
    config.write_text(
        f'[admin]\nlisten = "127.0.0.1:{free_port()}"\ntoken_file = "token"\n[telemetry]\nprometheus = ""\n{extra}'
    )
    return config


def ask(
    base: str, method: str, path: str, body: bytes | dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """One request; the code, and the body as JSON where it is."""
    given = {} if headers is None else dict(headers)
    if isinstance(body, dict):
        body, given = json.dumps(body).encode(), {"Content-Type": "application/json", **given}
    request = urllib.request.Request(base + path, body, given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            code, text = response.status, response.read()
    except urllib.error.HTTPError as refused:
        code, text = refused.code, refused.read()
    try:
        return code, json.loads(text)
    except ValueError:
        return code, text.decode()


class Fleet:
    """A running `vllm serve`, in surroundings of its own: `folder` has its configuration and its discovery files."""

    def __init__(
        self,
        folder: Path,
        config: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        engines: int = 2,
        model: Path | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.folder, self.port, self.engines = folder, free_port(), engines
        started.count(engines)
        self.base = f"http://127.0.0.1:{self.port}"
        (folder / "run").mkdir(mode=0o700, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
        self.env = env | {
            "MERIDIAN_CONFIG": str(config),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # An engine a core: vLLM binds engines to memory nodes by itself, and a small machine has one.
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(i % (os.cpu_count() or 1)) for i in range(engines)),
            "VLLM_LOGGING_LEVEL": "INFO",
            **(environment or {}),
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model or model_dir())]
        command += ["--served-model-name", "tiny-random", "--host", "127.0.0.1", "--port", str(self.port)]
        command += [
            "--max-model-len",
            "2048" if model is None else "auto",
            "--block-size",
            "32",
            "--enforce-eager",
            "--max-num-seqs",
            "16",
        ]
        if engines > 1:
            command += ["--data-parallel-size", str(engines)]
        self._command = [*prefix, *command, *options]
        self.lines: list[str] = []
        self._reader: threading.Thread | None = None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._command,
            env=self.env | {"PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until_ready(self, api_servers: int = 1, may_hang: bool = True) -> None:
        """Read its log until every API server has started.

        vLLM's worker has hung at its start, before it has an engine: seen twice on two cores, never alone. Such a
        server says where it stands, and is started once more.

        Raises:
            RuntimeError: it did not start; with the end of its log.
        """
        has_hung, group = threading.Event(), self.process.pid

        def end(by: signal.Signals) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, by)

        def give_up() -> None:
            has_hung.set()
            # Each process prints its stacks.
            end(signal.SIGABRT)
            threading.Timer(10.0, end, (signal.SIGKILL,)).start()

        watchdog = threading.Timer(START_LIMIT_S, give_up)
        watchdog.start()
        assert self.process.stdout is not None
        started = 0
        for line in self.process.stdout:
            self.lines.append(line)
            started += any(said in line for said in READY)
            if started == api_servers:
                break
        else:
            watchdog.cancel()
            said = "the server did not start:\n" + "".join(self.lines[-200:])
            if not (has_hung.is_set() and may_hang):
                raise RuntimeError(said)
            warnings.warn(said, stacklevel=2)
            self.process.wait()
            self.lines.clear()
            self.process = self._start()
            self.wait_until_ready(api_servers, may_hang=False)
            return
        watchdog.cancel()
        # The pipe must not fill up while requests run.
        self._reader = threading.Thread(target=self.lines.extend, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def found(self) -> list[dict[str, Any]]:
        """The discovery files of its engines, by process."""
        files = sorted((self.folder / "run" / "meridian").glob("*.json"))
        return [json.loads(file.read_text()) for file in files]

    def ctl(self, *args: str) -> tuple[int, Any]:
        """`meridian --json ctl ...`: its exit code and its object."""
        command = [sys.executable, "-m", "meridian", "--json", "ctl", *args]
        # Engines of others are in the home folder.
        done = subprocess.run(command, env={**self.env, "HOME": str(self.folder)}, capture_output=True, text=True)
        return done.returncode, json.loads(done.stdout or done.stderr or "null")

    def admin(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        token: str | None = TOKEN,
        **headers: str,
    ) -> tuple[int, Any]:
        """A request to the route of the API server."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        return ask(self.base, method, "/meridian/v1" + path, body, given)

    def generate(self, **fields: Any) -> dict[str, Any]:
        """A completion of token ids; `prompt` are token ids."""
        body = {"model": "tiny-random", "temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}
        code, answer = ask(self.base, "POST", "/v1/completions", body)
        if code != 200:
            raise RuntimeError(f"{code}: {answer}")
        return answer

    def log(self) -> str:
        """What it printed so far."""
        return "".join(self.lines)

    def stop(self) -> None:
        """Ctrl-C; fails when it does not end."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(timeout=90)
        if self._reader is not None:
            self._reader.join(timeout=90)

    def kill(self) -> None:
        """End every process of it at once."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
