use meridian_core::{Decision, Dispatch, RequestTable, RowId, Step, columns};

use super::PolicySlot;
use crate::stats::Source;
use crate::sync::lock;

/// The dispatch slot, which the scheduling thread owns.
pub type DispatchSlot = PolicySlot<Dispatch>;

impl PolicySlot<Dispatch> {
    /// The plan of the active policy left nothing to run, and the host changed it.
    pub(crate) fn count_idle_plan(&mut self) {
        lock(&self.state).active.idle_plans += 1;
    }

    /// Plans of the active policy that left nothing to run, which the host changed.
    #[must_use]
    pub fn idle_plans(&self) -> u64 {
        lock(&self.state).active.idle_plans
    }

    /// Decide one step over `candidates`, running ones first. Always returns a checked decision.
    pub fn decide(
        &mut self,
        step: &Step,
        table: &RequestTable,
        candidates: &[RowId],
        block_tokens: u32,
    ) -> (Source, &Decision) {
        self.decide_by(step, candidates.len(), |inputs, out| {
            columns::fill(inputs, table, candidates, step.now_ms, block_tokens, out);
        })
    }
}
