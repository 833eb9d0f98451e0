"""Swaps between equal policies while the real engine serves."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from checks.engine.llm import percentile
from python.tests.vllm.harness import make_engine, requests

REQUESTS = 24


def measure(component: str, swaps: int = 200) -> dict[str, Any]:
    """Swap a component for another version of the same so many times."""
    text = Path(component).read_bytes()
    # An empty custom section at its end: equal bytes are no new version.
    versions = (text + b"\0\x02\x01x", text)
    engine = make_engine()
    with engine.using(None):
        stock = engine.generate(requests(REQUESTS))
    reports: list[dict[str, Any]] = []
    differing = served = 0
    with engine.using(engine.native(component)) as native:
        enough = threading.Event()

        def swap() -> None:
            while not enough.is_set():
                version = versions[len(reports) % 2]
                reports.append(json.loads(native.policies.put("dispatch", version, "active", "figures")))

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            while len(reports) < swaps and swapper.is_alive():
                # Every request is run to its end: generate() fails if one is not.
                outputs = engine.generate(requests(REQUESTS))
                served += len(outputs)
                differing += sum(one != other for one, other in zip(outputs, stock, strict=True))
        finally:
            enough.set()
            swapper.join()
        status = json.loads(native.policies.status())
        native.policies.close()
    held_us = [report["held_us"] for report in reports]
    return {
        "swaps": len(reports),
        "requests": served,
        "differing": differing,
        "left": status["requests"],
        "held_us": {"p99": percentile(held_us, 0.99), "longest": max(held_us)},
        "faults": sum(count for _, count in status["slots"][0]["faults"]),
    }
