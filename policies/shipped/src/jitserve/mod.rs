//! Just enough of the engine for each request to keep its level: JITServe (NSDI'26, arXiv 2504.20068).
//!
//! The bandwidth that a request needs is the time its tokens take over the time it has. Its priority is the gain of keeping its
//! level over that bandwidth, which is the gain over the time that its tokens take. The length is a forecast at a high quantile,
//! which the host refines as tokens come. The order of prompts, first to last:
//!
//! 1. requests whose level can be kept, by priority
//! 2. requests whose level cannot be kept: they gain nothing
//!
//! Priorities that differ by less than 5 % form a group, in which prompts of like length go together (GMAX with p = 0.95). A step
//! takes no longer than the tightest pace of all that run. While the decodes alone take that long, no request is admitted.
//!
//! The gain is the weight of the level, because the operator counts requests; the paper counts tokens or requests in time. The
//! quantile is not given in the paper's summaries and 0.95 in its code; the host forecasts that of 0.9. Not as in the paper:
//!
//! - The paper takes the window of like lengths with the largest sum from a sorted list, and finds p by trying. Keys cannot.
//! - It gives a request its bandwidth in frames of 50 steps, by choosing who is in a batch of few seats. Here a decode that is left
//!   out of a step keeps its seat and its KV blocks and saves next to nothing. All decodes are in every step.
//! - It preempts where the gain exceeds the loss, plans compound requests, and chooses among replicas. This policy does not.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Policy, Request, Requests, State, Step, clamped, export_policy,
};

/// A key of a prompt is `(class * GROUPS + group) * LENGTHS + length`, below 2^24.
const GROUPS: f32 = 4096.0;
const LENGTHS: f32 = 1024.0;
/// Prompts are of like length in parts of so many tokens.
const LENGTH_TOKENS: f32 = 128.0;
/// Bits of an `f32` below this tell numbers apart that are within a group: 16 groups to an octave.
const IN_A_GROUP: u32 = 19;
/// A step has at least so many prompt tokens.
const LEAST_TOKENS: f32 = 128.0;
/// Of the tightest pace, what a step may take. Not given in the paper: steps as long as the pace itself, with the error of a learned
/// step time, would miss it.
const OF_TPOT: f32 = 0.9;

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Jitserve {
    /// A step with the decodes that run, milliseconds.
    decode_ms: f32,
    /// The decodes alone take as long as the tightest pace allows.
    is_shut: bool,
    token_budget: Option<u32>,
}

impl Policy for Jitserve {
    const NAME: &'static str = "jitserve";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Most gained for the time it takes first, steps as long as levels allow: keeps service levels in a burst, delays long requests.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config()?;
        Ok(Self { decode_ms: 0.0, is_shut: false, token_budget: None })
    }
}

/// Tokens of a decode.
#[inline(always)]
fn decode_tokens(step: &Step) -> f32 {
    step.decode_tokens.max(1) as f32
}

/// Whether it has a prompt to compute, or what a preemption has lost.
#[inline(always)]
fn is_prompt(step: &Step, request: &Request<'_, Jitserve>) -> bool {
    request.missing_tokens() > decode_tokens(step)
}

impl Jitserve {
    /// Milliseconds that its tokens still take; before the step time is known, their number.
    #[inline(always)]
    fn takes_ms(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        let tokens = request.think_left_high() + request.output_left() + 1.0;
        if step.has_step_time() {
            request.missing_tokens() * step.prefill_token_ms + tokens * self.decode_ms
        } else {
            request.missing_tokens() + tokens
        }
    }

    /// Milliseconds that are left when its tokens are there; infinite where nothing is due.
    #[inline(always)]
    fn slack_ms(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        let level_ms = request.level_slack_ms();
        if level_ms < f32::INFINITY { level_ms } else { request.slack_ms() - self.takes_ms(step, request) }
    }
}

impl DispatchPolicy for Jitserve {
    const INPUTS: &'static [Column] = &[
        Column::State,
        Column::SlackMs,
        Column::PromptTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
        Column::ThinkLeftHigh,
        Column::OutputLeft,
        Column::LevelSlackMs,
        Column::LevelWeight,
        Column::LevelTpotMs,
    ];
    const CAPS_TOKENS: bool = true;

    fn observe(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let running = || batch.iter().filter(|request| request.state() == State::Running);
        let decodes = running().filter(|request| !is_prompt(step, request)).count();
        let tokens = decodes as f32 * decode_tokens(step);
        self.decode_ms = step.fixed_ms + tokens * step.decode_token_ms;
        let tightest_ms = running().map(|request| request.level_tpot_ms()).fold(f32::INFINITY, f32::min);
        let within_ms = OF_TPOT * tightest_ms;
        let most_tokens = clamped((within_ms - self.decode_ms) / step.prefill_token_ms, LEAST_TOKENS, f32::MAX);
        // One decode alone may take longer, which keeps nobody out.
        let alone_ms = step.fixed_ms + decode_tokens(step) * step.decode_token_ms;
        self.is_shut = self.decode_ms > within_ms && alone_ms <= within_ms;
        // `as` saturates.
        self.token_budget =
            (step.has_step_time() && within_ms < f32::INFINITY).then_some((tokens + most_tokens) as u32);
    }

    #[inline(always)]
    fn key(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        if request.state() == State::Preempted || request.state() == State::Running && !is_prompt(step, request) {
            return -1.0;
        }
        let cost = clamped(self.takes_ms(step, request) / request.level_weight(), f32::MIN_POSITIVE, f32::MAX);
        let group = (cost.to_bits() >> IN_A_GROUP) as f32;
        let length = (clamped(request.prompt_tokens() / LENGTH_TOKENS, 0.0, LENGTHS - 1.0) as u32) as f32;
        let class = f32::from(u8::from(self.slack_ms(step, request) < 0.0));
        (class * GROUPS + group) * LENGTHS + length
    }

    fn has_caps(&self, _step: &Step) -> bool {
        self.is_shut
    }

    fn token_cap(&self, _step: &Step, request: &Request<'_, Self>) -> u32 {
        if self.is_shut && request.state() != State::Running { 0 } else { u32::MAX }
    }

    fn token_budget(&self, step: &Step) -> Option<u32> {
        Some(self.token_budget?.clamp(1, step.token_budget.max(1)))
    }
}

export_policy!(dispatch: Jitserve);

#[cfg(test)]
mod tests;
