//! Answers as fast as they are read, after Andes (arXiv 2404.16283).
//!
//! A reader takes `reading_tok_s` tokens a second from the first one on. What an answer has beyond that is its lead; tokens
//! of a lead wait to be read, and where a step cannot carry all, it is better spent on another reader. The order, first to
//! last:
//!
//! 1. answers, the furthest behind first and the least lead before more; a first token of output is due at once
//! 2. thinking and prefill, by arrival
//!
//! As in Andes, nobody is slowed down while there is room: a decode left out of a step saves next to nothing. And no answer
//! gives way to thinking for its lead: it would be preempted, computed again and be behind, and the other in its turn.
//!
//! Andes weighs the expected gain of quality against the tokens of context a request holds, and solves a knapsack a step. Here
//! every request counts the same, and the order is by the lead alone.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Phase, Policy, Request, Step, clamped, export_policy};
use serde::Deserialize;

/// A key is minus the time since arrival, above `-DUE`, and below it that of answers. Leads are ranked in parts of a token, as
/// finely as an `f32` near twice `DUE` can say.
const DUE: f32 = 8_388_608.0;
const PARTS: f32 = 16.0;
const MOST_PARTS: f32 = 4_194_304.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    reading_tok_s: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { reading_tok_s: 10.0 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Qoe {
    reading_tok_s: f32,
}

impl Policy for Qoe {
    const NAME: &'static str = "qoe";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Answers first, those whose readers wait before those far ahead of theirs: steady reading under load.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { reading_tok_s } = init.config()?;
        if !(0.01..=1e6).contains(&reading_tok_s) {
            return Err(format!("reading_tok_s: {reading_tok_s}: must be in 0.01..=1000000"));
        }
        Ok(Self { reading_tok_s })
    }
}

impl Qoe {
    /// Tokens of output that are not read yet; 0 or less: the reader waits.
    #[inline(always)]
    fn lead(&self, request: &Request<'_, Self>) -> f32 {
        let output_ms = request.output_ms();
        if output_ms.is_nan() { 0.0 } else { request.output_tokens() - output_ms / 1000.0 * self.reading_tok_s }
    }
}

impl DispatchPolicy for Qoe {
    const INPUTS: &'static [Column] = &[Column::Phase, Column::WaitMs, Column::OutputTokens, Column::OutputMs];

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        if request.phase() != Phase::Output {
            return -clamped(request.wait_ms(), 0.0, DUE - 1.0);
        }
        clamped(self.lead(request) * PARTS, -MOST_PARTS, MOST_PARTS) - 2.0 * DUE
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
        assert_eq!(policy.reading_tok_s, 10.0);
        let refused = made("{\"reading_tok_s\": 0}").expect_err("out of range");
        assert_eq!(refused, "reading_tok_s: 0: must be in 0.01..=1000000");
        assert!(made("{\"speed\": 1}").is_err());
    }
}
