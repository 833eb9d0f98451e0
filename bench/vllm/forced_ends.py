"""Do forced endings land exactly where they are meant to, in the real engine, when it schedules ahead and preempts?

    python bench/vllm/forced_ends.py --requests 1000
    python bench/vllm/forced_ends.py --requests 1000 --scheduling async --marker "so much for that"
    python bench/vllm/forced_ends.py --requests 1000 --speculate draft

Requests of every kind come together into an engine that is short of KV blocks: think budgets, budgets that change
while the request thinks, interrupt patterns, ends of sequence inside the thinking, and requests with nothing set. The
model has random weights and never ends its thinking by itself; what it must generate is known to the token.

vLLM turns asynchronous scheduling off on CPU. With `--scheduling async` this script turns it on again, with the real
`AsyncScheduler` and model runner: step n + 1 is scheduled before the tokens of step n are known. Only CUDA's streams
and events are made up, as vLLM's own CPU model runner makes them up; there is no GPU here.

With `--speculate`, vLLM proposes tokens by looking up n-grams of the request, or with a draft model. This draft model
is the model itself, so that vLLM accepts all its drafts unless an ending is forced.

Prints one JSON object; exit code 0 only when every ending is exact.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir
from meridian.vllm.bench.run import ENVIRONMENT, MERIDIAN_CLASS

KINDS = ("budget", "changed", "pattern", "eos", "free")
IN_FLIGHT = 40
PHRASE = "that is enough"
# Draft tokens of a step. With speculation, vLLM has no logit bias, which makes a model end its sequence. Many tokens
# end it instead: each request soon generates one.
DRAFTS = 4
ENDS = range(7, 1000, 40)


@dataclass
class Asked:
    """One request and what has to come of it."""

    kind: str
    prompt: list[int]
    budget: int
    max_tokens: int
    changed_to: int = 0
    change_after: int = 0
    expected_end: int | None = None
    interrupt: str = ""
    tokens: tuple[int, ...] = ()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--scheduling", choices=("sync", "async"), default="sync")
    parser.add_argument("--marker", default="</think>", help="text that ends thinking; several tokens are allowed")
    parser.add_argument("--kv-blocks", type=int, default=56)
    parser.add_argument("--speculate", choices=("ngram", "draft"), help="speculative decoding")
    parser.add_argument("--loaded-only", action="store_true", help="compare outputs with and without the processor")
    args = parser.parse_args()
    if args.requests < 1:
        parser.error(f"--requests: {args.requests}: expected at least 1")
    if args.speculate == "ngram" and args.scheduling == "async":
        parser.error("--speculate: ngram: vLLM has no asynchronous scheduling with n-grams on CPU, expected draft")
    os.environ.update(ENVIRONMENT)
    found = compare_with_stock(args) if args.loaded_only else force(args)
    print(json.dumps(found))
    return 0 if found["exact"] == found["requests"] else 1


def build(args: argparse.Namespace, config: str, *, processor: bool) -> Any:
    """The real engine on the small random model; `config` is the text of its meridian.toml."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    folder = Path(tempfile.mkdtemp(prefix="meridian-forced-"))
    (folder / "meridian.toml").write_text(config + '[telemetry]\nprometheus = ""\n[admin]\nlisten = ""\n')
    os.environ["MERIDIAN_CONFIG"] = str(folder / "meridian.toml")
    engine_args = EngineArgs(
        model=str(model_that_ends(folder) if args.speculate else model_dir()),
        dtype="float32",
        max_model_len=512,
        block_size=32,  # type: ignore[arg-type]
        num_gpu_blocks_override=args.kv_blocks,
        max_num_seqs=48,
        max_num_batched_tokens=192,
        enforce_eager=True,
        disable_log_stats=True,
        scheduler_cls=MERIDIAN_CLASS,
        logits_processors=["meridian.vllm:BudgetLogitsProcessor"] if processor else None,
        speculative_config=speculation(args.speculate),
    )
    if args.scheduling == "sync":
        return LLMEngine.from_engine_args(engine_args)
    made_up_streams()
    vllm_config = engine_args.create_engine_config()
    keep_async()
    vllm_config.scheduler_config.async_scheduling = True
    from vllm.v1.executor import Executor

    return LLMEngine(vllm_config, Executor.get_class(vllm_config), log_stats=False)


def keep_async() -> None:
    """vLLM checks the configuration again for a draft model, and would turn asynchronous scheduling off again."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def checked(vllm_config: Any) -> None:
        is_async = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async

    setattr(CpuPlatform, "check_and_update_config", staticmethod(checked))  # noqa: B010


def speculation(method: str | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config`."""
    if method is None:
        return None
    if method == "draft":
        return {
            "method": "draft_model",
            "model": str(model_dir()),
            "num_speculative_tokens": DRAFTS,
        }
    return {
        "method": "ngram",
        "num_speculative_tokens": DRAFTS,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


def model_that_ends(folder: Path) -> Path:
    """The model, with `ENDS` as its ends of sequence."""
    model = folder / "model"
    shutil.copytree(model_dir(), model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(ENDS)}))
    return model


def count_drafts(scheduler: Any) -> Counter[str]:
    """Counts the draft tokens and the accepted ones from here on."""
    drafts: Counter[str] = Counter()
    update = scheduler.update_from_output

    def counted(output: Any, sampled: Any) -> Any:
        for name, tokens in output.scheduled_spec_decode_tokens.items():
            got = sampled.sampled_token_ids[sampled.req_id_to_index[name]]
            if len(got):
                drafts["proposed"] += len(tokens)
                drafts["accepted"] += len(got) - 1
        return update(output, sampled)

    scheduler.update_from_output = counted
    return drafts


def made_up_streams() -> None:
    """CUDA's streams and events, which order what a CPU does in order anyway."""
    import torch

    class Nothing:
        device = torch.device("cpu")

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def record(self, *args: Any) -> None:
            """Nothing is late."""

        def synchronize(self) -> None:
            """Nothing is late."""

        def wait_stream(self, *args: Any) -> None:
            """Nothing is late."""

    torch.Event = torch.cuda.Event = torch.cuda.Stream = Nothing  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda *args: Nothing()  # type: ignore[assignment, return-value]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment, return-value]


def asked(count: int, tail: list[int], kinds: tuple[str, ...]) -> list[Asked]:
    """`count` requests, seeded, of every kind in turn."""
    rng = random.Random(0)
    made = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        prompt = [rng.randrange(20, 900) for _ in range(rng.randint(20, 110))] + tail
        budget = rng.randint(0, 70)
        one = Asked(kind, prompt, budget, budget + 30)
        if kind == "changed":
            # Shorter or longer, and at times what has been thought already.
            one.changed_to, one.change_after = rng.randint(0, 90), rng.randint(1, 40)
            one.max_tokens = 140
        made.append(one)
    return made


def force(args: argparse.Namespace) -> dict[str, Any]:
    """Run requests of every kind and compare each ending with where it has to be."""
    config = "[kv_memory]\ngrowth_blocks = 0\n[entropy]\nenabled = false\n[scheduler]\nmin_think_tokens = 0\n"
    config += f'[model]\nthink_start = "<think>"\nthink_end = {json.dumps(args.marker)}\n'
    config += "eos_guard = true\nmin_answer_tokens = 1\n"
    config += f"force_phrase = {json.dumps(PHRASE + args.marker)}\n"
    engine = build(args, config, processor=True)
    scheduler = engine.engine_core.engine_core.scheduler
    tokenizer = engine.get_tokenizer()
    ids = lambda text: list(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    marker, forced = ids(args.marker), ids(PHRASE) + ids(args.marker)
    eos: int = tokenizer.eos_token_id
    ahead = (1 + (DRAFTS if args.speculate else 0)) if args.scheduling == "async" else 0
    requests = asked(args.requests, ids("<think>\n"), KINDS)
    choose_interrupts(engine, scheduler, [request for request in requests if request.kind == "pattern"])
    if args.speculate:
        find_ends(engine, scheduler, [request for request in requests if request.kind == "eos"])
    drafts = count_drafts(scheduler)
    run(engine, scheduler, requests, eos, ahead)

    wrong: list[str] = []
    for i, request in enumerate(requests):
        problem = check(request, marker, forced, eos)
        if problem:
            wrong.append(f"{i} ({request.kind}): {problem}")
    stats = scheduler.meridian_stats()
    gave_up = scheduler._meridian is None or scheduler._meridian_think is None
    return {
        "requests": len(requests),
        "exact": 0 if gave_up else len(requests) - len(wrong),
        "scheduling": args.scheduling,
        "scheduler": type(scheduler).__name__,
        "marker_tokens": len(marker),
        "interrupted": sum(r.kind == "pattern" and r.expected_end is not None for r in requests),
        "kinds": dict(Counter(request.kind for request in requests)),
        "preemptions": sum(stats["preemptions"].values()),
        "missed": stats["budget"]["missed"],
        "forced": stats["budget"]["forced"],
        "wrong": wrong[:5],
        **drafts,
    }


def find_ends(engine: Any, scheduler: Any, requests: list[Asked]) -> None:
    """Where each would end its sequence inside the thinking."""
    freely = [Asked("free", request.prompt, 0, 120) for request in requests]
    run(engine, scheduler, freely, 0, 0)
    for request, free in zip(requests, freely, strict=True):
        ends = (at for at, token in enumerate(free.tokens) if token in ENDS)
        request.expected_end = next(ends, len(free.tokens))
        request.max_tokens = len(free.tokens)


def choose_interrupts(engine: Any, scheduler: Any, requests: list[Asked]) -> None:
    """For each a text that it will think: what it thinks when nothing ends it is found out first."""
    from meridian.vllm.budget import interrupts_of

    rng = random.Random(1)
    tokenizer = engine.get_tokenizer()
    freely = [Asked("free", request.prompt, 0, 60) for request in requests]
    run(engine, scheduler, freely, 0, 0)
    for request, free in zip(requests, freely, strict=True):
        tokens = list(free.tokens)
        at = rng.randrange(len(tokens))
        # Not every token is a text that gives it back; any text will do, its end is computed.
        request.interrupt = tokenizer.decode([tokens[at]]).strip() or "x"
        patterns = interrupts_of(tokenizer, (request.interrupt,))
        ends = [i for i in range(1, len(tokens) + 1) if any(tokens[:i][-len(p) :] == p for p in patterns)]
        request.expected_end = ends[0] if ends else None
        request.max_tokens = len(tokens)


def run(engine: Any, scheduler: Any, requests: list[Asked], eos: int, ahead: int) -> None:
    """Run all, `IN_FLIGHT` at a time, and change the budgets that are to change."""
    from vllm import SamplingParams

    waiting = iter(enumerate(requests))
    live: dict[str, Asked] = {}
    internal: dict[str, str] = {}
    while True:
        while len(live) < IN_FLIGHT and (following := next(waiting, None)) is not None:
            number, request = following
            extra: dict[str, Any] = {"meridian_think_budget": request.budget}
            bias = None
            if request.kind == "pattern":
                extra = {"meridian_interrupt": request.interrupt}
            if request.kind == "eos":
                # It would end at once; with speculation it ends by itself.
                extra, bias = (
                    {},
                    ({eos: 100.0} if request.expected_end is None else None),
                )
            if request.kind == "free":
                extra = {}
            params = SamplingParams(
                temperature=0.0,
                ignore_eos=request.kind != "eos",
                detokenize=False,
                max_tokens=request.max_tokens,
                extra_args=extra,
                logit_bias=bias,
            )
            name = str(number)
            internal[name] = engine.add_request(name, {"prompt_token_ids": request.prompt}, params)
            live[name] = request
        if not live:
            return
        for output in engine.step():
            request = live[output.request_id]
            request.tokens = tuple(output.outputs[0].token_ids)
            if output.finished:
                del live[output.request_id]
        for name, request in live.items():
            is_due = request.kind == "changed" and len(request.tokens) >= request.change_after
            if is_due and request.expected_end is None:
                change(scheduler, internal[name], request, ahead)


def change(scheduler: Any, name: str, request: Asked, ahead: int) -> None:
    """Another budget from now on: it ends there, or at the next token that is not under way."""
    known = len(request.tokens)
    if known >= request.budget or request.budget < known + ahead:
        # It was ended by the first budget, or will be in the step under way.
        request.expected_end = request.budget
        return
    if not scheduler.meridian_limit_thinking(name, request.changed_to):
        raise RuntimeError(f"request {name} is not known")
    request.expected_end = max(request.changed_to, min(known + ahead, request.budget))


def check(request: Asked, marker: list[int], forced: list[int], eos: int) -> str:
    """What is wrong with the tokens of a request; empty when nothing is."""
    tokens = list(request.tokens)
    if request.kind == "eos" and request.expected_end is not None:
        ended = tokens[request.expected_end :][: len(marker)]
        is_whole = len(tokens) > request.expected_end or len(tokens) == request.max_tokens
        return "" if ended == marker[: len(ended)] and is_whole else f"{ended} at {request.expected_end}"
    if request.kind == "eos":
        # A marker of several tokens is Meridian's own, and an answer follows it (`model.min_answer_tokens`); the first
        # token of a marker may be the model's.
        answer = tokens[len(marker) : -1]
        is_right = tokens[: len(marker)] == marker and tokens[-1] == eos and bool(answer) == (len(marker) > 1)
        return "" if is_right and eos not in answer else f"{tokens}, expected {marker}, an answer and {eos}"
    if request.kind == "free" or (request.kind == "pattern" and request.expected_end is None):
        return "" if len(tokens) == request.max_tokens else f"{len(tokens)} tokens, expected {request.max_tokens}"
    end = request.budget if request.kind == "budget" else request.expected_end
    if end is None:
        end = request.budget
    # One that has no tokens left is cut off in the middle.
    found = [i for i in range(len(tokens)) if tokens[i : i + len(forced)] == forced[: len(tokens) - i]]
    found = found or ([len(tokens)] if end == len(tokens) else [])
    return "" if found[:1] == [end] else f"ending at {found}, expected at {end}; {tokens[end : end + len(forced)]}"


def compare_with_stock(args: argparse.Namespace) -> dict[str, Any]:
    """With the processor loaded and nothing set, every output is the one that there is without it."""
    stock = '[policy.dispatch]\nsource = "native:fcfs"\n'
    found = []
    for processor in (False, True):
        # Each engine in a process of its own: vLLM registers the kernels of its n-grams once.
        with ProcessPoolExecutor(1, get_context("spawn")) as one:
            found.append(one.submit(freely, args, stock, processor).result())
    same = sum(one == other for one, other in zip(found[0][0], found[1][0], strict=True))
    drafts = {"stock": found[0][1], "loaded": found[1][1]} if args.speculate else {}
    return {
        "requests": args.requests,
        "exact": same,
        "scheduling": args.scheduling,
        **drafts,
    }


def freely(args: argparse.Namespace, config: str, processor: bool) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """The outputs of requests with nothing set, and the counts of drafts."""
    engine = build(args, config, processor=processor)
    scheduler = engine.engine_core.engine_core.scheduler
    drafts = count_drafts(scheduler)
    tail = list(engine.get_tokenizer().encode("<think>\n", add_special_tokens=False))
    requests = asked(args.requests, tail, ("free",))
    run(engine, scheduler, requests, 0, 0)
    engine.engine_core.shutdown()
    return [request.tokens for request in requests], dict(drafts)


if __name__ == "__main__":
    sys.exit(main())
