//! How long a request may think.
//!
//! ```
//! use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Thresholds, Verdict};
//! use meridian_policy_sdk::{Init, Policy, export_policy};
//!
//! /// Half the thinking for long prompts.
//! struct Halve;
//!
//! impl Policy for Halve {
//!     const NAME: &'static str = "halve";
//!     const VERSION: &'static str = "0.1.0";
//!     const SUMMARY: &'static str = "Prompts above 4096 tokens may think half as long.";
//!
//!     fn new(init: Init<'_>) -> Result<Self, String> {
//!         init.no_config().map(|()| Self)
//!     }
//! }
//!
//! impl BudgetPolicy for Halve {
//!     const INPUTS: &'static [Column] = &[Column::PromptTokens];
//!
//!     fn thresholds(&self, load: &Load, request: &Request<'_, Self>) -> Thresholds {
//!         let configured = load.configured;
//!         let max = if request.prompt_tokens() > 4096.0 { configured.max_think_tokens / 2 } else { configured.max_think_tokens };
//!         Thresholds { max_think_tokens: max.max(configured.min_think_tokens), ..configured }
//!     }
//!
//!     fn verdict(&self, _load: &Load, _request: &Request<'_, Self>) -> Verdict {
//!         Verdict::Default
//!     }
//! }
//!
//! export_policy!(budget: Halve);
//! ```

mod thresholds;

pub use thresholds::Thresholds;

use crate::Policy;
use crate::inputs::{candidate, column_enum, facts, rows};

__budget_columns! {
    column_enum!
    /// A fact about each candidate that a policy may ask for.
    ///
    /// The discriminants are the order of the WIT enum.
    Column
}

/// What is asked of a budget policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Point {
    /// Requests begin to think: thresholds.
    #[default]
    Start = 0,
    /// Requests have something new to weigh: verdicts.
    Probe = 1,
}

__budget_load! {
    facts!
    /// Facts about the engine now.
    #[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
    Load {
        /// Which of the two functions of the interface is called.
        point: Point
    }
}

/// What a budget policy says of a request that thinks; `wit/budget.wit` documents each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Verdict {
    /// EAT and RPDI decide.
    #[default]
    Default = 0,
    /// Go on, whatever EAT and RPDI say of the signals so far.
    KeepThinking = 1,
    /// End thinking, once `min_think_tokens` are reached: said before, it is remembered until then, unless
    /// [`Verdict::KeepThinking`] takes it back.
    EndNow = 2,
}

/// A budget policy: thresholds when a request begins to think, verdicts at its probes and at ends of sentences, lines and
/// clauses. The host calls it from one thread; it must not block.
pub trait BudgetPolicy: Policy {
    /// The columns that `thresholds` and `verdict` read, no column twice.
    const INPUTS: &'static [Column];
    /// Whether `verdict` changes only with what was measured (a probe, or an index at a boundary), judged by the thresholds
    /// in force: not with the load, and not with the tokens or the time that have passed. Compiled into the host, such a
    /// policy is spared questions and measurements that change nothing; a component is asked all the same.
    const WEIGHS_SIGNALS_ALONE: bool = false;

    /// Take note of the batch, before the first threshold or verdict is asked for; `load.point` says which it will be.
    fn observe(&mut self, _load: &Load, _batch: &Requests<'_, Self>) {}

    /// The request begins to think: when it may end.
    fn thresholds(&self, load: &Load, _request: &Request<'_, Self>) -> Thresholds {
        load.configured
    }

    /// Something new is known of the request's thinking, or it ended a sentence, a line or a clause; `wit/budget.wit` says
    /// when.
    fn verdict(&self, load: &Load, request: &Request<'_, Self>) -> Verdict;

    /// Whether the policy decides this batch at all; `false` leaves it to the host's default.
    fn applies(&self, _load: &Load) -> bool {
        true
    }
}

__budget_columns! {
    candidate!
    /// A request that thinks, seen through the columns its policy asked for.
    Request in Requests for BudgetPolicy by Column
}

impl<P: BudgetPolicy> Request<'_, P> {
    /// Whether the request was probed since the last verdict.
    #[inline(always)]
    #[must_use]
    pub fn is_probed(&self) -> bool {
        let signal = self.signal();
        signal == 1.0 || signal == 3.0
    }

    /// Whether the request ended a sentence, a line or a clause since the last verdict.
    #[inline(always)]
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.signal() >= 2.0
    }

    /// Whether the answer has settled (EAT): the request was probed since the last verdict, at least `min_probes` probes came
    /// before, the variance is below its threshold and the mean not above its bound.
    #[inline(always)]
    #[must_use]
    pub fn has_settled(&self, thresholds: &Thresholds) -> bool {
        // Probes are numbered from 0, so the latest has the number `probes - 1`. A NaN holds in no comparison.
        self.is_probed()
            && f64::from(self.probes()) > f64::from(thresholds.min_probes)
            && f64::from(self.eat_variance()) < thresholds.eat_variance_threshold
            && f64::from(self.eat()) <= thresholds.eat_max_bits
    }

    /// Whether the reasoning has strayed (RPDI): a sentence, a line or a clause ended since the last verdict, and the index
    /// is above its threshold.
    #[inline(always)]
    #[must_use]
    pub fn has_strayed(&self, thresholds: &Thresholds) -> bool {
        self.is_at_boundary() && f64::from(self.rpdi()) > thresholds.rpdi_threshold
    }

    #[inline(always)]
    fn signal(&self) -> f32 {
        self.rows[const { position::<P>(Column::Signal) }][self.index]
    }
}

/// What a policy decided: thresholds at [`Point::Start`], verdicts at [`Point::Probe`], one a candidate; nothing leaves
/// the batch to the default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Decision {
    /// Thresholds of each candidate.
    pub thresholds: Vec<Thresholds>,
    /// The verdict on each candidate.
    pub verdicts: Vec<Verdict>,
}

impl Decision {
    /// Forget the last decision, keep its memory.
    pub fn clear(&mut self) {
        self.thresholds.clear();
        self.verdicts.clear();
    }
}

/// Decide one batch with `policy`, into `decision`. `columns` is laid out as in WIT `budget.start`.
///
/// # Panics
/// When `columns` does not hold `P::INPUTS.len() * candidates` values.
pub fn decide<P: BudgetPolicy>(
    policy: &mut P,
    load: &Load,
    candidates: usize,
    columns: &[f32],
    decision: &mut Decision,
) {
    decision.clear();
    if !policy.applies(load) {
        return;
    }
    let rows = Requests::<P>::rows(candidates, columns);
    let requests = Requests::new(&rows, candidates);
    policy.observe(load, &requests);
    let (policy, requests) = (&*policy, requests.iter());
    match load.point {
        Point::Start => decision.thresholds.extend(requests.map(|request| policy.thresholds(load, &request))),
        Point::Probe => decision.verdicts.extend(requests.map(|request| policy.verdict(load, &request))),
    }
}
