//! The thinking of an engine's requests: what is measured of it, what the budget slot makes of that, and what is to be
//! forced where tokens are sampled. A third of the file documents what goes in and comes out.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;

use meridian_core::budget::{
    BudgetCandidate, Demand, EndRules, Enforcer, ForceReason, Load, Measured, Observed, Order, Report, ThinkBudget,
    ThinkLimits, ThinkThresholds, Verdict,
};
use meridian_core::config::ProbeAt;
use meridian_core::{EntropySignal, EntropyUnit, Pattern, Signals};
use serde::{Deserialize, Serialize};

use crate::BudgetSlot;
use crate::slot::BudgetWants;

/// Entropies of one request that are kept for tokens that were not told yet: more than any engine runs ahead.
const KEPT_ENTROPIES: usize = 64;
/// Signals that are kept for whoever takes them.
const KEPT_SIGNALS: usize = 1 << 22;

/// What is the same for every request of an engine.
#[derive(Clone, Debug)]
pub struct ThinkSettings {
    /// How thinking is recognised and ended.
    pub rules: EndRules,
    /// What the operator has configured.
    pub configured: ThinkThresholds,
    /// Unit of the variance in it.
    pub unit: EntropyUnit,
    /// Entropies are measured at all.
    pub measures: bool,
    /// The engine can run probes.
    pub can_probe: bool,
    /// Where a probe may be due.
    pub probe_at: ProbeAt,
    /// Tokens in a KV block. A probe at the end of a block computes nothing but what it appends, so with intervals of a
    /// block or more they are put there.
    pub block_tokens: u32,
    /// Tokens that end a line.
    pub line_ends: HashSet<u32>,
    /// Tokens that end a line, a sentence or a clause.
    pub boundaries: HashSet<u32>,
    /// Generating any of these ends thinking.
    pub interrupts: Arc<[Pattern]>,
    /// An end of sequence inside the thinking becomes the end marker.
    pub guards_eos: bool,
    /// Steps that are scheduled before the result of one is known: 0 for synchronous scheduling.
    pub steps_ahead: u32,
}

/// What a client asked for. A field that is not set is the operator's.
///
/// ```
/// let client = meridian_runtime::thinking::ClientBudget { max_think_tokens: Some(100), ..Default::default() };
/// assert!(!client.is_off);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ClientBudget {
    /// Nothing but the hard cap ends this thinking.
    pub is_off: bool,
    /// Think tokens at most; the operator's cap holds as well.
    pub max_think_tokens: Option<u32>,
    /// See [`ThinkThresholds`], for this and what follows.
    pub min_think_tokens: Option<u32>,
    #[allow(missing_docs)]
    pub eat_probe_interval_tokens: Option<u32>,
    #[allow(missing_docs)]
    pub ema_alpha: Option<f64>,
    #[allow(missing_docs)]
    pub eat_variance_threshold: Option<f64>,
    #[allow(missing_docs)]
    pub eat_max_bits: Option<f64>,
    #[allow(missing_docs)]
    pub min_probes: Option<u32>,
    #[allow(missing_docs)]
    pub rpdi_window: Option<u32>,
    #[allow(missing_docs)]
    pub rpdi_threshold: Option<f64>,
    /// Generating any of these ends its thinking as well.
    pub interrupts: Vec<Pattern>,
}

impl ClientBudget {
    /// The operator's or a policy's thresholds, as this client wants them.
    fn over(&self, of: ThinkThresholds) -> ThinkThresholds {
        let max_think_tokens = self.max_think_tokens.map_or(of.max_think_tokens, |max| max.min(of.max_think_tokens));
        let least = self.min_think_tokens.unwrap_or(of.min_think_tokens);
        ThinkThresholds {
            max_think_tokens,
            min_think_tokens: least.min(max_think_tokens),
            eat_probe_interval_tokens: self.eat_probe_interval_tokens.unwrap_or(of.eat_probe_interval_tokens),
            ema_alpha: self.ema_alpha.unwrap_or(of.ema_alpha),
            eat_variance_threshold: self.eat_variance_threshold.unwrap_or(of.eat_variance_threshold),
            eat_max_bits: self.eat_max_bits.unwrap_or(of.eat_max_bits),
            min_probes: self.min_probes.unwrap_or(of.min_probes),
            rpdi_window: self.rpdi_window.unwrap_or(of.rpdi_window),
            rpdi_threshold: self.rpdi_threshold.unwrap_or(of.rpdi_threshold),
        }
    }

    /// Whether the signals of this request are judged by its own thresholds, which a policy does not see.
    fn has_signals_of_its_own(&self) -> bool {
        let Self {
            is_off: _,
            max_think_tokens: _,
            min_think_tokens,
            eat_probe_interval_tokens: _,
            ema_alpha,
            eat_variance_threshold,
            eat_max_bits,
            min_probes,
            rpdi_window,
            rpdi_threshold,
            interrupts: _,
        } = self;
        min_think_tokens.is_some()
            || ema_alpha.is_some()
            || eat_variance_threshold.is_some()
            || eat_max_bits.is_some()
            || min_probes.is_some()
            || rpdi_window.is_some()
            || rpdi_threshold.is_some()
    }
}

/// A request as it arrives.
#[derive(Clone, Debug)]
pub struct Thinker<'a> {
    /// The engine's name of it.
    pub id: &'a str,
    /// End of its templated prompt.
    pub prompt: &'a [u32],
    /// Tokens in the whole prompt.
    pub prompt_tokens: u32,
    /// Tokens it may generate.
    pub max_tokens: u32,
    /// The client's priority.
    pub priority: i32,
    /// Number of the tenant.
    pub tenant: u32,
    /// Its deadline on the host's clock, milliseconds; infinite for none.
    pub deadline_ms: f64,
    /// What the client asked for.
    pub client: ClientBudget,
}

/// What the process that samples has to know of a request from its first token on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Enrolled {
    /// Think tokens at most, as long as no order says otherwise.
    pub max_think_tokens: u32,
    /// The entropy of its tokens is wanted.
    pub is_measured: bool,
}

/// A signal as it came, for those who look for thresholds: a probe, or the path deviation index at a boundary.
#[derive(Clone, Debug, PartialEq)]
pub struct Signal {
    /// The engine's name of the request.
    pub id: Arc<str>,
    /// Tokens thought up to there.
    pub think_tokens: u32,
    /// Entropy that a probe found, bits.
    pub bits: Option<f64>,
    /// The token that a probe found likeliest.
    pub answer: Option<u32>,
    /// The path deviation index.
    pub rpdi: Option<f64>,
}

/// What was done to the thinking of an engine's requests, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetStatus {
    /// Endings that were forced, by [`ForceReason`] in the order of [`ForceReason::ALL`].
    pub forced: [u64; 6],
    /// Tokens that were to be forced and came out otherwise: nobody heard the order, or something else had its way.
    pub missed: u64,
    /// Probes that were due.
    pub probes_asked: u64,
    /// Probes that ran and told an entropy.
    pub probes_done: u64,
    /// Probes that were given up: the request left its thinking or ended, or there was no room for too long.
    pub probes_dropped: u64,
    /// Tokens that probes computed.
    pub probe_tokens: u64,
    /// Tokens of the thinking of requests that are over.
    pub think_tokens: u64,
    /// Requests that have thought and are over.
    pub thought: u64,
}

/// The thinking of an engine's requests. Driven by the thread that schedules: what was generated and measured is told,
/// then [`ThinkBudgets::decide`] once before each step.
pub struct ThinkBudgets {
    settings: ThinkSettings,
    rows: BTreeMap<u64, Row>,
    /// Begin to think: their thresholds are to be asked for.
    opening: Vec<u64>,
    /// Have something that no verdict has weighed.
    signalled: Vec<u64>,
    /// Have reached the minimum that an `EndNow` waited for.
    ending: Vec<u64>,
    orders: Vec<u8>,
    /// Orders for requests that are over, to go with the next.
    gone: Vec<u8>,
    status: BudgetStatus,
    signals: Option<Vec<Signal>>,
    /// What the slot's policies go by, as of the latest decision.
    wants: BudgetWants,
}

struct Row {
    id: Arc<str>,
    enforcer: Enforcer,
    budget: ThinkBudget,
    client: ClientBudget,
    prompt_tokens: u32,
    max_tokens: u32,
    priority: i32,
    tenant: u32,
    deadline_ms: f64,
    is_measured: bool,
    since_ms: f64,
    /// Of tokens that have not come yet.
    entropies: VecDeque<(u32, f32, Measured)>,
    /// Tokens that came before their entropies, and whether they are boundaries.
    unmeasured: VecDeque<(u32, bool)>,
    is_asked: bool,
    last_token: u32,
    probe: Probe,
    /// Why an end was ordered.
    ordered: Option<ForceReason>,
}

/// Where the next or present probe of a request is cut, in generated tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Probe {
    None,
    Due {
        tokens: u32,
        think_tokens: u32,
    },
    Running {
        tokens: u32,
        think_tokens: u32,
        entropy_nats: Option<f32>,
    },
    /// It came back before what a device measured at it.
    Returned {
        tokens: u32,
        think_tokens: u32,
        answer: Option<u32>,
    },
}

impl ThinkBudgets {
    /// Nobody thinks yet.
    #[must_use]
    pub fn new(settings: ThinkSettings) -> Self {
        Self {
            settings,
            rows: BTreeMap::new(),
            opening: Vec::new(),
            signalled: Vec::new(),
            ending: Vec::new(),
            orders: Vec::new(),
            gone: Vec::new(),
            status: BudgetStatus::default(),
            signals: None,
            wants: BudgetWants::default(),
        }
    }

    /// A request arrived; `key` is never used again.
    pub fn add(&mut self, key: u64, request: &Thinker<'_>) -> Enrolled {
        let ThinkSettings { rules, configured, unit, interrupts, guards_eos, .. } = &self.settings;
        let thresholds = request.client.over(*configured);
        let mut patterns = interrupts.to_vec();
        patterns.extend(request.client.interrupts.iter().cloned());
        let limits = ThinkLimits {
            max_think_tokens: thresholds.max_think_tokens,
            interrupts: patterns.into(),
            guards_eos: *guards_eos,
        };
        let enforcer = Enforcer::new(rules, request.prompt, limits);
        // Checked where they were read; if they were not, the operator's hold.
        let budget = ThinkBudget::new(thresholds, *unit, [].into())
            .or_else(|_| ThinkBudget::new(*configured, *unit, [].into()))
            .or_else(|_| ThinkBudget::new(ThinkThresholds::default(), *unit, [].into()))
            .expect("the default thresholds are in range");
        let is_measured = self.is_to_be_measured(&thresholds, &request.client);
        if enforcer.is_thinking() {
            self.opening.push(key);
        }
        let row = Row {
            id: request.id.into(),
            enforcer,
            budget,
            client: request.client.clone(),
            prompt_tokens: request.prompt_tokens,
            max_tokens: request.max_tokens,
            priority: request.priority,
            tenant: request.tenant,
            deadline_ms: request.deadline_ms,
            is_measured,
            since_ms: f64::NAN,
            entropies: VecDeque::new(),
            unmeasured: VecDeque::new(),
            is_asked: false,
            last_token: u32::MAX,
            probe: Probe::None,
            ordered: None,
        };
        self.rows.insert(key, row);
        Enrolled { max_think_tokens: thresholds.max_think_tokens, is_measured }
    }

    /// What was measured where tokens are sampled.
    pub fn received(&mut self, datagram: &[u8]) {
        for Report { key, token, what, entropy_nats } in Report::read_all(datagram) {
            let Some(row) = self.rows.get_mut(&key) else { continue };
            match what {
                // A probe is known by the token that it was due at: one that was given up may be heard of late.
                Measured::Probe => match &mut row.probe {
                    Probe::Running { tokens, entropy_nats: found, .. } if *tokens == token => {
                        *found = Some(entropy_nats);
                    }
                    &mut Probe::Returned { tokens, think_tokens, answer } if tokens == token => {
                        self.conclude(key, think_tokens, entropy_nats, answer);
                    }
                    _ => {}
                },
                Measured::Native | Measured::Guarded if token < row.enforcer.tokens() => {
                    if let Some(i) = row.unmeasured.iter().position(|(at, _)| *at == token)
                        && let Some((_, is_boundary)) = row.unmeasured.remove(i)
                    {
                        row.budget.on_entropy(EntropySignal::from_nats(entropy_nats), is_boundary);
                        if is_boundary {
                            row.at_boundary(key, &self.wants, &mut self.signalled, self.signals.as_mut());
                        }
                    }
                }
                Measured::Native | Measured::Guarded => {
                    // A token may be sampled again: after a preemption, or when a prompt is computed in pieces.
                    row.entropies.retain(|(at, ..)| *at != token);
                    if row.entropies.len() == KEPT_ENTROPIES {
                        row.entropies.pop_front();
                    }
                    row.entropies.push_back((token, entropy_nats, what));
                }
            }
        }
    }

    /// Tokens were generated for the request, in order.
    pub fn generated(&mut self, key: u64, tokens: &[u32], now_ms: f64) {
        let Some(row) = self.rows.get_mut(&key) else { return };
        for token in tokens {
            let was_thinking = row.enforcer.is_thinking();
            let was_forced = row.enforcer.forced();
            let demand = row.enforcer.demand(&self.settings.rules);
            let is_forced = matches!(demand, Demand::Force(_));
            self.status.missed += u64::from(is_forced && demand != Demand::Force(*token));
            let number = row.enforcer.tokens();
            let measured =
                row.entropies.iter().position(|(at, ..)| *at == number).and_then(|i| row.entropies.remove(i));
            let is_guarded = matches!(measured, Some((.., Measured::Guarded)))
                && *token == self.settings.rules.guard_token()
                && !is_forced
                && was_thinking;
            if is_guarded && self.settings.rules.guard_continues() {
                row.enforcer.push_guarded(&self.settings.rules, *token);
            } else {
                row.enforcer.push(&self.settings.rules, *token);
                self.status.forced[ForceReason::EosGuard as usize] += u64::from(is_guarded);
            }
            row.last_token = *token;
            if let Some((_, reason)) = row.enforcer.forced().filter(|_| row.enforcer.forced() != was_forced) {
                let reason = if reason == ForceReason::HardCap { row.ordered.unwrap_or(reason) } else { reason };
                self.status.forced[reason as usize] += 1;
            }
            if was_thinking && !is_forced {
                let entropy = measured.map(|(_, nats, _)| EntropySignal::from_nats(nats));
                let is_boundary = self.settings.boundaries.contains(token);
                let comes_later = entropy.is_none() && row.is_measured;
                let mut is_given_up = false;
                if comes_later {
                    if row.unmeasured.len() == KEPT_ENTROPIES {
                        is_given_up = row.unmeasured.pop_front().is_some_and(|(_, is_boundary)| is_boundary);
                    }
                    row.unmeasured.push_back((number, is_boundary));
                }
                row.budget.on_token(*token, entropy, is_boundary);
                if is_boundary && !comes_later || is_given_up {
                    row.at_boundary(key, &self.wants, &mut self.signalled, self.signals.as_mut());
                }
                if row.budget.is_end_due() {
                    self.ending.push(key);
                }
            } else if !was_thinking && row.enforcer.is_thinking() && !row.is_asked {
                self.opening.push(key);
            }
        }
        if row.since_ms.is_nan() && row.enforcer.is_thinking() {
            row.since_ms = now_ms;
        }
        self.see_probe(key);
    }

    /// Whether a probe of this request is due now.
    fn see_probe(&mut self, key: u64) {
        let ThinkSettings { measures, can_probe, probe_at, line_ends, block_tokens, .. } = &self.settings;
        let Some(row) = self.rows.get_mut(&key) else { return };
        let thinks = row.enforcer.is_thinking() && !row.enforcer.is_forcing() && row.ordered.is_none();
        if !thinks {
            self.status.probes_dropped += u64::from(row.probe != Probe::None);
            row.probe = Probe::None;
            return;
        }
        let thresholds = row.budget.thresholds();
        let wanted = self.signals.is_some() || thresholds.eat_variance_threshold > 0.0;
        // A policy does not see whoever is judged by thresholds of its own.
        let wanted = wanted || self.wants.answers && !row.client.has_signals_of_its_own();
        if !*can_probe || !*measures || !wanted || row.client.is_off || !row.budget.probe_due() {
            return;
        }
        let is_at = match probe_at {
            ProbeAt::Interval if thresholds.eat_probe_interval_tokens < *block_tokens => true,
            ProbeAt::Interval => (row.prompt_tokens + row.enforcer.tokens()).is_multiple_of((*block_tokens).max(1)),
            ProbeAt::Newline => line_ends.contains(&row.last_token),
        };
        if !is_at || matches!(row.probe, Probe::Running { .. }) {
            return;
        }
        // One that had no room until the next was due is not tried any more: this one knows more.
        self.status.probes_dropped += u64::from(row.probe != Probe::None);
        self.status.probes_asked += 1;
        row.budget.begin_probe();
        row.probe = Probe::Due { tokens: row.enforcer.tokens(), think_tokens: row.enforcer.think_tokens() };
    }

    /// The probes that are due: which request, and of how many of its generated tokens. The longest due first; none until
    /// one has waited a quarter of its interval, so that they share a step: one that carries prompts at all is slower by
    /// more than a probe's few tokens.
    pub fn due(&self) -> impl Iterator<Item = (u64, u32)> {
        let is_time = self.rows.values().any(|row| match row.probe {
            Probe::Due { tokens, .. } => {
                row.enforcer.tokens() - tokens >= row.budget.thresholds().eat_probe_interval_tokens / WAITS
            }
            _ => false,
        });
        let mut due: Vec<_> = self
            .rows
            .iter()
            .filter_map(|(key, row)| match row.probe {
                Probe::Due { tokens, .. } => Some((row.enforcer.tokens() - tokens, *key, tokens)),
                _ => None,
            })
            .collect();
        if !is_time {
            due.clear();
        }
        due.sort_by_key(|(waited, key, _)| (std::cmp::Reverse(*waited), *key));
        due.into_iter().map(|(_, key, tokens)| (key, tokens))
    }

    /// The due probe of the request runs, and computes so many tokens.
    pub fn probe_runs(&mut self, key: u64, tokens: u32) {
        if let Some(row) = self.rows.get_mut(&key)
            && let Probe::Due { tokens: at, think_tokens } = row.probe
        {
            row.probe = Probe::Running { tokens: at, think_tokens, entropy_nats: None };
            self.status.probe_tokens += u64::from(tokens);
        }
    }

    /// The request's probe came back, with the token that it found likeliest. Its entropy may come later, until the next
    /// probe is due.
    pub fn probed(&mut self, key: u64, answer: Option<u32>) {
        let Some(row) = self.rows.get_mut(&key) else { return };
        let Probe::Running { tokens, think_tokens, entropy_nats } = row.probe else { return };
        match entropy_nats {
            Some(entropy_nats) => self.conclude(key, think_tokens, entropy_nats, answer),
            None => row.probe = Probe::Returned { tokens, think_tokens, answer },
        }
    }

    /// All of a probe is known.
    fn conclude(&mut self, key: u64, think_tokens: u32, entropy_nats: f32, answer: Option<u32>) {
        let Some(row) = self.rows.get_mut(&key) else { return };
        row.probe = Probe::None;
        if !entropy_nats.is_finite() {
            self.status.probes_dropped += 1;
            return;
        }
        self.status.probes_done += 1;
        let entropy = EntropySignal::from_nats(entropy_nats);
        row.budget.on_probe(entropy, answer);
        self.signalled.push(key);
        if let Some(signals) = self.signals.as_mut().filter(|signals| signals.len() < KEPT_SIGNALS) {
            signals.push(Signal {
                id: Arc::clone(&row.id),
                think_tokens,
                bits: Some(entropy.bits()),
                answer,
                rpdi: row.budget.rpdi(),
            });
        }
    }

    /// The request's probe was given up.
    pub fn probe_dropped(&mut self, key: u64) {
        if let Some(row) = self.rows.get_mut(&key)
            && row.probe != Probe::None
        {
            row.probe = Probe::None;
            self.status.probes_dropped += 1;
        }
    }

    /// The request's own limit is another from now on: the client or the operator has changed it. False when the request
    /// is not known.
    pub fn limit(&mut self, key: u64, max_think_tokens: u32) -> bool {
        let Some(row) = self.rows.get_mut(&key) else { return false };
        row.client.max_think_tokens = Some(max_think_tokens);
        // What it may think is asked for again, under the new limit.
        row.is_asked = false;
        self.opening.push(key);
        true
    }

    /// What was measured of the request's thinking so far; `None` when it is not known.
    #[must_use]
    pub fn signals(&self, key: u64) -> Option<Signals> {
        let Observed { eat_bits, eat_variance_bits2, rpdi, .. } = self.rows.get(&key)?.budget.observed();
        let or_nan = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
        let (eat_bits, eat_variance_bits2) = (or_nan(eat_bits), or_nan(eat_variance_bits2));
        Some(Signals { eat_bits, eat_variance_bits2, rpdi: or_nan(rpdi) })
    }

    /// The engine's name of the request.
    #[must_use]
    pub fn name(&self, key: u64) -> Option<&str> {
        self.rows.get(&key).map(|row| &*row.id)
    }

    /// Whether the request thinks, as far as its tokens are known.
    #[must_use]
    pub fn is_thinking(&self, key: u64) -> bool {
        self.rows.get(&key).is_some_and(|row| row.enforcer.is_thinking())
    }

    /// The number of the request with this name.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<u64> {
        self.rows.iter().find(|(_, row)| &*row.id == id).map(|(key, _)| *key)
    }

    /// Ask the slot about what is new, and say what is to be done where tokens are sampled: a datagram of
    /// [`Order`]s, empty when there is nothing to say.
    pub fn decide(&mut self, slot: &mut BudgetSlot, load: Load) -> &[u8] {
        self.orders.clear();
        self.orders.append(&mut self.gone);
        let wants = slot.wants();
        let before = std::mem::replace(&mut self.wants, wants);
        if wants.swaps != before.swaps {
            // A policy that is swapped in decides about those who think already.
            self.opening.extend(self.rows.iter().filter(|(_, row)| row.enforcer.is_thinking()).map(|(key, _)| *key));
        }
        if wants.index != before.index {
            self.measure_anew();
        }
        let configured = self.settings.configured.for_policy(self.settings.unit);
        let load = Load { configured, ..load };
        self.begin(slot, &load);
        self.weigh(slot, &load);
        self.end_at_minimum();
        &self.orders
    }

    /// Thresholds of those that begin to think.
    fn begin(&mut self, slot: &mut BudgetSlot, load: &Load) {
        let mut opening = std::mem::take(&mut self.opening);
        opening.sort_unstable();
        opening.dedup();
        opening.retain(|key| self.rows.contains_key(key));
        if opening.is_empty() {
            return;
        }
        let candidates: Vec<_> = opening.iter().map(|key| self.rows[key].candidate(load.now_ms)).collect();
        let thresholds = slot.start(load, self.settings.unit, &candidates);
        for (key, thresholds) in opening.iter().zip(thresholds) {
            let Some(row) = self.rows.get_mut(key) else { continue };
            let thresholds = row.client.over(thresholds);
            if row.budget.set_thresholds(thresholds).is_err() {
                continue;
            }
            let limit = thresholds.max_think_tokens;
            if limit != row.enforcer.limit() && row.ordered.is_none() {
                // Before its first token nothing is under way.
                let ahead = if row.is_asked || row.enforcer.tokens() > 0 { self.settings.steps_ahead } else { 0 };
                row.order(*key, row.enforcer.tokens() + ahead, limit, &mut self.orders);
            }
            row.is_asked = true;
        }
        for key in &opening {
            self.measure(*key);
        }
        opening.clear();
        self.opening = opening;
    }

    /// Whether the entropy of every token of such a request is wanted.
    fn is_to_be_measured(&self, thresholds: &ThinkThresholds, client: &ClientBudget) -> bool {
        let is_read = self.wants.index && !client.has_signals_of_its_own();
        let wants_index = !client.is_off && (is_read || thresholds.rpdi_threshold < f64::INFINITY);
        self.settings.measures && (wants_index || self.signals.is_some())
    }

    /// Tell where tokens are sampled whether this request's entropies are wanted, if that has changed.
    fn measure(&mut self, key: u64) {
        let Some(row) = self.rows.get(&key) else { return };
        let on = self.is_to_be_measured(row.budget.thresholds(), &row.client);
        if let Some(row) = self.rows.get_mut(&key).filter(|row| row.is_measured != on) {
            row.is_measured = on;
            row.unmeasured.clear();
            Order::Measure { key, on }.write(&mut self.orders);
        }
    }

    /// Who decides reads other columns than before.
    fn measure_anew(&mut self) {
        let keys: Vec<u64> = self.rows.keys().copied().collect();
        keys.into_iter().for_each(|key| self.measure(key));
    }

    /// Verdicts on those with new signals.
    fn weigh(&mut self, slot: &mut BudgetSlot, load: &Load) {
        let mut signalled = std::mem::take(&mut self.signalled);
        signalled.sort_unstable();
        signalled.dedup();
        signalled.retain(|key| self.rows.get(key).is_some_and(Row::is_to_be_judged));
        if signalled.is_empty() {
            return;
        }
        let candidates: Vec<_> = signalled.iter().map(|key| self.rows[key].candidate(load.now_ms)).collect();
        let verdicts = slot.probe(load, &candidates);
        for (key, verdict) in signalled.iter().zip(verdicts) {
            let Some(row) = self.rows.get_mut(key) else { continue };
            let verdict = match verdict {
                _ if row.client.is_off => Verdict::KeepThinking,
                _ if row.client.has_signals_of_its_own() => Verdict::Default,
                verdict => verdict,
            };
            // Whether the host's own rules see the same, for the name of the reason.
            let by_default = row.budget.by_default();
            let reason = match row.budget.decide(verdict) {
                Some(ForceReason::Policy) => by_default.or(Some(ForceReason::Policy)),
                reason => reason,
            };
            let Some(reason) = reason else { continue };
            row.end(*key, reason, self.settings.steps_ahead, &mut self.orders);
        }
        signalled.clear();
        self.signalled = signalled;
    }

    /// Ends that waited for `min_think_tokens`: the policy is not asked again.
    fn end_at_minimum(&mut self) {
        for key in self.ending.drain(..) {
            let Some(row) = self.rows.get_mut(&key).filter(|row| row.enforcer.is_thinking()) else { continue };
            if let Some(reason) = row.budget.end_if_due() {
                row.end(key, reason, self.settings.steps_ahead, &mut self.orders);
            }
        }
    }

    /// The request is over. Whoever samples is told with the next decision.
    pub fn remove(&mut self, key: u64) {
        let Some(row) = self.rows.remove(&key) else { return };
        Order::Gone { key }.write(&mut self.gone);
        self.status.probes_dropped += u64::from(row.probe != Probe::None);
        self.status.think_tokens += u64::from(row.enforcer.think_tokens());
        self.status.thought += u64::from(row.enforcer.think_tokens() > 0);
    }

    /// Keep every signal for [`ThinkBudgets::take_signals`], and measure whatever can be measured.
    pub fn record_signals(&mut self, keep: bool) {
        self.signals = keep.then(Vec::new);
    }

    /// The signals since the last call.
    pub fn take_signals(&mut self) -> Vec<Signal> {
        self.signals.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What was done so far.
    #[must_use]
    pub fn status(&self) -> BudgetStatus {
        self.status
    }
}

/// Which part of its interval a probe waits for others.
const WAITS: u32 = 4;

impl Row {
    fn candidate(&self, now_ms: f64) -> BudgetCandidate {
        BudgetCandidate {
            prompt_tokens: self.prompt_tokens,
            remaining_tokens: self.max_tokens.saturating_sub(self.enforcer.tokens()),
            think_ms: if self.since_ms.is_nan() { 0.0 } else { (now_ms - self.since_ms).max(0.0) },
            priority: self.priority,
            tenant: self.tenant,
            slack_ms: self.deadline_ms - now_ms,
            observed: self.budget.observed(),
        }
    }

    /// A sentence, a line or a clause ended: with an index that is a signal. Without one a policy that may weigh more than
    /// signals is asked now and then.
    fn at_boundary(
        &mut self,
        key: u64,
        wants: &BudgetWants,
        signalled: &mut Vec<u64>,
        signals: Option<&mut Vec<Signal>>,
    ) {
        if !self.budget.has_boundary_index() {
            if wants.boundaries && !self.client.is_off && !self.client.has_signals_of_its_own() {
                self.budget.on_boundary();
                signalled.push(key);
            }
            return;
        }
        signalled.push(key);
        if let Some(signals) = signals.filter(|signals| signals.len() < KEPT_SIGNALS) {
            signals.push(Signal {
                id: Arc::clone(&self.id),
                think_tokens: self.budget.think_tokens(),
                bits: None,
                answer: None,
                rpdi: self.budget.rpdi(),
            });
        }
    }

    fn is_to_be_judged(&self) -> bool {
        self.budget.observed().is_new() && self.enforcer.is_thinking() && self.ordered.is_none()
    }

    /// Order the end at the next token that is not under way.
    fn end(&mut self, key: u64, reason: ForceReason, steps_ahead: u32, out: &mut Vec<u8>) {
        if self.ordered.is_none() && !self.enforcer.is_forcing() {
            self.ordered = Some(reason);
            self.order(key, self.enforcer.tokens() + steps_ahead, 0, out);
        }
    }

    fn order(&mut self, key: u64, from: u32, max_think_tokens: u32, out: &mut Vec<u8>) {
        self.enforcer.limit_from(from, max_think_tokens);
        Order::Limit { key, from, max_think_tokens }.write(out);
    }
}
