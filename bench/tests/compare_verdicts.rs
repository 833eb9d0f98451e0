//! Verdicts: what changed is found, what did not is noise.

use meridian_bench::compare::{ChangeVerdict, Comparison, Options, Scale, Source, compare};
use meridian_bench::results::{Better, METRICS, Results};
use proptest::prelude::*;
use support::{Made, normal, random};

use crate::support;

const KEYS: [&str; 8] = [
    "itl_output_p99_ms",
    "ttot_p99_ms",
    "ttfo_p50_ms",
    "ttfo_p99_ms",
    "e2e_mean_ms",
    "throughput_tok_s",
    "goodput_rps",
    "slo_attainment",
];

/// Batches with noise of their own: nothing but the trace is common.
fn draws(seed: u64, batches: usize, correlation: f64) -> Results {
    let mut results = Made { policies: &["p"], batches, ..Made::default() }.results();
    let mut random = random(seed);
    let mut state = KEYS.map(|_| normal(&mut random));
    for batch in &mut results.runs[0].batches {
        batch.clear();
        for (key, state) in KEYS.iter().zip(&mut state) {
            *state = correlation * *state + (1.0 - correlation * correlation).sqrt() * normal(&mut random);
            batch.insert((*key).to_owned(), 100.0 * (0.2 * *state).exp());
        }
    }
    results.runs[0].metrics.retain(|key, _| KEYS.contains(&key.as_str()));
    results
}

fn done(a: &Results, b: &Results) -> Comparison {
    compare(a, b, &Options::default()).expect("comparable")
}

fn verdicts(comparison: &Comparison) -> Vec<ChangeVerdict> {
    comparison.groups.iter().flat_map(|group| &group.metrics).map(|row| row.verdict).collect()
}

#[test]
fn the_same_results_are_noise() {
    let results = Made { rates: &[2.0, 4.0], seeds: &[1, 2], ..Made::default() }.results();
    let found = done(&results, &results);
    assert_eq!(found.groups.len(), 2 * 3);
    let judged = METRICS.iter().filter(|metric| metric.better != Better::Neither).count();
    assert!(found.groups.iter().all(|group| group.metrics.len() == judged && group.seeds == [1, 2]));
    assert!(verdicts(&found).iter().all(|verdict| *verdict == ChangeVerdict::Noise));
    assert_eq!((found.worse, found.better, found.exit_code()), (0, 0, 0));
}

#[test]
fn a_fifth_slower_is_worse() {
    let a = Made { noise_seed: 1, ..Made::default() }.results();
    let b = Made { noise_seed: 2, slower: 1.2, ..Made::default() }.results();
    let found = done(&a, &b);
    assert_eq!(found.exit_code(), 1);
    for group in &found.groups {
        let row = group.metrics.iter().find(|row| row.key == "ttfo_p99_ms").expect("is compared");
        assert_eq!((row.verdict, row.scale, row.source), (ChangeVerdict::Worse, Scale::Ratio, Source::Batches));
        let (low, high) = (row.low.expect("an interval"), row.high.expect("an interval"));
        assert!(low < 0.2 && 0.2 < high && low > 0.1 && high < 0.3, "{low} {high}");
        assert_eq!(
            row.a,
            a.runs.iter().find(|run| run.policy == group.policy_a).expect("there").metrics["ttfo_p99_ms"]
        );
    }
    assert!(found.to_string().contains("WORSE"));
}

#[test]
fn small_changes_are_noise_however_certain() {
    let a = Made::default().results();
    let b = Made { slower: 1.005, ..Made::default() }.results();
    assert_eq!(done(&a, &b).worse, 0);
    let strict = Options { min_change: 0.001, ..Options::default() };
    assert!(compare(&a, &b, &strict).expect("comparable").worse > 0);
}

#[test]
fn independent_draws_give_few_false_verdicts() {
    let false_ones = |batches, correlation| {
        let is_false = |seed: &u64| {
            let found = done(&draws(2 * seed, batches, correlation), &draws(2 * seed + 1, batches, correlation));
            found.worse + found.better > 0
        };
        (0..500).filter(is_false).count()
    };
    let independent = false_ones(20, 0.0);
    assert!(independent < 25, "{independent} of 500");
    // Batches that follow each other closely: joined ones still depend on each other, and that is allowed for.
    let correlated = false_ones(60, 0.5);
    assert!(correlated < 40, "{correlated} of 500");
}

#[test]
fn seeds_stand_in_for_missing_batches() {
    let seeds: Vec<u64> = (1..=5).collect();
    let made = |slower| Made { policies: &["p"], seeds: &seeds, batches: 0, slower, ..Made::default() }.results();
    let found = done(&made(1.0), &made(1.3));
    let row = found.groups[0].metrics.iter().find(|row| row.key == "ttfo_p99_ms").expect("is compared");
    assert_eq!((row.verdict, row.source, row.pairs), (ChangeVerdict::Worse, Source::Seeds, 5));
    let one = Made { policies: &["p"], batches: 0, ..Made::default() }.results();
    assert!(verdicts(&done(&one, &one)).iter().all(|verdict| *verdict == ChangeVerdict::Unknown));
}

#[test]
fn values_that_can_be_zero_are_compared_by_difference() {
    let (mut a, mut b) = (draws(1, 20, 0.0), draws(2, 20, 0.0));
    for (results, fault) in [(&mut a, 0.0), (&mut b, 2.0)] {
        results.runs[0].metrics.insert("faults".into(), 20.0 * fault);
        for (at, batch) in results.runs[0].batches.iter_mut().enumerate() {
            batch.insert("faults".into(), fault * (1 + at % 2) as f64);
        }
    }
    let found = done(&a, &b);
    let row = found.groups[0].metrics.iter().find(|row| row.key == "faults").expect("is compared");
    assert_eq!((row.scale, row.verdict, row.change), (Scale::Difference, ChangeVerdict::Worse, Some(3.0)));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn swapped_sides_swap_verdicts(seed in 0_u64..10_000, factor in 0.5_f64..2.0, batches in 0_usize..70) {
        let (a, mut b) = (draws(seed, batches, 0.3), draws(seed + 1, batches, 0.3));
        for value in b.runs[0].batches.iter_mut().flat_map(|batch| batch.values_mut()) {
            *value *= factor;
        }
        let (there, back) = (done(&a, &b), done(&b, &a));
        prop_assert_eq!((there.worse, there.better), (back.better, back.worse));
        for (x, y) in there.groups[0].metrics.iter().zip(&back.groups[0].metrics) {
            let swapped = match y.verdict {
                ChangeVerdict::Better => ChangeVerdict::Worse,
                ChangeVerdict::Worse => ChangeVerdict::Better,
                other => other,
            };
            prop_assert_eq!(x.verdict, swapped);
        }
    }
}
