"""`make canary` with a checkout: what of it differs from the vLLM that Meridian knows is named."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from checks import canary

MOVED = Path("v1") / "core" / "sched" / "scheduler.py"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The installed vLLM as a folder of Python code, with one method renamed and no version, as in a checkout."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    for source in package.rglob("*.py"):
        target = tmp_path / "vllm" / source.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)
    (tmp_path / "vllm" / "_version.py").unlink()
    text = (package / MOVED).read_text()
    assert text.count("_preempt_request(") > 2
    (tmp_path / "vllm" / MOVED).unlink()
    (tmp_path / "vllm" / MOVED).write_text(text.replace("_preempt_request(", "_preempt_one("))
    return tmp_path


def test_a_place_that_a_checkout_has_moved_is_named(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = canary.places(sys.executable, {"PYTHONPATH": str(checkout)})
    assert found["problem"] == ""
    assert found["vllm"] == "dev"
    moved = [place for place in found["places"] if place["lacks"]]
    assert [(place["seam"], place["path"]) for place in moved] == [("victim", "_preempt_request")]
    canary.show({"package": "vllm", "version": "0", "tests": 0, "failed": [], **found})
    assert "1 moved" in capsys.readouterr().out
