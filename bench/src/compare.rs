//! Two results over the same trace, metric by metric: better, worse, or noise.
//!
//! Runs over the same trace have the same batches of requests, so the change of a metric is taken batch by batch: what
//! the trace does to both runs alike cancels out. `compare/stats.rs` says how an interval comes from batches that
//! follow each other.

mod stats;
mod text;
mod types;

use std::collections::BTreeMap;

use crate::results::{Better, METRICS, Metric, Results, Run, SCHEMA};
use stats::Estimate;
pub use types::{CONFIDENCE, Change, ChangeVerdict, CompareError, Comparison, Group, Options, Scale, Source};

/// Compare B with A.
///
/// # Errors
///
/// [`CompareError`], one line each.
pub fn compare(a: &Results, b: &Results, options: &Options) -> Result<Comparison, CompareError> {
    if !(options.min_change >= 0.0 && options.min_change.is_finite()) {
        return Err(CompareError::MinChange(options.min_change));
    }
    for (side, results) in [("A", a), ("B", b)] {
        if results.schema != SCHEMA {
            return Err(CompareError::Schema { side, found: results.schema });
        }
    }
    same_trace(a, b)?;
    let mut notes = Vec::new();
    if a.engine != b.engine {
        notes.push("the simulated engines or service levels differ: a change need not be the policy's".to_owned());
    }
    let mut unpaired = 0;
    let mut found = Vec::<(Group, Vec<(&Run, &Run)>)>::new();
    for (policy_a, policy_b) in pairs_of_policies(a, b, options)? {
        for run in a.runs.iter().filter(|run| run.policy == policy_a) {
            let partner = b
                .runs
                .iter()
                .find(|other| other.policy == policy_b && other.seed == run.seed && is_same_rate(other.rate, run.rate));
            let Some(partner) = partner else {
                unpaired += 1;
                continue;
            };
            same_batches(run, partner)?;
            let group = found.iter_mut().find(|(group, _)| {
                group.policy_a == policy_a && group.policy_b == policy_b && is_same_rate(group.rate, run.rate)
            });
            if let Some((group, runs)) = group {
                group.seeds.push(run.seed);
                runs.push((run, partner));
            } else {
                let (policy_a, policy_b) = (policy_a.to_owned(), policy_b.to_owned());
                let group = Group { policy_a, policy_b, rate: run.rate, seeds: vec![run.seed], metrics: Vec::new() };
                found.push((group, vec![(run, partner)]));
            }
        }
    }
    if found.is_empty() {
        return Err(CompareError::NoCommonRuns);
    }
    if unpaired > 0 {
        notes.push(format!("{unpaired} runs of A have no partner in B (policy, rate, seed) and were left out"));
    }
    found.sort_by(|(x, _), (y, _)| x.rate.total_cmp(&y.rate));
    let mut groups: Vec<Group> = Vec::with_capacity(found.len());
    let mut measured = Vec::new();
    for (group, runs) in found {
        let rows = METRICS.iter().filter(|metric| metric.better != Better::Neither);
        measured.push(rows.filter_map(|metric| measure(metric, &runs)).collect::<Vec<_>>());
        groups.push(group);
    }
    decide(&mut measured, options.min_change);
    for (group, rows) in groups.iter_mut().zip(measured) {
        group.metrics = rows.into_iter().map(|row| row.change).collect();
    }
    let count = |verdict| groups.iter().flat_map(|group| &group.metrics).filter(|row| row.verdict == verdict).count();
    let (worse, better) = (count(ChangeVerdict::Worse), count(ChangeVerdict::Better));
    Ok(Comparison { min_change: options.min_change, confidence: CONFIDENCE, notes, groups, worse, better })
}

fn is_same_rate(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= 1e-9 * a.abs().max(b.abs())
}

fn same_trace(a: &Results, b: &Results) -> Result<(), CompareError> {
    let facts = |results: &Results| {
        let trace = &results.trace;
        let [prompt, think, output] = trace.mean_tokens;
        [
            ("the number of requests", trace.requests as f64),
            ("the duration in seconds", trace.duration_s),
            ("the mean prompt in tokens", prompt),
            ("the mean thinking in tokens", think),
            ("the mean answer in tokens", output),
        ]
    };
    // Not the name: a file may have been moved.
    for ((what, x), (_, y)) in facts(a).into_iter().zip(facts(b)) {
        if !is_same_rate(x, y) {
            return Err(CompareError::Trace { what: what.into(), a: x.to_string(), b: y.to_string() });
        }
    }
    Ok(())
}

fn same_batches(a: &Run, b: &Run) -> Result<(), CompareError> {
    if a.batches.len() == b.batches.len() {
        return Ok(());
    }
    let what = format!("the number of batches of {:?} at rate {}, seed {},", a.policy, a.rate, a.seed);
    Err(CompareError::Trace { what, a: a.batches.len().to_string(), b: b.batches.len().to_string() })
}

fn pairs_of_policies<'a>(
    a: &'a Results,
    b: &'a Results,
    options: &'a Options,
) -> Result<Vec<(&'a str, &'a str)>, CompareError> {
    let asked = match (options.policy_a.as_deref(), options.policy_b.as_deref()) {
        (None, None) => return Ok(policies(a).into_iter().map(|policy| (policy, policy)).collect()),
        (Some(one), None) | (None, Some(one)) => (one, one),
        (Some(one), Some(other)) => (one, other),
    };
    for (side, results, policy) in [("A", a, asked.0), ("B", b, asked.1)] {
        let known = policies(results);
        if !known.contains(&policy) {
            return Err(CompareError::Policy { side, policy: policy.to_owned(), known: known.join(", ") });
        }
    }
    Ok(vec![asked])
}

fn policies(results: &Results) -> Vec<&str> {
    let mut names = Vec::<&str>::new();
    for run in &results.runs {
        if !names.contains(&run.policy.as_str()) {
            names.push(&run.policy);
        }
    }
    names
}

struct Measured {
    change: Change,
    better: Better,
    /// The size of the change as a share; none when there is nothing to relate it to.
    share: Option<f64>,
    estimate: Option<Estimate>,
}

type Values = BTreeMap<String, f64>;

/// The interval of a metric of B over that of A, in pairs of runs (A, B) over the same requests; none of too few batches.
pub(crate) fn interval_of_ratios(key: &str, pairs: &[(&Run, &Run)]) -> Option<[f64; 2]> {
    let metric = METRICS.iter().find(|metric| metric.key == key)?;
    let Change { a, scale, low: Some(low), high: Some(high), .. } = measure(metric, pairs)?.change else {
        return None;
    };
    match scale {
        Scale::Ratio => Some([1.0 + low, 1.0 + high]),
        Scale::Difference => (a > 0.0).then_some([1.0 + low / a, 1.0 + high / a]),
    }
}

/// Nothing when one side has no such metric.
fn measure(metric: &Metric, runs: &[(&Run, &Run)]) -> Option<Measured> {
    let both = |a: &Values, b: &Values| {
        let pair = (a.get(metric.key).copied()?, b.get(metric.key).copied()?);
        (pair.0.is_finite() && pair.1.is_finite()).then_some(pair)
    };
    let whole: Vec<(f64, f64)> = runs.iter().filter_map(|(a, b)| both(&a.metrics, &b.metrics)).collect();
    let (mean_a, mean_b) = means(&whole)?;
    let batches: Vec<Vec<(f64, f64)>> =
        runs.iter().map(|(a, b)| a.batches.iter().zip(&b.batches).filter_map(|(a, b)| both(a, b)).collect()).collect();
    let (source, series) = if batches.iter().map(Vec::len).sum::<usize>() >= stats::MIN_PAIRS {
        (Source::Batches, batches)
    } else {
        (Source::Seeds, whole.iter().map(|&pair| vec![pair]).collect())
    };
    let all: Vec<(f64, f64)> = series.concat();
    let scale = if all.iter().all(|&(a, b)| a > 0.0 && b > 0.0) { Scale::Ratio } else { Scale::Difference };
    let changes: Vec<Vec<f64>> = series
        .iter()
        .map(|pairs| {
            let change = |&(a, b): &(f64, f64)| if scale == Scale::Ratio { (b / a).ln() } else { b - a };
            pairs.iter().map(change).collect()
        })
        .collect();
    let estimate = stats::estimate(&changes);
    let share = estimate.as_ref().and_then(|found| match scale {
        Scale::Ratio => Some(found.mean.abs().exp_m1()),
        // Relative to both sides alike, so that it stays the same when A and B change places.
        Scale::Difference => {
            let base = all.iter().map(|(a, b)| (a.abs() + b.abs()) / 2.0).sum::<f64>() / all.len() as f64;
            (base > 0.0).then_some(found.mean.abs() / base)
        }
    });
    let shown = |value: f64| if scale == Scale::Ratio { value.exp_m1() } else { value };
    let change = Change {
        key: metric.key,
        title: metric.title,
        unit: metric.unit,
        a: mean_a,
        b: mean_b,
        scale,
        change: estimate.as_ref().map(|found| shown(found.mean)),
        low: estimate.as_ref().map(|found| shown(found.mean - found.half_width)),
        high: estimate.as_ref().map(|found| shown(found.mean + found.half_width)),
        p: None,
        source,
        pairs: estimate.as_ref().map_or(0, |found| found.pairs),
        verdict: ChangeVerdict::Unknown,
    };
    Some(Measured { change, better: metric.better, share, estimate })
}

fn means(pairs: &[(f64, f64)]) -> Option<(f64, f64)> {
    let (a, b) = pairs.iter().fold((0.0, 0.0), |(a, b), pair| (a + pair.0, b + pair.1));
    (!pairs.is_empty()).then(|| (a / pairs.len() as f64, b / pairs.len() as f64))
}

/// Verdicts, corrected for how many metrics of all groups were looked at.
fn decide(groups: &mut [Vec<Measured>], min_change: f64) {
    let raw: Vec<f64> = groups.iter().flatten().filter_map(|row| Some(row.estimate.as_ref()?.p)).collect();
    let mut corrected = stats::holm(&raw).into_iter();
    for row in groups.iter_mut().flatten() {
        let Some(estimate) = &row.estimate else { continue };
        let p = corrected.next().unwrap_or(1.0);
        row.change.p = Some(p);
        let counts = p < 1.0 - CONFIDENCE && row.share.is_none_or(|share| share >= min_change);
        row.change.verdict = match (counts, (estimate.mean > 0.0) == (row.better == Better::Higher)) {
            (false, _) => ChangeVerdict::Noise,
            (true, true) => ChangeVerdict::Better,
            (true, false) => ChangeVerdict::Worse,
        };
    }
}
