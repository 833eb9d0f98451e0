"""`BudgetLogitsProcessor`: ends thinking at the exact token and measures entropies, in the sampling process.

vLLM has two interfaces for logits processors, one for each model runner, and one name must serve both. The class
implements both; the arguments of its constructor show which runner uses it
(vllm/v1/sample/logits_processor/interface.py, vllm/v1/worker/gpu/sample/logits_processor/interface.py). meridian-core's
`Enforcer` decides which tokens to force and when; this module changes the logits accordingly. It comes after vLLM's own
masks (grammar, `allowed_token_ids`, `bad_words`, `min_tokens`, `logit_bias`) and forces no token that they forbid. One
long file: both interfaces and both ways of stepping, with drafts and without, share one sampler.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality

from meridian import _native, kernels
from meridian._torch_rows import on_device
from meridian.config import ModelConfig, load_config
from meridian.vllm.answers import AnswerGuard, ban, blank_tokens
from meridian.vllm.channel import MODEL, ToScheduler, listen
from meridian.vllm.markers import engine_tokenizer, resolve
from meridian.vllm.reports import Reports
from meridian.vllm.speculation import BONUS, NO_TOKEN, TARGETS, Drafts, drafts_of
from meridian.vllm.xargs import NO_LIMIT, ROW, RequestBudget, forbidding, is_banned, read_budget, row_of

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor.interface import BatchUpdate

    from meridian.config import MeridianConfig

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as RunnerV2LogitsProcessor
except ImportError:  # vLLM before Model Runner V2
    RunnerV2LogitsProcessor = object

logger = logging.getLogger("vllm.meridian")

# Exceptions that Meridian itself could raise: a panic of the native code derives from BaseException.
DEFECTS = (Exception, _native.PanicException)
# Tokens at the end of a prompt on the device that are read first for its last turn.
_TAIL = 128
# vLLM samples greedily below this temperature (vllm/v1/sample/sampler.py).
_GREEDY_BELOW = 1e-5


class BudgetLogitsProcessor(LogitsProcessor, RunnerV2LogitsProcessor):  # type: ignore[misc, valid-type]
    """`--logits-processors meridian.vllm:BudgetLogitsProcessor`.

    With `MeridianScheduler`, all thinking budgets act, as the scheduler's configuration says. Alone, the processor
    applies the client's options in `vllm_xargs` (`meridian.vllm.xargs`) that need no probe, with the `meridian.toml` of
    this process. It does not change a request without any options.

    With speculative decoding, the model runner V1 needs the wrappers of `meridian.vllm.speculation`.

    Raises:
        ConfigError: `meridian.toml` is not valid.
        RuntimeError: this vLLM is not supported.
        ValueError: the engine speculates on the model runner V1, without these wrappers.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, speculates: bool = False) -> None:
        self._sampler: _Sampler | None = None
        self._slots: _Slots | None = None
        # The present step, if it verifies drafts.
        self._drafted: _Drafted | None = None
        if vllm_config.speculative_config is not None and len(args) != 1 and not speculates:
            raise ValueError(
                "speculative_config: meridian.vllm:BudgetLogitsProcessor cannot be used with speculative decoding "
                "without its plugin `meridian`: name it in VLLM_PLUGINS, or unset that variable"
            )
        self._sampler = _make_sampler(vllm_config)
        if self._sampler is None:
            return
        if len(args) == 1:
            self._slots = _Slots(self._sampler, args[0])
        if self._sampler.ends_thinking:
            # The model runner V1 gives the device itself, V2 its states.
            self._sampler.warm_up(args[0].device if len(args) == 1 else args[0])

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse an invalid budget; vLLM answers with HTTP 400.

        Raises:
            ValueError: names the key, the value and what was expected.
        """
        read_budget(sampling_params.extra_args)

    # For the model runner V1.

    def is_argmax_invariant(self) -> bool:
        """A forced token is not the likeliest one: vLLM would skip the processor for greedy batches."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each forward pass: follow requests that joined, left or moved in the batch."""
        if self._sampler is None:
            return
        try:
            # First: new requests may come with another configuration.
            self._sampler.receive()
            if batch_update is not None:
                self._sampler.follow(batch_update)
        except DEFECTS:
            self._give_up("following the batch")

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Force, guard and measure. logits: [rows, vocabulary], float32; changed in place."""
        try:
            if self._slots is not None:
                self._slots.apply(logits, ctx)
            elif self._sampler is not None and self._drafted is not None:
                self._drafted.change(logits, BONUS)
            elif self._sampler is not None:
                self._sampler.apply(logits, None)
        except DEFECTS:
            self._give_up("ending thinking")
        return logits

    # For the model runner V1 with speculative decoding: around vLLM's rejection sampler.

    def begin_drafts(self, metadata: Any, logits: torch.Tensor) -> None:
        """Plan a step that verifies drafts. logits: [drafts + rows, vocabulary], not changed."""
        self._drafted = None
        try:
            if self._sampler is not None and not self._sampler.rows.is_idle:
                drafts = drafts_of(metadata)
                self._drafted = _Drafted(self._sampler, list(range(len(drafts.tokens))), drafts, logits)
        except DEFECTS:
            self._give_up("planning drafts")

    def apply_drafts(self, logits: torch.Tensor) -> torch.Tensor:
        """Force and guard. logits: [drafts, vocabulary], float32; changed in place."""
        try:
            if self._drafted is not None:
                self._drafted.change(logits, TARGETS)
        except DEFECTS:
            self._give_up("ending thinking")
        return logits

    def end_drafts(self) -> None:
        """After the step has sampled."""
        try:
            if self._drafted is not None:
                self._drafted.report()
        except DEFECTS:
            self._give_up("reporting")
        self._drafted = None

    # For the model runner V2.

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Take in a request in its slot. Returns whether the processor may change or measure its logits."""
        try:
            return self._slots is not None and self._slots.add(req_idx, sampling_params)
        except DEFECTS:
            self._give_up("taking in a request")
            return False

    def apply_staged_writes(self) -> None:
        """Before each forward pass: receive the scheduler's orders."""
        try:
            if self._sampler is not None:
                self._sampler.receive()
        except DEFECTS:
            self._give_up("hearing the scheduler")

    def _give_up(self, doing: str) -> None:
        """Turn the processor off after a defect of Meridian itself, which must not end the engine."""
        self._sampler = self._slots = self._drafted = None
        logger.exception("meridian: failed while %s; thinking is not ended any more", doing)


class _Client(NamedTuple):
    """The rules of one request's client."""

    temperature: float
    bias: dict[int, float] | None
    # A grammar that knows no thinking holds in it: the end marker would stand inside one of its texts.
    bound: bool


class _Sampler:
    """The part that both model runners share."""

    def __init__(
        self, config: MeridianConfig, vllm_config: VllmConfig, tokenizer: Any, channel: ToScheduler, eos: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vllm_config = vllm_config
        # Its own configuration, used until a scheduler sends another.
        self._own_model = config.model
        self._reserve = config.scheduler.answer_reserve_tokens
        self._answers = AnswerGuard(eos)
        self.rows = _native.BudgetRows()
        self._end_as(config.model)
        self._channel = channel
        self._reports = Reports(channel.tell)
        self._eos = list(eos)
        outputs = vllm_config.structured_outputs_config
        # Whether grammars hold from the first token on.
        self._binds_thinking = not outputs.reasoning_parser or outputs.enable_in_reasoning
        # Row -> its client, for guarded and forced rows.
        self._clients: dict[int, _Client] = {}

    def _end_as(self, model: ModelConfig) -> None:
        """From the next request on, end thinking as `model` says."""
        markers = resolve(model, self._tokenizer, self._vllm_config, quiet=True)
        self.rows.configure(markers, model.resumes)
        counts = markers.ends and model.min_answer_tokens > 0
        blank = blank_tokens(self._tokenizer, markers) if counts else []
        self.rows.configure_answers(model.min_answer_tokens, self._reserve, blank)
        self._model = markers.model
        self._forced = markers.forced
        self._ends = _texts(markers.model.think_end)
        self.boundaries = markers.boundaries
        self.ends_thinking = bool(markers.ends)

    def warm_up(self, device: torch.device) -> None:
        """Choose, load and log the backend of this device before the first step needs it."""
        backend = self._reports.measure(torch.zeros(1, 8, device=device), [0]).backend
        logger.info("meridian: entropies on %s are measured by %s", device, backend)

    def follow(self, update: BatchUpdate) -> None:
        """Follow requests that left, joined and moved in the batch of the model runner V1, in this order."""
        for index in update.removed:
            self.rows.remove(index)
        for index, params, prompt, outputs in update.added:
            self.add(index, params, prompt or [], outputs)
        for one, other, direction in update.moved:
            self.move(one, other, swaps=direction == MoveDirectionality.SWAP)

    def add(self, index: int, params: SamplingParams, prompt: list[int], outputs: list[int] | None) -> bool:
        """Take in a request in its row; of its prompt, the last turn is enough. Returns False when the processor will
        have nothing to do for it."""
        extra = params.extra_args or {}
        row: dict[str, Any] | None = row_of(extra)
        if row is not None and "probe" in row:
            self.rows.add_probe(index, row["probe"], row["at"])
            return True
        budget = _client_budget(params) if row is None else RequestBudget()
        if not self.ends_thinking or (row is None and not budget.is_set):
            self.rows.remove(index)
            return False
        model = self._model
        if row is None:
            # No scheduler plans for this request: only the client's options apply.
            limit = budget.max_think_tokens
            row = {
                "key": None,
                "followed": True,
                "limit": NO_LIMIT if limit is None else limit,
                "interrupts": interrupts_of(self._tokenizer, (*_texts(model.interrupt), *budget.interrupts)),
                "measured": False,
                "reserve": NO_TOKEN if params.ignore_eos else self.rows.reserve_from(params.max_tokens or NO_TOKEN),
                "answers": True,
                "plain": has_no_phrase(params, model.force_phrase, self._forced),
            }
        guards = model.eos_guard and not params.ignore_eos and bool(self._eos)
        self.rows.add(index, prompt, outputs, row, guards)
        self._answers.add(index, params)
        grammar = params.structured_outputs
        bound = grammar is not None and self._binds_thinking and not _permits_text(grammar, self._ends)
        self._clients[index] = _Client(params.temperature, params.logit_bias, bound)
        return True

    def move(self, one: int, other: int, *, swaps: bool) -> None:
        """Swap two rows, or move one into the place of the other."""
        self.rows.move_row(one, other, swaps)
        self._answers.move(one, other, swaps=swaps)
        first, second = self._clients.pop(one, None), self._clients.pop(other, None)
        for row, client in ((other, first), (one, second if swaps else None)):
            if client is not None:
                self._clients[row] = client

    def receive(self) -> None:
        """Before each forward pass: take in the scheduler's orders, and send it the measurements of earlier steps."""
        for message in self._channel.received():
            if message.startswith(MODEL):
                self._told(message.removeprefix(MODEL))
            else:
                self.rows.receive(message)
        self._reports.flush()

    def _told(self, text: bytes) -> None:
        """Use the scheduler's configuration, or the own one after the scheduler has withdrawn its configuration."""
        try:
            fields = json.loads(text)
            self._end_as(self._own_model if fields is None else ModelConfig(**fields))
        except (ValueError, TypeError) as why:
            logger.warning("meridian: what a scheduler tells of its configuration cannot be read: %s", why)

    def apply(self, logits: torch.Tensor, rows: dict[int, int] | None) -> None:
        """`rows`: slot -> row of the logits, for the slots that sample. None: slot and row are equal and all sample."""
        if self.rows.is_idle:
            return
        slots = None if rows is None else list(rows)
        forced, tokens, guarded, measured = self.rows.step(logits.shape[0] if rows is None else 0, slots)
        pending = None
        if measured:
            pending = self.measure(logits, measured if rows is None else [rows[slot] for slot in measured])
        stands: list[int] = []
        if guarded:
            at = guarded if rows is None else [rows[slot] for slot in guarded]
            stands = [guarded[i] for i in self.guard(logits, guarded, at)]
        banned = self._answers.banned(self.rows.answering())
        ban(logits, banned if rows is None else {rows[slot]: tokens for slot, tokens in banned.items()})
        if forced:
            self.force(logits, forced, forced if rows is None else [rows[slot] for slot in forced], tokens)
        self.report(stands, pending)

    def force(self, logits: torch.Tensor, slots: list[int], rows: list[int], tokens: list[int]) -> None:
        """Force tokens of the requests in `slots`, in `rows` of the logits, where the client permits it."""
        permitted = [i for i, (slot, token) in enumerate(zip(slots, tokens, strict=True)) if self._permits(slot, token)]
        force(logits, [rows[i] for i in permitted], [tokens[i] for i in permitted])

    def _permits(self, slot: int, token: int) -> bool:
        """Whether the client's grammar and `logit_bias` leave the token possible; masks are in the logits."""
        client = self._clients.get(slot)
        return client is None or not (client.bound or is_banned(client.bias, token))

    def measure(self, logits: torch.Tensor, rows: list[int]) -> kernels.Pending:
        """Start measuring the entropies of rows, which may be changed afterwards."""
        return self._reports.measure(logits, rows)

    def report(self, stands: list[int], pending: kernels.Pending | None) -> None:
        """Tell the scheduler about the step: the rows at which an end of sequence stands, and the entropies."""
        self.rows.guard(stands)
        self._reports.add(self.rows.told(), pending)
        # The scheduler's own `Enforcer` must know the meaning of such a token before the token itself. `guard` has then
        # waited for the device, so the entropies are complete as well.
        self._reports.flush(waits=bool(stands))

    def guard(self, logits: torch.Tensor, slots: list[int], rows: list[int]) -> list[int]:
        """Add the probability of an end of sequence to the first token of the end marker, in `rows` of the logits that
        belong to the requests in `slots`, where the client does not forbid that token. Returns the indices of the rows
        in which the end of sequence is likelier, if the scheduler must know them."""
        at = _on(logits, rows)
        temperatures = [self._clients[slot].temperature if slot in self._clients else 0.0 for slot in slots]
        temperature = on_device(temperatures, logits.device, torch.float32)
        first = self.rows.guard_token
        eos = _on(logits, self._eos)
        ends = logits[at[:, None], eos]
        own = logits[at, first]
        both = torch.cat((ends, own[:, None]), dim=1)
        sampled = temperature >= _GREEDY_BELOW
        divided = both / torch.where(sampled, temperature, 1.0)[:, None]
        together = torch.where(sampled, temperature * divided.logsumexp(dim=1), both.max(dim=1).values)
        permitted = own > float("-inf")
        if banned := [i for i, slot in enumerate(slots) if not self._permits(slot, first)]:
            permitted[banned] = False
        logits[at[:, None], eos] = torch.where(permitted[:, None], float("-inf"), ends)
        logits[at, first] = torch.where(permitted, together, own)
        if not self.rows.guard_continues and logits.device.type != "cpu":
            return []
        # Reading it back waits for the device, so do it only if other tokens of the marker must follow.
        likelier = ((ends.max(dim=1).values > own) & permitted).tolist()
        return [i for i, is_likelier in enumerate(likelier) if is_likelier]

    def banned(self, slots: dict[int, int]) -> dict[int, list[int]]:
        """Rows of the latest step with the tokens that they must not sample; `slots` has the slot of each row."""
        return self._answers.banned(self.rows.answering(), slots)

    def stands(self, logits: torch.Tensor, rows: list[int]) -> list[int]:
        """The indices of the rows in which an end of sequence is likelier than the end marker. Changes nothing."""
        at = _on(logits, rows)
        ends = logits[at[:, None], _on(logits, self._eos)].max(dim=1).values
        own = logits[at, self.rows.guard_token]
        likelier = ((ends > own) & (own > float("-inf"))).tolist()
        return [i for i, is_likelier in enumerate(likelier) if is_likelier]


class _Drafted:
    """A step that verifies drafts. Its rows are those of the step's logits: for each of `slots`, one row a draft token
    and one for the token after them. `Drafts.places` says where they are."""

    def __init__(
        self,
        sampler: _Sampler,
        slots: list[int],
        drafts: Drafts,
        logits: torch.Tensor,
    ) -> None:
        self._sampler, self._slots, self._drafts = sampler, slots, drafts
        rows = sampler.rows
        plan = rows.step_drafts(slots, drafts.tokens, [])
        if rows.guard_continues:
            # Drafts that begin an end marker where the model may have meant to end the sequence: by the model's logits,
            # before vLLM's own changes, which would have to be made twice.
            begun = [row for row in plan[2] if drafts.verified[row] == rows.guard_token]
            if begun:
                stands = sampler.stands(logits, begun if drafts.is_split else [drafts.places[row][1] for row in begun])
                stood = [begun[i] for i in stands]
                plan = rows.step_drafts(slots, drafts.tokens, stood) if stood else plan
        self._forced, self._tokens, self._guarded, measured = plan
        self._banned = sampler.banned({row: slots[owner] for row, owner in enumerate(drafts.owners)})
        at = measured if drafts.is_split else [drafts.places[row][1] for row in measured]
        self._pending = sampler.measure(logits, at) if measured else None
        self._stands: list[int] = []

    def change(self, logits: torch.Tensor, part: int) -> None:
        """Guard and force the rows of one of the tensors that `Drafts.places` names."""
        places = self._drafts.places
        guarded = [row for row in self._guarded if places[row][0] == part]
        if guarded:
            slots = [self._slots[self._drafts.owners[row]] for row in guarded]
            stands = self._sampler.guard(logits, slots, [places[row][1] for row in guarded])
            self._stands += [guarded[i] for i in stands]
        ban(logits, {places[row][1]: tokens for row, tokens in self._banned.items() if places[row][0] == part})
        forced = [(row, token) for row, token in zip(self._forced, self._tokens, strict=True) if places[row][0] == part]
        if forced:
            slots = [self._slots[self._drafts.owners[row]] for row, _ in forced]
            self._sampler.force(logits, slots, [places[row][1] for row, _ in forced], [token for _, token in forced])

    def report(self) -> None:
        """Tell the scheduler about the step."""
        self._sampler.report(self._stands, self._pending)


class _Slots:
    """The part for the model runner V2: a request keeps its slot, the order of rows changes every step, and tokens are
    on the device. One copy of a step's last tokens to the host shows the tokens sampled before."""

    def __init__(self, sampler: _Sampler, states: Any) -> None:
        self._sampler = sampler
        self._states = states
        # Slots whose prompt and tokens are read when they first sample.
        self._new: dict[int, SamplingParams] = {}
        self._known: set[int] = set()

    def add(self, slot: int, params: SamplingParams) -> bool:
        self._sampler.rows.remove(slot)
        self._known.discard(slot)
        row = row_of(params.extra_args)
        # A request that nothing follows needs no step of a processor: vLLM then leaves its logits alone.
        if not _client_budget(params).is_set if row is None else not row.get("followed", True):
            self._new.pop(slot, None)
            return False
        self._new[slot] = params
        return True

    def apply(self, logits: torch.Tensor, ctx: Any) -> None:
        if not self._new and not self._known:
            return
        states, sampler = self._states, self._sampler
        # With speculative decoding, a request has a row for each draft token after the row of its last token.
        inputs, positions, owners = torch.stack(
            (ctx.input_ids.long(), ctx.pos.long(), ctx.expanded_idx_mapping.long())
        ).tolist()
        rows: dict[int, int] = {}
        drafts: list[list[int]] = []
        # Slots that have more new tokens than their last one, with the first new token and the end.
        behind: list[tuple[int, int, int]] = []
        row = 0
        for slot, own in groupby(owners):
            first, row = row, row + len(list(own))
            if slot not in self._new and slot not in self._known:
                continue
            length, prompt = positions[first] + 1, int(states.prompt_len.np[slot])
            if length < prompt or length < int(states.prefill_len.np[slot]):
                # A chunk of a prompt: vLLM discards the sampled token.
                continue
            rows[slot] = first
            drafts.append([token if token >= 0 else NO_TOKEN for token in inputs[first + 1 : row]])
            generated = length - prompt
            params = self._new.pop(slot, None)
            if params is not None:
                sampler.add(slot, params, self._last_turn(slot, prompt), None)
                self._known.add(slot)
            known = sampler.rows.tokens(slot)
            if known is None or known == generated:
                continue
            if known == generated - 1:
                sampler.rows.push(slot, [inputs[first]], False)
            else:
                behind.append((slot, prompt + (known if known < generated else 0), length))
        self._catch_up(behind)
        if not any(drafts):
            sampler.apply(logits, rows)
            return
        places = [(0, first + i) for first, of in zip(rows.values(), drafts, strict=True) for i in range(len(of) + 1)]
        step = _Drafted(sampler, list(rows), Drafts(drafts, places), logits)
        step.change(logits, 0)
        step.report()

    def _last_turn(self, slot: int, prompt: int) -> list[int]:
        """The end of a prompt of so many tokens, with its last turn."""
        tail, length = list[int](), _TAIL
        while len(tail) < prompt and self._sampler.boundaries.isdisjoint(tail):
            tail = self._states.all_token_ids.gpu[slot, max(prompt - length, 0) : prompt].tolist()
            length *= 8
        return tail

    def _catch_up(self, behind: list[tuple[int, int, int]]) -> None:
        """Deliver several tokens of each request, which one copy brings from the device."""
        if not behind:
            return
        states, rows = self._states, self._sampler.rows
        at = [(slot, position) for slot, start, end in behind for position in range(start, end)]
        device = states.all_token_ids.gpu.device
        slots, positions = (on_device(list(of), device, torch.int64) for of in zip(*at, strict=True))
        tokens = states.all_token_ids.gpu[slots, positions].tolist()
        for slot, start, end in behind:
            own, tokens = tokens[: end - start], tokens[end - start :]
            rows.push(slot, own, start == int(states.prompt_len.np[slot]))


def _client_budget(params: SamplingParams) -> RequestBudget:
    """The options of a client for which no scheduler plans."""
    if not params.extra_args:
        return RequestBudget()
    return read_budget({key: value for key, value in (params.extra_args or {}).items() if key != ROW})


def interrupts_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token sequences of the texts; they differ at the beginning of a word and inside a word."""
    found: list[list[int]] = []
    for text in texts:
        for variant in (text, f" {text}", f"\n{text}"):
            ids = list(tokenizer.encode(variant, add_special_tokens=False))
            if variant != text:
                # Without the white space, if that is a separate token.
                alone = list(tokenizer.encode(variant[0], add_special_tokens=False))
                ids = ids[len(alone) :] if ids[: len(alone)] == alone else ids
            if ids and ids not in found:
                found.append(ids)
    return found


def force(logits: torch.Tensor, rows: list[int], tokens: list[int]) -> None:
    """Leave each of the rows one possible token; a row in which this token is impossible stays."""
    if not rows:
        return
    at, to = _on(logits, rows), _on(logits, tokens)[:, None]
    own = logits[at]
    alone = torch.full_like(own, float("-inf")).scatter_(1, to, 0.0)
    logits[at] = torch.where(own.gather(1, to) > float("-inf"), alone, own)


def has_no_phrase(params: SamplingParams, phrase: str, tokens: Sequence[int]) -> bool:
    """Whether to force the end marker without a phrase of these tokens: the client forbids one of them, or one of its
    stops could end the request inside it. The stop is in the phrase, or overlaps one of its ends."""
    if not phrase:
        return False
    if not set(tokens).isdisjoint(params.stop_token_ids or ()) or forbidding(params, tokens):
        return True
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    return any(
        stop in phrase or any(phrase.startswith(stop[at:]) or phrase.endswith(stop[:at]) for at in range(1, len(stop)))
        for stop in stops
        if stop
    )


def _permits_text(grammar: Any, ends: Sequence[str]) -> bool:
    """Whether vLLM's `StructuredOutputsParams` permit free text before tags, or name one of these texts, of which
    patterns may escape characters."""
    if grammar.structural_tag:
        return True
    forms = (grammar.json, grammar.regex, grammar.choice, grammar.grammar)
    texts = [form if isinstance(form, str) else json.dumps(form, ensure_ascii=False) for form in forms if form]
    return any(end in text.replace("\\", "") for end in ends for text in texts)


def _on(logits: torch.Tensor, values: list[int]) -> torch.Tensor:
    return on_device(values, logits.device, torch.int64)


def _texts(texts: str | list[str]) -> list[str]:
    return [text for text in ([texts] if isinstance(texts, str) else texts) if text]


def _make_sampler(vllm_config: VllmConfig) -> _Sampler | None:
    """Make the sampler; None for an engine without a tokenizer. Its own configuration may define no thinking, because a
    scheduler may send another configuration."""
    config = load_config()
    tokenizer = engine_tokenizer(vllm_config.model_config)
    if tokenizer is None:
        return None
    channel = ToScheduler()
    listen(vllm_config, channel)
    return _Sampler(config, vllm_config, tokenizer, channel, _end_of_sequence(vllm_config, tokenizer))


def _end_of_sequence(vllm_config: VllmConfig, tokenizer: Any) -> list[int]:
    """Tokens that end a sequence: the tokenizer's, and those of the generation config."""
    found = {getattr(tokenizer, "eos_token_id", None)}
    configured = vllm_config.model_config.try_get_generation_config().get("eos_token_id")
    found.update(configured if isinstance(configured, list) else [configured])
    return sorted(token for token in found if isinstance(token, int))
