//! Why requests waited in a step, and by which rule others were admitted before them.

use super::Planner;
use crate::account::{Overtaking, Part, Rule};
use crate::{RequestTable, RowId};

impl Planner {
    /// Set the causes of the step that was scheduled. The engine admits requests in order, until a seat, the tokens of the
    /// step or KV blocks run out.
    pub(super) fn settle_causes(&mut self, table: &mut RequestTable, scheduled_tokens: u32) {
        let admitted = table.ledger.admitted_in_step();
        let waiting = if self.free_seats <= admitted {
            Part::Seat
        } else if scheduled_tokens >= self.plan.token_budget {
            if self.budget_was_lowered { Part::Policy } else { Part::Budget }
        } else if !self.head_fits || admitted > 0 || self.is_short_of_blocks {
            Part::Blocks
        } else {
            Part::Engine
        };
        let limits_running = self.budget_was_lowered || !self.plan.token_caps.is_empty();
        table.ledger.set_causes(waiting, limits_running);
        for row_id in self.rescued.drain(..) {
            table.rescued(row_id);
        }
        if let Some((row_id, could_run)) = self.has_its_turn.take() {
            table.had_its_turn(row_id, could_run);
        }
    }

    /// Set the rules by which the candidates of the last plan were admitted.
    pub(super) fn settle_rules(&self, table: &mut RequestTable) {
        for (position, (row_id, _)) in self.could_defer.iter().enumerate() {
            let Some(row) = table.get(*row_id).filter(|row| row.state() == crate::State::Running) else { continue };
            let number = row.number;
            table.ledger.set_rule(number, self.rule(position));
        }
    }

    fn rule(&self, position: usize) -> Rule {
        if self.is_overdue(position) {
            Rule::Rescue
        } else if self.priority_first {
            Rule::Priority
        } else if self.reordered_waiting {
            Rule::Key
        } else {
            Rule::Arrival
        }
    }

    /// Note that the waiting candidate at `position` was overtaken by the one at `by`.
    pub(super) fn settle_overtaking(
        &self,
        table: &mut RequestTable,
        row_id: RowId,
        position: usize,
        by: usize,
        now_ms: f64,
    ) {
        let number = |position: usize| {
            self.could_defer.get(position).and_then(|(row_id, _)| table.get(*row_id)).map_or(0, |row| row.number)
        };
        let key = |position: usize| self.keys.get(position).copied().filter(|key| key.is_finite());
        let left_out = self.could_defer.get(position).is_some_and(|(_, left_out)| *left_out);
        let is_late = |row_id: RowId| table.get(row_id).is_some_and(|row| table.level_slack_ms(row, now_ms) < 0.0);
        let has_level = |row_id: RowId| table.get(row_id).is_some_and(|row| row.level > 0);
        let keeps_its_level = |(by, _): &(RowId, bool)| has_level(*by) && !is_late(*by);
        let is_for_a_level = is_late(row_id) && self.could_defer.get(by).is_some_and(keeps_its_level);
        let rule = match self.rule(by) {
            Rule::Arrival | Rule::Key if is_for_a_level => Rule::Level,
            Rule::Arrival | Rule::Key if left_out => Rule::Cap,
            Rule::Arrival => Rule::Key,
            rule => rule,
        };
        let by_number = number(by);
        table.overtaken(
            row_id,
            Overtaking { by: by_number, at_ms: now_ms, rule, own_key: key(position), other_key: key(by) },
        );
    }
}
