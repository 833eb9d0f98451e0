#!/usr/bin/env python3
"""What the scheduler keeps whatever happens to Meridian, counted in the real engine; prints one JSON object.

stock_and_defects.py defects     a defect at every call that Meridian makes in a step
stock_and_defects.py stock       native:fcfs beside stock vLLM, with everything on that follows it
stock_and_defects.py priority    random sequences with --scheduling-policy priority beside stock vLLM
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests" / "vllm"))

from defects import POINTS, Defect, broken, left_behind, native_for, positions, serve
from harness import make_engine
from test_priority import SEEDS, play, stock_scheduler, text
from test_start import make
from test_stock import run, stock_config

ROOT = Path(__file__).resolve().parents[2]


def defects() -> dict[str, Any]:
    """Calls that were broken, and how often the engine went on as stock with the same tokens."""
    engine = make_engine()
    with engine.using(None):
        stock = serve(engine)
    seen = Defect()
    with broken(engine, native_for(engine), seen):
        serve(engine)
    injected = survived = 0
    lost: list[str] = []
    logging.getLogger("vllm.meridian").setLevel(logging.CRITICAL)
    for point in POINTS:
        for at in positions(seen.calls[point]):
            defect = Defect(point, at, RuntimeError("broken"))
            with broken(engine, native_for(engine), defect):
                same = serve(engine) == stock
                good = same and not left_behind(engine)
            injected += defect.is_raised
            survived += defect.is_raised and good
            lost += [] if good else [f"{point} {at}"]
    return {"points": len(POINTS), "injected": injected, "survived": survived, "lost": lost}


def stock() -> dict[str, Any]:
    """Outputs and steps that differ from those of stock vLLM."""
    from meridian.vllm.parts import make_engine as make_native

    engine = make_engine()
    tokens, steps = run(engine, None)
    component = (ROOT / "target" / "policies" / "output-first.wasm").read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        watched = make_native(stock_config(Path(folder)), engine.scheduler, serves=True)
        watched.policies.put("dispatch", component, "shadow", "figures")
        found = run(engine, watched)
        watched.policies.close()
    swapped = engine.native("native:fcfs")

    def swap(step: int) -> None:
        if step in (20, 90):
            swapped.policies.put("dispatch", component, "active", "figures")
        if step in (60, 120):
            swapped.policies.rollback("dispatch")

    across, _ = run(engine, swapped, swap)
    return {
        "requests": len(tokens),
        "steps": len(steps),
        "outputs_differing": sum(one != other for one, other in zip(tokens, found[0], strict=True)),
        "steps_differing": sum(one != other for one, other in zip(steps, found[1], strict=False))
        + abs(len(steps) - len(found[1])),
        "outputs_differing_across_swaps": sum(one != other for one, other in zip(tokens, across, strict=True)),
    }


def priority() -> dict[str, Any]:
    """Random sequences that native:fcfs plays as stock vLLM does, step by step."""
    engine = make_engine()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "meridian.toml"
        config.write_text(text("native:fcfs"))
        os.environ["MERIDIAN_CONFIG"] = str(config)
        equal = steps = preemptions = 0
        for seed in SEEDS:
            scheduler = make(engine, policy="priority", async_scheduling=False)
            expected = play(engine, stock_scheduler(engine), seed)
            equal += play(engine, scheduler, seed) == expected and scheduler._meridian is not None
            steps += len(expected)
            preemptions += sum(len(step[2]) for step in expected)
            scheduler.shutdown()
    return {"sequences": len(SEEDS), "equal": equal, "steps": steps, "preemptions": preemptions}


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("defects", "stock", "priority"))
    what = {"defects": defects, "stock": stock, "priority": priority}[p.parse_args().what]
    print(json.dumps(what()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
