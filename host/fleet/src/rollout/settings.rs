//! What the operator asks of a roll-out: shares, guards, times.

use std::fmt;
use std::str::FromStr;

use meridian_core::SlotName;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::stats::{Metric, Rate};

/// A wrong setting: its name, the value, and what was expected.
///
/// ```
/// use meridian_fleet::rollout::Guard;
///
/// let error = "output_itl_p99<1.05".parse::<Guard>().unwrap_err();
/// assert_eq!(error.setting, "guard");
/// assert!(error.to_string().starts_with("guard: \"output_itl_p99<1.05\": expected METRIC<=RATIOx"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{setting}: {value:?}: {expected}")]
pub struct SettingError {
    /// The setting.
    pub setting: &'static str,
    /// Its value.
    pub value: String,
    /// What was expected.
    pub expected: String,
}

fn wrong(setting: &'static str, value: impl fmt::Display, expected: impl Into<String>) -> SettingError {
    SettingError { setting, value: value.to_string(), expected: expected.into() }
}

/// The side of its limit on which a ratio must stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// `<=`
    AtMost,
    /// `>=`
    AtLeast,
}

/// A limit for a metric with the new policy, as a multiple of the same metric with the old one.
///
/// ```
/// use meridian_fleet::rollout::Guard;
///
/// let guard: Guard = "output_itl_p99<=1.05x".parse()?;
/// assert_eq!((guard.limit, guard.to_string()), (1.05, "output_itl_p99<=1.05x".to_owned()));
/// # Ok::<(), meridian_fleet::rollout::SettingError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guard {
    /// The metric.
    pub metric: Metric,
    /// The allowed side of the limit.
    pub side: Side,
    /// The limit.
    pub limit: f64,
}

/// Largest limit of a guard; the least one is its reciprocal.
const LARGEST_LIMIT: f64 = 1000.0;

impl Guard {
    /// The guard of every roll-out: engines that hardly generate any tokens have few latencies that could be too long.
    pub const STARVATION: Self = Self { metric: Metric::Rate(Rate::Tokens), side: Side::AtLeast, limit: 0.5 };

    /// Whether a ratio is on the allowed side.
    #[must_use]
    pub fn allows(&self, ratio: f64) -> bool {
        match self.side {
            Side::AtMost => ratio <= self.limit,
            Side::AtLeast => ratio >= self.limit,
        }
    }
}

impl fmt::Display for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = if self.side == Side::AtMost { "<=" } else { ">=" };
        write!(f, "{}{side}{}x", self.metric, self.limit)
    }
}

impl FromStr for Guard {
    type Err = SettingError;

    fn from_str(text: &str) -> Result<Self, SettingError> {
        let form = || wrong("guard", text, "expected METRIC<=RATIOx or METRIC>=RATIOx, as in output_itl_p99<=1.05x");
        let (metric, side, limit) = match (text.split_once("<="), text.split_once(">=")) {
            (Some((metric, limit)), None) => (metric, Side::AtMost, limit),
            (None, Some((metric, limit))) => (metric, Side::AtLeast, limit),
            _ => return Err(form()),
        };
        let metric: Metric = metric.trim().parse().map_err(|error| wrong("guard", text, format!("metric {error}")))?;
        let limit = limit.trim().strip_suffix('x').ok_or_else(form)?;
        let limit: f64 = limit.trim().parse().map_err(|_| form())?;
        if !(1.0 / LARGEST_LIMIT..=LARGEST_LIMIT).contains(&limit) {
            return Err(wrong("guard", text, "expected a ratio from 0.001 to 1000"));
        }
        Ok(Self { metric, side, limit })
    }
}

impl Serialize for Guard {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Guard {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The settings of a roll-out.
///
/// ```
/// use meridian_core::SlotName;
/// use meridian_fleet::rollout::RolloutSettings;
///
/// let settings = RolloutSettings::new(SlotName::Dispatch, "10%,50%,100%", 300.0)?;
/// assert_eq!((settings.steps.as_slice(), settings.intervals()), (&[0.1, 0.5, 1.0][..], 10));
/// settings.validate()?;
/// assert!(RolloutSettings::new(SlotName::Dispatch, "50%,10%", 300.0).is_err());
/// # Ok::<(), meridian_fleet::rollout::SettingError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutSettings {
    /// The slot.
    pub slot: SlotName,
    /// Shares of the engines with the new policy, ascending; the last is 1.
    pub steps: Vec<f64>,
    /// The guards, without [`Guard::STARVATION`].
    pub guards: Vec<Guard>,
    /// Seconds that each step is observed for, and before the first one the policy in shadow.
    pub hold_s: f64,
    /// Seconds from one look at the engines to the next.
    pub interval_s: f64,
    /// Seconds after a change that count for nothing: requests are under way that the other policy has begun.
    pub settle_s: f64,
    /// Probability of a rollback by any guard at any look while no limit is exceeded.
    pub false_alarm: f64,
    /// Chooses the engines of each step.
    pub seed: u64,
    /// Further metrics to measure, which guard nothing.
    #[serde(default)]
    pub also: Vec<Metric>,
}

/// Fewest intervals in which the engines are observed before the first change: they say how much the ratio varies by itself.
pub(super) const LEAST_INTERVALS: u32 = 4;
/// Longest time of a setting, seconds: a week.
const LONGEST_S: f64 = 7.0 * 86_400.0;
/// Most steps and guards.
const MOST: usize = 20;

impl RolloutSettings {
    /// Settings with these steps, as in `10%,50%,100%`, and no guards yet.
    ///
    /// # Errors
    /// [`SettingError`]: the steps are not ascending shares up to 100 %.
    pub fn new(slot: SlotName, steps: &str, hold_s: f64) -> Result<Self, SettingError> {
        let share = |text: &str| -> Result<f64, SettingError> {
            let number = text.trim().strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
            let number = number.filter(|percent| *percent > 0.0 && *percent <= 100.0);
            Ok(number.ok_or_else(|| wrong("to", text, "expected a share above 0% and at most 100%"))? / 100.0)
        };
        let interval_s = (hold_s / 10.0).clamp(1.0, 60.0);
        Self {
            slot,
            steps: steps.split(',').map(share).collect::<Result<_, _>>()?,
            guards: Vec::new(),
            hold_s,
            interval_s,
            settle_s: interval_s / 2.0,
            false_alarm: 0.01,
            seed: 1,
            also: Vec::new(),
        }
        .checked_steps(steps)
    }

    fn checked_steps(self, text: &str) -> Result<Self, SettingError> {
        let is_ascending = self.steps.is_sorted_by(|one, next| one < next);
        if !is_ascending || self.steps.last() != Some(&1.0) || self.steps.len() > MOST {
            return Err(wrong("to", text, "expected ascending shares that end with 100%, as in 10%,50%,100%"));
        }
        Ok(self)
    }

    /// Intervals that each step is observed for.
    #[must_use]
    pub fn intervals(&self) -> u32 {
        // The smaller count where the division is not exact only by rounding.
        ((self.hold_s / self.interval_s) - 1e-9).ceil().max(1.0) as u32
    }

    /// Every guard.
    pub fn all_guards(&self) -> impl Iterator<Item = Guard> {
        let starvation = Guard::STARVATION;
        let is_own = self.guards.iter().any(|guard| guard.metric == starvation.metric && guard.side == starvation.side);
        self.guards.iter().copied().chain((!is_own).then_some(starvation))
    }

    /// Every metric that is measured.
    pub fn metrics(&self) -> Vec<Metric> {
        let mut metrics: Vec<Metric> = self.all_guards().map(|guard| guard.metric).collect();
        metrics.extend(&self.also);
        let mut seen = std::collections::HashSet::new();
        metrics.retain(|metric| seen.insert(*metric));
        metrics
    }

    /// Check what [`RolloutSettings::new`] has not seen.
    ///
    /// # Errors
    /// [`SettingError`], for the first wrong setting.
    pub fn validate(&self) -> Result<(), SettingError> {
        let shown: Vec<String> = self.steps.iter().map(|share| format!("{}%", share * 100.0)).collect();
        self.clone().checked_steps(&shown.join(","))?;
        let seconds = |value: f64| format!("{value}s");
        let is_time = |value: f64| value > 0.0 && value <= LONGEST_S;
        if !is_time(self.hold_s) {
            return Err(wrong("hold", seconds(self.hold_s), "expected a time above 0 and at most 7 days"));
        }
        if !is_time(self.interval_s) || self.intervals() < LEAST_INTERVALS {
            let most = self.hold_s / f64::from(LEAST_INTERVALS);
            return Err(wrong(
                "interval",
                seconds(self.interval_s),
                format!(
                    "expected at most a quarter of --hold: {most}s; the noise of {LEAST_INTERVALS} intervals is needed"
                ),
            ));
        }
        if !(self.settle_s >= 0.0 && self.settle_s <= self.hold_s) {
            return Err(wrong("settle", seconds(self.settle_s), "expected a time from 0 to --hold"));
        }
        if !(self.false_alarm > 0.0 && self.false_alarm <= 0.2) {
            return Err(wrong("false-alarm", self.false_alarm, "expected a probability above 0 and at most 0.2"));
        }
        if self.guards.len() > MOST {
            return Err(wrong("guard", self.guards.len(), format!("expected at most {MOST} guards")));
        }
        for (i, guard) in self.guards.iter().enumerate() {
            if self.guards[..i].iter().any(|other| (other.metric, other.side) == (guard.metric, guard.side)) {
                return Err(wrong("guard", guard, "expected one guard for each metric and side"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_are_read_and_written() {
        for text in ["output_itl_p99<=1.05x", "token_rate>=0.9x", "ttft_mean<=2x"] {
            assert_eq!(text.parse::<Guard>().expect("a guard").to_string(), text);
        }
        assert_eq!(" e2e_p50 <= 1.5 x".parse::<Guard>().expect("spaces").limit, 1.5);
        for (text, why) in [
            ("output_itl_p99", "expected METRIC<=RATIOx"),
            ("output_itl_p99<=1.05", "expected METRIC<=RATIOx"),
            ("output_itl_p99<=x", "expected METRIC<=RATIOx"),
            ("output_itl_p99<=NaNx", "from 0.001 to 1000"),
            ("output_itl_p99<=-1x", "from 0.001 to 1000"),
            ("a<=1x>=2x", "expected METRIC<=RATIOx"),
            ("itl<=1x", "metric \"itl\": expected LATENCY_STATISTIC"),
        ] {
            let error = text.parse::<Guard>().expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn steps_must_ascend_to_all() {
        let of = |steps: &str| RolloutSettings::new(SlotName::Dispatch, steps, 300.0);
        assert_eq!(of("100%").expect("at once").steps, [1.0]);
        for (steps, why) in [
            ("", "expected a share above 0%"),
            ("10", "expected a share above 0%"),
            ("0%,100%", "expected a share above 0%"),
            ("10%,101%", "at most 100%"),
            ("50%,50%,100%", "ascending"),
            ("10%,50%", "end with 100%"),
            ("NaN%,100%", "expected a share"),
        ] {
            let error = of(steps).expect_err(steps).to_string();
            assert!(error.starts_with("to: ") && error.contains(why), "{steps}: {error}");
        }
    }

    #[test]
    fn the_noise_must_be_observed_before_the_first_change() {
        let settings = RolloutSettings::new(SlotName::Dispatch, "100%", 300.0).expect("steps");
        assert!(settings.validate().is_ok());
        let few = RolloutSettings { interval_s: 100.0, ..settings.clone() };
        let error = few.validate().expect_err("three intervals").to_string();
        assert_eq!(
            error,
            "interval: \"100s\": expected at most a quarter of --hold: 75s; the noise of 4 intervals is needed"
        );
        let twice = RolloutSettings { guards: vec![Guard::STARVATION; 2], ..settings };
        assert!(twice.validate().expect_err("the same guard").to_string().starts_with("guard: \"token_rate>=0.5x\""));
    }

    #[test]
    fn the_guard_against_starvation_gives_way_to_a_stricter_one() {
        let mut settings = RolloutSettings::new(SlotName::Dispatch, "100%", 300.0).expect("steps");
        assert_eq!(settings.all_guards().collect::<Vec<_>>(), [Guard::STARVATION]);
        settings.guards = vec!["token_rate>=0.95x".parse().expect("a guard")];
        settings.also = vec!["token_rate".parse().expect("a metric"), "ttft_p50".parse().expect("a metric")];
        assert_eq!(settings.all_guards().count(), 1);
        assert_eq!(settings.metrics().len(), 2);
    }
}
