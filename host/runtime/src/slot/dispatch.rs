use std::time::Duration;

use meridian_core::{
    Decider, Decision, Dispatch, EngineDecider, FillColumns, RequestTable, RowId, Source, Step, columns,
};

use super::PolicySlot;
use crate::sync::lock;

/// The dispatch slot, which decides the steps of a [`MeridianScheduler`](meridian_core::MeridianScheduler).
pub type DispatchSlot = PolicySlot<Dispatch>;

impl PolicySlot<Dispatch> {
    /// Plans of the active policy that left nothing to run, and that the host changed.
    #[must_use]
    pub fn idle_plans(&self) -> u64 {
        lock(&self.state).active.idle_plans
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
}

impl Decider for PolicySlot<Dispatch> {
    fn decide(&mut self, step: &Step, candidates: usize, fill: FillColumns<'_>) -> (Source, &Decision) {
        self.decide_by(step, candidates, fill)
    }

    fn finished(&mut self, requests: &[u32]) {
        self.note_finished(requests);
    }
}

impl EngineDecider for PolicySlot<Dispatch> {
    fn overruled(&mut self) {
        lock(&self.state).active.idle_plans += 1;
    }

    fn kept(&mut self, now_ms: f64) {
        let state = &mut *lock(&self.state);
        state.now_ms = now_ms;
        state.stats.decided(Source::Active, Duration::ZERO);
    }
}
