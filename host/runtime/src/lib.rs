//! The policy slots and the engine around them: an active policy, the native default that decides the same batch when the
//! active one faults, and the mirror that feeds both.
//!
//! ```
//! use meridian_core::types::RequestId;
//! use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest};
//! use meridian_runtime::{DispatchEngine, DispatchSlot, native};
//!
//! let config = MeridianConfig::default();
//! let policy = native::policy("output-first", config.scheduler.targets(), "{}")?;
//! let slot = DispatchSlot::new(policy, config.scheduler.targets());
//! let mut engine = DispatchEngine::new(slot, Markers::default(), &config.scheduler, 16);
//! let first = engine.table_mut().insert(RequestId(1), &NewRequest { prompt_tokens: 100, ..NewRequest::default() }).unwrap();
//! let facts = EngineFacts { token_budget: 2048, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
//! let plan = engine.plan(&facts, &[], &[first]);
//! assert_eq!(plan.token_budget, 2048);
//! # Ok::<(), native::NativeError>(())
//! ```

#[cfg(not(loom))]
pub mod admin;
mod compare;
pub mod config_file;
pub mod control;
mod controller;
mod engine;
#[cfg(not(loom))]
mod private;
#[cfg(not(loom))]
pub mod recording;
mod slot;
mod stats;
pub mod thinking;
#[cfg(not(loom))]
pub mod traces;
#[cfg(not(loom))]
pub mod watch;

pub use controller::{ControlledSlot, Controller, EngineStatus, Loader, RecordingStatusOf, Refusal};
pub use engine::DispatchEngine;
pub use meridian_core::native;
use meridian_core::sync;
pub use slot::{
    BudgetSlot, Contender, DispatchSlot, EvictionSlot, PolicySlot, Remake, SlotControl, StrikeLimits, Trial, TrialFault,
};
pub use stats::{SlotStats, Source};
