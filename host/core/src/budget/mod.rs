//! When to end thinking, and how: pure functions over signals. What measures the entropies is elsewhere.

mod eat;
mod force;
mod rpdi;
mod state;
mod thresholds;

pub use eat::Eat;
pub use force::{Ending, EosGuard, ForcedEnding, Thinking};
pub use rpdi::Rpdi;
pub use state::{ForceReason, ThinkBudget, Verdict};
pub use thresholds::Thresholds;

/// Whether an entropy, in whatever unit, is one: what is negative or not finite was not measured.
fn is_measured(entropy: f64) -> bool {
    entropy >= 0.0 && entropy.is_finite()
}
