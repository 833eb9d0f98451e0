"""Where Meridian touches vLLM: both ways into its scheduler, Model Runner V2, several processes and machines."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from checks.areas.outputs import suite
from checks.areas.setup import VERSIONS
from checks.figures import Figure, Part, Row, table
from checks.run import POLICIES, ROOT, WORK, engine, fetched, lines, output, say, tests

TESTS = ROOT / "python" / "tests" / "vllm"
# The option of the tests, and what it is in a figure.
ADAPTERS = {"lists": "by lists and methods", "plug-ins": "by plug-ins"}
# Times the kinds of requests: a thousand.
BUDGETS_OF_EACH = 36


def suites(_: int) -> Iterator[Figure]:
    """The tests of the scheduler's seams, the same for both ways."""
    for option, shown in ADAPTERS.items():
        files = (TESTS / "test_seams.py", TESTS / "test_random_sequences.py")
        passed, ran = tests(f"seams-{option}", "--seams", option, *files)
        yield Figure(f"tests of the seams {shown}: passed", passed, f"of {ran}", f">= {ran}")


def steps(_: int) -> Iterator[Figure]:
    """Each step under `native:fcfs` against stock's, on every supported vLLM."""
    uv = f"{fetched('tools')}/bin/uv"
    (wheel,) = (ROOT / "target" / "wheels").glob("*.whl")
    for version in VERSIONS:
        python = output(ROOT / "scripts" / "fetch.sh", "vllm", env={"MERIDIAN_VLLM": version})
        output(uv, "pip", "install", "-q", "--python", python, "--reinstall", "--no-deps", wheel)
        found = lines(python, "-m", "checks.engine", "stock_steps")[-1]
        for line in found["differences"]:
            say(f"  vLLM {version}: {line}")
        count = found["sequences"]
        for key, shown in (("lists", ADAPTERS["lists"]), ("plug_ins", ADAPTERS["plug-ins"])):
            name = f"vLLM {found['vllm']}: sequences as in stock, {shown}"
            yield Figure(name, found[key], f"of {count}", f">= {count}")


def runner_v2(_: int) -> Iterator[Figure]:
    """Model Runner V2 with its kernels interpreted: outputs against stock's."""
    from checks.engine.cpu import REPLACED

    names = ", ".join(name for _, name in REPLACED)
    yield Figure(f"Model Runner V2: functions that are replaced ({names})", len(REPLACED), "functions", "<= 1")
    rows = suite("run", "--runner", "v2")
    for row in rows:
        for way, where in row["differences"].items():
            say(f"  {row['name']}, {way}: {where}")
    right = sum(row["equal"] for row in rows)
    name = "Model Runner V2: situations with equal outputs, nothing set"
    yield Figure(name, right, f"of {len(rows)}", f">= {len(rows)}")


def budgets_of_runner_v2(_: int) -> Iterator[Figure]:
    """The same runner: budgets, also with drafts, in sessions, and paused and resumed."""
    asked = suite("asked", "--runner", "v2", "--count", str(BUDGETS_OF_EACH))
    for row in asked:
        if row["right"] != row["requests"]:
            say(f"  {row['name']}: {row['wrong']}")
    right, sent = (sum(row[key] for row in asked) for key in ("right", "requests"))
    yield Figure("Model Runner V2: requests whose budget is right", right, f"of {sent}", f">= {sent}")


def parallel(_: int) -> list[dict[str, Any]]:
    """Each form of serving."""
    from checks.engine.parallel import FORMS

    return [engine("parallel", component=POLICIES / "fair-share.wasm", form=form) for form in FORMS]


def gpu(_: int) -> Iterator[Figure]:
    """`make gpu` without a GPU."""
    out = WORK / "gpu-dry-run"
    shutil.rmtree(out, ignore_errors=True)
    begun = time.monotonic()
    said = output(sys.executable, "-m", "checks.gpu", "--dry-run", "--json", "--out", out, most_code=1)
    minutes = (time.monotonic() - begun) / 60
    found = json.loads(said.splitlines()[-1])
    stages = len({line["stage"] for line in found["figures"]})
    yield Figure("make gpu, dry run: stages that ran", stages - found["failed"], f"of {stages}", f">= {stages}")
    short = sum(line["holds"] is False for line in found["figures"])
    yield Figure("make gpu, dry run: figures that fall short", short, f"of {len(found['figures'])}", "<= 0")
    yield Figure("make gpu, dry run: time", minutes, "minutes", "<= 10")
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    yield Figure("make gpu, dry run: files", written / (1 << 20), "MiB", "<= 64")


PARTS: dict[str, Part] = {
    "suites": suites,
    "steps": steps,
    "runner-v2": runner_v2,
    "runner-v2-budgets": budgets_of_runner_v2,
    "parallel": table(
        parallel,
        Row("{form}: requests with a budget that were served", "served", "of {requests}", ">= {requests}"),
        Row("{form}: budgets missed", "missed", "of {requests}", "<= 0"),
        Row("{form}: requests that an order has ended", "ordered", "of {without}", ">= 1"),
        Row("{form}: answers as after the forced token", "same_answers", "of {answers}", ">= {answers}"),
        Row("{form}: swaps by `ctl --all` that every engine did", "swapped", "of {swaps}", ">= {swaps}"),
    ),
    "gpu": gpu,
}
