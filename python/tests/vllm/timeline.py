"""Checks a timeline of `meridian trace` by SQL, over tables like those of Perfetto's trace_processor, in SQLite: slice,
thread_track, thread, process, args, counter and counter_track."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE process (upid INTEGER PRIMARY KEY, pid INTEGER, name TEXT);
CREATE TABLE thread (utid INTEGER PRIMARY KEY, tid INTEGER, name TEXT, upid INTEGER);
CREATE TABLE thread_track (id INTEGER PRIMARY KEY, utid INTEGER, name TEXT);
CREATE TABLE slice (id INTEGER PRIMARY KEY, ts INTEGER, dur INTEGER, track_id INTEGER, category TEXT, name TEXT,
                    depth INTEGER, arg_set_id INTEGER);
CREATE TABLE args (arg_set_id INTEGER, key TEXT, string_value TEXT, int_value INTEGER, real_value REAL);
CREATE TABLE counter_track (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE counter (ts INTEGER, track_id INTEGER, value REAL);
CREATE INDEX slice_by_track ON slice (track_id, ts);
CREATE INDEX slice_by_category ON slice (category, ts);
CREATE INDEX args_by_set ON args (arg_set_id, key);
"""

TRACKS = """(SELECT t.id AS id, h.name AS name, p.name AS process FROM thread_track t
  JOIN thread h USING (utid) JOIN process p USING (upid))"""
ARG = "(SELECT {value} FROM args a WHERE a.arg_set_id = s.arg_set_id AND a.key = 'args.{name}')"


def arg(name: str, value: str = "int_value") -> str:
    """The value of an argument of the slice `s`."""
    return ARG.format(name=name, value=value)


# What must hold: each query counts what contradicts it.
CHECKS = {
    "no span overlaps another on its track": """
        SELECT count(*) FROM (SELECT ts, max(ts + dur) OVER (PARTITION BY track_id ORDER BY ts, dur
          ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM slice WHERE dur > 0) WHERE before > ts""",
    "no span lies inside another on its track": "SELECT count(*) FROM slice WHERE depth > 0",
    "every decision lies inside one step": f"""
        SELECT count(*) FROM slice d JOIN {TRACKS} t ON d.track_id = t.id
        WHERE t.name LIKE '% slot' AND d.category IN ('decision', 'fault')
          AND d.ts >= (SELECT min(s.ts) FROM slice s WHERE s.category = 'step')
          AND d.ts < (SELECT max(s.ts + s.dur) FROM slice s WHERE s.category = 'step')
          AND NOT (SELECT d.ts + max(d.dur, 0) <= s.ts + s.dur FROM slice s
                   WHERE s.category = 'step' AND s.ts <= d.ts ORDER BY s.ts DESC LIMIT 1)""",
    "every plan keeps to the engine's token budget": f"""
        SELECT count(*) FROM slice s WHERE s.category = 'step'
          AND {arg("token_budget")} > {arg("engine_token_budget")}""",
    "no step computes more than its budget": f"""
        SELECT count(*) FROM slice s WHERE s.category = 'step'
          AND {arg("decode_tokens")} + {arg("prefill_tokens")} - {arg("probe_tokens")} > {arg("token_budget")}""",
    "every step has its measured time": f"""
        SELECT count(*) FROM slice s WHERE s.category = 'step'
          AND abs({arg("measured_ms", "coalesce(real_value, int_value)")} * 1e6 - s.dur) > 1000""",
    "every wait has a cause": f"""
        SELECT count(*) FROM slice s WHERE s.category = 'wait' AND coalesce({arg("why", "string_value")}, '') = ''
          AND s.ts > (SELECT min(x.ts) FROM slice x WHERE x.category = 'step')
          AND s.ts + s.dur <= (SELECT max(x.ts) FROM slice x WHERE x.category = 'step')""",
    "every request that runs was admitted once before": f"""
        SELECT count(*) FROM (SELECT track_id FROM slice s JOIN {TRACKS} t ON s.track_id = t.id
          WHERE t.process = 'requests' AND s.category = 'run' AND s.name IN ('thinking', 'output')
            AND s.ts > (SELECT min(x.ts) FROM slice x)
            AND NOT EXISTS (SELECT 1 FROM slice p WHERE p.track_id = s.track_id AND p.ts <= s.ts
                            AND p.name IN ('prefill', 'recompute', 'thinking', 'output') AND p.id != s.id))""",
}


class Tables:
    """The tables of a timeline."""

    def __init__(self, path: Path) -> None:
        self._database = loaded(json.loads(path.read_text())["traceEvents"])

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._database.execute(query).fetchall()

    def value(self, query: str) -> Any:
        """The one value of a query."""
        return self.rows(query)[0][0]

    def failures(self) -> dict[str, int]:
        """How much contradicts each check."""
        return {name: int(self.value(query)) for name, query in CHECKS.items()}


def nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def loaded(events: Iterable[dict[str, Any]]) -> sqlite3.Connection:
    """Chrome's events in the tables of trace_processor.

    Raises:
        ValueError: an event that is none of those that `meridian trace` writes.
    """
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    processes: dict[int, int] = {}
    threads: dict[tuple[int, int], int] = {}
    counters: dict[str, int] = {}

    def process(pid: int) -> int:
        if pid not in processes:
            processes[pid] = len(processes) + 1
            database.execute("INSERT INTO process VALUES (?, ?, NULL)", (processes[pid], pid))
        return processes[pid]

    def thread(pid: int, tid: int) -> int:
        if (pid, tid) not in threads:
            utid = threads[pid, tid] = len(threads) + 1
            database.execute("INSERT INTO thread VALUES (?, ?, NULL, ?)", (utid, tid, process(pid)))
            database.execute("INSERT INTO thread_track VALUES (?, ?, NULL)", (utid, utid))
        return threads[pid, tid]

    slices = []
    for event in events:
        kind = event["ph"]
        if kind == "M" and event["name"] == "process_name":
            database.execute(
                "UPDATE process SET name = ? WHERE upid = ?", (event["args"]["name"], process(event["pid"]))
            )
        elif kind == "M" and event["name"] == "thread_name":
            utid = thread(event["pid"], event["tid"])
            database.execute("UPDATE thread SET name = ? WHERE utid = ?", (event["args"]["name"], utid))
        elif kind == "C":
            for key, value in event["args"].items():
                name = f"{event['name']} {key}"
                if name not in counters:
                    counters[name] = len(counters) + 1
                    database.execute("INSERT INTO counter_track VALUES (?, ?)", (counters[name], name))
                row = (nanoseconds(event["ts"]), counters[name], value)
                database.execute("INSERT INTO counter VALUES (?, ?, ?)", row)
        elif kind in ("X", "i"):
            track = thread(event["pid"], event["tid"])
            duration = nanoseconds(event["dur"]) if kind == "X" else 0
            slices.append((nanoseconds(event["ts"]), duration, track, event))
        else:
            raise ValueError(f"{event}: an event of kind {kind!r}")
    slices.sort(key=lambda x: (x[2], x[0], -x[1]))
    ends: list[int] = []
    latest = None
    for number, (ts, duration, track, event) in enumerate(slices, 1):
        if track != latest:
            ends, latest = [], track
        while ends and ends[-1] <= ts:
            ends.pop()
        row = (number, ts, duration, track, event["cat"], event["name"], len(ends), number)
        database.execute("INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        ends.append(ts + duration)
        for key, value in flat(event["args"], "args"):
            kinds = (
                value if isinstance(value, str) else None,
                value if isinstance(value, int) else None,
                value if isinstance(value, float) else None,
            )
            database.execute("INSERT INTO args VALUES (?, ?, ?, ?, ?)", (number, key, *kinds))
    database.commit()
    return database


def flat(value: Any, key: str) -> Iterable[tuple[str, Any]]:
    """The leaves of an argument with their dotted keys."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}")
    elif value is not None:
        yield key, value
