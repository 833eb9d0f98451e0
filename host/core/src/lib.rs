//! The decisions of Meridian's host, without WebAssembly or Python. It has no I/O except [`mod@file`], which every
//! crate uses to read files that callers name.
//!
//! - [`PhaseRouter`] follows, token by token, which requests think and which answer; any number of threads may feed it.
//! - [`MeridianScheduler`] plans steps: over the queues of an engine such as vLLM ([`MeridianScheduler::for_engine`]),
//!   or over two queues of its own.
//! - Its parts: an [`EngineMirror`] of the requests, [`columns::fill`], a [`Policy`] that answers with keys, and a
//!   [`Planner`] that turns the answer into a [`Plan`]. A plan cannot lose or invent a request, exceed the engine's
//!   token budget, or defer a request for longer than `max_defer_ms`.
//! - A [`slot`] around a policy: the native default decides when the policy faults, and other threads swap the policy
//!   between two decisions.
//! - [`Queues`] carry out a plan as vLLM does.
//!
//! ```
//! use meridian_core::{Markers, MeridianScheduler, NewRequest, PhaseEvent, RequestId, SchedulerConfig, StepLimits};
//!
//! // Token 7 starts thinking, 8 ends it.
//! let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
//! let scheduler = MeridianScheduler::new(&SchedulerConfig::default(), markers);
//! scheduler.submit(RequestId(1), &NewRequest { prompt: &[1, 2, 7], ..NewRequest::default() })?;
//! let mut limits = StepLimits { token_budget: 2048, max_running: 64, ..StepLimits::default() };
//! let batch = scheduler.schedule_batch(&limits);
//! assert_eq!((batch.think[0].request, batch.think[0].tokens), (RequestId(1), 3));
//!
//! // The engine ran the batch and sampled the end marker: from now on the request is in the output queue.
//! let mut events = Vec::new();
//! scheduler.generated(RequestId(1), &[8], &mut events);
//! assert_eq!(events, [PhaseEvent::ExitThink]);
//! limits.now_ms = 20.0;
//! assert_eq!(scheduler.schedule_batch(&limits).output[0].tokens, 1);
//! # Ok::<(), meridian_core::Error>(())
//! ```

mod account;
mod blocks;
pub mod budget;
mod clients;
pub mod columns;
pub mod config;
pub mod error;
mod family;
pub mod file;
mod guarded;
pub mod handoff;
mod kind;
pub mod latency;
mod mirror;
pub mod native;
pub mod oci;
mod pattern;
mod phase;
mod plan;
mod policy;
mod rank;
mod reference;
mod router;
mod scheduler;
mod sessions;
pub mod signature;
pub mod slot;
mod source;
mod step_time;
mod sync;
mod table;
pub mod text;
pub mod types;

pub use account::{Account, Admission, Doing, Overtaking, Part, Rule, Transition};
pub use blocks::{
    Allocation, BeginKv, BlockManager, CachedBlocks, CachedStats, ChainFacts, Evicted, EvictionCandidate,
    EvictionRanker, EvictionSubject, Fabric, FabricError, KeepStats, KvMemory, KvStats, Leaving, LeavingBlock,
    OwnOrder, PhaseAwareBlockManager, Sections,
};
pub use config::{
    AdminConfig, DisaggConfig, EntropyConfig, KvMemoryConfig, MeridianConfig, ModelConfig, PolicyConfig,
    SchedulerConfig, SlotConfig, TelemetryConfig,
};
pub use error::Error;
pub use family::{FamilyMarker, ModelFamily, StartInPrompt};
pub use guarded::{Asked, GuardedPolicy};
pub use kind::{Budget, Dispatch, Eviction, SlotKind, SlotName};
pub use meridian_policy_sdk::budget::{Column as BudgetColumn, Decision as BudgetDecision};
pub use meridian_policy_sdk::eviction::{Column as EvictionColumn, Memory, Ranking, Subject};
pub use meridian_policy_sdk::{CONTRACT, Column, Decision, State, Step, Targets};
pub use mirror::{EngineMirror, KvCounts, MeasuredStep};
pub use pattern::Pattern;
pub use phase::{Markers, PhaseTracker, Standing};
pub use plan::{EngineFacts, KvGrowth, Plan, Planner};
pub use policy::{Batch, Description, Fault, FaultKind, Policy};
pub use rank::Ranker;
pub use reference::{Admits, EngineStep, Queues, TableStep};
pub use router::{PhaseRouter, Progress, RoutedRequest};
pub use scheduler::{Grant, MeridianScheduler, QueueStats, ScheduledBatch, StepLimits, WAITING_WINDOW};
pub use sessions::{SessionFacts, Stop};
pub use source::PolicySource;
pub use step_time::{StepLoad, StepTime, StepTimeModel};
pub use table::{NewRequest, RequestState, RequestTable, RowId, Signals};
pub use types::{BlockId, BlockLocation, BlockTier, EntropySignal, PhaseEvent, RequestId, ThinkPhase};
