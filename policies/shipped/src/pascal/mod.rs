//! Reasoning first, answers at the pace of their readers: PASCAL (HPCA'26, arXiv 2602.11530).
//!
//! A user sees nothing until the reasoning ends, so reasoning (prefill and thinking) is on the way to the first visible token
//! and goes first, in rounds of a quantum of tokens. An answer is read at a pace: tokens that are there before their time win
//! nothing. So an answer gives way as long as it is ahead of its pace, and goes before everything as soon as it is not.
//! The order, first to last:
//!
//! 1. answers whose next token is due, the furthest behind first; a first token of output is due at once
//! 2. reasoning, by quanta of thinking it has used, then by arrival
//! 3. answers that are ahead of their pace, the least ahead first
//! 4. reasoning that has used more than `demote_tokens`, in the same order as 2
//! 5. answers that are ahead by more than `lead_tokens`; left out of the step while there is reasoning of 2
//!
//! In the paper answers come after reasoning that is not demoted. Here those that are due go before it: they need one token
//! each, a prefill takes what it is given, and behind it an answer would miss its pace for as long as prompts arrive.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, Step, clamped, export_policy,
};
use serde::Deserialize;

/// A key is `class * CLASS + rank`, and a rank of reasoning is `quanta * SPAN_MS` less the time since its arrival.
const CLASS: f32 = MOST_QUANTA * SPAN_MS + SPAN_MS;
/// Quanta from 0 to this are told apart.
const MOST_QUANTA: f32 = 63.0;
/// Arrivals are told apart for this long, 4 minutes; ranks of two rounds must not meet, rounding included.
const SPAN_MS: f32 = 262_144.0;
const LONGEST_WAIT_MS: f32 = SPAN_MS - 8.0;
/// Leads are ranked in parts of a token, up to this many parts.
const PARTS: f32 = 16.0;
const MOST_PARTS: f32 = 4_194_304.0;

/// Counts of tokens are exact in a column up to this.
const MAX_TOKENS: u32 = 1 << 24;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    quantum_tokens: u32,
    demote_tokens: u32,
    lead_tokens: f32,
    tpot_ms: Option<f32>,
}

impl Default for Options {
    fn default() -> Self {
        Self { quantum_tokens: 500, demote_tokens: 5000, lead_tokens: 4.0, tpot_ms: None }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Pascal {
    quantum_tokens: f32,
    demote_tokens: f32,
    lead_tokens: f32,
    tpot_ms: f32,
    /// Reasoning that is not demoted is a candidate of this step.
    reasons: bool,
}

impl Policy for Pascal {
    const NAME: &'static str = "pascal";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Reasoning first, answers at reading pace: lowers time to first answer token.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { quantum_tokens, demote_tokens, lead_tokens, tpot_ms } = init.config()?;
        for (name, tokens) in [("quantum_tokens", quantum_tokens), ("demote_tokens", demote_tokens)] {
            if !(1..=MAX_TOKENS).contains(&tokens) {
                return Err(format!("{name}: {tokens}: must be in 1..={MAX_TOKENS}"));
            }
        }
        if !(0.0..=1e6).contains(&lead_tokens) {
            return Err(format!("lead_tokens: {lead_tokens}: must be in 0..=1000000"));
        }
        let tpot_ms = tpot_ms.unwrap_or(init.targets.output_tpot_budget_ms);
        if !(0.001..=1e6).contains(&tpot_ms) {
            return Err(format!("tpot_ms: {tpot_ms}: must be in 0.001..=1000000"));
        }
        Ok(Self {
            quantum_tokens: quantum_tokens as f32,
            demote_tokens: demote_tokens as f32,
            lead_tokens,
            tpot_ms,
            reasons: false,
        })
    }
}

impl Pascal {
    /// Tokens of output that are there beyond those that should be by now. 0: the next one is due.
    #[inline(always)]
    fn lead(&self, request: &Request<'_, Self>) -> f32 {
        let output_ms = request.output_ms();
        if output_ms.is_nan() { 0.0 } else { request.output_tokens() - output_ms / self.tpot_ms }
    }

    /// Fewer used quanta first, then the earlier arrival; from 0 to below `CLASS`.
    #[inline(always)]
    fn round(&self, request: &Request<'_, Self>) -> f32 {
        // A conversion rounds down; a NaN becomes 0.
        let quanta = (request.think_tokens() / self.quantum_tokens) as u32 as f32;
        let waited_ms = clamped(request.wait_ms(), 0.0, LONGEST_WAIT_MS);
        clamped(quanta, 0.0, MOST_QUANTA) * SPAN_MS + (LONGEST_WAIT_MS - waited_ms)
    }
}

impl DispatchPolicy for Pascal {
    const INPUTS: &'static [Column] =
        &[Column::Phase, Column::WaitMs, Column::ThinkTokens, Column::OutputTokens, Column::OutputMs];
    const CAPS_TOKENS: bool = true;

    fn observe(&mut self, _step: &Step, batch: &Requests<'_, Self>) {
        self.reasons = batch
            .iter()
            .any(|request| request.phase() != Phase::Output && request.think_tokens() <= self.demote_tokens);
    }

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        if request.phase() == Phase::Output {
            let lead = self.lead(request);
            let rank = clamped(lead * PARTS, -MOST_PARTS, MOST_PARTS);
            if lead <= 0.0 {
                rank - CLASS
            } else if lead <= self.lead_tokens {
                rank + CLASS
            } else {
                rank + 3.0 * CLASS
            }
        } else if request.think_tokens() <= self.demote_tokens {
            self.round(request)
        } else {
            self.round(request) + 2.0 * CLASS
        }
    }

    fn token_cap(&self, _step: &Step, request: &Request<'_, Self>) -> u32 {
        let gives_way = self.reasons && request.phase() == Phase::Output && self.lead(request) > self.lead_tokens;
        if gives_way { 0 } else { u32::MAX }
    }
}

export_policy!(dispatch: Pascal);

#[cfg(test)]
mod tests;
