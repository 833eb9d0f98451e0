//! Shortest remaining processing time first, as far as the time that remains is known.
//!
//! With `forecast = "max-tokens"` what remains is the tokens a request may still generate and its prefill. That is a bound,
//! not a forecast: the order means something only where clients say how long their answers are. With `"attained"` nothing is
//! forecast: whoever has generated least goes first, which is good on average where lengths are spread widely.

use meridian_policy_sdk::{Column, DispatchPolicy, Init, Policy, Request, Step, export_policy};
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    forecast: String,
    prefill_weight: f32,
}

impl Default for Options {
    fn default() -> Self {
        Self { forecast: "max-tokens".into(), prefill_weight: 0.1 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Forecast {
    MaxTokens,
    Attained,
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Srpt {
    forecast: Forecast,
    prefill_weight: f32,
}

impl Policy for Srpt {
    const NAME: &'static str = "srpt";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Fewest remaining tokens first: lowers mean latency, delays long requests.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { forecast, prefill_weight } = init.config()?;
        let forecast = match forecast.as_str() {
            "max-tokens" => Forecast::MaxTokens,
            "attained" => Forecast::Attained,
            other => return Err(format!("forecast: {other:?}: must be \"max-tokens\" or \"attained\"")),
        };
        if !(0.0..=1000.0).contains(&prefill_weight) {
            return Err(format!("prefill_weight: {prefill_weight}: must be in 0..=1000"));
        }
        Ok(Self { forecast, prefill_weight })
    }
}

impl DispatchPolicy for Srpt {
    const INPUTS: &'static [Column] = &[
        Column::PromptTokens,
        Column::ComputedTokens,
        Column::ThinkTokens,
        Column::OutputTokens,
        Column::RemainingTokens,
    ];

    #[inline(always)]
    fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
        match self.forecast {
            Forecast::Attained => request.generated_tokens(),
            Forecast::MaxTokens => request.remaining_tokens() + self.prefill_weight * request.missing_tokens(),
        }
    }
}

export_policy!(dispatch: Srpt);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<Srpt, String> {
        crate::made(config_json)
    }

    #[test]
    fn options_have_ranges() {
        let policy = made("{}").expect("there are defaults");
        assert_eq!((policy.forecast, policy.prefill_weight), (Forecast::MaxTokens, 0.1));
        let policy = made("{\"forecast\": \"attained\", \"prefill_weight\": 0}").expect("both in range");
        assert_eq!((policy.forecast, policy.prefill_weight), (Forecast::Attained, 0.0));
        for (config, expected) in [
            ("{\"forecast\": \"mean\"}", "forecast: \"mean\": must be \"max-tokens\" or \"attained\""),
            ("{\"prefill_weight\": -1}", "prefill_weight: -1: must be in 0..=1000"),
            ("{\"prefill_weight\": 1001}", "prefill_weight: 1001: must be in 0..=1000"),
        ] {
            assert_eq!(made(config).expect_err("out of range"), expected);
        }
        assert!(made("{\"weight\": 1}").is_err());
    }
}
