//! The policy slots and their surroundings: an active policy, and the native default that decides the same batch when
//! the active one faults. The dispatch slot decides the steps of a
//! [`MeridianScheduler`](meridian_core::MeridianScheduler).
//!
//! ```
//! use meridian_core::types::RequestId;
//! use meridian_core::{EngineFacts, Markers, MeridianConfig, MeridianScheduler, NewRequest};
//! use meridian_runtime::{DispatchSlot, native};
//!
//! let config = MeridianConfig::default();
//! let policy = native::policy("output-first", config.scheduler.targets(), "{}")?;
//! let slot = DispatchSlot::new(policy, config.scheduler.targets());
//! let mut scheduler = MeridianScheduler::for_engine(slot, Markers::default(), &config.scheduler, 16);
//! let request = NewRequest { prompt_tokens: 100, ..NewRequest::default() };
//! let first = scheduler.mirror().table.insert(RequestId(1), &request).unwrap();
//! let facts = EngineFacts { token_budget: 2048, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
//! let plan = scheduler.plan(&facts, &[], &[first]);
//! assert_eq!(plan.token_budget, 2048);
//! # Ok::<(), native::NativeError>(())
//! ```

#[cfg(not(loom))]
pub mod admin;
pub mod budgets;
mod compare;
pub mod config_file;
pub mod control;
mod controller;
pub mod explain;
#[cfg(not(loom))]
mod private;
#[cfg(not(loom))]
pub mod recording;
mod slot;
mod stats;
pub mod timeline;
#[cfg(not(loom))]
pub mod traces;
#[cfg(not(loom))]
pub mod watch;

pub use controller::{ControlledSlot, Controller, EngineStatus, Loader, RecordingStatusOf, Refusal};
use meridian_core::sync;
pub use meridian_core::{Source, native};
pub use slot::{
    BudgetSlot, Contender, DecisionMark, DispatchSlot, EvictionSlot, MOST_MARKS, PolicySlot, Remake, SlotControl,
    StrikeLimits, Trial, TrialFault,
};
pub use stats::SlotStats;
