//! What an experiment does.

use meridian_engine::control::SlotName;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::stats::Metric;

/// Shortest measured part of an interval, seconds.
const SHORTEST_S: f64 = 1.0;
/// Longest interval, seconds: a day.
const LONGEST_S: f64 = 86_400.0;
/// Fewest and most pairs. Fewer give no interval of the difference that is of use.
const PAIRS: std::ops::RangeInclusive<u32> = 4..=10_000;
/// Most metrics that are decided on.
const MOST_METRICS: usize = 8;

/// What an experiment does.
///
/// ```
/// use meridian_fleet::experiment::Settings;
///
/// let settings = Settings::default();
/// assert_eq!((settings.checked().is_ok(), settings.total_s()), (true, 7200.0));
/// let short = Settings { warm_up_s: 120.0, ..settings };
/// assert_eq!(
///     short.checked().unwrap_err().to_string(),
///     "warm-up: 120 s: expected at least 0, and less than the interval of 120 s by 1 s or more"
/// );
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The slot.
    pub slot: SlotName,
    /// Length of an interval, warm-up included, seconds.
    pub interval_s: f64,
    /// The part of each interval that is not measured, seconds.
    pub warm_up_s: f64,
    /// Pairs of intervals.
    pub pairs: u32,
    /// Draws the order of the policies.
    pub seed: u64,
    /// The metrics that the verdict is about. The more there are, the wider their intervals: the chance of any false verdict
    /// stays the same.
    pub metrics: Vec<Metric>,
    /// The smallest difference of interest, as a share: 0.05 for 5 %.
    pub detect: f64,
    /// The experiment stops when a metric of the verdict is certainly worse by more than this factor.
    pub stop_above: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            slot: SlotName::Dispatch,
            interval_s: 120.0,
            warm_up_s: 30.0,
            pairs: 30,
            seed: 1,
            metrics: vec![Metric::Latency(
                meridian_core::latency::LatencyKind::OutputItl,
                crate::stats::Statistic::Mean,
            )],
            detect: 0.05,
            stop_above: 1.5,
        }
    }
}

/// A setting that cannot be used.
///
/// ```
/// use meridian_fleet::experiment::Settings;
///
/// let error = Settings { pairs: 2, ..Settings::default() }.checked().unwrap_err();
/// assert_eq!(error.to_string(), "pairs: 2: expected 4 to 10000");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{field}: {value}: expected {expected}")]
pub struct SettingsError {
    /// The setting.
    pub field: &'static str,
    /// Its value.
    pub value: String,
    /// The expectation.
    pub expected: String,
}

impl Settings {
    /// These settings, if they can be used.
    ///
    /// # Errors
    /// The setting, its value and the expectation.
    pub fn checked(&self) -> Result<(), SettingsError> {
        let refuse = |field, value: String, expected: String| Err(SettingsError { field, value, expected });
        let Self { interval_s, warm_up_s, pairs, metrics, detect, stop_above, .. } = self;
        if !(SHORTEST_S..=LONGEST_S).contains(interval_s) {
            return refuse("interval", format!("{interval_s} s"), format!("{SHORTEST_S} to {LONGEST_S} s"));
        }
        if !(0.0..=interval_s - SHORTEST_S).contains(warm_up_s) {
            let expected =
                format!("at least 0, and less than the interval of {interval_s} s by {SHORTEST_S} s or more");
            return refuse("warm-up", format!("{warm_up_s} s"), expected);
        }
        if !PAIRS.contains(pairs) {
            return refuse("pairs", pairs.to_string(), format!("{} to {}", PAIRS.start(), PAIRS.end()));
        }
        if metrics.is_empty() || metrics.len() > MOST_METRICS {
            return refuse("metric", format!("{} of them", metrics.len()), format!("1 to {MOST_METRICS}"));
        }
        if !(0.001..=1.0).contains(detect) {
            return refuse("detect", detect.to_string(), "0.001 to 1: 0.05 for 5 %".into());
        }
        if !(1.0..=1e6).contains(stop_above) {
            return refuse("stop-above", stop_above.to_string(), "a factor of at least 1".into());
        }
        Ok(())
    }

    /// How long the experiment takes, seconds, if no pair has to be repeated.
    #[must_use]
    pub fn total_s(&self) -> f64 {
        2.0 * f64::from(self.pairs) * self.interval_s
    }

    /// The measured part of an interval, seconds.
    #[must_use]
    pub fn measured_s(&self) -> f64 {
        self.interval_s - self.warm_up_s
    }

    /// Probability that each of the intervals of the verdict has the true ratio: 95 % for all together.
    #[must_use]
    pub fn confidence(&self) -> f64 {
        1.0 - 0.05 / self.metrics.len().max(1) as f64
    }
}
