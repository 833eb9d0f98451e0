//! The three decisions that policies make. Slots treat all policies alike; the differences are here.

use std::fmt::Debug;

use meridian_policies::{
    balanced, code_stop, cost_aware, deadline_aware, deer, eat, eat_rpdi, edf, fair_share, fcfs, fixed_budget,
    jitserve, lpm, lru, mlfq, next_use, noop, output_first, pascal, patience, prefix_value, priority, qoe, qoserve,
    rpdi, scorpio, srpt, t_lru, tiered_lru, ttl, wa_lru,
};
use meridian_policy_sdk::budget::{Load, Point};
use meridian_policy_sdk::eviction::{Memory, Ranking, Subject};
use meridian_policy_sdk::{Decision, Init, Step, budget, eviction};
use serde::{Deserialize, Serialize};

use crate::config::STOCK;
use crate::native::Native;
use crate::{Fault, FaultKind, Policy};

/// A decision that policies make, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SlotName {
    /// Order, token budget and caps of a step.
    Dispatch,
    /// Which KV blocks, or which request, go first inside a tier.
    Eviction,
    /// When thinking ends.
    Budget,
}

impl SlotName {
    /// Every slot.
    pub const ALL: [Self; 3] = [Self::Dispatch, Self::Eviction, Self::Budget];

    /// The name in configuration, paths and metrics.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Dispatch => "dispatch",
            Self::Eviction => "eviction",
            Self::Budget => "budget",
        }
    }
}

/// The differences between slots: the columns for its policies, the facts they see, their answers, and the check of
/// those. Implemented only by [`Dispatch`], [`Eviction`] and [`Budget`].
pub trait SlotKind: Copy + Debug + Send + Sync + 'static {
    /// A fact about each candidate.
    type Column: Copy + Debug + Eq + std::hash::Hash + Send + Sync + 'static;
    /// Facts about the engine at a decision.
    type Facts: Copy + Debug + Default + PartialEq + Send + Sync + Serialize;
    /// The answer of a policy.
    type Decision: Clone + Debug + Default + PartialEq + Send;

    /// The slot.
    const NAME: SlotName;
    /// The column that tells requests apart, if it has one.
    const REQUEST: Option<Self::Column>;
    /// Its native policies; the first is its default.
    const NATIVES: &'static [&'static str];
    /// The source that decides beside a policy that the configuration puts in shadow.
    const BESIDE_SHADOW: &'static str;

    /// Time of the decision, milliseconds on the host's clock.
    fn now_ms(facts: &Self::Facts) -> f64;

    /// Clear the last decision, and keep its memory.
    fn clear(decision: &mut Self::Decision);

    /// Check an answer against its batch.
    ///
    /// # Errors
    /// [`FaultKind::BadAnswer`] when a list has the wrong length or a value is out of its range.
    fn check(facts: &Self::Facts, decision: &Self::Decision, candidates: usize) -> Result<(), Fault>;

    /// Whether a checked answer decides; otherwise the batch is left to the default.
    fn is_decided(decision: &Self::Decision, candidates: usize) -> bool;

    /// The keys of an answer, where it has keys.
    fn keys(decision: &Self::Decision) -> &[f32];

    /// Number of differences between two answers to the same batch other than keys: token budgets, thresholds,
    /// verdicts.
    fn differences(one: &Self::Decision, other: &Self::Decision) -> u64;

    /// Facts of made-up batches of `candidates` candidates, for the trial of a policy.
    fn trials(candidates: u32) -> Vec<Self::Facts>;

    /// The native policy `name`; `None` when there is none.
    #[doc(hidden)]
    fn native(name: &str, init: Init<'_>) -> Option<Result<Box<dyn Policy<Self>>, String>>;
}

/// The dispatch slot: once a step, the order, the token budget and the caps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dispatch;

impl SlotKind for Dispatch {
    type Column = meridian_policy_sdk::Column;
    type Facts = Step;
    type Decision = Decision;

    const NAME: SlotName = SlotName::Dispatch;
    const REQUEST: Option<Self::Column> = Some(meridian_policy_sdk::Column::Request);
    const BESIDE_SHADOW: &'static str = STOCK;
    const NATIVES: &'static [&'static str] = &[
        "balanced",
        "output-first",
        "fcfs",
        "noop",
        "priority",
        "pascal",
        "srpt",
        "fair-share",
        "edf",
        "qoe",
        "mlfq",
        "qoserve",
        "scorpio",
        "jitserve",
        "lpm",
    ];

    fn now_ms(facts: &Step) -> f64 {
        facts.now_ms
    }

    fn clear(decision: &mut Decision) {
        decision.clear();
    }

    fn check(_facts: &Step, decision: &Decision, candidates: usize) -> Result<(), Fault> {
        check_count(decision.keys.len(), candidates, "keys")?;
        check_count(decision.token_caps.len(), candidates, "token caps")?;
        check_count(decision.victim_keys.len(), candidates, "victim keys")
    }

    fn is_decided(decision: &Decision, candidates: usize) -> bool {
        candidates == 0 || !decision.keys.is_empty()
    }

    fn keys(decision: &Decision) -> &[f32] {
        &decision.keys
    }

    fn differences(one: &Decision, other: &Decision) -> u64 {
        u64::from(one.token_budget != other.token_budget)
    }

    fn trials(candidates: u32) -> Vec<Step> {
        vec![Step { token_budget: 2048, running: candidates, decode_tokens: 1, ..Step::default() }]
    }

    fn native(name: &str, init: Init<'_>) -> Option<Result<Box<dyn Policy<Self>>, String>> {
        match name {
            "balanced" => Some(Native::<balanced::Balanced>::boxed(init)),
            "output-first" => Some(Native::<output_first::OutputFirst>::boxed(init)),
            "fcfs" => Some(Native::<fcfs::Fcfs>::boxed(init)),
            "noop" => Some(Native::<noop::Noop>::boxed(init)),
            "priority" => Some(Native::<priority::Priority>::boxed(init)),
            "pascal" => Some(Native::<pascal::Pascal>::boxed(init)),
            "mlfq" => Some(Native::<mlfq::Mlfq>::boxed(init)),
            "srpt" => Some(Native::<srpt::Srpt>::boxed(init)),
            "fair-share" => Some(Native::<fair_share::FairShare>::boxed(init)),
            "edf" => Some(Native::<edf::Edf>::boxed(init)),
            "qoe" => Some(Native::<qoe::Qoe>::boxed(init)),
            "qoserve" => Some(Native::<qoserve::Qoserve>::boxed(init)),
            "scorpio" => Some(Native::<scorpio::Scorpio>::boxed(init)),
            "jitserve" => Some(Native::<jitserve::Jitserve>::boxed(init)),
            "lpm" => Some(Native::<lpm::Lpm>::boxed(init)),
            _ => None,
        }
    }
}

/// The eviction slot: which blocks go first inside a tier of KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eviction;

impl SlotKind for Eviction {
    type Column = eviction::Column;
    type Facts = Memory;
    type Decision = Ranking;

    const NAME: SlotName = SlotName::Eviction;
    const REQUEST: Option<Self::Column> = None;
    const BESIDE_SHADOW: &'static str = "native:tiered-lru";
    const NATIVES: &'static [&'static str] =
        &["tiered-lru", "lru", "prefix-value", "t-lru", "ttl", "wa-lru", "cost-aware", "next-use", "noop"];

    fn now_ms(facts: &Memory) -> f64 {
        facts.now_ms
    }

    fn clear(decision: &mut Ranking) {
        decision.clear();
    }

    fn check(_facts: &Memory, decision: &Ranking, candidates: usize) -> Result<(), Fault> {
        check_count(decision.keys.len(), candidates, "keys")?;
        check_count(decision.keep_ms.len(), candidates, "times to keep")
    }

    fn is_decided(decision: &Ranking, candidates: usize) -> bool {
        candidates == 0 || !decision.keys.is_empty()
    }

    fn keys(decision: &Ranking) -> &[f32] {
        &decision.keys
    }

    fn differences(one: &Ranking, other: &Ranking) -> u64 {
        let keep = one.keep_ms.iter().zip(&other.keep_ms).filter(|(one, other)| one.to_bits() != other.to_bits());
        (keep.count() + one.keep_ms.len().abs_diff(other.keep_ms.len())) as u64
    }

    fn trials(candidates: u32) -> Vec<Memory> {
        let memory = Memory { cached_blocks: candidates, total_blocks: candidates, ..Memory::default() };
        [Subject::Blocks, Subject::Requests].map(|subject| Memory { subject, ..memory }).to_vec()
    }

    fn native(name: &str, init: Init<'_>) -> Option<Result<Box<dyn Policy<Self>>, String>> {
        match name {
            "tiered-lru" => Some(Native::<tiered_lru::TieredLru>::boxed(init)),
            "lru" => Some(Native::<lru::Lru>::boxed(init)),
            "t-lru" => Some(Native::<t_lru::TLru>::boxed(init)),
            "ttl" => Some(Native::<ttl::Ttl>::boxed(init)),
            "wa-lru" => Some(Native::<wa_lru::WaLru>::boxed(init)),
            "cost-aware" => Some(Native::<cost_aware::CostAware>::boxed(init)),
            "prefix-value" => Some(Native::<prefix_value::PrefixValue>::boxed(init)),
            "next-use" => Some(Native::<next_use::NextUse>::boxed(init)),
            "noop" => Some(Native::<noop::Noop>::boxed(init)),
            _ => None,
        }
    }
}

/// The budget slot: how long a request may think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget;

impl SlotKind for Budget {
    type Column = budget::Column;
    type Facts = Load;
    type Decision = budget::Decision;

    const NAME: SlotName = SlotName::Budget;
    const REQUEST: Option<Self::Column> = Some(budget::Column::Request);
    const BESIDE_SHADOW: &'static str = "native:eat-rpdi";
    const NATIVES: &'static [&'static str] =
        &["eat-rpdi", "fixed-budget", "patience", "deadline-aware", "eat", "rpdi", "deer", "code-stop", "noop"];

    fn now_ms(facts: &Load) -> f64 {
        facts.now_ms
    }

    fn clear(decision: &mut budget::Decision) {
        decision.clear();
    }

    fn check(facts: &Load, decision: &budget::Decision, candidates: usize) -> Result<(), Fault> {
        let budget::Decision { thresholds, verdicts } = decision;
        match facts.point {
            Point::Start => {
                check_count(verdicts.len(), 0, "verdicts")?;
                check_count(thresholds.len(), candidates, "thresholds")?;
            }
            Point::Probe => {
                check_count(thresholds.len(), 0, "thresholds")?;
                check_count(verdicts.len(), candidates, "verdicts")?;
            }
        }
        thresholds.iter().enumerate().try_for_each(|(i, thresholds)| {
            crate::budget::check_thresholds(thresholds)
                .map_err(|error| Fault::new(FaultKind::BadAnswer, format!("thresholds of candidate {i}: {error}")))
        })
    }

    fn is_decided(decision: &budget::Decision, candidates: usize) -> bool {
        candidates == 0 || !decision.thresholds.is_empty() || !decision.verdicts.is_empty()
    }

    fn keys(_decision: &budget::Decision) -> &[f32] {
        &[]
    }

    fn differences(one: &budget::Decision, other: &budget::Decision) -> u64 {
        let thresholds = one.thresholds.iter().zip(&other.thresholds).filter(|(one, other)| one != other);
        let verdicts = one.verdicts.iter().zip(&other.verdicts).filter(|(one, other)| one != other);
        (thresholds.count() + verdicts.count()) as u64
    }

    fn trials(candidates: u32) -> Vec<Load> {
        let load = Load { thinking: candidates, ..Load::default() };
        [Point::Start, Point::Probe].map(|point| Load { point, ..load }).to_vec()
    }

    fn native(name: &str, init: Init<'_>) -> Option<Result<Box<dyn Policy<Self>>, String>> {
        match name {
            "eat-rpdi" => Some(Native::<eat_rpdi::EatRpdi>::boxed(init)),
            "fixed-budget" => Some(Native::<fixed_budget::FixedBudget>::boxed(init)),
            "patience" => Some(Native::<patience::Patience>::boxed(init)),
            "eat" => Some(Native::<eat::Eat>::boxed(init)),
            "rpdi" => Some(Native::<rpdi::Rpdi>::boxed(init)),
            "deer" => Some(Native::<deer::Deer>::boxed(init)),
            "code-stop" => Some(Native::<code_stop::CodeStop>::boxed(init)),
            "deadline-aware" => Some(Native::<deadline_aware::DeadlineAware>::boxed(init)),
            "noop" => Some(Native::<noop::Noop>::boxed(init)),
            _ => None,
        }
    }
}

fn check_count(found: usize, candidates: usize, what: &str) -> Result<(), Fault> {
    if found == candidates || found == 0 {
        return Ok(());
    }
    Err(Fault::new(FaultKind::BadAnswer, format!("{found} {what} for {candidates} candidates")))
}
