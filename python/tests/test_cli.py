"""The `meridian` command as the wheel installs it."""

import json
import subprocess
import sys
from pathlib import Path


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "meridian._cli", *args], capture_output=True, text=True, timeout=120)


def test_check_describes_a_component(policies: Path) -> None:
    done = run("policy", "check", str(policies / "output-first.wasm"), "--json")
    assert done.returncode == 0
    checked = json.loads(done.stdout)
    assert checked["ok"]
    assert checked["name"] == "output-first"
    (slot,) = checked["slots"]
    assert slot == {
        "slot": "dispatch",
        "inputs": ["Phase", "State", "SinceProgressMs", "Priority", "SlackMs"],
        "decides": True,
    }
    assert checked["bytes"] < 64 * 1024


def test_check_refuses_with_one_line(tmp_path: Path) -> None:
    path = tmp_path / "policy.wasm"
    path.write_bytes(b"\0asm\x01\0\0\0")
    done = run("policy", "check", str(path))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {path}: not a component: a core WebAssembly module")
    assert done.stderr.count("\n") == 1
    refused = run("policy", "check", str(path), "--json")
    assert refused.returncode == 1
    assert not json.loads(refused.stdout)["ok"]


def test_check_finds_a_component_that_faults(hostile: Path) -> None:
    done = run("policy", "check", str(hostile / "endless-loop.wasm"))
    assert done.returncode == 1
    assert "faulted on a trial batch" in done.stderr
    assert "deadline" in done.stderr


def test_usage_errors_exit_with_2() -> None:
    assert run("policy", "chekc").returncode == 2
    assert run("--help").returncode == 0
    assert "Example" in run("policy", "check", "--help").stdout


def test_the_bench_without_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meridian.bench", "--scenario", "nope"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "invalid choice: 'nope'" in done.stderr
