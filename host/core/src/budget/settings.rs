use std::collections::HashSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::config::ProbeAt;
use crate::{Pattern, RowId};

use super::{BudgetCandidate, EndRules, Load, SamplerLimits, Thresholds, Verdict};

/// The settings for every request of an engine.
///
/// ```
/// use meridian_core::Markers;
/// use meridian_core::budget::{EndRules, ThinkSettings};
///
/// let rules = EndRules::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![])?, vec![])?;
/// assert!(!ThinkSettings::new(rules).can_probe);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ThinkSettings {
    /// How thinking is recognised and ended.
    pub rules: EndRules,
    /// The operator's thresholds.
    pub configured: Thresholds,
    /// Whether entropies are measured.
    pub measures: bool,
    /// Whether the engine can run probes.
    pub can_probe: bool,
    /// Where a probe may be due.
    pub probe_at: ProbeAt,
    /// Tokens in a KV block. A probe at the end of a block computes only its appended tokens, so probes are placed
    /// there when their interval is a block or more.
    pub block_tokens: u32,
    /// Tokens that end a line.
    pub line_ends: HashSet<u32>,
    /// Tokens that end a line, a sentence or a clause.
    pub boundaries: HashSet<u32>,
    /// Generating any of these ends thinking.
    pub interrupts: Arc<[Pattern]>,
    /// An end of sequence inside the thinking becomes the end marker.
    pub guards_eos: bool,
    /// A certain loop ends thinking, whatever the policy says.
    pub ends_loops: bool,
    /// Whether a sampler can begin to follow a request later than at its arrival.
    pub wakes: bool,
    /// Tokens of a request that may be sampled before the scheduler knows of them: 0 for synchronous scheduling, 1 for
    /// asynchronous scheduling, and 1 more for each draft token.
    pub tokens_ahead: u32,
    /// Tells the keys of this engine's requests from those of the engines that the sampling process knew before.
    pub epoch: u8,
}

impl ThinkSettings {
    /// The sampling process's key of the request in this row.
    pub(super) fn key(&self, row: RowId) -> u64 {
        u64::from(self.epoch) << RowId::BITS | row.bits()
    }

    /// A model with these rules, in an engine that measures nothing and ends thinking only by its length.
    #[must_use]
    pub fn new(rules: EndRules) -> Self {
        Self {
            rules,
            configured: Thresholds::default(),
            measures: false,
            can_probe: false,
            probe_at: ProbeAt::default(),
            block_tokens: 16,
            line_ends: HashSet::new(),
            boundaries: HashSet::new(),
            interrupts: [].into(),
            guards_eos: false,
            ends_loops: false,
            wakes: true,
            tokens_ahead: 0,
            epoch: 0,
        }
    }
}

/// The decider about the thinking of requests: the budget slot, with its policies.
///
/// ```
/// use meridian_core::budget::{BudgetCandidate, BudgetDecider, BudgetWants, Load, Thresholds, Verdict};
///
/// /// Has no wish.
/// struct AsConfigured;
///
/// impl BudgetDecider for AsConfigured {
///     fn wants(&self) -> BudgetWants {
///         BudgetWants::default()
///     }
///
///     fn start(&mut self, _: &Load, candidates: &[BudgetCandidate]) -> Vec<Thresholds> {
///         vec![Thresholds::default(); candidates.len()]
///     }
///
///     fn probe(&mut self, _: &Load, candidates: &[BudgetCandidate]) -> Vec<Verdict> {
///         vec![Verdict::Default; candidates.len()]
///     }
/// }
///
/// assert!(!AsConfigured.wants().answers);
/// ```
pub trait BudgetDecider {
    /// The inputs of the next decision.
    fn wants(&self) -> BudgetWants;

    /// The thresholds of requests that begin to think.
    fn start(&mut self, load: &Load, candidates: &[BudgetCandidate]) -> Vec<Thresholds>;

    /// The verdicts on requests with new facts.
    fn probe(&mut self, load: &Load, candidates: &[BudgetCandidate]) -> Vec<Verdict>;

    /// These requests have ended; called before the decisions of a step. By default, it is told to nobody.
    fn finished(&mut self, _requests: &[u32]) {}
}

/// The inputs of a budget slot's policies, the active one and its shadow: what the host must measure, and when to ask.
/// The default, which stands in after a fault, does not need them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BudgetWants {
    /// Number of swaps.
    pub swaps: u64,
    /// The likeliest answers of probes, or their probabilities.
    pub answers: bool,
    /// The path deviation index, even where no threshold is set on it.
    pub index: bool,
    /// Whether to ask at boundaries without a measurement.
    pub boundaries: bool,
    /// Repetitions, even where no loop is ended.
    pub repetition: bool,
    /// Whether another policy than the default decides, or a shadow or a recording sees the decisions: every request is
    /// followed.
    pub decides: bool,
}

impl ThinkSettings {
    /// Whether the operator's settings may end the thinking of a request that asks for nothing, and is shorter than the
    /// limit.
    #[must_use]
    pub fn may_end_any(&self) -> bool {
        let Self { configured, measures, can_probe, interrupts, guards_eos, ends_loops, .. } = self;
        let signals = *measures
            && (configured.rpdi_threshold < f64::INFINITY || *can_probe && configured.eat_variance_threshold > 0.0);
        signals || !interrupts.is_empty() || *guards_eos || *ends_loops
    }
}

/// What the sampler of a request has to know.
#[derive(Clone, Debug, PartialEq)]
pub struct Enrolled {
    /// The number of the request in reports and orders.
    pub key: u64,
    /// Its limits until an order changes them.
    pub limits: SamplerLimits,
}

/// A raw signal, for the choice of thresholds: a probe, or the path deviation index at a boundary.
#[derive(Clone, Debug, PartialEq)]
pub struct Signal {
    /// The engine's name of the request.
    pub id: Arc<str>,
    /// Think tokens up to there.
    pub think_tokens: u32,
    /// Entropy that a probe found, bits.
    pub bits: Option<f64>,
    /// The likeliest token that a probe found.
    pub answer: Option<u32>,
    /// The path deviation index.
    pub rpdi: Option<f64>,
    /// Probability of that token.
    pub confidence: Option<f64>,
}

/// Counters of the budget actions on an engine's requests, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetStatus {
    /// Forced endings, by [`ForceReason`](super::ForceReason) in the order of its `ALL`.
    pub forced: [u64; 8],
    /// Tokens that should have been forced, but were not: the order did not arrive, or another rule prevailed.
    pub missed: u64,
    /// Tokens at which a forced end waited for the client: its mask forbade the token, or a tool call was open.
    #[serde(default)]
    pub waited: u64,
    /// Probes that were due.
    pub probes_asked: u64,
    /// Probes that ran and returned an entropy.
    pub probes_done: u64,
    /// Probes that were dropped: the request left its thinking or ended, or there was no room for too long.
    pub probes_dropped: u64,
    /// Tokens that probes computed.
    pub probe_tokens: u64,
    /// Think tokens of ended requests.
    pub think_tokens: u64,
    /// Ended requests that have thought.
    pub thought: u64,
    /// Times that a request began to think again after its thinking had ended.
    pub reopened: u64,
}
