//! Requests that were deferred for too long, and that run whatever the policy decides.

use super::{EngineFacts, Planner};
use crate::table::RequestState;
use crate::{RequestTable, RowId};

impl Planner {
    /// Whether a waiting candidate of the last plan runs because it was deferred for too long.
    #[must_use]
    pub fn is_overdue(&self, waiting_position: usize) -> bool {
        self.pinned.get(waiting_position).is_some_and(|urgency| *urgency > 0)
    }

    /// Fill `self.pinned` for the waiting candidates that were deferred for too long, the longest first, and those whose service
    /// level is owed its least share after them. Of those that are held for the sake of warm sessions, the one that waited
    /// longest has its turn.
    pub(super) fn pin_overdue(
        &mut self,
        table: &RequestTable,
        facts: &EngineFacts,
        waiting: &[RowId],
        max_defer_ms: f32,
    ) -> bool {
        self.pinned.clear();
        let running = self.caps.len().saturating_sub(waiting.len());
        let mut turn: Option<(f64, usize)> = None;
        for (i, row_id) in waiting.iter().enumerate() {
            let row = table.get(*row_id).filter(|row| !row.is_refused);
            let left_out = self.caps.get(running + i) == Some(&0);
            let overdue = row.and_then(|row| table.overdue_ms(row, facts.now_ms, max_defer_ms, left_out));
            self.pinned.push(match overdue {
                Some((ms, false)) => ms.ceil() as u32,
                _ => 0,
            });
            if let Some((ms, true)) = overdue
                && turn.is_none_or(|(longest_ms, _)| ms > longest_ms)
            {
                turn = Some((ms, i));
            }
        }
        if let Some((ms, i)) = turn {
            self.pinned[i] = ms.ceil() as u32;
            self.has_its_turn = Some((waiting[i], false));
        }
        let overdue = waiting.iter().zip(&self.pinned).filter(|(_, urgency)| **urgency > 0);
        self.plan.overdue.extend(overdue.map(|(row_id, _)| *row_id));
        if table.guards_shares() {
            for position in table.owed(waiting) {
                self.pinned[position] = self.pinned[position].max(1);
            }
        }
        self.pinned.iter().any(|urgency| *urgency > 0)
    }

    /// Ensure that overdue requests get tokens in this step, by granting every candidate its tokens explicitly.
    pub(super) fn serve_overdue(
        &mut self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        waiting: &[RowId],
        max_defer_ms: f32,
    ) {
        let engine_budget = facts.token_budget.max(1);
        let overdue_running = |row_id: RowId| {
            table.get(row_id).is_some_and(|row| facts.now_ms - row.last_progress_ms > f64::from(max_defer_ms))
        };
        // They are at the head. Only requests of a higher priority stand before them; then they wait for the engine.
        let at_head = |i: &usize| self.plan.waiting_order.get(*i).map_or(*i, |from| *from as usize);
        let is_pinned = |i: &usize| self.pinned.get(at_head(i)).is_some_and(|urgency| *urgency > 0);
        let overdue_waiting = (0..waiting.len()).take_while(is_pinned).count().min(facts.free_seats as usize);
        if overdue_waiting == 0 && !running.iter().any(|row_id| overdue_running(*row_id)) {
            return;
        }
        let units = self.units(facts);
        let row = |row_id: RowId| table.get(row_id);
        let need = |row_id: RowId| row(row_id).map_or(1, |row| row.needed_tokens(facts.decode_tokens));
        let least = |row_id: RowId| row(row_id).map_or(1, |row| units.least(row));
        let is_whole = |row_id: RowId| row(row_id).is_some_and(|row| row.needs_whole_prefill(facts.decode_tokens));
        // The rescue of a long prefill must not stall everything else if it can be split: it gets the policy's share
        // for prompts, within limits, in units of what the engine can compute.
        let decodes = (running.len() as u32).saturating_mul(facts.decode_tokens.max(1));
        let for_prompts = self.plan.token_budget.saturating_sub(decodes);
        let quantum = for_prompts.clamp(engine_budget / 32, engine_budget / 8).max(facts.decode_tokens).max(1);
        let share = |row_id: RowId| row(row_id).map_or(1, |row| units.near(row, quantum));
        let within = |row_id: RowId, most: u32| row(row_id).map_or(most.min(1), |row| units.within(row, most));
        self.grants.clear();
        self.grants.resize(running.len() + waiting.len(), 0);
        let mut reserved = 0u32;
        let mut overdue: Vec<usize> = (0..running.len()).filter(|i| overdue_running(running[*i])).collect();
        overdue.sort_by(|a, b| {
            let since = |i: &usize| table.get(running[*i]).map_or(0.0, |row| row.last_progress_ms);
            since(a).total_cmp(&since(b))
        });
        let first_waiting = |i: usize| self.plan.waiting_order.get(i).map_or(i, |from| *from as usize);
        let row_id_at = |i: usize| if i < running.len() { running[i] } else { waiting[i - running.len()] };
        let reserved_blocks = self.growth.map_or(0, |growth| growth.reserve(running.len(), facts.total_blocks));
        let mut blocks_left = facts.free_blocks.saturating_sub(reserved_blocks).saturating_sub(self.plan.prompt_blocks);
        let block_tokens = self.block_tokens;
        let blocks = |row_id: RowId| {
            let known = row(row_id).map_or(0, RequestState::known_tokens);
            block_tokens.map_or(0, |block_tokens| known.div_ceil(block_tokens))
        };
        // A prompt that must not be split, and that no step has room for beside all decodes, goes before them, all but one: they
        // may be overdue in every step too.
        let first = (overdue_waiting > 0).then(|| running.len() + first_waiting(0));
        let with_one = |row_id: RowId| need(row_id).saturating_add(facts.decode_tokens.max(1));
        let fits_alone = |row_id: RowId| is_whole(row_id) && with_one(row_id) <= engine_budget;
        let lacks_room = |row_id: RowId| fits_alone(row_id) && need(row_id) > engine_budget.saturating_sub(decodes);
        if let Some(i) = first.filter(|i| lacks_room(row_id_at(*i)) && blocks(row_id_at(*i)) <= blocks_left) {
            reserved = least(row_id_at(i));
            self.grants[i] = reserved;
        }
        for &i in &overdue {
            // Requests before it are served first.
            let grant = within(row_id_at(i), share(row_id_at(i)).min(engine_budget - reserved));
            if grant > 0 {
                self.grants[i] = grant;
                self.rescued.push(row_id_at(i));
                reserved += grant;
            }
        }
        // A waiting request takes its tokens only if the engine admits it, in order, while there are KV blocks. Tokens
        // reserved behind a request that does not fit would be wasted. Whether the first fits depends on the prefix
        // cache, so the plan tries it. While others run, the overdue waiting requests share one quantum: after a long
        // queue many are overdue at once, and a step full of their prompts would delay every answer.
        let mut for_waiting = if running.is_empty() { engine_budget } else { quantum };
        // The least that the engine can compute may be more than that; each running request keeps room for a decode.
        let not_granted = self.grants[..running.len()].iter().filter(|grant| **grant == 0).count();
        let decodes = u32::try_from(not_granted).unwrap_or(u32::MAX).saturating_mul(facts.decode_tokens.max(1));
        for i in (0..overdue_waiting).map(|i| running.len() + first_waiting(i)) {
            let row_id = row_id_at(i);
            let left = engine_budget - reserved;
            if self.grants[i] == 0 {
                let most = match least(row_id) {
                    _ if is_whole(row_id) => left.saturating_sub(decodes),
                    least if for_waiting > 0 => share(row_id).min(for_waiting.max(least)).min(left),
                    _ => 0,
                };
                self.grants[i] = within(row_id, most);
                reserved += self.grants[i];
            }
            if self.grants[i] == 0 {
                break;
            }
            self.rescued.push(row_id);
            for_waiting = for_waiting.saturating_sub(self.grants[i]);
            let Some(left) = blocks_left.checked_sub(blocks(row_id)) else { break };
            blocks_left = left;
            if let Some((turn, could_run)) = &mut self.has_its_turn {
                *could_run |= *turn == row_id;
            }
        }
        // The rest, in the plan's order, from the remaining budgets of the policy and the engine.
        let mut left = self.plan.token_budget.min(engine_budget - reserved);
        let mut unreserved = engine_budget - reserved;
        let total_running = running.len();
        for position in 0..total_running + waiting.len() {
            let i = if position < total_running {
                self.plan.running_order.get(position).map_or(position, |from| *from as usize)
            } else {
                total_running + first_waiting(position - total_running)
            };
            if self.grants[i] > 0 {
                continue;
            }
            let row_id = row_id_at(i);
            let cap = self.caps.get(i).copied().unwrap_or(u32::MAX);
            // With less than it needs, it has the engine's whole budget to itself, as in stock.
            let is_last = left > 0 && is_whole(row_id);
            let grant = if is_last { need(row_id).min(cap).min(unreserved) } else { within(row_id, cap.min(left)) };
            self.grants[i] = grant;
            left = left.saturating_sub(grant);
            unreserved -= grant;
        }
        self.plan.token_budget = self.grants.iter().sum::<u32>().clamp(1, engine_budget);
        self.plan.token_caps.clear();
        for (i, grant) in self.grants.iter().enumerate() {
            let row_id = row_id_at(i);
            if *grant < need(row_id) && (*grant == 0 || !is_whole(row_id)) {
                self.plan.token_caps.push((row_id, *grant));
            }
        }
        self.budget_was_lowered = true;
    }
}
