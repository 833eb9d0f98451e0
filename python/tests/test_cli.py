"""The `meridian` command as the wheel installs it."""

import json
import subprocess
import sys
from pathlib import Path


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "meridian", *args], capture_output=True, text=True, timeout=120)


def test_check_describes_a_component(policies: Path) -> None:
    done = run("policy", "check", str(policies / "output-first.wasm"), "--json")
    assert done.returncode == 0
    checked = json.loads(done.stdout)
    assert checked["ok"]
    assert checked["name"] == "output-first"
    (slot,) = checked["slots"]
    assert slot.pop("slowest_ms") > 0
    assert slot == {
        "slot": "dispatch",
        "inputs": ["Phase", "State", "WaitMs", "SinceProgressMs", "Priority", "SlackMs"],
        "decides": True,
        "slowest_candidates": slot["slowest_candidates"],
        "deadline_ms": 2.0,
        "state_bytes": 0,
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
    assert "faulted on a trial batch of 0 candidates (batch 1 of 4): deadline" in done.stderr


def test_check_hands_the_state_over(hostile: Path) -> None:
    def checked(name: str, *args: str) -> subprocess.CompletedProcess[str]:
        return run("policy", "check", str(hostile / f"{name}.wasm"), *args)

    done = checked("eight-bytes", "--json")
    assert json.loads(done.stdout)["slots"][0]["state_bytes"] == 8
    assert "hands over its state: 8 bytes" in checked("eight-bytes").stdout
    for name, says in (
        ("snapshot-trap", "slot dispatch: snapshot failed: trap: wasm trap: wasm `unreachable` instruction executed"),
        ("restore-trap", "slot dispatch: restore failed on the 8 bytes of its own snapshot: trap: wasm trap: "),
    ):
        done = checked(name)
        assert done.returncode == 1
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_check_takes_the_limits_of_a_slot(hostile: Path) -> None:
    def checked(*args: str) -> subprocess.CompletedProcess[str]:
        return run("policy", "check", str(hostile / "rank.wasm"), "--json", *args)

    assert json.loads(checked("--deadline-ms", "7.5", "--memory-mib", "2").stdout)["slots"][0]["deadline_ms"] == 7.5
    # The component begins with 2 MiB.
    assert "memory" in json.loads(checked("--memory-mib", "1").stdout)["error"]
    for args, says in (
        (("--deadline-ms", "0"), "expected milliseconds above 0 and at most 1000"),
        (("--deadline-ms", "nan"), "expected milliseconds above 0 and at most 1000"),
        (("--memory-mib", "1025"), "1025 is not in 1..=1024"),
    ):
        done = checked(*args)
        assert done.returncode == 2
        assert says in done.stderr


def test_a_replay_gives_a_policy_up_that_goes_on_faulting(hostile: Path) -> None:
    policies = ("--policy", str(hostile / "trap-later.wasm"), "--policy", "output-first")
    args = ("bench", "replay", "--requests", "40", "--rate", "4", "--seeds", "1,2", *policies)
    done = run(*args)
    assert done.returncode == 1
    assert done.stderr.startswith("error: trap-later.wasm: given up after 3 faults: trap: ")
    assert done.stderr.endswith(" (3 times) (at 4 requests a second, seed 1)\n")
    assert "output-first" in done.stdout
    assert "trap-later" not in done.stdout
    results = json.loads(run(*args, "--json").stdout)
    assert [run["policy"] for run in results["runs"]] == ["fcfs", "output-first"] * 2
    (given_up,) = results["given_up"]
    assert (given_up["policy"], given_up["rate"], given_up["seed"]) == ("trap-later.wasm", 4, 1)
    # Refused while it is tried, or as what the others are compared with.
    done = run("bench", "replay", "--requests", "5", "--policy", str(hostile / "trap.wasm"), "--policy", "srpt")
    assert done.returncode == 1
    assert "trap.wasm: faulted on a trial batch of 0 candidates" in done.stderr
    assert "srpt" in done.stdout
    done = run("bench", "replay", "--requests", "40", "--baseline", str(hostile / "trap-later.wasm"))
    assert done.returncode == 1
    assert "error: trap-later.wasm: given up after 3 faults" in done.stderr


def test_usage_errors_exit_with_2() -> None:
    assert run("policy", "chekc").returncode == 2
    assert run("--help").returncode == 0
    assert "Example" in run("policy", "check", "--help").stdout


def test_bad_arguments_of_the_engine_benchmark_are_one_line(tmp_path: Path) -> None:
    for args, says in (
        (("--scenario", "nope"), "--scenario nope: expected one of loaded, kv-tight, multi-turn, early-exit"),
        (("--set", "scheduler.max_defer_ms=soon"), "scheduler.max_defer_ms: "),
        (("--policy", str(tmp_path / "none.wasm")), "none.wasm: No such file or directory"),
        (("--model", str(tmp_path)), f"--model {tmp_path}: no config.json there, expected a model's folder"),
        (("--scenario", "loaded", "--turns", "3"), "loaded has no sessions"),
        (("--max-model-len", "100"), "--max-model-len 100: expected at least "),
        (("--kv-blocks", "0"), "--kv-blocks 0: expected 2 to 4194304"),
        (("--trace", str(tmp_path / "none.csv")), "none.csv"),
    ):
        done = run("bench", "vllm", *args)
        assert done.returncode == 2, (args, done.stderr)
        assert done.stderr.startswith("error: "), args
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_early_exit_has_options_of_its_own() -> None:
    for scenario in (["--scenario=early-exit"], ["--scenario", "early-exit"]):
        done = run("bench", "vllm", *scenario, "--help")
        assert done.returncode == 0
        assert "--budgets" in done.stdout
    assert "early-exit --help" in run("bench", "vllm", "--help").stdout
    done = run("bench", "vllm", "--scenario", "early-exit", "--problems", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: invalid value '0' for '--problems <N>': expected a whole number, 1 to 100000\n"
