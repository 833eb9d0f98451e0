"""Do two engines of one `vllm serve` stay on the same version while every swap goes to both, and while they serve?
Starts `vllm serve` with two engines and two API servers, and keeps requests in flight. Meanwhile it swaps a policy for
an equal one: by `meridian ctl swap --all`, and through the API server's route, there by two clients at once. After
every swap each engine is asked, over its private socket, which version decides. The outputs are compared with those
before the first swap.
"""

from __future__ import annotations

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

from python.tests.vllm.serving import BUDGETS, SCHEDULER, Fleet, configure

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
    """Completions of seeded prompts, each over a connection of its own, so that both API servers get some."""

    def __init__(self, fleet: Fleet) -> None:
        rng = random.Random(0)
        self._fleet = fleet
        self._prompts = [[rng.randrange(10, 2000) for _ in range(rng.randint(4, 60))] for _ in range(PROMPTS)]
        self._lengths = [rng.randint(*MAX_TOKENS) for _ in range(PROMPTS)]
        # The tokens of each request by the number of its prompt, None for a lost one.
        self.seen: list[tuple[int, list[int] | None]] = []

    def _one(self, i: int) -> list[int] | None:
        try:
            said = self._fleet.generate(prompt=self._prompts[i], max_tokens=self._lengths[i])
            tokens = said["choices"][0]["token_ids"]
        except (OSError, RuntimeError, LookupError) as error:
            print(f"request lost: {error}", file=sys.stderr)
            return None
        return tokens if len(tokens) == self._lengths[i] else None

    def run(self, at_least: int, until: threading.Event) -> None:
        """Send so many requests, and more until the event."""
        numbers = itertools.count()

        def client(_: int) -> None:
            for number in numbers:
                if number >= at_least and until.is_set():
                    return
                self.seen.append((number % PROMPTS, self._one(number % PROMPTS)))
                time.sleep(PAUSE_S)

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(client, range(CLIENTS)))


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
    for error in failed[:3]:
        print(error, file=sys.stderr)
    return {"swaps": made, "split": split, "failures": len(failed), "ms": [1e3 * t for t in times]}


def measure(component: str, requests: int = 2000, swaps: int = 200) -> dict[str, Any]:
    """So many swaps of a component for itself by each way, while requests are served."""
    text = Path(component).read_bytes()
    with tempfile.TemporaryDirectory(prefix="m", dir="/tmp") as name:
        folder = Path(name)
        source = folder / "start.wasm"
        source.write_bytes(text)
        # The deadline is far off: a busy machine may pause any call for milliseconds.
        slot = f'[policy]\nwatch = false\n[policy.dispatch]\nsource = "{source}"\ndeadline_ms = 1000\n'
        options = [*SCHEDULER, *BUDGETS, "--dtype", "float32", "--api-server-count", "2", "--enable-log-requests"]
        fleet = Fleet(folder, configure(folder, slot), options, {"VLLM_PLUGINS": "meridian,meridian_admin"})
        try:
            fleet.wait_until_ready(2)
            load, done = Load(fleet), threading.Event()
            done.set()
            load.run(PROMPTS, done)
            expected = dict(load.seen)
            load.seen.clear()
            done.clear()
            serving = threading.Thread(target=load.run, args=(requests, done))
            serving.start()
            try:
                ways = {way: swap(fleet, folder, text, swaps, way) for way in WAYS}
            finally:
                done.set()
                serving.join()
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
    return {
        "ways": ways,
        "requests": len(load.seen),
        "lost": sum(tokens is None for _, tokens in load.seen) + sum(sum(x["requests"]) for x in processes),
        "differing": sum(tokens is not None and tokens != expected[i] for i, tokens in load.seen),
        "engines": len(processes),
        "served": list(served.values()),
        "faults": sum(count for slot in slots for _, count in slot["faults"]),
        "gave_up": fleet.log().count("this engine goes on as stock vLLM"),
    }
