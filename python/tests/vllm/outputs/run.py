#!/usr/bin/env python3
"""Runs the equality suite and writes a JSON list: name, group, ways and the first difference of each situation.

run.py --out FILE
run.py --out FILE --engine plain --way HTTP     # some of it
run.py --out FILE --against stock               # stock vLLM twice: what is not deterministic by itself
run.py --out FILE --engine sampled              # 200,000 sampled tokens, which are not in the suite
run.py --out FILE --engine "long thought"       # a thought of 33,000 tokens, likewise
run.py --out FILE --runner v2                   # on Model Runner V2, each engine one way: interpreted kernels are slow

A side is stock vLLM or vLLM with both classes of Meridian, an empty folder as working directory and home, a run folder
of its own, and no MERIDIAN_CONFIG. `compare.py` says what is equal.

This process imports vLLM once and forks one process for each engine, way and side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from outputs.situations import Situation

TESTS = Path(__file__).resolve().parents[1]
# A script's own folder comes first, and its modules have the names of others.
sys.path[:1] = [str(TESTS), str(TESTS.parents[2])]

# One OpenMP thread an engine: sides run beside each other, and a sum in one thread has one order.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Of vLLM's helpers: compiling that for log probabilities takes a dozen seconds a process.
    "TORCHDYNAMO_DISABLE": "1",
    # Of drafts from n-grams, and of sounds: likewise.
    "NUMBA_DISABLE_JIT": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine and its worker are one process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    # A server with /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
}
PRELOADED = (
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen3",
)
# The folder of a run: what each process wrote.
LOG, ANSWERS = "log.txt", "answers.json"
# vLLM's model runners.
V1, V2 = RUNNERS = ("v1", "v2")


@dataclass(frozen=True)
class Job:
    """One engine process."""

    engine: str
    way: str
    side: str
    folder: Path
    runner: str

    def situations(self) -> list[Situation]:
        """Those of its engine, way and model runner."""
        from outputs.situations import of

        return [x for x in of(self.engine, self.way) if self.runner == V1 or x.is_for_runner_v2]


def _work(job: Job) -> None:
    """In the process of an engine: play its situations."""
    from checks.engine import cpu
    from outputs.engines import Http, Offline, Sessions
    from outputs.situations import BOTH_HTTP, ENGINES, HTTP_ASYNC, OFFLINE_ASYNC

    cpu.install(asynchronous=job.way in (OFFLINE_ASYNC, HTTP_ASYNC))
    engine = ENGINES[job.engine]
    make = Http if job.way in BOTH_HTTP else Sessions if engine.has_sessions else Offline
    started = time.monotonic()
    made = make(engine, job.side)
    print(f"outputs: started in {time.monotonic() - started:.1f} s", flush=True)
    answers: dict[str, Any] = {}
    try:
        for situation in job.situations():
            started = time.monotonic()
            answers[situation.name] = made.play(situation)
            print(f"outputs: {situation.name}: {time.monotonic() - started:.2f} s", flush=True)
    finally:
        (job.folder / ANSWERS).write_text(json.dumps(answers))
        made.close()


def _child(job: Job) -> NoReturn:
    """A process with surroundings of its own."""
    status = 1
    # A short path, for its sockets.
    run = tempfile.mkdtemp(prefix="m", dir="/tmp")
    try:
        empty = job.folder / "empty"
        empty.mkdir(parents=True)
        for path, number in ((os.devnull, 0), (str(job.folder / LOG), 1), (str(job.folder / LOG), 2)):
            opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, number)
            os.close(opened)
        os.chdir(empty)
        os.environ |= {"HOME": str(empty), "XDG_RUNTIME_DIR": run}
        if job.side == "stock":
            os.environ["VLLM_PLUGINS"] = ""
        _work(job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        shutil.rmtree(run, ignore_errors=True)
        os._exit(status)


def run_jobs(jobs: list[Job], at_once: int, say: Callable[[str], None]) -> None:
    """Fork a process a job, so many at once."""
    from checks import started

    waiting, running = list(jobs), dict[int, tuple[Job, float]]()
    while waiting or running:
        while waiting and len(running) < at_once:
            job = waiting.pop(0)
            started.count()
            pid = os.fork()
            if not pid:
                _child(job)
            running[pid] = job, time.monotonic()
        pid, status = os.wait()
        if pid in running:
            job, since = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            took = time.monotonic() - since
            say(f"{job.engine}, {job.way}, {job.side}: {took:.1f} s" + (f", ended with {code}" if code else ""))


def _answers(job: Job) -> dict[str, Any]:
    """The answers of a process, by situation; each situation that it did not reach has the end of its log."""
    path = job.folder / ANSWERS
    found = json.loads(path.read_text()) if path.exists() else {}
    log = (job.folder / LOG).read_text().splitlines() if (job.folder / LOG).exists() else []
    failed = f"{job.side} did not come to it, see {job.folder / LOG}: " + " | ".join(log[-3:])
    return {x.name: found.get(x.name, failed) for x in job.situations()}


def compare(pairs: list[tuple[Job, Job]]) -> list[dict[str, Any]]:
    """A row a situation: its ways, and the first difference of each way that has one."""
    from outputs.compare import first_difference
    from outputs.situations import EVERY

    rows: dict[str, dict[str, Any]] = {
        x.name: {"name": x.name, "group": x.group, "ways": [], "differences": {}} for x in EVERY
    }
    for one, other in pairs:
        expected, found = _answers(one), _answers(other)
        for name in expected:
            way = f"{one.engine}, {one.way}"
            rows[name]["ways"].append(way)
            if isinstance(expected[name], str) or isinstance(found[name], str):
                rows[name]["differences"][way] = next(
                    str(x) for x in (expected[name], found[name]) if isinstance(x, str)
                )
            elif (difference := first_difference(expected[name], found[name])) is not None:
                rows[name]["differences"][way] = difference
    return [row | {"equal": not row["differences"]} for row in rows.values() if row["ways"]]


def prepare(runner: str) -> None:
    """Before the first fork: the environment of an engine, the models, and the import of vLLM."""
    for name in [
        x for x in os.environ if x.startswith(("MERIDIAN_CONFIG", "VLLM_", "XDG_CONFIG")) and x != "VLLM_CACHE_ROOT"
    ]:
        del os.environ[name]
    os.environ |= ENVIRONMENT

    from outputs import models

    if runner == V2:
        from checks.engine import cpu

        cpu.use_runner_v2()

    for name in models.NAMES:
        models.folder(name)
    # The children know the models by this folder, and their home is another.
    os.environ.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    for name in PRELOADED:
        import_module(name)


def main() -> int:
    """Command line; the exit code is 0 also if situations differ."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True, help="write the rows to this file")
    p.add_argument("--engine", action="append", help="only this engine of situations.py; may be given again")
    p.add_argument("--way", action="append", help="only this way; may be given again")
    p.add_argument("--part", choices=("core", "others"), help="the engines and ways of `make test`, or the others")
    p.add_argument("--runner", choices=RUNNERS, default=V1, help="vLLM's model runner, of both sides")
    p.add_argument("--against", choices=("meridian", "stock"), default="meridian", help="the other side")
    p.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="engines at once")
    p.add_argument("--keep", type=Path, help="keep logs and answers in this folder")
    a = p.parse_args()
    prepare(a.runner)
    from outputs import situations

    keep = a.keep or Path(tempfile.mkdtemp(prefix="outputs"))
    pairs: list[tuple[Job, Job]] = []
    for engine, way in situations.jobs():
        is_chosen = engine in a.engine if a.engine else engine not in situations.LONGER_ENGINES
        ways = a.way or (situations.WAYS if a.runner == V1 else situations.way_of_runner_v2(engine))
        if not is_chosen or way not in ways:
            continue
        if a.part and ((engine, way) in situations.CORE) != (a.part == "core"):
            continue
        at = keep.resolve() / f"{len(pairs):02}"
        sides = (("stock", "a"), (a.against, "b"))
        one, other = (Job(engine, way, side, at / folder, a.runner) for side, folder in sides)
        pairs.append((one, other))
    started = time.monotonic()
    run_jobs([job for pair in pairs for job in pair], a.jobs, lambda text: print(text, file=sys.stderr, flush=True))
    rows = compare(pairs)
    a.out.write_text(json.dumps(rows, indent=1) + "\n")
    differing = [row["name"] for row in rows if not row["equal"]]
    print(f"{len(rows)} situations, {len(differing)} differ, {time.monotonic() - started:.0f} s, logs in {keep}")
    for name in differing:
        print(f"  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
