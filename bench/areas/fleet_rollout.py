"""Staged roll-outs: bad and equal policies on simulated engines, kills of real processes, a fleet of 1,000 engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from areas.common import ROOT, WORK, Bound, Figure, say

RELEASE = ROOT / "target" / "release"
RUNS = 20
MOST_INTERVALS = 3
ENGINES = 4
NEW, OLD = "native:noop", "native:balanced"


def build(*selection: str) -> None:
    """Build programs."""
    subprocess.run(["cargo", "build", "--release", "--locked", *selection], cwd=ROOT, check=True)


def simulated(what: str, runs: int) -> list[dict[str, Any]]:
    """The lines that the example prints."""
    folder = WORK / "rollout"
    folder.mkdir(parents=True, exist_ok=True)
    build("--workspace", "--example", "rollout_figures")
    say(f"  roll-outs: {what}, {runs} runs")
    command = [RELEASE / "examples" / "rollout_figures", what, str(runs), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: rollout_figures {what}: failed, see above")
    return [json.loads(line) for line in done.stdout.splitlines()]


def rollout(_pairs: int) -> Iterator[Figure]:
    """Twenty roll-outs of each kind of policy."""
    kinds = {"slow": "a policy that takes its deadline in every step", "starves": "a policy that starves output"}
    for what, name in kinds.items():
        lines = simulated(what, RUNS)
        looks = sorted(line["looks"] for line in lines)
        back = [line for line in lines if line["outcome"] == "rolled-back" and "exceeded" in line["why"]]
        in_time = [line for line in back if line["looks"] <= MOST_INTERVALS]
        yield Figure(
            f"roll-out: {name}: sent back by a guard in at most 3 intervals, of 20",
            len(in_time),
            "runs",
            Bound(RUNS, at_most=False),
        )
        yield Figure(
            f"roll-out: {name}: intervals until it was sent back",
            median(looks),
            "intervals",
            low=looks[0],
            high=looks[-1],
        )
        wrong = sum(line["engines"] - line["right"] for line in lines)
        yield Figure(f"roll-out: {name}: engines with another policy in the end", wrong, "engines", Bound(0))
    equal = simulated("equal", RUNS)
    kept = sum(line["outcome"] != "rolled-back" for line in equal)
    yield Figure("roll-out: an equal policy not sent back, of 20", kept, "runs", Bound(RUNS, at_most=False))
    completed = sum(line["outcome"] == "completed" for line in equal)
    yield Figure("roll-out: an equal policy on every engine in the end, of 20", completed, "runs")
    minutes = median(line["seconds"] for line in equal) / 60
    yield Figure("roll-out: simulated time of a complete one, holds of a minute", minutes, "min")


def many(_pairs: int) -> Iterator[Figure]:
    """What a roll-out over 1,000 engines costs."""
    (line,) = simulated("many", 1)
    yield Figure("roll-out of 1,000 engines: engines with the new policy in the end", line["right"], "engines")
    yield Figure("roll-out of 1,000 engines: calls to engines", line["messages"], "calls")
    yield Figure("roll-out of 1,000 engines: calls to each engine", line["messages"] / line["engines"], "calls")
    yield Figure("roll-out of 1,000 engines: duration, four holds of a minute", line["seconds"], "s")
    yield Figure("roll-out of 1,000 engines: the controller's own time", line["own_s"], "s")
    yield Figure("roll-out of 1,000 engines: state file", line["state_bytes"] / 1e6, "MB")
    yield Figure("roll-out of 1,000 engines: measurements", line["measured_bytes"] / 1e6, "MB")


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
        self.engines[number].send_signal(signal.SIGKILL)
        self.engines[number].wait()

    def meridian(self, *words: str, wait: bool = True) -> subprocess.Popen[str]:
        """A command over this fleet."""
        command = [RELEASE / "meridian", *words, "--folder", str(self.folder / "state"), "--json"]
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
        command = [RELEASE / "meridian", "ctl", "status", "--all", "--fleet", self.file, "--json"]
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


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


START = (
    "--to",
    "50%,100%",
    "--hold",
    "6s",
    "--interval",
    "1500ms",
    "--settle",
    "300ms",
    "--guard",
    "output_itl_p50<=3x",
)
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
                leader.send_signal(signal.SIGKILL)
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


def kills(_pairs: int) -> Iterator[Figure]:
    """kill -9 of the process that leads, and of an engine, in each stage; real processes over HTTP."""
    build("--workspace", "--bin", "meridian")
    build("--workspace", "--example", "rollout_engine")
    for what in ("controller", "engine"):
        clean = 0
        for stage in STAGES:
            say(f"  kill -9 of the {what}: {stage}")
            clean += killed(stage, what)
        name = f"roll-out: kill -9 of the {what}: clean ends, of {len(STAGES)} stages"
        yield Figure(name, clean, "runs", Bound(len(STAGES), at_most=False))


PARTS = {"rollout": rollout, "many": many, "kills": kills}
