//! The decisions of Meridian's host, without I/O, WebAssembly or Python.
//!
//! A [`RequestTable`] mirrors the engine's requests and is fed by deltas. Each step, [`columns::fill`] turns the
//! candidates into the columns that a [`DispatchPolicy`] asked for, the policy answers with keys, and
//! [`Planner::plan`] turns the answer into a [`Plan`] that cannot lose or invent a request, exceed the engine's token
//! budget, or put a request off for longer than `max_defer_ms`.
//!
//! ```
//! use meridian_core::{Markers, NewRequest, Phase, RequestTable};
//!
//! // Token 7 starts thinking, 8 ends it. The prompt ends with the start marker, as chat templates of R1 do.
//! let mut table = RequestTable::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![]));
//! let slot = table.insert("request-1", &NewRequest { prompt: &[1, 2, 7], max_tokens: 100, ..NewRequest::default() }).unwrap();
//! table.scheduled(slot, 3, 0.0);
//! table.generated(slot, &[40]);
//! assert_eq!(table[slot].phase(), Phase::Think);
//! table.generated(slot, &[41, 8]);
//! assert_eq!(table[slot].phase(), Phase::Output);
//! assert_eq!((table[slot].think_tokens(), table[slot].output_tokens()), (3, 0));
//! ```

pub mod columns;
pub mod config;
mod error;
mod family;
mod phase;
mod plan;
mod policy;
mod rank;
mod step_time;
mod table;

pub use config::{
    AdminConfig, DisaggConfig, EntropyConfig, KvMemoryConfig, MeridianConfig, ModelConfig, PolicyConfig,
    SchedulerConfig, SlotConfig, TelemetryConfig,
};
pub use error::Error;
pub use family::{FamilyMarker, ModelFamily, StartInPrompt};
pub use meridian_policy_sdk::{Column, Decision, Phase, State, Step, Targets};
pub use phase::{Markers, PhaseTracker};
pub use plan::{EngineFacts, Plan, Planner};
pub use policy::{Batch, Description, DispatchPolicy, Fault, FaultKind, check_answer};
pub use rank::Ranker;
pub use step_time::{StepTime, StepTimeModel};
pub use table::{NewRequest, RequestState, RequestTable, Slot};
