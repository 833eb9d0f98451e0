//! Output phase first, within a step time target.
//!
//! Order alone does little, because every running decode fits in the step. What moves the tail of the inter-token
//! latency is the step's token budget: while an output-phase request runs, the budget is set so that the step's
//! predicted time stays within `output_tpot_budget_ms`; prefill chunks and surplus thinking wait. With only thinking the
//! target is `think_tpot_budget_ms`, and at most `think_batch_multiplier` times the output-phase budget.
//!
//! Inside a phase: by priority, a deadline nearer than `max_defer_ms` counting as the most urgent one; then the least
//! recently served.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, State, Step, Targets, clamped, export_policy,
};

/// A key is `(phase * LEVELS + level) * SPAN_MS - rotation_ms`, all of it below 2^24, so that it is exact to a
/// millisecond in an `f32`.
const LEVELS: f32 = 16.0;
/// Longest time since progress that still orders requests, milliseconds; keys of two levels must not meet.
const SPAN_MS: f32 = 262_144.0;
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
        })
    }
}

impl DispatchPolicy for OutputFirst {
    const INPUTS: &'static [Column] =
        &[Column::Phase, Column::State, Column::SinceProgressMs, Column::Priority, Column::SlackMs];

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
        if step.running_output > 0 {
            return Some(output_budget);
        }
        let multiplied = (output_budget as f32 * self.think_batch_multiplier) as u32;
        Some(step.tokens_within(self.think_target_ms).min(multiplied).clamp(1, step.token_budget.max(1)))
    }
}

export_policy!(dispatch: OutputFirst);
