//! Control of a running engine process, for the file watch, the admin listener, Python and `meridian ctl`.

use serde::{Deserialize, Serialize};

use meridian_core::LevelCounts;
use meridian_core::budget::BudgetStatus;
use meridian_core::latency::{Histogram, LatencyCounts, TenantLatency};
use meridian_core::signature::FetchedComponent;

pub use meridian_core::SlotName;
pub use meridian_core::slot::{
    ControlError, DECIDING_BUCKETS_US, FaultBatch, FaultEntry, Mode, ShadowStatus, SlotStatus, StateHandover,
    SwapReport, UNCHANGED, Version,
};

use crate::budgets::LiveBudgets;
use crate::explain::Explanation;
use crate::timeline::Timeline;

/// Largest component from a file or a client, bytes; the host for components refuses larger ones too.
pub const MAX_COMPONENT_BYTES: usize = 32 << 20;

/// A policy to put into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Upload<'a> {
    /// The policy.
    pub policy: Given<'a>,
    /// Its options, one JSON object; `None` for the options of the configuration.
    pub options: Option<&'a str>,
    /// Its origin.
    pub source: &'a str,
}

/// The policy of an [`Upload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given<'a> {
    /// A component.
    Component {
        /// Its bytes.
        bytes: &'a [u8],
        /// The text of its minisign signature, if it has one.
        signature: Option<&'a str>,
    },
    /// A component that a registry has: `oci://HOST/NAME@sha256:DIGEST`.
    Remote(&'a str),
    /// A component that a registry had.
    Fetched(&'a FetchedComponent),
    /// The native policy of this name, without `native:`.
    Native(&'a str),
    /// The active policy, with other options.
    Active,
}

impl<'a> Upload<'a> {
    /// An unsigned component with the configured options.
    #[must_use]
    pub const fn component(bytes: &'a [u8], source: &'a str) -> Self {
        Self { policy: Given::Component { bytes, signature: None }, options: None, source }
    }
}

/// Largest [`Upload::options`], bytes.
pub const MAX_OPTIONS_BYTES: usize = 64 << 10;

/// An engine process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessStatus {
    /// Process id.
    pub pid: u32,
    /// Version of Meridian.
    pub version: String,
    /// The served model, as the engine names it.
    pub model: String,
    /// Its data-parallel rank, where the engine says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_rank: Option<u32>,
    /// The number of data-parallel ranks, where the engine knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_size: Option<u32>,
    /// Seconds since the engine started.
    pub uptime_s: f64,
    /// Live requests in prefill, think and output.
    pub requests: [u64; 3],
    /// How often thinking began, ended, and reached the limit known at arrival, since the start.
    #[serde(default)]
    pub phase_events: [u64; 3],
    /// Requests that wait for admission.
    pub waiting: u64,
    /// Preemptions in prefill, think and output.
    pub preemptions: [u64; 3],
    /// Learned step time, milliseconds: fixed, a decode token, a prefill token.
    pub step_time_ms: Option<[f64; 3]>,
    /// Measured step times: decodes only, prompts only, both.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Histogram>,
    /// Latencies by tenant, where the engine observes them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latency: Vec<TenantLatency>,
    /// Conversations with a live request.
    #[serde(default)]
    pub sessions: u64,
    /// How the service levels are kept, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub service_levels: Vec<LevelCounts>,
    /// Free KV blocks and all of them, at the latest step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<[u64; 2]>,
    /// KV memory, where Meridian manages it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv: Option<KvStatus>,
    /// Thinking, where Meridian can end it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetStatus>,
    /// What may change the outputs of requests that ask for nothing: `as vLLM`, or the settings in words.
    #[serde(default)]
    pub outputs: String,
    /// The slots.
    pub slots: Vec<SlotStatus>,
    /// The recording, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recording: Option<RecordingStatus>,
    /// The spans sent to a collector, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traces: Option<TracesStatus>,
    /// Problems of the listeners, a line each: an occupied port, an unreadable token.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// Counters of KV memory since the start of the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvStatus {
    /// Blocks evicted: dead thinking, other cached blocks, blocks of answers in progress.
    pub evictions: [u64; 3],
    /// Chunks that a store beside the engine's memory evicted, by the same tiers.
    #[serde(default)]
    pub offload_evictions: [u64; 3],
    /// Tokens of admitted requests found in the prefix cache: of prompts, thinking, output.
    pub hit_tokens: [u64; 3],
    /// Tokens of admitted requests that the prefix cache did not hold: of prompts, thinking, output.
    pub missed_tokens: [u64; 3],
    /// Tokens computed again because of a preemption.
    pub recomputed_tokens: u64,
    /// Preemptions of a request that answered, while another that did not answer had KV blocks.
    pub avoidable_output_preemptions: u64,
    /// Blocks that a policy moved to the front of the engine's own queue.
    pub moved_blocks: u64,
    /// Times that the mirror of the engine's free blocks was refilled; 1 for each pool at the start.
    pub resyncs: u64,
    /// Cached blocks that a policy keeps for a time, now.
    #[serde(default)]
    pub kept_blocks: u64,
    /// Blocks that a policy kept for a time, by outcome: used again, evicted before their time, time over.
    #[serde(default)]
    pub keeps: [u64; 3],
}

/// Requests whose spans were sent to a collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracesStatus {
    /// Requests whose spans the collector accepted.
    pub sent: u64,
    /// Requests whose spans were lost.
    pub lost: u64,
}

/// State of a recording.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordingStatus {
    /// The folder.
    pub dir: String,
    /// Recorded decisions, of all slots.
    pub recorded: u64,
    /// Decisions that were not recorded, because the writer was late or has stopped.
    pub dropped: u64,
    /// Bytes of the kept files.
    pub bytes: u64,
    /// The reason why the recording stopped.
    pub stopped: Option<String>,
}

/// Latencies of an engine since its start, over all tenants, in fine sketches: the difference of two reports of the same
/// run says how it did in between.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// Differs after each start of the engine.
    pub run: String,
    /// Seconds since the engine started, on its own clock.
    pub uptime_s: f64,
    /// The latencies and counts.
    #[serde(flatten)]
    pub counts: LatencyCounts,
}

/// What an engine tells of single requests and steps. Any thread but the scheduling thread calls its methods, which hold
/// up a step for microseconds.
pub trait Insight: Send + Sync {
    /// Where the time of a request went. `request` is the engine's id, or a part of it that only one request has.
    ///
    /// # Errors
    /// One line: no request or several have it.
    fn explain(&self, request: &str) -> Result<Explanation, String>;

    /// Begin a timeline; an unfinished one is dropped.
    fn begin_timeline(&self);

    /// End the timeline, and return it; `None` without one.
    fn end_timeline(&self) -> Option<Timeline>;

    /// Latencies since the start, over all tenants; `None` where nobody observes them. Takes some ten microseconds.
    fn latency(&self) -> Option<LatencyReport> {
        None
    }
}

/// An engine process, as the admin listener, the file watch and Python see it. Any thread but the scheduling thread
/// calls its methods. [`Control::put`] of a component takes as long as its compilation, and before that as long as its
/// fetch from a registry; all others take milliseconds, even during a compilation or a fetch.
pub trait Control: Send + Sync {
    /// The state of the process. Takes microseconds.
    fn status(&self) -> ProcessStatus;

    /// The latest faults, oldest first, at most a few hundred.
    fn faults(&self) -> Vec<FaultEntry>;

    /// Latencies since the start, over all tenants; `None` where nobody observes them.
    fn latency(&self) -> Option<LatencyReport> {
        self.insight().and_then(Insight::latency)
    }

    /// What else it tells of its requests and steps; `None` for an engine that tells nothing.
    fn insight(&self) -> Option<&dyn Insight> {
        None
    }

    /// The thinking budgets of its live requests; `None` for an engine that does not change them.
    fn budgets(&self) -> Option<&dyn LiveBudgets> {
        None
    }

    /// Load a policy and put it to `mode`. A slot that already has it, with the same options, stays unchanged.
    ///
    /// # Errors
    /// [`ControlError::Refused`] when it is not a policy that may decide, [`ControlError::Busy`] when the host could
    /// not find out, [`ControlError::Overtaken`] after a later change to another policy. Nothing has changed then.
    fn put(&self, slot: SlotName, upload: &Upload<'_>, mode: Mode) -> Result<SwapReport, ControlError>;

    /// Make the shadow active.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] without a shadow.
    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError>;

    /// Return to the previous version; a shadow stays.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] without a previous version.
    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError>;

    /// Retry the version in quarantine at once.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] when no version is in quarantine.
    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError>;

    /// Stop the shadow.
    ///
    /// # Errors
    /// [`ControlError::Nothing`] without a shadow.
    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError>;
}
