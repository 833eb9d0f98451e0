"""Dashboard, alert rules, timelines, explanations and spans of a real engine under load. Prometheus is Debian's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import free_port
from timeline import Tables

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a-token-of-24-characters"
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{CALLER}-01"
# Long enough for a machine that does something else.
PATIENCE = 120


def until(what: Callable[[], Any], why: str) -> Any:
    """What `what` gives as soon as it is true."""
    pause = threading.Event()
    for _ in range(2 * PATIENCE):
        if found := what():
            return found
        pause.wait(0.5)
    pytest.fail(f"not in {PATIENCE} s: {why}")


@dataclass
class Collector:
    """Takes spans as an OpenTelemetry collector does."""

    spans: list[Any] = field(default_factory=list)
    server: Any = None

    def start(self) -> int:
        """Listen; returns the port."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        taken = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    for scope in resource.scope_spans:
                        taken.extend(scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return int(self.server.server_port)

    def requests(self) -> list[dict[str, Any]]:
        """The attributes of the spans of requests, with the attributes of their event."""
        found = []
        for span in list(self.spans):
            if span.name == "request":
                attributes = {x.key: value_of(x.value) for x in span.attributes}
                events = [{x.key: value_of(x.value) for x in event.attributes} for event in span.events]
                took_ms = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
                found.append({**attributes, "events": events, "took_ms": took_ms})
        return found


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@dataclass
class Observed:
    """An engine under load, and everything that looks at it."""

    folder: Path
    engine: subprocess.Popen[str]
    collector: Collector
    prometheus: int

    def meridian(self, *args: str, ok: int = 0) -> str:
        """What the command prints."""
        command = [sys.executable, "-m", "meridian", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == ok, f"{args}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of Prometheus."""
        url = f"http://127.0.0.1:{self.prometheus}{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return json.load(reply)["data"]

    def is_scraped(self) -> bool:
        """Whether Prometheus runs and has data."""
        try:
            return bool(self.ask("/api/v1/query", query="meridian_process_info")["result"])
        except OSError:
            return False

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {x["labels"]["alertname"] for x in self.ask("/api/v1/alerts")["alerts"] if x["state"] == "firing"}


def prometheus_folder() -> Path:
    """Where Prometheus and promtool are."""
    return Path(subprocess.check_output([str(ROOT / "scripts" / "fetch.sh"), "prometheus"], text=True).strip())


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, policies: Path) -> Iterator[Observed]:
    """An engine that serves until the end of the module, scraped by Prometheus every second."""
    folder = tmp_path_factory.mktemp("seeing")
    collector = Collector()
    traces, metrics, prometheus = collector.start(), free_port(), free_port()
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    toml = folder / "meridian.toml"
    toml.write_text(
        "[service_levels.lax]\nttfo_ms = 600000.0\ntpot_ms = 60000.0\ndefault = true\n"
        f'[telemetry]\nprometheus = "127.0.0.1:{metrics}"\ntenants = 2\notlp_endpoint = "http://127.0.0.1:{traces}"\n'
        f'[admin]\nlisten = "127.0.0.1:0"\ntoken_file = "{token}"\n[policy]\nrecord_dir = "{folder / "recordings"}"\n'
        "[policy.dispatch]\nsource = 'native:balanced'\ndeadline_ms = 1000\n"
        # Ends the thinking of long requests, asks probes, and keeps KV blocks of sessions.
        "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 60\noutput_tpot_budget_ms = 1000\n"
        "[entropy]\neat_probe_interval_tokens = 8\nprobe_suffix = 'ans'\n"
        "[policy.eviction]\nsource = 'native:ttl'\nconfig = { ttl_ms = 1000, tools_only = false }\n"
    )
    command = [sys.executable, "-m", "checks.engine.observed", "--toml", str(toml), "--until-eof"]
    command += ["--budgets", "--sessions", "40", "--lull-s", "2", "--in-flight", "24", "--max-num-seqs", "12"]
    command += ["--kv-blocks", "64", "--traceparent", HEADER]
    engine = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    # vLLM logs to the same stream.
    assert any(line == "ready\n" for line in engine.stdout)
    rules = (ROOT / "deploy" / "prometheus" / "meridian.rules.yml").read_text()
    (folder / "meridian.rules.yml").write_text(rules)
    config = (ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text()
    config = config.replace("5s", "1s").replace("127.0.0.1:9464", f"127.0.0.1:{metrics}")
    (folder / "prometheus.yml").write_text(config)
    program = str(prometheus_folder() / "prometheus")
    command = [program, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{prometheus}", "--log.level=error"]
    scraper = subprocess.Popen(command)
    seen = Observed(folder, engine, collector, prometheus)
    try:
        shadow = policies / "output-first.wasm"
        seen.meridian("ctl", "shadow", "dispatch", str(shadow), "--pid", str(engine.pid), "--token-file", str(token))
        yield seen
    finally:
        engine.kill()
        scraper.terminate()
        engine.wait()
        scraper.wait()
        collector.server.shutdown()


def panels() -> list[tuple[str, str]]:
    """Title and query of every panel."""
    board = json.loads((ROOT / "deploy" / "grafana" / "meridian.json").read_text())
    return [(panel["title"], x["expr"]) for panel in board["panels"] for x in panel.get("targets", [])]


def query_of(expr: str) -> str:
    """A panel's query as Grafana asks it with every variable on `All`."""
    return re.sub(r"\$(instance|model|tenant)", ".*", expr).replace("$__rate_interval", "20s")


def test_every_panel_returns_data_and_nothing_fires(observed: Observed) -> None:
    asked = [(title, query_of(expr)) for title, expr in panels()]
    assert len({title for title, _ in asked}) >= 37

    def empty() -> list[str]:
        def is_empty(query: str) -> bool:
            samples = observed.ask("/api/v1/query", query=query)["result"]
            return not any(x["value"][1] != "NaN" for x in samples)

        return [title for title, query in asked if is_empty(query)]

    until(observed.is_scraped, "Prometheus scrapes")
    missing = empty()
    pause = threading.Event()
    for _ in range(PATIENCE):
        if not missing:
            break
        pause.wait(1.0)
        missing = empty()
    assert not missing, f"panels without data: {missing}"
    # Of counters that are there from the start, some are to have counted.
    for counted in (
        'meridian_probes_total{outcome="done"}',
        "meridian_probe_tokens_total",
        'meridian_forced_ends_total{reason="hard_cap"}',
        'meridian_kv_keeps_total{outcome="hit"}',
        'meridian_kv_keeps_total{outcome="evicted"}',
    ):
        until(lambda counted=counted: observed.ask("/api/v1/query", query=f"{counted} > 0")["result"], counted)
    assert observed.firing() == set()
    series = observed.ask("/api/v1/query", query="count by (tenant) (meridian_ttft_seconds_count)")["result"]
    assert {x["metric"].get("tenant", "") for x in series} <= {"", "other", "blue", "green", "red"}
    assert len(series) == 4, "two tenants have series of their own"


def test_a_live_timeline_holds_what_it_promises(observed: Observed) -> None:
    out = observed.folder / "live.json"
    observed.meridian("trace", "--seconds", "4", "--out", str(out), "--pid", str(observed.engine.pid))
    tables = Tables(out)
    assert tables.failures() == dict.fromkeys(tables.failures(), 0)
    counts = dict(tables.rows("SELECT category, count(*) FROM slice GROUP BY category"))
    assert counts["step"] > 20
    assert counts["decision"] >= counts["step"] // 2
    assert counts["run"] > 10
    assert counts["wait"] > 5
    named = (
        "SELECT count(*) FROM thread JOIN process p USING (upid) WHERE p.name = 'requests' AND thread.name LIKE '#%'"
    )
    assert tables.value(named) == 0, "a live request has the engine's id"
    spans = {name for (name,) in tables.rows("SELECT DISTINCT name FROM slice")}
    assert {"prefill", "thinking", "output", "waiting", "ended"} <= spans


def test_the_parts_of_a_request_add_up(observed: Observed) -> None:
    requests = until(observed.collector.requests, "spans arrive")
    for request in requests[-5:]:
        pid = str(observed.engine.pid)
        said = json.loads(observed.meridian("--json", "why", request["meridian.request.id"], "--pid", pid))
        parts = sum(x["ms"] for x in said["parts"])
        assert abs(parts - said["latency_ms"]) < 1e-3 * said["latency_ms"]
        assert abs(said["latency_ms"] - request["took_ms"]) < 1.0
        (event,) = request["events"]
        assert abs(event["meridian.why.prefill_ms"] - of(said, "prefill")) < 1e-6
        text = observed.meridian("why", said["request"], "--pid", pid)
        assert f"request {said['request']}" in text
        assert "computed its prompt" in text


def test_spans_join_the_trace_of_the_caller(observed: Observed) -> None:
    until(observed.collector.requests, "spans arrive")
    requests = [span for span in list(observed.collector.spans) if span.name == "request"]
    assert {span.trace_id.hex() for span in requests} == {TRACE}
    assert {span.parent_span_id.hex() for span in requests} == {CALLER}


def test_the_header_of_the_caller_is_vllms_own_or_the_clients() -> None:
    from meridian.vllm.following import _traceparent

    def found(headers: dict[str, str] | None, extra: dict[str, Any] | None) -> str | None:
        params = None if extra is None else SimpleNamespace(extra_args=extra)
        request: Any = SimpleNamespace(trace_headers=headers, sampling_params=params)
        return _traceparent(request)

    assert found({"traceparent": HEADER}, {"meridian_traceparent": "other"}) == HEADER
    assert found(None, {"meridian_traceparent": HEADER}) == HEADER
    assert found({}, None) is None
    for hostile in (7, ["x"], "x" * 1000):
        assert found(None, {"meridian_traceparent": hostile}) is None


def of(said: dict[str, Any], part: str) -> float:
    """Milliseconds of a part."""
    return sum(x["ms"] for x in said["parts"] if x["part"] == part)


def test_a_request_that_nobody_knows_is_one_line(observed: Observed) -> None:
    said = observed.meridian("why", "no-such-request", "--pid", str(observed.engine.pid), ok=1)
    assert re.fullmatch(r"error: [^\n]*no-such-request: no live request has this id[^\n]*\n", said)


def test_top_fits_80_columns(observed: Observed) -> None:
    frame = observed.meridian("top", "--pid", str(observed.engine.pid)).splitlines()
    assert max(map(len, frame)) <= 80
    text = "\n".join(frame)
    for part in ("think", "TTFT first token", "dispatch balanced", "KV blocks free", "mixed step"):
        assert part in text


def test_injected_faults_fire_their_alerts(observed: Observed, hostile: Path) -> None:
    assert observed.firing() == set()
    component = hostile / "trap-later.wasm"
    token = str(observed.folder / "token")
    pid = str(observed.engine.pid)
    observed.meridian("ctl", "swap", "dispatch", str(component), "--pid", pid, "--token-file", token)
    fired = until(
        lambda: (f := observed.firing()) >= {"MeridianPolicyFaults", "MeridianPolicyQuarantined"} and f, "alerts"
    )
    assert fired <= {"MeridianPolicyFaults", "MeridianPolicyQuarantined", "MeridianFallbackDecides"}
    out = observed.folder / "swaps.json"
    # The quarantine has put the version before in its place, so there is none to return to.
    observed.meridian("ctl", "swap", "dispatch", "native:srpt", "--pid", pid, "--token-file", token)
    observed.meridian("trace", "--seconds", "1", "--out", str(out), "--pid", pid)
    assert sum(Tables(out).failures().values()) == 0


def test_recordings_give_a_timeline_and_explanations(observed: Observed) -> None:
    assert observed.engine.stdin is not None
    observed.engine.stdin.close()
    observed.engine.wait(PATIENCE)
    files = sorted(map(str, (observed.folder / "recordings").glob("*.arrow")))
    out = observed.folder / "recorded.json"
    observed.meridian("trace", "--recording", *files, "--out", str(out))
    tables = Tables(out)
    # Not of the tokens: a request that ends has its last token in a step that no later row counts.
    failures = tables.failures()
    failures.pop("no step computes more than its budget")
    assert failures == dict.fromkeys(failures, 0)
    query = "SELECT thread.name FROM thread JOIN process p USING (upid) WHERE p.name = 'requests'"
    numbers = [name.removeprefix("#") for (name,) in tables.rows(query)]
    dispatch = [x for x in files if Path(x).name.startswith("dispatch")]
    for number in numbers[5:8]:
        said = json.loads(observed.meridian("--json", "why", number, "--recording", *dispatch))
        assert abs(sum(x["ms"] for x in said["parts"]) - said["latency_ms"]) < 1e-3 * said["latency_ms"] + 1e-3
        assert said["prompt_tokens"] > 0
    said = observed.meridian("why", "16777215", "--recording", *dispatch, ok=2)
    assert "16777215: none of the" in said


def test_a_simulated_engine_gives_a_timeline(tmp_path: Path) -> None:
    out = tmp_path / "simulated.json"
    command = [sys.executable, "-m", "meridian", "bench", "replay", "--workload", "reasoning-chat"]
    command += ["--requests", "60", "--policy", "output-first", "--timeline", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    tables = Tables(out)
    assert tables.failures() == dict.fromkeys(tables.failures(), 0)
    assert tables.value("SELECT count(*) FROM slice WHERE name = 'ended'") == 60
    again = tmp_path / "again.json"
    subprocess.run([*command[:-1], str(again)], check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    assert out.read_text() == again.read_text()


def test_the_rules_do_what_their_tests_say() -> None:
    promtool = str(prometheus_folder() / "promtool")
    folder = ROOT / "deploy" / "prometheus"
    for command in (["check", "config", "prometheus.yml"], ["test", "rules", "meridian.rules.test.yml"]):
        done = subprocess.run([promtool, *command], cwd=folder, capture_output=True, text=True, env=dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
