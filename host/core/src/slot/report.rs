//! The state of a slot and its changes, as operators see them: `meridian ctl`, the admin listener and Python.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::SlotName;

/// A policy that is, was or may become active.
///
/// ```
/// use meridian_core::slot::Version;
///
/// let version = Version { name: "fcfs".into(), source: "native:fcfs".into(), ..Version::default() };
/// let json = serde_json::to_string(&version)?;
/// assert_eq!(json, r#"{"name":"fcfs","version":"","sha256":"","source":"native:fcfs"}"#);
/// # Ok::<(), serde_json::Error>(())
/// ```
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
///
/// ```
/// use meridian_core::slot::Mode;
///
/// assert_eq!(serde_json::to_string(&Mode::Shadow)?, r#""shadow""#);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It decides from the next step on.
    #[default]
    Active,
    /// It is compared with the active policy, and changes nothing.
    Shadow,
}

/// The fate of the previous policy's state.
///
/// ```
/// use meridian_core::slot::StateHandover;
///
/// let json = serde_json::to_string(&StateHandover::Reset("another kind of state".into()))?;
/// assert_eq!(json, r#"{"kind":"reset","why":"another kind of state"}"#);
/// # Ok::<(), serde_json::Error>(())
/// ```
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
///
/// ```
/// use meridian_core::slot::{Contender, DispatchSlot};
/// use meridian_core::{SchedulerConfig, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// let report = slot.control().swap(Contender::new(native::policy("srpt", targets, "{}")?, "", "native:srpt"));
/// assert_eq!((report.action.as_str(), report.previous.name.as_str()), ("swap", "fcfs"));
/// # Ok::<(), native::NativeError>(())
/// ```
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
///
/// ```
/// use meridian_core::slot::DispatchSlot;
/// use meridian_core::{SchedulerConfig, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// slot.control().refused("srpt.wasm", "not a component");
/// let faults = slot.control().faults();
/// assert_eq!((faults[0].kind.as_str(), faults[0].detail.as_str()), ("load", "not a component"));
/// # Ok::<(), native::NativeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultEntry {
    /// The slot.
    pub slot: SlotName,
    /// Milliseconds on the host's clock; 0 before the first step.
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
///
/// ```
/// use meridian_core::slot::FaultBatch;
///
/// let (inputs, columns_bits) = (vec!["Phase".into()], vec![1.5_f32.to_bits()]);
/// let batch = FaultBatch { inputs, columns_bits, facts: serde_json::json!({ "now_ms": 12.5 }) };
/// assert_eq!(f32::from_bits(batch.columns_bits[0]), 1.5);
/// ```
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
///
/// ```
/// use meridian_core::slot::{Contender, DispatchSlot};
/// use meridian_core::{SchedulerConfig, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// slot.control().shadow(Contender::new(native::policy("srpt", targets, "{}")?, "", "native:srpt")).unwrap();
/// let shadow = slot.control().status().shadow.expect("it was just started");
/// assert_eq!((shadow.version.name.as_str(), shadow.compared), ("srpt", 0));
/// # Ok::<(), native::NativeError>(())
/// ```
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
///
/// ```
/// use meridian_core::slot::DispatchSlot;
/// use meridian_core::{SchedulerConfig, native};
///
/// let targets = SchedulerConfig::default().targets();
/// let slot = DispatchSlot::new(native::policy("fcfs", targets, "{}")?, targets);
/// let status = slot.control().status();
/// assert_eq!((status.active.name.as_str(), status.swaps, status.previous), ("fcfs", 0, None));
/// # Ok::<(), native::NativeError>(())
/// ```
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

/// The reason for a refused change. The active policy stays.
///
/// ```
/// use meridian_core::SlotName;
/// use meridian_core::slot::ControlError;
///
/// let error = ControlError::Nothing { slot: SlotName::Dispatch, what: "there is no shadow to promote" };
/// assert_eq!(error.to_string(), "dispatch: there is no shadow to promote");
/// ```
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
