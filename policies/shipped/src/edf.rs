//! Least slack first: the deadline, less the time that what is known of a request will still take.
//!
//! Known is its prefill: tokens whose KV is still to be computed, at the learned time of each. How long a request will think
//! and answer is not, so a slack is an upper bound, and one that is negative is missed for certain.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, clamped, export_policy};

/// Slacks are told apart up to this, 70 minutes; those without a deadline come behind it.
const LONGEST_MS: f32 = 4_194_304.0;

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Edf;

impl Policy for Edf {
    const NAME: &'static str = "edf";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Least slack to the deadline first; requests without one last, by arrival.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl DispatchPolicy for Edf {
    const INPUTS: &'static [Column] = &[
        Column::SlackMs,
        Column::WaitMs,
        Column::PromptTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
    ];

    #[inline(always)]
    fn key(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        let slack_ms = request.slack_ms();
        if slack_ms.is_nan() || slack_ms == f32::INFINITY {
            return 2.0 * LONGEST_MS - clamped(request.wait_ms(), 0.0, LONGEST_MS - 1.0);
        }
        let prefill_ms = if step.has_step_time() { request.missing_tokens() * step.prefill_token_ms } else { 0.0 };
        clamped(slack_ms - prefill_ms, -LONGEST_MS, LONGEST_MS)
    }
}

export_policy!(dispatch: Edf);
