use meridian_core::{FaultKind, SlotKind, Targets};
use serde::{Deserialize, Serialize};

use crate::control::Version;

/// A recorded decision: the input and the answer of the active policy.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded<K: SlotKind> {
    /// Number of the decision in its slot and process, from 0; dropped records leave gaps.
    pub seq: u64,
    /// The outcome of the question.
    pub outcome: Outcome,
    /// Whether the policy was restarted since the previous decision.
    pub restarted: bool,
    /// At the start of a file or after missing records: the policy's state before this decision, empty if it gives
    /// none.
    pub snapshot: Option<Vec<u8>>,
    /// Facts about the engine.
    pub facts: K::Facts,
    /// Number of candidates.
    pub candidates: usize,
    /// The recorded columns of the candidates, one after the other, each of `candidates` values.
    pub columns: Vec<f32>,
    /// Numbers of requests that the policy was told have ended.
    pub finished: Vec<u32>,
    /// The active policy's checked answer; empty when it left the batch to the default or faulted.
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
            finished: Vec::new(),
            decision: K::Decision::default(),
        }
    }
}

/// The outcome of a question to the active policy.
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

/// The data that a restart of a policy needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedPolicy {
    /// Name, version, digest and source.
    pub version: Version,
    /// The columns that it reads, as they are named in the file.
    pub inputs: Vec<String>,
    /// The options of its start, one JSON object.
    pub options: String,
    /// The targets of its start.
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
/// use meridian_engine::recording::RecordedTargets;
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// assert_eq!(RecordedTargets::from(targets).into_targets(), targets);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordedTargets {
    /// Target step time while an output-phase request runs, milliseconds.
    pub output_tpot_budget_ms: f32,
    /// Target step time while only thinking requests run, milliseconds.
    pub think_tpot_budget_ms: f32,
    /// Largest token budget of a step with only thinking requests, as a multiple of the output-phase token budget.
    pub think_batch_multiplier: f32,
    /// Longest time that a policy may defer a request, milliseconds.
    pub max_defer_ms: f32,
}

impl From<Targets> for RecordedTargets {
    fn from(targets: Targets) -> Self {
        let Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } = targets;
        Self { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
    }
}

impl RecordedTargets {
    /// The targets in the form for a policy.
    #[must_use]
    pub fn into_targets(self) -> Targets {
        let Self { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } = self;
        Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms }
    }
}

/// The header of a file, as JSON under the key `meridian` of its schema.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The writer's [`Header::FORMAT`].
    pub format: u32,
    /// `dispatch`, `eviction` or `budget`.
    pub slot: String,
    /// Identifies one recording process: the numbers of its decisions count from 0.
    pub run: String,
    /// Number of the file in its slot and process.
    pub file: u32,
    /// Start of the file, milliseconds since 1970.
    pub opened_unix_ms: u64,
    /// Version of Meridian.
    pub meridian: String,
    /// Version of the contract, whose columns and facts it has.
    #[serde(default = "first_contract")]
    pub contract: String,
    /// The active policy, one per file.
    pub policy: RecordedPolicy,
}

/// Recordings of the first version did not name it.
fn first_contract() -> String {
    "0.1.0".into()
}

impl Header {
    /// The format that this version writes and reads.
    pub const FORMAT: u32 = 1;
}
