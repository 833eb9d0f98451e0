//! When to end thinking, and how: pure functions over signals. What measures the entropies is elsewhere.

mod eat;
mod force;
mod rpdi;
mod state;
mod thresholds;

pub use eat::Eat;
pub use force::{EosGuard, ForcedEnding};
pub use rpdi::Rpdi;
pub use state::{ForceReason, ThinkBudget, Verdict};
pub use thresholds::Thresholds;
