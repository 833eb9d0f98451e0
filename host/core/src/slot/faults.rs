use std::collections::VecDeque;
use std::sync::Arc;

use super::report::{FaultBatch, FaultEntry, Version};
use crate::{Fault, SlotKind, SlotName};

/// Faults kept for the operator; the slot counts all.
const KEPT: usize = 256;
/// The newest faults that keep their batch.
const WITH_BATCH: usize = 8;

/// The latest faults, with the data to reproduce the newest ones.
#[derive(Debug, Default)]
pub(super) struct FaultLog {
    /// Shared, so that a reader delays no decision.
    entries: VecDeque<Arc<FaultEntry>>,
}

impl FaultLog {
    #[expect(clippy::too_many_arguments, reason = "one row of a log")]
    pub(super) fn push(
        &mut self,
        slot: SlotName,
        version: &Version,
        shadow: bool,
        now_ms: f64,
        candidates: usize,
        fault: &Fault,
        batch: Option<FaultBatch>,
    ) {
        if self.entries.len() == KEPT {
            self.entries.pop_front();
        }
        self.entries.push_back(Arc::new(FaultEntry {
            slot,
            now_ms,
            kind: fault.kind.label().into(),
            detail: fault.detail.clone(),
            version: version.clone(),
            shadow,
            candidates,
            batch,
        }));
        if let Some(old) = self.entries.len().checked_sub(WITH_BATCH + 1) {
            let entry = &mut self.entries[old];
            if entry.batch.is_some() {
                let FaultEntry { slot, now_ms, kind, detail, version, shadow, candidates, batch: _ } = entry.as_ref();
                let (kind, detail, version) = (kind.clone(), detail.clone(), version.clone());
                let (slot, now_ms, shadow, candidates) = (*slot, *now_ms, *shadow, *candidates);
                *entry = Arc::new(FaultEntry { slot, now_ms, kind, detail, version, shadow, candidates, batch: None });
            }
        }
    }

    pub(super) fn entries(&self) -> Vec<Arc<FaultEntry>> {
        self.entries.iter().map(Arc::clone).collect()
    }
}

impl FaultBatch {
    /// The batch that a policy faulted on.
    pub(super) fn of<K: SlotKind>(inputs: &[K::Column], columns: &[f32], facts: &K::Facts) -> Self {
        Self {
            inputs: inputs.iter().map(|column| format!("{column:?}")).collect(),
            columns_bits: columns.iter().map(|value| value.to_bits()).collect(),
            facts: serde_json::to_value(facts).expect("numbers and names by name"),
        }
    }
}
