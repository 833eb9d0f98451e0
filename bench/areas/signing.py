"""Budgets of live requests in the real engine: forged orders, and changes while it is busy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from areas.common import ROOT, Bound, Figure, say

EACH = 1000
CHANGES = 1000


def signing() -> Iterator[Figure]:
    """Datagrams and rows that no scheduler made."""
    found = _script("forged_orders.py", "--each", str(EACH))
    for kind, taken in found["taken"].items():
        yield Figure(f"forged {kind}: taken", taken, f"of {EACH:,}", Bound(0))
    yield Figure("forged datagrams: kinds and directions", len(found["taken"]), "", Bound(12, False))
    yield Figure("forged datagrams: refused and counted", found["refused"], "datagrams", Bound(found["sent"], False))
    yield Figure("real datagrams lost among forged ones", found["lost"], "datagrams", Bound(0))
    requests = found["requests"]
    yield Figure("engine under forged orders: outputs changed", found["flood_changed"], f"of {requests}", Bound(0))
    yield Figure(
        "engine under forged orders: forged reports refused", found["refused_reports"], "datagrams", Bound(1, False)
    )
    yield Figure(
        "forged meridian_row: refused by the front end",
        found["rows_refused"],
        f"of {2 * requests}",
        Bound(2 * requests, False),
    )
    yield Figure(
        "forged meridian_row past the front end: outputs changed", found["rows_changed"], f"of {requests}", Bound(0)
    )
    yield Figure(
        "the same without MeridianScheduler: outputs changed", found["rows_stock_changed"], f"of {requests}", Bound(0)
    )
    yield Figure("tokens missed meanwhile", found["missed"], "tokens", Bound(0))
    yield Figure("signing a datagram with 40 orders, median", found["us"]["sign"], "us")
    yield Figure("checking it, median", found["us"]["check"], "us")


def live() -> Iterator[Figure]:
    """Limits that change while requests think."""
    found = _script("live_changes.py", "--changes", str(CHANGES))
    for wrong in found["wrong"]:
        say(f"    wrong: {wrong}")
    changes, themselves = found["changes"], found["by_themselves"]
    yield Figure("live changes over HTTP under load: acknowledged", changes, "requests", Bound(CHANGES, False))
    yield Figure("live changes: ended by the model before the named token", themselves, f"of {changes:,}")
    yield Figure(
        "live changes: the others end at the named token",
        found["exact"],
        f"of {changes - themselves:,}",
        Bound(changes - themselves, False),
    )
    yield Figure("live changes: named token passed already, ended at once", found["at_once"], f"of {changes:,}")
    yield Figure("live changes: tokens missed", found["missed"], "tokens", Bound(0))
    yield Figure("live changes: a step's decision with changes, median", found["busy_us"]["median"], "us")
    yield Figure("live changes: a step's decision with changes, p99", found["busy_us"]["p99"], "us")
    yield Figure("live changes: a step's decision with changes, longest", found["busy_us"]["longest"], "us")
    yield Figure("live changes: a step's decision without any, median", found["quiet_us"]["median"], "us")
    yield Figure("live changes: a step's decision without any, longest", found["quiet_us"]["longest"], "us")


def _script(name: str, *args: str) -> dict[str, Any]:
    """The JSON object that a script of bench/vllm prints last."""
    say(f"  {name} {' '.join(args)}")
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "vllm" / name), *args], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"error: bench/vllm/{name} failed with exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return json.loads(lines[-1])
