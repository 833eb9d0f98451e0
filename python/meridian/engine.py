"""The host engine without vLLM: the same mirror, slot, guards and step-time model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from meridian import _native
from meridian.config import MeridianConfig

if TYPE_CHECKING:
    from collections.abc import Iterable

SlotName = Literal["dispatch", "eviction", "budget"]

# Longest `tenant`, as in vLLM.
MAX_TENANT_CHARACTERS = 128


class KvStats(TypedDict):
    """What happened to KV memory where Meridian orders it, since the engine was made."""

    evictions: dict[str, int]
    """KV blocks by tier: `think_complete` (dead thinking), `think_active` (other cached ones), `output_critical` (of
    answers in progress)."""
    offload_evictions: dict[str, int]
    """Chunks that a store beside the engine's memory gave up, by the same tiers."""
    hit_tokens: dict[str, int]
    """Tokens of admitted requests that the prefix cache had, by what they are: `prefill` (prompt), `think`,
    `output`."""
    missed_tokens: dict[str, int]
    recomputed_tokens: int
    """Tokens computed again because of a preemption."""
    avoidable_output_preemptions: int
    moved_blocks: int
    resyncs: int


class BudgetStats(TypedDict):
    """What was done to the thinking of an engine's requests."""

    forced: dict[str, int]
    """Ends that were forced, by reason."""
    missed: int
    """Tokens that were to be forced and came out otherwise."""
    probes: dict[str, int]
    """`asked`, `done`, `dropped`."""
    probe_tokens: int
    think_tokens: int
    """Of requests that are over."""
    thought: int
    """Requests that have thought and are over."""


class Stats(TypedDict):
    """What a dispatch slot has done since it was made. Times in milliseconds."""

    policy: str
    policy_version: str
    policy_sha256: str
    requests: int
    decisions: int
    decided_by_policy: int
    left_to_default: int
    decided_by_fallback: int
    deciding_ms: float
    longest_decision_ms: float
    faults: dict[str, int]
    idle_plans: int
    last_fault: str | None
    preemptions: dict[str, int]
    kv: KvStats | None
    budget: BudgetStats | None
    step_time_ms: tuple[float, float, float] | None
    last_source: str | None


@dataclass(frozen=True)
class StepPlan:
    """What an engine is to do in one step.

    `running` and `waiting` are permutations of what was given; `token_budget` is at least 1 and at most the engine's
    own; `token_caps` names requests that may take at most that many tokens (0: left out of the step); `preempted` are
    running requests that give up their seat and KV blocks to the first of `waiting`.
    """

    running: list[str]
    waiting: list[str]
    token_budget: int
    token_caps: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EvictionCandidate:
    """A cached KV block, or a live request that may be preempted."""

    tier: int = 0
    """0 thinking that can never match again, 1 of a request that does not answer, 2 of an answer."""
    blocks: int = 1
    """Device blocks that come free."""
    position: int = 0
    """A block's distance from the head of its request's chain, in blocks."""
    hits: int = 0
    """How often a block was matched again."""
    age_ms: float = 0.0
    """Milliseconds since a block was allocated, or since a request began to hold blocks."""
    computed_tokens: int = 0
    """Tokens whose KV would have to be computed again: those of a block; of a request all it has computed."""


@dataclass(frozen=True)
class ThinkingRequest:
    """A request that thinks, as a budget policy sees it. Entropies in bits."""

    prompt_tokens: int = 1
    remaining_tokens: int = 0
    think_tokens: int = 0
    think_ms: float = 0.0
    slack_ms: float = math.inf
    """Milliseconds until the client's deadline, negative when missed; infinite when it has none."""
    priority: int = 0
    tenant: int = 0
    is_probed: bool = False
    is_at_boundary: bool = False
    probes: int = 0
    eat: float | None = None
    eat_variance: float | None = None
    rpdi: float | None = None
    same_answers: int = 0
    """Latest probes in a row with the same most likely next token; 0 when the latest did not say."""


@dataclass(frozen=True)
class EngineLoad:
    """Facts about the engine for a budget policy."""

    now_ms: float = 0.0
    thinking: int = 0
    answering: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class _Handle:
    """Identity of one request in the native engine."""

    __slots__ = ("request_id",)

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id


@dataclass(frozen=True)
class _Generated:
    request_id: str
    new_token_ids: list[int]


def _alternatives(marker: Sequence[int] | Sequence[Sequence[int]]) -> list[list[int]]:
    """The token sequences of a marker that is one sequence or a list of alternatives."""
    one = [token for token in marker if not isinstance(token, Sequence)]
    several = [list(tokens) for tokens in marker if isinstance(tokens, Sequence)]
    if one and several:
        raise TypeError("a marker is a sequence of token ids or a list of such sequences, not both")
    return [one] if one else several


def _check_now(now_ms: float) -> None:
    if not math.isfinite(now_ms):
        raise ValueError(f"now_ms: {now_ms}: must be finite")


class PolicyEngine:
    """The engine that runs inside vLLM, driven by hand.

    Example:
        >>> engine = PolicyEngine(think_start=[7], think_end=[8])
        >>> engine.add("a", prompt=[1, 2, 7], max_tokens=100)
        >>> plan = engine.plan([], ["a"], token_budget=512, free_seats=4)
        >>> engine.scheduled({"a": 3})
        >>> engine.generated({"a": [40]})
        >>> engine.phase("a")
        'think'
    """

    def __init__(
        self,
        config: MeridianConfig | None = None,
        *,
        think_start: Sequence[int] | Sequence[Sequence[int]] = (),
        think_end: Sequence[int] | Sequence[Sequence[int]] = (),
        padding: Iterable[int] = (),
        block_tokens: int = 16,
    ) -> None:
        """Make an engine without requests.

        Args:
            config: the configuration; the defaults when absent. Its `[model]` texts are not used here.
            think_start: token sequence that starts thinking, or a list of alternatives; empty for a model that does not
                think.
            think_end: token sequence that ends it, or a list of alternatives.
            padding: whitespace tokens that may stand around the markers.
            block_tokens: tokens in a KV block.

        Raises:
            ConfigError: the configuration is not valid.
            PolicyError: the policy was refused.
        """
        config = config if config is not None else MeridianConfig()
        self._engine = _native.Engine(
            config.to_json(),
            config.base_dir,
            starts=_alternatives(think_start),
            ends=_alternatives(think_end),
            padding=list(padding),
            block_tokens=block_tokens,
            steps_ahead=0,
        )
        self._policies = self._engine.policies
        self._handles: dict[str, _Handle] = {}
        self._now_ms = 0.0

    def add(
        self,
        request_id: str,
        *,
        prompt: Sequence[int],
        max_tokens: int,
        now_ms: float = 0.0,
        deadline_ms: float = math.inf,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        """A request arrived at `now_ms` with the token ids of its templated prompt.

        `max_tokens` and `priority` are cut to 32 bits.

        Raises:
            ValueError: a request with this id is live, `tenant` has more than 128 characters, `now_ms` is not finite,
                or `deadline_ms` is NaN.
        """
        if len(tenant) > MAX_TENANT_CHARACTERS:
            raise ValueError(f"tenant: {len(tenant)} characters: must be at most {MAX_TENANT_CHARACTERS}")
        _check_now(now_ms)
        if math.isnan(deadline_ms):
            raise ValueError("deadline_ms: nan: must be a number; inf for none")
        handle = _Handle(request_id)
        added = self._engine.add(
            handle,
            request_id,
            prompt_tail=list(prompt[-128:]),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            arrival_ms=now_ms,
            deadline_ms=deadline_ms,
            priority=priority,
            tenant=tenant,
        )
        if not added:
            raise ValueError(f"request {request_id!r} is already there")
        self._handles[request_id] = handle

    def plan(
        self,
        running: Sequence[str],
        waiting: Sequence[str],
        *,
        token_budget: int,
        free_seats: int,
        now_ms: float = 0.0,
        free_blocks: int = 0,
        total_blocks: int = 0,
        decode_tokens: int = 1,
    ) -> StepPlan:
        """Plan one step over the live requests, each list in its present order.

        Raises:
            KeyError: a request is not live.
            ValueError: `now_ms` is not finite.
        """
        _check_now(now_ms)
        self._now_ms = now_ms
        running_handles: list[object] = [self._handles[request_id] for request_id in running]
        waiting_handles: list[object] = [self._handles[request_id] for request_id in waiting]
        budget, caps, _, _, preempted = self._engine.plan(
            running_handles,
            waiting_handles,
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            free_seats,
            len(waiting_handles),
            decode_tokens,
        )
        return StepPlan(
            running=[handle.request_id for handle in running_handles if isinstance(handle, _Handle)],
            waiting=[handle.request_id for handle in waiting_handles if isinstance(handle, _Handle)],
            token_budget=budget,
            token_caps=caps or {},
            preempted=[handle.request_id for handle in preempted if isinstance(handle, _Handle)],
        )

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """The planned step gave each of these requests so many tokens."""
        self._engine.scheduled(self._now_ms, dict(tokens))

    def generated(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Token ids that were generated for each request, in order."""
        self._engine.generated([_Generated(request_id, list(ids)) for request_id, ids in tokens.items()])

    def preempted(self, request_id: str) -> None:
        """The request lost its KV blocks and waits again."""
        self._engine.preempted(request_id)

    def remove(self, request_id: str) -> None:
        """The request is over."""
        self._engine.remove(request_id)
        self._handles.pop(request_id, None)

    def phase(self, request_id: str) -> str | None:
        """`"prefill"`, `"think"` or `"output"`; None when the request is not live."""
        return self._engine.phase(request_id)

    def stats(self) -> Stats:
        """What the dispatch slot has done."""
        return self._engine.stats()

    def swap(
        self,
        policy: str | os.PathLike[str] | None = None,
        *,
        slot: SlotName = "dispatch",
        mode: Literal["active", "shadow"] = "active",
        signature: str | os.PathLike[str] | None = None,
        config: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Load a policy and make it active, or have it asked beside the active policy.

        Returns the report: `active` and `previous` versions, what became of the `state`, `held_us`. A policy that the
        slot has already, with the same options, changes nothing: the report's `action` is `unchanged`.

        Args:
            policy: the path of a component, or `native:NAME`; None for the active policy with another `config`.
            slot: where it decides.
            mode: `"shadow"` to compare only.
            signature: the file with the minisign signature of a component, by default the component's path with
                `.minisig` added, where there is one; it is verified when `policy.trusted_keys` names keys.
            config: its options. Without any, a component and the native policy that the configuration names get those
                of the configuration, and other native policies none.

        Raises:
            OSError: the file cannot be read.
            PolicyError: the policy was refused; the active policy stays.
            TypeError, ValueError: `config` is not what JSON can say, or neither `policy` nor `config` is given.
        """
        if policy is None and config is None:
            raise ValueError("expected a policy, a config or both")
        options = None if config is None else json.dumps(dict(config), allow_nan=False)
        if policy is None or (isinstance(policy, str) and policy.startswith("native:")):
            return json.loads(self._policies.put(slot, None, mode, policy or "config", None, options))
        path = Path(policy)
        beside = path.with_name(path.name + ".minisig")
        if signature is None and beside.is_file():
            signature = beside
        text = None if signature is None else Path(signature).read_text(errors="replace")
        return json.loads(self._policies.put(slot, path.read_bytes(), mode, str(path), text, options))

    def stop_shadow(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """End the shadow.

        Raises:
            PolicyError: there is none.
        """
        return json.loads(self._policies.stop_shadow(slot))

    def promote(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """Make the shadow active, with the state it has gathered.

        Raises:
            PolicyError: there is none.
        """
        return json.loads(self._policies.promote(slot))

    def rollback(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """Return to the version before.

        Raises:
            PolicyError: there is none.
        """
        return json.loads(self._policies.rollback(slot))

    def release(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """Try the version in quarantine again at once.

        Raises:
            PolicyError: there is none, or it cannot be started.
        """
        return json.loads(self._policies.release(slot))

    def status(self) -> dict[str, Any]:
        """Requests by phase, and each slot: versions, shadow, quarantine, decisions, faults."""
        return json.loads(self._policies.status())

    def faults(self) -> list[dict[str, Any]]:
        """The latest faults, oldest first; the newest with the batch they happened on."""
        return json.loads(self._policies.faults())

    def rank_evictions(
        self,
        candidates: Sequence[EvictionCandidate],
        *,
        subject: Literal["blocks", "requests"] = "blocks",
        now_ms: float = 0.0,
        free_blocks: int = 0,
        cached_blocks: int = 0,
        total_blocks: int = 0,
    ) -> list[float]:
        """Ask the eviction slot. Returns a key for each candidate, the lower goes first; empty when the slot leaves the
        batch to the block manager's own order.

        Raises:
            ValueError: a tier is not 0, 1 or 2, or `now_ms` is not finite.
        """
        _check_now(now_ms)
        blocks = (free_blocks, cached_blocks, total_blocks)
        return self._policies.rank_evictions(subject, now_ms, blocks, list(candidates))

    def thresholds(self, candidates: Sequence[ThinkingRequest], load: EngineLoad | None = None) -> list[dict[str, Any]]:
        """Ask the budget slot about requests that begin to think: the thresholds of each, by their names in
        `meridian.toml`.

        Raises:
            ValueError: `load.now_ms` is not finite.
        """
        load = load or EngineLoad()
        _check_now(load.now_ms)
        return json.loads(self._policies.thresholds(load, list(candidates)))

    def verdicts(
        self, candidates: Sequence[ThinkingRequest], load: EngineLoad | None = None
    ) -> list[Literal["default", "keep-thinking", "end-now"]]:
        """Ask the budget slot about requests that were probed or ended a sentence.

        Raises:
            ValueError: `load.now_ms` is not finite.
        """
        load = load or EngineLoad()
        _check_now(load.now_ms)
        return self._policies.verdicts(load, list(candidates))

    def close(self) -> None:
        """End the file watches and the recording. The engine goes on with the policies it has; none can be changed."""
        self._policies.close()
