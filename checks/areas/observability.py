"""Seeing it: what metrics and spans cost, whether they agree with clients, and timelines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from checks.figures import Figure, Part, over_pairs, printed
from checks.run import RELEASE, ROOT, WORK, lines, output
from checks.timeline import CHECKS, Tables
from python.tests.vllm.serving import free_port

DRIVER = (sys.executable, "-m", "checks.engine.observed")
# The parts of a timing run: long enough for a throughput, short enough for five pairs.
COST_REQUESTS = 240


def toml(name: str, prometheus: str = "", collector: str = "", admin: str = "") -> Path:
    """A configuration with these listeners."""
    path = WORK / f"observability-{name}.toml"
    otlp = f'otlp_endpoint = "http://{collector}"\n' if collector else ""
    path.write_text(f'[telemetry]\nprometheus = "{prometheus}"\n{otlp}[admin]\nlisten = "{admin}"\n')
    return path


def local(port: int) -> str:
    """A port of this machine."""
    return f"127.0.0.1:{port}"


@contextmanager
def collecting() -> Iterator[tuple[str, list[int]]]:
    """Takes spans and forgets them; its address, and the sizes of the exports."""
    sizes: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sizes.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield local(server.server_port), sizes
    finally:
        server.shutdown()


@contextmanager
def running(config: Path, *args: str | Path) -> Iterator[subprocess.Popen[str]]:
    """An engine whose load has begun."""
    command = (*DRIVER, "--toml", config, *args)
    engine = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(engine, "ready")
        yield engine
    finally:
        engine.kill()
        engine.wait()


def wait_for(engine: subprocess.Popen[str], expected: str) -> None:
    """Wait for a line of the driver; vLLM logs to the same stream."""
    assert engine.stdout is not None
    if not any(line == expected + "\n" for line in engine.stdout):
        sys.exit(f"error: the driver ended before it was {expected}; see above")


def cost(pairs: int) -> Iterator[Figure]:
    """Throughput with metrics, explanations and spans on, over the same engine with all of them off, in turns. The
    collector of the spans runs on the same cores, so there is a figure without spans too."""
    with collecting() as (collector, sizes):
        spans = toml("on", local(free_port()), collector, local(0))
        found = in_turns(spans, pairs)
        yield Figure("cost: exports of spans that the collector took", len(sizes), "exports")
    yield Figure("cost: tokens of a turn", found[0]["tokens"], "tokens")
    yield from lost("metrics and spans on", found)
    yield from lost("metrics on, without spans", in_turns(toml("metrics", local(free_port())), pairs))


def in_turns(config: Path, pairs: int) -> list[dict[str, Any]]:
    """Runs with this configuration and with everything off."""
    out = WORK / "observability-cost.json"
    args = ("--requests", str(COST_REQUESTS), "--in-flight", "24", "--pairs", str(pairs))
    output(*DRIVER, "--toml", config, "--against", toml("off"), "--out", out, *args)
    return json.loads(out.read_text())


def lost(what: str, found: list[dict[str, Any]]) -> Iterator[Figure]:
    """Throughput lost, and microseconds a token, of each pair."""
    percent = [100 * (on / off - 1) for on, off in (x["times_s"] for x in found)]
    a_token = [1e6 * (x["times_s"][0] - x["times_s"][1]) / x["tokens"] for x in found]
    yield over_pairs(f"cost: throughput lost with {what}", percent, "%", "<= 1")
    yield over_pairs(f"cost: time a token with {what}", a_token, "us", "<= 1")


def host() -> list[dict[str, Any]]:
    """The host's own calls of a step in a microbenchmark, observed and not."""
    # With these packages, dependencies have the features of other builds.
    packages = ("-p", "meridian-engine", "-p", "meridian-cli", "-p", "meridian-python")
    output("cargo", "build", "--release", "--locked", "-q", *packages, "--example", "observed_cost")
    return lines(RELEASE / "examples" / "observed_cost")


def ask(port: int, path: str) -> str:
    """The body of an answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
        return reply.read().decode()


def metrics(port: int) -> dict[str, float]:
    """The sums and counts of the histograms, over all tenants."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^meridian_(\w+)\{([^}]*)\} (\S+)$", ask(port, "/metrics"), re.MULTILINE):
        phase = re.search(r'phase="(\w+)"', labels)
        key = f"{name} {phase[1]}" if phase else name
        found[key] = found.get(key, 0.0) + float(value)
    return found


# What a client measured of each request: name, histogram, its label, key of the rows.
CLIENTS = (
    ("TTFT", "ttft", "", "ttft_ms"),
    ("TTFO", "ttfo", "", "ttfo_ms"),
    ("TTOT", "ttot", "", "ttot_ms"),
    ("request duration", "request_duration", "", "e2e_ms"),
    ("ITL of thinking", "itl", " think", "think_gaps"),
    ("ITL of output", "itl", " output", "output_gaps"),
)


def sums(_: int) -> Iterator[Figure]:
    """Whether /metrics and `why` agree with what the client measured."""
    out, port, admin = WORK / "observability-sums.json", free_port(), free_port()
    said: list[dict[str, Any]] = []
    with collecting() as (collector, _sizes):
        config = toml("on", local(port), collector, local(admin))
        with running(config, "--requests", "1000", "--in-flight", "32", "--out", out, "--on-go") as engine:
            before = metrics(port)
            assert engine.stdin is not None
            engine.stdin.write("go\n")
            engine.stdin.flush()
            wait_for(engine, "done")
            seen = {name: value - before.get(name, 0.0) for name, value in metrics(port).items()}
            rows = json.loads(out.read_text())["rows"]
            # What `meridian why --json` says, by HTTP: a thousand processes would take minutes.
            for row in rows[-1000:]:
                said.append(json.loads(ask(admin, f"/v1/why?request={urllib.parse.quote(row['id'])}")))
    yield Figure("sums: requests", len(rows), "requests", ">= 1000")
    for name, metric, label, key in CLIENTS:
        # Gaps are sums and numbers.
        values = [row[key] if label else (row[key], 1) for row in rows]
        total, count = sum(ms for ms, _ in values) / 1e3, sum(number for _, number in values)
        sum_of, count_of = (seen[f"{metric}_seconds_{what}{label}"] for what in ("sum", "count"))
        off = 100 * abs(sum_of / count_of / (total / count) - 1)
        yield Figure(f"sums: {name}, mean of /metrics off the client's", off, "%", "<= 2")
        yield Figure(f"sums: {name}, count of /metrics over the client's", count_of / count, "ratio")
    rows = rows[-1000:]
    parts = [sum(part["ms"] for part in each["parts"]) for each in said]
    engines = [100 * abs(ms / each["latency_ms"] - 1) for ms, each in zip(parts, said, strict=True)]
    clients = [100 * abs(ms / row["e2e_ms"] - 1) for ms, row in zip(parts, rows, strict=True)]
    worst = clients.index(max(clients))
    yield Figure("why: parts off the engine's latency, worst of 1,000", max(engines), "%", "<= 1")
    yield Figure("why: parts off the client's latency, median of 1,000", median(clients), "%", "<= 1")
    yield Figure("why: parts off the client's latency, worst of 1,000", max(clients), "%")
    yield Figure("why: latency of the worst, by the client", rows[worst]["e2e_ms"], "ms")
    # The client's clock and the host's are the same, so the difference has two ends.
    begins = [each["arrival_ms"] - row["arrival_ms"] for each, row in zip(said, rows, strict=True)]
    lasts = [row["e2e_ms"] - each["latency_ms"] for each, row in zip(said, rows, strict=True)]
    ends = [last - begin for begin, last in zip(begins, lasts, strict=True)]
    for name, ms in (("before vLLM's stamp of its arrival", begins), ("after the engine's last token", ends)):
        yield Figure(f"why: client's time {name}, median", median(ms), "ms")
        yield Figure(f"why: client's time {name}, 99th of 100", sorted(ms)[len(ms) * 99 // 100], "ms")
        yield Figure(f"why: client's time {name}, worst", max(ms), "ms")
        yield Figure(f"why: client's time {name}, of the worst", ms[worst], "ms")


def timeline(_: int) -> Iterator[Figure]:
    """A timeline of ten seconds with 64 running requests, checked by SQL."""
    out = WORK / "timeline.json"
    args = ("--until-eof", "--in-flight", "96", "--max-num-seqs", "64", "--kv-blocks", "640", "--scale", "2")
    with running(toml("timeline", admin=local(0)), *args) as engine:
        time.sleep(5)
        meridian = (sys.executable, "-m", "meridian")
        output(*meridian, "trace", "--seconds", "10", "--out", out, "--pid", str(engine.pid))
        # To be looked at.
        (WORK / "top.txt").write_text(output(*meridian, "top", "--pid", str(engine.pid)))
    tables = Tables(out)
    failures = tables.failures()
    most = tables.value(
        "SELECT max(v) FROM (SELECT sum(value) AS v FROM counter c JOIN counter_track t ON c.track_id = t.id "
        "WHERE t.name LIKE 'running %' GROUP BY ts)"
    )
    yield Figure("timeline: running requests at most", most, "requests")
    yield Figure("timeline: steps in 10 s", tables.value("SELECT count(*) FROM slice WHERE category = 'step'"), "steps")
    yield Figure("timeline: spans in 10 s", tables.value("SELECT count(*) FROM slice"), "spans")
    yield Figure("timeline: size of 10 s", out.stat().st_size / 2**20, "MiB")
    yield Figure("timeline: SQL checks", len(CHECKS), "checks")
    held = sum(count == 0 for count in failures.values())
    yield Figure("timeline: SQL checks that hold", held, "checks", f">= {len(CHECKS)}")
    for name, count in failures.items():
        yield Figure(f"timeline: against: {name}", count, "spans", "<= 0")


PARTS: dict[str, Part] = {"cost": cost, "host": printed(host, "host: "), "sums": sums, "timeline": timeline}
