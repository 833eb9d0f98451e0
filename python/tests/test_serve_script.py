"""`scripts/serve.sh` up to the point where vLLM starts: a stand-in for Python notes what it is asked. And what
`examples/ask.py` refuses."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = """#!/bin/sh
case "$*" in
  -c*) exec "$REAL_PYTHON" "$@" ;;
  *) echo "$MERIDIAN_CONFIG"; echo "$@" ;;
esac
"""


def serve(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MERIDIAN_", "XDG_"))}
    env = {"HOME": str(tmp_path), "MERIDIAN_CACHE": str(tmp_path / "cache"), "REAL_PYTHON": sys.executable, **env}
    command = [str(ROOT / "scripts" / "serve.sh"), str(python), "8000", *args]
    return subprocess.run(command, cwd=tmp_path, env=kept | env, capture_output=True, text=True, timeout=60)


def test_without_a_configuration_there_is_a_token(tmp_path: Path) -> None:
    for _ in range(2):
        done = serve(tmp_path)
        assert done.returncode == 0, done.stderr
        config = tmp_path / "cache" / "serve" / "meridian.toml"
        assert done.stdout.splitlines()[0] == str(config)
        token = config.with_name("token")
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert len(token.read_text()) == 64
        assert 'token_file = "token"' in config.read_text()
        assert "meridian ctl swap dispatch target/policies/srpt.wasm" in done.stderr


def test_a_relative_configuration_is_the_callers(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[policy.dispatch]\nsource = 'native:fcfs'\n")
    done = serve(tmp_path, MERIDIAN_CONFIG="mine.toml")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(tmp_path / "mine.toml")
    assert "mine.toml names no admin.token_file" in done.stderr
    assert "ctl swap" not in done.stderr
    (tmp_path / "mine.toml").rename(tmp_path / "meridian.toml")
    assert serve(tmp_path).stdout.splitlines()[0] == str(tmp_path / "meridian.toml")


def test_a_bad_configuration_ends_in_one_line(tmp_path: Path) -> None:
    done = serve(tmp_path, MERIDIAN_CONFIG="absent.toml")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path}/absent.toml: cannot be read")
    assert done.stderr.count("\n") == 1


def test_options_reach_vllm(tmp_path: Path) -> None:
    given = serve(tmp_path, "--max-num-seqs", "8").stdout.splitlines()[1]
    assert given.startswith("-m vllm.entrypoints.cli.main serve models/arith-reasoner ")
    assert given.endswith(" --max-num-seqs 8")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([""], "QUESTION: '': it is empty; expected a chain such as '7 + 5 * 3'"),
        (["7 + 5 *"], "QUESTION: '7 + 5 *': an operation lacks its number"),
        (["7 / 5 + 2"], "'/' is not + - or *"),
        (["seven + 5 + 2"], "'seven' is not a number from 0 to 22"),
        (["7 + 23 + 2"], "'23' is not a number from 0 to 22"),
        (["7 + 5"], "operations: 1, the model knows 2 to 10"),
        (["7" + " + 5" * 11], "operations: 11, the model knows 2 to 10"),
        (["7 + 5 * 3", "--port", "1"], "error: port 1: "),
    ],
)
def test_a_question_without_an_answer_is_no_wrong_answer(args: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ask.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
