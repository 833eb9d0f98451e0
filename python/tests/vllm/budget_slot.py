"""Do components in the budget slot end thinking at their token, in the real engine, while they are swapped?
No entropy is measured: every signal is off, and a policy knows only the tokens of a thought and the load. The model has
random weights and is biased to one token that ends a sentence, so that it never ends its thinking by itself and every
token of it is a boundary. Where each thought must end is known to the token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks.engine import forced_ends
from checks.engine.llm import gave_up, ids, params, scheduler_of

FIXED_TOKENS = 20
MAX_TOKENS = 60
INTERVAL = 8
REQUESTS = 4
# More than there are seats: most of them wait.
CROWD = 100
# At full pressure `deadline-aware` allows a quarter of the limit; the first question after that ends a thought that
# began before.
LIMIT_UNDER_PRESSURE = MAX_TOKENS // 4
UNDER_PRESSURE = -(-LIMIT_UNDER_PRESSURE // INTERVAL) * INTERVAL


@dataclass
class Slot:
    """The engine, its budget slot, and what its requests have generated."""

    engine: Any
    scheduler: Any
    policies: Path
    marker: int
    stop: int
    tail: list[int]
    tokens: dict[str, list[int]] = field(default_factory=dict)
    internal: dict[str, str] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    made: int = 0

    def swap(self, name: str) -> None:
        """Another policy decides from the next step on."""
        component = (self.policies / f"{name}.wasm").read_bytes()
        self.native().put("budget", component, "active", name)

    def native(self) -> Any:
        """What changes policies."""
        return self.scheduler._meridian_engine.policies

    def status(self) -> dict[str, Any]:
        """The slot's status."""
        return next(slot for slot in json.loads(self.native().status())["slots"] if slot["slot"] == "budget")

    def send(self, count: int, budgets: tuple[int, ...] = ()) -> list[str]:
        """Requests that think as long as they may; with `budgets` the client sets limits of its own."""
        names = []
        for i in range(count):
            name = str(self.made)
            self.made += 1
            sampling = params(
                max_tokens=MAX_TOKENS + 10,
                logit_bias={self.stop: 100.0},
                extra_args={"meridian_think_budget": budgets[i % len(budgets)]} if budgets else None,
            )
            prompt = [20 + self.made % 700, 30, 40, *self.tail]
            self.internal[name] = self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
            self.tokens[name] = []
            names.append(name)
        return names

    def run(self, names: list[str], until: Callable[[], bool] = lambda: False, each_step: Any = None) -> None:
        """Step until these are over, or `until` holds."""
        live = set(names)
        while live and not until():
            self.step()
            live -= self.over
            if each_step is not None:
                each_step()

    def step(self) -> None:
        """One step of the engine."""
        for output in self.engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self.over.add(output.request_id)

    def ends(self, names: list[str]) -> list[int]:
        """Think tokens of each, -1 for a thought that did not end."""
        return [self.tokens[n].index(self.marker) if self.marker in self.tokens[n] else -1 for n in names]

    def crowd(self) -> list[str]:
        """More requests than there are seats; the engine has seen them wait."""
        names = self.send(CROWD)
        self.step()
        return names

    def drop(self, names: list[str]) -> None:
        """They hang up. A policy is told the load of the latest step: one more request sees that nobody waits."""
        self.engine.abort_request([self.internal[name] for name in names], internal=True)
        self.run(self.send(1))

    def think(self, names: list[str], count: int) -> None:
        """Step until each has generated so many tokens."""
        self.run(names, lambda: min(len(self.tokens[name]) for name in names) >= count)


def measure(policies: str) -> dict[str, Any]:
    """Every case, with the shipped components of a folder: what it found, and what it must."""
    found: dict[str, Any] = {"swaps": 0, "faults": 0, "missed": 0, "gave_up": False}
    for (source, options), cases in CASES.items():
        slot = build(Path(policies), source, options)
        for case in cases:
            found[case.__name__] = case(slot)
        status = slot.status()
        found["swaps"] += status["swaps"]
        found["faults"] += sum(count for _, count in status["faults"])
        found["missed"] += slot.scheduler.meridian_stats()["budget"]["missed"]
        found["gave_up"] |= gave_up(slot.scheduler)
        slot.engine.engine_core.shutdown()
    return found


def build(policies: Path, source: str, options: str) -> Slot:
    """The engine, with the component `source` in its budget slot."""
    config = f"""
[scheduler]
min_think_tokens = 0
max_think_tokens = {MAX_TOKENS}
# How long the machine takes decides nothing; the default paces prompts by it whatever the targets are.
output_tpot_budget_ms = 1e9
think_tpot_budget_ms = 1e9
max_defer_ms = 1e9
[policy.dispatch]
source = "native:output-first"
[entropy]
enabled = false
eat_probe_interval_tokens = {INTERVAL}
[policy.budget]
source = {json.dumps(str(policies / f"{source}.wasm"))}
config = {options}
deadline_ms = 1000
"""
    engine = forced_ends.build(config, num_gpu_blocks_override=200)
    tokenizer = engine.get_tokenizer()
    (marker,), (stop,) = ids(tokenizer, "</think>"), ids(tokenizer, ".")
    return Slot(engine, scheduler_of(engine), policies, marker, stop, ids(tokenizer, "<think>\n"))


def fixed(slot: Slot) -> dict[str, Any]:
    """A component's limit ends thinking at its token."""
    names = slot.send(REQUESTS)
    slot.run(names)
    return {"found": slot.ends(names), "expected": [FIXED_TOKENS] * REQUESTS}


def equal(slot: Slot) -> dict[str, Any]:
    """Another instance of the same component, at each step: nothing changes."""
    names = slot.send(REQUESTS)
    slot.run(names, each_step=lambda: slot.swap("fixed-budget"))
    return {"found": slot.ends(names), "expected": [FIXED_TOKENS] * REQUESTS}


def lowered(slot: Slot) -> dict[str, Any]:
    """Under load `deadline-aware` takes over: who has thought longer than its limit ends at the next token, the others
    at the limit."""
    late = slot.send(REQUESTS)
    slot.think(late, MAX_TOKENS // 2)
    early = slot.send(REQUESTS)
    slot.think(early, LIMIT_UNDER_PRESSURE // 2)
    crowd = slot.crowd()
    now = [len(slot.tokens[name]) for name in late]
    slot.swap("deadline-aware")
    slot.run([*late, *early])
    slot.drop(crowd)
    expected = [*now, *[LIMIT_UNDER_PRESSURE] * REQUESTS]
    return {"found": slot.ends([*late, *early]), "expected": expected}


def loaded(slot: Slot) -> dict[str, Any]:
    """`deadline-aware` ends thoughts that began while nobody waited, once many wait: with every signal off."""
    names = slot.send(REQUESTS)
    slot.think(names, UNDER_PRESSURE - INTERVAL + 1)
    crowd = slot.crowd()
    slot.run(names)
    slot.drop(crowd)
    return {"found": slot.ends(names), "expected": [UNDER_PRESSURE] * REQUESTS}


def rolled_back(slot: Slot) -> dict[str, Any]:
    """The policy before comes back just before `deadline-aware` would have ended them: they think to the end."""
    names = slot.send(REQUESTS)
    slot.think(names, UNDER_PRESSURE - INTERVAL + 1)
    crowd = slot.crowd()
    slot.native().rollback("budget")
    slot.drop(crowd)
    slot.run(names)
    slot.native().rollback("budget")
    return {"found": slot.ends(names), "expected": [MAX_TOKENS] * REQUESTS}


def questions(slot: Slot) -> dict[str, Any]:
    """How often `deadline-aware` is asked about thoughts that come one after the other, with nothing measured."""
    before = sum(slot.status()["decisions"])
    ends = []
    for _ in range(REQUESTS):
        names = slot.send(1)
        slot.run(names)
        ends += slot.ends(names)
    asked = sum(slot.status()["decisions"]) - before
    # One is for the thresholds.
    expected = REQUESTS * (1 + MAX_TOKENS // INTERVAL)
    return {"found": [asked, *ends], "expected": [expected, *[MAX_TOKENS] * REQUESTS]}


def clients(slot: Slot) -> dict[str, Any]:
    """What a client has set stands, whoever decides: the policy changes with every third step."""
    budgets = (3, 11, 25, 40, 57)
    names = slot.send(4 * len(budgets), budgets)
    step = 0

    def swap() -> None:
        nonlocal step
        step += 1
        if step % 3 == 0:
            slot.swap("noop" if step % 2 else "eat-rpdi")

    slot.run(names, each_step=swap)
    return {"found": slot.ends(names), "expected": [*budgets] * 4}


# A component that is put in place is started with the options of its slot: those of a slot have to fit all of them.
CASES: dict[tuple[str, str], tuple[Callable[[Slot], dict[str, Any]], ...]] = {
    ("fixed-budget", f"{{ think_tokens = {FIXED_TOKENS} }}"): (fixed, equal),
    ("noop", "{}"): (lowered, loaded, rolled_back, questions, clients),
}
