//! Prefill shaped to what decodes can bear, the cheapest wait first: the native default of the dispatch slot.
//!
//! No decode is left out of a step. What is decided is how many prompt tokens go with them ([`Pace`]), and who is admitted
//! when not all can be: the request that has waited longest for what it will cost, by the host's forecast. A preempted request
//! goes before those that were never admitted. A long prompt leaves room for prompts that wait ([`Part`]). Everything adapts to
//! the step time that the host learns. Before all that come priorities, a deadline nearer than `max_defer_ms` counting as the
//! most urgent one.
//!
//! Where the operator has promised service levels, those whose level can still be kept go before those that are late already:
//! when more arrives than the engine can serve, being late is not spread over everybody. And nobody is admitted while the
//! decodes alone take about as long as a level allows between two tokens.

mod pace;

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, State, Step, Targets, clamped, export_policy,
};

use self::pace::{Load, PROMPTS_WITHIN_MS, Pace, Part};

/// A key is `(group * URGENCIES + urgency) * SPAN - rank`, all of it below 2^24, so that it is exact in an `f32`.
const URGENCIES: f32 = 16.0;
const SPAN: f32 = 209_715.0;
/// Of requests that wait, the group of those whose service level can be kept; those that are late are in the next.
const IN_TIME: f32 = 3.0;
/// Priorities from -8 (most urgent) to 7 are told apart, as vLLM counts them: lower first.
const MOST_URGENT: f32 = -8.0;
const LEAST_URGENT: f32 = 7.0;
/// Waits are told apart in units of so many milliseconds: for 14 minutes.
const WAIT_UNIT_MS: f32 = 4.0;
/// Of prompts that are computed, waits over what is left are told apart in units of this.
const SHORT_FIRST_UNIT: f32 = 0.1;
/// Counted to every wait, milliseconds: among requests that have just arrived the cheap ones go first.
const HEAD_START_MS: f32 = 100.0;
/// Of the waiting requests, so many are looked at for what an average one costs and for how many prompts there are.
const LOOKED_AT: usize = 256;
/// A request costs from this part of the average to its inverse.
const CHEAPEST: f32 = 0.25;
/// Of the time that a service level allows between two tokens, what the decodes alone may take while others are admitted:
/// their contexts grow, and the steps that compute prompts are longer.
const OF_TPOT: f32 = 0.8;
/// Share of the seats, and of the KV blocks, that those who are late leave to those who can still be in time.
const LEFT_BY_THE_LATE: f32 = 0.3;

/// The policy.
#[derive(Clone, Debug)]
pub struct Balanced {
    near_deadline_ms: f32,
    pace: Pace,
    /// Requests that may run at once, where it has shown.
    seats: Option<u32>,
    /// Requests that ran in the step before.
    ran_before: u32,
    /// Tokens of the step.
    token_budget: Option<u32>,
    /// What a prompt takes of them at most.
    part: Option<Part>,
    prices: Prices,
    /// Service levels that can be kept keep requests out.
    doors: Doors,
    gate: Gate,
    /// Requests that run before the first that does not, in the batch's order.
    leading: usize,
    /// Of each request of the batch, the tokens of a prompt that are to be computed; 0 where a decode is all that is missing.
    prompt_tokens: Vec<f32>,
}

/// Who is not admitted in this step, for the sake of service levels.
#[derive(Clone, Copy, Debug, Default)]
struct Doors {
    /// Nobody: one more would make the time between tokens longer than a level allows.
    are_shut: bool,
    /// Those who are late: they would take seats and memory that others can still be in time with.
    keep_out_late: bool,
    /// What a step with the decodes that run takes, milliseconds.
    step_ms: f32,
}

/// Which sessions without KV blocks are let in: a long prompt of theirs would take the place of sessions that soon go on.
#[derive(Clone, Copy, Debug, Default)]
struct Gate {
    /// A prompt with fewer missing tokens than a step may carry does not matter.
    step_tokens: f32,
    /// Number of the request that comes in; 0 for none.
    admitted: f32,
    /// Others are held.
    holds: bool,
}

/// What requests cost in this step.
#[derive(Clone, Copy, Debug, Default)]
struct Prices {
    /// Milliseconds for a token of a prompt.
    prompt_ms: f32,
    /// Milliseconds for a generated token: its part of a step.
    decode_ms: f32,
    /// What an average waiting request costs, milliseconds; 0 before it is known.
    mean_ms: f32,
}

impl Policy for Balanced {
    const NAME: &'static str = "balanced";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Prefill shaped to what decodes can bear, cheap waits first: lowers output ITL and TTFO, costs long prompts TTFT.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config()?;
        let Targets { output_tpot_budget_ms, max_defer_ms, .. } = init.targets;
        Ok(Self {
            near_deadline_ms: max_defer_ms,
            pace: Pace::new(output_tpot_budget_ms),
            seats: None,
            ran_before: 0,
            token_budget: None,
            part: None,
            prices: Prices::default(),
            doors: Doors::default(),
            gate: Gate::default(),
            leading: 0,
            prompt_tokens: Vec::new(),
        })
    }

    /// How many gaps were long; all else is learned again within seconds.
    fn snapshot(&self) -> Vec<u8> {
        self.pace.counted().map(f32::to_le_bytes).as_flattened().to_vec()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), String> {
        let bytes: [u8; 8] = state.try_into().map_err(|_| format!("state: {} bytes: expected 8", state.len()))?;
        let number = |at: usize| f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let counted = [number(0), number(4)];
        if !counted.iter().all(|mean| (0.0..=f32::MAX).contains(mean)) {
            return Err(format!("state: {counted:?} gaps a step: expected finite numbers, at least 0"));
        }
        self.pace = self.pace.with_counted(counted);
        Ok(())
    }
}

/// Tokens of a decode.
fn decode_tokens(step: &Step) -> u32 {
    step.decode_tokens.max(1)
}

impl Balanced {
    /// What running requests do in this step.
    #[inline(always)]
    fn running(&mut self, step: &Step, batch: &Requests<'_, Self>) -> Load {
        // In a loop of its own, without a branch: several at a time.
        let decode_tokens = decode_tokens(step) as f32;
        let mut prompt_tokens = std::mem::take(&mut self.prompt_tokens);
        prompt_tokens.resize(batch.len(), 0.0);
        for (index, tokens) in prompt_tokens.iter_mut().enumerate() {
            let missing = batch.get(index).missing_tokens();
            *tokens = if missing > decode_tokens { missing } else { 0.0 };
        }
        let mut load = Load::default();
        let mut answers = 0u32;
        self.leading = batch.len();
        for (index, &tokens) in prompt_tokens.iter().enumerate() {
            let request = batch.get(index);
            if request.state() != State::Running {
                self.leading = self.leading.min(index);
                continue;
            }
            load.context_tokens += request.computed_tokens();
            load.context_blocks += request.kv_blocks();
            if tokens > 0.0 {
                load.prompts += 1;
                load.prompt_tokens += tokens;
            } else {
                load.decodes += 1;
                answers += u32::from(request.phase() == Phase::Output);
            }
        }
        load.answers = answers as f32;
        self.prompt_tokens = prompt_tokens;
        load
    }

    /// Add what waits to the load, as far as it can be admitted, and find what an average waiting request costs.
    #[inline(always)]
    fn waiting(&mut self, step: &Step, batch: &Requests<'_, Self>, load: &mut Load) {
        let none_shown = step.waiting > 0 && batch.len() == step.running as usize;
        if none_shown && (self.seats.is_none() || step.running > self.ran_before) {
            // The host shows requests that wait only while a seat is free, and none in a pause, which admits none.
            self.seats = Some(step.running);
        }
        self.ran_before = step.running;
        self.seats = self.seats.map(|seats| seats.max(step.running));
        let seats = self.seats.map_or(u32::MAX, |seats| seats - step.running);
        let mut seats = if self.doors.are_shut { 0 } else { seats };
        // What prompts that run have yet to compute takes its blocks before any that waits.
        let mut room = load.room(step.free_blocks, step.running) - load.prompt_tokens;
        let (mut cost_ms, mut looked_at) = (0.0, 0.0);
        let waiting = batch.iter().skip(self.leading).filter(|request| request.state() != State::Running);
        for request in waiting.filter(|request| !self.is_held(request)).take(LOOKED_AT) {
            let missing = request.missing_tokens();
            looked_at += 1.0;
            cost_ms += self.cost_ms(&request);
            load.waited_ms += request.wait_ms();
            if seats > 0 && missing <= room {
                seats -= 1;
                room -= missing;
                load.prompts += 1;
                load.prompt_tokens += missing;
            } else {
                load.shut_out += 1.0;
            }
        }
        if looked_at > 0.0 {
            self.prices.mean_ms = cost_ms / looked_at;
            load.waited_ms /= looked_at;
            load.shut_out /= looked_at;
        }
    }

    /// Whether a request is of a session that has lost its KV blocks, and computing them again would take long.
    #[inline(always)]
    fn is_cold(&self, request: &Request<'_, Self>) -> bool {
        let missing = request.prompt_tokens() - request.resident_tokens();
        request.state() == State::Waiting
            && request.session() > 0.0
            && missing > request.resident_tokens()
            && missing > self.gate.step_tokens
    }

    /// Of the cold requests that may be admitted at all, the most urgent that fits beside warm sessions comes in, of equal ones the
    /// one that has waited longest; when nothing runs, whether it fits or not. It leaves their tokens to preempted requests that
    /// are at least as urgent: what they had computed may still be cached.
    fn set_gate(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        self.gate = Gate { step_tokens: step.token_budget as f32, ..Gate::default() };
        let waiting = || batch.iter().skip(self.leading);
        let (mut resumes, mut for_resuming) = (f32::INFINITY, 0.0);
        for request in waiting().filter(|request| request.state() == State::Preempted && !self.is_shut_out(request)) {
            resumes = resumes.min(self.place(&request));
            for_resuming += request.missing_tokens();
        }
        let mut first: Option<((f32, f32), f32)> = None;
        let mut cold = 0u32;
        for request in waiting().filter(|request| self.is_cold(request)) {
            if request.room_tokens() == f32::INFINITY {
                return;
            }
            cold += 1;
            let place = (self.place(&request), -request.wait_ms());
            let (others, is_alone) = if place.0 < resumes { (0.0, true) } else { (for_resuming, false) };
            let fits = request.prompt_tokens() + others <= request.room_tokens() || (step.running == 0 && is_alone);
            if fits && !self.is_shut_out(&request) && first.is_none_or(|(other, _)| place < other) {
                first = Some((place, request.request()));
            }
        }
        self.gate.admitted = first.map_or(0.0, |(_, request)| request);
        self.gate.holds = cold > u32::from(first.is_some());
    }

    /// How urgent a waiting request is, 0 the most: those that are late after all others.
    #[inline(always)]
    fn place(&self, request: &Request<'_, Self>) -> f32 {
        (if self.is_late(request) { URGENCIES } else { 0.0 }) + self.urgency(request)
    }

    /// Whether a waiting request is kept out for the sake of service levels.
    #[inline(always)]
    fn is_shut_out(&self, request: &Request<'_, Self>) -> bool {
        self.doors.are_shut || self.doors.keep_out_late && self.is_late(request)
    }

    #[inline(always)]
    fn is_held(&self, request: &Request<'_, Self>) -> bool {
        self.gate.holds && self.is_cold(request) && request.request() != self.gate.admitted
    }

    /// The time of the engine that a waiting request will take.
    #[inline(always)]
    fn cost_ms(&self, request: &Request<'_, Self>) -> f32 {
        request.missing_tokens() * self.prices.prompt_ms
            + (request.think_left() + request.output_left()) * self.prices.decode_ms
    }

    /// Of a prompt that is being computed: how long it has waited for what is left of it. Short ones pass long ones, for a time.
    #[inline(always)]
    fn short_first(&self, request: &Request<'_, Self>) -> f32 {
        let left_ms = request.missing_tokens() * self.prices.prompt_ms;
        clamped(
            (request.wait_ms() + HEAD_START_MS) / ((if left_ms > 1.0 { left_ms } else { 1.0 }) * SHORT_FIRST_UNIT),
            0.0,
            SPAN - 1.0,
        )
    }

    /// How urgent the client says it is, 0 the most.
    #[inline(always)]
    fn urgency(&self, request: &Request<'_, Self>) -> f32 {
        let priority = clamped(request.priority(), MOST_URGENT, LEAST_URGENT);
        // Put off once more for as long as the host allows, such a request would miss its deadline.
        (if request.slack_ms() < self.near_deadline_ms { MOST_URGENT } else { priority }) - MOST_URGENT
    }

    /// The key of a request that runs, without a branch.
    #[inline(always)]
    fn running_key(&self, request: &Request<'_, Self>) -> f32 {
        // All decodes fit into a step but where the engine's own limit is below their number: there they take turns.
        let turn = clamped(request.since_progress_ms(), 0.0, SPAN - 1.0);
        let phase = request.phase();
        let group = f32::from(Phase::Output as u8 - phase as u8);
        let short_first = self.short_first(request);
        let rank = if phase == Phase::Prefill { short_first } else { turn };
        (group * URGENCIES + self.urgency(request)) * SPAN - rank
    }

    /// Whether the service level of a request that waits cannot be kept: when it runs, so many may run that a step takes as long
    /// as they are admitted for, and it thinks as slowly.
    #[inline(always)]
    fn is_late(&self, request: &Request<'_, Self>) -> bool {
        let slower_ms = OF_TPOT * request.level_tpot_ms() - self.doors.step_ms;
        let is_slower = slower_ms > 0.0 && slower_ms < f32::INFINITY;
        let lost_ms = if is_slower { slower_ms * request.think_left() } else { 0.0 };
        request.level_slack_ms() - lost_ms < 0.0
    }

    #[inline(always)]
    fn waiting_key(&self, request: &Request<'_, Self>) -> f32 {
        let late = f32::from(u8::from(self.is_late(request)));
        ((IN_TIME + late) * URGENCIES + self.urgency(request)) * SPAN - self.rank(request)
    }

    /// Of a request that waits: how long for what it will cost. The least and the most that one counts as costing keep dear ones
    /// from waiting for ever.
    #[inline(always)]
    fn rank(&self, request: &Request<'_, Self>) -> f32 {
        if request.state() == State::Preempted {
            // Its KV was paid for, and its user has waited longest.
            return SPAN - 1.0;
        }
        let mean_ms = self.prices.mean_ms;
        let share =
            if mean_ms > 0.0 { clamped(self.cost_ms(request) / mean_ms, CHEAPEST, 1.0 / CHEAPEST) } else { 1.0 };
        let weighed_ms = (request.wait_ms() + HEAD_START_MS) * request.level_weight();
        clamped(weighed_ms / (share * WAIT_UNIT_MS), 0.0, SPAN - 2.0)
    }
}

impl DispatchPolicy for Balanced {
    const INPUTS: &'static [Column] = &[
        Column::Phase,
        Column::State,
        Column::WaitMs,
        Column::SinceProgressMs,
        Column::PromptTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
        Column::KvBlocks,
        Column::Priority,
        Column::SlackMs,
        Column::ThinkLeft,
        Column::OutputLeft,
        Column::LevelSlackMs,
        Column::LevelWeight,
        Column::LevelTpotMs,
        Column::Request,
        Column::Session,
        Column::ResidentTokens,
        Column::RoomTokens,
    ];

    const CAPS_TOKENS: bool = true;

    #[inline(always)]
    fn observe(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let mut load = self.running(step, batch);
        load.decode_only_ms =
            step.fixed_ms + load.decodes.saturating_mul(decode_tokens(step)) as f32 * step.decode_token_ms;
        self.prices = if step.has_step_time() {
            let decode_ms = load.decode_only_ms / (load.decodes.max(1) as f32);
            Prices { prompt_ms: step.prefill_token_ms, decode_ms, mean_ms: 0.0 }
        } else {
            Prices::default()
        };
        // The shortest that a request that runs is promised. One that a decode alone exceeds keeps nobody out.
        let alone_ms = step.fixed_ms + decode_tokens(step) as f32 * step.decode_token_ms;
        let (mut tpot_ms, mut is_promised, mut has_no_level) = (f32::INFINITY, false, false);
        for request in batch.iter().take(self.leading) {
            let own_ms = request.level_tpot_ms();
            tpot_ms = if own_ms < tpot_ms && alone_ms <= OF_TPOT * own_ms { own_ms } else { tpot_ms };
            is_promised |= own_ms < f32::INFINITY;
            has_no_level |= own_ms == f32::INFINITY;
        }
        let free_blocks = step.free_blocks as f32;
        let is_short = free_blocks < LEFT_BY_THE_LATE * step.total_blocks as f32
            || self.seats.is_some_and(|seats| step.running as f32 > (1.0 - LEFT_BY_THE_LATE) * seats as f32)
            || load.decode_only_ms > (1.0 - LEFT_BY_THE_LATE) * OF_TPOT * tpot_ms
            || load.prompt_tokens * self.prices.prompt_ms > PROMPTS_WITHIN_MS;
        self.doors = Doors {
            are_shut: load.decode_only_ms > OF_TPOT * tpot_ms,
            keep_out_late: is_promised && is_short,
            step_ms: load.decode_only_ms,
        };
        let running = load.prompts;
        self.set_gate(step, batch);
        self.waiting(step, batch, &mut load);
        // `as` saturates.
        let decodes = load.decodes.saturating_mul(decode_tokens(step));
        let prompt_tokens =
            step.has_step_time().then(|| self.pace.prompt_tokens(&load, step.prefill_token_ms, tpot_ms, has_no_level));
        self.token_budget = prompt_tokens.map(|tokens| (decodes as f32 + tokens) as u32);
        let most = step.token_budget.saturating_sub(decodes) as f32;
        self.part = prompt_tokens.and_then(|tokens| Part::of(tokens.min(most), running, &load));
    }

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        if request.state() == State::Running { self.running_key(request) } else { self.waiting_key(request) }
    }

    /// Most requests run: all are given the key of one that does, which has no branch, so that the compiler computes several at a time.
    /// What it calls is inlined for the same reason: it must see how long the columns are.
    #[inline(always)]
    fn keys(&self, _step: &Step, batch: &Requests<'_, Self>, keys: &mut [f32]) {
        for (index, key) in keys.iter_mut().enumerate() {
            *key = self.running_key(&batch.get(index));
        }
        for (index, key) in keys.iter_mut().enumerate().skip(self.leading) {
            let request = batch.get(index);
            if request.state() != State::Running {
                *key = self.waiting_key(&request);
            }
        }
    }

    fn has_caps(&self, _step: &Step) -> bool {
        self.gate.holds || self.part.is_some() || self.doors.are_shut || self.doors.keep_out_late
    }

    #[inline(always)]
    fn token_cap(&self, _step: &Step, request: &Request<'_, Self>) -> u32 {
        let runs = request.state() == State::Running;
        let is_prompt = runs && request.phase() == Phase::Prefill;
        match self.part {
            _ if !runs && (self.is_held(request) || self.is_shut_out(request)) => 0,
            Some(part) if is_prompt && request.missing_tokens() > part.longest => part.tokens,
            _ => u32::MAX,
        }
    }

    fn token_budget(&self, step: &Step) -> Option<u32> {
        Some(self.token_budget?.clamp(1, step.token_budget.max(1)))
    }
}

export_policy!(dispatch: Balanced);

#[cfg(test)]
mod tests;
