"""The wheel by itself: in an empty environment, without cargo, a compiler or vLLM."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 18_000_000


@pytest.fixture(scope="module")
def wheel() -> Path:
    found = list((ROOT / "target" / "wheels").glob("meridian-*.whl"))
    assert len(found) == 1, f"expected one wheel in target/wheels: run `make wheel`, found {found}"
    return found[0]


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
    pip = (str(folder / "bin" / "pip"), "install", "-q", "--no-index", str(wheel))
    subprocess.run(pip, check=True, capture_output=True)
    return folder


def test_what_is_in_it(wheel: Path) -> None:
    assert wheel.stat().st_size <= MOST_BYTES
    assert "-cp310-abi3-manylinux_2_" in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "Provides-Extra: vllm" in opened.read(metadata).decode()
        assert "meridian=meridian.__main__:main" in opened.read(entry_points).decode()
        # The engine and the command share one library.
        assert [name for name in names if opened.read(name).startswith(b"\x7fELF")] == ["meridian/_native.abi3.so"]
        (bill,) = (name for name in names if name.endswith(".cyclonedx.json"))
        components = {component["name"] for component in json.loads(opened.read(bill))["components"]}
    assert "meridian/vllm/scheduler.py" in names
    assert components >= {"wasmtime", "ratatui"}
    assert not any(name.startswith("tests/") or name.endswith((".rs", ".pyc")) for name in names)


def test_the_command_needs_nothing_else(environment: Path, policies: Path, tmp_path: Path) -> None:
    env = {"PATH": str(environment / "bin"), "HOME": str(tmp_path)}
    replay = ("bench", "replay", "--workload", "reasoning-chat", "--requests", "100", "--policy", "srpt.wasm", "--json")
    os.symlink(policies / "srpt.wasm", tmp_path / "srpt.wasm")
    for args in (("--version",), ("policy", "check", "srpt.wasm"), replay):
        command = (str(environment / "bin" / "meridian"), *args)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, (args, done.stderr)
    assert len(json.loads(done.stdout)["runs"]) == 2


def test_the_command_finds_the_python_beside_it(environment: Path, tmp_path: Path) -> None:
    args = ("bench", "vllm", "--scenario", "loaded", "--out", str(tmp_path))
    env = {"PATH": "", "HOME": str(tmp_path)}
    for command in ((environment / "bin" / "meridian",), (environment / "bin" / "python", "-m", "meridian")):
        done = subprocess.run((*command, *args), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        # Python says it: this is no checkout, which would have a small model.
        assert done.stderr.startswith("error: --model DIR is needed"), done.stderr


def test_the_plugin_says_what_it_lacks(environment: Path) -> None:
    code = "import meridian; from meridian.vllm import MeridianScheduler"
    python = str(environment / "bin" / "python")
    done = subprocess.run((python, "-c", code), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'vllm'"
