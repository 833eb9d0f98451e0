//! So many tokens of thinking, whatever it is worth.
//!
//! The hard cap is `think_tokens`, never above the operator's `max_think_tokens`; EAT and RPDI are off and no probe is due.
//! Thinking ends by itself before, or is ended there. What every early exit is compared with.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Thresholds, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};
use serde::Deserialize;

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    think_tokens: Option<u32>,
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct FixedBudget {
    /// `None`: the configured maximum.
    think_tokens: Option<u32>,
}

impl Policy for FixedBudget {
    const NAME: &'static str = "fixed-budget";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Ends thinking after a fixed number of tokens, and never before.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { think_tokens } = init.config()?;
        if think_tokens == Some(0) {
            return Err("think_tokens: 0: must be at least 1".into());
        }
        Ok(Self { think_tokens })
    }
}

impl BudgetPolicy for FixedBudget {
    const INPUTS: &'static [Column] = &[];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn thresholds(&self, load: &Load, _request: &Request<'_, Self>) -> Thresholds {
        let Thresholds { min_think_tokens, max_think_tokens, .. } = load.configured;
        let cap = self.think_tokens.map_or(max_think_tokens, |tokens| tokens.min(max_think_tokens));
        Thresholds {
            min_think_tokens: min_think_tokens.min(cap),
            max_think_tokens: cap,
            // A probe costs a forward pass, and nobody would look at it.
            eat_probe_interval_tokens: u32::MAX,
            ..load.configured.without_signals()
        }
    }

    fn verdict(&self, _load: &Load, _request: &Request<'_, Self>) -> Verdict {
        Verdict::Default
    }
}

export_policy!(budget: FixedBudget);

#[cfg(test)]
mod tests {
    use meridian_policy_sdk::budget::{Decision, decide};

    use super::*;

    fn made(config_json: &str) -> Result<FixedBudget, String> {
        crate::made(config_json)
    }

    #[test]
    fn think_tokens_have_a_range() {
        assert_eq!(made("{\"think_tokens\": 0}").unwrap_err(), "think_tokens: 0: must be at least 1");
        assert!(made("{\"think_tokens\": -1}").is_err());
        assert!(made("{\"tokens\": 1}").is_err());
        assert_eq!(made("{}").unwrap().think_tokens, None);
    }

    #[test]
    fn the_minimum_never_passes_the_cap() {
        for (config, expected) in [
            ("{}", (512, 1 << 24)),
            ("{\"think_tokens\": 1000}", (512, 1000)),
            ("{\"think_tokens\": 100}", (100, 100)),
            ("{\"think_tokens\": 100000}", (512, 100_000)),
        ] {
            let mut decision = Decision::default();
            decide(&mut made(config).unwrap(), &Load::default(), 2, &[], &mut decision);
            for given in &decision.thresholds {
                assert_eq!((given.min_think_tokens, given.max_think_tokens), expected, "{config}");
            }
            assert_eq!(decision.thresholds.len(), 2);
        }
    }
}
