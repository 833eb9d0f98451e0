//! The sessions of the requests in a table.

use meridian_policy_sdk::State;

use super::{RequestState, RequestTable};
use crate::RowId;
use crate::blocks::WARM;
use crate::sessions::{SessionFacts, Stop};

/// One that had its turn when the engine lacked something else for it has the next after so many milliseconds.
const RETRY_MS: f64 = 60_000.0;

/// The KV memory that sessions leave to others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionMemory {
    /// See [`RequestTable::room_tokens`].
    pub(crate) room_tokens: f32,
    /// The longest that a policy may hold a request for it, milliseconds; `None` for no longer than any other.
    pub(crate) holds_ms: Option<f64>,
    /// Tokens that a step can carry.
    pub(crate) step_tokens: u32,
}

impl RequestTable {
    /// Report that the prompt of a request continues that of a request of `session`, which its client does not name: it is
    /// the next turn.
    pub(crate) fn continues(&mut self, row_id: RowId, session: u32) {
        let Some(row) = self.rows.get_mut(row_id.index()).filter(|row| row.generation == row_id.generation) else {
            return;
        };
        if let Some(row) = &mut row.state
            && row.session.session == 0
            && row.found.session == 0
            && let Some(turn) = self.sessions.continued(session, row.arrival_ms)
        {
            row.found = turn;
        }
    }

    /// The request stops at `now_ms`; the facts about its session. One that nobody named begins with its first end.
    pub(crate) fn stops(&mut self, row_id: RowId, stop: Stop, now_ms: f64) -> SessionFacts {
        let row = self.rows.get_mut(row_id.index()).filter(|row| row.generation == row_id.generation);
        let Some(row) = row.and_then(|row| row.state.as_mut()) else { return SessionFacts::default() };
        if stop != Stop::Preempted && !row.has_left {
            row.has_left = true;
            if row.session.session == 0 && row.found.session == 0 {
                row.found = self.sessions.found(row.arrival_ms);
            }
            self.sessions.ended(row.own_turn().session, stop, now_ms);
        }
        self.sessions.facts(row.own_turn(), stop)
    }

    /// Tokens of KV memory that neither running requests nor warm sessions need; infinite where it is not known.
    pub(crate) fn room_tokens(&self) -> f32 {
        self.memory.map_or(f32::INFINITY, |memory| memory.room_tokens)
    }

    /// Whether the session waits for a sub-agent that has a request here.
    pub(crate) fn waits(&self, session: u32) -> bool {
        self.sessions.waits(session)
    }

    /// Set the KV memory that sessions have in the next step: for each waiting request that was never admitted, the tokens that
    /// its session has; a sub-agent counts as having those of the session that waits for it.
    pub(crate) fn set_memory(&mut self, memory: SessionMemory, waiting: &[RowId], tokens: impl Fn(u32) -> u32) {
        self.memory = Some(memory);
        self.held_ms = memory.holds_ms.unwrap_or(self.held_ms);
        let mut resumes: Option<i32> = None;
        for row_id in waiting {
            let Some(row) = self.row_mut(*row_id) else { continue };
            match row.state {
                State::Waiting => {
                    let of = |session| if session > 0 { tokens(session) } else { 0 };
                    let resident = of(row.session.session).saturating_add(of(row.session.parent));
                    row.resident_tokens = resident.min(row.prompt_tokens);
                }
                State::Preempted if !row.is_refused => {
                    resumes = Some(resumes.map_or(row.priority, |most| most.min(row.priority)));
                }
                _ => {}
            }
        }
        self.resumes = resumes;
    }

    /// The policy that decided the step knows nothing of the room: it holds nobody for it.
    pub(crate) fn no_room_was_read(&mut self) {
        if let Some(memory) = &mut self.memory {
            memory.holds_ms = None;
        }
    }

    /// The step is planned: what was set is known no longer.
    pub(crate) fn forget_memory(&mut self) {
        self.memory = None;
    }

    /// How long a policy may hold this waiting request, which it leaves out, for the sake of warm sessions, milliseconds: its
    /// own has lost its KV blocks, and a step cannot carry what is missing. `None` for no longer than any other.
    pub(super) fn holds_ms(&self, row: &RequestState) -> Option<f64> {
        let memory = self.memory.filter(|_| row.state == State::Waiting && row.session.session > 0)?;
        let missing = row.prompt_tokens - row.resident_tokens;
        memory.holds_ms.filter(|_| missing > row.resident_tokens && missing > memory.step_tokens)
    }

    /// For how long one that may be held for `holds_ms`, and has been since `since_ms`, had to be admitted, milliseconds.
    /// Those that are held for too long take turns. A preempted request that is at least as urgent resumes first, because what
    /// it had computed may still be cached; but none is held for more than twice as long for it.
    pub(super) fn held_too_long_ms(&self, row: &RequestState, holds_ms: f64, since_ms: f64, now_ms: f64) -> f64 {
        let over_ms = now_ms - since_ms - holds_ms;
        let resumes_first = self.resumes.is_some_and(|most| most <= row.priority) && over_ms <= holds_ms;
        if now_ms < self.next_turn_ms || resumes_first { 0.0 } else { over_ms }
    }

    /// A request that had been held for too long had its turn in a step. If it was admitted, the next has its turn when
    /// computing this prompt was a small part of the time. One that was not although it `could_run`, because the engine lacks
    /// something else for it (an adapter, a grammar), tries again in a minute.
    pub(crate) fn had_its_turn(&mut self, row_id: RowId, could_run: bool) {
        let since_ms = self.clock_ms - (self.held_ms - RETRY_MS).max(0.0);
        let Some(row) = self.row_mut(row_id) else { return };
        if row.state != State::Running {
            if could_run {
                row.deferred_since_ms = Some(since_ms);
            }
            return;
        }
        let Some(row) = self.get(row_id) else { return };
        let missing_ms = self.speed.prefill_token_ms * row.prompt_tokens.saturating_sub(row.cached_tokens) as f32;
        self.next_turn_ms = self.clock_ms + WARM * f64::from(missing_ms);
    }

    /// The facts about a live request's session.
    pub(crate) fn session_facts(&self, row: &RequestState) -> SessionFacts {
        self.sessions.facts(row.own_turn(), Stop::Preempted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NewRequest;

    #[test]
    fn a_turn_that_the_engine_could_not_use_comes_again_in_a_minute() {
        let mut table = RequestTable::default();
        let new = NewRequest { prompt_tokens: 8000, max_tokens: 10, session: "a", ..NewRequest::default() };
        let row_id = table.insert(&new).unwrap();
        let has_turn = |table: &mut RequestTable, now_ms: f64| {
            let memory = SessionMemory { room_tokens: 0.0, holds_ms: Some(100_000.0), step_tokens: 64 };
            table.set_memory(memory, &[row_id], |_| 0);
            table.set_clock(now_ms);
            table.defer(row_id, now_ms);
            table.overdue_ms(table.get(row_id).unwrap(), now_ms, 2000.0, true).is_some()
        };
        assert_eq!([0.0, 100_000.0, 100_001.0].map(|now_ms| has_turn(&mut table, now_ms)), [false, false, true]);
        table.had_its_turn(row_id, true);
        assert_eq!([160_001.0, 160_002.0].map(|now_ms| has_turn(&mut table, now_ms)), [false, true]);
    }
}
