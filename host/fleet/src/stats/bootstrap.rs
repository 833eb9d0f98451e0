//! The ratio of a metric under two policies, with an interval by a paired block bootstrap over time.
//!
//! Requests of neighbouring minutes share queues, so neither requests nor minutes are independent. Whole intervals of
//! time are drawn, in blocks of neighbours, so that a block keeps its correlation (H. Künsch, Annals of Statistics 17(3),
//! 1989; circular as in Politis and Romano, 1992); the block length is the cube root of the number of intervals (Hall,
//! Horowitz and Jing, Biometrika 82(3), 1995). An interval is drawn for both policies together: load that both share
//! cancels out. The metric is computed anew of the merged sketches of each draw.
//!
//! The interval is the estimate plus and minus the deviation of the draws, in logarithms, with Student's t for the
//! number of blocks. Percentiles of the draws would be too narrow for the few intervals of a roll-out (T. Hesterberg,
//! The American Statistician 69(4), 2015, section 4).

use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::metric::{Metric, Sample, Sum};

/// Both policies in an interval of time: over the same minutes on different engines, or one after the other on one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pair {
    /// With the old policy.
    pub old: Sample,
    /// With the new policy.
    pub new: Sample,
}

/// A metric under a new policy over that under the old one.
///
/// ```
/// use meridian_core::latency::LatencyCounts;
/// use meridian_fleet::stats::{Bootstrap, Pair, Sample};
///
/// let sample = |output_tokens| Sample { counts: LatencyCounts { output_tokens, ..Default::default() }, seconds: 10.0 };
/// let pairs: Vec<Pair> =
///     (0..8).map(|i| Pair { old: sample(100 + i % 3), new: sample(110 + i % 2) }).collect();
/// let ratio = Bootstrap::default().ratio("output_token_rate".parse()?, &pairs).unwrap();
/// assert!(ratio.low > 1.0 && ratio.high < 1.2, "{ratio:?}");
/// # Ok::<(), meridian_fleet::stats::MetricError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The ratio.
    pub ratio: f64,
    /// Lower end of its interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Standard error of the ratio's natural logarithm.
    pub log_error: f64,
    /// The metric with the old policy, over all intervals.
    pub old: f64,
    /// The metric with the new policy, over all intervals.
    pub new: f64,
    /// Intervals of time that it comes from.
    pub intervals: usize,
}

/// How to draw.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bootstrap {
    /// Seed of the draws; equal seeds give equal intervals.
    pub seed: u64,
    /// Number of draws.
    pub draws: u32,
    /// Probability that the interval has the true ratio.
    pub confidence: f64,
}

impl Default for Bootstrap {
    fn default() -> Self {
        Self { seed: 1, draws: 1000, confidence: 0.95 }
    }
}

/// Fewest intervals of time that give an interval of the ratio.
const LEAST_PAIRS: usize = 3;
/// Share of draws that must have a ratio: a draw of intervals without values has none.
const LEAST_DRAWN: f64 = 0.9;

impl Bootstrap {
    /// The ratio over these intervals of time, in their order. `None` where it has none: too few intervals, or values, or
    /// a metric that is 0.
    #[must_use]
    pub fn ratio(&self, metric: Metric, pairs: &[Pair]) -> Option<Ratio> {
        let intervals = pairs.len();
        if intervals < LEAST_PAIRS {
            return None;
        }
        let least = metric.least_count();
        let enough = |side: fn(&Pair) -> &Sample| {
            pairs.iter().map(|pair| metric.count(&side(pair).counts)).fold(0, u64::saturating_add) >= least
        };
        if !enough(|pair| &pair.old) || !enough(|pair| &pair.new) {
            return None;
        }
        let mut sums = [Sum::default(), Sum::default()];
        let (old, new) = of(metric, &mut sums, pairs.iter())?;
        let ratio = new / old;
        let block = (intervals as f64).cbrt().round().max(1.0) as usize;
        let mut random = Pcg64::seed_from_u64(self.seed);
        let (mut drawn, mut sum, mut squares) = (0_u32, 0.0, 0.0);
        for _ in 0..self.draws {
            let mut taken = Vec::with_capacity(intervals + block);
            while taken.len() < intervals {
                let from = random.random_range(0..intervals);
                taken.extend((from..from + block).map(|i| &pairs[i % intervals]));
            }
            taken.truncate(intervals);
            let Some((old, new)) = of(metric, &mut sums, taken.into_iter()) else { continue };
            // About the estimate, so that rounding does not eat small deviations.
            let log = (new / old / ratio).ln();
            drawn += 1;
            sum += log;
            squares += log * log;
        }
        let count = f64::from(drawn);
        if count < f64::from(self.draws) * LEAST_DRAWN || count < 2.0 {
            return None;
        }
        let blocks = (intervals as f64 / block as f64).max(2.0);
        let variance = ((squares - sum * sum / count) / (count - 1.0)).max(0.0);
        // Drawn from `blocks` of them, not from all there could be.
        let log_error = (variance * blocks / (blocks - 1.0)).sqrt();
        let student = StudentsT::new(0.0, 1.0, blocks - 1.0).ok()?;
        let half = log_error * student.inverse_cdf(f64::midpoint(1.0, self.confidence.clamp(0.0, 0.999_999)));
        Some(Ratio { ratio, low: ratio * (-half).exp(), high: ratio * half.exp(), log_error, old, new, intervals })
    }
}

/// The metric on both sides; `None` unless both are above 0.
fn of<'a>(metric: Metric, sums: &mut [Sum; 2], pairs: impl Iterator<Item = &'a Pair>) -> Option<(f64, f64)> {
    let [old, new] = sums;
    old.clear();
    new.clear();
    for pair in pairs {
        old.add(metric, &pair.old);
        new.add(metric, &pair.new);
    }
    let (old, new) = (old.value(metric)?, new.value(metric)?);
    (old > 0.0 && new > 0.0 && old.is_finite() && new.is_finite()).then_some((old, new))
}

#[cfg(test)]
mod tests {
    use meridian_core::latency::LatencyCounts;
    use rand_distr::{Distribution, StandardNormal};

    use super::*;

    /// Intervals of 200 gaps each whose level drifts, for both alike and for each by itself with memory.
    fn pairs(seed: u64, intervals: usize, effect: f64) -> Vec<Pair> {
        let mut random = Pcg64::seed_from_u64(seed);
        let mut normal = move || -> f64 { StandardNormal.sample(&mut random) };
        let mut own = [0.0; 2];
        (0..intervals)
            .map(|_| {
                let shared = 0.5 * normal();
                let mut side = |own: &mut f64, factor: f64| {
                    *own = 0.3 * *own + 0.05 * normal();
                    let level = (shared + *own).exp() * factor * 20.0;
                    let gaps = (0..200).map(|_| level * (0.1 * normal()).exp()).collect();
                    Sample { counts: LatencyCounts { output_itl: gaps, ..LatencyCounts::default() }, seconds: 30.0 }
                };
                let [of_old, of_new] = &mut own;
                Pair { old: side(of_old, 1.0), new: side(of_new, effect) }
            })
            .collect()
    }

    fn metric(name: &str) -> Metric {
        name.parse().expect("a metric")
    }

    #[test]
    fn an_interval_has_the_truth_about_as_often_as_it_says() {
        let bootstrap = Bootstrap { draws: 300, ..Bootstrap::default() };
        for (intervals, effect) in [(8, 1.0), (20, 1.0), (20, 1.1)] {
            let has = (0..200).filter(|seed| {
                let found =
                    bootstrap.ratio(metric("output_itl_mean"), &pairs(*seed, intervals, effect)).expect("enough");
                found.low <= effect && effect <= found.high
            });
            let share = has.count() as f64 / 200.0;
            assert!((0.90..=1.0).contains(&share), "{intervals} intervals, effect {effect}: {share}");
        }
    }

    #[test]
    fn load_that_both_share_cancels_out() {
        let found = Bootstrap::default().ratio(metric("output_itl_mean"), &pairs(1, 24, 1.2)).expect("enough");
        // The levels differ by 50 % from interval to interval.
        assert!(found.high / found.low < 1.25 && found.low > 1.0, "{found:?}");
    }

    #[test]
    fn the_same_seed_gives_the_same_interval() {
        let pairs = pairs(3, 10, 1.0);
        let of = |seed| Bootstrap { seed, ..Bootstrap::default() }.ratio(metric("output_itl_p90"), &pairs);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn nothing_is_said_of_too_little() {
        let few = pairs(1, 3, 1.0);
        let of = |name: &str, pairs: &[Pair]| Bootstrap::default().ratio(metric(name), pairs);
        assert_eq!(of("output_itl_mean", &few[..2]), None, "two intervals");
        assert_eq!(of("output_itl_p99", &few), None, "600 values, and 1000 needed");
        assert!(of("output_itl_p95", &few).is_some());
        assert_eq!(of("ttft_mean", &few), None, "no values");
        assert_eq!(of("token_rate", &few), None, "a rate of 0");
    }
}
