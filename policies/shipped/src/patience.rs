//! Thinking ends when the model keeps giving the same answer.
//!
//! After Certaindex (Dynasor, arXiv 2412.20993), which asks for the answer every so many tokens and stops when it came `k`
//! times in a row; the paper's pairs of `answers` and `interval` go from (8, 64) to (2, 32). Here an answer is the most likely
//! next token after a forced end of thinking, so answers that begin alike count as the same.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Thresholds, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};
use serde::Deserialize;

/// More would be counted as this many: a column is exact so far.
const MAX_ANSWERS: u32 = 1 << 24;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    answers: u32,
    interval: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self { answers: 4, interval: None }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    answers: f32,
    /// Think tokens between two probes; `None`: as configured.
    interval: Option<u32>,
}

impl Policy for Patience {
    const NAME: &'static str = "patience";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Ends thinking when the same answer came several times in a row.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { answers, interval } = init.config()?;
        if !(1..=MAX_ANSWERS).contains(&answers) {
            return Err(format!("answers: {answers}: must be in 1..={MAX_ANSWERS}"));
        }
        if interval == Some(0) {
            return Err("interval: 0: must be at least 1".into());
        }
        Ok(Self { answers: answers as f32, interval })
    }
}

impl BudgetPolicy for Patience {
    const INPUTS: &'static [Column] = &[Column::SameAnswers];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn thresholds(&self, load: &Load, _request: &Request<'_, Self>) -> Thresholds {
        load.configured.without_signals().probed_every(self.interval)
    }

    fn verdict(&self, _load: &Load, request: &Request<'_, Self>) -> Verdict {
        // Not the default: another answer takes back an end that waits for the minimum of tokens.
        if request.same_answers() >= self.answers { Verdict::EndNow } else { Verdict::KeepThinking }
    }
}

export_policy!(budget: Patience);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<Patience, String> {
        crate::made(config_json)
    }

    #[test]
    fn options_have_ranges() {
        let policy = made("{}").unwrap();
        assert_eq!((policy.answers, policy.interval), (4.0, None));
        let policy = made("{\"answers\": 8, \"interval\": 64}").unwrap();
        assert_eq!((policy.answers, policy.interval), (8.0, Some(64)));
        assert_eq!(made("{\"answers\": 0}").unwrap_err(), "answers: 0: must be in 1..=16777216");
        assert_eq!(made("{\"answers\": 16777217}").unwrap_err(), "answers: 16777217: must be in 1..=16777216");
        assert_eq!(made("{\"interval\": 0}").unwrap_err(), "interval: 0: must be at least 1");
        assert!(made("{\"answer\": 1}").is_err());
    }
}
