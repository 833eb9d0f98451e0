"""Seeing it: what metrics and spans cost, whether they agree with clients, timelines, the dashboard and its alerts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

from areas.common import ROOT, WORK, Bound, Figure, over_pairs, say

DRIVER = ROOT / "bench" / "vllm" / "observed.py"
FOLDER = WORK / "observability"
PATIENCE_S = 240
# The parts of a timing run: long enough for a throughput, short enough for five pairs.
COST_REQUESTS = 240
TOKEN = "a-token-of-24-characters"
# Ends the thinking of long requests, asks probes, and keeps KV blocks of sessions: data for the panels about them.
LOADED = (
    "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 60\noutput_tpot_budget_ms = 1000\n"
    "[entropy]\neat_probe_interval_tokens = 8\nprobe_suffix = 'ans'\n"
    "[policy.eviction]\nsource = 'native:ttl'\nconfig = { ttl_ms = 1000, tools_only = false }\n"
)


def _free_port() -> int:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _toml(name: str, text: str) -> Path:
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.toml"
    path.write_text(text)
    return path


def _off() -> Path:
    return _toml("off", '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n')


def _on(collector: int, metrics: int, extra: str = "", admin: int = 0) -> Path:
    return _toml(
        "on",
        f'[telemetry]\nprometheus = "127.0.0.1:{metrics}"\notlp_endpoint = "http://127.0.0.1:{collector}"\n'
        f'[admin]\nlisten = "127.0.0.1:{admin}"\n{extra}',
    )


@contextmanager
def _collector() -> Iterator[tuple[int, list[int]]]:
    """Takes spans and forgets them; its port, and the sizes of the exports."""
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
        yield int(server.server_port), sizes
    finally:
        server.shutdown()


@contextmanager
def _engine(toml: Path, *args: str) -> Iterator[subprocess.Popen[str]]:
    """An engine whose load has begun."""
    command = [sys.executable, str(DRIVER), "--toml", str(toml), *args]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        _line(engine, "ready")
        yield engine
    finally:
        engine.kill()
        engine.wait()


def _line(engine: subprocess.Popen[str], expected: str) -> None:
    """Wait for a line of the driver; vLLM logs to the same stream."""
    assert engine.stdout is not None
    if not any(line == expected + "\n" for line in engine.stdout):
        sys.exit(f"error: {DRIVER.name}: ended before it was {expected}; see above")


def _meridian(*args: str) -> str:
    done = subprocess.run([sys.executable, "-m", "meridian._cli", *args], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: meridian {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def cost(pairs: int) -> Iterator[Figure]:
    """Throughput with metrics, explanations and spans on, over the same engine with all of them off, in turns. The
    collector of the spans runs on the same cores, so there is a figure without spans too."""
    with _collector() as (collector, sizes):
        toml = _on(collector, _free_port())
        found = _in_turns(toml, pairs)
        yield Figure("cost: exports of spans that the collector took", len(sizes), "exports")
    yield Figure("cost: tokens of a turn", found[0]["tokens"], "tokens")
    lost, a_token = _lost(found)
    yield over_pairs("cost: throughput lost with metrics and spans on", lost, "%", Bound(1.0))
    yield over_pairs("cost: time a token with metrics and spans on", a_token, "us", Bound(1.0))
    metrics = _toml("metrics", f'[telemetry]\nprometheus = "127.0.0.1:{_free_port()}"\n[admin]\nlisten = ""\n')
    lost, a_token = _lost(_in_turns(metrics, pairs))
    yield over_pairs("cost: throughput lost with metrics on, without spans", lost, "%", Bound(1.0))
    yield over_pairs("cost: time a token with metrics on, without spans", a_token, "us", Bound(1.0))


def _in_turns(toml: Path, pairs: int) -> list[dict[str, Any]]:
    """Runs with this configuration and with everything off."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    out = FOLDER / "cost.json"
    command = [sys.executable, str(DRIVER), "--toml", str(toml), "--against", str(_off()), "--out", str(out)]
    command += ["--requests", str(COST_REQUESTS), "--in-flight", "24", "--pairs", str(pairs)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text())


def _lost(found: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Throughput lost, in percent, and microseconds a token, of each pair."""
    lost = [100 * (on / off - 1) for on, off in (x["times_s"] for x in found)]
    return lost, [1e6 * (x["times_s"][0] - x["times_s"][1]) / x["tokens"] for x in found]


def host() -> Iterator[Figure]:
    """The host's own calls of a step in a microbenchmark, observed and not."""
    # With these packages, dependencies have the features of other builds.
    command = ["cargo", "build", "--release", "--locked", "-q", "-p", "meridian-engine", "-p", "meridian-cli"]
    subprocess.run([*command, "-p", "meridian-python", "--example", "observed_cost"], cwd=ROOT, check=True)
    program = ROOT / "target" / "release" / "examples" / "observed_cost"
    done = subprocess.run([str(program)], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        record = json.loads(line)
        bound = Bound(record["bound"]) if record.get("bound") is not None else None
        yield Figure(f"host: {record['name']}", record["value"], record["unit"], bound)


def _metrics(port: int) -> dict[str, float]:
    """The sums and counts of the histograms, over all tenants."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    sums: dict[str, float] = {}
    for name, labels, value in re.findall(r"^meridian_(\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        phase = re.search(r'phase="(\w+)"', labels)
        key = f"{name} {phase[1]}" if phase else name
        sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def sums() -> Iterator[Figure]:
    """Whether /metrics and `why` agree with what the client measured."""
    out = FOLDER / "sums.json"
    with _collector() as (collector, _):
        port, admin = _free_port(), _free_port()
        toml = _on(collector, port, admin=admin)
        with _engine(toml, "--requests", "1000", "--in-flight", "32", "--out", str(out), "--on-go") as engine:
            before = _metrics(port)
            assert engine.stdin is not None
            engine.stdin.write("go\n")
            engine.stdin.flush()
            _line(engine, "done")
            after = _metrics(port)
            rows = json.loads(out.read_text())["rows"]
            client_errors, sum_errors, before_ms, after_ms = [], [], [], []
            for row in rows[-1000:]:
                said = _explain(admin, row["id"])
                parts = sum(part["ms"] for part in said["parts"])
                sum_errors.append(abs(parts / said["latency_ms"] - 1))
                client_errors.append(abs(parts / row["e2e_ms"] - 1))
                # The client's clock and the host's are the same, so the difference has two ends.
                before_ms.append(said["arrival_ms"] - row["arrival_ms"])
                after_ms.append(row["arrival_ms"] + row["e2e_ms"] - said["arrival_ms"] - said["latency_ms"])
    seen = {name: value - before.get(name, 0.0) for name, value in after.items()}
    clients = {
        "TTFT": ("ttft_seconds", [row["ttft_ms"] for row in rows], len(rows)),
        "TTFO": ("ttfo_seconds", [row["ttfo_ms"] for row in rows], len(rows)),
        "TTOT": ("ttot_seconds", [row["ttot_ms"] for row in rows], len(rows)),
        "request duration": ("request_duration_seconds", [row["e2e_ms"] for row in rows], len(rows)),
        "ITL of thinking": (
            "itl_seconds",
            [row["think_gaps"][0] for row in rows],
            sum(r["think_gaps"][1] for r in rows),
        ),
        "ITL of output": (
            "itl_seconds",
            [row["output_gaps"][0] for row in rows],
            sum(r["output_gaps"][1] for r in rows),
        ),
    }
    yield Figure("sums: requests", len(rows), "requests", Bound(1000, at_most=False))
    for name, (metric, measured_ms, count) in clients.items():
        label = {"ITL of thinking": " think", "ITL of output": " output"}.get(name, "")
        metric_mean = seen[f"{metric}_sum{label}"] / seen[f"{metric}_count{label}"]
        client_mean = sum(measured_ms) / 1e3 / count
        yield Figure(
            f"sums: {name}, mean of /metrics off the client's",
            100 * abs(metric_mean / client_mean - 1),
            "%",
            Bound(2.0),
        )
        yield Figure(
            f"sums: {name}, count of /metrics over the client's", seen[f"{metric}_count{label}"] / count, "ratio"
        )
    yield Figure("why: parts off the engine's latency, worst of 1,000", 100 * max(sum_errors), "%", Bound(1.0))
    yield Figure("why: parts off the client's latency, median of 1,000", 100 * median(client_errors), "%", Bound(1.0))
    yield Figure("why: parts off the client's latency, worst of 1,000", 100 * max(client_errors), "%")
    worst = client_errors.index(max(client_errors))
    yield Figure("why: latency of the worst, by the client", rows[worst]["e2e_ms"], "ms")
    for name, ms in (("before vLLM's stamp of its arrival", before_ms), ("after the engine's last token", after_ms)):
        yield Figure(f"why: client's time {name}, median", median(ms), "ms")
        yield Figure(f"why: client's time {name}, 99th of 100", sorted(ms)[len(ms) * 99 // 100], "ms")
        yield Figure(f"why: client's time {name}, worst", max(ms), "ms")
        yield Figure(f"why: client's time {name}, of the worst", ms[worst], "ms")


def _explain(port: int, request: str) -> Any:
    """What `meridian why --json` says, by HTTP: a thousand processes would take minutes."""
    url = f"http://127.0.0.1:{port}/v1/why?request={urllib.parse.quote(request)}"
    with urllib.request.urlopen(url, timeout=30) as reply:
        return json.load(reply)


def timeline() -> Iterator[Figure]:
    """A timeline of ten seconds with 64 running requests, checked by SQL."""
    sys.path.insert(0, str(ROOT / "bench"))
    from timeline_sql import CHECKS, Tables

    out = FOLDER / "timeline.json"
    toml = _toml("timeline", '[telemetry]\nprometheus = ""\n[admin]\nlisten = "127.0.0.1:0"\n')
    args = ("--until-eof", "--in-flight", "96", "--max-num-seqs", "64", "--kv-blocks", "640", "--scale", "2")
    with _engine(toml, *args) as engine:
        time.sleep(5)
        _meridian("trace", "--seconds", "10", "--out", str(out), "--pid", str(engine.pid))
        # The frame in docs/src/seeing.md.
        (FOLDER / "top.txt").write_text(_meridian("top", "--pid", str(engine.pid)))
    tables = Tables(out)
    failures = tables.failures()
    running = tables.value(
        "SELECT max(v) FROM (SELECT sum(value) AS v FROM counter c JOIN counter_track t ON c.track_id = t.id "
        "WHERE t.name LIKE 'running %' GROUP BY ts)"
    )
    yield Figure("timeline: running requests at most", running, "requests")
    yield Figure("timeline: steps in 10 s", tables.value("SELECT count(*) FROM slice WHERE category = 'step'"), "steps")
    yield Figure("timeline: spans in 10 s", tables.value("SELECT count(*) FROM slice"), "spans")
    yield Figure("timeline: size of 10 s", out.stat().st_size / 2**20, "MiB")
    yield Figure("timeline: SQL checks", len(CHECKS), "checks")
    yield Figure(
        "timeline: SQL checks that hold",
        sum(count == 0 for count in failures.values()),
        "checks",
        Bound(len(CHECKS), at_most=False),
    )
    for name, count in failures.items():
        yield Figure(f"timeline: against: {name}", count, "spans", Bound(0))


def dashboard() -> Iterator[Figure]:
    """Panels whose queries return data, and alerts with and without injected faults."""
    sys.path.insert(0, str(ROOT / "bench"))
    from dashboard_svg import drawing, panels_of

    FOLDER.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="meridian-dashboard-", dir=FOLDER))
    programs = Path(subprocess.check_output([str(ROOT / "scripts" / "setup-prometheus.sh")], text=True).strip())
    promtool = subprocess.run(
        [str(programs / "promtool"), "test", "rules", "meridian.rules.test.yml"], cwd=ROOT / "deploy" / "prometheus"
    )
    yield Figure("rules: promtool's tests that fail", promtool.returncode, "files", Bound(0))
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    metrics, prometheus = _free_port(), _free_port()
    (folder / "meridian.rules.yml").write_text((ROOT / "deploy" / "prometheus" / "meridian.rules.yml").read_text())
    config = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    (folder / "prometheus.yml").write_text(config.replace("5s", "1s").replace("127.0.0.1:9464", f"127.0.0.1:{metrics}"))
    board = json.loads((ROOT / "deploy" / "grafana" / "meridian.json").read_text())
    panels = panels_of(board)

    def ask(path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{prometheus}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]

    def look() -> None:
        end = time.time()
        for panel in panels:
            for expr, legend in panel.queries:
                query = re.sub(r"\$(instance|model|tenant)", ".*", expr).replace("$__rate_interval", "20s")
                series = ask("/api/v1/query_range", query=query, start=str(end - 60), end=str(end), step="1")["result"]
                panel.take(legend, series)

    def firing() -> set[str]:
        return {x["labels"]["alertname"] for x in ask("/api/v1/alerts")["alerts"] if x["state"] == "firing"}

    with _collector() as (collector, _):
        extra = f'token_file = "{folder / "token"}"\n[policy]\nrecord_dir = "{folder / "recordings"}"\n{LOADED}'
        toml = _on(collector, metrics, extra)
        load = ("--until-eof", "--budgets", "--sessions", "40", "--in-flight", "24", "--max-num-seqs", "12")
        load += ("--kv-blocks", "64", "--lull-s", "2")
        with _engine(toml, *load) as engine:
            command = [str(programs / "prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
            command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{prometheus}"]
            scraper = subprocess.Popen([*command, "--log.level=error"])
            try:
                pid, token = str(engine.pid), str(folder / "token")
                shadow = str(ROOT / "target" / "policies" / "output-first.wasm")
                _meridian("ctl", "shadow", "dispatch", shadow, "--pid", pid, "--token-file", token)
                time.sleep(60)
                look()
                before = firing()
                trap = str(ROOT / "target" / "hostile" / "trap-later.wasm")
                _meridian("ctl", "swap", "dispatch", trap, "--pid", pid, "--token-file", token)
                fired = _until(lambda: (f := firing()) >= {"MeridianPolicyFaults", "MeridianPolicyQuarantined"} and f)
            finally:
                scraper.terminate()
                scraper.wait()
    page = FOLDER / "dashboard.svg"
    page.write_text(drawing(panels))
    say(f"  drawn: {page}")
    yield Figure("dashboard: panels", len(panels), "panels")
    yield Figure("dashboard: queries", sum(len(panel.queries) for panel in panels), "queries")
    with_data = sum(bool(panel.series) for panel in panels)
    say(f"  without data: {[panel.title for panel in panels if not panel.series]}")
    yield Figure(
        "dashboard: panels whose queries returned data", with_data, "panels", Bound(len(panels), at_most=False)
    )
    yield Figure("alerts: firing without a fault", len(before), "alerts", Bound(0))
    yield Figure("alerts: firing after injected traps", len(fired), "alerts", Bound(2, at_most=False))


def _until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(1)
    return set()


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """The parts of this area."""
    return {
        "cost": lambda: cost(pairs),
        "host": host,
        "sums": sums,
        "timeline": timeline,
        "dashboard": dashboard,
    }
