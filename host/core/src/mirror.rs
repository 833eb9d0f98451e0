use meridian_policy_sdk::{Phase, Step};

use crate::{EngineFacts, Markers, RequestTable, Slot, StepTime, StepTimeModel};

/// Everything the host knows of one engine: its requests, and how long its steps take. Driven once a step:
/// [`EngineMirror::begin_step`], then the engine schedules, then [`EngineMirror::scheduled`].
///
/// ```
/// use meridian_core::{EngineFacts, EngineMirror, Markers, NewRequest, RequestId};
///
/// let mut mirror = EngineMirror::new(Markers::default());
/// let slot = mirror.table.insert(RequestId(1), &NewRequest { prompt_tokens: 64, ..NewRequest::default() }).unwrap();
/// let facts = EngineFacts { now_ms: 5.0, token_budget: 2048, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
/// assert_eq!(mirror.begin_step(&facts, &[], &[slot]).waiting, 1);
/// assert_eq!(mirror.scheduled(5.0, [(slot, 64)]), 64);
/// assert_eq!(mirror.begin_step(&facts, &[slot], &[]).running_output, 1);
/// ```
#[derive(Debug, Default)]
pub struct EngineMirror {
    /// The requests.
    pub table: RequestTable,
    step_time: StepTimeModel,
    /// Steps whose end was not seen yet, oldest first: one when scheduling is synchronous, two when it runs ahead.
    in_flight: Vec<StepInFlight>,
    steps_ahead: usize,
    last_plan_ms: Option<f64>,
    preemptions: [u64; 3],
    now_ms: Option<f64>,
}

#[derive(Clone, Copy, Debug)]
struct StepInFlight {
    decode_tokens: u32,
    prefill_tokens: u32,
}

impl EngineMirror {
    /// The mirror of an engine without requests.
    #[must_use]
    pub fn new(markers: Markers) -> Self {
        Self { table: RequestTable::new(markers), ..Self::default() }
    }

    /// How many steps the engine schedules before it has seen the result of one: 0 for synchronous scheduling, 1 for
    /// asynchronous. Step times are attributed accordingly.
    pub fn set_steps_ahead(&mut self, steps: usize) {
        self.steps_ahead = steps;
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

    /// Take a time from the caller, milliseconds, and give the time that counts: one that is not finite, or lies before
    /// the last, is the last one. What was put off since a wrong time would never be overdue.
    pub fn hold_time(&mut self, now_ms: f64) -> f64 {
        let last_ms = self.now_ms.unwrap_or(0.0);
        let held_ms = if now_ms.is_finite() && (self.now_ms.is_none() || now_ms > last_ms) { now_ms } else { last_ms };
        self.now_ms = Some(held_ms);
        self.table.set_clock(held_ms);
        held_ms
    }

    /// The latest time that was held, 0 before any.
    #[must_use]
    pub fn now_ms(&self) -> f64 {
        self.now_ms.unwrap_or(0.0)
    }

    /// Live requests in prefill, think and output.
    #[must_use]
    pub fn phases(&self) -> [u64; 3] {
        let mut by_phase = [0; 3];
        for row in self.table.iter() {
            by_phase[row.phase() as usize] += 1;
        }
        by_phase
    }

    /// A step begins: learn from the one that ended, and state the facts that policies are given. `facts.now_ms` has
    /// been [held](EngineMirror::hold_time).
    pub fn begin_step(&mut self, facts: &EngineFacts, running: &[Slot], waiting: &[Slot]) -> Step {
        self.measure(facts.now_ms);
        let EngineFacts {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            free_seats: _,
            waiting: all_waiting,
            decode_tokens,
        } = *facts;
        let mut by_phase = [0u32; 3];
        for row in running.iter().filter_map(|slot| self.table.get(*slot)) {
            by_phase[row.phase() as usize] += 1;
        }
        let StepTime { fixed_ms, decode_token_ms, prefill_token_ms } = self.step_time.learned().unwrap_or_default();
        Step {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            running: length(running.len()),
            running_think: by_phase[Phase::Think as usize],
            running_output: by_phase[Phase::Output as usize],
            waiting: all_waiting.max(length(waiting.len())),
            decode_tokens,
            fixed_ms,
            decode_token_ms,
            prefill_token_ms,
        }
    }

    /// The engine scheduled the step that began at `now_ms`: `given` tokens for each request. Returns their sum.
    pub fn scheduled(&mut self, now_ms: f64, given: impl IntoIterator<Item = (Slot, u32)>) -> u32 {
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
        self.in_flight.push(step);
        step.decode_tokens.saturating_add(step.prefill_tokens)
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
}

fn length(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
