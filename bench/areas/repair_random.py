"""Random sequences against stock vLLM's scheduler, and answers beside a prompt that has no KV blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from areas.common import ROOT, Bound, Figure

RANDOM_SEQUENCES = ROOT / "bench" / "vllm" / "random_sequences.py"


def random_sequences() -> Iterator[Figure]:
    """Every feature: `native:fcfs` against stock, step by step, and vLLM's limits under every policy."""
    # The whole workspace, as the tests build it: another selection would compile wasmtime again.
    subprocess.run(["cargo", "build", "--release", "--locked", "-q", "--workspace", "--examples"], cwd=ROOT, check=True)
    hostile = ROOT / "target" / "hostile"
    subprocess.run(
        [ROOT / "target" / "release" / "examples" / "hostile", hostile], stdout=subprocess.DEVNULL, check=True
    )
    command = [sys.executable, str(RANDOM_SEQUENCES), "--seeds", "6", "--hostile", str(hostile)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if not done.stdout:
        sys.exit(f"error: {RANDOM_SEQUENCES.relative_to(ROOT)} failed with exit code {done.returncode}")
    report = json.loads(done.stdout.splitlines()[-1])
    rows = report["features"]
    yield Figure("random sequences against stock", sum(row["sequences"] for row in rows), "sequences")
    yield Figure("random sequences under policies", sum(row["decided"] for row in rows), "sequences")
    for row in rows:
        name = f"random sequences, {row['feature']}"
        equal = Bound(row["sequences"], at_most=False)
        yield Figure(f"{name}: equal to stock", row["equal"], f"of {row['sequences']} sequences", equal)
        yield Figure(f"{name}: with an invariant broken", row["broken"], f"of {row['decided']} sequences", Bound(0))
    for policy, starved in report["starved"].items():
        name = f"{policy}, an answer of 200 tokens while a prompt has no KV blocks"
        yield Figure(f"{name}: empty steps", starved["empty_steps"], f"of {starved['steps']} steps", Bound(0))
        yield Figure(f"{name}: its time over stock's", starved["over_stock"], "ratio", Bound(1.05))
    for policy, ended in report["adapters"].items():
        yield Figure(
            f"{policy}, two adapters where one fits: requests that end", ended, "of 3 requests", Bound(3, False)
        )
