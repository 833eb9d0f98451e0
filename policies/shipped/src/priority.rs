//! The client's priority, then arrival: the order of vLLM's priority policy.
//!
//! Order only: no token budget and no caps, so that whatever fits in the step is in the step. A thinking and an answering
//! request of one priority count the same.
//!
//! Where the operator lets waiting requests take the place of running ones (`preempt_for_waiting`), a request gives way only to
//! a more urgent one: the least urgent first, of these one that does not answer yet, then one that was preempted less often,
//! then the one with the fewest tokens to compute again.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, State, Step, clamped, export_policy,
};

/// A key is `priority * SPAN_MS - wait_ms`, exact to a millisecond at priority 0 and to 32 ms at the ends.
const SPAN_MS: f32 = 4_194_304.0;
/// Longest wait that still orders requests of one priority; a key of the next level must not meet it, rounding included.
const LONGEST_WAIT_MS: f32 = SPAN_MS - 64.0;
/// Priorities beyond these count as the nearest of them.
const MOST_URGENT: f32 = -128.0;
const LEAST_URGENT: f32 = 127.0;

/// A victim's key is made of its priority, whether it answers, its preemptions and its tokens, in units of 64: in all 24 bits, so
/// that each is exact.
const PRIORITY_STEP: f32 = 65_536.0;
const ANSWER_STEP: f32 = 32_768.0;
const PREEMPTION_STEP: f32 = 8_192.0;
const TOKENS_UNIT: f32 = 64.0;

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Priority {
    /// Of the requests that wait in this step.
    most_urgent: f32,
}

/// The priority as it counts.
fn level(priority: f32) -> f32 {
    clamped(priority, MOST_URGENT, LEAST_URGENT)
}

impl Policy for Priority {
    const NAME: &'static str = "priority";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Lower priority first, then arrival, as vLLM's priority policy: order only.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self { most_urgent: LEAST_URGENT })
    }
}

impl DispatchPolicy for Priority {
    const INPUTS: &'static [Column] =
        &[Column::Priority, Column::WaitMs, Column::State, Column::Phase, Column::Preemptions, Column::ComputedTokens];
    const CHOOSES_VICTIMS: bool = true;

    fn observe(&mut self, _step: &Step, batch: &Requests<'_, Self>) {
        self.most_urgent = LEAST_URGENT;
        for request in batch.iter() {
            let priority = level(request.priority());
            if request.state() != State::Running && priority < self.most_urgent {
                self.most_urgent = priority;
            }
        }
    }

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        level(request.priority()) * SPAN_MS - clamped(request.wait_ms(), 0.0, LONGEST_WAIT_MS)
    }

    #[inline(always)]
    fn victim_key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        let priority = level(request.priority());
        if request.state() != State::Running || priority <= self.most_urgent {
            return f32::NAN;
        }
        let answers = if request.phase() == Phase::Output { ANSWER_STEP } else { 0.0 };
        let preemptions = clamped(request.preemptions(), 0.0, 3.0) * PREEMPTION_STEP;
        let units = (request.computed_tokens() / TOKENS_UNIT) as u32 as f32;
        let tokens = clamped(units, 0.0, PREEMPTION_STEP - 1.0);
        answers + preemptions + tokens - priority * PRIORITY_STEP
    }
}

export_policy!(dispatch: Priority);
