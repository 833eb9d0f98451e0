"""Whole `schedule()` and `update_from_output()` of vLLM's scheduler: stock, Meridian by default, `native:fcfs`.

The contestants take turns of a few steps in one process, on one core, without garbage collection while they are timed.
They serve equal loads, so each turn is compared with the same steps of stock. The package `meridian` is the one that
Python finds, so `PYTHONPATH` chooses between two versions. Medians over the turns, microseconds a step, and ratios to
stock.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from checks.engine.house_load import CONTESTANTS, ENVIRONMENT, Load

RUNNING = (8, 64, 128, 256)
TURN_STEPS, TURNS, WARM_UP_STEPS = 20, 60, 600


def of_turns(values: list[int]) -> list[float]:
    """Mean microseconds of a step in each turn."""
    return [fmean(values[i : i + TURN_STEPS]) / 1e3 for i in range(0, len(values), TURN_STEPS)]


def ratio(some: list[float], others: list[float]) -> float:
    """Median over turns."""
    return median(a / b for a, b in zip(some, others, strict=True))


def rows(running: int, model: str, seed: int, turns: int, clock: Callable[[], int]) -> list[dict[str, Any]]:
    """Each contestant with so many running requests."""
    loads = {name: Load(name, running, model, seed, clock) for name in CONTESTANTS}
    for load in loads.values():
        for _ in range(WARM_UP_STEPS):
            load.step()
        del load.schedule_ns[:], load.update_ns[:], load.turnover[:]
    gc.collect()
    gc.freeze()
    names = list(loads)
    for turn in range(turns):
        gc.collect()
        gc.disable()
        # Whoever is first is another one in every turn.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for _ in range(TURN_STEPS):
                loads[name].step()
        gc.enable()
    found = []
    times = {name: (of_turns(load.schedule_ns), of_turns(load.update_ns)) for name, load in loads.items()}
    schedule_stock, update_stock = times["stock"]
    both_stock = [sum(pair) for pair in zip(schedule_stock, update_stock, strict=True)]
    for name, load in loads.items():
        schedule, update = times[name]
        row = {
            "running": running,
            "contestant": name,
            "steps": len(load.schedule_ns),
            "steps_with_turnover": sum(load.turnover),
            "schedule_us": median(schedule),
            "update_us": median(update),
            "schedule_ratio": ratio(schedule, schedule_stock),
            "update_ratio": ratio(update, update_stock),
            "both_ratio": ratio([sum(pair) for pair in zip(schedule, update, strict=True)], both_stock),
        }
        if name != "stock":
            stats = load.scheduler.meridian_stats()
            own = of_turns(stats["own_ns"][-len(load.schedule_ns) :])
            row["own_us"] = median(own)
            row["added_us"] = median(a - b for a, b in zip(schedule, schedule_stock, strict=True))
            row["faults"] = stats["faults"]
        found.append(row)
        load.scheduler.shutdown()
    gc.unfreeze()
    return found


def measure(
    model: str, running: Sequence[int] = RUNNING, turns: int = TURNS, seed: int = 1, cpu_time: bool = False
) -> dict[str, Any]:
    """A row for each number of running requests and contestant; `cpu_time` counts processor time, for a machine that
    does other things."""
    os.environ |= ENVIRONMENT
    # Both run folders and configuration are nobody's.
    os.chdir(tempfile.mkdtemp())
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="m", dir="/tmp")
    clock = time.thread_time_ns if cpu_time else time.perf_counter_ns
    found: list[dict[str, Any]] = []
    for number in running:
        print(f"    {number} running", file=sys.stderr, flush=True)
        # The first core may serve the machine's interrupts.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        found += rows(number, model, seed, turns, clock)
    return {"rows": found}
