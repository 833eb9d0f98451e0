#!/usr/bin/env python3
"""Swaps between equal policies while the real engine serves; prints one JSON object.

live_swaps.py --component target/policies/output-first.wasm --swaps 200
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests" / "vllm"))

from harness import make_engine, requests

REQUESTS = 24


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--component", type=Path, required=True, help="the policy that is swapped for itself")
    p.add_argument("--swaps", type=int, default=200, help="swaps, at least 1")
    a = p.parse_args()
    component = a.component.read_bytes()
    # Another version of the same: an empty custom section at its end. Equal bytes are no new version.
    versions = (component + b"\0\x02\x01x", component)
    engine = make_engine()
    with engine.using(None):
        stock = engine.generate(requests(REQUESTS))
    reports: list[dict[str, Any]] = []
    differing = served = 0
    with engine.using(engine.native(str(a.component.resolve()))) as native:
        enough = threading.Event()

        def swap() -> None:
            while not enough.is_set():
                version = versions[len(reports) % 2]
                reports.append(json.loads(native.policies.put("dispatch", version, "active", "figures")))

        swapper = threading.Thread(target=swap)
        swapper.start()
        try:
            while len(reports) < a.swaps and swapper.is_alive():
                # Every request is run to its end: generate() fails if one is not.
                outputs = engine.generate(requests(REQUESTS))
                served += len(outputs)
                differing += sum(one != other for one, other in zip(outputs, stock, strict=True))
        finally:
            enough.set()
            swapper.join()
        status = json.loads(native.policies.status())
        native.policies.close()
    print(
        json.dumps(
            {
                "swaps": len(reports),
                "requests": served,
                "differing": differing,
                "left": status["requests"],
                "held_us": sorted(report["held_us"] for report in reports),
                "faults": sum(count for _, count in status["slots"][0]["faults"]),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
