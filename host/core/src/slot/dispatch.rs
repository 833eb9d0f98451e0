use std::time::Duration;

use super::{PolicySlot, Source};
use crate::sync::lock;
use crate::{Column, Decision, Dispatch, RequestTable, RowId, Step, columns};

/// The dispatch slot, which decides the steps of a [`MeridianScheduler`](crate::MeridianScheduler).
pub type DispatchSlot = PolicySlot<Dispatch>;

impl PolicySlot<Dispatch> {
    /// Plans of the active policy that left nothing to run, and that the host changed.
    #[must_use]
    pub fn idle_plans(&self) -> u64 {
        lock(&self.shared.state).active.idle_plans
    }

    /// Decide one step over `candidates` of a table, running ones first. Always returns a checked decision.
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

    /// Whether the active policy reads this column.
    pub(crate) fn is_read_by_active(&self, column: Column) -> bool {
        self.facts().is_read_by_active(column)
    }

    /// Report that the plan of the latest decision left nothing to run, and was changed.
    pub(crate) fn overruled(&mut self) {
        lock(&self.shared.state).active.idle_plans += 1;
    }

    /// Report that the engine ran a step at `now_ms` its own way, which is also the decision of the active policy.
    pub(crate) fn kept(&mut self, now_ms: f64) {
        let state = &mut *lock(&self.shared.state);
        state.now_ms = now_ms;
        state.stats.decided(Source::Active, Duration::ZERO);
    }
}
