"""One engine run in one process: drives vLLM's step loop in real time over a trace and writes what was observed.

    python -m meridian.bench.engine_run --model DIR --scenario loaded --scheduler stock --out run.json
    python -m meridian.bench.engine_run --model DIR --trace my.csv --scheduler native:output-first --out run.json \\
        --set scheduler.output_tpot_budget_ms=16
    python -m meridian.bench.engine_run --model DIR --scenario multi-turn --kv-blocks 900 --out run.json

Thinking lengths are enforced by vLLM's own thinking budget, output lengths by ``max_tokens``, sampling is greedy: the
same trace asks every scheduler for the same tokens.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import heapq
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meridian.bench.chat import (
    MULTI_TURN,
    ChatScenario,
    Template,
    Turn,
    context_needed,
    history_after,
    longest_tokens,
    next_prompt,
    sessions,
    user_ids,
)
from meridian.bench.chat import NAME as MULTI_TURN_NAME
from meridian.bench.probe import PREFILL, Observed, SchedulerProbe
from meridian.bench.report import decision_facts, summarise
from meridian.bench.workload import SCENARIOS, Scenario, TraceRequest, fit, read_trace, scenario_requests

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
RESERVED_TOKENS = 16  # of the context length: the template's tail and the end marker
MERIDIAN_CLASS = "meridian.vllm.MeridianScheduler"
PROGRESS_S = 10  # between two lines of progress of a chat
WARM_UP = ((24, 8, 8), (200, 24, 8), (900, 4, 4), (60, 16, 16), (24, 32, 24))  # prompt, think, output tokens


@dataclass(frozen=True)
class Options:
    """The engine of a run; None leaves vLLM's own default. ``settings`` are (dotted field, value) of meridian.toml."""

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
    logits_processors: tuple[str, ...] = ()


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
        config.write_text(meridian_toml(options.scheduler, options.settings))
        os.environ["MERIDIAN_CONFIG"] = str(config)
        extra["scheduler_cls"] = MERIDIAN_CLASS
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    args = EngineArgs(
        model=str(options.model),
        dtype=options.dtype,  # type: ignore[arg-type]
        max_model_len=options.max_model_len,
        block_size=options.block_size,  # type: ignore[arg-type]
        num_gpu_blocks_override=options.kv_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        enforce_eager=True,
        reasoning_parser="qwen3",
        disable_log_stats=True,
        seed=options.seed,
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


class TooLong(ValueError):
    """A turn does not fit in the engine's context; the message is for the command line."""


@dataclass(frozen=True)
class Chat:
    """The sessions of a run, and how they are played."""

    sessions: list[list[Turn]]
    preserve_thinking: bool = False
    gap_s: float = 0.0


def drive_chat(run: Run, chat: Chat, probe: SchedulerProbe, options: Options) -> tuple[list[Observed], float]:
    """Play all sessions to their end; returns the turns, session by session, and the makespan in seconds.

    All sessions start at once; of later turns, those that are due earlier come first.
    """
    turns = len(chat.sessions[0])
    needed = longest_tokens(chat.sessions, run.template, preserve_thinking=chat.preserve_thinking)
    if needed > options.max_model_len:
        raise TooLong(f"the longest turn has {needed} tokens, expected at most {options.max_model_len} in all")
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
            user = user_ids(options.seed, session, turn, planned.user_tokens, run.vocabulary)
            prompts[session] = next_prompt(histories[session], user, run.template)
            request = TraceRequest(
                round(arrival - start, 6), len(prompts[session]), planned.think_tokens, planned.answer_tokens
            )
            index = session * turns + turn
            seen = Observed(index, request, arrival, run.end_ids, session=session, turn=turn)
            observed.append(run.send(str(index), prompts[session], seen))
        if not run.engine.has_unfinished_requests():
            time.sleep(max(0.0, due[0][0] - time.perf_counter()))
            continue
        before = time.perf_counter()
        over = run.step()
        probe.step_took(time.perf_counter() - before)
        for seen in over:
            session, turn = divmod(seen.index, turns)
            if turn + 1 < turns:
                histories[session] = history_after(
                    prompts[session], seen.tokens, run.template, preserve_thinking=chat.preserve_thinking
                )
                heapq.heappush(due, (time.perf_counter() + chat.gap_s, session, turn + 1))
        if time.perf_counter() - last_said > PROGRESS_S:
            last_said = time.perf_counter()
            done = sum(o.finished is not None for o in observed)
            print(f"{done} of {turns * len(chat.sessions)} turns", file=sys.stderr, flush=True)
    return sorted(observed, key=lambda o: o.index), time.perf_counter() - start


def machine_facts() -> dict[str, Any]:
    """Versions and hardware, to be stored beside the numbers they explain."""
    import vllm

    models = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else "unknown"
    return {"vllm": vllm.__version__, "cpu": cpu, "cores": os.cpu_count(), "python": sys.version.split()[0]}


def run_once(options: Options, workload: list[TraceRequest] | Chat) -> tuple[dict[str, Any], list[Observed]]:
    """Build, warm up, drive: the run's JSON document and its requests.

    Raises:
        TooLong: a turn does not fit in the context.
    """
    run = build(options)
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
    """What is kept of a run that is over: its summary, each step's work and time, each request's times."""
    unfinished = [o.index for o in observed if o.finished is None or o.phase == PREFILL]
    if unfinished:
        raise RuntimeError(f"requests {unfinished[:8]} never finished")
    rows = [o.row() for o in observed]
    document = {
        "scheduler": options.scheduler,
        "engine": {
            **{k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
            "num_gpu_blocks": run.scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
        },
        "machine": machine_facts(),
        "summary": summarise(rows, probe, makespan_s),
        "steps": {
            "ms": [round(1e3 * s, 3) for s in probe.step_s],
            "schedule_us": [round(ns / 1e3, 1) for ns in probe.schedule_ns],
            "running": probe.running,
            "tokens": probe.scheduled_tokens,
            "output_requests": probe.output_scheduled,
            "requests": probe.step_requests,
            "context_tokens": probe.context_tokens,
            "attention_pairs": probe.attention_pairs,
            "arrivals": probe.arrivals,
            "arrivals_ms": [round(1e3 * s, 3) for s in probe.arrivals_s],
        },
        "rows": rows,
    }
    if options.scheduler != STOCK:
        stats = run.scheduler.meridian_stats()
        document["meridian"] = stats
        document["summary"] |= decision_facts(stats)
        if "kv" in stats:
            document["kv"] = stats["kv"]
    return document


def setting(text: str) -> tuple[str, str]:
    """Parse ``section.key=value``."""
    dotted, eq, value = text.partition("=")
    if not eq or "." not in dotted:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected section.key=value")
    return dotted, value


def engine_defaults(scenario: str) -> Scenario | ChatScenario:
    """The scenario's constants: engine, settings and what it is about."""
    return MULTI_TURN if scenario == MULTI_TURN_NAME else SCENARIOS[scenario]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; engine flags default to the scenario's constants."""
    p = argparse.ArgumentParser(prog="engine_run", description=(__doc__ or "").partition("\n")[0])
    p.add_argument("--model", type=Path, required=True, metavar="DIR")
    names = (*sorted(SCENARIOS), MULTI_TURN_NAME)
    p.add_argument("--scenario", choices=names, default="loaded", help="requests, and engine defaults")
    p.add_argument("--trace", type=Path, metavar="FILE", help="CSV or JSONL requests instead of generated ones")
    p.add_argument("--limit", type=int, help="use only the first N requests of the trace")
    p.add_argument("--scale-tokens", type=float, default=1.0, help="multiply every length (default 1)")
    p.add_argument("--scale-time", type=float, default=1.0, help="multiply every arrival time (default 1)")
    p.add_argument("--sessions", type=int, default=MULTI_TURN.sessions, help="multi-turn: chat sessions")
    p.add_argument("--turns", type=int, default=MULTI_TURN.turns, help="multi-turn: turns of each session")
    p.add_argument(
        "--context-tokens", type=int, default=MULTI_TURN.context_tokens, help="multi-turn: first turn's more"
    )
    p.add_argument("--gap-s", type=float, default=0.0, help="multi-turn: time from an answer to the next turn")
    p.add_argument("--preserve-thinking", action="store_true", help="multi-turn: the history keeps the thinking")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--scheduler", default=STOCK, help="stock, native:NAME or PATH.wasm")
    p.add_argument("--set", type=setting, action="append", default=[], metavar="SECTION.KEY=VALUE", dest="settings")
    for flag in ("kv-blocks", "block-size", "max-num-seqs", "max-num-batched-tokens", "max-model-len"):
        p.add_argument(f"--{flag}", type=int)
    p.add_argument("--mode", choices=("realtime", "all-at-once"), default="realtime")
    # In bfloat16 the sums of a batch of one and of many round differently, and greedy outputs part sooner or later.
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32 to compare outputs")
    p.add_argument("--greedy-outputs", type=Path, metavar="FILE", help="write every request's token ids as JSON")
    p.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    a = p.parse_args(argv)
    if a.scenario == MULTI_TURN_NAME and a.trace:
        p.error("--trace: a trace has no sessions, expected another --scenario than multi-turn")
    if min(a.sessions, a.turns) < 1 or min(a.context_tokens, a.gap_s) < 0:
        p.error("--sessions, --turns: expected at least 1; --context-tokens, --gap-s: expected at least 0")
    return a


def chat_of(a: argparse.Namespace) -> tuple[Chat, dict[str, Any]]:
    """The chat sessions that the command line asks for, and what is to be stored of them."""
    planned = sessions(a.seed, a.sessions, a.turns, user_tokens=MULTI_TURN.user_tokens, context_tokens=a.context_tokens)
    facts = {k: getattr(a, k) for k in ("sessions", "turns", "context_tokens", "gap_s", "preserve_thinking")}
    return Chat(planned, a.preserve_thinking, a.gap_s), {"requests": a.sessions * a.turns, "clipped": 0, **facts}


def trace_of(a: argparse.Namespace, max_model_len: int) -> tuple[list[TraceRequest], dict[str, Any]]:
    """The requests that the command line asks for, and what is to be stored of them.

    Raises:
        OSError, ValueError: the trace cannot be read.
    """
    trace = read_trace(a.trace) if a.trace else scenario_requests(a.scenario, a.seed)
    longest = max_model_len - RESERVED_TOKENS
    trace, clipped = fit(trace[: a.limit], longest, scale_tokens=a.scale_tokens, scale_time=a.scale_time)
    facts = {"requests": len(trace), "clipped": clipped}
    return trace, {**facts, "scale_tokens": a.scale_tokens, "scale_time": a.scale_time}


def main(argv: list[str] | None = None) -> int:
    """Command line; exit code 2 with one line on a bad trace or a missing file."""
    a = parse(argv)
    scenario = engine_defaults(a.scenario)
    settings = scenario.settings
    engine = {
        k: getattr(scenario, k) if getattr(a, k) is None else getattr(a, k)
        for k in ("kv_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    }
    workload: list[TraceRequest] | Chat
    try:
        if a.scheduler.endswith(".wasm") and not Path(a.scheduler).is_file():
            raise FileNotFoundError(f"policy {a.scheduler}: no such file")
        if a.scenario == MULTI_TURN_NAME:
            workload, facts = chat_of(a)
            settings += (("model.strips_reasoning", str(not a.preserve_thinking).lower()),)
            if engine["max_model_len"] is None:
                engine["max_model_len"] = context_needed(workload.sessions, preserve_thinking=a.preserve_thinking)
        else:
            workload, facts = trace_of(a, engine["max_model_len"])
    except (OSError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    options = Options(
        a.model,
        a.scheduler,
        # A setting given twice takes its last value.
        settings=(*settings, *a.settings),
        seed=a.seed,
        dtype=a.dtype,
        realtime=a.mode == "realtime",
        **engine,
    )
    try:
        document, observed = run_once(options, workload)
    except TooLong as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    source = str(a.trace) if a.trace else f"scenario {a.scenario}, seed {a.seed}"
    document["workload"] = {"source": source, **facts}
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(document))
    if a.greedy_outputs:
        a.greedy_outputs.write_text(json.dumps({o.index: o.tokens for o in observed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
