//! The decisions of Meridian's host, without WebAssembly or Python. It has no I/O except [`mod@file`], which every
//! crate uses to read files that callers name.
//!
//! - [`MeridianScheduler`] plans the steps of an engine with queues, such as vLLM.
//! - Its parts: an [`EngineMirror`] of the requests, [`columns::fill`], a [`Policy`] that answers with keys, and a
//!   [`Planner`] that turns the answer into a [`Plan`]. A plan cannot lose or invent a request, exceed the engine's
//!   token budget, or defer a request for longer than the host's bounds.
//! - A [`slot`] around a policy: the native default decides when the policy faults, and other threads swap the policy
//!   between two decisions.
//! - [`CachedBlocks`] order the eviction of KV blocks in a pool that the engine owns.
//! - [`Queues`] carry out a plan as vLLM does.
//!
//! Engines without queues, or with KV memory of their own, use the crate `meridian-memory`.
//!
//! ```
//! use meridian_core::slot::DispatchSlot;
//! use meridian_core::{
//!     EngineFacts, Markers, MeridianScheduler, NewRequest, PhaseEvent, Queues, SchedulerConfig, TableStep, native,
//! };
//!
//! // Token 7 starts thinking, 8 ends it.
//! let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
//! let config = SchedulerConfig::default();
//! let slot = DispatchSlot::new(native::default_policy(config.targets()), config.targets());
//! let mut scheduler = MeridianScheduler::for_engine(slot, markers, &config, 16);
//!
//! let request = NewRequest { prompt: &[1, 2, 7], ..NewRequest::default() };
//! let row = scheduler.mirror().table.insert(&request)?;
//! let mut queues = Queues::default();
//! queues.waiting.push_back(row);
//! let facts = EngineFacts { token_budget: 2048, free_seats: 64, waiting: 1, decode_tokens: 1, ..EngineFacts::default() };
//! let plan = scheduler.plan(&facts, &[], &[row]).clone();
//! let mut step = TableStep::new(&scheduler.mirror().table, 1);
//! queues.carry_out(&plan, 64, &mut step);
//! let given = step.given;
//! assert_eq!(given, [(row, 3)]);
//! scheduler.scheduled(facts.now_ms, given);
//!
//! // The engine ran the step and sampled the end marker: from now on the request answers.
//! let mut events = Vec::new();
//! scheduler.mirror().table.generated(row, &[8], &mut events);
//! assert_eq!(events, [PhaseEvent::ExitThink]);
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
mod forecast;
mod guarded;
pub mod handoff;
mod kind;
pub mod latency;
mod levels;
mod mirror;
pub mod native;
pub mod oci;
mod pattern;
mod phase;
mod phase_record;
mod plan;
mod policy;
mod rank;
mod reference;
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
    CachedBlocks, CachedStats, ChainFacts, EvictionCandidate, EvictionRanker, EvictionSubject, KeepStats, Leaving,
    LeavingBlock, OwnOrder, order, ranked_or_default,
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
pub use mirror::{EngineMirror, KvCounts};
pub use pattern::Pattern;
pub use phase::{Markers, PhaseTracker, Standing};
pub use phase_record::PhaseRecord;
pub use plan::{EngineFacts, KvGrowth, Plan, Planner};
pub use policy::{Batch, Description, Fault, FaultKind, Policy};
pub use rank::{Ranker, ordinal};
pub use reference::{Admits, EngineStep, Queues, TableStep};
pub use scheduler::{MeridianScheduler, WAITING_WINDOW};
pub use sessions::{SessionFacts, Stop};
pub use source::PolicySource;
pub use step_time::{StepLoad, StepTime, StepTimeModel};
pub use table::{LevelCounts, NewRequest, RequestState, RequestTable, RowId, Signals};
pub use types::{BlockId, BlockTier, EntropySignal, PhaseEvent, ThinkPhase};
