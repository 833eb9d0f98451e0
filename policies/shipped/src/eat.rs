//! EAT as published (arXiv 2509.26522): thinking ends when the entropy after a forced end has become steady.
//!
//! Each probe gives the entropy `x` of the token after a forced end of thinking, in bits. With the moving mean and variance
//!
//! ```text
//! M = a x + (1 - a) M        V = a (x - M)^2 + (1 - a) V
//! ```
//!
//! thinking ends at the first probe with `V < delta` after `min_probes` others. The host computes both; this policy has no guard
//! on the mean, unlike `eat-rpdi`.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Thresholds, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};
use serde::Deserialize;

/// The paper waits for four times the memory of the mean, `1 / alpha`.
const WARM_UP: f64 = 4.0;
/// Stands for "no guard on the mean": no entropy comes near it, bits.
const NO_GUARD_BITS: f64 = 1e9;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    alpha: f64,
    delta: f64,
    min_probes: Option<u32>,
    interval: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self { alpha: 0.1, delta: 1.0 / 1024.0, min_probes: None, interval: None }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Eat {
    alpha: f64,
    delta: f64,
    min_probes: u32,
    /// Think tokens between two probes; `None`: as configured.
    interval: Option<u32>,
}

impl Policy for Eat {
    const NAME: &'static str = "eat";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Ends thinking when the entropy of the answer has become steady (EAT as published).";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { alpha, delta, min_probes, interval } = init.config()?;
        if !(0.001..=1.0).contains(&alpha) {
            return Err(format!("alpha: {alpha}: must be in 0.001..=1"));
        }
        if !(delta > 0.0 && delta <= 1e6) {
            return Err(format!("delta: {delta}: must be above 0 and at most 1000000"));
        }
        if interval == Some(0) {
            return Err("interval: 0: must be at least 1".into());
        }
        let min_probes = min_probes.unwrap_or((WARM_UP / alpha).ceil() as u32);
        Ok(Self { alpha, delta, min_probes, interval })
    }
}

impl BudgetPolicy for Eat {
    const INPUTS: &'static [Column] = &[Column::Signal, Column::Probes, Column::EatVariance];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn thresholds(&self, load: &Load, _request: &Request<'_, Self>) -> Thresholds {
        Thresholds {
            ema_alpha: self.alpha,
            eat_variance_threshold: self.delta,
            eat_max_bits: NO_GUARD_BITS,
            min_probes: self.min_probes,
            rpdi_threshold: f64::INFINITY,
            ..load.configured.probed_every(self.interval)
        }
    }

    fn verdict(&self, _load: &Load, request: &Request<'_, Self>) -> Verdict {
        if !request.is_probed() {
            return Verdict::Default;
        }
        let is_warm = f64::from(request.probes()) > f64::from(self.min_probes);
        // A variance that is NaN is not below.
        let is_steady = f64::from(request.eat_variance()) < self.delta;
        if is_warm && is_steady { Verdict::EndNow } else { Verdict::KeepThinking }
    }
}

export_policy!(budget: Eat);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<Eat, String> {
        crate::made(config_json)
    }

    #[test]
    fn options_have_ranges() {
        let policy = made("{}").unwrap();
        assert_eq!((policy.alpha, policy.delta, policy.min_probes, policy.interval), (0.1, 1.0 / 1024.0, 40, None));
        assert_eq!(made("{\"alpha\": 0.2, \"delta\": 1e-4}").unwrap().min_probes, 20);
        assert_eq!(made("{\"alpha\": 0.2, \"min_probes\": 4}").unwrap().min_probes, 4);
        assert_eq!(made("{\"alpha\": 0}").unwrap_err(), "alpha: 0: must be in 0.001..=1");
        assert_eq!(made("{\"delta\": 0}").unwrap_err(), "delta: 0: must be above 0 and at most 1000000");
        assert_eq!(made("{\"interval\": 0}").unwrap_err(), "interval: 0: must be at least 1");
        assert!(made("{\"beta\": 1}").is_err());
    }
}
