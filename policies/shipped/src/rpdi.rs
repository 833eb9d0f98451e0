//! RPDI (arXiv 2603.14251): thinking ends when the path of reasoning has strayed.
//!
//! The index is the mean entropy of the last `window` tokens over the mean of all tokens of the thinking. At the end of a
//! sentence, a line or a clause, thinking ends if it is above `lambda`. It needs no probe. Only the paper's abstract was
//! available; definition and constants are those of an independent implementation that names the paper.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Request, Thresholds, Verdict};
use meridian_policy_sdk::{Init, Policy, export_policy};
use serde::Deserialize;

const MAX_WINDOW: u32 = 65_536;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    window: u32,
    lambda: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self { window: 512, lambda: 2.0 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Rpdi {
    window: u32,
    lambda: f64,
}

impl Policy for Rpdi {
    const NAME: &'static str = "rpdi";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "Ends thinking when the latest tokens are much less certain than the thinking so far.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { window, lambda } = init.config()?;
        if !(1..=MAX_WINDOW).contains(&window) {
            return Err(format!("window: {window}: must be in 1..={MAX_WINDOW}"));
        }
        if !(lambda > 0.0 && lambda <= 1e6) {
            return Err(format!("lambda: {lambda}: must be above 0 and at most 1000000"));
        }
        Ok(Self { window, lambda })
    }
}

impl BudgetPolicy for Rpdi {
    const INPUTS: &'static [Column] = &[Column::Signal, Column::Rpdi];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn thresholds(&self, load: &Load, _request: &Request<'_, Self>) -> Thresholds {
        Thresholds { rpdi_window: self.window, rpdi_threshold: self.lambda, ..load.configured.without_signals() }
    }

    fn verdict(&self, _load: &Load, request: &Request<'_, Self>) -> Verdict {
        if !request.is_at_boundary() || request.rpdi().is_nan() {
            return Verdict::Default;
        }
        if f64::from(request.rpdi()) > self.lambda { Verdict::EndNow } else { Verdict::KeepThinking }
    }
}

export_policy!(budget: Rpdi);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<Rpdi, String> {
        crate::made(config_json)
    }

    #[test]
    fn options_have_ranges() {
        let policy = made("{}").unwrap();
        assert_eq!((policy.window, policy.lambda), (512, 2.0));
        assert_eq!(made("{\"window\": 0}").unwrap_err(), "window: 0: must be in 1..=65536");
        assert_eq!(made("{\"lambda\": 0}").unwrap_err(), "lambda: 0: must be above 0 and at most 1000000");
        assert!(made("{\"threshold\": 1}").is_err());
    }
}
