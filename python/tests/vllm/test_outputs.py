"""Nothing set, nothing changed: with both classes of Meridian and no configuration, outputs are those of stock vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from outputs.compare import first_difference
from outputs.situations import SITUATIONS, WAYS

RUN = Path(__file__).parent / "outputs" / "run.py"
ASKED = RUN.with_name("asked.py")
LEAST = 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A row a situation, by its name."""
    folder = tmp_path_factory.mktemp("outputs")
    command = [sys.executable, str(RUN), "--out", str(folder / "rows.json"), "--keep", str(folder / "logs")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return {row["name"]: row for row in json.loads((folder / "rows.json").read_text())}


@pytest.mark.parametrize("name", [x.name for x in SITUATIONS])
def test_outputs_are_those_of_stock_vllm(rows: dict[str, dict[str, Any]], name: str) -> None:
    differences = rows[name]["differences"]
    lines = [f"{name}, {way}: stock and Meridian differ at {where}" for way, where in differences.items()]
    assert rows[name]["ways"], f"{name} did not run in any way"
    assert not lines, "\n".join(lines)


def test_there_are_enough_situations_in_every_way(rows: dict[str, dict[str, Any]]) -> None:
    assert len(rows) == len(SITUATIONS) == len({x.name for x in SITUATIONS})
    assert len(rows) >= LEAST
    ran = {way.partition(", ")[2] for row in rows.values() for way in row["ways"]}
    assert ran == set(WAYS)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda x: x["outputs"][0]["ids"].append(4), ".outputs[0].ids: 2 items, 3 in the other"),
        (lambda x: x["outputs"][0].update(finish="length"), ".outputs[0].finish: 'stop', 'length' in the other"),
        (lambda x: x["outputs"][0].update(logprob=-1.001), ".outputs[0].logprob: -1.0, -1.001 in the other"),
        (lambda x: x.pop("usage"), ".usage: only in one"),
        (lambda x: x.update(usage=True), ".usage: 1, True in the other"),
    ],
)
def test_a_difference_is_found(change: Callable[[dict[str, Any]], None], place: str) -> None:
    answer = {"outputs": [{"ids": [1, 2], "finish": "stop", "logprob": -1.0}], "usage": 1}
    other = json.loads(json.dumps(answer))
    assert first_difference(answer, other) is None
    change(other)
    assert first_difference(answer, other) == place


def test_rounding_is_no_difference() -> None:
    assert first_difference({"logprob": -1.0}, {"logprob": -1.00001}) is None
    assert first_difference([[-10_000.0]], [[-10_000.1]]) is None


def test_budgets_that_are_asked_for_keep_what_vllm_promises(tmp_path: Path) -> None:
    command = [sys.executable, str(ASKED), "--out", str(tmp_path / "rows.json"), "--count", "24"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) >= 20
    wrong = [f"{row['name']}: {row['wrong'][0]}" for row in rows if row["right"] != row["requests"]]
    assert not wrong, "\n".join(wrong)
