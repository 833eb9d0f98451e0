//! Deadlines, remaining work and the slack of decodes: QoServe (ASPLOS'26; before it Niyama, arXiv 2503.22562).
//!
//! Three rules of the paper:
//!
//! - **Hybrid priority.** Prompts go by their deadline plus `alpha_ms` for each token that the request has to compute before it:
//!   between the earliest deadline and the shortest job. For a level, that is the prefill and the thinking, as the paper's TTFT
//!   counts the prefill alone. For a deadline of the whole response, the answer counts too.
//! - **Eager relegation.** A request that has missed its deadline, or will miss it with its own work alone, goes behind all others,
//!   and those of less weight go last. A decode is never relegated.
//! - **Dynamic chunking.** A step has as many prompt tokens as the least slack of its decodes allows, by the learned step time.
//!
//! `alpha_ms` is 8, as in the paper at a fixed load and in its authors' code. The paper lowers it under light load. That rule is not
//! given in the summaries of the paper that were available, and here it would change little: under light load no queue is to be
//! ordered. A request without a level and without a deadline has that of the paper's middle class, 600 s for the whole response,
//! and is never relegated.
//!
//! Not as in the paper: an urgent prompt does not take the tokens of one that runs, because in Meridian running requests go before
//! waiting ones; the host's learned step time stands for its forest of step times; and the tokens of a chunk are counted without
//! the decodes, or one late decode among 128 would leave no prompt token.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, State, Step, clamped, export_policy,
};
use serde::Deserialize;

/// Deadlines are told apart up to this, 70 minutes.
const SPAN_MS: f32 = 4_194_304.0;
/// The whole response of a request that has neither a level nor a deadline.
const RESPONSE_MS: f32 = 600_000.0;
/// The least and the most prompt tokens of a step with slack, and by how much a step may take longer than predicted: the
/// authors' code.
const LEAST_TOKENS: f32 = 128.0;
const MOST_TOKENS: f32 = 2552.0;
const LONGER: f32 = 1.2;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    alpha_ms: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { alpha_ms: 8.0 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Qoserve {
    alpha_ms: f32,
    /// A step with the decodes that run, milliseconds.
    decode_ms: f32,
    token_budget: Option<u32>,
}

impl Policy for Qoserve {
    const NAME: &'static str = "qoserve";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Deadlines and remaining work, late requests last, prompts as far as decodes have slack: keeps service levels in a burst, delays those that are late.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { alpha_ms } = init.config()?;
        if !(0.0..=1000.0).contains(&alpha_ms) {
            return Err(format!("alpha_ms: {alpha_ms}: must be in 0..=1000"));
        }
        Ok(Self { alpha_ms, decode_ms: 0.0, token_budget: None })
    }
}

/// Tokens of a decode.
#[inline(always)]
fn decode_tokens(step: &Step) -> f32 {
    step.decode_tokens.max(1) as f32
}

/// Whether it has a prompt to compute, or what a preemption has lost.
#[inline(always)]
fn is_prompt(step: &Step, request: &Request<'_, Qoserve>) -> bool {
    request.missing_tokens() > decode_tokens(step)
}

impl Qoserve {
    /// Milliseconds that the request's own work takes.
    #[inline(always)]
    fn work_ms(&self, step: &Step, request: &Request<'_, Self>, generated_tokens: f32) -> f32 {
        let prefill_ms = if is_prompt(step, request) { request.missing_tokens() * step.prefill_token_ms } else { 0.0 };
        prefill_ms + generated_tokens * self.decode_ms
    }

    /// Key of a request that computes its prompt or waits for it.
    #[inline(always)]
    fn prompt_key(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        let (missing, think) = (request.missing_tokens(), request.think_left());
        // A level ends with the first token of the answer, and its slack is what remains after the request's own work. Any
        // other deadline is one of the whole response.
        let (slack_ms, tokens) = if request.level_slack_ms() < f32::INFINITY {
            (request.level_slack_ms(), think)
        } else {
            let tokens = think + request.output_left();
            (request.slack_ms() - self.work_ms(step, request, tokens), tokens)
        };
        let deadline_ms = if slack_ms < f32::INFINITY {
            slack_ms + self.work_ms(step, request, tokens)
        } else {
            RESPONSE_MS - request.wait_ms()
        };
        let key = clamped(deadline_ms + self.alpha_ms * (missing + tokens), -SPAN_MS, SPAN_MS);
        if slack_ms < 0.0 {
            // Their deadlines are about as far away, so that the weight decides first.
            2.0 * SPAN_MS + clamped((SPAN_MS + key) / request.level_weight(), 0.0, 4.0 * SPAN_MS)
        } else {
            key
        }
    }

    /// Milliseconds until the next token of a decode is due. One that is late already keeps the pace of its level.
    #[inline(always)]
    fn due_ms(&self, request: &Request<'_, Self>) -> f32 {
        if request.level_slack_ms() < 0.0 {
            request.level_tpot_ms()
        } else if request.phase() == Phase::Output {
            let output_ms = request.output_ms();
            request.level_tpot_ms() * request.output_tokens() - if output_ms > 0.0 { output_ms } else { 0.0 }
        } else {
            request.level_slack_ms() + self.decode_ms
        }
    }
}

impl DispatchPolicy for Qoserve {
    const INPUTS: &'static [Column] = &[
        Column::Phase,
        Column::State,
        Column::WaitMs,
        Column::SlackMs,
        Column::PromptTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
        Column::OutputMs,
        Column::ThinkLeft,
        Column::OutputLeft,
        Column::LevelSlackMs,
        Column::LevelWeight,
        Column::LevelTpotMs,
    ];

    fn observe(&mut self, step: &Step, batch: &Requests<'_, Self>) {
        let running = || batch.iter().filter(|request| request.state() == State::Running);
        let decodes = || running().filter(|request| !is_prompt(step, request));
        let tokens = decodes().count() as f32 * decode_tokens(step);
        self.decode_ms = step.fixed_ms + tokens * step.decode_token_ms;
        // A NaN is no slack that is known.
        let least_ms = decodes().map(|request| self.due_ms(&request)).fold(f32::INFINITY, f32::min);
        self.token_budget = (step.has_step_time() && least_ms < f32::INFINITY).then(|| {
            let prompt_ms = least_ms / LONGER - self.decode_ms;
            // `as` saturates.
            (tokens + clamped(prompt_ms / step.prefill_token_ms, LEAST_TOKENS, MOST_TOKENS)) as u32
        });
    }

    #[inline(always)]
    fn key(&self, step: &Step, request: &Request<'_, Self>) -> f32 {
        match request.state() {
            // A decode that lost its KV was one.
            State::Preempted => -2.0 * SPAN_MS,
            State::Running if !is_prompt(step, request) => {
                clamped(self.due_ms(request), -SPAN_MS, SPAN_MS) - 3.0 * SPAN_MS
            }
            State::Running | State::Waiting => self.prompt_key(step, request),
        }
    }

    fn token_budget(&self, step: &Step) -> Option<u32> {
        Some(self.token_budget?.clamp(1, step.token_budget.max(1)))
    }
}

export_policy!(dispatch: Qoserve);

#[cfg(test)]
mod tests;
