"""Roll-outs over real processes, for the area `fleet`: kill -9 of whoever leads, and of an engine, in each stage."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checks.figures import Figure
from checks.run import MERIDIAN, RELEASE, build, say
from python.tests.vllm.serving import free_port

ENGINES = 4
NEW, OLD = "native:noop", "native:balanced"


class Fleet:
    """Engine processes and their fleet file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.token = folder / "token"
        self.token.write_text("a-token-of-24-characters\n")
        self.token.chmod(0o600)
        self.ports = [free_port() for _ in range(ENGINES)]
        self.engines: dict[int, subprocess.Popen[bytes]] = {}
        rows = [f'[[engine]]\nname = "e{i}"\naddress = "127.0.0.1:{port}"\n' for i, port in enumerate(self.ports)]
        self.file = folder / "fleet.toml"
        self.file.write_text(f'token_file = "{self.token}"\n' + "".join(rows))
        self.file.chmod(0o600)
        for number in range(ENGINES):
            self.start(number)

    def start(self, number: int) -> None:
        """Start an engine and wait until it listens."""
        command = [RELEASE / "examples" / "rollout_engine", str(self.ports[number]), str(self.token)]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder)}
        self.engines[number] = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[number]), 1):
                return
            time.sleep(0.05)
        sys.exit(f"error: engine {number} does not listen")

    def kill(self, number: int) -> None:
        """kill -9."""
        self.engines[number].kill()
        self.engines[number].wait()

    def meridian(self, *words: str, wait: bool = True) -> subprocess.Popen[str]:
        """A command over this fleet."""
        command = [MERIDIAN, *words, "--folder", str(self.folder / "state"), "--json"]
        if words[1] in ("start", "resume", "abort"):
            command += ["--fleet", str(self.file)]
        done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if wait:
            done.wait(timeout=120)
        return done

    def state(self) -> dict[str, Any]:
        """The roll-out's state; empty before it has begun."""
        text = (self.meridian("rollout", "status").stdout or sys.stdin).read()
        found = json.loads(text) if text.strip() else {}
        return found if "phase" in found else {}

    def deciding(self) -> list[str]:
        """The policies that decide, one for each engine, and the shadows."""
        command = [MERIDIAN, "ctl", "status", "--all", "--fleet", self.file, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        found: list[str] = []

        def walk(of: Any) -> None:
            if isinstance(of, dict):
                if of.get("slot") == "dispatch" and "active" in of:
                    found.append(of["active"]["source"] + (" and a shadow" if of.get("shadow") else ""))
                    return
                of = list(of.values())
            if isinstance(of, list):
                for item in of:
                    walk(item)

        walk(json.loads(done.stdout))
        return found

    def close(self) -> None:
        """End what is left."""
        for engine in self.engines.values():
            engine.kill()
            engine.wait()


START = ("--to", "50%,100%", "--hold", "6s", "--interval", "1500ms", "--settle", "300ms")
START += ("--guard", "output_itl_p50<=3x")
STAGES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "shadow": lambda state: state.get("phase") == "shadow",
    "first step": lambda state: state.get("phase") == "step" and state["number"] == 0,
    "last step": lambda state: state.get("phase") == "step" and state["number"] == 1,
    "last engines": lambda state: state.get("phase") == "finish",
    "going back": lambda state: state.get("phase") in ("back", "over"),
}


def killed(stage: str, what: str) -> bool:
    """Kill the controller or an engine in a stage; whether the end is clean."""
    with tempfile.TemporaryDirectory(prefix="meridian-rollout-") as folder:
        fleet = Fleet(Path(folder))
        try:
            leader = fleet.meridian("rollout", "start", NEW, *START, wait=False)
            aborts = None
            for _ in range(1200):
                state = fleet.state()
                if stage == "going back" and aborts is None and STAGES["first step"](state):
                    aborts = fleet.meridian("rollout", "abort", wait=False)
                if STAGES[stage](state):
                    break
                time.sleep(0.05)
            else:
                return False
            if what == "controller":
                leader.kill()
            else:
                fleet.kill(1)
                time.sleep(0.5)
                fleet.start(1)
            leader.wait(timeout=120)
            if aborts:
                aborts.wait(timeout=120)
            if fleet.state()["phase"] != "over":
                fleet.meridian("rollout", "resume")
            state = fleet.state()
            wanted = OLD if stage == "going back" else NEW
            ended = state["phase"] == "over" and (state["outcome"]["outcome"] == "completed") == (wanted == NEW)
            return ended and fleet.deciding() == [wanted] * ENGINES
        finally:
            fleet.close()


def kills(_: int) -> Iterator[Figure]:
    """A clean end whatever is killed, and when."""
    build()
    for what in ("controller", "engine"):
        clean = 0
        for stage in STAGES:
            say(f"  kill -9 of the {what}: {stage}")
            clean += killed(stage, what)
        name = f"roll-out: kill -9 of the {what}: clean ends, of {len(STAGES)} stages"
        yield Figure(name, clean, "runs", f">= {len(STAGES)}")
