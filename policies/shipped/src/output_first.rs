//! Output phase first, within a step time target.
//!
//! Order alone does little, because every running decode fits in the step. What moves the tail of the inter-token
//! latency is the step's token budget: while an output-phase request runs, the budget is set so that the step's
//! predicted time stays within `output_tpot_budget_ms`; prefill chunks and surplus thinking wait. With only thinking the
//! target is `think_tpot_budget_ms`, and at most `think_batch_multiplier` times the output-phase budget.
//!
//! The target bends where it cannot be kept, as above the capacity of the engine. Leaving out decodes shortens a step only by
//! what they cost beside reading the weights: a step carries at least as many as generate nine tenths of the tokens a second
//! that all would. And the longer the oldest prompt has waited, the more prompt tokens a step carries: without them, fewer
//! and fewer requests would share a step.
//!
//! Inside a phase: by priority, a deadline nearer than `max_defer_ms` counting as the most urgent one; then the least
//! recently served.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, State, Step, Targets, clamped, export_policy,
};

/// A key is `(phase * LEVELS + level) * SPAN_MS - rotation_ms`, all of it below 2^24, so that it is exact to a
/// millisecond in an `f32`.
const LEVELS: f32 = 16.0;
/// Longest time since progress that still orders requests, milliseconds; keys of two levels must not meet.
const SPAN_MS: f32 = 262_144.0;
/// Part of the tokens a second of a step with all decodes that a step generates at least.
const KEPT_RATE: f32 = 0.9;
/// Part of the time of the decodes that prompts get when the oldest has waited as long as the host allows.
const PROMPT_PART: f32 = 0.25;
/// Priorities from -8 (most urgent) to 7 are told apart, as vLLM counts them: lower first.
const MOST_URGENT: f32 = -8.0;
const LEAST_URGENT: f32 = 7.0;

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct OutputFirst {
    output_target_ms: f32,
    think_target_ms: f32,
    think_batch_multiplier: f32,
    near_deadline_ms: f32,
    /// How long the oldest prompt of the batch has waited, milliseconds.
    oldest_ms: f32,
}

impl Policy for OutputFirst {
    const NAME: &'static str = "output-first";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Output phase first, steps held to a TPOT target: lowers output ITL and TTOT, raises TTFT.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config()?;
        let Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms } =
            init.targets;
        Ok(Self {
            output_target_ms: output_tpot_budget_ms,
            think_target_ms: think_tpot_budget_ms,
            think_batch_multiplier,
            near_deadline_ms: max_defer_ms,
            oldest_ms: 0.0,
        })
    }
}

impl OutputFirst {
    /// The tokens of a step that it carries whatever it takes.
    fn least_tokens(&self, step: &Step) -> f32 {
        let all = (step.running_output + step.running_think) as f32 * step.decode_tokens as f32;
        let Step { fixed_ms, decode_token_ms, prefill_token_ms, .. } = *step;
        // x tokens take fixed + x * decode: the x whose rate is `KEPT_RATE` times that of all.
        let decodes = KEPT_RATE * all * fixed_ms / (fixed_ms + (1.0 - KEPT_RATE) * all * decode_token_ms);
        let decodes_ms = fixed_ms + decodes * decode_token_ms;
        let prompts = PROMPT_PART * decodes_ms / prefill_token_ms * (self.oldest_ms / self.near_deadline_ms);
        decodes + prompts
    }
}

impl DispatchPolicy for OutputFirst {
    const INPUTS: &'static [Column] =
        &[Column::Phase, Column::State, Column::WaitMs, Column::SinceProgressMs, Column::Priority, Column::SlackMs];

    fn observe(&mut self, _step: &Step, batch: &Requests<'_, Self>) {
        let prompts = batch.iter().filter(|request| request.phase() == Phase::Prefill);
        self.oldest_ms = prompts.map(|request| request.wait_ms()).fold(0.0, f32::max);
    }

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        let phase = match request.phase() {
            Phase::Output => 0.0,
            Phase::Think => 1.0,
            Phase::Prefill => 2.0,
        };
        let priority = clamped(request.priority(), MOST_URGENT, LEAST_URGENT);
        // Put off once more for as long as the host allows, such a request would miss its deadline.
        let level = if request.slack_ms() < self.near_deadline_ms { MOST_URGENT } else { priority } - MOST_URGENT;
        // Waiting requests keep their order inside a level, and so does prefill.
        let rotates = request.state() == State::Running && phase < 2.0;
        let rotation_ms = if rotates { clamped(request.since_progress_ms(), 0.0, SPAN_MS - 1.0) } else { 0.0 };
        (phase * LEVELS + level) * SPAN_MS - rotation_ms
    }

    fn token_budget(&self, step: &Step) -> Option<u32> {
        if !step.has_step_time() {
            return None;
        }
        let output_budget = step.tokens_within(self.output_target_ms);
        let tokens = if step.running_output > 0 {
            output_budget
        } else {
            let multiplied = (output_budget as f32 * self.think_batch_multiplier) as u32;
            step.tokens_within(self.think_target_ms).min(multiplied)
        };
        // `as` saturates, and makes 0 of a NaN.
        Some(tokens.max(self.least_tokens(step) as u32).clamp(1, step.token_budget.max(1)))
    }
}

export_policy!(dispatch: OutputFirst);
