//! The sessions of the requests in a table.

use super::{RequestState, RequestTable};
use crate::RowId;
use crate::sessions::{SessionFacts, Stop};

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

    /// The facts about a live request's session.
    pub(crate) fn session_facts(&self, row: &RequestState) -> SessionFacts {
        self.sessions.facts(row.own_turn(), Stop::Preempted)
    }
}
