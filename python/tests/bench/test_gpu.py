"""checks/gpu on a machine without a GPU: its launches and checks run on the emulated device; its times cannot."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checks.gpu import driver
from checks.gpu.__main__ import STAGES
from checks.gpu.answers import figure
from checks.gpu.driver import ROOT, Failed, Params, compile_cubin, splits


def test_the_parameters_are_those_of_the_host() -> None:
    # kernels/src/cuda/params.rs has the same sizes and cases.
    assert ctypes.sizeof(Params) == 96
    assert Params.alpha.offset == 80
    row = 151_936 * 2
    assert [splits(count, row, 132) for count in (1, 8, 64, 256, 661, 4096)] == [75, 75, 10, 5, 4, 2]
    assert splits(1, 2, 132) == 1


SCRIPT = """
import json

import torch
from checks.gpu.answers import check
from checks.gpu.driver import Kernels

kernels = Kernels.emulated(torch)
found = {"right": check(kernels, seed=11, small=True)}
launch = kernels.launch


def wrong(logits, answers, **columns):
    # The last row is not written.
    launch(logits, answers, **columns)
    kernels.synchronize()
    answers[-1] = -1


kernels.launch = wrong
found["wrong"] = check(kernels, seed=11, small=True)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Checks on the emulated device, in a process of their own: the driver that it has stays loaded."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_everything_right_on_the_emulated_device_is_found_right(found: dict[str, Any]) -> None:
    assert len(found["right"]) == 23
    assert [one["name"] for one in found["right"] if one["holds"] is False] == []


def test_a_wrong_answer_is_found(found: dict[str, Any]) -> None:
    failed = [one["name"] for one in found["wrong"] if one["holds"] is False]
    assert "float32: relative error of entropy, worst of all shapes" in failed
    assert "float32: rows whose likeliest token is another" in failed
    assert "EAT states over 20 probes: largest difference" in failed


def test_a_figure_knows_whether_it_holds() -> None:
    assert figure("a", 2.0, "us", "< 12")["holds"]
    assert not figure("a", 12.0, "us", "< 12")["holds"]
    assert figure("a", 0.9, "ratio", ">= 0.9")["holds"]
    assert figure("a", 0.9, "ratio")["holds"] is None


def test_what_the_compiler_says_is_told() -> None:
    with pytest.raises(Failed, match='"none" is undefined'):
        compile_cubin(90, "-DMERIDIAN_UNROLL=none")


def test_the_compiler_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert driver.nvcc() == str(tmp_path / "bin" / "nvcc")


def gpu(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "checks.gpu", *args]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = gpu("--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (
        3,
        "not measured: PyTorch sees no CUDA device; --dry-run needs none\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_none_is_refused(tmp_path: Path) -> None:
    done = gpu("--dry-run", "--model", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: --model: {tmp_path}: expected a folder with a config.json\n")


@pytest.mark.exhaustive
def test_a_dry_run_takes_every_stage_without_a_gpu(tmp_path: Path) -> None:
    done = gpu("--dry-run", "--seed", "1", "--out", str(tmp_path))
    assert "Traceback" not in done.stderr
    assert "error:" not in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(line["stage"] for line in lines)) == list(STAGES)
    # Times of an emulated device are under no bound that means anything.
    short = [line["name"] for line in lines if line["holds"] is False and line["stage"] != "times"]
    assert short == []
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"| {line['name']} |" in page for line in lines)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 64 << 20
