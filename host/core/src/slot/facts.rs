use super::State;
use super::report::Version;
use crate::SlotKind;

/// What the deciding thread knows of its slot without the lock. A copy, renewed after each change.
pub(super) struct SlotFacts<K: SlotKind> {
    /// The number of the latest change by another thread.
    pub(super) changes: u64,
    /// Distinguishes this stay of the active policy from every other.
    pub(super) stay: u64,
    pub(super) version: Version,
    pub(super) is_in_quarantine: bool,
    pub(super) is_recorded: bool,
    pub(super) swaps: u64,
    /// The active policy, then the shadow.
    pub(super) readers: Vec<Reader<K>>,
    default_inputs: Vec<K::Column>,
}

/// What a policy reads.
pub(super) struct Reader<K: SlotKind> {
    pub(super) inputs: Vec<K::Column>,
    /// See [`Policy::weighs_signals_alone`](crate::Policy::weighs_signals_alone).
    pub(super) weighs_signals_alone: bool,
}

impl<K: SlotKind> SlotFacts<K> {
    pub(super) fn new(state: &State<K>, changes: u64) -> Self {
        let active = state.active.policy.policy();
        let active = Reader { inputs: active.inputs().to_vec(), weighs_signals_alone: active.weighs_signals_alone() };
        let shadow = state.shadow.as_ref().map(|shadow| Reader {
            inputs: shadow.inputs().to_vec(),
            weighs_signals_alone: shadow.weighs_signals_alone(),
        });
        Self {
            changes,
            stay: state.active.id,
            version: state.active.version.clone(),
            is_in_quarantine: state.quarantine.is_some(),
            is_recorded: state.witness.is_some(),
            swaps: state.swaps,
            readers: [Some(active), shadow].into_iter().flatten().collect(),
            default_inputs: state.default.inputs().to_vec(),
        }
    }

    pub(super) fn is_decided_by(&self, source: &str) -> bool {
        self.version.source == source && self.version.sha256.is_empty() && !self.is_in_quarantine
    }

    pub(super) fn is_watched(&self) -> bool {
        self.is_recorded || self.readers.len() > 1
    }

    pub(super) fn reads(&self, column: K::Column) -> bool {
        self.readers.iter().any(|reader| reader.inputs.contains(&column))
            || self.default_inputs.contains(&column)
            // A version that returns from quarantine may read it.
            || self.is_in_quarantine
    }

    pub(super) fn is_read_by_active(&self, column: K::Column) -> bool {
        self.readers.first().is_some_and(|active| active.inputs.contains(&column))
    }

    /// Whether ended requests are kept for the next decision.
    pub(super) fn keeps_finished(&self) -> bool {
        // A recording may be replayed with a policy that tells requests apart.
        self.is_recorded || K::REQUEST.is_some_and(|request| self.reads(request))
    }
}
