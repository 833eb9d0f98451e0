use std::collections::VecDeque;
use std::sync::Arc;

use crate::{RequestState, RequestTable, Signals};

use super::{
    BudgetCandidate, BudgetWants, ClientBudget, Enforcement, ForceReason, Observed, Order, Report, Signal, ThinkBudget,
};

/// Most signals to keep until a caller takes them.
pub(super) const KEPT_SIGNALS: usize = 1 << 22;

/// The part of a request's row about its thinking, where Meridian can end it. The row's own tracker knows whether
/// thinking is open.
#[derive(Clone, Debug)]
pub(crate) struct ThinkRecord {
    /// The engine's name of the request.
    pub(super) id: Arc<str>,
    pub(super) enforcement: Enforcement,
    pub(super) budget: ThinkBudget,
    pub(super) client: ClientBudget,
    /// The client's own options, after a change of the live request.
    pub(super) as_asked: Option<Box<ClientBudget>>,
    pub(super) is_measured: bool,
    /// The step computes a part of its prompt that is not the last: vLLM discards the token that it samples.
    pub(super) is_chunk: bool,
    pub(super) since_ms: f64,
    /// Entropies of tokens that have not arrived yet.
    pub(super) entropies: VecDeque<Report>,
    /// Tokens that arrived before their entropies, with the number of tokens before their step, and whether they are
    /// boundaries.
    pub(super) unmeasured: VecDeque<(u32, u32, bool)>,
    /// Number of tokens before the latest step.
    pub(super) before_step: u32,
    pub(super) is_asked: bool,
    /// The latest token of the step after which a probe may be cut: numbers of generated and of think tokens.
    pub(super) cut: Option<(u32, u32)>,
    pub(super) probe: Probe,
    /// The reason of an ordered end.
    pub(super) ordered: Option<ForceReason>,
    /// The reason of the forced ending under way.
    pub(super) forced: Option<ForceReason>,
    /// The latest end of its thinking.
    pub(super) end: Option<ThinkEnd>,
    /// Times that it began to think again.
    pub(super) reopened: u32,
    /// Its latest token was to be forced.
    pub(super) is_due: bool,
    /// Tokens at which its forced end waited for a mask of its client or for a tool call.
    pub(super) waited: u32,
}

/// How the thinking of a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThinkEnd {
    /// The model ended it.
    Natural,
    /// Meridian ended it.
    Forced(ForceReason),
}

impl ThinkEnd {
    /// The end in a word, for reports.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Natural => "natural",
            Self::Forced(reason) => reason.label(),
        }
    }
}

/// The cut of a request's next or present probe, in generated tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Probe {
    None,
    Due {
        tokens: u32,
        think_tokens: u32,
    },
    Running {
        tokens: u32,
        think_tokens: u32,
        /// Entropy, nats, and confidence.
        measured: Option<(f32, f32)>,
    },
    /// It returned before its measurement from a device.
    Returned {
        tokens: u32,
        think_tokens: u32,
        answer: Option<u32>,
    },
}

impl ThinkRecord {
    pub(super) fn new(id: Arc<str>, enforcement: Enforcement, budget: ThinkBudget, client: ClientBudget) -> Self {
        Self {
            id,
            enforcement,
            budget,
            client,
            as_asked: None,
            is_measured: false,
            is_chunk: false,
            since_ms: f64::NAN,
            entropies: VecDeque::new(),
            unmeasured: VecDeque::new(),
            before_step: 0,
            is_asked: false,
            cut: None,
            probe: Probe::None,
            ordered: None,
            forced: None,
            end: None,
            reopened: 0,
            is_due: false,
            waited: 0,
        }
    }

    /// Note whether thinking was open before a token and is open after it. Returns whether it began again.
    pub(super) fn follow(&mut self, was_open: bool, is_open: bool) -> bool {
        if was_open && !is_open {
            self.end = Some(self.forced.take().map_or(ThinkEnd::Natural, ThinkEnd::Forced));
        }
        let is_again = !was_open && is_open && self.end.is_some();
        self.reopened += u32::from(is_again);
        is_again
    }

    /// The latest end of its thinking (none while it thinks), how often it began again, and the number of tokens at
    /// which a forced end waited.
    pub(crate) fn course(&self, is_open: bool) -> (Option<ThinkEnd>, u32, u32) {
        (self.end.filter(|_| !is_open), self.reopened, self.waited)
    }

    /// The measurements of the thinking so far.
    pub(crate) fn signals(&self) -> Signals {
        let Observed { eat_bits, eat_variance_bits2, rpdi, .. } = self.budget.observed();
        let or_nan = |value: Option<f64>| value.map_or(f32::NAN, |value| value as f32);
        Signals { eat_bits: or_nan(eat_bits), eat_variance_bits2: or_nan(eat_variance_bits2), rpdi: or_nan(rpdi) }
    }

    /// The facts for the policy about the request with this row.
    pub(super) fn candidate(&self, table: &RequestTable, row: &RequestState, now_ms: f64) -> BudgetCandidate {
        BudgetCandidate {
            prompt_tokens: row.prompt_tokens(),
            remaining_tokens: row.max_tokens.saturating_sub(self.enforcement.tokens()),
            think_ms: if self.since_ms.is_nan() { 0.0 } else { (now_ms - self.since_ms).max(0.0) },
            priority: row.priority,
            tenant: row.tenant,
            request: row.number,
            session: row.session.session,
            turn: row.session.turn,
            slack_ms: row.deadline_ms - now_ms,
            level_slack_ms: table.think_slack_ms(row, now_ms),
            observed: self.budget.observed(),
        }
    }

    /// Note the end of a sentence, a line or a clause: with an index, it is a signal. Without one, a policy that may
    /// weigh more than signals is asked at intervals. Returns whether there is something to weigh.
    pub(super) fn at_boundary(&mut self, wants: &BudgetWants, signals: Option<&mut Vec<Signal>>) -> bool {
        if !self.budget.has_boundary_index() {
            let is_asked = wants.boundaries && self.is_shown();
            if is_asked {
                self.budget.on_boundary();
            }
            return is_asked;
        }
        if let Some(signals) = signals.filter(|signals| signals.len() < KEPT_SIGNALS) {
            signals.push(Signal {
                id: Arc::clone(&self.id),
                think_tokens: self.budget.think_tokens(),
                bits: None,
                answer: None,
                rpdi: self.budget.rpdi(),
                confidence: None,
            });
        }
        true
    }

    /// Whether policies see this thinking in its course.
    pub(super) fn is_shown(&self) -> bool {
        !self.client.is_off && !self.client.has_signals_of_its_own()
    }

    /// Order the end at the next token that is not in flight.
    pub(super) fn end(&mut self, key: u64, reason: ForceReason, tokens_ahead: u32, out: &mut Vec<u8>) {
        if self.ordered.is_none() && !self.enforcement.is_forcing() {
            self.ordered = Some(reason);
            self.order(key, self.enforcement.tokens() + tokens_ahead, 0, out);
        }
    }

    pub(super) fn order(&mut self, key: u64, from: u32, max_think_tokens: u32, out: &mut Vec<u8>) {
        self.enforcement.limit_from(from, max_think_tokens);
        Order::Limit { key, from, max_think_tokens }.write(out);
    }
}
