//! The client's priority, then arrival: the order of vLLM's priority policy.
//!
//! Order only: no token budget and no caps, so that whatever fits in the step is in the step. A thinking and an answering
//! request of one priority count the same.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, clamped, export_policy};

/// A key is `priority * SPAN_MS - wait_ms`, exact to a millisecond at priority 0 and to 32 ms at the ends.
const SPAN_MS: f32 = 4_194_304.0;
/// Longest wait that still orders requests of one priority; a key of the next level must not meet it, rounding included.
const LONGEST_WAIT_MS: f32 = SPAN_MS - 64.0;
/// Priorities beyond these count as the nearest of them.
const MOST_URGENT: f32 = -128.0;
const LEAST_URGENT: f32 = 127.0;

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Priority;

impl Policy for Priority {
    const NAME: &'static str = "priority";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Lower priority first, then arrival, as vLLM's priority policy: order only.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl DispatchPolicy for Priority {
    const INPUTS: &'static [Column] = &[Column::Priority, Column::WaitMs];

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        let priority = clamped(request.priority(), MOST_URGENT, LEAST_URGENT);
        priority * SPAN_MS - clamped(request.wait_ms(), 0.0, LONGEST_WAIT_MS)
    }
}

export_policy!(dispatch: Priority);
