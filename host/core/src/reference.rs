//! A model of how vLLM carries out a plan, for the simulator, tests and examples.

use std::collections::VecDeque;

use crate::{Plan, RequestTable, RowId, WAITING_WINDOW};

/// The two queues of an engine, and the execution of a plan on them, after vllm/v1/core/sched/scheduler.py
/// (`Scheduler.schedule`) and its wrapper in python/meridian/vllm. Running requests go in their order while tokens are
/// left; the last is preempted when KV blocks are short. Waiting requests follow, unless a request was preempted.
///
/// ```
/// use meridian_core::{EngineStep, NewRequest, Plan, Queues, RequestTable, RowId};
///
/// /// Requests that need one token each, and KV blocks without end.
/// struct Ample(Vec<(RowId, u32)>);
///
/// impl EngineStep for Ample {
///     fn needed_tokens(&mut self, _: RowId) -> u32 {
///         1
///     }
///     fn give(&mut self, row: RowId, tokens: u32) {
///         self.0.push((row, tokens));
///     }
/// }
///
/// let mut table = RequestTable::default();
/// let rows = [(); 2].map(|()| table.insert(&NewRequest::default()).unwrap());
/// let mut queues = Queues::default();
/// queues.waiting.extend(rows);
/// let mut step = Ample(Vec::new());
/// queues.carry_out(&Plan { token_budget: 8, waiting_order: vec![1, 0], ..Plan::default() }, 1, &mut step);
/// assert_eq!((step.0, queues.running.len()), (vec![(rows[1], 1)], 1));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Queues {
    /// Admitted requests.
    pub running: Vec<RowId>,
    /// Waiting requests, in the order of admission.
    pub waiting: VecDeque<RowId>,
    /// Caps of the step by position in the table, `u32::MAX` for none.
    caps: Vec<u32>,
    capped: Vec<RowId>,
    /// Free seats of the step, where the newest who wait are behind the oldest.
    gathered: Option<usize>,
    reordered: Vec<RowId>,
    /// Running requests that give way to waiting ones in the step.
    preempted_for_waiting: Vec<RowId>,
}

/// The engine's actions on single requests while [`Queues::carry_out`] goes through them.
///
/// ```
/// use meridian_core::{EngineStep, RowId};
///
/// /// An engine whose prompts may not be split: a request is admitted with all it needs, or waits.
/// struct Whole(u32);
///
/// impl EngineStep for Whole {
///     fn needed_tokens(&mut self, _: RowId) -> u32 {
///         self.0
///     }
///     fn admit(&mut self, _: RowId, most: u32, _: &[RowId]) -> Option<u32> {
///         (most >= self.0).then_some(self.0)
///     }
///     fn give(&mut self, _: RowId, _: u32) {}
/// }
/// ```
pub trait EngineStep {
    /// Tokens that the request would take if the step had room for all, at least 1 unless it has none to compute.
    fn needed_tokens(&mut self, row: RowId) -> u32;

    /// Of `tokens` that a running request could have, those that the engine computes; 0 to pass over it.
    fn units(&mut self, _row: RowId, tokens: u32) -> u32 {
        tokens
    }

    /// Take the KV blocks for `tokens` more tokens of a running request; false when there are too few.
    fn grow(&mut self, _row: RowId, _tokens: u32) -> bool {
        true
    }

    /// The index of the running request that loses its KV blocks; `None` for the last.
    fn victim(&mut self, _running: &[RowId]) -> Option<usize> {
        None
    }

    /// Note that the request has lost its KV blocks and waits again.
    fn preempted(&mut self, _row: RowId) {}

    /// Admit a waiting request beside the running ones, with at most `most` tokens in this step. Returns how many it
    /// takes, at least 1, or `None` when it and the requests behind it must wait.
    fn admit(&mut self, row: RowId, most: u32, _running: &[RowId]) -> Option<u32> {
        Some(self.needed_tokens(row).min(most))
    }

    /// Note that the request computes `tokens` tokens in this step, at least 1.
    fn give(&mut self, row: RowId, tokens: u32);
}

/// A step of an engine with KV memory without end, over the requests of a table. It notes what the engine does; the
/// caller reports it when the step is carried out.
///
/// ```
/// use meridian_core::{NewRequest, Plan, Queues, RequestTable, TableStep};
///
/// let mut table = RequestTable::default();
/// let request = NewRequest { prompt_tokens: 12, ..NewRequest::default() };
/// let row = table.insert(&request).unwrap();
/// let mut queues = Queues::default();
/// queues.waiting.push_back(row);
/// let mut step = TableStep::new(&table, 1);
/// queues.carry_out(&Plan { token_budget: 8, ..Plan::default() }, 1, &mut step);
/// assert_eq!((step.admitted, step.given), (vec![row], vec![(row, 8)]));
/// ```
#[derive(Debug)]
pub struct TableStep<'a> {
    table: &'a RequestTable,
    decode_tokens: u32,
    admits: Admits,
    /// Requests that were admitted.
    pub admitted: Vec<RowId>,
    /// Requests that lost their KV blocks.
    pub preempted: Vec<RowId>,
    /// Requests that compute tokens in the step, and how many.
    pub given: Vec<(RowId, u32)>,
}

/// The waiting requests that a [`TableStep`] admits.
///
/// ```
/// assert_ne!(meridian_core::Admits::default(), meridian_core::Admits::Nobody);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admits {
    /// Every one that there is a token for.
    #[default]
    Parts,
    /// Those whose whole prompt fits into the step.
    WholePrompts,
    /// Those for whom the step has a state block of so many tokens, in which a hybrid model computes prompts.
    StateBlocks(u32),
    /// None, as without free KV blocks.
    Nobody,
}

impl<'a> TableStep<'a> {
    /// A step in which a decoding request takes `decode_tokens` tokens.
    #[must_use]
    pub fn new(table: &'a RequestTable, decode_tokens: u32) -> Self {
        let (admitted, preempted, given) = (Vec::new(), Vec::new(), Vec::new());
        Self { table, decode_tokens, admits: Admits::default(), admitted, preempted, given }
    }

    /// The same, admitting these requests only.
    #[must_use]
    pub fn admitting(self, admits: Admits) -> Self {
        Self { admits, ..self }
    }
}

impl EngineStep for TableStep<'_> {
    fn needed_tokens(&mut self, row: RowId) -> u32 {
        self.table.get(row).map_or(0, |request| request.needed_tokens(self.decode_tokens))
    }

    fn units(&mut self, row: RowId, tokens: u32) -> u32 {
        match (self.admits, self.table.get(row)) {
            (Admits::StateBlocks(block), Some(request)) if tokens < request.needed_tokens(self.decode_tokens) => {
                let computed = request.computed_tokens();
                ((computed + tokens) / block * block).saturating_sub(computed)
            }
            _ => tokens,
        }
    }

    fn preempted(&mut self, row: RowId) {
        self.preempted.push(row);
    }

    fn admit(&mut self, row: RowId, most: u32, _: &[RowId]) -> Option<u32> {
        let needed = self.needed_tokens(row);
        let fits = match self.admits {
            Admits::Parts | Admits::StateBlocks(_) => true,
            Admits::WholePrompts => needed <= most,
            Admits::Nobody => false,
        };
        let tokens = self.units(row, needed.min(most));
        if !fits || tokens == 0 {
            return None;
        }
        self.admitted.push(row);
        Some(tokens)
    }

    fn give(&mut self, row: RowId, tokens: u32) {
        self.given.push((row, tokens));
    }
}

impl Queues {
    /// Number of requests in both queues.
    #[must_use]
    pub fn len(&self) -> usize {
        self.running.len() + self.waiting.len()
    }

    /// Whether there is no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Carry out a plan whose running and waiting candidates are the front of these queues, with at most `max_running`
    /// admitted requests. Returns the tokens given.
    pub fn carry_out(&mut self, plan: &Plan, max_running: usize, step: &mut impl EngineStep) -> u32 {
        self.arrange(plan);
        self.serve(plan.token_budget, max_running, step)
    }

    /// Put the newest waiting requests behind the oldest ones, so that both are among the [`WAITING_WINDOW`] that the plan of
    /// this step sees: where the late go last, those who can be in time are the newest. [`Queues::arrange`] puts those of them
    /// back that cannot be admitted to `free_seats`.
    pub fn gather(&mut self, free_seats: usize) {
        if self.waiting.len() > WAITING_WINDOW {
            self.waiting.make_contiguous()[WAITING_WINDOW / 2..].rotate_right(WAITING_WINDOW / 2);
            self.gathered = Some(free_seats);
        }
    }

    /// The window in the order of the plan: who may be admitted, then the oldest; the newest go behind all others again.
    fn spread(&mut self, order: &[u32], free_seats: usize) {
        let window: Vec<RowId> = self.waiting.drain(..WAITING_WINDOW).collect();
        let order: Vec<usize> = match order {
            [] => (0..window.len()).collect(),
            order => order.iter().map(|from| *from as usize).collect(),
        };
        let (first, rest) = order.split_at(free_seats.min(order.len()));
        let is_old = |from: &&usize| **from < WAITING_WINDOW / 2;
        self.waiting.extend(rest.iter().filter(|from| !is_old(from)).map(|from| window[*from]));
        for from in rest.iter().rev().filter(is_old).chain(first.iter().rev()) {
            self.waiting.push_front(window[*from]);
        }
    }

    /// The first half: apply the orders of the plan, and its caps for the next [`Queues::serve`]. Refused requests leave the
    /// queue; the caller removes them from its table.
    pub fn arrange(&mut self, plan: &Plan) {
        self.lift_caps();
        reorder(&mut self.running, &plan.running_order, &mut self.reordered);
        let window = plan.waiting_order.len();
        if let Some(free_seats) = self.gathered.take() {
            self.spread(&plan.waiting_order, free_seats);
        } else if window > 0 {
            reorder(&mut self.waiting.make_contiguous()[..window], &plan.waiting_order, &mut self.reordered);
        }
        if !plan.refused.is_empty() {
            self.waiting.retain(|row| !plan.refused.contains(row));
        }
        self.preempted_for_waiting.clone_from(&plan.preempted);
        for (row, cap) in &plan.token_caps {
            if self.caps.len() <= row.index() {
                self.caps.resize(row.index() + 1, u32::MAX);
            }
            self.caps[row.index()] = *cap;
            self.capped.push(*row);
        }
    }

    /// The second half: run one step of at most `token_budget` tokens. Returns the tokens given.
    pub fn serve(&mut self, token_budget: u32, max_running: usize, step: &mut impl EngineStep) -> u32 {
        let preempted_for_waiting = std::mem::take(&mut self.preempted_for_waiting);
        self.running.retain(|row| !preempted_for_waiting.contains(row));
        for row in &preempted_for_waiting {
            step.preempted(*row);
        }
        let mut left = self.serve_all(token_budget, max_running, step);
        if left == token_budget && preempted_for_waiting.is_empty() && !self.capped.is_empty() {
            // Whom the plan kept the step for is not admitted, or stands behind one that it left out: without caps then, as
            // vLLM's adapter does it (`_apply_caps` in python/meridian/vllm/step.py).
            self.lift_caps();
            left = self.serve_all(token_budget, max_running, step);
        }
        self.waiting.extend(preempted_for_waiting);
        self.lift_caps();
        token_budget - left
    }

    /// Running requests, then waiting ones unless one was preempted; returns the rest of the budget.
    fn serve_all(&mut self, token_budget: u32, max_running: usize, step: &mut impl EngineStep) -> u32 {
        let (left, preempted) = self.serve_running(token_budget, step);
        if preempted { left } else { self.admit(left, max_running, step) }
    }

    fn lift_caps(&mut self) {
        for row in self.capped.drain(..) {
            self.caps[row.index()] = u32::MAX;
        }
    }

    /// Returns the rest of the budget, and whether a request was preempted.
    fn serve_running(&mut self, budget: u32, step: &mut impl EngineStep) -> (u32, bool) {
        let (mut left, mut preempted) = (budget, false);
        let mut position = 0;
        while position < self.running.len() && left > 0 {
            let row = self.running[position];
            let tokens = step.needed_tokens(row).min(left).min(self.cap(row));
            let tokens = step.units(row, tokens);
            if tokens == 0 {
                position += 1;
                continue;
            }
            while !step.grow(row, tokens) {
                preempted = true;
                // If the first one goes itself, the step is empty.
                let others = usize::from(left == budget && position + 1 < self.running.len());
                if self.preempt(position + others, step) == row {
                    return (left, preempted);
                }
            }
            step.give(row, tokens);
            left -= tokens;
            position += 1;
        }
        (left, preempted)
    }

    /// Preempt one of the requests from `position` on.
    fn preempt(&mut self, position: usize, step: &mut impl EngineStep) -> RowId {
        let candidates = &self.running[position..];
        let victim = step.victim(candidates).unwrap_or(candidates.len() - 1);
        let row = self.running.remove(position + victim);
        step.preempted(row);
        self.waiting.push_front(row);
        row
    }

    /// Admit waiting requests in their order; returns the rest of the budget.
    fn admit(&mut self, budget: u32, max_running: usize, step: &mut impl EngineStep) -> u32 {
        let mut left = budget;
        while left > 0 && self.running.len() < max_running {
            let Some(row) = self.waiting.front().copied() else { break };
            let most = self.cap(row).min(left);
            let admitted = if most == 0 { None } else { step.admit(row, most, &self.running) };
            let Some(tokens) = admitted.map(|tokens| tokens.min(most)).filter(|tokens| *tokens > 0) else { break };
            self.waiting.pop_front();
            self.running.push(row);
            step.give(row, tokens);
            left -= tokens;
        }
        left
    }

    fn cap(&self, row: RowId) -> u32 {
        self.caps.get(row.index()).copied().unwrap_or(u32::MAX)
    }
}

/// Put `rows` into `order`; an empty order leaves them unchanged.
fn reorder(rows: &mut [RowId], order: &[u32], scratch: &mut Vec<RowId>) {
    if !order.is_empty() {
        scratch.clear();
        scratch.extend(order.iter().map(|from| rows[*from as usize]));
        rows.copy_from_slice(scratch);
    }
}
