//! Staged roll-outs: a policy decides on a few engines, then on more, and goes back by itself when a guard, a fault or a
//! quarantine speaks against it.
//!
//! [`Rollout::begin`] writes the first state into a folder, [`Rollout::run`] leads the roll-out. A state machine
//! without I/O decides (`machine.rs`), with the statistics of `judge.rs`; `runner.rs` looks at the engines and changes
//! them, each by calls of its own (`calls.rs`, `change.rs`). The state survives the process that leads the roll-out:
//! [`reopen`] goes on with it, [`wish`] tells it something, [`read`] shows it.

mod begin;
mod calls;
mod change;
mod judge;
mod machine;
mod runner;
mod settings;
mod state;
mod store;
#[cfg(test)]
mod tests;

pub use begin::Start;
pub use judge::{Finding, GuardVerdict, Measured};
pub use runner::{Clock, Rollout, RolloutError, Roster, reopen};
pub use settings::{Guard, RolloutSettings, SettingError, Side};
pub use state::{EngineRecord, Event, NewPolicy, Outcome, Phase, Role, RolloutState};
pub use store::{Store, StoreError, Wish, read, wish};
