//! Generated tokens: the phases that they change, and the clocks that they move.

use meridian_policy_sdk::{Phase, State};

use super::accounts::observe;
use super::{RequestState, RequestTable, RowId, live};
use crate::Standing;
use crate::account::{Doing, Part};
use crate::types::PhaseEvent;

impl RequestTable {
    /// Take in the request's generated tokens, in order. Appends to `events` their effects on its thinking.
    #[inline]
    pub fn generated(&mut self, row_id: RowId, tokens: &[u32], events: &mut Vec<PhaseEvent>) {
        for token in tokens {
            events.extend(self.token(row_id, *token, |_, _| {}));
        }
    }

    /// Take in the tokens of a step, in order for each request; several per request if the engine speculates. Appends
    /// to `events` their effects on thinking. Requests that are not live are ignored.
    pub fn generated_in_step(&mut self, tokens: &[(RowId, u32)], events: &mut Vec<(RowId, PhaseEvent)>) {
        for (row_id, token) in tokens {
            if let Some(event) = self.token(*row_id, *token, |_, _| {}) {
                events.push((*row_id, event));
            }
        }
    }

    /// Take in one token, then call `then` with where it stood, if Meridian follows the thinking of the request.
    #[inline]
    pub(crate) fn token(
        &mut self,
        row_id: RowId,
        token: u32,
        then: impl FnOnce(&mut RequestState, Standing),
    ) -> Option<PhaseEvent> {
        let (now_ms, clock_ms) = (self.clock_whole_ms, self.clock_ms);
        let Self { rows, markers, latencies, ledger, forecast, .. } = self;
        let row = live(rows, row_id)?;
        row.prefilled = true;
        let at = row.thinking.is_some().then(|| row.phases.standing(markers));
        let (phase, event) = row.phases.token(markers, token, now_ms);
        if phase != Phase::Output && row.think_from == u32::MAX {
            row.think_from = row.prompt_tokens.saturating_add(row.output_tokens());
        }
        let answers = phase == Phase::Output;
        let tokens = if answers { row.output_tokens() } else { row.think_tokens() };
        if row.course.changes(answers, tokens) {
            forecast.passed(row.tenant, &mut row.course, answers, tokens);
        }
        if let Some(latencies) = latencies {
            observe(latencies, row, phase, clock_ms);
        }
        row.last_token_ms = clock_ms;
        if row.milestones.first_output_ms.is_nan() {
            row.note(clock_ms);
        }
        let computes = if row.phases.phase() == Phase::Output { Part::Output } else { Part::Think };
        if row.computes != computes && row.state == State::Running {
            row.computes = computes;
            ledger.turn(&mut row.account, row.number, clock_ms, Doing::Running(computes));
        }
        if let Some(at) = at {
            then(row, at);
        }
        event
    }
}
