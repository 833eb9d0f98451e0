"""Do forced endings land exactly where they are meant to, in the real engine, when it schedules ahead and preempts?

Requests of every kind come together into an engine that is short of KV blocks: think budgets, budgets that change
while the request thinks, interrupt patterns, ends of sequence inside the thinking, and requests with nothing set. The
model has random weights and never ends its thinking by itself; what it must generate is known to the token.

With `speculate`, vLLM proposes tokens by looking up n-grams of the request (`ngram`, which vLLM does not schedule
asynchronously on CPU), or with a draft model (`draft`). This draft model is the model itself, so that vLLM accepts all
its drafts unless an ending is forced.
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from meridian.vllm.bench.model import model_dir

from checks.engine.llm import PROCESSOR, QUIET, engine_of, gave_up, ids, ngrams, params, scheduler_of

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


def measure(
    requests: int = 200,
    scheduling: str = "sync",
    marker: str = "</think>",
    speculate: str | None = None,
    loaded_only: bool = False,
) -> dict[str, Any]:
    """`exact` of the endings; with `loaded_only`, of the outputs with the processor loaded and nothing set, against
    those without it. `marker` is the text that ends thinking, of one token or several."""
    if loaded_only:
        return compare_with_stock(requests, scheduling, speculate)
    return force(requests, scheduling, marker, speculate)


def build(config: str, scheduling: str = "sync", speculate: str | None = None, **changed: Any) -> Any:
    """The real engine on the small random model, short of KV blocks."""
    return engine_of(
        config + QUIET,
        asynchronous=scheduling == "async",
        **{
            "model": str(model_that_ends() if speculate else model_dir()),
            "num_gpu_blocks_override": 56,
            "max_num_seqs": 48,
            "max_num_batched_tokens": 192,
            "speculative_config": speculation(speculate),
            **changed,
        },
    )


def speculation(method: str | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config`."""
    if method == "draft":
        return {"method": "draft_model", "model": str(model_dir()), "num_speculative_tokens": DRAFTS}
    return None if method is None else ngrams(DRAFTS)


def model_that_ends() -> Path:
    """The model, with `ENDS` as its ends of sequence."""
    model = Path(tempfile.mkdtemp(prefix="meridian-forced-")) / "model"
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


def asked(count: int, tail: list[int], kinds: Sequence[str]) -> list[Asked]:
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


def force(count: int, scheduling: str, marker_text: str, speculate: str | None) -> dict[str, Any]:
    """Run requests of every kind and compare each ending with where it has to be."""
    config = "[kv_memory]\ngrowth_blocks = 0\n[entropy]\nenabled = false\n[scheduler]\nmin_think_tokens = 0\n"
    config += f'[model]\nthink_start = "<think>"\nthink_end = {json.dumps(marker_text)}\n'
    config += "eos_guard = true\nmin_answer_tokens = 1\n"
    config += f"force_phrase = {json.dumps(PHRASE + marker_text)}\n"
    engine = build(config, scheduling, speculate)
    scheduler, tokenizer = scheduler_of(engine), engine.get_tokenizer()
    marker, phrase = ids(tokenizer, marker_text), ids(tokenizer, PHRASE)
    eos: int = tokenizer.eos_token_id
    ahead = (1 + (DRAFTS if speculate else 0)) if scheduling == "async" else 0
    requests = asked(count, ids(tokenizer, "<think>\n"), KINDS)
    choose_interrupts(engine, scheduler, [request for request in requests if request.kind == "pattern"])
    if speculate:
        find_ends(engine, scheduler, [request for request in requests if request.kind == "eos"])
    drafts = count_drafts(scheduler)
    run(engine, scheduler, requests, eos, ahead)
    problems = [check(request, marker, [*phrase, *marker], eos) for request in requests]
    wrong = [
        f"{i} ({request.kind}): {problem}"
        for i, (request, problem) in enumerate(zip(requests, problems, strict=True))
        if problem
    ]
    stats = scheduler.meridian_stats()
    return {
        "requests": count,
        "exact": 0 if gave_up(scheduler) else count - len(wrong),
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
    from meridian.vllm.processor import interrupts_of

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
    waiting = iter(enumerate(requests))
    live: dict[str, Asked] = {}
    internal: dict[str, str] = {}
    while True:
        while len(live) < IN_FLIGHT and (following := next(waiting, None)) is not None:
            number, request = following
            extra: dict[str, Any] = {"meridian_think_budget": request.budget}
            if request.kind == "pattern":
                extra = {"meridian_interrupt": request.interrupt}
            elif request.kind in ("eos", "free"):
                extra = {}
            # It would end at once; with speculation it ends by itself.
            ends = request.kind == "eos" and request.expected_end is None
            sampling = params(
                ignore_eos=request.kind != "eos",
                max_tokens=request.max_tokens,
                extra_args=extra,
                logit_bias={eos: 100.0} if ends else None,
            )
            name = str(number)
            internal[name] = engine.add_request(name, {"prompt_token_ids": request.prompt}, sampling)
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


def compare_with_stock(count: int, scheduling: str, speculate: str | None) -> dict[str, Any]:
    """With the processor loaded and nothing set, every output is the one that there is without it."""
    found = []
    for processor in (None, [PROCESSOR]):
        # Each engine in a process of its own: vLLM registers the kernels of its n-grams once.
        with ProcessPoolExecutor(1, get_context("spawn")) as one:
            found.append(one.submit(freely, count, scheduling, speculate, processor).result())
    (stock, stock_drafts), (loaded, loaded_drafts) = found
    same = sum(one == other for one, other in zip(stock, loaded, strict=True))
    drafts = {"stock": stock_drafts, "loaded": loaded_drafts} if speculate else {}
    return {"requests": count, "exact": same, **drafts}


def freely(
    count: int, scheduling: str, speculate: str | None, processor: list[str] | None
) -> tuple[list[tuple[int, ...]], dict[str, int]]:
    """The outputs of requests with nothing set, and the counts of drafts."""
    config = '[policy.dispatch]\nsource = "native:fcfs"\n'
    engine = build(config, scheduling, speculate, logits_processors=processor)
    scheduler = scheduler_of(engine)
    drafts = count_drafts(scheduler)
    requests = asked(count, ids(engine.get_tokenizer(), "<think>\n"), ("free",))
    run(engine, scheduler, requests, 0, 0)
    engine.engine_core.shutdown()
    return [request.tokens for request in requests], dict(drafts)
