//! Output phase first, within a step time target: the native default of the dispatch slot.
//!
//! Order alone does little, because every running decode fits in the step. What moves the tail of the inter-token
//! latency is the step's token budget: while an output-phase request runs, the budget is set so that the step's
//! predicted time stays within `output_tpot_budget_ms`; prefill chunks and surplus thinking wait. With only thinking the
//! target is `think_tpot_budget_ms`, and at most `think_batch_multiplier` times the output-phase budget.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Phase, Request, State, Step, Targets, export_dispatch};

/// Keys of output-phase requests start here, below every thinking request's `-since_progress_ms`.
const OUTPUT_FIRST: f32 = -1.0e6;
/// Longest time since progress that still orders requests, milliseconds: keys of the two phases must not meet.
const MAX_SINCE_PROGRESS_MS: f32 = 9.0e5;
const PREFILL_LAST: f32 = 1.0;

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct OutputFirst {
    output_target_ms: f32,
    think_target_ms: f32,
    think_batch_multiplier: f32,
}

impl DispatchPolicy for OutputFirst {
    const NAME: &'static str = "output-first";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Output phase first, steps held to a TPOT target: lowers output ITL and TTOT, raises TTFT.";
    const INPUTS: &'static [Column] = &[Column::Phase, Column::State, Column::SinceProgressMs];

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config()?;
        let Targets { output_tpot_budget_ms, think_tpot_budget_ms, think_batch_multiplier, max_defer_ms: _ } =
            init.targets;
        Ok(Self {
            output_target_ms: output_tpot_budget_ms,
            think_target_ms: think_tpot_budget_ms,
            think_batch_multiplier,
        })
    }

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        // A comparison, not `f32::min`: that one is a library call in WebAssembly.
        let since_progress_ms = request.since_progress_ms();
        let bounded_ms =
            if since_progress_ms < MAX_SINCE_PROGRESS_MS { since_progress_ms } else { MAX_SINCE_PROGRESS_MS };
        // Waiting requests keep their order inside a phase.
        let rotation_ms = if request.state() == State::Running { bounded_ms } else { 0.0 };
        match request.phase() {
            Phase::Output => OUTPUT_FIRST - rotation_ms,
            Phase::Think => -rotation_ms,
            Phase::Prefill => PREFILL_LAST,
        }
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

export_dispatch!(OutputFirst);
