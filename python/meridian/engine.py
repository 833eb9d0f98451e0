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
from meridian.vllm.markers import TokenMarkers

if TYPE_CHECKING:
    from collections.abc import Iterable

SlotName = Literal["dispatch", "eviction", "budget"]

# Longest `tenant` and `session`, as in vLLM.
MAX_NAME_CHARACTERS = 128


class KvStats(TypedDict):
    """Counters of the KV memory where Meridian manages it, since the start of the engine."""

    evictions: dict[str, int]
    """Evicted KV blocks by tier: `think_complete` (dead thinking), `think_active` (other cached blocks),
    `output_critical` (answers in progress)."""
    offload_evictions: dict[str, int]
    """Chunks that an offload store evicted, by the same tiers."""
    hit_tokens: dict[str, int]
    """Tokens of admitted requests found in the prefix cache, by kind: `prefill` (prompt), `think`, `output`."""
    missed_tokens: dict[str, int]
    recomputed_tokens: int
    """Tokens computed again because of a preemption."""
    avoidable_output_preemptions: int
    moved_blocks: int
    resyncs: int
    kept_blocks: int
    """Cached KV blocks that the eviction policy keeps for a time, now."""
    keeps: dict[str, int]
    """KV blocks that it kept for a time, by outcome: `hit` (used again), `evicted` before, `expired`."""


class BudgetStats(TypedDict):
    """Budget actions on the thinking of an engine's requests."""

    forced: dict[str, int]
    """Forced ends of thinking, by reason."""
    missed: int
    """Tokens that should have been forced, but were not."""
    waited: int
    """Tokens at which a forced end waited for the client: its mask forbade the token, or a tool call was open."""
    probes: dict[str, int]
    """`asked`, `done`, `dropped`."""
    probe_tokens: int
    think_tokens: int
    """Think tokens of ended requests."""
    thought: int
    """Ended requests that have thought."""
    reopened: int
    """Times that a request began to think again after its thinking had ended."""


class Stats(TypedDict):
    """Counters of a dispatch slot since its start. Times in milliseconds."""

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
    """The plan of one step.

    `running` and `waiting` are permutations of the given lists. `token_budget` is at least 1 and at most the engine's
    own. `token_caps` limits the tokens of the named requests (0 leaves a request out of the step). `preempted` are
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
    """0: thinking that can never match again. 1: a request that does not answer. 2: an answer."""
    blocks: int = 1
    """Device blocks that the eviction frees."""
    position: int = 0
    """A block's distance from the head of its request's chain, in blocks."""
    hits: int = 0
    """Number of times that a block was matched again."""
    age_ms: float = 0.0
    """Milliseconds since a block was allocated, or since a request began to hold blocks."""
    computed_tokens: int = 0
    """Tokens whose KV would be computed again: the tokens of a block, or all computed tokens of a request."""
    chain_tokens: int = 0
    """Tokens of the chain that used a block last, or all tokens of a request."""
    chain_blocks: int = 0
    """Blocks of that chain that no other chain has used since."""
    chain_hits: int = 0
    """Number of times that these were matched again, all together."""
    is_generated: bool = False
    """Whether a block ends beyond the prompt of its chain."""
    session: int = 0
    """Number of the session of the request that used a block last; 0 for none."""
    turn: int = 0
    """Which request of its session that request is, from 1."""
    idle_ms: float = 0.0
    """Milliseconds since that request ended; 0 while it waits to resume."""
    last_gap_ms: float = math.nan
    """Milliseconds between the session's request before and that request; NaN for a first one."""
    gap_ms: float = math.nan
    """Mean of the session's gaps after requests that stopped as its last one did, milliseconds; NaN before any."""
    gap_spread_ms: float = math.nan
    """Standard deviation of the same gaps, milliseconds."""
    gaps: int = 0
    """Number of the session's own gaps in the two; 0 where they are those of all sessions."""
    stopped_for_tool: bool = False
    """Whether that request stopped for a tool's result."""
    priority: int = 0
    """The client's priority of that request; lower is more urgent."""
    recompute_ms: float = 0.0
    """Milliseconds that computing the candidate's tokens again takes; 0 when unknown."""
    phase: int = 0
    """Phase of a request: 0 prefill, 1 think, 2 output; 0 for a block."""
    preemptions: int = 0
    """Number of preemptions of a request."""
    served_tokens: int = 0
    """Tokens that a request was given in the last step."""
    awaited: bool = False
    """Whether the prompt of a waiting request has matched a block."""
    level_slack_ms: float = math.inf
    """Milliseconds left to keep the service level of a request; infinite without one, and for a block."""


@dataclass(frozen=True)
class EvictionRanking:
    """An eviction policy's answer about a batch of candidates."""

    keys: list[float]
    """A key for each candidate; the lowest goes first. Empty when the slot leaves the batch to the host's own order."""
    keep_ms: list[float]
    """For how many milliseconds each block is kept behind the others of its tier; empty when none is."""


@dataclass(frozen=True)
class ThinkingRequest:
    """A thinking request, as a budget policy sees it. Entropies in bits."""

    prompt_tokens: int = 1
    remaining_tokens: int = 0
    think_tokens: int = 0
    think_ms: float = 0.0
    slack_ms: float = math.inf
    """Milliseconds until the client's deadline, negative after it; infinite without a deadline."""
    level_slack_ms: float = math.inf
    """Milliseconds left for more thinking if its service level is to be kept; infinite where it does not matter."""
    priority: int = 0
    tenant: int = 0
    is_probed: bool = False
    is_at_boundary: bool = False
    probes: int = 0
    eat: float | None = None
    eat_variance: float | None = None
    rpdi: float | None = None
    same_answers: int = 0
    """Latest consecutive probes with the same most likely next token; 0 when the latest probe gave none."""
    confidence: float | None = None
    """Probability of the most likely next token of the latest probe; None when there is none."""
    repetition: int = 0
    """Latest think tokens that equal those one period before; 0 without a repetition."""
    repetition_period: int = 0
    """That period, tokens."""
    request: int = 0
    """Number of the request."""
    session: int = 0
    """Number of its session; 0 without one."""
    turn: int = 0
    """Which request of its session it is, from 1; 0 without a session."""


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
class Generated:
    """The fields of vLLM's `EngineCoreOutput` that the native engine reads."""

    request_id: str
    new_token_ids: list[int]


@dataclass(frozen=True)
class Scheduled:
    """The fields of vLLM's `SchedulerOutput` that the engine reads."""

    num_scheduled_tokens: dict[str, int]
    scheduled_new_reqs: list[object] = field(default_factory=list)
    resumed_req_ids: frozenset[str] = frozenset()

    @property
    def scheduled_cached_reqs(self) -> Scheduled:
        """No request was under way before."""
        return self


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
            config: the configuration; by default, the defaults. The engine does not use its `[model]` texts.
            think_start: token sequence that starts thinking, or a list of alternatives; empty for a model that does not
                think.
            think_end: token sequence that ends thinking, or a list of alternatives.
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
            markers=TokenMarkers(_alternatives(think_start), _alternatives(think_end), list(padding)),
            block_tokens=block_tokens,
            steps_ahead=0,
            config_file=config.config_file,
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
        session: str = "",
    ) -> None:
        """Add a request that arrived at `now_ms` with the token ids of its templated prompt.

        `max_tokens` and `priority` are cut to 32 bits. All requests of a conversation have the same `session`.

        Raises:
            ValueError: a request with this id is live, `tenant` or `session` has more than 128 characters,
                `now_ms` is not finite, or `deadline_ms` is NaN.
        """
        for fact, name in (("tenant", tenant), ("session", session)):
            if len(name) > MAX_NAME_CHARACTERS:
                raise ValueError(f"{fact}: {len(name)} characters: must be at most {MAX_NAME_CHARACTERS}")
        _check_now(now_ms)
        if math.isnan(deadline_ms):
            raise ValueError("deadline_ms: nan: must be a number; inf for none")
        handle = _Handle(request_id)
        added = self._engine.add(
            handle,
            request_id,
            prompt=list(prompt),
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            arrival_ms=now_ms,
            deadline_ms=deadline_ms,
            priority=priority,
            tenant=tenant,
            session=session,
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
        """Plan one step over the live requests. Each list is in its current order.

        Raises:
            KeyError: a request is not live.
            ValueError: `now_ms` is not finite.
        """
        _check_now(now_ms)
        self._now_ms = now_ms
        running_handles: list[object] = [self._handles[request_id] for request_id in running]
        waiting_handles: list[object] = [self._handles[request_id] for request_id in waiting]
        planned = None
        while planned is None:
            # A policy that is put in meanwhile may make the engine stock, or stop it being so.
            planned = self._engine.begin(
                running_handles,
                waiting_handles,
                now_ms,
                token_budget,
                free_blocks,
                total_blocks,
                free_seats,
                len(waiting_handles),
                decode_tokens,
                self._engine.is_stock,
                False,
            )
        return StepPlan(
            running=[handle.request_id for handle in running_handles if isinstance(handle, _Handle)],
            waiting=[handle.request_id for handle in waiting_handles if isinstance(handle, _Handle)],
            token_budget=planned.token_budget,
            token_caps=planned.caps or {},
            preempted=[handle.request_id for handle in planned.preempted or [] if isinstance(handle, _Handle)],
        )

    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """Report the tokens that the planned step gave to each request."""
        self._engine.end(Scheduled(dict(tokens)), self._now_ms, False)

    def generated(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Report the token ids that each request generated, in order."""
        self._engine.tokens([[Generated(request_id, list(ids)) for request_id, ids in tokens.items()]], self._now_ms)

    def preempted(self, request_id: str) -> None:
        """Report that the request lost its KV blocks and waits again."""
        self._engine.preempted(request_id)

    def remove(self, request_id: str) -> None:
        """Remove a request that has ended."""
        self._engine.remove(request_id)
        self._handles.pop(request_id, None)

    def phase(self, request_id: str) -> str | None:
        """`"prefill"`, `"think"` or `"output"`; None when the request is not live."""
        return self._engine.phase(request_id)

    def stats(self) -> Stats:
        """Counters of the dispatch slot."""
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
        """Load a policy and make it active, or compare it with the active policy in shadow.

        Returns the report: the `active` and `previous` versions, the fate of the `state`, and `held_us`. If the slot
        already has this policy with the same options, nothing changes and the report's `action` is `unchanged`.

        Args:
            policy: the path of a component, `oci://HOST/NAME@sha256:DIGEST` for a component in a registry, or
                `native:NAME`; None for the active policy with another `config`.
            slot: the slot of the policy.
            mode: `"shadow"` to compare only.
            signature: the file with the minisign signature of a component; by default, the component's path with
                `.minisig` added, if that file exists. It is verified when `policy.trusted_keys` names keys.
            config: options of the policy. By default, a component and the native policy that the configuration names
                take the options of the configuration; other native policies take none.

        Raises:
            OSError: the file cannot be read.
            PolicyError: the policy was refused or not fetched; the active policy stays.
            TypeError, ValueError: JSON cannot hold `config`, or neither `policy` nor `config` is given.
        """
        if policy is None and config is None:
            raise ValueError("expected a policy, a config or both")
        options = None if config is None else json.dumps(dict(config), allow_nan=False)
        if policy is None or (isinstance(policy, str) and policy.startswith(("native:", "oci://"))):
            return json.loads(self._policies.put(slot, None, mode, policy or "config", None, options))
        path = Path(policy)
        beside = path.with_name(path.name + ".minisig")
        if signature is None and beside.is_file():
            signature = beside
        text = None if signature is None else Path(signature).read_text(errors="replace")
        return json.loads(self._policies.put(slot, path.read_bytes(), mode, str(path), text, options))

    def stop_shadow(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """Stop the shadow policy.

        Raises:
            PolicyError: the slot has no shadow.
        """
        return json.loads(self._policies.stop_shadow(slot))

    def promote(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """Make the shadow policy active, with the state that it has gathered.

        Raises:
            PolicyError: the slot has no shadow.
        """
        return json.loads(self._policies.promote(slot))

    def rollback(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """Return to the previous version.

        Raises:
            PolicyError: the slot has no previous version.
        """
        return json.loads(self._policies.rollback(slot))

    def release(self, slot: SlotName = "dispatch") -> dict[str, Any]:
        """Retry the version in quarantine at once.

        Raises:
            PolicyError: no version is in quarantine, or it cannot be started.
        """
        return json.loads(self._policies.release(slot))

    def status(self) -> dict[str, Any]:
        """Requests by phase, and each slot: versions, shadow, quarantine, decisions, faults."""
        return json.loads(self._policies.status())

    def faults(self) -> list[dict[str, Any]]:
        """The latest faults, oldest first; the newest faults include their batch."""
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
    ) -> EvictionRanking:
        """Ask the eviction slot about candidates.

        Raises:
            ValueError: a tier or a phase is not 0, 1 or 2, or `now_ms` is not finite.
        """
        _check_now(now_ms)
        blocks = (free_blocks, cached_blocks, total_blocks)
        return EvictionRanking(*self._policies.rank_evictions(subject, now_ms, blocks, list(candidates)))

    def thresholds(self, candidates: Sequence[ThinkingRequest], load: EngineLoad | None = None) -> list[dict[str, Any]]:
        """Ask the budget slot for the thresholds of requests that begin to think, by their names in `meridian.toml`.

        Raises:
            ValueError: `load.now_ms` is not finite.
        """
        load = load or EngineLoad()
        _check_now(load.now_ms)
        return json.loads(self._policies.thresholds(load, list(candidates)))

    def verdicts(
        self, candidates: Sequence[ThinkingRequest], load: EngineLoad | None = None
    ) -> list[Literal["default", "keep-thinking", "end-now"]]:
        """Ask the budget slot for verdicts on requests that were probed or ended a sentence.

        Raises:
            ValueError: `load.now_ms` is not finite.
        """
        load = load or EngineLoad()
        _check_now(load.now_ms)
        return self._policies.verdicts(load, list(candidates))

    def close(self) -> None:
        """Stop the file watches and the recording. The engine keeps its policies; they can no longer be changed."""
        self._policies.close()
