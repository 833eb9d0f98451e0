//! The sampling side: which rows of a model runner's batch to force, guard and measure. It runs in the sampling
//! process, without the engine of the scheduling process; the two exchange messages in vLLM's own (ADR 0011). One long file: orders,
//! drafts, bans and reports change the same rows.

use std::collections::HashMap;
use std::sync::Arc;

use meridian_core::budget::{AnswerRules, Ban, Demand, EndRules, Enforcer, Measured, Order, Report, SamplerLimits};
use meridian_core::{Error, Markers};

/// Most requests that left the batch and may return. Beyond this, the ones longest away are forgotten; they start again
/// from the data of their arrival.
const PARKED: usize = 1 << 16;

/// A model runner's own list of a request's output tokens, which it continues to write.
pub trait Outputs {
    /// Access that a reader needs, such as an interpreter's lock.
    type Access<'a>: Copy;

    /// Number of tokens in the list.
    fn count(&self, access: Self::Access<'_>) -> usize;

    /// The token at an index; `None` for a placeholder: sampled, but not known yet.
    fn token(&self, access: Self::Access<'_>, at: usize) -> Option<u32>;
}

/// The rows of a model runner's batch and the state of their thinking. For one thread only.
pub struct SamplerRows<O> {
    /// Rules for new requests; `None` while the model has no end of thinking.
    rules: Option<Arc<EndRules>>,
    rows: Vec<Option<Row<O>>>,
    /// Requests that left the batch, without their lists.
    parked: HashMap<u64, Box<Request<O>>>,
    /// Orders that arrived before their requests.
    early: HashMap<u64, Early>,
    /// The measurements of the latest step, in the order of its rows.
    measured: Vec<(u64, u32, u8, Measured)>,
    /// For each row of the latest step's logits its request's row and the number of the token that it samples; empty
    /// for a step without drafts, in which both rows are equal.
    drafted: Vec<(usize, u32)>,
}

/// The rows of the logits of a step that answer, and the tokens that they must not sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answering {
    /// Rows in which no end of the sequence may be sampled: their answers are too short.
    pub unended: Vec<usize>,
    /// Rows and tokens that would begin thinking in them.
    pub openers: Vec<(usize, u32)>,
}

#[derive(Default)]
struct Early {
    limits: Vec<(u32, u32)>,
    is_measured: Option<bool>,
}

struct Row<O> {
    /// The scheduler's number of the request; `None` if no scheduler follows it.
    key: Option<u64>,
    what: What<O>,
}

enum What<O> {
    /// The first and only token of a probe gives its entropy. The number of the token that it was due at identifies the
    /// probe.
    Probe(u32),
    Request(Box<Request<O>>),
}

struct Request<O> {
    enforcer: Enforcer,
    /// The rules at its arrival.
    rules: Arc<EndRules>,
    /// The model runner's own list of its output tokens; without one, the caller pushes tokens.
    outputs: Option<O>,
    is_measured: bool,
    /// Numbers of the next tokens at which an end of sequence was likelier than the end marker.
    guarded: Vec<u32>,
    /// Limits that no step has applied yet: they concern tokens that the list may hold already.
    ordered: Vec<(u32, u32)>,
    /// Nothing may end its thinking until an order says so: its tokens are not looked at.
    is_idle: bool,
    is_gone: bool,
}

/// The data of a request that takes a row.
pub struct Arriving<'a, O> {
    /// The scheduler's number of the request; `None` if no scheduler follows it.
    pub key: Option<u64>,
    /// End of its templated prompt.
    pub prompt_tail: &'a [u32],
    /// The model runner's list of its tokens; `None` if [`SamplerRows::push`] delivers them.
    pub outputs: Option<O>,
    /// Its limits until an order changes them.
    pub limits: SamplerLimits,
}

/// The actions of a step on its rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SamplerStep {
    /// Rows to force.
    pub forced: Vec<usize>,
    /// The token of each row to force.
    pub tokens: Vec<u32>,
    /// Rows whose end of sequence becomes the end marker.
    pub guarded: Vec<usize>,
    /// Rows to measure.
    pub measured: Vec<usize>,
    /// Rows that must not end or think again.
    pub answering: Answering,
}

impl<O> Default for SamplerRows<O> {
    /// Empty rows; no rule ends thinking.
    fn default() -> Self {
        Self {
            rules: None,
            rows: Vec::new(),
            parked: HashMap::new(),
            early: HashMap::new(),
            measured: Vec::new(),
            drafted: Vec::new(),
        }
    }
}

impl<O: Outputs> SamplerRows<O> {
    /// Set how thinking ends for new requests; `None` ends nothing. `forced` is the phrase, an end marker, and the text
    /// before the answer; empty for the first end marker.
    ///
    /// # Errors
    /// The forced ending does not end thinking.
    pub fn configure(&mut self, markers: Option<Markers>, forced: Vec<u32>) -> Result<(), Error> {
        let rules = markers.map(|markers| EndRules::new(markers, forced)).transpose()?;
        self.rules = rules.map(Arc::new);
        Ok(())
    }

    /// Set the rules for the answers of new requests; call it after [`Self::configure`].
    pub fn configure_answers(&mut self, answers: AnswerRules) {
        self.rules = self.rules.take().map(|rules| Arc::new(Arc::unwrap_or_clone(rules).with_answers(answers)));
    }

    /// The rules for new requests; `None` while the model has no end of thinking.
    #[must_use]
    pub fn rules(&self) -> Option<&EndRules> {
        self.rules.as_deref()
    }

    /// The value of [`SamplerLimits::reserve_from`] for a request of `max_tokens` tokens that no scheduler follows.
    #[must_use]
    pub fn reserve_from(&self, max_tokens: u32) -> u32 {
        self.rules.as_ref().map_or(u32::MAX, |rules| rules.reserve_from(max_tokens))
    }

    /// The token that replaces an end of sequence inside thinking; 0 while the model has no end of thinking, where
    /// nothing is guarded.
    #[must_use]
    pub fn guard_token(&self) -> u32 {
        self.rules.as_ref().map_or(0, |rules| rules.guard_token())
    }

    /// Whether the end marker has more tokens than [`Self::guard_token`].
    #[must_use]
    pub fn guard_continues(&self) -> bool {
        self.rules.as_ref().is_some_and(|rules| rules.guard_continues())
    }

    /// Put a request into this row.
    pub fn add(&mut self, access: O::Access<'_>, row: usize, arriving: Arriving<'_, O>) {
        let Arriving { key, prompt_tail, outputs, limits } = arriving;
        let SamplerLimits { is_followed, is_measured, .. } = limits;
        let mut request = match (key.and_then(|key| self.take_out(key)), &self.rules) {
            (Some(known), _) => known,
            (None, None) => return self.remove(row),
            (None, Some(rules)) => Box::new(Request {
                enforcer: Enforcer::new(rules, prompt_tail, limits),
                rules: Arc::clone(rules),
                outputs: None,
                is_measured,
                guarded: Vec::new(),
                ordered: Vec::new(),
                is_idle: !is_followed,
                is_gone: false,
            }),
        };
        if let Some(Early { limits, is_measured }) = key.and_then(|key| self.early.remove(&key)) {
            request.ordered.extend(limits);
            request.is_idle = false;
            request.is_measured = is_measured.unwrap_or(request.is_measured);
        }
        request.outputs = outputs;
        if !request.is_idle {
            request.catch_up(access);
        }
        *self.seat(row) = Some(Row { key, what: What::Request(request) });
    }

    /// Put the probe of a request, due after `at` of its tokens, into this row.
    pub fn add_probe(&mut self, row: usize, key: u64, at: u32) {
        *self.seat(row) = Some(Row { key: Some(key), what: What::Probe(at) });
    }

    /// Move a request to another row, or swap two.
    pub fn move_row(&mut self, from: usize, to: usize, swaps: bool) {
        self.grow(from.max(to));
        if !swaps {
            self.remove(to);
        }
        self.rows.swap(from, to);
    }

    /// Deliver tokens of a request without a list: all its generated tokens with `from_start`, else the new ones.
    pub fn push(&mut self, row: usize, tokens: &[u32], from_start: bool) {
        let Some(Some(Row { what: What::Request(request), .. })) = self.rows.get_mut(row) else { return };
        if from_start {
            request.enforcer.replay(&request.rules, tokens.iter().copied());
        } else {
            tokens.iter().for_each(|token| request.take(*token));
        }
    }

    /// Number of tokens that the request in this row has taken in; `None` for an empty row.
    #[must_use]
    pub fn tokens(&self, row: usize) -> Option<u32> {
        match self.rows.get(row)? {
            Some(Row { what: What::Request(request), .. }) => Some(request.enforcer.tokens()),
            _ => None,
        }
    }

    /// Whether no row holds a request that is followed, or a probe: a step has nothing to do.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.rows.iter().flatten().all(|row| matches!(&row.what, What::Request(request) if request.is_idle))
    }

    /// Whether an order has arrived for this request, which has not come into a row.
    #[must_use]
    pub fn is_awaited(&self, key: u64) -> bool {
        self.early.contains_key(&key)
    }

    /// Take in a message of orders from the scheduler. The sender is not trusted.
    pub fn receive(&mut self, message: &[u8]) {
        for order in Order::read_all(message) {
            match order {
                Order::Limit { key, from, max_think_tokens } => {
                    if let Some(request) = self.find(key) {
                        request.is_idle = false;
                        request.ordered.push((from, max_think_tokens));
                    } else if let Some(early) = self.early(key) {
                        // A policy changes its limit a few times at most; the latest counts.
                        early.limits.retain(|(at, _)| *at != from);
                        early.limits.push((from, max_think_tokens));
                    }
                }
                Order::Measure { key, on } => {
                    if let Some(request) = self.find(key) {
                        request.is_idle = false;
                        request.is_measured = on;
                    } else if let Some(early) = self.early(key) {
                        early.is_measured = Some(on);
                    }
                }
                Order::Gone { key } => {
                    self.early.remove(&key);
                    if self.parked.remove(&key).is_none()
                        && let Some(request) = self.find(key)
                    {
                        request.is_gone = true;
                    }
                }
            }
        }
    }

    /// The actions of a step that is about to sample. `rows` are the sampling rows; without it, the first `count` rows
    /// sample.
    pub fn step(&mut self, access: O::Access<'_>, count: usize, rows: Option<Vec<usize>>) -> SamplerStep {
        self.measured.clear();
        self.drafted.clear();
        let mut step = SamplerStep::default();
        for index in rows.unwrap_or_else(|| (0..count.min(self.rows.len())).collect()) {
            self.plan(access, index, &[], &[], index, &mut step);
        }
        step
    }

    /// The actions of a step that samples `rows` and verifies the draft tokens of each: a row with k of them has k + 1
    /// consecutive rows of logits. A row of logits is planned for the case that all drafts before it are accepted;
    /// rejected drafts and their rows have no effect on later steps. The rows of the result are rows of the logits.
    ///
    /// `stood` are rows of the logits that a first call returned as guarded, and whose end of sequence is likelier than
    /// the end marker: the marker that begins there must be completed.
    pub fn step_drafts(
        &mut self,
        access: O::Access<'_>,
        rows: &[usize],
        drafts: &[&[u32]],
        stood: &[usize],
    ) -> SamplerStep {
        self.measured.clear();
        self.drafted.clear();
        let mut step = SamplerStep::default();
        for (index, drafts) in rows.iter().zip(drafts) {
            let tokens = self.plan(access, *index, drafts, stood, self.drafted.len(), &mut step);
            self.drafted.extend((tokens..).take(drafts.len() + 1).map(|number| (*index, number)));
        }
        step
    }

    /// Plan the rows of the logits of the request in this row, beginning at `first`; returns its number of tokens.
    fn plan(
        &mut self,
        access: O::Access<'_>,
        index: usize,
        drafts: &[u32],
        stood: &[usize],
        first: usize,
        step: &mut SamplerStep,
    ) -> u32 {
        let Some(Some(row)) = self.rows.get_mut(index) else { return 0 };
        let request = match &mut row.what {
            What::Probe(at) => {
                if let Some(key) = row.key {
                    step.measured.push(first);
                    self.measured.push((key, *at, 0, Measured::Probe));
                }
                return 0;
            }
            What::Request(request) => request,
        };
        if request.is_idle {
            return 0;
        }
        request.catch_up(access);
        let tokens = request.enforcer.tokens();
        // Tokens that were not sampled after all: a chunk of a prompt, a rejected draft.
        request.guarded.retain(|number| *number < tokens);
        for (from, max_think_tokens) in request.ordered.drain(..) {
            request.enforcer.limit_from(from, max_think_tokens);
        }
        // The whole step has one guard token, so a request with other rules has no guard.
        let can_guard = self.rules.as_ref().is_some_and(|rules| Arc::ptr_eq(rules, &request.rules));
        let rules = Arc::clone(&request.rules);
        let demand = request.enforcer.demand(&rules);
        let key = row.key.filter(|_| request.is_measured);
        let mut at_row = |at: usize, enforcer: &Enforcer, demand: Demand| {
            match demand {
                Demand::Free => {}
                Demand::Guarded if can_guard => step.guarded.push(at),
                Demand::Guarded => {}
                Demand::Answer(ban) => {
                    if ban == Ban::Ends {
                        step.answering.unended.push(at);
                    }
                    step.answering.openers.extend(enforcer.openers(&rules).map(|token| (at, token)));
                }
                Demand::Force(token) => {
                    step.forced.push(at);
                    step.tokens.push(token);
                }
            }
            if let Some(key) = key.filter(|_| enforcer.is_thinking() && !enforcer.is_forcing()) {
                step.measured.push(at);
                let ahead = u8::try_from(enforcer.tokens() - tokens).unwrap_or(u8::MAX);
                self.measured.push((key, enforcer.tokens(), ahead, Measured::Native));
            }
        };
        at_row(first, &request.enforcer, demand);
        if drafts.is_empty() {
            return tokens;
        }
        // The request after each draft token, were it accepted.
        let mut enforcer = request.enforcer.clone();
        for (ahead, token) in drafts.iter().enumerate() {
            // The sampler rejects a draft that is not the forced token, and ignores all after it, unless a mask of the
            // client forbids that token.
            if rules.guard_continues() && *token == rules.guard_token() && stood.contains(&(first + ahead)) {
                enforcer.push_guarded(&rules, *token);
            } else {
                enforcer.push(&rules, *token);
            }
            let demand = enforcer.demand(&rules);
            at_row(first + ahead + 1, &enforcer, demand);
        }
        tokens
    }

    /// Report the rows of the step's logits in which an end of sequence is likelier than the end marker that replaces
    /// it.
    pub fn guard(&mut self, rows: &[usize]) {
        for at in rows {
            let drafted = self.drafted.get(*at).copied();
            let index = drafted.map_or(*at, |(index, _)| index);
            let Some(Some(Row { key, what: What::Request(request) })) = self.rows.get_mut(index) else { continue };
            let token = drafted.map_or_else(|| request.enforcer.tokens(), |(_, token)| token);
            if !request.guarded.contains(&token) {
                request.guarded.push(token);
            }
            let Some(key) = *key else { continue };
            let ahead = u8::try_from(token.saturating_sub(request.enforcer.tokens())).unwrap_or(u8::MAX);
            let own = |entry: &&mut (u64, u32, u8, Measured)| {
                entry.0 == key && entry.1 == token && entry.3 != Measured::Probe
            };
            match self.measured.iter_mut().find(own) {
                Some(entry) => entry.3 = Measured::Guarded,
                None => self.measured.push((key, token, ahead, Measured::Guarded)),
            }
        }
    }

    /// The report of the step, to complete when its entropies are known, perhaps after later steps; `None` for an empty
    /// report.
    pub fn told(&mut self) -> Option<StepReport> {
        let measured = std::mem::take(&mut self.measured);
        (!measured.is_empty()).then_some(StepReport { measured })
    }
}

/// The measurements of one step, without the numbers.
#[derive(Clone, Debug)]
pub struct StepReport {
    measured: Vec<(u64, u32, u8, Measured)>,
}

impl StepReport {
    /// Whether a row is a probe: only its confidence is wanted beside its entropy.
    #[must_use]
    pub fn has_probes(&self) -> bool {
        self.measured.iter().any(|(.., what)| *what == Measured::Probe)
    }

    /// A message for the scheduler, of the step's measured rows in their order: `entropies` in nats, `confidences` the
    /// probabilities of the likeliest tokens. Missing ones count as not measured.
    #[must_use]
    pub fn message(&self, entropies: &[f32], confidences: &[f32]) -> Vec<u8> {
        let mut message = Vec::with_capacity(self.measured.len() * Report::BYTES);
        for (row, &(key, token, ahead, what)) in self.measured.iter().enumerate() {
            let entropy_nats = entropies.get(row).copied().unwrap_or(f32::NAN);
            let confidence = confidences.get(row).copied().filter(|_| what == Measured::Probe).unwrap_or(f32::NAN);
            Report { key, token, ahead, what, entropy_nats, confidence }.write(&mut message);
        }
        message
    }
}

impl<O> SamplerRows<O> {
    /// Clear a row: it holds no request to follow.
    pub fn remove(&mut self, row: usize) {
        let Some(left) = self.rows.get_mut(row).and_then(Option::take) else { return };
        if let Row { key: Some(key), what: What::Request(mut request) } = left
            && !request.is_gone
            && !request.is_idle
            && self.parked.len() < PARKED
        {
            request.outputs = None;
            self.parked.insert(key, request);
        }
    }

    fn seat(&mut self, row: usize) -> &mut Option<Row<O>> {
        self.grow(row);
        self.remove(row);
        &mut self.rows[row]
    }

    fn grow(&mut self, row: usize) {
        if self.rows.len() <= row {
            self.rows.resize_with(row + 1, || None);
        }
    }

    /// Take out a request that is away or still in a row: a model runner may admit it again without reporting that it
    /// left.
    fn take_out(&mut self, key: u64) -> Option<Box<Request<O>>> {
        if let Some(away) = self.parked.remove(&key) {
            return Some(away);
        }
        let is_it = |seat: &&mut Option<Row<O>>| matches!(seat, Some(Row { key: Some(own), what: What::Request(_) }) if *own == key);
        match self.rows.iter_mut().find(is_it)?.take()?.what {
            What::Request(request) => Some(request),
            What::Probe(_) => None,
        }
    }

    /// `None` when there are too many: only the scheduler knows so many requests.
    fn early(&mut self, key: u64) -> Option<&mut Early> {
        if self.early.len() == PARKED && !self.early.contains_key(&key) {
            return None;
        }
        Some(self.early.entry(key).or_default())
    }

    fn find(&mut self, key: u64) -> Option<&mut Request<O>> {
        if let Some(away) = self.parked.get_mut(&key) {
            return Some(away);
        }
        self.rows.iter_mut().flatten().find_map(|row| match &mut row.what {
            What::Request(request) if row.key == Some(key) => Some(&mut **request),
            _ => None,
        })
    }
}

impl<O: Outputs> Request<O> {
    /// Take in the tokens that the model runner has added to the list.
    fn catch_up(&mut self, access: O::Access<'_>) {
        let Some(outputs) = &self.outputs else { return };
        let (known, mut at) = (outputs.count(access), self.enforcer.tokens() as usize);
        if at > known {
            // The runner took tokens back: KV that could not be loaded.
            let again = (0..known).map_while(|at| outputs.token(access, at));
            return self.enforcer.replay(&self.rules, again);
        }
        while at < known
            && let Some(token) = self.outputs.as_ref().and_then(|outputs| outputs.token(access, at))
        {
            self.take(token);
            at += 1;
        }
    }
}

impl<O> Request<O> {
    fn take(&mut self, token: u32) {
        let rules = &*self.rules;
        let number = self.enforcer.tokens();
        let stands_for_eos = self.guarded.contains(&number) && token == rules.guard_token();
        self.guarded.retain(|at| *at != number);
        // As the sampler has done before this token.
        self.enforcer.demand(rules);
        if stands_for_eos && rules.guard_continues() {
            self.enforcer.push_guarded(rules, token);
        } else {
            self.enforcer.push(rules, token);
        }
    }
}
