//! Whether the new policy exceeds a guard's limit.
//!
//! *The estimate.* In each interval of time, the metric of the engines with the new policy is related to that of the
//! engines with the old one over the same seconds: load that all share cancels out. Engines differ by themselves (routing,
//! hardware, neighbours), so the same engines were observed before the change, and the ratio that they had then is taken
//! off: a difference in differences (Card and Krueger, American Economic Review 84(4), 1994), of logarithms. An engine
//! that was not observed before has no place in either group.
//!
//! *The error.* The ratios before the change say how much the ratio varies from interval to interval while nothing has
//! changed; those after it are added to that. Few intervals say it badly, so other groups of as many engines are related to
//! the rest as well, before the change: placebos, of which none has the new policy (Abadie, Diamond and Hainmueller, Journal
//! of the American Statistical Association 105, 2010). The variance is pooled over all of them, but never less than that of
//! the groups themselves, which may be noisier than others. This makes a verdict after two intervals possible, where a
//! bootstrap of two intervals has nothing to draw from. Correlation of neighbours widens the error as for a first-order
//! autoregressive process (as in `bench/src/compare/stats.rs`). Intervals with too few values are joined.
//!
//! *Many looks.* Several guards are looked at after every interval of every step. The probability of a false alarm is
//! shared out: equally between guards and steps, and over the looks of a step as 1/2, 1/6, 1/12, ...: `1/(j(j+1))`, which
//! add up to 1 however long a step is extended (alpha spending: Lan and DeMets, Biometrika 70(3), 1983; the bound is
//! Bonferroni's, so it holds however the looks depend on each other).

use std::collections::{BTreeMap, BTreeSet, HashMap};

use meridian_core::latency::LatencyKind;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, StudentsT};

use super::machine::place;
use super::settings::{Guard, Side};
use crate::stats::{Metric, Sample};

/// What the engines did in one interval of time, by their names.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Interval {
    /// Engines with the old policy.
    pub(super) old: BTreeMap<String, Sample>,
    /// Engines with the new policy.
    pub(super) new: BTreeMap<String, Sample>,
}

impl Interval {
    /// Keep of each sample only what these metrics need.
    pub(super) fn keep_only(&mut self, metrics: &[Metric]) {
        let needed: Vec<LatencyKind> = LatencyKind::ALL
            .into_iter()
            .filter(|kind| metrics.iter().any(|metric| matches!(metric, Metric::Latency(of, _) if of == kind)))
            .collect();
        for sample in self.old.values_mut().chain(self.new.values_mut()) {
            for kind in LatencyKind::ALL.into_iter().filter(|kind| !needed.contains(kind)) {
                std::mem::take(sample.counts.of_mut(kind));
            }
        }
    }
}

/// The verdict about a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuardVerdict {
    /// The estimate is on the allowed side of the limit.
    Kept,
    /// The estimate is beyond the limit, but noise may be the reason.
    Unclear,
    /// Beyond the limit, and noise is not the reason.
    Exceeded,
    /// Too few values for an estimate.
    TooFew,
}

/// What is known of a metric in a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The metric.
    pub metric: Metric,
    /// Its guard; `None` for a metric that is only measured.
    pub guard: Option<Guard>,
    /// The verdict; of a metric without a guard, whether there is an estimate.
    pub verdict: GuardVerdict,
    /// The ratio of the new policy to the old one.
    pub measured: Option<Measured>,
    /// Intervals of the step that it comes from; those with too few values are joined and count as one.
    pub blocks: u32,
}

/// A ratio with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The estimate.
    pub ratio: f64,
    /// Lower end of its 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// The bound that is held against the limit at this look: below the estimate for `<=`, above it for `>=`.
    pub surely: f64,
}

/// Least deviation of a logarithm from interval to interval: about the width of a bucket of a sketch. Without it, equal
/// values before the change would make any difference certain.
const LEAST_DEVIATION: f64 = 0.01;
/// Fewest blocks of a step for an alarm: one interval may be an accident of a single engine.
const LEAST_BLOCKS: usize = 2;
/// Fewest blocks before the change.
const LEAST_BEFORE: usize = 3;
/// Most groups of engines, with the own ones, that say how ratios vary before the change: more cost time and add little.
const MOST_PLACEBOS: usize = 16;
/// Correlation of neighbours above which the error would be mostly guessed.
const MOST_CORRELATED: f64 = 0.9;

/// The look at a step of a roll-out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// The step's intervals so far, from 1.
    pub(super) number: u32,
    /// Probability of a false alarm by this guard in this step.
    pub(super) false_alarm: f64,
}

impl Look {
    fn level(self) -> f64 {
        let j = f64::from(self.number.max(1));
        self.false_alarm / (j * (j + 1.0))
    }
}

/// The finding about a metric: `before` are intervals in which every engine had the old policy.
pub(super) fn judge(
    metric: Metric,
    guard: Option<Guard>,
    before: &[Interval],
    step: &[Interval],
    look: Look,
) -> Finding {
    let series = Series::of(metric, before, step);
    let mut finding =
        Finding { metric, guard, verdict: GuardVerdict::TooFew, measured: None, blocks: series.step.len() as u32 };
    let Some(estimate) = series.estimate() else { return finding };
    let Estimate { log_ratio, error, student } = estimate;
    let half = error * student.inverse_cdf(0.975);
    let sure = error * student.inverse_cdf(1.0 - look.level());
    let surely = match guard.map(|guard| guard.side) {
        Some(Side::AtLeast) => log_ratio + sure,
        _ => log_ratio - sure,
    };
    let measured = Measured {
        ratio: ratio_of(log_ratio),
        low: ratio_of(log_ratio - half),
        high: ratio_of(log_ratio + half),
        surely: ratio_of(surely),
    };
    let Some(guard) = guard else {
        finding.measured = Some(measured);
        finding.verdict = GuardVerdict::Kept;
        return finding;
    };
    // Not the mean alone: one bad interval must not be an alarm by its size.
    let latest_exceed = series.step.len() >= LEAST_BLOCKS
        && series.step.iter().rev().take(LEAST_BLOCKS).all(|log| !guard.allows(log.exp()));
    finding.verdict = if !guard.allows(measured.surely) && latest_exceed {
        GuardVerdict::Exceeded
    } else if guard.allows(measured.ratio) {
        GuardVerdict::Kept
    } else {
        GuardVerdict::Unclear
    };
    finding.measured = Some(measured);
    finding
}

/// A ratio that JSON can hold: the bounds of few intervals may be anywhere.
fn ratio_of(log: f64) -> f64 {
    const MOST: f64 = 20.0;
    log.clamp(-MOST, MOST).exp()
}

/// Logarithms of the ratio, block by block, less what the same engines had before.
struct Series {
    /// Before the change, about 0 each: first of the groups themselves, then of placebos. Empty if too little is known.
    before: Vec<Vec<f64>>,
    /// So many independent series would say as much as these.
    independent: f64,
    step: Vec<f64>,
}

struct Estimate {
    log_ratio: f64,
    error: f64,
    student: StudentsT,
}

/// The engines of both groups.
type Groups<'a> = (BTreeSet<&'a str>, BTreeSet<&'a str>);

impl Series {
    fn of(metric: Metric, before: &[Interval], step: &[Interval]) -> Self {
        let known: BTreeSet<&str> = {
            let mut times = HashMap::<&str, usize>::new();
            before
                .iter()
                .flat_map(|interval| interval.old.keys())
                .for_each(|name| *times.entry(name).or_default() += 1);
            // Most of the time: a few seconds say nothing of what an engine is like.
            times.into_iter().filter(|(_, count)| 2 * count > before.len()).map(|(name, _)| name).collect()
        };
        // Joined until each has enough values; engines that come or go begin another block.
        let mut blocks: Vec<(Groups<'_>, Block)> = Vec::new();
        for interval in step {
            let pick = |samples: &BTreeMap<String, Sample>| -> BTreeSet<&str> {
                known.iter().copied().filter(|name| samples.contains_key(*name)).collect()
            };
            let groups = (pick(&interval.old), pick(&interval.new));
            match blocks.last_mut().filter(|(of, block)| *of == groups && !block.is_enough(metric)) {
                Some((_, block)) => block.add(interval, &groups),
                None => {
                    let mut block = Block::default();
                    block.add(interval, &groups);
                    blocks.push((groups, block));
                }
            }
        }
        // What each pair of groups had before the change.
        let mut offsets = HashMap::<Groups<'_>, Option<(f64, Vec<f64>)>>::new();
        let mut step_logs = Vec::new();
        let mut most_used = HashMap::<Groups<'_>, usize>::new();
        for (groups, block) in blocks.iter().filter(|(_, block)| block.is_enough(metric)) {
            let offset = offsets.entry(groups.clone()).or_insert_with(|| earlier(metric, before, groups));
            if let (Some((mean, _)), Some(log)) = (offset, block.log_ratio(metric)) {
                step_logs.push(log - *mean);
                *most_used.entry(groups.clone()).or_default() += 1;
            }
        }
        let usual =
            most_used.into_iter().max_by_key(|(groups, count)| (*count, groups.clone())).map(|(groups, _)| groups);
        let mut kept = Vec::new();
        let mut logs_before = Vec::new();
        if let Some(own) = usual {
            for groups in with_placebos(own) {
                if let Some((mean, logs)) = earlier(metric, before, &groups) {
                    logs_before.push(logs.into_iter().map(|log| log - mean).collect());
                    kept.push(groups);
                }
            }
        }
        Self { before: logs_before, independent: independent(&kept), step: step_logs }
    }

    fn estimate(&self) -> Option<Estimate> {
        let own = self.before.first()?;
        let (m, n) = (own.len(), self.step.len());
        if n == 0 {
            return None;
        }
        let log_ratio = self.step.iter().sum::<f64>() / n as f64;
        let after: Vec<f64> = self.step.iter().map(|log| log - log_ratio).collect();
        let squares = |rests: &[f64]| rests.iter().map(|rest| rest * rest).sum::<f64>();
        let of_all = self.before.iter().map(|rests| squares(rests)).sum::<f64>() + squares(&after);
        let count = self.before.iter().map(Vec::len).sum::<usize>() + n;
        let series = self.before.len() + 1;
        let pooled = of_all / (count - series) as f64;
        let variance =
            pooled.max((squares(own) + squares(&after)) / (m + n - 2) as f64).max(LEAST_DEVIATION * LEAST_DEVIATION);
        let products: f64 = self
            .before
            .iter()
            .chain(std::iter::once(&after))
            .flat_map(|rests| rests.windows(2))
            .map(|pair| pair[0] * pair[1])
            .sum();
        let found = if of_all > 0.0 { products / of_all } else { 0.0 };
        // Of few values it comes out too small, by about (1 + 4r) / n (Marriott and Pope, Biometrika 41, 1954).
        let bias = (1.0 + 4.0 * found.max(0.0)) * series as f64 / count as f64;
        let correlation = (found + bias).clamp(0.0, MOST_CORRELATED);
        let error = (variance_of_mean(variance, m, correlation) + variance_of_mean(variance, n, correlation)).sqrt();
        let freedom = self.independent * (m - 1) as f64 + (n - 1) as f64;
        // So many independent values have as certain a variance (Bayley and Hammersley, 1946).
        let square = correlation * correlation;
        let freedom = (freedom * (1.0 - square) / (1.0 + square)).max(1.0);
        let student = StudentsT::new(0.0, 1.0, freedom).ok()?;
        (log_ratio.is_finite() && error.is_finite()).then_some(Estimate { log_ratio, error, student })
    }
}

/// These groups, and others of as many engines as the smaller of the two, each against the rest. Drawn at random, but the same at
/// each look.
fn with_placebos(own: Groups<'_>) -> Vec<Groups<'_>> {
    let all: BTreeSet<&str> = &own.0 | &own.1;
    let size = own.0.len().min(own.1.len()).max(1);
    let mut groups = vec![own];
    for draw in 0..MOST_PLACEBOS as u64 {
        let mut names: Vec<&str> = all.iter().copied().collect();
        names.sort_by_key(|name| place(draw, name));
        for chosen in names.chunks_exact(size) {
            let chosen: BTreeSet<&str> = chosen.iter().copied().collect();
            let rest = &all - &chosen;
            let is_there = groups.iter().any(|(old, new)| *old == chosen || *new == chosen);
            if groups.len() < MOST_PLACEBOS && !is_there {
                groups.push((rest, chosen));
            }
        }
    }
    groups
}

/// So many independent series would say as much as those of these groups, where engines vary alike: their ratios have engines in
/// common (Satterthwaite, Biometrics Bulletin 2(6), 1946).
fn independent(groups: &[Groups<'_>]) -> f64 {
    let correlation = |one: &Groups<'_>, other: &Groups<'_>| {
        let common = |a: &BTreeSet<&str>, b: &BTreeSet<&str>| a.intersection(b).count() as f64;
        let variance = |(old, new): &Groups<'_>| 1.0 / new.len() as f64 + 1.0 / old.len() as f64;
        let covariance = common(&one.1, &other.1) / (one.1.len() * other.1.len()) as f64
            + common(&one.0, &other.0) / (one.0.len() * other.0.len()) as f64
            - common(&one.1, &other.0) / (one.1.len() * other.0.len()) as f64
            - common(&one.0, &other.1) / (one.0.len() * other.1.len()) as f64;
        covariance / (variance(one) * variance(other)).sqrt()
    };
    let squares: f64 = groups.iter().flat_map(|one| groups.iter().map(|other| correlation(one, other).powi(2))).sum();
    if squares > 0.0 { (groups.len() * groups.len()) as f64 / squares } else { 1.0 }
}

/// The variance of the mean of `count` neighbours in a first-order autoregressive process.
fn variance_of_mean(variance: f64, count: usize, correlation: f64) -> f64 {
    let n = count as f64;
    let sum: f64 = (1..count).map(|k| (1.0 - k as f64 / n) * correlation.powi(k as i32)).sum();
    variance / n * (1.0 + 2.0 * sum)
}

/// The ratio of these groups while both had the old policy: its mean logarithm and that of each block.
fn earlier(metric: Metric, before: &[Interval], groups: &Groups<'_>) -> Option<(f64, Vec<f64>)> {
    let mut logs = Vec::new();
    let mut block = Block::default();
    for interval in before {
        // All engines are in `old` then.
        merge(&interval.old, &groups.0, &mut block.old);
        merge(&interval.old, &groups.1, &mut block.new);
        if block.is_enough(metric) {
            logs.extend(block.log_ratio(metric));
            block = Block::default();
        }
    }
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    (logs.len() >= LEAST_BEFORE && mean.is_finite()).then_some((mean, logs))
}

/// Add the samples of these engines.
fn merge(samples: &BTreeMap<String, Sample>, names: &BTreeSet<&str>, sum: &mut Sample) {
    samples.iter().filter(|(name, _)| names.contains(name.as_str())).for_each(|(_, sample)| sum.merge(sample));
}

/// Consecutive intervals of the same engines.
#[derive(Default)]
struct Block {
    old: Sample,
    new: Sample,
}

impl Block {
    fn add(&mut self, interval: &Interval, (old, new): &Groups<'_>) {
        merge(&interval.old, old, &mut self.old);
        merge(&interval.new, new, &mut self.new);
    }

    fn is_enough(&self, metric: Metric) -> bool {
        if let Metric::Rate(_) = metric {
            // Without any load, nothing can be said; with some, few tokens are the finding.
            return self.old.seconds > 0.0 && self.new.seconds > 0.0 && metric.count(&self.old.counts) > 0;
        }
        metric.count(&self.old.counts) >= metric.least_count() && metric.count(&self.new.counts) >= metric.least_count()
    }

    fn log_ratio(&self, metric: Metric) -> Option<f64> {
        let value = |sample: &Sample| match metric {
            // Half of one, so that none at all has a logarithm.
            Metric::Rate(_) => Some((metric.count(&sample.counts) as f64 + 0.5) / sample.seconds),
            Metric::Attainment => {
                Some((sample.counts.in_time as f64 + 0.5) / (metric.count(&sample.counts) as f64 + 0.5))
            }
            _ => metric.of(sample),
        };
        let log = (value(&self.new)? / value(&self.old)?).ln();
        log.is_finite().then_some(log)
    }
}

#[cfg(test)]
mod tests;
