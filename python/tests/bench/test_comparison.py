"""Pairs of runs as medians and quartiles, and the command that makes them: what it prints and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from meridian.bench import compare
from meridian.bench.compare import Comparison, differing, notes, parse
from meridian.bench.comparison import Pair, Spread, changes, document, lines, spread, table


def summary(hit_rate: float, **more: float) -> dict[str, object]:
    return {"hit_rate": hit_rate, "hit_rate_by_turn": [0.0, hit_rate], "requests": 4, "think_forced_ok": 4, **more}


PAIRS = [
    Pair(1, summary(50.0, ttft_p50_ms=10, preemptions=0), summary(60.0, ttft_p50_ms=5, preemptions=2), 0),
    Pair(2, summary(40.0, ttft_p50_ms=10, preemptions=4), summary(70.0, ttft_p50_ms=6, preemptions=2), 1),
    Pair(3, summary(30.0, ttft_p50_ms=10, preemptions=4), summary(50.0, ttft_p50_ms=9, preemptions=1), 0),
]


def test_spread() -> None:
    assert spread([3, 1, 2, 5, 4]) == Spread(3, 2, 4)
    assert spread([7.0]) == Spread(7, 7, 7)
    assert spread([]) is None


def test_changes_are_within_a_pair_and_leave_out_ratios_to_nothing() -> None:
    assert changes(PAIRS, "hit_rate", "difference") == [10, 30, 20]
    assert changes(PAIRS, "ttft_p50_ms", "ratio") == [0.5, 0.6, 0.9]
    assert changes(PAIRS, "preemptions", "ratio") == [0.5, 0.25]
    assert changes(PAIRS, "recomputed_tokens", "ratio") == []


def test_lines_have_a_hit_rate_a_turn() -> None:
    found = {line.key: line for line in lines(PAIRS)}
    assert [line.key for line in lines(PAIRS)][:3] == ["hit_rate", "hit_rate_turn_1", "hit_rate_turn_2"]
    assert found["hit_rate"].changed == Spread(20, 15, 25)
    assert found["hit_rate_turn_2"].meridian == Spread(60, 55, 65)
    assert found["recomputed_tokens"].stock is None


def test_table_shows_quartiles_of_several_pairs_and_none_of_one() -> None:
    several = {line.split("  ")[0]: line for line in table(PAIRS).splitlines()}
    assert "40.0 (35.0-45.0)" in several["prefix hit rate"]
    assert several["prefix hit rate"].endswith("+20.0 (+15.0 to +25.0)")
    assert several["TTFT p50"].endswith("0.60x (0.55-0.75)")
    one = {line.split("  ")[0]: line.split() for line in table(PAIRS[:1]).splitlines()}
    assert one["prefix hit rate"][-3:] == ["50.0", "60.0", "+10.0"]
    assert one["TTFT p50"][-1] == "0.50x"
    assert one["preemptions"][-1] == "-"


def test_document_is_json_with_every_run() -> None:
    d = json.loads(json.dumps(document(PAIRS)))
    assert d["metrics"]["hit_rate"]["difference"] == {"median": 20, "low": 15, "high": 25}
    assert d["metrics"]["ttft_p50_ms"]["ratio"]["median"] == 0.6
    assert [p["differing"] for p in d["pairs"]] == [0, 1, 0]


def test_notes_say_what_makes_a_table_doubtful() -> None:
    odd = Pair(4, summary(1) | {"think_forced_ok": 3}, summary(1, policy_faults=2), None)
    assert notes([odd]) == [
        "seed 4, stock: 1 requests did not end thinking where planned",
        "seed 4: the policy faulted 2 times",
    ]
    assert notes(PAIRS) == ["requests whose greedy outputs differ: 1 of 12"]


def test_differing_counts_requests() -> None:
    assert differing({"0": [1, 2], "1": [3]}, {"0": [1, 2], "1": [4]}) == 1
    assert differing({"0": [1]}, {}) == 1


def test_pairs_alternate_and_share_their_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = []

    def run(stem: Path, what: str, args: list[str]) -> dict[str, object]:
        flags = dict(zip(args[::2], args[1::2], strict=False))
        ran.append((flags["--scheduler"], flags["--seed"], flags["--kv-blocks"]))
        Path(flags["--greedy-outputs"]).write_text("{}")
        return {"summary": summary(1, throughput_tok_s=1.0, preemptions=0)}

    monkeypatch.setattr(compare, "engine_run", run)
    c = Comparison("loaded", tmp_path, tmp_path, policy="native:noop", dtype="float32", seed=3)
    assert [p.differing for p in compare.run_pairs(c, 2, 64)] == [0, 0]
    assert ran == [("stock", "3", "64"), ("native:noop", "3", "64"), ("native:noop", "4", "64"), ("stock", "4", "64")]


def test_only_the_meridian_side_gets_settings_and_an_absolute_eviction_policy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.wasm").touch()
    c = Comparison("multi-turn", tmp_path, tmp_path, eviction="e.wasm", settings=(("kv_memory.x", "1"),))
    assert "--set" not in c.arguments("stock", 1, None)
    args = c.arguments(c.policy, 1, 600)
    assert f"policy.eviction.source={tmp_path / 'e.wasm'}" in args
    assert "kv_memory.x=1" in args
    assert args[args.index("--kv-blocks") + 1] == "600"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pairs", "0"], "--pairs: got '0', expected a whole number, at least 1"),
        (["--kv-blocks", "600,x"], "--kv-blocks: got 'x', expected a whole number, at least 1"),
        (["--policy", "none.wasm"], "--policy: none.wasm: no such file, expected a component or native:NAME"),
        (["--set", "x"], "--set: got 'x', expected section.key=value"),
        (["--scenario", "loaded", "--turns", "2"], "--turns: only multi-turn has sessions, got loaded"),
        (["--scenario", "loaded", "--preserve-thinking"], "--preserve-thinking: only multi-turn has sessions"),
        (["--gap-s", "-1"], "--gap-s: got '-1', expected seconds, 0 to 3600"),
        (["--model", "nowhere"], "--model: nowhere: no config.json there, expected a model's folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse(flags)
    assert refused.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {message}")
    assert printed.count("\n") == 1


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "meridian._cli", *args], capture_output=True, text=True, timeout=120)


def test_the_command_is_part_of_meridian() -> None:
    done = command("bench", "vllm", "--help")
    assert done.returncode == 0
    assert "Example: meridian bench vllm" in done.stdout
    listed = command("bench", "--help")
    assert listed.returncode == 0
    assert "micro" in listed.stdout
    assert "vllm" in listed.stdout
    refused = command("bench", "vllm", "--model", ".", "--pairs", "none")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_setting_that_meridian_refuses_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    done = command("bench", "vllm", "--model", str(tmp_path), "--set", "scheduler.nope=1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: scheduler.nope: unknown field")
