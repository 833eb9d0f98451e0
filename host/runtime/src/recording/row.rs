use meridian_core::{FaultKind, SlotKind, Targets};
use serde::{Deserialize, Serialize};

use crate::control::Version;

/// A decision as it was recorded: what the active policy was given and what it answered.
///
/// ```
/// use meridian_core::{Decision, Dispatch, Step};
/// use meridian_runtime::recording::Recorded;
///
/// let row = Recorded::<Dispatch> { seq: 7, facts: Step { running: 3, ..Step::default() }, ..Recorded::default() };
/// assert_eq!((row.candidates, row.decision), (0, Decision::default()));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded<K: SlotKind> {
    /// Number of the decision in its slot and process, from 0; numbers are missing where records were dropped.
    pub seq: u64,
    /// What became of the question.
    pub outcome: Outcome,
    /// Whether the policy had been started afresh since the decision before.
    pub restarted: bool,
    /// Where a file begins or records are missing: the policy's state before this decision, empty if it gives none.
    pub snapshot: Option<Vec<u8>>,
    /// Facts about the engine.
    pub facts: K::Facts,
    /// How many candidates there were.
    pub candidates: usize,
    /// The recorded columns of the candidates, one after the other, each of `candidates` values.
    pub columns: Vec<f32>,
    /// The active policy's checked answer; nothing when it left the batch to the default or faulted.
    pub decision: K::Decision,
}

impl<K: SlotKind> Default for Recorded<K> {
    fn default() -> Self {
        Self {
            seq: 0,
            outcome: Outcome::Decided,
            restarted: false,
            snapshot: None,
            facts: K::Facts::default(),
            candidates: 0,
            columns: Vec::new(),
            decision: K::Decision::default(),
        }
    }
}

/// What became of a question to the active policy.
///
/// ```
/// use meridian_core::FaultKind;
/// use meridian_runtime::recording::Outcome;
///
/// assert_ne!(Outcome::Faulted(FaultKind::Trap), Outcome::NotAsked);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It decided.
    Decided,
    /// It left the batch to the default.
    LeftToDefault,
    /// It faulted; the default decided.
    Faulted(FaultKind),
    /// It could not be asked since an earlier fault; the default decided.
    NotAsked,
}

/// What has to be known of a policy to start it again.
///
/// ```
/// use meridian_runtime::recording::RecordedPolicy;
///
/// assert_eq!(RecordedPolicy::default().version.source, "");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedPolicy {
    /// Name, version, digest and source.
    pub version: Version,
    /// The columns it asks for, as they are named in the file.
    pub inputs: Vec<String>,
    /// The options it was started with, one JSON object.
    pub options: String,
    /// The targets it was started with.
    pub targets: RecordedTargets,
    /// Longest time of one decision, milliseconds.
    pub deadline_ms: f32,
    /// Most linear memory, MiB.
    pub memory_mib: u32,
}

/// [`Targets`] in a recording.
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_runtime::recording::RecordedTargets;
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// assert_eq!(RecordedTargets::from(targets).into_targets(), targets);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // documented in wit/lifecycle.wit, the one place
pub struct RecordedTargets {
    pub output_tpot_budget_ms: f32,
    pub think_tpot_budget_ms: f32,
    pub think_batch_multiplier: f32,
    pub max_defer_ms: f32,
}

impl From<Targets> for RecordedTargets {
    fn from(targets: Targets) -> Self {
        let Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } = targets;
        Self { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
    }
}

impl RecordedTargets {
    /// As a policy is given them.
    #[must_use]
    pub fn into_targets(self) -> Targets {
        let Self { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } = self;
        Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
    }
}

/// What a file says of itself, as JSON under the key `meridian` of its schema.
///
/// ```
/// use meridian_runtime::recording::Header;
///
/// assert_eq!(Header::FORMAT, 1);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`Header::FORMAT`] of whoever wrote it.
    pub format: u32,
    /// `dispatch`, `eviction` or `budget`.
    pub slot: String,
    /// Tells one recording process from another: the numbers of its decisions count from 0.
    pub run: String,
    /// Number of the file in its slot and process.
    pub file: u32,
    /// When the file was begun, milliseconds since 1970.
    pub opened_unix_ms: u64,
    /// Version of Meridian.
    pub meridian: String,
    /// The active policy, one a file.
    pub policy: RecordedPolicy,
}

impl Header {
    /// The format that is written and read here.
    pub const FORMAT: u32 = 1;
}
