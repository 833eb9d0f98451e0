"""The shell commands of README and the book, run as a reader would: in a folder that looks like a clone.

A comment before each block says who runs it (scripts/check_commands.py). The lines of a block run in one shell, which
ends at the first that fails.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import meridian
import pytest
from harness import Engine
from meridian.vllm.bench.request import TraceRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from check_commands import ROOT, Block, blocks

# Made below, beside what a clone has.
COMPONENTS = ("policy.wasm", "mine.wasm", "fixed.wasm", "FILE.wasm")
OF_A_READER = {"meridian.toml", "meridian.token", "options.json", "requests.csv", "results.json", "recordings", "dist"}


def named(block: Block) -> str:
    return f"{block.file}:{block.line}"


def marked(mark: str) -> list[Block]:
    return [block for block in blocks() if block.mark == mark]


def run(block: Block, folder: Path, **env: str) -> None:
    text = "".join(line.removeprefix("$ ") for line in block.text.splitlines(keepends=True))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MERIDIAN_CONFIG", "XDG_"))}
    path = f"{Path(sys.executable).parent}:{kept['PATH']}"
    done = subprocess.run(
        ("bash", "-euo", "pipefail", "-c", text),
        cwd=folder,
        env=kept | {"PATH": path, "HOME": str(folder)} | env,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{named(block)}\n{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, policies: Path) -> Path:
    """A folder with what a clone has, and the files that the examples name."""
    folder = tmp_path_factory.mktemp("clone")
    for entry in ROOT.iterdir():
        if entry.name not in OF_A_READER and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    for name in COMPONENTS:
        shutil.copy(policies / "srpt.wasm", folder / name)
    (folder / "meridian.toml").write_text('[policy.dispatch]\nsource = "native:balanced"\n')
    (folder / "options.json").write_text('{"prefill_weight": 0.5}')
    cli = str(Path(sys.executable).with_name("meridian"))
    made = ("bench", "generate", "--workload", "reasoning-chat", "--requests", "60", "--out", "requests.csv")
    subprocess.run((cli, *made), cwd=folder, check=True, capture_output=True)
    for name in ("main", "branch", "results"):
        replayed = ("bench", "replay", "--trace", "requests.csv", "--policy", "balanced", "--save", f"{name}.json")
        subprocess.run((cli, *replayed), cwd=folder, check=True, capture_output=True)
    record(folder / "recordings")
    with gzip.open(folder / "day.csv.gz", "wt") as day:
        day.write("time,in,out,user\n" + "".join(f"{100 * i},{50 + i},20,{i % 3}\n" for i in range(30)))
    (folder / "agentic_sessions.jsonl").write_text("".join(map(agentic_session, range(4))))
    return folder


def agentic_session(number: int) -> str:
    """A session of an agent in the format of the trace that the book names: each turn has the last one's prompt."""
    turns = [[20.0 * i, 6400 * (i + 1), 60, 2.0, 5.0, "tool_use", 1, [[1, 100 * (i + 1)]]] for i in range(3)]
    about = {"id": f"s{number}", "block_size": 64, "system_tokens": 64, "tool_tokens": 64}
    return f"{json.dumps({**about, 'requests': turns})}\n"


def record(folder: Path) -> None:
    """A recording of a few decisions, under the name that the examples use."""
    policy = meridian.PolicyConfig(dispatch=meridian.SlotConfig("native:output-first"), record_dir=str(folder))
    engine = meridian.PolicyEngine(meridian.MeridianConfig(policy=policy))
    waiting: list[str] = []
    left: dict[str, int] = {}
    # A request a step, of which four run at a time for ten steps.
    for step in range(120):
        if step < 40:
            waiting.append(f"r{step}")
            engine.add(waiting[-1], prompt=[1] * 32, max_tokens=10)
        seats = 4 - len(left)
        facts: dict[str, Any] = {"token_budget": 512, "free_blocks": 100, "total_blocks": 128, "now_ms": 20.0 * step}
        engine.plan(list(left), waiting, free_seats=seats, **facts)
        admitted, waiting = waiting[:seats], waiting[seats:]
        engine.scheduled(dict.fromkeys(left, 1) | dict.fromkeys(admitted, 32))
        left |= dict.fromkeys(admitted, 10)
        engine.generated({name: [5] for name in left})
        left = {name: tokens - 1 for name, tokens in left.items()}
        for name in [name for name, tokens in left.items() if not tokens]:
            del left[name]
            engine.remove(name)
    engine.close()
    (found,) = folder.glob("dispatch-*.arrow")
    found.rename(folder / f"dispatch-4711-{found.name.rpartition('-')[2]}")


def in_parts(found: list[Block]) -> list[Any]:
    """The measurements of the bench's own page take minutes."""
    slow = pytest.mark.exhaustive
    return [pytest.param(block, marks=[slow] if named(block).startswith("bench/README.md") else []) for block in found]


@pytest.mark.parametrize("block", in_parts(marked("run")), ids=named)
def test_commands_run(block: Block, clone: Path) -> None:
    run(block, clone)


@pytest.mark.parametrize("block", marked("run with an engine"), ids=named)
def test_commands_run_beside_an_engine(
    block: Block, clone: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meridian.vllm.parts import make_engine

    token = clone / "meridian.token"
    token.unlink(missing_ok=True)
    with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write("0123456789abcdef" * 2)
    # The discovery file is where the commands look for it.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    config = meridian.MeridianConfig(
        policy=meridian.PolicyConfig(dispatch=meridian.SlotConfig("native:balanced", deadline_ms=1000.0)),
        admin=meridian.AdminConfig(listen=f"unix:{tmp_path / 'admin.sock'}", token_file=str(token)),
        telemetry=meridian.TelemetryConfig(prometheus=""),
    )
    with engine.using(make_engine(config, engine.scheduler, serves=True)) as native:
        # The request that examples ask about.
        engine.run.add("chatcmpl-8d2f", TraceRequest(0.0, 40, 8, 8), 0, 0.0, random.Random(0))
        while engine.run.engine.has_unfinished_requests():
            engine.run.step()
        run(block, clone, XDG_RUNTIME_DIR=str(tmp_path))
        native.policies.close()


def test_every_block_of_commands_is_marked() -> None:
    assert [named(block) for block in blocks() if not block.is_marked] == []
    assert len(marked("run")) > 4
