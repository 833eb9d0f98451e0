//! Thinking budgets of an engine's requests. One long file: tokens, reports, probes and orders change the same record.

use std::collections::HashSet;
use std::sync::Arc;

use crate::table::RequestState;
use crate::{EntropySignal, PhaseEvent, RequestTable, RowId, Standing};

use super::record::{KEPT_SIGNALS, Probe, ThinkRecord};
use super::{
    BudgetDecider, BudgetStatus, BudgetWants, ClientBudget, Demand, Enforcement, Enrolled, ForceReason, Load, Measured,
    OnLoops, Order, Report, SamplerLimits, Signal, ThinkBudget, ThinkSettings, Thresholds, Verdict,
};
use crate::config::ProbeAt;

/// Most entropies of one request to keep for tokens that have not arrived: two steps with vLLM's most drafts, 128.
const KEPT_ENTROPIES: usize = 258;
/// A probe waits this part of its interval for others.
const WAITS: u32 = 4;

/// The thinking of an engine's requests: its measurements, the decisions of the budget slot, and the orders for the
/// sampling processes. The record of each request is a part of its row in the [`RequestTable`].
///
/// The scheduling thread drives it: it reports generated tokens and measurements, and calls [`ThinkBudgets::decide`]
/// once before each step. Requests are named by their keys in the sampling process ([`Enrolled::key`]).
///
/// ```
/// use meridian_core::budget::{ClientBudget, EndRules, ThinkBudgets, ThinkSettings};
/// use meridian_core::{Markers, NewRequest, RequestTable};
///
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let mut table = RequestTable::new(markers.clone());
/// let mut budgets = ThinkBudgets::new(ThinkSettings::new(EndRules::new(markers, vec![])?));
/// let row = table.insert(&NewRequest { prompt: &[1, 7], ..NewRequest::default() })?;
/// let client = ClientBudget { max_think_tokens: Some(2), ..ClientBudget::default() };
/// assert_eq!(budgets.enroll(&mut table, row, "a", client).map(|enrolled| enrolled.limits.max_think_tokens), Some(2));
/// // Two tokens of thinking, then the end marker that was forced.
/// budgets.generated(&mut table, &[(row, 40), (row, 41), (row, 8)], &mut Vec::new());
/// assert_eq!((budgets.status().forced[0], budgets.status().missed), (1, 0));
/// # Ok::<(), meridian_core::Error>(())
/// ```
pub struct ThinkBudgets {
    settings: ThinkSettings,
    /// Requests that begin to think: their thresholds are due.
    opening: Vec<RowId>,
    /// Requests with facts that no verdict has weighed.
    signalled: Vec<RowId>,
    /// Requests that have reached the minimum that an `EndNow` waited for, or are in a loop.
    ending: Vec<RowId>,
    orders: Vec<u8>,
    /// Orders for ended requests, sent with the next orders.
    gone: Vec<u8>,
    /// Orders that wake up samplers, sent with the next orders.
    woken: Vec<u8>,
    status: BudgetStatus,
    signals: Option<Vec<Signal>>,
    /// The inputs of the slot's policies, as of the latest decision.
    wants: BudgetWants,
    /// What the slot was told of ended requests.
    ended: u64,
    /// Requests that are not followed, and whose samplers an order can wake up.
    idle: HashSet<RowId>,
}

impl ThinkBudgets {
    /// No request thinks yet.
    #[must_use]
    pub fn new(settings: ThinkSettings) -> Self {
        Self {
            settings,
            opening: Vec::new(),
            signalled: Vec::new(),
            ending: Vec::new(),
            orders: Vec::new(),
            gone: Vec::new(),
            woken: Vec::new(),
            status: BudgetStatus::default(),
            signals: None,
            wants: BudgetWants::default(),
            ended: 0,
            idle: HashSet::new(),
        }
    }

    /// Take in the request in this row, and follow its thinking from its first token on if anything may end it: the
    /// operator's settings, a policy, or its client. `id` is the engine's name of it. `None` when the row is not live.
    pub fn enroll(&mut self, table: &mut RequestTable, row: RowId, id: &str, client: ClientBudget) -> Option<Enrolled> {
        let state = table.row_mut(row)?;
        let key = self.settings.key(state.row_id());
        let thresholds = client.over(self.settings.configured);
        let follows = client.asks()
            || self.wants.decides
            || self.signals.is_some()
            || self.settings.may_end_any()
            || thresholds.max_think_tokens < state.max_tokens;
        if !follows {
            self.idle.insert(state.row_id());
            return Some(Enrolled {
                key,
                limits: SamplerLimits { is_plain: client.is_plain, ..SamplerLimits::idle() },
            });
        }
        let limits = self.follow(state, id, client);
        let is_measured = state.thinking.as_ref().is_some_and(|record| record.is_measured);
        Some(Enrolled { key, limits: SamplerLimits { is_measured, ..limits } })
    }

    /// Follow the thinking of a request that asked for nothing when it arrived: the operator or a policy now does. An
    /// order wakes up its sampler. False when the row is not live, followed already, or its sampler cannot be woken up: the
    /// model runner follows none later, or the request arrived while nothing was enrolled.
    pub fn enroll_late(&mut self, table: &mut RequestTable, row: RowId, id: &str) -> bool {
        let Some(state) = table.row_mut(row).filter(|state| state.thinking.is_none()) else { return false };
        if !self.settings.wakes || !self.idle.remove(&state.row_id()) {
            return false;
        }
        let max_think_tokens = self.follow(state, id, ClientBudget::default()).max_think_tokens;
        let key = self.settings.key(state.row_id());
        if let Some(record) = state.thinking.as_deref_mut() {
            // Its tokens in flight are sampled already.
            let from = record.enforcement.tokens() + self.settings.tokens_ahead;
            record.order(key, from, max_think_tokens, &mut self.woken);
        }
        true
    }

    /// Make the record of a request's thinking, as far as it has come.
    fn follow(&mut self, state: &mut RequestState, id: &str, client: ClientBudget) -> SamplerLimits {
        let ThinkSettings { configured, interrupts, guards_eos, .. } = &self.settings;
        let thresholds = client.over(*configured);
        let mut patterns = interrupts.to_vec();
        patterns.extend(client.interrupts.iter().cloned());
        // The limit is a budget only where the request could reach it.
        let has_budget = client.max_think_tokens.is_some()
            || !client.interrupts.is_empty()
            || thresholds.max_think_tokens < state.max_tokens;
        let keeps_room = has_budget && !client.ignores_eos;
        let limits = SamplerLimits {
            max_think_tokens: thresholds.max_think_tokens,
            is_plain: client.is_plain,
            interrupts: patterns.into(),
            guards_eos: *guards_eos,
            reserve_from: if keeps_room { self.settings.rules.reserve_from(state.max_tokens) } else { u32::MAX },
            guards_answer: has_budget,
            ..SamplerLimits::default()
        };
        // Checked on reading; if not, the operator's thresholds hold.
        let mut budget = ThinkBudget::new(thresholds, [].into())
            .or_else(|_| ThinkBudget::new(*configured, [].into()))
            .or_else(|_| ThinkBudget::new(Thresholds::default(), [].into()))
            .expect("the default thresholds are in range");
        budget.on_loops(self.on_loops(&client));
        let (tokens, think_tokens) = (state.think_tokens() + state.output_tokens(), state.think_tokens());
        let enforcement = Enforcement::resumed(limits.clone(), tokens, think_tokens);
        let mut record = ThinkRecord::new(id.into(), enforcement, budget, client);
        record.is_measured = self.is_to_be_measured(&thresholds, &record.client);
        if state.phases.is_thinking() {
            self.opening.push(state.row_id());
        }
        state.thinking = Some(Box::new(record));
        limits
    }

    /// Whether every request is to be followed from now on, by the inputs of the slot's policies.
    pub fn begins_to_decide(&mut self, wants: &BudgetWants) -> bool {
        !std::mem::replace(&mut self.wants.decides, wants.decides) && wants.decides
    }

    /// Whether any live request is followed, or anything is to be told to the samplers.
    #[must_use]
    pub fn is_active(&self, table: &RequestTable) -> bool {
        !self.gone.is_empty() || !self.woken.is_empty() || followed(table).next().is_some()
    }

    /// Stop following these requests; another follower takes over new requests.
    pub fn forget(table: &mut RequestTable) {
        table.iter_mut().for_each(|row| row.thinking = None);
    }

    /// The request with this key and the record of its thinking, if both exist.
    fn find<'a>(&self, table: &'a RequestTable, key: u64) -> Option<(&'a RequestState, &'a ThinkRecord)> {
        row_of(table, self.id(key)?)
    }

    fn record<'a>(&self, table: &'a mut RequestTable, key: u64) -> Option<&'a mut ThinkRecord> {
        record_of(table, self.id(key)?)
    }

    fn key(&self, id: RowId) -> u64 {
        self.settings.key(id)
    }

    fn id(&self, key: u64) -> Option<RowId> {
        let bits = key ^ self.settings.key(RowId::from_bits(0));
        (bits >> RowId::BITS == 0).then(|| RowId::from_bits(bits))
    }

    /// Take in a message of [`Report`]s from the sampling process. The sender is not trusted.
    pub fn received(&mut self, table: &mut RequestTable, message: &[u8]) {
        for report in Report::read_all(message) {
            let Report { key, token, ahead, what, entropy_nats, confidence } = report;
            let Some(id) = self.id(key) else { continue };
            let Some(record) = record_of(table, id) else { continue };
            match what {
                // A probe is identified by its due token: the report of a dropped probe may arrive late.
                Measured::Probe => match &mut record.probe {
                    Probe::Running { tokens, measured, .. } if *tokens == token => {
                        *measured = Some((entropy_nats, confidence));
                    }
                    &mut Probe::Returned { tokens, think_tokens, answer } if tokens == token => {
                        self.conclude(record, id, think_tokens, (entropy_nats, confidence), answer);
                    }
                    _ => {}
                },
                Measured::Native | Measured::Guarded if token < record.enforcement.tokens() => {
                    let step = token.checked_sub(ahead.into());
                    if let Some(i) = record.unmeasured.iter().position(|(at, of, _)| *at == token && Some(*of) == step)
                        && let Some((.., is_boundary)) = record.unmeasured.remove(i)
                    {
                        record.budget.on_entropy(EntropySignal::from_nats(entropy_nats), is_boundary);
                        if is_boundary && record.at_boundary(&self.wants, self.signals.as_mut()) {
                            self.signalled.push(id);
                        }
                    }
                }
                Measured::Native | Measured::Guarded => {
                    // A token may be sampled again: after a preemption, or when a prompt is computed in chunks.
                    record.entropies.retain(|known| (known.token, known.ahead) != (token, ahead));
                    if record.entropies.len() == KEPT_ENTROPIES {
                        record.entropies.pop_front();
                    }
                    record.entropies.push_back(report);
                }
            }
        }
    }

    /// Take in the tokens of a step, in order for each request: the only feed of the table and of the records of
    /// thinking. Appends their effects to `events`. Requests that are not live are ignored.
    pub fn generated(
        &mut self,
        table: &mut RequestTable,
        tokens: &[(RowId, u32)],
        events: &mut Vec<(RowId, PhaseEvent)>,
    ) {
        for of_one in tokens.chunk_by(|(one, _), (next, _)| one == next) {
            let row = of_one[0].0;
            if let Some(record) = table.row_mut(row).and_then(|state| state.thinking.as_deref_mut()) {
                record.before_step = record.enforcement.tokens();
            }
            for (_, token) in of_one {
                if let Some(event) = table.token(row, *token, |state, at| self.token(state, *token, at)) {
                    events.push((row, event));
                }
            }
            let now_ms = table.clock_ms();
            if let Some(state) = table.row_mut(row) {
                self.after_tokens(state, now_ms);
            }
        }
    }

    /// Note that the request's tracker has taken in this token, which stood there.
    fn token(&mut self, state: &mut RequestState, token: u32, at: Standing) {
        let was_open = at.is_open;
        let (id, is_open, prompt_tokens) = (state.row_id(), state.phases.is_thinking(), state.prompt_tokens());
        let Some(record) = state.thinking.as_deref_mut() else { return };
        let rules = &self.settings.rules;
        let enforcement = &mut record.enforcement;
        let was_forced = enforcement.forced();
        let demand = enforcement.demand(rules, at);
        record.is_due = matches!(demand, Demand::Force(_));
        let is_missed = matches!(demand, Demand::Force(forced) if forced != token);
        // A demand that the client's mask forbids is carried out as soon as it permits.
        let is_forced = matches!(demand, Demand::Force(_)) && !(is_missed && record.client.has_mask);
        let waits = is_missed && record.client.has_mask || enforcement.waits_for_call(at);
        self.status.missed += u64::from(is_missed && !record.client.has_mask);
        self.status.waited += u64::from(waits);
        record.waited = record.waited.saturating_add(u32::from(waits));
        let number = enforcement.tokens();
        let of_token = |report: &Report| report.token == number && report.begins_at() == Some(record.before_step);
        let measured = record.entropies.iter().position(of_token);
        let measured = measured.and_then(|i| record.entropies.remove(i));
        let is_guarded = measured.is_some_and(|report| report.what == Measured::Guarded);
        let is_guarded = is_guarded && token == rules.guard_token() && !is_forced && was_open;
        if is_guarded && rules.guard_continues() {
            enforcement.guard(was_open);
        } else {
            self.status.forced[ForceReason::EosGuard as usize] += u64::from(is_guarded);
            record.forced = record.forced.or(is_guarded.then_some(ForceReason::EosGuard));
        }
        enforcement.push(rules, token, was_open, is_open);
        let tokens = enforcement.tokens();
        let is_cut = match self.settings.probe_at {
            ProbeAt::Interval if record.budget.thresholds().eat_probe_interval_tokens < self.settings.block_tokens => {
                true
            }
            ProbeAt::Interval => (prompt_tokens + tokens).is_multiple_of(self.settings.block_tokens.max(1)),
            ProbeAt::Newline => self.settings.line_ends.contains(&token),
        };
        if is_cut && self.settings.can_probe {
            record.cut = Some((tokens, enforcement.think_tokens()));
        }
        if let Some((_, reason)) = enforcement.forced().filter(|_| enforcement.forced() != was_forced) {
            let reason = if reason == ForceReason::HardCap { record.ordered.unwrap_or(reason) } else { reason };
            self.status.forced[reason as usize] += 1;
            record.forced = Some(reason);
        }
        self.status.reopened += u64::from(record.follow(was_open, is_open));
        if was_open && !is_forced {
            let entropy = measured.map(|report| EntropySignal::from_nats(report.entropy_nats));
            let is_boundary = self.settings.boundaries.contains(&token);
            let comes_later = entropy.is_none() && record.is_measured;
            let mut is_given_up = false;
            if comes_later {
                if record.unmeasured.len() == KEPT_ENTROPIES {
                    is_given_up = record.unmeasured.pop_front().is_some_and(|(.., is_boundary)| is_boundary);
                }
                record.unmeasured.push_back((number, record.before_step, is_boundary));
            }
            record.budget.on_token(token, entropy, is_boundary);
            if (is_boundary && !comes_later || is_given_up) && record.at_boundary(&self.wants, self.signals.as_mut()) {
                self.signalled.push(id);
            }
            if self.wants.repetition && record.is_shown() && record.budget.on_repetition() {
                self.signalled.push(id);
            }
            if record.budget.is_end_due() {
                self.ending.push(id);
            }
        } else if !was_open && is_open && !record.is_asked {
            self.opening.push(id);
        }
        if was_open && !is_open {
            record.budget.forget_repetition();
        }
    }

    /// After tokens of a request at this time: check whether its probe is due.
    fn after_tokens(&mut self, state: &mut RequestState, now_ms: f64) {
        let is_open = state.phases.is_thinking();
        let Some(record) = state.thinking.as_deref_mut() else { return };
        let cut = record.cut.take();
        // Rejected drafts: their tokens belong to later steps now.
        let tokens = record.enforcement.tokens();
        record.entropies.retain(|report| report.begins_at().is_some_and(|first| first >= tokens));
        if record.since_ms.is_nan() && is_open {
            record.since_ms = now_ms;
        }
        let ThinkSettings { measures, can_probe, .. } = &self.settings;
        let ends = record.is_due || record.enforcement.is_forcing() || record.ordered.is_some();
        let thinks = is_open && !ends;
        if !thinks {
            self.status.probes_dropped += u64::from(record.probe != Probe::None);
            record.probe = Probe::None;
            return;
        }
        let thresholds = record.budget.thresholds();
        let wanted = self.signals.is_some() || thresholds.eat_variance_threshold > 0.0;
        // A policy does not see requests with their own thresholds.
        let wanted = wanted || self.wants.answers && !record.client.has_signals_of_its_own();
        if !*can_probe || !*measures || !wanted || record.client.is_off || !record.budget.probe_due() {
            return;
        }
        let Some((tokens, think_tokens)) = cut else { return };
        if matches!(record.probe, Probe::Running { .. }) {
            return;
        }
        // A probe without room until the next one was due is dropped: the next one knows more.
        self.status.probes_dropped += u64::from(record.probe != Probe::None);
        self.status.probes_asked += 1;
        record.budget.begin_probe();
        record.probe = Probe::Due { tokens, think_tokens };
    }

    /// The due probes: the request, and the number of its generated tokens, the longest due first. None until one has
    /// waited a quarter of its interval, so that probes share a step: a step that carries any prompt is slower by more
    /// than a probe's few tokens.
    #[must_use]
    pub fn due(&self, table: &RequestTable) -> Vec<(u64, u32)> {
        let mut is_time = false;
        let mut due = Vec::new();
        for (state, record) in followed(table) {
            let Probe::Due { tokens, .. } = record.probe else { continue };
            let waited = record.enforcement.tokens() - tokens;
            is_time |= waited >= record.budget.thresholds().eat_probe_interval_tokens / WAITS;
            due.push((waited, self.key(state.row_id()), tokens));
        }
        if !is_time {
            due.clear();
        }
        due.sort_by_key(|(waited, key, _)| (std::cmp::Reverse(*waited), *key));
        due.into_iter().map(|(_, key, tokens)| (key, tokens)).collect()
    }

    /// Note that the due probe of the request runs, and computes `tokens` tokens.
    pub fn probe_runs(&mut self, table: &mut RequestTable, key: u64, tokens: u32) {
        if let Some(record) = self.record(table, key)
            && let Probe::Due { tokens: at, think_tokens } = record.probe
        {
            record.probe = Probe::Running { tokens: at, think_tokens, measured: None };
            self.status.probe_tokens += u64::from(tokens);
        }
    }

    /// Note that the request's probe returned, with its likeliest token. Its entropy may come later, until the next
    /// probe is due.
    pub fn probed(&mut self, table: &mut RequestTable, key: u64, answer: Option<u32>) {
        let Some(id) = self.id(key) else { return };
        let Some(record) = record_of(table, id) else { return };
        let Probe::Running { tokens, think_tokens, measured } = record.probe else { return };
        match measured {
            Some(measured) => self.conclude(record, id, think_tokens, measured, answer),
            None => record.probe = Probe::Returned { tokens, think_tokens, answer },
        }
    }

    /// Both results of a probe have arrived.
    fn conclude(
        &mut self,
        record: &mut ThinkRecord,
        id: RowId,
        think_tokens: u32,
        (entropy_nats, confidence): (f32, f32),
        answer: Option<u32>,
    ) {
        record.probe = Probe::None;
        if !entropy_nats.is_finite() {
            self.status.probes_dropped += 1;
            return;
        }
        self.status.probes_done += 1;
        let entropy = EntropySignal::from_nats(entropy_nats);
        if record.budget.on_probe(entropy, answer) {
            record.budget.on_confidence(confidence);
        }
        self.signalled.push(id);
        if let Some(signals) = self.signals.as_mut().filter(|signals| signals.len() < KEPT_SIGNALS) {
            signals.push(Signal {
                id: Arc::clone(&record.id),
                think_tokens,
                bits: Some(entropy.bits()),
                answer,
                rpdi: record.budget.rpdi(),
                confidence: record.budget.observed().confidence,
            });
        }
    }

    /// Note that the request's probe was dropped.
    pub fn probe_dropped(&mut self, table: &mut RequestTable, key: u64) {
        if let Some(record) = self.record(table, key)
            && record.probe != Probe::None
        {
            record.probe = Probe::None;
            self.status.probes_dropped += 1;
        }
    }

    /// Change the limit of the request in this row from now on, for the client or the operator. False when its thinking
    /// is not followed.
    pub fn limit(&mut self, table: &mut RequestTable, row: RowId, max_think_tokens: u32) -> bool {
        let Some(state) = table.row_mut(row) else { return false };
        let id = state.row_id();
        let Some(record) = state.thinking.as_deref_mut() else { return false };
        record.client.max_think_tokens = Some(max_think_tokens);
        // Its thresholds are requested again, under the new limit.
        record.is_asked = false;
        self.opening.push(id);
        true
    }

    /// Ask for the thresholds of the request again.
    pub(super) fn open(&mut self, id: RowId) {
        self.opening.push(id);
    }

    /// The operator's thresholds.
    pub(super) fn configured(&self) -> &Thresholds {
        &self.settings.configured
    }

    /// The operator's limit.
    pub(super) fn most_think_tokens(&self) -> u32 {
        self.settings.configured.max_think_tokens
    }

    /// The engine's name of the request.
    #[must_use]
    pub fn name<'a>(&self, table: &'a RequestTable, key: u64) -> Option<&'a str> {
        self.find(table, key).map(|(_, record)| &*record.id)
    }

    /// Whether the request thinks, as far as its tokens are known.
    #[must_use]
    pub fn is_thinking(&self, table: &RequestTable, key: u64) -> bool {
        self.find(table, key).is_some_and(|(state, _)| state.phases.is_thinking())
    }

    /// Ask the slot about new facts, and return the orders for the sampling process: a message of [`Order`]s, empty
    /// without orders.
    pub fn decide(&mut self, table: &mut RequestTable, decider: &mut dyn BudgetDecider, load: Load) -> &[u8] {
        self.orders.clear();
        self.orders.append(&mut self.gone);
        self.orders.append(&mut self.woken);
        let wants = decider.wants();
        let before = std::mem::replace(&mut self.wants, wants);
        if wants.swaps != before.swaps {
            // A newly swapped-in policy decides about requests that already think.
            self.opening
                .extend(followed(table).filter(|(row, _)| row.phases.is_thinking()).map(|(row, _)| row.row_id()));
        }
        if wants.index != before.index {
            self.measure_anew(table);
        }
        if wants.repetition != before.repetition {
            let records = table.iter_mut().filter_map(|row| row.thinking.as_deref_mut());
            records.for_each(|record| record.budget.on_loops(self.on_loops(&record.client)));
        }
        let configured = self.settings.configured;
        let load = Load { configured, ..load };
        let ended = table.ended_since(&mut self.ended);
        if !ended.is_empty() {
            decider.finished(ended);
        }
        self.begin(table, decider, &load);
        self.weigh(table, decider, &load);
        self.end_unasked(table);
        &self.orders
    }

    /// Note which requests the coming step computes only a part of the prompt of, the last one excluded, and for which it
    /// does so no longer. The token that such a step samples is discarded, so no sampler measures it. Returns the orders
    /// for the sampling process, empty without orders.
    pub fn chunks(&mut self, table: &mut RequestTable, rows: &[(RowId, bool)]) -> &[u8] {
        self.orders.clear();
        for (row, is_chunk) in rows {
            let Some(state) = table.row_mut(*row) else { continue };
            let id = state.row_id();
            let Some(record) = state.thinking.as_deref_mut() else { continue };
            if record.is_measured && record.is_chunk != *is_chunk {
                Order::Measure { key: self.settings.key(id), on: !is_chunk }.write(&mut self.orders);
            }
            record.is_chunk = *is_chunk;
        }
        &self.orders
    }

    /// Set the thresholds of requests that begin to think.
    fn begin(&mut self, table: &mut RequestTable, decider: &mut dyn BudgetDecider, load: &Load) {
        let mut opening = std::mem::take(&mut self.opening);
        opening.sort_unstable();
        opening.dedup();
        let mut candidates = Vec::with_capacity(opening.len());
        opening.retain(|id| {
            let found = row_of(table, *id).map(|(row, record)| record.candidate(table, row, load.now_ms));
            candidates.extend(found);
            found.is_some()
        });
        if opening.is_empty() {
            return;
        }
        let thresholds = decider.start(load, &candidates);
        for (id, thresholds) in opening.iter().zip(thresholds) {
            let Some(record) = record_of(table, *id) else { continue };
            let thresholds = record.client.over(thresholds);
            if record.budget.set_thresholds(thresholds).is_err() {
                continue;
            }
            let limit = thresholds.max_think_tokens;
            let tokens = record.enforcement.tokens();
            if limit != record.enforcement.limit() && record.ordered.is_none() {
                // Before its first token, no step is in flight.
                let ahead = if record.is_asked || tokens > 0 { self.settings.tokens_ahead } else { 0 };
                record.order(self.settings.key(*id), tokens + ahead, limit, &mut self.orders);
            }
            record.is_asked = true;
        }
        for id in &opening {
            self.measure(table, *id);
        }
        opening.clear();
        self.opening = opening;
    }

    /// How to treat loops in the thinking of a request of such a client.
    fn on_loops(&self, client: &ClientBudget) -> OnLoops {
        match (self.settings.ends_loops, self.wants.repetition) {
            _ if client.is_off => OnLoops::Ignore,
            (true, _) => OnLoops::End,
            (false, true) => OnLoops::Tell,
            (false, false) => OnLoops::Ignore,
        }
    }

    /// Whether to measure the entropy of every token of such a request.
    fn is_to_be_measured(&self, thresholds: &Thresholds, client: &ClientBudget) -> bool {
        let is_read = self.wants.index && !client.has_signals_of_its_own();
        let wants_index = !client.is_off && (is_read || thresholds.rpdi_threshold < f64::INFINITY);
        self.settings.measures && (wants_index || self.signals.is_some())
    }

    /// Tell the sampling process whether to measure this request, if that has changed.
    fn measure(&mut self, table: &mut RequestTable, id: RowId) {
        let Some(record) = record_of(table, id) else { return };
        let on = self.is_to_be_measured(record.budget.thresholds(), &record.client);
        if record.is_measured != on {
            record.is_measured = on;
            record.unmeasured.clear();
            if !record.is_chunk {
                Order::Measure { key: self.key(id), on }.write(&mut self.orders);
            }
        }
    }

    /// The deciding policy reads other columns than before.
    fn measure_anew(&mut self, table: &mut RequestTable) {
        let mut ids: Vec<RowId> = followed(table).map(|(row, _)| row.row_id()).collect();
        ids.sort_unstable();
        ids.into_iter().for_each(|id| self.measure(table, id));
    }

    /// Get verdicts on requests with new signals.
    fn weigh(&mut self, table: &mut RequestTable, decider: &mut dyn BudgetDecider, load: &Load) {
        let mut signalled = std::mem::take(&mut self.signalled);
        signalled.sort_unstable();
        signalled.dedup();
        let mut candidates = Vec::with_capacity(signalled.len());
        signalled.retain(|id| {
            let to_be_judged = |(row, record): &(&RequestState, &ThinkRecord)| {
                record.budget.observed().is_new() && row.phases.is_thinking() && record.ordered.is_none()
            };
            let found = row_of(table, *id).filter(to_be_judged);
            candidates.extend(found.map(|(row, record)| record.candidate(table, row, load.now_ms)));
            found.is_some()
        });
        if signalled.is_empty() {
            return;
        }
        let verdicts = decider.probe(load, &candidates);
        for (id, verdict) in signalled.iter().zip(verdicts) {
            let Some(record) = record_of(table, *id) else { continue };
            let verdict = match verdict {
                _ if record.client.is_off => Verdict::KeepThinking,
                _ if record.client.has_signals_of_its_own() => Verdict::Default,
                verdict => verdict,
            };
            // Whether the host's own rules give the same result, for the name of the reason.
            let by_default = record.budget.by_default();
            let reason = match record.budget.decide(verdict) {
                Some(ForceReason::Policy) => by_default.or(Some(ForceReason::Policy)),
                reason => reason,
            };
            let Some(reason) = reason else { continue };
            record.end(self.settings.key(*id), reason, self.settings.tokens_ahead, &mut self.orders);
        }
        signalled.clear();
        self.signalled = signalled;
    }

    /// Order the ends that need no verdict: they waited for `min_think_tokens`, or there is a loop.
    fn end_unasked(&mut self, table: &mut RequestTable) {
        for id in self.ending.drain(..) {
            let Some(state) = table.row_mut(id) else { continue };
            let is_open = state.phases.is_thinking();
            let Some(record) = state.thinking.as_deref_mut().filter(|_| is_open) else { continue };
            if let Some(reason) = record.budget.end_if_due() {
                record.end(self.settings.key(id), reason, self.settings.tokens_ahead, &mut self.orders);
            }
        }
    }

    /// Note that the request has ended and its row is about to be removed. The next orders tell the sampling process.
    pub fn finished(&mut self, table: &RequestTable, row: RowId) {
        let Some(state) = table.get(row) else { return };
        self.idle.remove(&state.row_id());
        let mut think_tokens = state.think_tokens();
        if let Some(record) = &state.thinking {
            think_tokens = record.enforcement.think_tokens();
            Order::Gone { key: self.key(state.row_id()) }.write(&mut self.gone);
            self.status.probes_dropped += u64::from(record.probe != Probe::None);
        }
        self.status.think_tokens += u64::from(think_tokens);
        self.status.thought += u64::from(think_tokens > 0);
    }

    /// Keep every signal for [`ThinkBudgets::take_signals`], and measure every request possible.
    pub fn record_signals(&mut self, keep: bool) {
        self.signals = keep.then(Vec::new);
    }

    /// The signals since the last call.
    pub fn take_signals(&mut self) -> Vec<Signal> {
        self.signals.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Counters of the actions so far.
    #[must_use]
    pub fn status(&self) -> BudgetStatus {
        self.status
    }
}

/// The live requests whose thinking is followed.
fn followed(table: &RequestTable) -> impl Iterator<Item = (&RequestState, &ThinkRecord)> {
    table.iter().filter_map(|row| Some((row, row.thinking.as_deref()?)))
}

fn row_of(table: &RequestTable, id: RowId) -> Option<(&RequestState, &ThinkRecord)> {
    let row = table.get(id)?;
    Some((row, row.thinking.as_deref()?))
}

fn record_of(table: &mut RequestTable, id: RowId) -> Option<&mut ThinkRecord> {
    table.row_mut(id)?.thinking.as_deref_mut()
}
