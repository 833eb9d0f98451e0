"""Nothing set, nothing changed: with both classes of Meridian and no configuration, outputs are those of stock vLLM."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
from outputs.compare import first_difference
from outputs.situations import CORE, LONGER_ENGINES, SITUATIONS, WAYS, jobs, of

RUN = Path(__file__).parent / "outputs" / "run.py"
ASKED = RUN.with_name("asked.py")
LEAST = 60


def played(script: Path, folder: Path, *args: str) -> list[dict[str, Any]]:
    """The rows that a script of the suite writes."""
    command = [sys.executable, str(script), "--out", str(folder / "rows.json"), *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "rows.json").read_text())


Rows = Callable[[str], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def rows_of(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """A row a situation, by its name, of a part of the engines and ways. A part is played once: not a parameter of the
    fixture, which pytest would set up again for each test."""

    @functools.cache
    def play(part: str) -> dict[str, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("outputs")
        return {row["name"]: row for row in played(RUN, folder, "--part", part, "--keep", str(folder / "logs"))}

    return play


def names_of(is_core: bool) -> list[str]:
    """The situations of a part, in their order."""
    chosen = [job for job in jobs() if job[0] not in LONGER_ENGINES and (job in CORE) == is_core]
    found = {x.name for job in chosen for x in of(*job)}
    return [x.name for x in SITUATIONS if x.name in found]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        *(pytest.param("core", name) for name in names_of(True)),
        *(pytest.param("others", name, marks=pytest.mark.exhaustive) for name in names_of(False)),
    ],
)
def test_outputs_are_those_of_stock_vllm(rows_of: Rows, part: str, name: str) -> None:
    rows = rows_of(part)
    differences = rows[name]["differences"]
    lines = [f"{name}, {way}: stock and Meridian differ at {where}" for way, where in differences.items()]
    assert rows[name]["ways"], f"{name} did not run in any way"
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("part", ["core", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_there_are_enough_situations_in_every_way(rows_of: Rows, part: str) -> None:
    rows = rows_of(part)
    ran = {way for row in rows.values() for way in row["ways"]}
    every = {job for job in jobs() if job[0] not in LONGER_ENGINES}
    chosen = CORE if ran & {", ".join(job) for job in CORE} else every - CORE
    assert ran == {", ".join(job) for job in chosen}
    assert rows.keys() == {x.name for job in chosen for x in of(*job)}
    assert {x.name for job in every for x in of(*job)} == {x.name for x in SITUATIONS}
    assert len({x.name for x in SITUATIONS}) == len(SITUATIONS)
    assert {way for _, way in every} == set(WAYS)
    assert len(rows) >= LEAST


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


@pytest.mark.parametrize(
    ("runner", "count"),
    [("v1", 8), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("v1", 24), ("v2", 2)))],
)
def test_budgets_that_are_asked_for_keep_what_vllm_promises(tmp_path: Path, runner: str, count: int) -> None:
    if runner == "v2":
        fresh.skip_without_cpu_runner_v2()
    rows = played(ASKED, tmp_path, "--runner", runner, "--count", str(count))
    assert len(rows) >= 20
    wrong = [f"{row['name']}: {row['wrong'][0]}" for row in rows if row["right"] != row["requests"]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.exhaustive
def test_outputs_are_those_of_stock_vllm_on_model_runner_v2(tmp_path: Path) -> None:
    """The engines that are quick where kernels are interpreted; `make figures ONLY=outputs PART=runner-v2` has all."""
    fresh.skip_without_cpu_runner_v2()
    engines = ("in reasoning", "sessions", "adapter", "no tokenizer")
    rows = played(RUN, tmp_path, "--runner", "v2", *(word for name in engines for word in ("--engine", name)))
    assert len(rows) >= 15
    differ = [f"{row['name']}, {way}: {where}" for row in rows for way, where in row["differences"].items()]
    assert not differ, "\n".join(differ)
