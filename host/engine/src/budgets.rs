//! The thinking budgets of an engine's live requests: what the admin listener lists and changes.

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use meridian_core::budget::LiveChange;

/// Most requests in a list or a report; both count all of them.
pub const MOST_LISTED: usize = 1024;

/// The thinking of one live request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveBudget {
    /// The engine's id of the request.
    pub request: String,
    /// The client's name of the tenant; empty for none.
    pub tenant: String,
    /// `prefill`, `think` or `output`.
    pub phase: String,
    /// Tokens that it has thought.
    pub think_tokens: u32,
    /// Think tokens before which only the limit and interrupts end it.
    pub min_think_tokens: u32,
    /// Think tokens at which its end is forced.
    pub max_think_tokens: u32,
    /// The reason of the latest end that was ordered or forced; `None` without one.
    pub ends_by: Option<String>,
}

/// The live requests whose thinking is followed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetList {
    /// Number of them.
    pub live: u64,
    /// Those that think or have not begun to generate come first; at most [`MOST_LISTED`].
    pub requests: Vec<LiveBudget>,
}

/// The effect of a change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeReport {
    /// Requests with new thresholds, from the next step on.
    pub changed: u64,
    /// Requests that were meant, but answer already.
    pub answering: u64,
    /// Requests that were meant, but whose end had been ordered.
    pub ending: u64,
    /// The changed requests, with their new thresholds; at most [`MOST_LISTED`].
    pub requests: Vec<LiveBudget>,
}

/// The reason why no request was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ChangeError {
    /// No live request has this name, or several unrelated ones have it.
    #[error("{0}")]
    NoSuchRequest(String),
    /// The engine ends no thinking, or the requests are past theirs.
    #[error("{0}")]
    NothingToChange(String),
    /// Too many changes wait, or the engine ends.
    #[error("{0}")]
    Busy(String),
}

/// The thinking budgets of live requests. Any thread but the scheduling thread calls these methods.
pub trait LiveBudgets: Send + Sync {
    /// The live requests whose thinking is followed. Holds up a step for microseconds.
    ///
    /// # Errors
    /// [`ChangeError::NothingToChange`] when the engine follows no thinking.
    fn list(&self) -> Result<BudgetList, ChangeError>;

    /// Make a change before the next step. The scheduling thread carries it out and never waits for the caller; while no
    /// step begins, the caller does so after a moment. It may take as long as a step.
    ///
    /// # Errors
    /// One line: no request was changed.
    fn change(&self, change: LiveChange) -> Result<ChangeReport, ChangeError>;
}
