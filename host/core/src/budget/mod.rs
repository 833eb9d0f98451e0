//! When to end thinking, and how: pure functions over signals, and [`ThinkBudgets`], which applies them to the requests
//! of an engine. Other modules measure the entropies.

mod answer;
mod change;
mod client;
mod eat;
mod enforce;
mod force;
mod record;
mod repetition;
mod rpdi;
mod settings;
mod state;
mod thinking;
mod thresholds;
mod wire;

pub use answer::AnswerRules;
pub use change::{Changed, LiveChange, Thinking};
pub use client::ClientBudget;
pub use eat::Eat;
pub use enforce::{Ban, Demand, EndRules, Enforcement, Enforcer, SamplerLimits};
pub use force::{Ending, ForcedEnding};
pub use meridian_policy_sdk::budget::{Load, Point, Thresholds, Verdict};
pub use record::ThinkEnd;
pub(crate) use record::ThinkRecord;
pub use repetition::{Repeated, Repetition};
pub use rpdi::Rpdi;
pub use settings::{BudgetDecider, BudgetStatus, BudgetWants, Enrolled, Signal, ThinkSettings};
pub use state::{ForceReason, Observed, OnLoops, ThinkBudget};
pub use thinking::ThinkBudgets;
pub use thresholds::check_thresholds;
pub use wire::{Measured, Order, Report};

/// A thinking request, for a budget policy: [`Observed`], and facts from its arrival.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetCandidate {
    /// Tokens in the prompt.
    pub prompt_tokens: u32,
    /// Tokens that the request may still generate.
    pub remaining_tokens: u32,
    /// Milliseconds since thinking began.
    pub think_ms: f64,
    /// Milliseconds until the client's deadline, negative after it; infinite without a deadline.
    pub slack_ms: f64,
    /// Milliseconds left for more thinking if its service level is to be kept; infinite where it does not matter.
    pub level_slack_ms: f32,
    /// The client's priority.
    pub priority: i32,
    /// Number of the tenant, 0 for none.
    pub tenant: u32,
    /// Number of the request.
    pub request: u32,
    /// Number of the session, 0 for none.
    pub session: u32,
    /// Which request of its session it is, from 1; 0 without a session.
    pub turn: u32,
    /// Observations of its thinking.
    pub observed: Observed,
}

impl Default for BudgetCandidate {
    fn default() -> Self {
        Self {
            prompt_tokens: 0,
            remaining_tokens: 0,
            think_ms: 0.0,
            slack_ms: f64::INFINITY,
            level_slack_ms: f32::INFINITY,
            priority: 0,
            tenant: 0,
            request: 0,
            session: 0,
            turn: 0,
            observed: Observed::default(),
        }
    }
}

/// Whether an entropy is valid: a negative or non-finite value was not measured.
fn is_measured(entropy: f64) -> bool {
    entropy >= 0.0 && entropy.is_finite()
}
