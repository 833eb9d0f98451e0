"""One engine run in one process: drives vLLM's step loop in real time over a list of requests and writes what it saw.

    python -m meridian.vllm.bench JOB.json OUT.json

`meridian bench vllm` writes the job and reads what comes out. Thinking lengths are enforced by vLLM's own thinking
budget, output lengths by ``max_tokens``, sampling is greedy: the same requests ask every scheduler for the same tokens.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import gc
import heapq
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from meridian.vllm.bench.history import Template, history_after, next_prompt, user_ids
from meridian.vllm.bench.no_model import without_model
from meridian.vllm.bench.probe import PREFILL, Observed, SchedulerProbe
from meridian.vllm.bench.request import TraceRequest, request_of

# One process and one OpenMP thread: on few cores, vLLM's default thread binding makes generation ten times slower.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
STOCK = "stock"
MERIDIAN_CLASS = "meridian.vllm.MeridianScheduler"
PROGRESS_S = 10  # between two lines of progress of a chat
WARM_UP = ((24, 8, 8), (200, 24, 8), (900, 4, 4), (60, 16, 16), (24, 32, 24))  # prompt, think, output tokens


@dataclass(frozen=True)
class Options:
    """The engine of a run; None leaves vLLM's own default.

    ``meridian_toml`` is the configuration of a scheduler that is not stock; without it ``settings`` make one, as
    (dotted field, value).
    """

    model: Path
    scheduler: str = STOCK
    kv_blocks: int | None = None
    block_size: int = 32
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    dtype: str = "bfloat16"
    settings: tuple[tuple[str, str], ...] = ()
    seed: int = 0
    realtime: bool = True
    meridian_toml: str | None = None
    no_model: bool = False
    logits_processors: tuple[str, ...] = ()
    scheduling_policy: str = "fcfs"
    kv_transfer_config: dict[str, Any] | None = None


def toml_value(text: str) -> str:
    """A command line value as TOML: a boolean, a number or an inline table stays, anything else is a string."""
    if text in ("true", "false") or text[:1] in ('"', "[", "{"):
        return text
    try:
        float(text)
    except ValueError:
        return json.dumps(text)
    return text


def meridian_toml(scheduler: str, settings: tuple[tuple[str, str], ...]) -> str:
    """The text of a meridian.toml that selects ``scheduler`` for dispatch. A relative .wasm path is made absolute."""
    source = scheduler if ":" in scheduler else str(Path(scheduler).resolve())
    tables: dict[str, dict[str, str]] = {"policy.dispatch": {"source": json.dumps(source)}}
    for dotted, value in settings:
        table, _, key = dotted.rpartition(".")
        tables.setdefault(table, {})[key] = toml_value(value)
    return "\n".join(f"[{t}]\n" + "".join(f"{k} = {v}\n" for k, v in kv.items()) for t, kv in tables.items())


@dataclass
class Run:
    """A built engine and what is observed of it."""

    engine: Any
    scheduler: Any
    vocabulary: range
    template: Template
    tokens_before_think: int
    seen: dict[str, Observed] = field(default_factory=dict)
    by_name: dict[str, Observed] = field(default_factory=dict)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The end marker."""
        return self.template.think_end

    def add(self, name: str, request: TraceRequest, index: int, arrival: float, rng: random.Random) -> Observed:
        """Send one request: random token ids that end with the template's generation prompt."""
        tail = self.template.tail
        body = [rng.choice(self.vocabulary) for _ in range(max(0, request.prompt_tokens - len(tail)))]
        return self.send(name, [*body, *tail], Observed(index, request, arrival, self.end_ids))

    def send(self, name: str, prompt: Sequence[int], observed: Observed) -> Observed:
        """Send one request whose prompt ends with the template's tail."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = observed.planned
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=request.think_tokens + len(self.end_ids) + request.output_tokens,
            # vLLM counts from the start marker, so what the template put behind it is part of the budget.
            thinking_token_budget=request.think_tokens + self.tokens_before_think,
            output_kind=RequestOutputKind.DELTA,
            extra_args=client_facts(request),
        )
        self.by_name[name] = observed
        engine_id = self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, params, priority=request.priority)
        self.seen[engine_id] = observed
        return observed

    def step(self) -> list[Observed]:
        """One engine step; hands the delivered tokens to their requests and returns those that are now over."""
        outputs = self.engine.step()
        now = time.perf_counter()
        over = []
        for out in outputs:
            observed = self.by_name[out.request_id]
            observed.deliver(out.outputs[0].token_ids, now)
            if out.finished:
                observed.finished = now
                over.append(observed)
        return over


def client_facts(request: TraceRequest) -> dict[str, Any] | None:
    """What a client of Meridian may say of a request, as its ``vllm_xargs``."""
    given: dict[str, Any] = {"meridian_tenant": request.tenant} if request.tenant else {}
    if request.deadline_ms is not None:
        given["meridian_deadline_ms"] = request.deadline_ms
    return given or None


def build(options: Options) -> Run:
    """Build the engine in this process. Sets environment variables: call it before anything imports vLLM."""
    os.environ.update(ENVIRONMENT)
    extra: dict[str, Any] = {}
    if options.scheduler != STOCK:
        folder = tempfile.mkdtemp(prefix="meridian-bench-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        config = Path(folder) / "meridian.toml"
        config.write_text(options.meridian_toml or meridian_toml(options.scheduler, options.settings))
        os.environ["MERIDIAN_CONFIG"] = str(config)
        extra["scheduler_cls"] = MERIDIAN_CLASS
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    if not any(options.model.glob("*.safetensors")) and not any(options.model.glob("*.bin")):
        # A folder without weights: vLLM makes random ones.
        extra["load_format"] = "dummy"
    if options.kv_transfer_config is not None:
        extra["kv_transfer_config"] = KVTransferConfig(**options.kv_transfer_config)
    args = EngineArgs(
        model=str(options.model),
        dtype=options.dtype,  # type: ignore[arg-type]
        max_model_len=options.max_model_len,
        block_size=options.block_size,  # type: ignore[arg-type]
        num_gpu_blocks_override=options.kv_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        # On a CPU, compiling would take longer than the run.
        enforce_eager=current_platform.is_cpu(),
        reasoning_parser="qwen3",
        disable_log_stats=True,
        seed=options.seed,
        scheduling_policy=options.scheduling_policy,  # type: ignore[arg-type]
        logits_processors=list(options.logits_processors) or None,
        **extra,
    )
    engine: Any = LLMEngine.from_engine_args(args)
    tokenizer = engine.get_tokenizer()
    chat = [{"role": "user", "content": "x"}]
    plain = tokenizer.apply_chat_template(chat, tokenize=False)
    tail_text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)[len(plain) :]
    if "<think>" not in tail_text:
        tail_text += "<think>\n"
    opening, marker, behind = tail_text.rpartition("<think>")

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    template = Template(ids(opening), ids(marker + behind), ids("</think>"))
    # The lowest ids are special tokens in the bundled model, the highest are the markers in every Qwen3 vocabulary.
    vocabulary = range(16, min(2000, len(tokenizer) - 64))
    return Run(engine, engine.engine_core.engine_core.scheduler, vocabulary, template, len(ids(behind)))


def warm_up(run: Run, max_model_len: int) -> None:
    """A few short requests, so that allocations, kernels and learned step times are past their first use."""
    rng = random.Random(0)
    for i, (prompt, think, output) in enumerate(WARM_UP):
        request = TraceRequest(0.0, min(prompt, max_model_len // 2), think, output)
        run.add(f"warm-{i}", request, -1, time.perf_counter(), rng)
    while run.engine.has_unfinished_requests():
        run.step()
    run.seen.clear()
    run.by_name.clear()
    # A collection over vLLM's many import-time objects costs tens of ms, in whichever step it happens to fall.
    gc.collect()
    gc.freeze()


def drive(run: Run, trace: list[TraceRequest], probe: SchedulerProbe, options: Options) -> tuple[list[Observed], float]:
    """Run the trace to its end; returns the requests in trace order and the makespan in seconds."""
    rng = random.Random(options.seed)
    observed: list[Observed] = []
    start = time.perf_counter()
    while len(observed) < len(trace) or run.engine.has_unfinished_requests():
        now = time.perf_counter()
        before_arrivals = len(observed)
        while len(observed) < len(trace):
            request, index = trace[len(observed)], len(observed)
            due = start + (request.arrival_s if options.realtime else 0.0)
            if due > now:
                break
            observed.append(run.add(str(index), request, index, due, rng))
        if not run.engine.has_unfinished_requests():
            time.sleep(max(0.0, start + trace[len(observed)].arrival_s - time.perf_counter()))
            continue
        before = time.perf_counter()
        run.step()
        probe.step_took(time.perf_counter() - before, len(observed) - before_arrivals, before - now)
    return observed, time.perf_counter() - start


@dataclass(frozen=True)
class Chat:
    """Conversations, each the list of its turns, and how they are played."""

    sessions: list[list[TraceRequest]]
    preserve_thinking: bool = False
    gap_s: float = 0.0


def chat_of(requests: Sequence[TraceRequest], *, preserve_thinking: bool, gap_s: float) -> Chat:
    """The conversations that these turns belong to, in the order in which they first appear."""
    sessions: dict[int | None, list[TraceRequest]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    return Chat(list(sessions.values()), preserve_thinking, gap_s)


def drive_chat(run: Run, chat: Chat, probe: SchedulerProbe, options: Options) -> tuple[list[Observed], float]:
    """Play all sessions to their end; returns the turns, session by session, and the makespan in seconds.

    All sessions start at once; of later turns, those that are due earlier come first. A prompt is as long as planned:
    what its user says is what the history and the template leave of it.
    """
    count = sum(map(len, chat.sessions))
    first = [sum(map(len, chat.sessions[:i])) for i in range(len(chat.sessions))]
    observed: list[Observed] = []
    prompts: dict[int, tuple[int, ...]] = {}
    histories: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(chat.sessions)), ())
    start = time.perf_counter()
    due = [(start, session, 0) for session in histories]
    last_said = start
    while due or run.engine.has_unfinished_requests():
        while due and due[0][0] <= time.perf_counter():
            arrival, session, turn = heapq.heappop(due)
            planned = chat.sessions[session][turn]
            said = max(1, planned.prompt_tokens - len(histories[session]) - len(run.template.tail))
            user = user_ids(options.seed, session, turn, said, run.vocabulary)
            prompts[session] = next_prompt(histories[session], user, run.template)
            arrived = round(arrival - start, 6)
            request = replace(planned, arrival_s=arrived, prompt_tokens=len(prompts[session]))
            index = first[session] + turn
            seen = Observed(index, request, arrival, run.end_ids, session=session, turn=turn)
            observed.append(run.send(str(index), prompts[session], seen))
        if not run.engine.has_unfinished_requests():
            time.sleep(max(0.0, due[0][0] - time.perf_counter()))
            continue
        before = time.perf_counter()
        over = run.step()
        probe.step_took(time.perf_counter() - before)
        for seen in over:
            session, turn = seen.session, seen.turn
            assert session is not None
            assert turn is not None
            if turn + 1 < len(chat.sessions[session]):
                histories[session] = history_after(
                    prompts[session], seen.tokens, run.template, preserve_thinking=chat.preserve_thinking
                )
                heapq.heappush(due, (time.perf_counter() + chat.gap_s, session, turn + 1))
        if time.perf_counter() - last_said > PROGRESS_S:
            last_said = time.perf_counter()
            done = sum(o.finished is not None for o in observed)
            print(f"{done} of {count} turns", file=sys.stderr, flush=True)
    return sorted(observed, key=lambda o: o.index), time.perf_counter() - start


def machine_facts() -> dict[str, Any]:
    """Versions and hardware, to be stored beside the numbers they explain."""
    import vllm

    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else "unknown"
    return {"vllm": vllm.__version__, "cpu": cpu, "cores": os.cpu_count(), "python": sys.version.split()[0]}


def run_once(options: Options, workload: list[TraceRequest] | Chat) -> tuple[dict[str, Any], list[Observed]]:
    """Build, warm up, drive: the run's JSON document and its requests."""
    run = build(options)
    if options.no_model:
        without_model(run, options.seed)
    warm_up(run, options.max_model_len)
    probe = SchedulerProbe(run.scheduler, run.seen)
    if isinstance(workload, Chat):
        observed, makespan_s = drive_chat(run, workload, probe, options)
    else:
        observed, makespan_s = drive(run, workload, probe, options)
    return document_of(run, options, observed, probe, makespan_s), observed


def document_of(
    run: Run, options: Options, observed: list[Observed], probe: SchedulerProbe, makespan_s: float
) -> dict[str, Any]:
    """What is kept of a run that is over: each step's work and time, each request's times, what the scheduler did.

    Raises:
        RuntimeError: a request never finished.
    """
    unfinished = [o.index for o in observed if o.finished is None or o.phase == PREFILL]
    if unfinished:
        raise RuntimeError(f"requests {unfinished[:8]} never finished")
    document = {
        "scheduler": options.scheduler,
        "engine": {
            **{k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "num_gpu_blocks": run.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        },
        "machine": machine_facts(),
        "makespan_s": makespan_s,
        "steps": probe.steps(),
        "counts": probe.counts(),
        "rows": [o.row() for o in observed],
    }
    if options.scheduler != STOCK:
        document["meridian"] = run.scheduler.meridian_stats()
    return document


def setting(text: str) -> tuple[str, str]:
    """Parse ``section.key=value``."""
    dotted, eq, value = text.partition("=")
    if not eq or "." not in dotted:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected section.key=value")
    return dotted, value


def end_with_parent() -> None:
    """An engine whose command was ended would keep a core busy: it ends with it, where the system can see to that."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def options_of(job: Mapping[str, Any]) -> Options:
    """The engine that a job asks for."""
    size = ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    return Options(
        Path(job["model"]),
        job["scheduler"],
        settings=tuple((field, value) for field, value in job["settings"]),
        seed=job["seed"],
        dtype=job["dtype"],
        realtime=job["realtime"],
        meridian_toml=job["meridian_toml"],
        no_model=job["no_model"],
        **{name: job[name] for name in size},
    )


def main(argv: Sequence[str]) -> int:
    """`python -m meridian.vllm.bench JOB.json OUT.json`."""
    p = argparse.ArgumentParser(prog="meridian.vllm.bench", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("job", type=Path, metavar="JOB.json")
    p.add_argument("out", type=Path, metavar="OUT.json")
    a = p.parse_args(argv)
    end_with_parent()
    if importlib.util.find_spec("vllm") is None:
        print("error: vLLM is not installed beside this Python", file=sys.stderr)
        return 1
    job = json.loads(a.job.read_text())
    workload: list[TraceRequest] | Chat = [request_of(row) for row in job["requests"]]
    if any(request.session is not None for request in workload):
        workload = chat_of(workload, preserve_thinking=job["preserves_thinking"], gap_s=job["gap_s"])
    document, observed = run_once(options_of(job), workload)
    if job["keeps_outputs"]:
        document["outputs"] = [o.tokens for o in observed]
    a.out.write_text(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
