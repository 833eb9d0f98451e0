//! KV blocks that running requests grow into: who stands last where they may run short, and what prompts have yet to take.

use std::cmp::Reverse;
use std::collections::HashSet;

use meridian_policy_sdk::Phase;

use super::{EngineFacts, KvGrowth, MOST_PREEMPTIONS, Planner};
use crate::table::RequestState;
use crate::{RequestTable, RowId};

/// A loss of KV blocks is large from so many times the median of all running requests.
const LARGE: u32 = 4;

/// What preemptions of the running requests would cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Losses {
    large_tokens: u32,
}

/// How long a request keeps its KV blocks while others can give up theirs: the lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Kept {
    /// It was preempted often enough.
    is_spent: bool,
    /// Its tokens take more than a step to compute again, and are many times those of the others.
    loses_much: bool,
    answers: bool,
}

impl Losses {
    /// Of running requests with `computed` tokens each, in an engine with steps of `step_tokens`.
    pub(crate) fn new(computed: impl Iterator<Item = u32>, step_tokens: u32) -> Self {
        let mut computed: Vec<u32> = computed.collect();
        let middle = computed.len().saturating_sub(1) / 2;
        let median = if computed.is_empty() { 0 } else { *computed.select_nth_unstable(middle).1 };
        Self { large_tokens: step_tokens.max(median.saturating_mul(LARGE)) }
    }

    pub(crate) fn kept(self, row: &RequestState) -> Kept {
        Kept {
            is_spent: row.preemptions >= MOST_PREEMPTIONS,
            loses_much: row.computed_tokens() > self.large_tokens,
            answers: row.phase() == Phase::Output,
        }
    }
}

impl Planner {
    /// Plan for a step that may run short of KV blocks: put those last that give up theirs. The engine preempts only requests
    /// that stand behind the one that lacks blocks, and ends the step if that one goes itself.
    pub(super) fn put_victims_last(
        &mut self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        block_tokens: u32,
        growth: KvGrowth,
    ) {
        if !self.is_short(table, facts, running, block_tokens, growth) {
            return;
        }
        let mut order = std::mem::take(&mut self.plan.running_order);
        if order.is_empty() {
            order.extend((0..running.len()).map(|position| position as u32));
        }
        let row = |from: &u32| table.get(running[*from as usize]);
        // The engine would serve them if they stood first.
        let left_out: HashSet<RowId> =
            self.plan.token_caps.iter().filter(|(_, cap)| *cap == 0).map(|(row_id, _)| *row_id).collect();
        let is_left_out = |from: &u32| left_out.contains(&running[*from as usize]);
        if self.priority_first {
            // The engine's own order: the least urgent goes first, and of those the youngest.
            let place = |from: &u32| row(from).map_or((i32::MAX, f64::MAX), |row| (row.priority, row.arrival_ms));
            order.sort_by(|a, b| {
                let ((a_priority, a_ms), (b_priority, b_ms)) = (place(a), place(b));
                is_left_out(a).cmp(&is_left_out(b)).then(a_priority.cmp(&b_priority)).then(a_ms.total_cmp(&b_ms))
            });
        } else {
            let rows = running.iter().filter_map(|row_id| table.get(*row_id));
            let losses = Losses::new(rows.map(RequestState::computed_tokens), facts.token_budget);
            order.sort_by_key(|from| (is_left_out(from), Reverse(row(from).map(|row| losses.kept(row)))));
        }
        if order.iter().enumerate().all(|(position, from)| position == *from as usize) {
            order.clear();
        }
        self.plan.running_order = order;
        self.leave_decodes_their_tokens(table, facts, running);
    }

    /// Whether the running requests may need more KV blocks in this step than are free.
    fn is_short(
        &self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        block_tokens: u32,
        growth: KvGrowth,
    ) -> bool {
        let mut tokens_left = self.plan.token_budget;
        let mut blocks = 0u64;
        for position in 0..running.len() {
            let Some(row) = table.get(running[self.running_at(position)]) else { continue };
            let tokens = row.needed_tokens(facts.decode_tokens).min(tokens_left);
            tokens_left -= tokens;
            let computed = row.computed_tokens();
            let held = computed.div_ceil(block_tokens);
            let needed = computed.saturating_add(tokens).saturating_add(growth.lookahead_tokens);
            blocks += u64::from(needed.div_ceil(block_tokens) - held) * u64::from(growth.groups);
        }
        blocks > u64::from(facts.free_blocks)
    }

    /// The index of the running request at this position of the plan.
    fn running_at(&self, position: usize) -> usize {
        self.plan.running_order.get(position).map_or(position, |from| *from as usize)
    }

    /// Cap prompts that stand before decodes: they would take all tokens of the step.
    fn leave_decodes_their_tokens(&mut self, table: &RequestTable, facts: &EngineFacts, running: &[RowId]) {
        let decode_tokens = facts.decode_tokens.max(1);
        let rows = |position| table.get(running[self.running_at(position)]);
        let is_decode =
            |position: &usize| rows(*position).is_some_and(|row| row.needed_tokens(decode_tokens) <= decode_tokens);
        let Some(last) = (0..running.len()).rev().find(is_decode) else { return };
        let decodes = (0..=last).filter(is_decode).count() as u32;
        let mut left = self.plan.token_budget.saturating_sub(decodes.saturating_mul(decode_tokens)).max(decode_tokens);
        for position in 0..last {
            let row_id = running[self.running_at(position)];
            let Some(row) = table.get(row_id) else { continue };
            let needed = row.needed_tokens(decode_tokens);
            if needed <= decode_tokens || row.needs_whole_prefill(decode_tokens) {
                continue;
            }
            let cap = left.max(decode_tokens);
            let taken = match self.plan.token_caps.iter_mut().find(|(of, _)| *of == row_id) {
                Some((_, own)) => {
                    *own = (*own).min(cap);
                    needed.min(*own)
                }
                None if needed > cap => {
                    self.plan.token_caps.push((row_id, cap));
                    cap
                }
                None => needed,
            };
            left = left.saturating_sub(taken);
        }
    }

    /// Whether the engine is known to keep every KV block of a request, all from one pool.
    pub(crate) fn keeps_all_blocks(&self) -> bool {
        matches!(self.growth, Some(KvGrowth { groups: 1, .. }))
    }

    /// KV blocks that the running requests have yet to take for tokens that they already have, most of them of prompts. A
    /// prompt that is admitted beside them has to fit into the rest, or one of them would be preempted. Where the engine
    /// schedules by priority, one of `priority` waits for no less urgent request.
    pub(crate) fn blocks_of_prompts(
        &self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        priority: i32,
    ) -> u32 {
        let rows = running.iter().filter_map(|row_id| table.get(*row_id));
        rows.map(|row| self.missing_blocks(row, facts, priority)).fold(0, u32::saturating_add)
    }

    /// The part of [`Planner::blocks_of_prompts`] of one request. 0 for engines whose layers take blocks in several groups:
    /// some of these give blocks back as a prompt goes on.
    pub(super) fn missing_blocks(&self, row: &RequestState, facts: &EngineFacts, priority: i32) -> u32 {
        let (Some(KvGrowth { groups: 1, .. }), Some(block_tokens)) = (self.growth, self.block_tokens) else { return 0 };
        let is_prompt = row.needed_tokens(facts.decode_tokens) > facts.decode_tokens.max(1);
        if !is_prompt || (self.priority_first && row.priority > priority) {
            return 0;
        }
        row.known_tokens().div_ceil(block_tokens).saturating_sub(row.computed_tokens().div_ceil(block_tokens))
    }
}
