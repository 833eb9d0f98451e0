"""Hostile command lines and files: what is refused, in how many lines, and what that takes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from areas.common import ROOT, WORK, Bound, Figure, say

MERIDIAN = ROOT / "target" / "release" / "meridian"
EVIL = "a\x1b]0;b\x07\x9b2J\u202e\u200b"
QUOTED = r'"x\u001b[2J\u009b\u202e\u200b"'


@dataclass(frozen=True)
class Ended:
    """A run of the command."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    peak_mib: float

    @property
    def is_refused(self) -> bool:
        """One line, nothing else."""
        return self.code not in (0, -6, -9, -11) and not self.stdout and self.stderr.count("\n") == 1

    @property
    def steers(self) -> bool:
        """Whether anything in it would steer a terminal."""
        return any(not c.isprintable() for c in (self.stdout + self.stderr).replace("\n", ""))


def run(folder: Path, *args: str) -> Ended:
    """The command in a folder, with its peak of resident memory."""
    out, err = folder / "out.txt", folder / "err.txt"
    env = {"HOME": str(folder), "PATH": os.environ["PATH"]}
    with out.open("wb") as stdout, err.open("wb") as stderr:
        started = time.monotonic()
        process = subprocess.Popen([MERIDIAN, *args], cwd=folder, env=env, stdout=stdout, stderr=stderr)
        _, status, usage = os.wait4(process.pid, 0)
    # So that the object does not wait for what was waited for.
    process.returncode = os.waitstatus_to_exitcode(status)
    said, complained = (path.read_bytes().decode(errors="replace") for path in (out, err))
    return Ended(process.returncode, said, complained, time.monotonic() - started, usage.ru_maxrss / 1024)


def workplace() -> Path:
    """A folder with pipes, devices, files without end and wrong files."""
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace"], cwd=ROOT, check=True)
    folder = WORK / "repair-cli"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("pipe", "pipe.toml"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    (folder / "device.wasm").unlink(missing_ok=True)
    (folder / "device.wasm").symlink_to("/dev/zero")
    with (folder / "huge").open("wb") as huge:
        huge.truncate(1 << 40)
    with (folder / "large.arrow").open("wb") as large:
        large.truncate(1 << 32)
    engine = (
        "max_num_seqs = 8\nmax_num_batched_tokens = 512\nblock_tokens = 16\nkv_blocks = {}\n[step]\nfixed_ms = 1.0\n"
    )
    texts = {
        "blocks.toml": engine.format(1 << 28),
        "overflow.toml": engine.format("99999999999999999999"),
        "text.toml": engine.format("'many'"),
        "crowd.toml": "[tenants]\ncount = 4294967295\n",
        "device.toml": "[policy.dispatch]\nsource = 'device.wasm'\n",
        "pipes.toml": "[policy.dispatch]\nsource = 'pipe'\n",
        "number.toml": "[scheduler]\nmax_think_tokens = 99999999999999999999\n",
        "float.toml": "[scheduler]\nmax_defer_ms = 1e999\n",
        "choice.toml": "[entropy]\nprobe_at = 1\n",
        "later.toml": "[disagg]\nfabric = 'nixl'\n",
        "broken.toml": "[scheduler\n",
        "unknown.toml": "[scheduler]\nmax_defer = 1\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def too_large() -> list[tuple[str, ...]]:
    """Command lines that ask for more than there is."""
    replay = ("bench", "replay")
    most = str((1 << 32) - 1)
    return [
        (*replay, "--kv-blocks", most),
        (*replay, "--engines", "100000"),
        (*replay, "--engines", "1024"),
        (*replay, "--max-num-seqs", most),
        (*replay, "--max-num-batched-tokens", most),
        (*replay, "--requests", str((1 << 64) - 1)),
        (*replay, "--engine", "blocks.toml"),
        (*replay, "--workload", "crowd.toml"),
        ("bench", "generate", "--requests", str((1 << 64) - 1), "--out", "o.csv"),
        ("bench", "micro", "--candidates", "99999999999"),
    ]


def unreadable() -> list[tuple[str, ...]]:
    """Files without end, pipes and devices, where a file is expected."""
    replay = ("bench", "replay", "--trace")
    return [
        ("config", "check", "pipe"),
        ("config", "check", "/dev/zero"),
        ("config", "show", "huge"),
        ("config", "check", "device.toml"),
        ("config", "check", "pipes.toml"),
        ("policy", "check", "pipe"),
        ("policy", "check", "huge"),
        ("replay", "pipe"),
        ("replay", "huge"),
        ("replay", "large.arrow"),
        ("bench", "compare", "/dev/zero", "pipe"),
        ("bench", "compare", "huge", "huge"),
        ("bench", "report", "pipe"),
        (*replay, "pipe"),
        (*replay, "/dev/zero"),
        (*replay, "huge", "--format", "azure"),
        (*replay, "huge", "--format", "mooncake"),
        (*replay, "huge", "--format", "vllm-bench"),
        ("bench", "calibrate", "huge"),
        ("bench", "replay", "--engine", "pipe.toml"),
        ("bench", "generate", "--workload", "pipe.toml", "--out", "o.csv"),
        ("models", "resolve", "--tokenizer", "pipe"),
        ("models", "resolve", "--tokenizer", "huge"),
    ]


def wrong() -> list[tuple[str, ...]]:
    """Files that are read, and hold what they may not."""
    names = ("number", "float", "choice", "later", "broken", "unknown")
    checks = [("config", "check", f"{name}.toml") for name in names]
    engines = [("bench", "replay", "--engine", f"{name}.toml") for name in ("overflow", "text")]
    return [*checks, *engines]


def inputs() -> Iterator[Figure]:
    """Every hostile command line and file: one line, little memory, soon."""
    folder = workplace()
    say("  hostile command lines and files")
    everything = {"too large": too_large(), "no file to read": unreadable(), "wrong inside": wrong()}
    ended = {kind: [run(folder, *args) for args in lines] for kind, lines in everything.items()}
    for kind, runs in ended.items():
        refused = [each for each in runs if each.is_refused]
        yield Figure(f"hostile inputs, {kind}: refused in one line", len(refused), "inputs")
        yield Figure(f"hostile inputs, {kind}: otherwise", len(runs) - len(refused), "inputs", Bound(0))
        yield Figure(f"hostile inputs, {kind}: most memory", max(each.peak_mib for each in runs), "MiB", Bound(64))
        yield Figure(f"hostile inputs, {kind}: longest", max(each.seconds for each in runs), "s", Bound(10))


def terminal() -> Iterator[Figure]:
    """Escape sequences and U+202E in values, names and paths: what reaches the terminal."""
    folder = workplace()
    say("  what reaches a terminal")
    file = f"{EVIL}.toml"
    texts = [
        f"[telemetry]\nservice_name = {QUOTED}",
        f"[telemetry]\nprometheus = {QUOTED}",
        f"[policy.dispatch]\nsource = {QUOTED}",
        f"[policy.dispatch]\nsource = 'p.wasm'\n[policy.dispatch.config]\n{QUOTED} = {QUOTED}",
        f"[policy]\ntrusted_keys = [{QUOTED}]",
        f"[model]\nfamily = {QUOTED}",
        f"{QUOTED} = 1",
        "[scheduler\x1b[2J",
    ]
    runs: list[Ended] = []
    for text in texts:
        (folder / file).write_text(text)
        runs.extend(run(folder, "config", what, file) for what in ("check", "show"))
    runs.append(run(folder, "policy", "check", EVIL))
    runs.append(run(folder, "bench", "compare", EVIL, EVIL))
    runs.append(run(folder, "bench", "replay", "--trace", EVIL))
    runs.append(run(folder, "replay", EVIL))
    runs.append(run(folder, "models", "list", EVIL))
    yield Figure("terminal: hostile names and values printed", len(runs), "outputs")
    yield Figure("terminal: outputs that steer it", sum(each.steers for each in runs), "outputs", Bound(0))


def parts(_pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {"cli-inputs": inputs, "cli-terminal": terminal}
