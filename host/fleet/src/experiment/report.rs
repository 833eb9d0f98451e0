//! The verdict of an experiment.

use meridian_core::latency::{LatencyKind, Sketch};
use serde::{Deserialize, Serialize};

use super::{PairRecord, Settings, Stage, State};
use crate::prediction::PolicyName;
use crate::stats::{Bootstrap, Metric, Pair, Ratio, Sample};

/// Share of values from requests of both policies above which a metric is said to mix them.
const MIXED: f64 = 0.05;
/// Longest further time that is told, in lengths of the experiment.
const MOST_TIMES: f64 = 1000.0;

/// The verdict about a metric.
///
/// ```
/// use meridian_fleet::experiment::MetricVerdict;
///
/// let unclear = MetricVerdict::Unclear { more_s: Some(3600.0) };
/// assert_eq!(serde_json::to_string(&unclear).unwrap(), r#"{"verdict":"unclear","more_s":3600.0}"#);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "verdict", rename_all = "lowercase")]
pub enum MetricVerdict {
    /// The new policy is better.
    Better,
    /// The new policy is worse.
    Worse,
    /// The difference is smaller than the smallest difference of interest.
    Same,
    /// The interval of the difference has both.
    Unclear {
        /// Further seconds until the smallest difference of interest could be told; `None` where that is not known or hopeless.
        more_s: Option<f64>,
    },
}

/// A metric of an experiment.
///
/// ```
/// use meridian_fleet::experiment::Report;
/// # use meridian_fleet::experiment::{Settings, State};
///
/// let report = Report::of(&State::new(Settings::default(), "a", Default::default()));
/// assert_eq!((report.findings.len(), report.findings[0].ratio), (1, None), "nothing is measured yet");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The metric.
    pub metric: Metric,
    /// Whether the verdict of the experiment is about it. Other metrics are for information: of many, some differ by chance.
    pub decides: bool,
    /// The ratio, new over old; `None` where there are too few values.
    pub ratio: Option<Ratio>,
    /// The verdict.
    #[serde(flatten)]
    pub verdict: MetricVerdict,
    /// The estimated share of its values that come from requests which both policies had: the difference is shown too small
    /// by about this share.
    pub carry_over: f64,
}

/// What an experiment has found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The engine, by its address.
    pub engine: String,
    /// What it does.
    pub settings: Settings,
    /// The policy that decided before.
    pub old: PolicyName,
    /// The policy that is tried, once the engine has loaded it.
    pub new: Option<PolicyName>,
    /// Whether it goes on.
    #[serde(flatten)]
    pub stage: Stage,
    /// Whether the old policy decides again, or another that somebody put there meanwhile.
    pub restored: bool,
    /// Pairs that were measured.
    pub pairs: usize,
    /// Pairs that do not count.
    pub void: usize,
    /// Share of the time that was cut off as warm-up.
    pub cut: f64,
    /// The metrics: those of the verdict first.
    pub findings: Vec<Finding>,
    /// What a reader must know, a line each.
    pub notes: Vec<String>,
}

impl Report {
    /// The report of an experiment as far as it is. Before its end, verdicts are interim: whoever looks often enough finds a
    /// difference where there is none.
    #[must_use]
    pub fn of(state: &State) -> Self {
        let settings = &state.settings;
        let pairs = state.measured();
        let both = both(&pairs);
        let others = Metric::all().filter(|metric| !settings.metrics.contains(metric));
        let all =
            settings.metrics.iter().copied().map(|metric| (metric, true)).chain(others.map(|metric| (metric, false)));
        let findings: Vec<Finding> = all
            .filter_map(|(metric, decides)| {
                let confidence = if decides { settings.confidence() } else { 0.95 };
                let ratio = Bootstrap { confidence, seed: settings.seed, ..Bootstrap::default() }.ratio(metric, &pairs);
                // A metric without values is of no interest, unless it was asked for.
                (decides || ratio.is_some()).then(|| Finding {
                    metric,
                    decides,
                    ratio,
                    verdict: verdict(metric, ratio.as_ref(), settings, pairs.len()),
                    carry_over: carry_over(metric, &both, settings),
                })
            })
            .collect();
        let mut notes = Vec::new();
        for finding in findings.iter().filter(|finding| finding.decides && finding.carry_over > MIXED) {
            notes.push(format!(
                "{}: about {:.0} % of its values are of requests that both policies had: it shows the difference too small; \
                 make the intervals or the warm-up longer",
                finding.metric,
                100.0 * finding.carry_over
            ));
        }
        for finding in findings.iter().filter(|finding| finding.decides && finding.ratio.is_none() && !pairs.is_empty())
        {
            notes.push(format!(
                "{}: too few values, expected at least {}",
                finding.metric,
                finding.metric.least_count()
            ));
        }
        let mut reasons: Vec<&str> = state.void().collect();
        reasons.sort_unstable();
        reasons.dedup();
        notes.extend(reasons.into_iter().map(|why| format!("pairs that do not count: {why}")));
        Self {
            engine: state.engine.clone(),
            settings: settings.clone(),
            old: PolicyName::from(&state.old),
            new: state.new.as_ref().map(PolicyName::from),
            stage: state.stage.clone(),
            restored: state.restored,
            pairs: pairs.len(),
            void: state.pairs.iter().filter(|pair| pair.void.is_some()).count(),
            cut: settings.warm_up_s / settings.interval_s,
            findings,
            notes,
        }
    }

    /// Whether every pair was measured, so that the verdicts count.
    #[must_use]
    pub fn is_final(&self) -> bool {
        matches!(self.stage, Stage::Ended { complete: true, .. })
    }
}

/// Both sides of all pairs together.
fn both(pairs: &[Pair]) -> Sample {
    let mut all = Sample::default();
    for pair in pairs {
        all.merge(&pair.old);
        all.merge(&pair.new);
    }
    all
}

/// Whether less of a metric is better.
pub(super) fn less_is_better(metric: Metric) -> bool {
    match metric {
        Metric::Latency(..) | Metric::RecomputedShare => true,
        Metric::Rate(_) | Metric::Attainment => false,
    }
}

fn verdict(metric: Metric, ratio: Option<&Ratio>, settings: &Settings, pairs: usize) -> MetricVerdict {
    let Some(ratio) = ratio else { return MetricVerdict::Unclear { more_s: None } };
    let is_less = ratio.high < 1.0;
    if is_less || ratio.low > 1.0 {
        return if is_less == less_is_better(metric) { MetricVerdict::Better } else { MetricVerdict::Worse };
    }
    let limit = settings.detect.ln_1p();
    if ratio.high.ln() < limit && -ratio.low.ln() < limit {
        return MetricVerdict::Same;
    }
    // The interval shrinks with the root of the number of pairs.
    let half = (ratio.high / ratio.low).ln() / 2.0;
    let needed = pairs as f64 * (half / limit).powi(2);
    let more = (needed - pairs as f64).max(1.0).ceil();
    let is_known = more.is_finite() && more <= MOST_TIMES * f64::from(settings.pairs);
    MetricVerdict::Unclear { more_s: is_known.then_some(more * 2.0 * settings.interval_s) }
}

/// The estimated share of a metric's values in the measured parts that belong to requests which began before the policy of
/// their interval took over.
///
/// A value that took `x`, and that is observed at a time `u` after the switch, began before it if `x > u`. Observations come
/// evenly between the end of the warm-up `w` and the end of the interval, `L` later: of values `x`, the share is
/// `(x - w) / L`, at least 0 and at most 1.
///
/// ```
/// use meridian_core::latency::LatencyCounts;
/// use meridian_fleet::experiment::{Settings, carry_over};
/// use meridian_fleet::stats::Sample;
///
/// // Warm-up 30 s, and 90 s measured: of requests that take 75 s, one half began before.
/// let counts = LatencyCounts { e2e: [75_000.0].into_iter().collect(), ..LatencyCounts::default() };
/// let sample = Sample { counts, seconds: 90.0 };
/// let share = carry_over("e2e_mean".parse().unwrap(), &sample, &Settings::default());
/// assert!((share - 0.5).abs() < 0.01);
/// ```
#[must_use]
pub fn carry_over(metric: Metric, sample: &Sample, settings: &Settings) -> f64 {
    let Metric::Latency(kind, _) = metric else { return 0.0 };
    // From the end of thinking, not from arrival: its queue is that of the policy in place.
    let sketch: &Sketch = sample.counts.of(kind);
    let count = sketch.count();
    if count == 0 || matches!(kind, LatencyKind::OutputItl | LatencyKind::ThinkItl) {
        return 0.0;
    }
    let (warm_up_ms, measured_ms) = (1e3 * settings.warm_up_s, 1e3 * settings.measured_s());
    let shares = (0..count.min(1000)).map(|i| {
        let share = (i as f64 + 0.5) / count.min(1000) as f64;
        let ms = sketch.quantile_ms(share).unwrap_or(0.0);
        ((ms - warm_up_ms) / measured_ms).clamp(0.0, 1.0)
    });
    shares.sum::<f64>() / count.min(1000) as f64
}

/// Whether the experiment has to stop because the new policy is certainly worse than is tolerated, and why.
pub(super) fn intolerable(settings: &Settings, pairs: &[PairRecord]) -> Option<String> {
    let pairs: Vec<Pair> = pairs.iter().filter_map(PairRecord::pair).collect();
    settings.metrics.iter().find_map(|metric| {
        let draws = Bootstrap { confidence: settings.confidence(), seed: settings.seed, draws: 200 };
        let ratio = draws.ratio(*metric, &pairs)?;
        let worst = if less_is_better(*metric) { ratio.low } else { 1.0 / ratio.high };
        (worst > settings.stop_above).then(|| {
            let factor = settings.stop_above;
            format!("{metric}: {:.3}x of the old policy's, certainly worse by more than {factor}x", ratio.ratio)
        })
    })
}

#[cfg(test)]
mod tests {
    use super::super::Side;
    use super::*;
    use meridian_core::latency::LatencyCounts;
    use meridian_engine::control::Version;

    fn sample(gap_ms: f64, number: u32) -> Sample {
        // A level that drifts with the number of the pair, and the same noise in both.
        let level = gap_ms * (1.0 + 0.2 * f64::from(number % 5));
        let output_itl = (0..400).map(|i| level * (1.0 + f64::from((i * 7 + number * 13) % 40) / 100.0)).collect();
        Sample { counts: LatencyCounts { output_itl, ..LatencyCounts::default() }, seconds: 90.0 }
    }

    fn state(pairs: u32, ratio: f64, wobble: f64) -> State {
        let mut state = State::new(Settings::default(), "a", Version::default());
        for number in 0..pairs {
            let wobble = 1.0 + wobble * (f64::from(number * 7 % 11) / 5.0 - 1.0);
            let (old, new) = (Some(sample(20.0, number)), Some(sample(20.0 * ratio * wobble, number)));
            state.pairs.push(PairRecord { first: Side::Old, old, new, void: None });
        }
        state
    }

    fn of(state: &State) -> Finding {
        Report::of(state).findings.swap_remove(0)
    }

    #[test]
    fn a_difference_is_told_with_its_direction() {
        assert_eq!(of(&state(20, 0.9, 0.02)).verdict, MetricVerdict::Better);
        assert_eq!(of(&state(20, 1.1, 0.02)).verdict, MetricVerdict::Worse);
        assert_eq!(of(&state(20, 1.0, 0.01)).verdict, MetricVerdict::Same);
    }

    #[test]
    fn what_is_unclear_has_the_time_that_it_takes() {
        let found = of(&state(12, 1.0, 0.3));
        let MetricVerdict::Unclear { more_s: Some(more_s) } = found.verdict else { panic!("{found:?}") };
        let ratio = found.ratio.expect("values");
        let half = (ratio.high / ratio.low).ln() / 2.0;
        let needed = 12.0 * (half / 0.05_f64.ln_1p()).powi(2);
        assert!((more_s - (needed - 12.0).ceil() * 240.0).abs() < 1e-6, "{found:?}");
        assert_eq!(of(&state(2, 1.0, 0.3)).verdict, MetricVerdict::Unclear { more_s: None });
    }

    #[test]
    fn a_rate_that_grows_is_better() {
        let sample = |output_tokens| {
            Some(Sample { counts: LatencyCounts { output_tokens, ..LatencyCounts::default() }, seconds: 90.0 })
        };
        let metrics = vec!["output_token_rate".parse().expect("a metric")];
        let mut state = State::new(Settings { metrics, ..Settings::default() }, "a", Version::default());
        for number in 0..10 {
            let (old, new) = (sample(1000 + number % 3), sample(1200 + number % 2));
            state.pairs.push(PairRecord { first: Side::Old, old, new, void: None });
        }
        assert_eq!(of(&state).verdict, MetricVerdict::Better);
    }

    #[test]
    fn an_intolerable_policy_is_noticed() {
        assert_eq!(intolerable(&Settings::default(), &state(6, 1.1, 0.02).pairs), None);
        let why = intolerable(&Settings::default(), &state(6, 2.0, 0.02).pairs).expect("twice as slow");
        assert!(why.starts_with("output_itl_mean: 2.0"), "{why}");
    }

    #[test]
    fn requests_that_live_longer_than_an_interval_are_named() {
        let metrics = vec!["e2e_mean".parse().expect("a metric")];
        let mut state = State::new(Settings { metrics, ..Settings::default() }, "a", Version::default());
        let counts = LatencyCounts { e2e: [60_000.0; 40].into_iter().collect(), ..LatencyCounts::default() };
        let sample = Sample { counts, seconds: 90.0 };
        for _ in 0..4 {
            let (old, new) = (Some(sample.clone()), Some(sample.clone()));
            state.pairs.push(PairRecord { first: Side::Old, old, new, void: None });
        }
        let report = Report::of(&state);
        assert!((report.findings[0].carry_over - 1.0 / 3.0).abs() < 0.01, "{report:?}");
        // A bucket of a sketch is 1.6 % wide.
        assert!(
            report.notes[0].starts_with("e2e_mean: about 33 %") || report.notes[0].starts_with("e2e_mean: about 34 %"),
            "{:?}",
            report.notes
        );
    }
}
