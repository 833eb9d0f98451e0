//! For engines with KV memory or queues of their own. vLLM has both, so its path never enters this crate.
//!
//! - [`PhaseAwareBlockManager`] gives out KV blocks, evicts them in tiers and chooses whom to preempt.
//! - [`PhaseRouter`] follows, token by token, which requests think and which answer; any number of threads may feed it.
//! - [`OwnQueues`] schedule the requests of an engine without queues.
//! - [`fabric`] moves KV blocks between processes; [`RemoteBlocks`] offload the blocks of a manager to a peer with it.
//!
//! Its requests have the caller's own numbers, [`RequestId`].
//!
//! ```
//! use meridian_core::{Markers, NewRequest, PhaseEvent, SchedulerConfig};
//! use meridian_memory::{OwnQueues, RequestId, StepLimits};
//!
//! // Token 7 starts thinking, 8 ends it.
//! let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
//! let queues = OwnQueues::new(&SchedulerConfig::default(), markers);
//! queues.submit(RequestId(1), &NewRequest { prompt: &[1, 2, 7], ..NewRequest::default() })?;
//! let mut limits = StepLimits { token_budget: 2048, max_running: 64, ..StepLimits::default() };
//! let batch = queues.schedule_batch(&limits);
//! assert_eq!((batch.think[0].request, batch.think[0].tokens), (RequestId(1), 3));
//!
//! // The engine ran the batch and sampled the end marker: from now on the request is in the output queue.
//! let mut events = Vec::new();
//! queues.generated(RequestId(1), &[8], &mut events);
//! assert_eq!(events, [PhaseEvent::ExitThink]);
//! limits.now_ms = 20.0;
//! assert_eq!(queues.schedule_batch(&limits).output[0].tokens, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod batch;
mod blocks;
mod error;
#[cfg(feature = "fabric")]
pub mod fabric;
mod queues;
#[cfg(feature = "fabric")]
mod remote;
mod router;
mod sync;
mod types;

pub use batch::{Grant, QueueStats, ScheduledBatch, StepLimits};
pub use blocks::{
    Allocation, BeginKv, BlockManager, Evicted, Fabric, FabricError, KvMemory, KvStats, PhaseAwareBlockManager,
    Sections,
};
pub use error::Error;
pub use queues::OwnQueues;
#[cfg(feature = "fabric")]
pub use remote::{DeviceMemory, FabricLibraries, RemoteBlocks, RemoteSettings, start_fabric};
pub use router::{PhaseRouter, Progress, RoutedRequest};
pub use types::{BlockLocation, RequestId};
