//! Preemption of running requests for waiting ones.

use std::cmp::Ordering;

use super::{EngineFacts, MOST_PREEMPTIONS, Planner};
use crate::table::RequestState;
use crate::{Decision, RequestTable, RowId};

impl Planner {
    /// Find the running requests that give way to the first waiting request, and add them to the plan.
    pub(super) fn make_room(
        &mut self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        waiting: &[RowId],
        decision: &Decision,
    ) {
        let Decision { keys, victim_keys, .. } = decision;
        let chooses = !victim_keys.is_empty();
        let needs_seat = facts.free_seats == 0;
        // While only KV blocks are short, memory preempts by itself as running requests grow. Preempting earlier for
        // each waiting request would cost more recomputation than it gains; but a more urgent request does not wait for
        // it, nor one for which a policy names victims.
        if !needs_seat && (self.head_fits || !(self.priority_first || chooses)) {
            return;
        }
        let from = self.plan.waiting_order.first().map_or(0, |from| *from as usize);
        let Some(head_id) = waiting.get(from) else { return };
        let Some(head) =
            table.get(*head_id).filter(|row| !row.is_refused && self.caps.get(running.len() + from) != Some(&0))
        else {
            return;
        };
        if self.made_room_for == Some((*head_id, head.preemptions)) {
            // Another reason keeps the engine from admitting it: an adapter, a grammar, a transfer.
            return;
        }
        // Equal keys preempt none, and NaN is behind all of them.
        let place = |row: &RequestState, i: usize| {
            let key = keys.get(i).copied().filter(|key| !key.is_nan()).unwrap_or(f32::INFINITY);
            (if self.priority_first { row.priority } else { 0 }, key)
        };
        let first = place(head, running.len() + from);
        let blocks = |tokens: u32| self.block_tokens.map_or(0, |block_tokens| tokens.div_ceil(block_tokens));
        let reserved = self.growth.map_or(0, |growth| growth.reserve(running.len(), facts.total_blocks));
        let needed = blocks(head.known_tokens()).saturating_add(reserved).saturating_add(self.blocks_of_prompts(
            table,
            facts,
            running,
            head.priority,
        ));
        let (mut seats, mut free_blocks) = (facts.free_seats, facts.free_blocks);
        while seats == 0 || free_blocks < needed {
            let candidate = |(i, row_id): (usize, &RowId)| {
                let row = table.get(*row_id)?;
                let place = place(row, i);
                let is_behind =
                    if needs_seat || (chooses && !self.priority_first) { first < place } else { first.0 < place.0 };
                let computes = row.needed_tokens(facts.decode_tokens) > facts.decode_tokens.max(1);
                let stays = row.preemptions >= MOST_PREEMPTIONS || self.plan.preempted.contains(row_id);
                // Without a choice, one that computes its prompt stays.
                let victim = if chooses { victim_keys.get(i).copied().unwrap_or(f32::NAN) } else { 0.0 };
                let may_go = if chooses { !victim.is_nan() } else { !computes };
                let frees = blocks(row.computed_tokens()) + self.missing_blocks(row, facts, head.priority);
                (is_behind && may_go && !stays).then_some(((-victim, place), *row_id, frees))
            };
            let candidates = running.iter().enumerate().filter_map(candidate);
            // Among equal ones, the last in the list.
            let last = candidates.max_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(Ordering::Equal));
            let Some((_, row_id, frees)) = last else {
                self.plan.preempted.clear();
                return;
            };
            seats += 1;
            free_blocks = free_blocks.saturating_add(frees);
            self.plan.preempted.push(row_id);
        }
        self.made_room_for = Some((*head_id, head.preemptions));
    }
}
