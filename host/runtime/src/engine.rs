use meridian_core::{
    Description, EngineFacts, Markers, Phase, Plan, Planner, RequestTable, SchedulerConfig, Slot, Step, StepTime,
    StepTimeModel,
};

use crate::slot::DispatchSlot;
use crate::stats::{SlotStats, Source};

/// The mirror, the slot, the step-time model and the planner of one engine, driven once a step:
/// [`DispatchEngine::plan`], then the engine schedules, then [`DispatchEngine::scheduled`].
pub struct DispatchEngine {
    table: RequestTable,
    slot: DispatchSlot,
    planner: Planner,
    step_time: StepTimeModel,
    max_defer_ms: f32,
    block_tokens: u32,
    candidates: Vec<Slot>,
    last_source: Option<Source>,
    /// Steps whose end was not seen yet, oldest first: one when scheduling is synchronous, two when it runs ahead.
    in_flight: Vec<StepInFlight>,
    steps_ahead: usize,
    last_plan_ms: Option<f64>,
    preemptions: [u64; 3],
}

#[derive(Clone, Copy, Debug)]
struct StepInFlight {
    decode_tokens: u32,
    prefill_tokens: u32,
}

impl DispatchEngine {
    /// An engine without requests. `block_tokens` is the size of a KV block.
    #[must_use]
    pub fn new(slot: DispatchSlot, markers: Markers, scheduler: &SchedulerConfig, block_tokens: u32) -> Self {
        Self {
            table: RequestTable::new(markers),
            slot,
            planner: Planner::default(),
            step_time: StepTimeModel::default(),
            max_defer_ms: scheduler.max_defer_ms,
            block_tokens,
            candidates: Vec::new(),
            last_source: None,
            in_flight: Vec::new(),
            steps_ahead: 0,
            last_plan_ms: None,
            preemptions: [0; 3],
        }
    }

    /// How many steps the engine schedules before it has seen the result of one: 0 for synchronous scheduling, 1 for
    /// asynchronous. Step times are attributed accordingly.
    pub fn set_steps_ahead(&mut self, steps: usize) {
        self.steps_ahead = steps;
    }

    /// The mirror.
    #[must_use]
    pub fn table(&self) -> &RequestTable {
        &self.table
    }

    /// The mirror, to feed it.
    pub fn table_mut(&mut self) -> &mut RequestTable {
        &mut self.table
    }

    /// What the active policy says of itself.
    #[must_use]
    pub fn description(&self) -> &Description {
        self.slot.description()
    }

    /// What the slot has done.
    #[must_use]
    pub fn stats(&self) -> &SlotStats {
        self.slot.stats()
    }

    /// Who decided the last step.
    #[must_use]
    pub fn last_source(&self) -> Option<Source> {
        self.last_source
    }

    /// The learned step time.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        self.step_time.learned()
    }

    /// Preemptions of requests in prefill, think and output.
    #[must_use]
    pub fn preemptions(&self) -> [u64; 3] {
        self.preemptions
    }

    /// Plan one step over the running list and the waiting candidates, both in the engine's present order.
    pub fn plan(&mut self, facts: &EngineFacts, running: &[Slot], waiting: &[Slot]) -> &Plan {
        self.measure(facts.now_ms);
        self.candidates.clear();
        self.candidates.extend_from_slice(running);
        self.candidates.extend_from_slice(waiting);
        let step = self.step(facts, running, waiting);
        let (source, decision) = self.slot.decide(&step, &self.table, &self.candidates, self.block_tokens);
        self.last_source = Some(source);
        self.planner.plan(&self.table, facts, running, waiting, decision, self.max_defer_ms)
    }

    /// The engine scheduled the planned step, which began at `now_ms`: `given` tokens for each request.
    pub fn scheduled(&mut self, now_ms: f64, given: impl IntoIterator<Item = (Slot, u32)>) {
        let mut step = StepInFlight { decode_tokens: 0, prefill_tokens: 0 };
        for (slot, tokens) in given {
            let Some(row) = self.table.get(slot) else { continue };
            if row.phase() != Phase::Prefill && row.needed_tokens(0) <= 1 {
                step.decode_tokens = step.decode_tokens.saturating_add(tokens);
            } else {
                step.prefill_tokens = step.prefill_tokens.saturating_add(tokens);
            }
            self.table.scheduled(slot, tokens, now_ms);
        }
        self.planner.settle(&mut self.table, step.decode_tokens.saturating_add(step.prefill_tokens), now_ms);
        self.in_flight.push(step);
    }

    /// The request lost its KV blocks.
    pub fn preempted(&mut self, slot: Slot) {
        if let Some(row) = self.table.get(slot) {
            self.preemptions[row.phase() as usize] += 1;
            self.table.preempted(slot);
        }
    }

    /// The engine has nothing to do: the time until the next step is not a step's.
    pub fn idle(&mut self) {
        self.in_flight.clear();
        self.last_plan_ms = None;
    }

    /// A step takes from its plan to the next plan. With steps scheduled ahead, the plan that follows waits for an
    /// earlier step, whose batch the time is attributed to.
    fn measure(&mut self, now_ms: f64) {
        if let Some(last_ms) = self.last_plan_ms.replace(now_ms)
            && self.in_flight.len() > self.steps_ahead
        {
            let step = self.in_flight.remove(0);
            self.step_time.observe(step.decode_tokens, step.prefill_tokens, now_ms - last_ms);
        }
    }

    fn step(&self, facts: &EngineFacts, running: &[Slot], waiting: &[Slot]) -> Step {
        let EngineFacts {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            free_seats: _,
            waiting: all_waiting,
            decode_tokens,
        } = *facts;
        let count = |phase: Phase| {
            let in_phase = running.iter().filter(|slot| self.table.get(**slot).is_some_and(|row| row.phase() == phase));
            length(in_phase.count())
        };
        let StepTime { fixed_ms, decode_token_ms, prefill_token_ms } = self.step_time.learned().unwrap_or_default();
        Step {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            running: length(running.len()),
            running_think: count(Phase::Think),
            running_output: count(Phase::Output),
            waiting: all_waiting.max(length(waiting.len())),
            decode_tokens,
            fixed_ms,
            decode_token_ms,
            prefill_token_ms,
        }
    }
}

fn length(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
