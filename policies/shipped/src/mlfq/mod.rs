//! Least attained service with levels: a multi-level feedback queue over what requests have generated.
//!
//! How long a request will think is not known, but lengths are spread widely, and of such the ones that have thought for long
//! have long to go. A request begins on level 0 and falls a level when it has generated a quantum, then two, then four. With
//! `[scheduler] preempt_for_waiting` those that wait take the places of those that think on a lower level: short requests
//! no longer wait for long ones to end.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, State, Step, clamped, export_policy,
};
use serde::Deserialize;

/// Levels, the last one for all that is longer.
const LEVELS: f32 = 8.0;
/// Until lengths are known, a request counts as one that generates so many tokens; it weighs as much as one request does.
const FIRST_TOKENS: f32 = 1000.0;
/// With so many requests counted, the counts are halved, so that lengths may change.
const REQUESTS: f32 = 1024.0;
/// The longest step with prompts is so many times the TPOT budget, or so many times what its decodes alone take.
const TPOT_BUDGETS: f32 = 2.0;
const LONGEST_STRETCH: f32 = 1.6;
/// And at least so many prompt tokens.
const LEAST_TOKENS: f32 = 128.0;
/// Thinking has converged when its moving entropy (bits) and variance (bits squared) are below these: EAT, arXiv 2509.26522.
const SETTLED_BITS: f32 = 0.5;
const SETTLED_VARIANCE: f32 = 1.0 / 1024.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    quantum_tokens: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { quantum_tokens: 0.0 }
    }
}

/// The policy.
#[derive(Clone, Debug)]
pub struct Mlfq {
    /// Given by the operator; 0 to learn it.
    quantum_tokens: f32,
    longest_ms: f32,
    /// Tokens that were generated, and requests that have generated one.
    tokens: f32,
    requests: f32,
    decided_ms: Option<f64>,
    token_budget: Option<u32>,
}

impl Policy for Mlfq {
    const NAME: &'static str = "mlfq";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Least generated first, by levels: lowers the TTFO of most requests under load, delays the longest.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { quantum_tokens } = init.config()?;
        if !(0.0..=16_777_216.0).contains(&quantum_tokens) {
            return Err(format!("quantum_tokens: {quantum_tokens}: must be in 0..=16777216, 0 to learn it"));
        }
        let longest_ms = TPOT_BUDGETS * init.targets.output_tpot_budget_ms;
        Ok(Self { quantum_tokens, longest_ms, tokens: 0.0, requests: 0.0, decided_ms: None, token_budget: None })
    }

    /// Tokens and requests counted.
    fn snapshot(&self) -> Vec<u8> {
        [self.tokens, self.requests].map(f32::to_le_bytes).concat()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), String> {
        let [a, b, c, d, e, f, g, h] = *state else {
            return Err(format!("state: {} bytes: expected 8", state.len()));
        };
        let (tokens, requests) = (f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]));
        if ![tokens, requests].iter().all(|count| (0.0..=f32::MAX).contains(count)) {
            return Err(format!("state: {tokens} tokens of {requests} requests: expected finite numbers, at least 0"));
        }
        (self.tokens, self.requests) = (tokens, requests);
        Ok(())
    }
}

/// Tokens of a decode.
fn decode_tokens(step: &Step) -> f32 {
    step.decode_tokens.max(1) as f32
}

/// Whether it computes its prompt, or what a preemption has lost.
#[inline(always)]
fn is_prompt(request: &Request<'_, Mlfq>, decode_tokens: f32) -> bool {
    request.missing_tokens() > decode_tokens
}

impl Mlfq {
    /// Tokens of level 0: the mean of what requests generate, where the operator gave none.
    fn quantum(&self) -> f32 {
        if self.quantum_tokens > 0.0 {
            self.quantum_tokens
        } else {
            (self.tokens + FIRST_TOKENS) / (self.requests + 1.0)
        }
    }

    /// Level of a request: 0 before a quantum, 1 before two, 2 before four. One whose thinking has converged is a level nearer to
    /// its end than another of its age.
    #[inline(always)]
    fn level(&self, request: &Request<'_, Self>) -> f32 {
        let quanta = request.generated_tokens() / self.quantum();
        let (mut level, mut above) = (0.0, 1.0);
        while quanta >= above && level < LEVELS - 1.0 {
            level += 1.0;
            above *= 2.0;
        }
        // NaN, where it is not measured, is not below.
        let has_settled = request.eat() < SETTLED_BITS && request.eat_variance() < SETTLED_VARIANCE;
        if has_settled && level > 0.0 { level - 1.0 } else { level }
    }
}

impl DispatchPolicy for Mlfq {
    const INPUTS: &'static [Column] = &[
        Column::Phase,
        Column::State,
        Column::SinceProgressMs,
        Column::PromptTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
        Column::Eat,
        Column::EatVariance,
    ];

    fn observe(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let elapsed_ms = step.elapsed_ms(&mut self.decided_ms);
        let decode_tokens = decode_tokens(step);
        let mut decodes = 0.0;
        for request in batch.iter().filter(|request| request.state() == State::Running) {
            decodes += f32::from(u8::from(!is_prompt(&request, decode_tokens)));
            let generated = request.generated_tokens();
            if generated >= 1.0 && request.since_progress_ms() <= elapsed_ms {
                self.tokens += decode_tokens;
                self.requests += f32::from(u8::from(generated <= decode_tokens));
            }
        }
        if self.requests > REQUESTS {
            self.tokens *= 0.5;
            self.requests *= 0.5;
        }
        self.token_budget = step.has_step_time().then(|| {
            let alone_ms = step.fixed_ms + decodes * decode_tokens * step.decode_token_ms;
            let longest_ms = self.longest_ms.max(LONGEST_STRETCH * alone_ms);
            let prompt_tokens = ((longest_ms - alone_ms) / step.prefill_token_ms).max(LEAST_TOKENS);
            // `as` saturates.
            (decodes * decode_tokens + prompt_tokens) as u32
        });
    }

    #[inline(always)]
    fn key(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        let level = 2.0 * self.level(request);
        match request.state() {
            // Behind those that think on its own level, before those on the next.
            State::Waiting | State::Preempted => level + 1.0,
            State::Running if is_prompt(request, decode_tokens(step)) => {
                // Beside the decodes, which fit into the step; short ones first.
                2.0 * LEVELS + clamped(request.prompt_tokens() - request.computed_tokens(), 0.0, f32::MAX)
            }
            State::Running if request.phase() == Phase::Output => -1.0,
            State::Running => level,
        }
    }

    fn token_budget(&self, step: &Step) -> Option<u32> {
        Some(self.token_budget?.clamp(1, step.token_budget.max(1)))
    }
}

export_policy!(dispatch: Mlfq);

#[cfg(test)]
mod tests;
