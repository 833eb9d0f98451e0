"""An engine that records its decisions, without vLLM."""

from pathlib import Path

import meridian
import pytest


def engine(base_dir: Path, record_dir: str) -> meridian.PolicyEngine:
    policy = meridian.PolicyConfig(record_dir=record_dir, record_max_mib=8)
    return meridian.PolicyEngine(meridian.MeridianConfig(policy=policy, base_dir=str(base_dir)))


def test_decisions_are_in_files_once_the_engine_is_closed(tmp_path: Path) -> None:
    running = engine(tmp_path, "recordings")
    running.add("a", prompt=[1, 2, 3], max_tokens=10)
    running.plan([], ["a"], token_budget=512, free_seats=4, now_ms=1.0)
    running.close()
    (file,) = (tmp_path / "recordings").iterdir()
    assert file.name.startswith("dispatch-")
    assert file.stat().st_mode & 0o777 == 0o600
    content = file.read_bytes()
    assert (content[:6], content[-6:]) == (b"ARROW1", b"ARROW1")
    assert b"native:balanced" in content


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(meridian.PolicyError, match=r"policy\.record_dir: .*file: is no folder"):
        engine(tmp_path, "file")
