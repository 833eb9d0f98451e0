"""Thinking budgets in the real vLLM engine: endings are exact, entropies right; what early exit saves and costs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from areas.answers import answers
from areas.common import ROOT, Bound, Figure, over_pairs, say
from areas.early_exit import early_exit
from areas.loops import loops
from areas.signing import live, signing

REQUESTS = 1000
# The model errs in one of twenty answers: with so many problems the interval of a difference is within a point.
PROBLEMS = 6000
SCRIPTS = ROOT / "bench" / "vllm"
# The bundled model has one token for its end marker; a text of several shows the others.
SEVERAL_TOKENS = "so much for that"


def script(name: str, *args: str) -> dict[str, Any]:
    """The JSON object that a script of bench/vllm prints last."""
    say(f"  {name} {' '.join(args)}")
    # Its log is of use only when it failed.
    done = subprocess.run([sys.executable, str(SCRIPTS / name), *args], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        sys.exit(f"error: bench/vllm/{name} failed with exit code {done.returncode}: {done.stderr.strip()[-400:]}")
    return json.loads(lines[-1])


def forced() -> Iterator[Figure]:
    """Endings in synchronous and asynchronous scheduling, with preemption."""
    for scheduling in ("sync", "async"):
        for marker in (None, SEVERAL_TOKENS):
            args = ["--requests", str(REQUESTS), "--scheduling", scheduling, *(("--marker", marker) if marker else ())]
            found = script("forced_ends.py", *args)
            for wrong in found["wrong"]:
                say(f"    wrong: {wrong}")
            what = f"forced endings, {scheduling}, marker of {found['marker_tokens']}"
            yield Figure(f"{what}: requests that end at the token", found["exact"], "of 1,000", Bound(REQUESTS, False))
            yield Figure(f"{what}: preemptions", found["preemptions"], "preemptions", Bound(1, False))
            yield Figure(f"{what}: tokens missed", found["missed"], "tokens", Bound(0))


def equal() -> Iterator[Figure]:
    """The processor loaded and nothing set, against stock."""
    for scheduling in ("sync", "async"):
        found = script("forced_ends.py", "--requests", str(REQUESTS), "--scheduling", scheduling, "--loaded-only")
        name = f"processor loaded, no budget set, {scheduling}: outputs equal to stock's"
        yield Figure(name, found["exact"], "of 1,000", Bound(REQUESTS, False))


# vLLM has no asynchronous scheduling with n-grams on a CPU.
SPECULATION = (("sync", "ngram"), ("sync", "draft"), ("async", "draft"))


def speculation() -> Iterator[Figure]:
    """Endings inside drafts, and the drafts that vLLM accepts with the processor and without it."""
    for scheduling, drafts in SPECULATION:
        for marker in (None, SEVERAL_TOKENS):
            args = ["--requests", str(REQUESTS), "--scheduling", scheduling, "--speculate", drafts]
            found = script("forced_ends.py", *args, *(("--marker", marker) if marker else ()))
            for wrong in found["wrong"]:
                say(f"    wrong: {wrong}")
            what = f"forced endings, {drafts}, {scheduling}, marker of {found['marker_tokens']}"
            yield Figure(
                f"{what}: requests that end at the token",
                found["exact"],
                "of 1,000",
                Bound(REQUESTS, False),
            )
            yield Figure(f"{what}: tokens missed", found["missed"], "tokens", Bound(0))
            yield Figure(
                f"{what}: drafts accepted",
                found["accepted"] / found["proposed"],
                "of those proposed",
            )
        args = ["--requests", str(REQUESTS), "--scheduling", scheduling, "--speculate", drafts]
        found = script("forced_ends.py", *args, "--loaded-only")
        name = f"processor loaded, no budget set, {drafts}, {scheduling}"
        yield Figure(
            f"{name}: outputs equal to stock's",
            found["exact"],
            "of 1,000",
            Bound(REQUESTS, False),
        )
        stock, ours = (found[which]["accepted"] / found[which]["proposed"] for which in ("stock", "loaded"))
        yield Figure(
            f"{name}: acceptance rate minus stock's",
            abs(ours - stock),
            "of drafts",
            Bound(0),
        )


def entropies() -> Iterator[Figure]:
    """Probes in the engine against the model in transformers."""
    found = script("probe_entropies.py")
    probes = f"{found['probes']:,} probes"
    yield Figure(f"probe entropy against transformers, {probes}: worst", found["worst_nats"], "nats", Bound(1e-4))
    yield Figure(f"EAT's recurrence against the paper's, {probes}: worst", found["eat_error"], "bits", Bound(1e-9))


def overhead(pairs: int) -> Iterator[Figure]:
    """What probes cost in wall time."""
    found = script("probe_overhead.py", "--rounds", str(max(pairs, 2) * 3))
    if found["gave_up"]:
        sys.exit("error: probe_overhead.py: Meridian gave up")
    yield over_pairs("probes every 32 tokens, 32 requests: wall time", found["pairs"], "ratio", Bound(1.05))
    done, due = found["probes_a_round"], found["probes_due_a_round"]
    yield Figure("probes every 32 tokens, 32 requests: probes that ran", done / due, "of those due")


def kernel() -> Iterator[Figure]:
    """The entropy of rows against a pass that only reads them, in one run."""
    say("  entropy_over_sum")
    command = ["cargo", "run", "--quiet", "--release", "-p", "meridian-kernels", "--example", "entropy_over_sum"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: entropy_over_sum failed with exit code {done.returncode}")
    for line in done.stdout.splitlines():
        found = json.loads(line)
        # Every instruction set that the machine has; the bound is on the one it uses, for what vLLM samples from.
        bound = Bound(1.3) if found.get("best") and ": f32" in found["name"] else None
        yield Figure(f"CPU {found['name']}", found["value"], found["unit"], bound)


def parts(pairs: int) -> dict[str, Callable[[], Iterator[Figure]]]:
    """Parts of the area by name."""
    return {
        "forced": forced,
        "equal": equal,
        "speculation": speculation,
        "entropies": entropies,
        "overhead": lambda: overhead(pairs),
        "kernel": kernel,
        "answers": lambda: answers(script),
        "loops": loops,
        "signing": signing,
        "live": live,
        "early-exit": lambda: early_exit(PROBLEMS),
    }
