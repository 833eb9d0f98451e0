//! A switchback experiment on one engine: two policies take turns, and the difference is measured.
//!
//! Time is divided into pairs of intervals. In each pair both policies decide once, in an order that a seed draws and that
//! is balanced over every two pairs. The first part of each interval, the warm-up, is not measured: queues and requests of
//! the policy before are still there. The difference of a metric is its ratio, new over old, with an interval by a block
//! bootstrap over pairs ([`crate::stats::Bootstrap`]).
//!
//! The design is that of switchback experiments with a known carry-over (I. Bojinov, D. Simchi-Levi and J. Zhao, "Design and
//! analysis of switchback experiments", Management Science 69(7), 2023); here the carry-over is cut, and what is left of it
//! is estimated and reported ([`carry_over`]).

mod report;
mod run;
mod settings;
mod state;
mod store;

pub use report::{Finding, MetricVerdict, Report, carry_over};
pub use run::{ExperimentError, Policies, Stop, Surroundings, restore, run};
pub use settings::{Settings, SettingsError};
pub use state::{EXPERIMENT_FORMAT, PairRecord, Side, Stage, State};
pub use store::{Store, StoreError};
