//! Which requests move to another engine at the end of their thinking, and to which one.
//!
//! A [`HandoffPolicy`] decides; [`Handoffs`] keeps its facts, leaves out engines that fail, and checks its answers. The front
//! (`meridian handoff`) and the simulator drive the same [`Handoffs`].
//!
//! ```
//! use meridian_core::config::HandoffPolicyName;
//! use meridian_core::handoff::{Answered, Handoffs};
//!
//! let mut handoffs = Handoffs::new(HandoffPolicyName::Threshold.policy(4), 2);
//! assert_eq!(handoffs.offer(0.0), Ok(4..=u32::MAX));
//! let first = handoffs.target(9, 0.0).unwrap();
//! assert_ne!(handoffs.target(9, 0.0), Some(first), "the other one has fewer requests");
//! handoffs.answered(first, 9, &Answered { begin_ms: 20.0, tokens: 200, writing_ms: 3980.0 });
//! assert_eq!(handoffs.targets(0.0)[first].itl_ms, 20.0);
//! ```

mod policies;

use std::ops::RangeInclusive;

pub use self::policies::{ExpectedTimeHandoff, ThresholdHandoff};

/// Weight of the newest value in a moving mean.
const WEIGHT: f64 = 0.05;
/// After a failure, an engine is left out for so long, milliseconds; twice as long after each further one in a row.
const AFTER_FAILURE_MS: f64 = 1_000.0;
/// Longest time for which a failing engine is left out, milliseconds.
const LONGEST_MS: f64 = 60_000.0;

/// An engine that may answer, as a policy sees it. Means are moving means, NaN before the first value.
///
/// ```
/// use meridian_core::config::HandoffPolicyName;
/// use meridian_core::handoff::Handoffs;
///
/// let mut handoffs = Handoffs::new(HandoffPolicyName::Threshold.policy(4), 1);
/// handoffs.target(9, 0.0);
/// let facts = handoffs.targets(0.0)[0];
/// assert_eq!((facts.requests, facts.blocks, facts.itl_ms.is_nan()), (1, 9, true));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TargetFacts {
    /// It failed a moment ago, and is left out for now.
    pub is_failing: bool,
    /// Answers that it is writing, or about to.
    pub requests: u32,
    /// KV blocks that these had when they were handed over.
    pub blocks: u64,
    /// Time from the request for an answer to its first token, mean, milliseconds: queue, transfer and one step.
    pub begin_ms: f64,
    /// KV blocks of these answers, mean.
    pub begin_blocks: f64,
    /// Gap between two tokens of an answer, mean, milliseconds.
    pub itl_ms: f64,
    /// Answers that it wrote at a time when these gaps were measured, mean.
    pub itl_requests: f64,
}

impl TargetFacts {
    const UNKNOWN: Self = Self {
        is_failing: false,
        requests: 0,
        blocks: 0,
        begin_ms: f64::NAN,
        begin_blocks: f64::NAN,
        itl_ms: f64::NAN,
        itl_requests: f64::NAN,
    };
}

/// The facts of a decision. Means are moving means, NaN before the first value.
#[derive(Clone, Copy, Debug)]
pub struct HandoffFacts<'a> {
    /// Gap between two tokens in the engine that thinks, mean, milliseconds.
    pub think_itl_ms: f64,
    /// Tokens of an answer, mean.
    pub answer_tokens: f64,
    /// Requests that arrived and could be handed over, this one included.
    pub arrivals: u64,
    /// The engines that may answer.
    pub targets: &'a [TargetFacts],
}

/// Decides about handoffs. The host calls it twice for a request at most, never inside an engine's step.
///
/// ```
/// use std::ops::RangeInclusive;
/// use meridian_core::handoff::{HandoffFacts, HandoffPolicy, Handoffs, Stays};
///
/// struct Never;
///
/// impl HandoffPolicy for Never {
///     fn offer(&mut self, _: &HandoffFacts<'_>) -> Option<RangeInclusive<u32>> {
///         None
///     }
///     fn target(&mut self, _: u32, _: &HandoffFacts<'_>) -> usize {
///         0
///     }
/// }
///
/// assert_eq!(Handoffs::new(Box::new(Never), 1).offer(0.0), Err(Stays::Policy));
/// ```
pub trait HandoffPolicy: Send {
    /// A request arrives: the numbers of KV blocks with which it is to be handed over at the end of its thinking. `None`: it
    /// stays, whatever it needs.
    fn offer(&mut self, facts: &HandoffFacts<'_>) -> Option<RangeInclusive<u32>>;

    /// The position of the engine that answers a request with so many KV blocks. An answer that is out of range or names an
    /// engine that is failing is replaced by the engine with the fewest requests.
    fn target(&mut self, blocks: u32, facts: &HandoffFacts<'_>) -> usize;
}

/// The reason why a request stays in the engine that thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// The policy decided so.
    Policy,
    /// Every engine that may answer is failing.
    Failing,
}

impl Stays {
    /// For metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Policy => "policy",
            Self::Failing => "failing",
        }
    }
}

/// An answer that an engine wrote to its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answered {
    /// From the request for it to its first token, milliseconds.
    pub begin_ms: f64,
    /// Its tokens.
    pub tokens: u32,
    /// From its first token to its last, milliseconds.
    pub writing_ms: f64,
}

/// Failures in a row of one engine.
#[derive(Clone, Copy, Debug, Default)]
struct Failures {
    in_row: u32,
    until_ms: f64,
}

/// The handoffs of one front: a policy, and the facts that it decides by.
///
/// ```
/// use meridian_core::config::HandoffPolicyName;
/// use meridian_core::handoff::{Handoffs, Stays};
///
/// let mut handoffs = Handoffs::new(HandoffPolicyName::Threshold.policy(4), 1);
/// let target = handoffs.target(9, 0.0).unwrap();
/// handoffs.failed(target, 9, 0.0);
/// assert_eq!(handoffs.offer(500.0), Err(Stays::Failing));
/// assert_eq!(handoffs.offer(1000.0), Ok(4..=u32::MAX));
/// ```
pub struct Handoffs {
    policy: Box<dyn HandoffPolicy>,
    failures: Vec<Failures>,
    known: Known,
}

/// The facts behind a [`HandoffFacts`].
struct Known {
    targets: Vec<TargetFacts>,
    think_itl_ms: f64,
    answer_tokens: f64,
    arrivals: u64,
}

impl Known {
    fn facts(&self) -> HandoffFacts<'_> {
        let Self { ref targets, think_itl_ms, answer_tokens, arrivals } = *self;
        HandoffFacts { think_itl_ms, answer_tokens, arrivals, targets }
    }
}

impl Handoffs {
    /// Handoffs to so many engines.
    #[must_use]
    pub fn new(policy: Box<dyn HandoffPolicy>, targets: usize) -> Self {
        Self {
            policy,
            failures: vec![Failures::default(); targets],
            known: Known {
                targets: vec![TargetFacts::UNKNOWN; targets],
                think_itl_ms: f64::NAN,
                answer_tokens: f64::NAN,
                arrivals: 0,
            },
        }
    }

    /// The engines that may answer, at `now_ms`.
    pub fn targets(&mut self, now_ms: f64) -> &[TargetFacts] {
        self.look(now_ms);
        &self.known.targets
    }

    /// Gap between two tokens in the engine that thinks, moving mean, milliseconds; NaN before the first.
    #[must_use]
    pub fn think_itl_ms(&self) -> f64 {
        self.known.think_itl_ms
    }

    /// A request arrives at `now_ms`: the numbers of KV blocks with which it is handed over.
    ///
    /// # Errors
    /// It stays, for this reason.
    pub fn offer(&mut self, now_ms: f64) -> Result<RangeInclusive<u32>, Stays> {
        self.known.arrivals += 1;
        self.look(now_ms);
        if self.known.targets.iter().all(|target| target.is_failing) {
            return Err(Stays::Failing);
        }
        self.policy.offer(&self.known.facts()).filter(|blocks| !blocks.is_empty()).ok_or(Stays::Policy)
    }

    /// The thinking of a request with so many KV blocks is over at `now_ms`: the engine that answers it. `None`: all are
    /// failing. [`Handoffs::answered`] or [`Handoffs::failed`] follows.
    pub fn target(&mut self, blocks: u32, now_ms: f64) -> Option<usize> {
        self.look(now_ms);
        let chosen = self.policy.target(blocks, &self.known.facts());
        let targets = &mut self.known.targets;
        let chosen = match targets.get(chosen) {
            Some(target) if !target.is_failing => chosen,
            _ => fewest(targets)?,
        };
        let target = &mut targets[chosen];
        target.requests += 1;
        target.blocks += u64::from(blocks);
        Some(chosen)
    }

    /// The engine that thinks generated `tokens` in `ms`, the first token not counted.
    pub fn thought(&mut self, tokens: u32, ms: f64) {
        if tokens > 0 {
            note(&mut self.known.think_itl_ms, ms / f64::from(tokens));
        }
    }

    /// The engine that thinks wrote an answer of so many tokens.
    pub fn stayed(&mut self, tokens: u32) {
        note(&mut self.known.answer_tokens, f64::from(tokens));
    }

    /// An engine wrote an answer to its end.
    pub fn answered(&mut self, target: usize, blocks: u32, answered: &Answered) {
        let Answered { begin_ms, tokens, writing_ms } = *answered;
        note(&mut self.known.answer_tokens, f64::from(tokens));
        let Some(facts) = self.known.targets.get_mut(target) else { return };
        note(&mut facts.begin_ms, begin_ms);
        note(&mut facts.begin_blocks, f64::from(blocks));
        if tokens > 1 {
            note(&mut facts.itl_ms, writing_ms / f64::from(tokens - 1));
            note(&mut facts.itl_requests, f64::from(facts.requests));
        }
        facts.ended(blocks);
        self.failures[target] = Failures::default();
    }

    /// An engine did not write an answer to its end, by its own fault, at `now_ms`.
    pub fn failed(&mut self, target: usize, blocks: u32, now_ms: f64) {
        let Some(facts) = self.known.targets.get_mut(target) else { return };
        facts.ended(blocks);
        let failures = &mut self.failures[target];
        // Answers that broke off together are one failure.
        if now_ms >= failures.until_ms {
            failures.until_ms = now_ms + (AFTER_FAILURE_MS * f64::from(failures.in_row).exp2()).min(LONGEST_MS);
            failures.in_row = failures.in_row.saturating_add(1);
        }
    }

    /// A client went away before the end of its answer.
    pub fn dropped(&mut self, target: usize, blocks: u32) {
        if let Some(facts) = self.known.targets.get_mut(target) {
            facts.ended(blocks);
        }
    }

    fn look(&mut self, now_ms: f64) {
        for (target, failures) in self.known.targets.iter_mut().zip(&self.failures) {
            target.is_failing = failures.in_row > 0 && now_ms < failures.until_ms;
        }
    }
}

impl std::fmt::Debug for Handoffs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handoffs").field("targets", &self.known.targets).finish_non_exhaustive()
    }
}

impl TargetFacts {
    fn ended(&mut self, blocks: u32) {
        self.requests = self.requests.saturating_sub(1);
        self.blocks = self.blocks.saturating_sub(u64::from(blocks));
    }
}

/// The engine with the fewest requests of those that do not fail; of equal ones the one with the fewest blocks.
fn fewest(targets: &[TargetFacts]) -> Option<usize> {
    let able = targets.iter().enumerate().filter(|(_, target)| !target.is_failing);
    able.min_by_key(|(_, target)| (target.requests, target.blocks)).map(|(position, _)| position)
}

fn note(mean: &mut f64, value: f64) {
    if value.is_finite() {
        *mean = if mean.is_nan() { value } else { *mean + WEIGHT * (value - *mean) };
    }
}
