mod causes;
pub(crate) mod memory;
mod overdue;
mod room;
mod units;

use meridian_policy_sdk::{Decision, State};

use self::units::Units;
use crate::table::RequestState;
use crate::{Ranker, RequestTable, RowId};

/// The engine's facts at the start of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineFacts {
    /// Time on the host's clock, milliseconds.
    pub now_ms: f64,
    /// The engine's own limit of tokens in a step.
    pub token_budget: u32,
    /// Free KV blocks.
    pub free_blocks: u32,
    /// All KV blocks.
    pub total_blocks: u32,
    /// Requests that can still be admitted.
    pub free_seats: u32,
    /// Requests that wait for admission, including those that are not candidates of this step.
    pub waiting: u32,
    /// Tokens that one decoding request takes in a step.
    pub decode_tokens: u32,
}

/// The plan of one step. Orders are permutations by construction; an empty order keeps the present one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Position in the new running list -> position in the present one.
    pub running_order: Vec<u32>,
    /// The same for the waiting candidates.
    pub waiting_order: Vec<u32>,
    /// Tokens the step may carry, from 1 to the engine's own budget.
    pub token_budget: u32,
    /// Requests that may take fewer tokens than they need, with their limits. 0 leaves a request out of the step and
    /// puts it at the end of its order. A prompt that must not be split has no cap but 0.
    pub token_caps: Vec<(RowId, u32)>,
    /// Running requests that give up their seat and their KV blocks before the step, for the first waiting request.
    /// They are still in `running_order`; from then on, they wait behind all others.
    pub preempted: Vec<RowId>,
    /// Waiting requests that were deferred for too long. If the engine passes over one for want of something that requests
    /// behind it would take, an adapter's place, it admits none of these.
    pub overdue: Vec<RowId>,
    /// Waiting requests that the engine ends before the step instead of serving them: they were never admitted, and their
    /// service level, which cannot be kept any more, refuses late requests. They are still in `waiting_order`.
    pub refused: Vec<RowId>,
    /// KV blocks that running requests have yet to take for prompts, which admission leaves to them.
    pub prompt_blocks: u32,
    /// Some prompts are computed in units of more than a token. A lowered budget that the engine leaves a part of may have been
    /// too small for one.
    pub has_units: bool,
    /// The decision would have left nothing to run in the step, so the planner lifted caps of 0.
    pub overruled: bool,
}

/// How an engine takes KV blocks as its requests grow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvGrowth {
    /// Groups of layers that take their own blocks from the same pool.
    pub groups: u32,
    /// Tokens beyond those of the step that need blocks: speculation.
    pub lookahead_tokens: u32,
    /// Free blocks that the engine leaves for each running request when it admits another.
    pub blocks_per_request: f64,
}

/// A request gives way at most this many times while others can: each time, its computed tokens are computed again.
const MOST_PREEMPTIONS: u32 = 3;

/// Below one in this many of all KV blocks, a request waits for blocks if no other cause is known.
const SHORT_OF_BLOCKS: u32 = 10;

/// Admission leaves at most one in this many of all KV blocks free.
const MOST_RESERVED: u32 = 10;

impl KvGrowth {
    /// Free blocks that admission leaves to `running` requests, of `total_blocks`: never more than a tenth.
    #[must_use]
    pub fn reserve(&self, running: usize, total_blocks: u32) -> u32 {
        ((self.blocks_per_request * running as f64) as u32).min(total_blocks / MOST_RESERVED)
    }
}

impl Default for KvGrowth {
    fn default() -> Self {
        Self { groups: 1, lookahead_tokens: 0, blocks_per_request: 0.0 }
    }
}

/// Turns decisions into plans and keeps the host's guarantees while doing so.
///
/// ```
/// use meridian_core::{Decision, EngineFacts, NewRequest, Planner, RequestTable};
///
/// let mut table = RequestTable::default();
/// let row_ids = [(); 2].map(|()| table.insert(&NewRequest::default()).unwrap());
/// let facts = EngineFacts { token_budget: 512, free_seats: 1, decode_tokens: 1, ..EngineFacts::default() };
/// let decision = Decision { keys: vec![2.0, 1.0], token_budget: Some(4096), ..Decision::default() };
/// let plan = Planner::default().plan(&table, &facts, &[], &row_ids, &decision, 2000.0).clone();
/// assert_eq!((plan.waiting_order, plan.token_budget), (vec![1, 0], 512));
/// ```
#[derive(Debug, Default)]
pub struct Planner {
    /// The engine has no order of its own: the plan defers every request that waits while a seat is free.
    owns_queues: bool,
    /// Tokens of a KV block, if known.
    block_tokens: Option<u32>,
    /// How the engine takes KV blocks, if it preempts the last request in its running list.
    growth: Option<KvGrowth>,
    /// Tokens of a state block, if the engine ends a part of a prompt only at the end of one.
    state_block: Option<u32>,
    /// The engine itself schedules by priority.
    priority_first: bool,
    /// Waiting requests may preempt running ones.
    preempts_for_waiting: bool,
    /// The waiting request that the latest preemption served, and its number of preemptions then.
    made_room_for: Option<(RowId, u32)>,
    plan: Plan,
    ranker: Ranker,
    keys: Vec<f32>,
    /// The effective caps of the decision, `u32::MAX` where one does not bind; empty without caps.
    caps: Vec<u32>,
    pinned: Vec<u32>,
    grants: Vec<u32>,
    /// Waiting candidates of the last plan, if one could be admitted, and whether its caps left them out.
    could_defer: Vec<(RowId, bool)>,
    budget_was_lowered: bool,
    /// The first waiting request of the last plan's order fits into the free KV blocks.
    head_fits: bool,
    /// The last plan changed the order of the waiting requests.
    reordered_waiting: bool,
    /// Free seats and KV blocks of the last plan, and whether requests waited.
    free_seats: u32,
    is_short_of_blocks: bool,
    /// Overdue requests that the last plan serves.
    rescued: Vec<RowId>,
    /// The request that a policy held for the sake of warm sessions, and that has its turn in the last plan; whether it has
    /// tokens there and surely KV blocks.
    has_its_turn: Option<(RowId, bool)>,
}

impl Planner {
    /// A planner for an engine without its own order: every wait counts, whether or not a plan changed anything.
    #[must_use]
    pub fn owning_queues() -> Self {
        Self { owns_queues: true, ..Self::default() }
    }

    /// A planner for an engine with KV blocks of `block_tokens` tokens.
    #[must_use]
    pub fn with_block_tokens(mut self, block_tokens: u32) -> Self {
        self.block_tokens = Some(block_tokens.max(1));
        self
    }

    /// Declare that the engine computes prompts in whole state blocks of so many tokens, all but the last part
    /// (`_mamba_block_aligned_split`, vllm/v1/core/sched/scheduler.py).
    pub fn compute_state_blocks(&mut self, tokens: u32) {
        self.state_block = Some(tokens.max(1));
    }

    /// Declare that the engine preempts the last request in its running list, or the least urgent one if it schedules by
    /// priority. In a step that may run short of KV blocks, the requests that lose least then stand last: requests that do
    /// not answer behind those that do, and before all of them one whose tokens take more than a step to compute again. A
    /// request that already has its tokens cannot go any more. Does nothing without [`Planner::with_block_tokens`].
    pub fn keep_answers_ahead(&mut self, growth: KvGrowth) {
        self.growth = Some(growth);
    }

    /// Declare that the engine itself schedules by priority, lower first. A policy then changes the order only among
    /// requests of one priority. The engine decides when a higher priority overtakes, and has its own rule for
    /// preemption.
    pub fn put_priority_first(&mut self) {
        self.priority_first = true;
    }

    /// Compare the keys of running and waiting requests from now on. While no seat is free for the first waiting
    /// request, running requests with higher keys give way to it, the highest first. While only KV blocks are short,
    /// running requests of a less urgent priority give way, if the engine schedules by priority. None gives way unless
    /// that makes enough room, while it computes its prompt, or more than three times. None gives way again for a
    /// waiting request that was not admitted the last time. Does nothing for an engine without its own queues.
    ///
    /// A decision with victim keys chooses among the running requests with higher keys itself: the lowest victim key goes
    /// first, for KV blocks too, and while it computes its prompt if the policy says so.
    pub fn preempt_for_waiting(&mut self) {
        self.preempts_for_waiting = true;
    }

    /// Plan one step from a checked `decision` over `running` followed by `waiting`.
    ///
    /// A request that policies have deferred for more than `max_defer_ms` gets tokens in this step, in addition to the
    /// policy's own order and budget. Other requests are left out if the engine's budget requires it. A plan that
    /// changes nothing (no order, budget or cap) defers those only that the engine passes over.
    pub fn plan(
        &mut self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        waiting: &[RowId],
        decision: &Decision,
        max_defer_ms: f32,
    ) -> &Plan {
        self.follow(table, facts, running, waiting, decision, max_defer_ms);
        if let (Some(growth), Some(block_tokens)) = (self.growth, self.block_tokens) {
            self.put_victims_last(table, facts, running, block_tokens, growth);
        }
        &self.plan
    }

    /// Fill `refused` of the plan that is made next. With nothing that runs, nobody is refused: to serve them makes no other
    /// request late.
    pub(crate) fn refuse(&mut self, table: &mut RequestTable, now_ms: f64, running: usize) {
        if running > 0 || !self.plan.refused.is_empty() {
            table.refuse(now_ms, running > 0, &mut self.plan.refused);
        }
    }

    /// The latest plan.
    #[must_use]
    pub fn latest(&self) -> &Plan {
        &self.plan
    }

    fn follow(
        &mut self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        waiting: &[RowId],
        decision: &Decision,
        max_defer_ms: f32,
    ) {
        self.could_defer.clear();
        self.rescued.clear();
        self.has_its_turn = None;
        self.head_fits = true;
        self.reordered_waiting = false;
        self.free_seats = facts.free_seats;
        self.is_short_of_blocks = facts.free_blocks < facts.total_blocks / SHORT_OF_BLOCKS;
        let engine_budget = facts.token_budget.max(1);
        // With less than one decode, no request could run.
        let least = facts.decode_tokens.clamp(1, engine_budget);
        self.plan.token_budget = decision.token_budget.unwrap_or(engine_budget).clamp(least, engine_budget);
        self.plan.token_caps.clear();
        self.plan.preempted.clear();
        self.plan.overdue.clear();
        self.plan.has_units = self.state_block.is_some() || table.has_whole_prompts();
        self.plan.overruled = false;
        self.plan.prompt_blocks =
            if waiting.is_empty() { 0 } else { self.blocks_of_prompts(table, facts, running, i32::MAX) };
        self.budget_was_lowered = self.plan.token_budget < engine_budget;
        self.caps.clear();
        if decision.keys.is_empty() && !self.owns_queues && !table.guards_shares() {
            self.plan.running_order.clear();
            self.plan.waiting_order.clear();
            self.fit_units(table, facts, running, waiting);
            self.is_short_of_blocks |= !self.fits(table, facts, running, waiting);
            return;
        }
        self.take_caps(table, facts, running, waiting, &decision.token_caps);
        let (running_keys, waiting_keys) = decision.keys.split_at(running.len().min(decision.keys.len()));
        let (running_caps, waiting_caps) = self.caps.split_at(running.len().min(self.caps.len()));
        fill_keys(running_keys, running.len(), running_caps, &mut self.keys);
        let running_changed = self.ranker.rank(&self.keys, &[], &mut self.plan.running_order);
        fill_keys(waiting_keys, waiting.len(), waiting_caps, &mut self.keys);
        let binds = |(row_id, cap): &(&RowId, &u32)| **cap != u32::MAX && table.get(**row_id).is_some();
        let candidates = running.iter().chain(waiting);
        self.plan.token_caps.extend(candidates.zip(&self.caps).filter(binds).map(|(row_id, cap)| (*row_id, *cap)));
        let overdue_waiting = self.pin_overdue(table, facts, waiting, max_defer_ms);
        let pinned: &[u32] = if overdue_waiting { &self.pinned } else { &[] };
        let waiting_changed = self.ranker.rank(&self.keys, pinned, &mut self.plan.waiting_order);
        let (running_caps, waiting_caps) = self.caps.split_at(running.len().min(self.caps.len()));
        let by_priority = |changed: bool, order: &mut [u32], row_ids: &[RowId], caps: &[u32], pinned: &[u32]| {
            changed && (!self.priority_first || sort_by_priority(table, order, row_ids, caps, pinned))
        };
        let waiting_changed = by_priority(waiting_changed, &mut self.plan.waiting_order, waiting, waiting_caps, pinned);
        let running_changed = by_priority(running_changed, &mut self.plan.running_order, running, running_caps, &[]);
        self.reordered_waiting = waiting_changed;
        if !waiting_changed {
            self.plan.waiting_order.clear();
        }
        if !running_changed {
            self.plan.running_order.clear();
        }
        self.fit_units(table, facts, running, waiting);
        self.head_fits = self.fits(table, facts, running, waiting);
        if self.preempts_for_waiting && !self.owns_queues {
            self.make_room(table, facts, running, waiting, decision);
        }
        let binding = self.owns_queues
            || running_changed
            || waiting_changed
            || self.budget_was_lowered
            || !self.plan.preempted.is_empty()
            || !self.plan.token_caps.is_empty();
        if facts.free_seats > 0 || !self.plan.preempted.is_empty() {
            let left_out = |i: usize| self.caps.get(running.len() + i) == Some(&0);
            self.could_defer.extend(waiting.iter().enumerate().map(|(i, row_id)| (*row_id, left_out(i))));
        }
        if binding {
            self.serve_overdue(table, facts, running, waiting, max_defer_ms);
        }
    }

    /// Whether the first waiting request fits into the free KV blocks; the requests behind it wait for it.
    fn fits(&self, table: &RequestTable, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) -> bool {
        let head = waiting.get(self.plan.waiting_order.first().map_or(0, |from| *from as usize));
        let (Some(row), Some(block_tokens)) = (head.and_then(|row_id| table.get(*row_id)), self.block_tokens) else {
            return true;
        };
        let reserved = self.growth.map_or(0, |growth| growth.reserve(running.len(), facts.total_blocks));
        let reserved = reserved.saturating_add(self.blocks_of_prompts(table, facts, running, row.priority));
        // The planner does not know how much of it the prefix cache has.
        row.known_tokens().div_ceil(block_tokens) <= facts.free_blocks.saturating_sub(reserved)
    }

    fn units(&self, facts: &EngineFacts) -> Units {
        Units::new(facts, self.state_block)
    }

    /// Fill `self.caps`. Less than a decode counts as nothing, and a prompt is given whole units of what the engine can
    /// compute. If the caps would leave the step empty, the running requests are served without caps, or the waiting
    /// ones if none runs.
    fn take_caps(
        &mut self,
        table: &RequestTable,
        facts: &EngineFacts,
        running: &[RowId],
        waiting: &[RowId],
        caps: &[u32],
    ) {
        let decode_tokens = facts.decode_tokens.max(1);
        let units = self.units(facts);
        self.caps.extend(running.iter().chain(waiting).zip(caps).map(|(row_id, cap)| match table.get(*row_id) {
            Some(row) if *cap >= row.needed_tokens(decode_tokens) => u32::MAX,
            Some(row) if *cap >= decode_tokens && row.needs_whole_prefill(decode_tokens) => u32::MAX,
            Some(row) if *cap >= decode_tokens => match units.near(row, *cap) {
                tokens if tokens >= row.needed_tokens(decode_tokens) => u32::MAX,
                tokens => tokens,
            },
            _ => 0,
        }));
        if self.caps.is_empty() {
            return;
        }
        let position = running.len().min(self.caps.len());
        let (running_caps, waiting_caps) = self.caps.split_at_mut(position);
        let admits = facts.free_seats > 0 && waiting_caps.iter().any(|cap| *cap > 0);
        // Beside running requests, an engine with its own queues may have no KV blocks for a waiting one.
        let fills_step = admits && (self.owns_queues || running.is_empty());
        if fills_step || running_caps.iter().any(|cap| *cap > 0) {
            return;
        }
        let could_run = if running.is_empty() { waiting_caps } else { running_caps };
        self.plan.overruled = !could_run.is_empty() && (facts.free_seats > 0 || !running.is_empty());
        could_run.fill(u32::MAX);
    }

    /// Make a lowered budget end where the engine can end: the first prompt that it would cut is given whole units, at least
    /// one. What the prefix cache has of waiting prompts is not known here, nor which of them the engine skips. So the engine's
    /// adapter leaves out a later prompt that must not be split and that the budget cuts all the same.
    fn fit_units(&mut self, table: &RequestTable, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) {
        if !self.budget_was_lowered || !self.plan.has_units {
            return;
        }
        let in_order = |order: &[u32], i: usize| order.get(i).map_or(i, |from| *from as usize);
        let mut left = self.plan.token_budget;
        for position in 0..running.len() + waiting.len().min(facts.free_seats as usize) {
            let i = match position.checked_sub(running.len()) {
                None => in_order(&self.plan.running_order, position),
                Some(position) => running.len() + in_order(&self.plan.waiting_order, position),
            };
            let row_id = if i < running.len() { running[i] } else { waiting[i - running.len()] };
            let Some(row) = table.get(row_id) else { continue };
            let cap = self.caps.get(i).copied().unwrap_or(u32::MAX);
            let tokens = row.needed_tokens(facts.decode_tokens).min(cap);
            if tokens > left {
                let raised = self.units(facts).near(row, left).min(cap).saturating_sub(left);
                self.plan.token_budget = self.plan.token_budget.saturating_add(raised).min(facts.token_budget.max(1));
                self.budget_was_lowered = self.plan.token_budget < facts.token_budget.max(1);
                return;
            }
            left -= tokens;
            if left == 0 {
                return;
            }
        }
    }

    /// After scheduling the step, note which waiting requests the last plan deferred. A request was deferred if a seat
    /// was free, and either the plan's lowered budget was used up or a later arrival was admitted before it. A lack of
    /// KV blocks does not count as a deferral.
    pub fn settle(&mut self, table: &mut RequestTable, scheduled_tokens: u32, now_ms: f64) {
        let budget_used_up = self.budget_was_lowered && self.head_fits && scheduled_tokens >= self.plan.token_budget;
        self.settle_causes(table, scheduled_tokens);
        let is_running = |row_id: &RowId| table.get(*row_id).is_none_or(|row| row.state == State::Running);
        let class = |row: &RequestState| if self.priority_first { row.priority } else { 0 };
        // For each priority, the admitted request that arrived last, and its position.
        let mut admitted: Vec<(i32, f64, usize)> = Vec::new();
        let running = self.could_defer.iter().enumerate().filter(|(_, (row_id, _))| is_running(row_id));
        for (position, (row_id, _)) in running {
            let Some(row) = table.get(*row_id) else { continue };
            match admitted.iter_mut().find(|(of, ..)| *of == class(row)) {
                Some((_, latest_ms, at)) if row.arrival_ms > *latest_ms => {
                    (*latest_ms, *at) = (row.arrival_ms, position)
                }
                Some(_) => {}
                None => admitted.push((class(row), row.arrival_ms, position)),
            }
        }
        if !admitted.is_empty() {
            self.settle_rules(table);
        }
        for (position, (row_id, left_out)) in self.could_defer.iter().copied().enumerate() {
            let Some(row) = table.get(row_id).filter(|row| row.state != State::Running) else { continue };
            let (own_class, arrival_ms) = (class(row), row.arrival_ms);
            let overtaker = admitted.iter().find(|(of, latest_ms, _)| *of >= own_class && arrival_ms < *latest_ms);
            if self.owns_queues || budget_used_up || left_out || overtaker.is_some() {
                table.defer(row_id, now_ms);
            }
            if let Some((.., by)) = overtaker {
                self.settle_overtaking(table, row_id, position, *by, now_ms);
            } else if left_out {
                table.ledger.put_off.push(row_id);
            }
        }
        self.could_defer.clear();
    }
}

/// Sort an order by priority, stably; requests with cap 0 stay last, unless they are pinned. Returns whether it still changes
/// anything.
fn sort_by_priority(table: &RequestTable, order: &mut [u32], row_ids: &[RowId], caps: &[u32], pinned: &[u32]) -> bool {
    order.sort_by_key(|from| {
        let from = *from as usize;
        let priority = table.get(row_ids[from]).map_or(i32::MAX, |row| row.priority);
        let is_pinned = pinned.get(from).is_some_and(|urgency| *urgency > 0);
        (caps.get(from) == Some(&0) && !is_pinned, priority)
    });
    order.iter().enumerate().any(|(position, from)| position != *from as usize)
}

/// Write the keys to order `candidates` by into `out`, all equal if there are none; requests that are left out go last, behind
/// those whose key is no number too: the engine would wait for the first that has no tokens.
fn fill_keys(keys: &[f32], candidates: usize, caps: &[u32], out: &mut Vec<f32>) {
    out.clear();
    out.extend_from_slice(keys);
    out.resize(candidates, 0.0);
    for (key, cap) in out.iter_mut().zip(caps) {
        if *cap == 0 {
            *key = f32::NAN;
        } else if key.is_nan() {
            *key = f32::INFINITY;
        }
    }
}
