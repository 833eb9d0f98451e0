"""Several engines and API servers of one `vllm serve`: one swap reaches all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from statistics import median

from areas.common import ROOT, Bound, Figure, say

OUTPUT_FIRST = ROOT / "target" / "policies" / "output-first.wasm"
NAMES = {"ctl": "ctl --all", "route": "the API server's route, two clients at once"}


def dp() -> Iterator[Figure]:
    """Swaps between equal policies in two engines behind two API servers, while they serve."""
    say("  data_parallel.py")
    command = [sys.executable, str(ROOT / "bench" / "vllm" / "data_parallel.py"), "--component", str(OUTPUT_FIRST)]
    command += ["--requests", "2000", "--swaps", "200"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800)
    if done.returncode:
        sys.exit("error: data_parallel.py failed, see above")
    found = json.loads(done.stdout.splitlines()[-1])
    name = "two engines, two API servers"
    for way, swapped in found["ways"].items():
        by = f"{name}: swaps by {NAMES[way]}"
        yield Figure(by, swapped["swaps"], "swaps", Bound(200, at_most=False))
        yield Figure(f"{by}: engines on different versions afterwards", swapped["split"], "times", Bound(0))
        yield Figure(f"{by}: not done by every engine", swapped["failures"], "swaps", Bound(0))
        yield Figure(f"{by}: time of one, median", median(swapped["ms"]), "ms")
    yield Figure(f"{name}: engines", found["engines"], "engines", Bound(2, at_most=False))
    yield Figure(f"{name}: requests served meanwhile", found["requests"], "requests", Bound(2000, at_most=False))
    yield Figure(f"{name}: fewest by one API server", min(found["served"]), "requests", Bound(1, at_most=False))
    yield Figure(f"{name}: requests lost", found["lost"], "requests", Bound(0))
    yield Figure(f"{name}: outputs that differ from those before the swaps", found["differing"], "requests", Bound(0))
    yield Figure(f"{name}: faults", found["faults"], "faults", Bound(0))
    yield Figure(f"{name}: engines that gave up Meridian", found["gave_up"], "engines", Bound(0))


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {"dp": dp}
