//! DEER (arXiv 2504.15895): thinking ends when the model is confident of its answer.
//!
//! A probe forces the end of thinking and takes the probability of the most likely answer; above `confidence`, thinking ends.
//! The paper takes the geometric mean over all tokens of a trial answer. A probe here is one token long: the same where an
//! answer is one token, and the first of its factors elsewhere.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Thresholds, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    confidence: f64,
    interval: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self { confidence: 0.95, interval: None }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Deer {
    confidence: f64,
    /// Think tokens between two probes; `None`: as configured.
    interval: Option<u32>,
}

impl Policy for Deer {
    const NAME: &'static str = "deer";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Ends thinking when the model is confident of its answer.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { confidence, interval } = init.config()?;
        if !(0.0..1.0).contains(&confidence) {
            return Err(format!("confidence: {confidence}: must be at least 0 and below 1"));
        }
        if interval == Some(0) {
            return Err("interval: 0: must be at least 1".into());
        }
        Ok(Self { confidence, interval })
    }
}

impl BudgetPolicy for Deer {
    const INPUTS: &'static [Column] = &[Column::Signal, Column::Confidence];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn thresholds(&self, load: &Load, _request: &Request<'_, Self>) -> Thresholds {
        load.configured.without_signals().probed_every(self.interval)
    }

    fn verdict(&self, _load: &Load, request: &Request<'_, Self>) -> Verdict {
        if !request.is_probed() {
            return Verdict::Default;
        }
        // A confidence that is NaN is not above.
        if f64::from(request.confidence()) > self.confidence { Verdict::EndNow } else { Verdict::KeepThinking }
    }
}

export_policy!(budget: Deer);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<Deer, String> {
        crate::made(config_json)
    }

    #[test]
    fn options_have_ranges() {
        let policy = made("{}").unwrap();
        assert_eq!((policy.confidence, policy.interval), (0.95, None));
        assert_eq!(made("{\"confidence\": 1}").unwrap_err(), "confidence: 1: must be at least 0 and below 1");
        assert_eq!(made("{\"interval\": 0}").unwrap_err(), "interval: 0: must be at least 1");
        assert!(made("{\"threshold\": 0.5}").is_err());
    }
}
