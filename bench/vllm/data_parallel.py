#!/usr/bin/env python3
"""Do two engines of one `vllm serve` stay on the same version while every swap goes to both, and while they serve?

    python bench/vllm/data_parallel.py --component target/policies/output-first.wasm --requests 2000 --swaps 200

Starts `vllm serve` with two engines and two API servers, and keeps requests in flight. Meanwhile it swaps a policy for
an equal one: by `meridian ctl swap --all`, and through the API server's route, there by two clients at once. After
every swap each engine is asked, over its private socket, which version decides. The outputs are compared with those
before the first swap. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import random
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python" / "tests" / "vllm"))

from serving import BUDGETS, SCHEDULER, Fleet, configure

PROMPTS = 100
CLIENTS = 8
# A client's pause between two requests, seconds: engines that are never idle leave two cores no time for `ctl`.
PAUSE_S = 1.0
MAX_TOKENS = (8, 24)
# Swaps by `ctl --all`, and by the route, take turns.
WAYS = ("ctl", "route")


def versions(fleet: Fleet) -> list[str]:
    """The SHA-256 of the dispatch policy that decides in each engine."""
    found = []
    for process in fleet.found():
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(process["socket"].removeprefix("unix:"))
        connection.request("GET", "/v1/policies")
        found.append(json.loads(connection.getresponse().read())["slots"][0]["active"]["sha256"])
        connection.close()
    return found


class Load:
    """Completions of seeded prompts, over connections of their own, so that both API servers get some."""

    def __init__(self, fleet: Fleet) -> None:
        rng = random.Random(0)
        self._fleet = fleet
        self._prompts = [[rng.randrange(10, 2000) for _ in range(rng.randint(4, 60))] for _ in range(PROMPTS)]
        self._lengths = [rng.randint(*MAX_TOKENS) for _ in range(PROMPTS)]
        self.expected: list[list[int]] = [[] for _ in range(PROMPTS)]
        self.sent = self.lost = self.differing = 0

    async def _one(self, session: Any, i: int) -> list[int] | None:
        body = {
            "model": "tiny-random",
            "prompt": self._prompts[i],
            "max_tokens": self._lengths[i],
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            async with session.post(f"{self._fleet.base}/v1/completions", json=body) as response:
                said = await response.json()
                tokens = said["choices"][0]["token_ids"] if response.status == 200 else None
        except Exception as error:
            print(f"request lost: {error}", file=sys.stderr)
            return None
        return tokens if tokens is not None and len(tokens) == self._lengths[i] else None

    async def _run(self, at_least: int, until: threading.Event, keep: bool) -> None:
        import aiohttp

        numbers = itertools.count()
        connector = aiohttp.TCPConnector(force_close=True)

        async def client(session: Any) -> None:
            while True:
                number = next(numbers)
                if number >= at_least and until.is_set():
                    return
                tokens = await self._one(session, number % PROMPTS)
                if keep:
                    self.expected[number % PROMPTS] = tokens or []
                    continue
                await asyncio.sleep(PAUSE_S)
                self.sent += 1
                self.lost += tokens is None
                self.differing += tokens is not None and tokens != self.expected[number % PROMPTS]

        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
            await asyncio.gather(*(client(session) for _ in range(CLIENTS)))

    def run(self, at_least: int, until: threading.Event, keep: bool = False) -> None:
        """Send so many requests, and more until the event."""
        asyncio.run(self._run(at_least, until, keep))


def swap_by_ctl(fleet: Fleet, path: Path) -> str | None:
    """The error, if not every engine did it."""
    code, said = fleet.ctl("swap", "dispatch", str(path), "--all")
    return None if code == 0 else json.dumps(said)


def swap_by_route(fleet: Fleet, component: bytes) -> str | None:
    code, said = fleet.admin("PUT", "/policies/dispatch", component)
    return None if code == 200 else f"{code}: {said}"


def swap(fleet: Fleet, folder: Path, component: bytes, count: int, way: str) -> dict[str, Any]:
    """Swap so many times; how often the engines differed afterwards, and what failed."""
    # Another version of the same: an empty custom section at its end. Equal bytes are no new version.
    equal = [component + bytes([0, 2, 1, 97 + i]) for i in range(3)]
    paths = []
    for i, each in enumerate(equal):
        paths.append(folder / f"version-{i}.wasm")
        paths[-1].write_bytes(each)
    failed: list[str] = []
    split = 0
    times: list[float] = []
    with ThreadPoolExecutor(2) as pool:
        made = 0
        while made < count:
            begun = time.perf_counter()
            if way == "ctl":
                errors = [swap_by_ctl(fleet, paths[made % 3])]
            else:
                # Two operators at once, with different versions: both engines must take them in one order.
                pair = (equal[made % 3], equal[(made + 1) % 3])
                errors = list(pool.map(lambda each: swap_by_route(fleet, each), pair))
            times.append((time.perf_counter() - begun) / len(errors))
            made += len(errors)
            failed += [error for error in errors if error is not None]
            split += len(set(versions(fleet))) != 1
    return {
        "swaps": made,
        "split": split,
        "failed": failed[:3],
        "failures": len(failed),
        "ms": [1e3 * t for t in times],
    }


def main() -> int:
    """Command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--component", type=Path, required=True, help="the policy that is swapped for itself")
    p.add_argument("--requests", type=int, default=2000, help="requests, at least 1")
    p.add_argument("--swaps", type=int, default=200, help="swaps by each way, at least 1")
    p.add_argument("--way", action="append", choices=WAYS, help="how to swap; by default, both")
    a = p.parse_args()
    if min(a.requests, a.swaps) < 1:
        p.error(f"--requests {a.requests} --swaps {a.swaps}: expected at least 1")
    component = a.component.read_bytes()
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        folder = Path(name)
        source = folder / "start.wasm"
        source.write_bytes(component)
        # The deadline is far off: a busy machine may pause any call for milliseconds.
        slot = f'[policy]\nwatch = false\n[policy.dispatch]\nsource = "{source}"\ndeadline_ms = 1000\n'
        options = [*SCHEDULER, *BUDGETS, "--dtype", "float32", "--api-server-count", "2", "--enable-log-requests"]
        fleet = Fleet(folder, configure(folder, slot), options, {"VLLM_PLUGINS": "meridian,meridian_admin"})
        try:
            fleet.wait_until_ready(2)
            load, done = Load(fleet), threading.Event()
            done.set()
            load.run(PROMPTS, done, keep=True)
            done.clear()
            serving = threading.Thread(target=load.run, args=(a.requests, done))
            begun = time.perf_counter()
            serving.start()
            try:
                ways = {way: swap(fleet, folder, component, a.swaps, way) for way in a.way or WAYS}
            finally:
                done.set()
                serving.join()
            seconds = time.perf_counter() - begun
            # Those that are still answered may not be over in the engine.
            processes = [each["status"] for each in fleet.ctl("status", "--all")[1]["processes"]]
            fleet.stop()
        finally:
            fleet.kill()
    served = {f"ApiServer_{i}": 0 for i in (0, 1)}
    for line in fleet.lines:
        for server in served:
            served[server] += f"({server} " in line and "Received request" in line
    slots = [process["slots"][0] for process in processes]
    print(
        json.dumps(
            {
                "ways": ways,
                "requests": load.sent,
                "lost": load.lost + sum(sum(process["requests"]) for process in processes),
                "differing": load.differing,
                "seconds": seconds,
                "engines": len(processes),
                "served": list(served.values()),
                "faults": sum(count for slot in slots for _, count in slot["faults"]),
                "swaps_seen": [slot["swaps"] for slot in slots],
                "gave_up": fleet.log().count("this engine goes on as stock vLLM"),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
