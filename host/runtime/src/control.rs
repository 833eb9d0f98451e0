//! Control of a running engine process, for the file watch, the admin listener, Python and `meridian ctl`.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use meridian_core::budget::BudgetStatus;
use meridian_core::latency::{Histogram, LatencyCounts, TenantLatency};
use meridian_core::signature::FetchedComponent;

pub use meridian_core::SlotName;

use crate::budgets::LiveBudgets;
use crate::explain::Explanation;
use crate::timeline::Timeline;

/// Largest component from a file or a client, bytes; the host for components refuses larger ones too.
pub const MAX_COMPONENT_BYTES: usize = 32 << 20;

/// A policy that is, was or may become active.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The name that the policy gives itself.
    pub name: String,
    /// Its own version, free form.
    pub version: String,
    /// SHA-256 of the component, lower-case hexadecimal; empty for a native policy.
    pub sha256: String,
    /// Its origin: `native:NAME`, a path, `oci://HOST/NAME@sha256:DIGEST`, `admin`.
    pub source: String,
    /// The options of its start, one JSON object; empty where they are unknown. Serialized as an object, and only if
    /// not empty.
    #[serde(default, with = "options_as_object", skip_serializing_if = "has_no_options")]
    pub options: String,
}

fn has_no_options(options: &str) -> bool {
    matches!(options, "" | "{}")
}

mod options_as_object {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use serde_json::{Map, Value};

    pub(super) fn serialize<S: Serializer>(options: &str, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::from_str::<Map<String, Value>>(options).unwrap_or_default().serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
        Map::<String, Value>::deserialize(deserializer).map(|options| Value::from(options).to_string())
    }
}

/// The role of a contender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It decides from the next step on.
    #[default]
    Active,
    /// It is compared with the active policy, and changes nothing.
    Shadow,
}

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
    ///
    /// ```
    /// use meridian_runtime::control::{Given, Upload};
    ///
    /// let upload = Upload::component(b"bytes", "admin");
    /// assert!(matches!(upload.policy, Given::Component { signature: None, .. }) && upload.options.is_none());
    /// ```
    #[must_use]
    pub const fn component(bytes: &'a [u8], source: &'a str) -> Self {
        Self { policy: Given::Component { bytes, signature: None }, options: None, source }
    }
}

/// Largest [`Upload::options`], bytes.
pub const MAX_OPTIONS_BYTES: usize = 64 << 10;

/// The fate of the previous policy's state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind", content = "why")]
pub enum StateHandover {
    /// There was none: the previous policy keeps no state.
    #[default]
    Stateless,
    /// The new policy took it over.
    Restored,
    /// The new policy keeps its own state, from its time in shadow or before its quarantine.
    Own,
    /// The new policy starts fresh, for this reason.
    Reset(String),
}

/// A completed change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwapReport {
    /// The slot.
    pub slot: SlotName,
    /// The change: `swap`, `shadow`, `promote`, `rollback`, `release`, `stop-shadow`; `unchanged` when the slot already
    /// had the same policy with the same options.
    pub action: String,
    /// The active version now.
    pub active: Version,
    /// The active version before.
    pub previous: Version,
    /// The fate of its state.
    pub state: StateHandover,
    /// Time that the change held the slot, microseconds: at most this much was added to a step.
    pub held_us: f64,
}

/// The [`SwapReport::action`] of an upload that the slot already had.
pub const UNCHANGED: &str = "unchanged";

/// A fault, kept for the operator and for its reproduction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultEntry {
    /// The slot.
    pub slot: SlotName,
    /// Milliseconds on the host's clock.
    pub now_ms: f64,
    /// `trap`, `deadline`, `memory`, `bad-answer`, `init`, `load`.
    pub kind: String,
    /// One line.
    pub detail: String,
    /// The version that faulted.
    pub version: Version,
    /// Whether it faulted in shadow, where it changed nothing.
    pub shadow: bool,
    /// Candidates in the batch.
    pub candidates: usize,
    /// Inputs of the batch, for the newest faults: columns in the order of `inputs`, each of `candidates` values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch: Option<FaultBatch>,
}

/// The batch that a policy faulted on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultBatch {
    /// Names of the columns.
    pub inputs: Vec<String>,
    /// Bits of the values, column by column (JSON has no NaN).
    pub columns_bits: Vec<u32>,
    /// Facts about the engine by name.
    pub facts: serde_json::Value,
}

/// How closely a shadow agrees with the active policy. Means over the compared steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ShadowStatus {
    /// The contender.
    pub version: Version,
    /// Steps compared.
    pub compared: u64,
    /// Steps skipped because the shadow had not finished an earlier one.
    pub skipped: u64,
    /// Faults, which changed nothing.
    pub faults: u64,
    /// Mean Spearman correlation of the two orders, from -1 to 1.
    pub rank_correlation: f64,
    /// Mean share of the first 8 that both put first.
    pub top_overlap: f64,
    /// Different answers other than keys: token budgets, thresholds, verdicts.
    pub differences: u64,
    /// Mean time of its decision, microseconds.
    pub deciding_us: f64,
}

/// One slot of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SlotStatus {
    /// The slot.
    pub slot: SlotName,
    /// The active version.
    pub active: Version,
    /// The version that a rollback would restore.
    pub previous: Option<Version>,
    /// The contender in shadow.
    pub shadow: Option<ShadowStatus>,
    /// The version in quarantine, and the time until its next trial, milliseconds.
    pub quarantine: Option<(Version, f64)>,
    /// Decisions by source: `policy`, `default`, `fallback`.
    pub decisions: [u64; 3],
    /// Total time of decisions by source, seconds.
    pub deciding_s: [f64; 3],
    /// Decisions by source and duration: at most 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000 microseconds, and
    /// longer.
    pub deciding_buckets: [[u64; 13]; 3],
    /// Faults of the active policies by kind.
    pub faults: Vec<(String, u64)>,
    /// Faults that count against the active version within the window.
    pub strikes: u32,
    /// Plans of the active version that left nothing to run; the host lifted their caps.
    #[serde(default)]
    pub idle_plans: u64,
    /// Swaps so far, promotions and rollbacks included.
    pub swaps: u64,
    /// The latest refused change of the policy, with the reason.
    pub last_refusal: Option<String>,
}

/// Upper bounds of [`SlotStatus::deciding_buckets`], microseconds.
pub const DECIDING_BUCKETS_US: [f64; 12] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0];

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
    /// The same for tokens that it did not hold.
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
///
/// ```
/// use meridian_runtime::control::LatencyReport;
///
/// let report = LatencyReport { run: "7-1700000000".into(), ..LatencyReport::default() };
/// assert!(report.counts.ttft.quantile_ms(0.99).is_none());
/// ```
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

/// The reason for a refused change. The active policy stays.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ControlError {
    /// The contender is not valid; one line for the operator.
    #[error("{0}")]
    Refused(String),
    /// The change is not possible now, but may be later; one line for the operator.
    #[error("{0}")]
    Busy(String),
    /// A later change of the slot, to another policy, was completed while the contender was loading.
    #[error("{}: not changed: a later change of this slot was carried out while the policy was loaded", .0.label())]
    Overtaken(SlotName),
    /// There is nothing to promote, roll back to, release or stop.
    #[error("{slot}: {what}", slot = slot.label())]
    Nothing {
        /// The slot.
        slot: SlotName,
        /// The missing thing.
        what: &'static str,
    },
    /// This process has no such slot.
    #[error("{}: this engine has no such slot", .0.label())]
    NoSuchSlot(SlotName),
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
