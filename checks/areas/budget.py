"""Thinking budgets in the real vLLM engine: endings are exact, entropies right, changes hold; what thinking costs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from checks.areas.early_exit import early_exit
from checks.figures import Figure, Part, Row, printed, read, table
from checks.run import TRACES, WORK, engine, example, fetched, lines, say

REQUESTS = 1000
# The bundled model has one token for its end marker; a text of several shows the others.
MARKERS = ("</think>", "so much for that")
SCHEDULING = ("sync", "async")
# vLLM has no asynchronous scheduling with n-grams on a CPU.
SPECULATION = (("sync", "ngram"), ("sync", "draft"), ("async", "draft"))
# Of the area's answers. Neither model stops early often by itself: the bias makes an end of sequence as likely as other
# tokens.
ANSWERS = 10_000
CASES = (("reasoner", 0), ("reasoner", 6), ("random", 6))
ARMS = {
    "meridian": "Meridian",
    "budget": "stock with its thinking_token_budget",
    "none": "stock without a budget",
}

AT_THE_TOKEN = Row("{what}: requests that end at the token", "exact", "of 1,000", f">= {REQUESTS}")
MISSED = Row("{what}: tokens missed", "missed", "tokens", "<= 0")
PREEMPTED = Row("{what}: preemptions", "preemptions", "preemptions", ">= 1")
ACCEPTED = Row("{what}: drafts accepted", lambda m: m["accepted"] / m["proposed"], "of those proposed")
EQUAL = Row("{what}: outputs equal to stock's", "exact", "of 1,000", f">= {REQUESTS}")


def rate(drafts: dict[str, int]) -> float:
    """Of the drafts proposed, those accepted."""
    return drafts["accepted"] / drafts["proposed"]


UNCHANGED_RATE = Row(
    "{what}: acceptance rate minus stock's", lambda m: abs(rate(m["loaded"]) - rate(m["stock"])), "of drafts", "<= 0"
)


def ended(where: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Forced endings with each marker."""
    for marker in MARKERS:
        found = engine("forced_ends", requests=REQUESTS, marker=marker, **options)
        for wrong in found["wrong"]:
            say(f"    wrong: {wrong}")
        yield {**found, "what": f"forced endings, {where}, marker of {found['marker_tokens']}"}


def loaded(where: str, **options: Any) -> dict[str, Any]:
    """The processor loaded and nothing set, against stock."""
    found = engine("forced_ends", requests=REQUESTS, loaded_only=True, **options)
    return {**found, "what": f"processor loaded, no budget set, {where}"}


def speculation(_: int) -> Iterator[Figure]:
    """Endings inside drafts, and the drafts that vLLM accepts with the processor and without it."""
    for scheduling, drafts in SPECULATION:
        where, options = f"{drafts}, {scheduling}", {"scheduling": scheduling, "speculate": drafts}
        for found in ended(where, **options):
            yield from read(found, (AT_THE_TOKEN, MISSED, ACCEPTED))
        yield from read(loaded(where, **options), (EQUAL, UNCHANGED_RATE))


def answers(_: int) -> Iterator[Figure]:
    """How many answers are empty after tight budgets: with Meridian, with vLLM's own budget and without any."""
    for model, bias in CASES:
        for arm, name in ARMS.items():
            found = engine("answers", requests=ANSWERS, model=model, arm=arm, bias=bias)
            biased = f", logit of the end +{bias}" if bias else ""
            what = f"{model} model, budgets of 0 to 24, {ANSWERS:,} requests{biased}, {name}"
            is_ours = arm == "meridian"
            empty = 10_000 * found["empty"] / ANSWERS
            yield Figure(f"{what}: empty answers", empty, "per 10,000", "<= 0" if is_ours else None)
            if is_ours:
                yield MISSED.figure({**found, "what": what})
                if found["gave_up"]:
                    yield Figure(f"{what}: Meridian gave up", 1, "times", "<= 0")


def loops() -> list[dict[str, Any]]:
    """Loops in thinking, token by token: planted ones end, ordinary thoughts do not, and what it costs to look."""
    tokenizers = Path(os.environ.get("MERIDIAN_TOKENIZERS") or fetched("tokenizers"))
    out = WORK / "ordinary-thoughts.jsonl"
    engine("ordinary_thoughts", tokenizer=tokenizers / "qwen3", traces=TRACES, out=out)
    return example("loop_figures", out)


LOOP_BOUNDS = {
    "ended within 64 tokens of certainty": ">= 500",
    "before certainty": "<= 0",
    "false alarms: ordinary thoughts": ">= 2000",
    "ended as a loop": "<= 0",
    # False alarms by kind.
    " tokens": "<= 0",
    "longest repetition over that of a loop": "< 1",
    "memory at most": f"<= {16 * 1024}",
}


def cost(_: int) -> Iterator[Figure]:
    """What following 256 thoughts costs a step, with and without ends of lines, every signal off."""
    found = {line["name"]: line for line in example("budget_figures")}
    for name, line in found.items():
        policy, _, what = name.partition(": ")
        bound = None
        if what.endswith("over one without") and policy == "eat-rpdi":
            bound = "<= 1.1"
        elif what == "calls at boundaries":
            bound = f"<= {found[f'{policy}: calls expected']['value']}"
        elif what == "ends ordered":
            bound = "<= 0"
        yield Figure(f"256 thoughts, {name}", line["value"], line["unit"], bound)


def kernel(_: int) -> Iterator[Figure]:
    """The entropy of rows against a pass that only reads them, in one run."""
    command = ("cargo", "run", "-q", "--release", "-p", "meridian-kernels", "--example", "entropy_over_sum")
    for line in lines(*command):
        # Every instruction set that the machine has; the bound is on the one it uses, for what vLLM samples from.
        bound = "<= 1.3" if line.get("best") and ": f32" in line["name"] else None
        yield Figure(f"CPU {line['name']}", line["value"], line["unit"], bound)


def changed(_: int) -> Iterable[dict[str, Any]]:
    """Limits that change while requests think."""
    found = engine("live_changes", changes=1000)
    for wrong in found["wrong"]:
        say(f"    wrong: {wrong}")
    return [{**found, "others": found["changes"] - found["by_themselves"]}]


live = table(
    changed,
    Row("live changes over HTTP under load: acknowledged", "changes", "requests", ">= 1000"),
    Row("live changes: ended by the model before the named token", "by_themselves", "of {changes:,}"),
    Row("live changes: the others end at the named token", "exact", "of {others:,}", ">= {others}"),
    Row("live changes: named token passed already, ended at once", "at_once", "of {changes:,}"),
    Row("live changes: tokens missed", "missed", "tokens", "<= 0"),
    Row("live changes: a step's decision with changes, median", "busy_us.median", "us"),
    Row("live changes: a step's decision with changes, p99", "busy_us.p99", "us"),
    Row("live changes: a step's decision with changes, longest", "busy_us.longest", "us"),
    Row("live changes: a step's decision without any, median", "quiet_us.median", "us"),
    Row("live changes: a step's decision without any, longest", "quiet_us.longest", "us"),
)

PARTS: dict[str, Part] = {
    # Synchronous and asynchronous scheduling, with preemption.
    "forced": table(
        lambda _: (found for scheduling in SCHEDULING for found in ended(scheduling, scheduling=scheduling)),
        *(AT_THE_TOKEN, PREEMPTED, MISSED),
    ),
    "equal": table(lambda _: (loaded(scheduling, scheduling=scheduling) for scheduling in SCHEDULING), EQUAL),
    "speculation": speculation,
    # Probes in the engine against the model in transformers.
    "entropies": table(
        lambda _: [engine("probe_entropies")],
        Row("probe entropy against transformers, {probes:,} probes: worst", "worst_nats", "nats", "<= 1e-4"),
        Row("EAT's recurrence against the paper's, {probes:,} probes: worst", "eat_error", "bits", "<= 1e-9"),
    ),
    "overhead": table(
        lambda pairs: [engine("probe_overhead", rounds=3 * pairs)],
        Row("probes every 32 tokens, 32 requests: wall time", "pairs", "ratio", "<= 1.05"),
        Row("probes every 32 tokens, 32 requests: probes that ran", "share_of_probes", "of those due"),
    ),
    "kernel": kernel,
    "cost": cost,
    "answers": answers,
    "loops": printed(loops, bounds=LOOP_BOUNDS),
    # Rows that no scheduler made.
    "rows": table(
        lambda _: [engine("forged_rows")],
        Row("forged meridian_row: refused by the front end", "rows_refused", "of {rows_sent}", ">= {rows_sent}"),
        Row("forged meridian_row past the front end: outputs changed", "rows_changed", "of {requests}", "<= 0"),
        Row("the same without MeridianScheduler: outputs changed", "rows_stock_changed", "of {requests}", "<= 0"),
        Row("tokens missed meanwhile", "missed", "tokens", "<= 0"),
    ),
    "live": live,
    "early-exit": early_exit,
}
