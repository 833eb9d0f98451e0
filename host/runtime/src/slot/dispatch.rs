use meridian_core::{Decision, Dispatch, RequestTable, Slot, Step, columns};

use super::PolicySlot;
use crate::stats::Source;

/// The dispatch slot, which the scheduling thread owns.
pub type DispatchSlot = PolicySlot<Dispatch>;

impl PolicySlot<Dispatch> {
    /// Decide one step over `candidates`, running ones first. Always returns a checked decision.
    pub fn decide(
        &mut self,
        step: &Step,
        table: &RequestTable,
        candidates: &[Slot],
        block_tokens: u32,
    ) -> (Source, &Decision) {
        self.decide_by(step, candidates.len(), |inputs, out| {
            columns::fill(inputs, table, candidates, step.now_ms, block_tokens, out);
        })
    }
}
