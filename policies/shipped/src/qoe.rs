//! Answers as fast as they are read, after Andes (arXiv 2404.16283).
//!
//! A reader takes `reading_tok_s` tokens a second from the first one on. What an answer has beyond that is its lead; tokens
//! of a lead wait to be read, and a step that makes more of them is better spent on somebody else. The order, first to last:
//!
//! 1. answers whose reader has nothing left to read, the furthest behind first; a first token of output is due at once
//! 2. thinking and prefill, by arrival
//! 3. answers with a lead, the least first; from `lead_tokens` on they are left out of the step while others need it
//!
//! Andes weighs the expected gain of quality against the tokens of context a request holds, and solves a knapsack a step. Here
//! every request counts the same, and the order is by the lead alone.

use meridian_policy_sdk::{
    Column, DispatchPolicy, Init, Phase, Policy, Request, Requests, Step, clamped, export_policy,
};
use serde::Deserialize;

/// A key is minus the time since arrival between answers below `-DUE` and answers above 0. Leads are ranked in parts of a
/// token, as finely as an `f32` near `DUE` can say.
const DUE: f32 = 8_388_608.0;
const PARTS: f32 = 16.0;
const MOST_PARTS: f32 = 4_194_304.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    reading_tok_s: f32,
    lead_tokens: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { reading_tok_s: 10.0, lead_tokens: 8.0 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Qoe {
    reading_tok_s: f32,
    lead_tokens: f32,
    /// Somebody is a candidate of this step who is not well ahead of a reader.
    is_needed: bool,
}

impl Policy for Qoe {
    const NAME: &'static str = "qoe";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Answers at reading speed, the furthest behind first: steady reading, shorter queues.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { reading_tok_s, lead_tokens } = init.config()?;
        if !(0.01..=1e6).contains(&reading_tok_s) {
            return Err(format!("reading_tok_s: {reading_tok_s}: must be in 0.01..=1000000"));
        }
        if !(1.0..=1e6).contains(&lead_tokens) {
            return Err(format!("lead_tokens: {lead_tokens}: must be in 1..=1000000"));
        }
        Ok(Self { reading_tok_s, lead_tokens, is_needed: false })
    }
}

impl Qoe {
    /// Tokens of output that are not read yet; 0 or less: the reader waits.
    #[inline(always)]
    fn lead(&self, request: &Request<'_, Self>) -> f32 {
        let output_ms = request.output_ms();
        if output_ms.is_nan() { 0.0 } else { request.output_tokens() - output_ms / 1000.0 * self.reading_tok_s }
    }

    #[inline(always)]
    fn is_well_ahead(&self, request: &Request<'_, Self>) -> bool {
        request.phase() == Phase::Output && self.lead(request) >= self.lead_tokens
    }
}

impl DispatchPolicy for Qoe {
    const INPUTS: &'static [Column] = &[Column::Phase, Column::WaitMs, Column::OutputTokens, Column::OutputMs];
    const CAPS_TOKENS: bool = true;

    fn observe(&mut self, _step: &Step, batch: &Requests<'_, Self>) {
        self.is_needed = batch.iter().any(|request| !self.is_well_ahead(&request));
    }

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        if request.phase() != Phase::Output {
            return -clamped(request.wait_ms(), 0.0, DUE - 1.0);
        }
        let lead = self.lead(request);
        let rank = clamped(lead * PARTS, -MOST_PARTS, MOST_PARTS);
        if lead <= 0.0 { rank - DUE } else { rank }
    }

    fn token_cap(&self, _step: &Step, request: &Request<'_, Self>) -> u32 {
        if self.is_needed && self.is_well_ahead(request) { 0 } else { u32::MAX }
    }
}

export_policy!(dispatch: Qoe);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<Qoe, String> {
        crate::made(config_json)
    }

    #[test]
    fn options_have_ranges() {
        let policy = made("{}").expect("there are defaults");
        assert_eq!((policy.reading_tok_s, policy.lead_tokens), (10.0, 8.0));
        for (config, expected) in [
            ("{\"reading_tok_s\": 0}", "reading_tok_s: 0: must be in 0.01..=1000000"),
            ("{\"lead_tokens\": 0.5}", "lead_tokens: 0.5: must be in 1..=1000000"),
        ] {
            assert_eq!(made(config).expect_err("out of range"), expected);
        }
        assert!(made("{\"speed\": 1}").is_err());
    }
}
