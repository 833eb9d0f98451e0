//! CoDE-Stop (arXiv 2604.04930): thinking ends when the answer is certain, or when its confidence keeps falling.
//!
//! Each probe gives the confidence of the answer that a forced end would get. Thinking ends at a probe if
//!
//! - its confidence is above a threshold, which rises from `low` to `high` over `ramp` probes; or
//! - the degeneration score is above `degeneration`. A probe less confident than the one before it is a drop. With drops after
//!   `t` think tokens and `T` tokens now, the score is the sum over the drops of `1 + ln(T / t)`: early drops weigh more, and
//!   weigh more and more. It is 0 before the third probe.
//!
//! The abstract and summaries of the paper were available, its text was not. Score and constants are those of the authors'
//! published code, as a reproduction of it describes them; the paper's own score is over probabilities and may differ.

use meridian_policy_sdk::budget::{BudgetPolicy, Column, Load, Point, Request, Requests, Thresholds, Verdict};
use meridian_policy_sdk::{ByRequest, Init, Policy, export_policy};
use serde::Deserialize;

/// Probes before which the score is 0.
const WARM_UP: u32 = 3;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    low: f64,
    high: f64,
    ramp: u32,
    degeneration: f64,
    /// Think tokens between two probes; `None`: as configured.
    interval: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        Self { low: 0.90, high: 0.95, ramp: 2, degeneration: 2.0, interval: None }
    }
}

/// The policy.
#[derive(Debug)]
pub struct CodeStop {
    options: Options,
    thoughts: ByRequest<Thought>,
}

/// The confidences of a request's probes.
#[derive(Clone, Copy, Debug, Default)]
struct Thought {
    /// Probes with a confidence.
    seen: u32,
    latest: f64,
    drops: f64,
    /// Sum of the logarithms of the places of the drops.
    drop_logs: f64,
    ends: bool,
}

impl Thought {
    /// Take in a probe after so many think tokens; `number` counts all probes from 0.
    fn observe(&mut self, rule: &Options, number: u32, think_tokens: f64, confidence: f64) {
        let now = ln(think_tokens.max(1.0));
        if self.seen > 0 && confidence < self.latest {
            self.drops += 1.0;
            self.drop_logs += now;
        }
        self.seen = self.seen.saturating_add(1);
        self.latest = confidence;
        let score = if self.seen < WARM_UP { 0.0 } else { self.drops * (1.0 + now) - self.drop_logs };
        let risen = if rule.ramp == 0 { 1.0 } else { (f64::from(number) / f64::from(rule.ramp)).min(1.0) };
        let least = rule.low + (rule.high - rule.low) * risen;
        self.ends = confidence > least || score > rule.degeneration;
    }
}

impl Policy for CodeStop {
    const NAME: &'static str = "code-stop";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Ends thinking when the answer is certain, or when its confidence keeps falling.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let options: Options = init.config()?;
        let Options { low, high, ramp: _, degeneration, interval } = options;
        for (field, value) in [("low", low), ("high", high)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(format!("{field}: {value}: must be in 0..=1"));
            }
        }
        if low > high {
            return Err(format!("low: {low}: must be at most high, which is {high}"));
        }
        if !(degeneration > 0.0 && degeneration <= 1e9) {
            return Err(format!("degeneration: {degeneration}: must be above 0 and at most 1000000000"));
        }
        if interval == Some(0) {
            return Err("interval: 0: must be at least 1".into());
        }
        Ok(Self { options, thoughts: ByRequest::default() })
    }

    fn finished(&mut self, requests: &[u32]) {
        self.thoughts.forget(requests);
    }
}

impl BudgetPolicy for CodeStop {
    const INPUTS: &'static [Column] =
        &[Column::Signal, Column::Probes, Column::ThinkTokens, Column::Confidence, Column::Request];
    const WEIGHS_SIGNALS_ALONE: bool = true;

    fn observe(&mut self, load: &Load, batch: &Requests<'_, Self>) {
        if load.point != Point::Probe {
            return;
        }
        for request in batch.iter() {
            let thought = self.thoughts.of_mut(request.request());
            thought.ends = false;
            let confidence = f64::from(request.confidence());
            if request.is_probed() && confidence >= 0.0 {
                let number = (request.probes() - 1.0).max(0.0) as u32;
                thought.observe(&self.options, number, f64::from(request.think_tokens()), confidence);
            }
        }
    }

    fn thresholds(&self, load: &Load, _request: &Request<'_, Self>) -> Thresholds {
        load.configured.without_signals().probed_every(self.options.interval)
    }

    fn verdict(&self, _load: &Load, request: &Request<'_, Self>) -> Verdict {
        if !request.is_probed() {
            return Verdict::Default;
        }
        let ends = self.thoughts.of(request.request()).is_some_and(|thought| thought.ends);
        if ends { Verdict::EndNow } else { Verdict::KeepThinking }
    }
}

/// The natural logarithm of a finite number of at least 1, by sums and products only: the same bits natively and as a component,
/// whatever library is linked.
fn ln(value: f64) -> f64 {
    let bits = value.to_bits();
    let mut exponent = f64::from((bits >> 52) as u32) - 1023.0;
    let mut part = f64::from_bits(bits & 0x000f_ffff_ffff_ffff | 0x3ff0_0000_0000_0000);
    if part > std::f64::consts::SQRT_2 {
        part /= 2.0;
        exponent += 1.0;
    }
    // ln((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 ...), with s of at most 0.18.
    let s = (part - 1.0) / (part + 1.0);
    let (mut sum, mut power, mut of) = (0.0, s, 1.0);
    while of < 25.0 {
        sum += power / of;
        power *= s * s;
        of += 2.0;
    }
    exponent * std::f64::consts::LN_2 + 2.0 * sum
}

export_policy!(budget: CodeStop);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<CodeStop, String> {
        crate::made(config_json)
    }

    #[test]
    fn options_have_ranges() {
        let Options { low, high, ramp, degeneration, interval } = made("{}").unwrap().options;
        assert_eq!((low, high, ramp, degeneration, interval), (0.90, 0.95, 2, 2.0, None));
        assert_eq!(made("{\"low\": 2}").unwrap_err(), "low: 2: must be in 0..=1");
        assert_eq!(made("{\"low\": 0.96}").unwrap_err(), "low: 0.96: must be at most high, which is 0.95");
        let refused = made("{\"degeneration\": 0}").unwrap_err();
        assert_eq!(refused, "degeneration: 0: must be above 0 and at most 1000000000");
        assert_eq!(made("{\"interval\": 0}").unwrap_err(), "interval: 0: must be at least 1");
        assert!(made("{\"tau\": 1}").is_err());
    }

    #[test]
    fn the_logarithm_is_one() {
        for value in [1.0, 1.5, 2.0, 10.0, 1000.0, 16_777_216.0, 1e300] {
            assert!((ln(value) - f64::ln(value)).abs() <= 1e-14 * f64::ln(value).max(1.0), "{value}");
        }
    }

    #[test]
    fn the_score_is_the_sum_over_drops() {
        let rule = made("{\"low\": 1, \"high\": 1, \"degeneration\": 3.0}").unwrap().options;
        let mut thought = Thought::default();
        let mut ends = |number, tokens, confidence| {
            thought.observe(&rule, number, tokens, confidence);
            thought.ends
        };
        assert!(!ends(0, 10.0, 0.5));
        assert!(!ends(1, 20.0, 0.4));
        // 1 + ln(50 / 20) and 1: together 2.92.
        assert!(!ends(2, 50.0, 0.3));
        // Without a new drop: 1 + ln(55 / 20) and 1 + ln(55 / 50), together 3.11.
        assert!(ends(3, 55.0, 0.3));
    }

    #[test]
    fn the_threshold_rises() {
        let rule = made("{}").unwrap().options;
        for (number, confidence, expected) in
            [(0, 0.91, true), (0, 0.9, false), (1, 0.92, false), (1, 0.93, true), (2, 0.95, false), (9, 0.96, true)]
        {
            let mut thought = Thought::default();
            thought.observe(&rule, number, 10.0, confidence);
            assert_eq!(thought.ends, expected, "{number} {confidence}");
        }
    }
}
