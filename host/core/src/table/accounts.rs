//! The accounts and latencies of the requests in a table.

use super::{RequestState, RequestTable, RowId, live};
use crate::ThinkPhase as Phase;
use crate::account::{Admission, Doing, Ledger, Overtaking, Part, Transition};
use crate::latency::Latencies;

impl RequestTable {
    /// A step begins at `now_ms`; `prefill_token_ms` is the learned time of a prompt token.
    pub(crate) fn begin_step(&mut self, now_ms: f64, prefill_token_ms: f64) {
        let Self { rows, ledger, .. } = self;
        let (ms, cause) = ledger.begin_step(now_ms, prefill_token_ms);
        for row_id in std::mem::take(&mut ledger.put_off) {
            if let Some(row) = live(rows, row_id) {
                Ledger::was_put_off(&mut row.account, cause, ms);
            }
        }
        for row_id in ledger.take_fresh() {
            if let Some(row) = live(rows, row_id).filter(|row| row.account.doing() == Doing::Arriving) {
                ledger.turn(&mut row.account, row.number, now_ms, Doing::Waiting);
            }
        }
    }

    /// The milliseconds of each [`Part`] of a request's latency until now, in the order of [`Part::ALL`]. They add up to
    /// the time since its arrival.
    #[must_use]
    pub fn parts(&self, row: &RequestState) -> [f64; Part::ALL.len()] {
        self.ledger.parts_at(&row.account, self.clock_ms)
    }

    /// The cause of waiting in the present step.
    #[must_use]
    pub fn cause_of_waiting(&self) -> Part {
        self.ledger.cause()
    }

    /// The latest admissions, oldest first, at most 4096.
    pub fn admissions(&self) -> impl Iterator<Item = &Admission> {
        self.ledger.admissions()
    }

    /// Keep the changes of what requests do, for [`RequestTable::take_transitions`], or forget them.
    pub fn keep_transitions(&mut self, keep: bool) {
        self.ledger.keep_transitions(keep);
    }

    /// Pass the changes of what requests do since the last call to `each`. Returns the number of changes that were lost
    /// because nobody took them.
    pub fn take_transitions(&mut self, each: impl FnMut(Transition)) -> u64 {
        self.ledger.take_transitions(each)
    }

    /// Observe the latencies of requests that arrive from now on.
    pub fn observe_latencies(&mut self, latencies: Latencies) {
        self.latencies = Some(Box::new(latencies));
    }

    /// The observed latencies.
    #[must_use]
    pub fn latencies(&self) -> Option<&Latencies> {
        self.latencies.as_deref()
    }

    pub(crate) fn latencies_mut(&mut self) -> Option<&mut Latencies> {
        self.latencies.as_deref_mut()
    }

    /// A waiting request was overtaken in this step.
    pub(crate) fn overtaken(&mut self, row_id: RowId, overtaking: Overtaking) {
        let Self { rows, ledger, .. } = self;
        if let Some(row) = live(rows, row_id) {
            ledger.overtaken(&mut row.account, row.number, overtaking);
        }
    }

    /// The starvation bound gives the request tokens in this step.
    pub(crate) fn rescued(&mut self, row_id: RowId) {
        if let Some(row) = self.row_mut(row_id) {
            row.account.rescued();
        }
    }

    /// The request runs, and the engine gave it no tokens since step `last`.
    #[cold]
    pub(super) fn stalled(&mut self, row_id: RowId, last: u64, step: u64) {
        let Self { rows, ledger, .. } = self;
        if let Some(row) = rows[row_id.index()].state.as_mut() {
            ledger.stalled(&mut row.account, row.number, last, step);
        }
    }

    /// The request waits from now on.
    pub(super) fn account_wait(&mut self, row_id: RowId) {
        let Self { rows, ledger, clock_ms, .. } = self;
        if let Some(row) = live(rows, row_id) {
            ledger.turn(&mut row.account, row.number, *clock_ms, Doing::Waiting);
        }
    }
}

/// Observe a token of this phase, before the row knows its time. Later tokens of the same step have no gap.
#[inline]
pub(super) fn observe(latencies: &mut Latencies, row: &RequestState, phase: Phase, clock_ms: f64) {
    let gap_ms = clock_ms - row.last_token_ms;
    let since_arrival_ms = clock_ms - row.arrival_ms;
    latencies.token(phase);
    if gap_ms.is_nan() {
        latencies.first_token(row.series, since_arrival_ms);
    }
    // The gap between the end of thinking and the first output token is TTOT.
    if phase == Phase::Output && row.milestones.first_output_ms.is_nan() {
        let end_ms = f64::from(row.milestones.end_of_thinking_ms);
        latencies.first_output(row.series, since_arrival_ms, (!end_ms.is_nan()).then_some(since_arrival_ms - end_ms));
    } else if gap_ms > 0.0 {
        latencies.gap(row.series, phase, gap_ms);
    }
}
