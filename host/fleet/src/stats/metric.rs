//! What can be compared: quantiles and means of latencies, rates of tokens and requests.

use std::fmt;
use std::str::FromStr;

use meridian_core::latency::{LatencyCounts, LatencyKind, SKETCH_BUCKETS, quantile_ms};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

/// What engines did in a time: latencies and counts, and how long that was.
///
/// ```
/// use meridian_core::latency::LatencyCounts;
/// use meridian_fleet::stats::{Metric, Sample};
///
/// let counts = LatencyCounts { output_tokens: 300, ..LatencyCounts::default() };
/// let sample = Sample { counts, seconds: 10.0 };
/// assert_eq!("output_token_rate".parse::<Metric>()?.of(&sample), Some(30.0));
/// # Ok::<(), meridian_fleet::stats::MetricError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Latencies and counts of these seconds.
    pub counts: LatencyCounts,
    /// Seconds, of all engines together: ten engines in a minute have 600.
    pub seconds: f64,
}

impl Sample {
    /// Add those of another engine or time.
    pub fn merge(&mut self, other: &Self) {
        self.counts.merge(&other.counts);
        self.seconds += other.seconds;
    }
}

/// A number that describes engines over some time.
///
/// Written `LATENCY_STATISTIC`, as in `output_itl_p99`, or as the name of a rate.
///
/// ```
/// use meridian_fleet::stats::Metric;
///
/// let metric: Metric = "output_itl_p99".parse()?;
/// assert_eq!((metric.to_string(), metric.least_count()), ("output_itl_p99".into(), 1000));
/// let error = "itl_p99".parse::<Metric>().unwrap_err().to_string();
/// assert!(error.starts_with("\"itl_p99\": expected LATENCY_STATISTIC"));
/// # Ok::<(), meridian_fleet::stats::MetricError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Metric {
    /// A statistic of a latency, milliseconds.
    Latency(LatencyKind, Statistic),
    /// A count for each second of an engine.
    Rate(Rate),
    /// Tokens computed again because of preemptions, for each generated token.
    RecomputedShare,
    /// Share of the ended and refused requests with a service level for which it was kept.
    Attainment,
}

/// A statistic of a latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Statistic {
    /// The mean.
    Mean,
    /// The value below which so many thousandths of the values are.
    Quantile(u16),
}

/// A count for each second of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rate {
    /// Requests that ended.
    Finished,
    /// Tokens of output.
    OutputTokens,
    /// Tokens of thinking.
    ThinkTokens,
    /// Both.
    Tokens,
}

const STATISTICS: [(&str, Statistic); 7] = [
    ("mean", Statistic::Mean),
    ("p50", Statistic::Quantile(500)),
    ("p75", Statistic::Quantile(750)),
    ("p90", Statistic::Quantile(900)),
    ("p95", Statistic::Quantile(950)),
    ("p99", Statistic::Quantile(990)),
    ("p999", Statistic::Quantile(999)),
];

const OTHERS: [(&str, Metric); 6] = [
    ("finished_rate", Metric::Rate(Rate::Finished)),
    ("output_token_rate", Metric::Rate(Rate::OutputTokens)),
    ("think_token_rate", Metric::Rate(Rate::ThinkTokens)),
    ("token_rate", Metric::Rate(Rate::Tokens)),
    ("recomputed_share", Metric::RecomputedShare),
    ("attainment", Metric::Attainment),
];

/// Fewest values of a mean.
const LEAST_FOR_MEAN: u64 = 30;
/// Fewest values beyond a quantile.
const LEAST_BEYOND: u64 = 10;

impl Metric {
    /// Every metric.
    pub fn all() -> impl Iterator<Item = Self> {
        let latencies = LatencyKind::ALL.into_iter();
        let latencies = latencies.flat_map(|kind| STATISTICS.map(|(_, statistic)| Self::Latency(kind, statistic)));
        latencies.chain(OTHERS.map(|(_, metric)| metric))
    }

    /// The value in a sample; `None` where nothing was observed.
    #[must_use]
    pub fn of(self, sample: &Sample) -> Option<f64> {
        let mut sum = Sum::default();
        sum.add(self, sample);
        sum.value(self)
    }

    /// How many values of a sample the metric is of: of a rate, the counted things.
    #[must_use]
    pub fn count(self, counts: &LatencyCounts) -> u64 {
        match self {
            Self::Latency(kind, _) => counts.of(kind).count(),
            Self::Rate(Rate::Finished) => counts.finished,
            Self::Rate(Rate::OutputTokens) => counts.output_tokens,
            Self::Rate(Rate::ThinkTokens) => counts.think_tokens,
            Self::Rate(Rate::Tokens) | Self::RecomputedShare => {
                counts.output_tokens.saturating_add(counts.think_tokens)
            }
            Self::Attainment => counts.in_time.saturating_add(counts.missed),
        }
    }

    /// Fewest values that the metric means something of: 10 beyond a quantile, 30 of a mean. A rate needs none: too few
    /// are just what it finds.
    #[must_use]
    pub fn least_count(self) -> u64 {
        match self {
            Self::Latency(_, Statistic::Mean) | Self::RecomputedShare | Self::Attainment => LEAST_FOR_MEAN,
            Self::Latency(_, Statistic::Quantile(thousandths)) => {
                // The rarer side of the quantile.
                let beyond = u64::from(thousandths.min(1000 - thousandths).max(1));
                (LEAST_BEYOND * 1000).div_ceil(beyond)
            }
            Self::Rate(_) => 0,
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Latency(kind, statistic) = self {
            let name = STATISTICS.iter().find(|(_, of)| of == statistic).map_or("", |(name, _)| name);
            return write!(f, "{}_{name}", kind.label());
        }
        f.write_str(OTHERS.iter().find(|(_, metric)| metric == self).map_or("", |(name, _)| name))
    }
}

/// A text that names no metric.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{0:?}: expected LATENCY_STATISTIC of {latencies} and {statistics}, as in output_itl_p99, or one of {others}",
    latencies = listed(LatencyKind::ALL.map(LatencyKind::label)),
    statistics = listed(STATISTICS.map(|(name, _)| name)),
    others = listed(OTHERS.map(|(name, _)| name))
)]
pub struct MetricError(pub String);

fn listed<const N: usize>(names: [&str; N]) -> String {
    names.join(", ")
}

impl FromStr for Metric {
    type Err = MetricError;

    fn from_str(text: &str) -> Result<Self, MetricError> {
        Self::all().find(|metric| metric.to_string() == text).ok_or_else(|| MetricError(text.to_owned()))
    }
}

impl Serialize for Metric {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Metric {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// What one metric needs of many samples.
pub(super) struct Sum {
    /// Of a quantile: counts by bucket.
    buckets: Vec<f64>,
    /// Numerator and denominator of any other metric.
    parts: [f64; 2],
}

impl Default for Sum {
    fn default() -> Self {
        Self { buckets: Vec::new(), parts: [0.0; 2] }
    }
}

impl Sum {
    pub(super) fn clear(&mut self) {
        self.buckets.fill(0.0);
        self.parts = [0.0; 2];
    }

    pub(super) fn add(&mut self, metric: Metric, sample: &Sample) {
        let counts = &sample.counts;
        let add = match metric {
            Metric::Latency(kind, Statistic::Quantile(_)) => {
                self.buckets.resize(usize::from(SKETCH_BUCKETS), 0.0);
                for (bucket, count) in counts.of(kind).buckets() {
                    if let Some(sum) = self.buckets.get_mut(usize::from(*bucket)) {
                        *sum += *count as f64;
                    }
                }
                return;
            }
            Metric::Latency(kind, Statistic::Mean) => [counts.of(kind).sum_ms(), counts.of(kind).count() as f64],
            Metric::Rate(_) => [metric.count(counts) as f64, sample.seconds],
            Metric::RecomputedShare => [counts.recomputed_tokens as f64, metric.count(counts) as f64],
            Metric::Attainment => [counts.in_time as f64, metric.count(counts) as f64],
        };
        self.parts[0] += add[0];
        self.parts[1] += add[1];
    }

    pub(super) fn value(&self, metric: Metric) -> Option<f64> {
        if let Metric::Latency(_, Statistic::Quantile(thousandths)) = metric {
            let buckets = (0..).zip(self.buckets.iter().copied());
            return quantile_ms(buckets, f64::from(thousandths) / 1e3);
        }
        let [above, below] = self.parts;
        (below > 0.0).then(|| above / below)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_read_by_its_own_name() {
        for metric in Metric::all() {
            assert_eq!(metric.to_string().parse(), Ok(metric));
        }
        assert_eq!(Metric::all().count(), 7 * 7 + 6);
    }

    #[test]
    fn least_counts_have_ten_values_beyond_the_quantile() {
        for (name, least) in [
            ("ttft_p50", 20),
            ("ttft_p75", 40),
            ("ttft_p90", 100),
            ("ttft_p99", 1000),
            ("ttft_p999", 10_000),
            ("ttft_mean", 30),
            ("token_rate", 0),
        ] {
            assert_eq!(name.parse::<Metric>().expect("a metric").least_count(), least, "{name}");
        }
    }

    #[test]
    fn values_of_a_sample() {
        let counts = LatencyCounts {
            finished: 3,
            output_tokens: 80,
            think_tokens: 20,
            recomputed_tokens: 10,
            in_time: 3,
            missed: 1,
            ttft: [10.0, 20.0, 60.0].into_iter().collect(),
            ..LatencyCounts::default()
        };
        let sample = Sample { counts, seconds: 4.0 };
        let of = |name: &str| name.parse::<Metric>().expect("a metric").of(&sample);
        assert_eq!(of("ttft_mean"), Some(30.0));
        assert!((of("ttft_p50").expect("values") / 20.0 - 1.0).abs() < 0.02);
        assert_eq!(of("finished_rate"), Some(0.75));
        assert_eq!((of("token_rate"), of("think_token_rate")), (Some(25.0), Some(5.0)));
        assert_eq!((of("recomputed_share"), of("attainment")), (Some(0.1), Some(0.75)));
        assert_eq!(of("e2e_mean"), None);
        let mut twice = sample.clone();
        twice.merge(&sample);
        assert_eq!((twice.seconds, twice.counts.ttft.count()), (8.0, 6));
    }
}
