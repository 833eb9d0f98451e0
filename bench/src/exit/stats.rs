//! Paired intervals, and what the cheapest equally accurate fixed budget costs.
//!
//! All settings see the same problems, so a resample takes the same problems from each.

use anyhow::ensure;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use serde::Serialize;
use statrs::statistics::{Data, OrderStatistics};

/// Resamples of the problems.
pub(super) const RESAMPLES: usize = 2000;
/// Share of the resamples outside of an interval, at each end.
const OUTSIDE: f64 = 0.025;
/// Figures of a setting.
const FIGURES: usize = 6;

/// One setting, a value a problem: the mean over its samples.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ProblemMeans {
    /// Think tokens.
    pub tokens: Vec<f64>,
    /// Share of the samples that were right.
    pub right: Vec<f64>,
}

/// A figure of all problems with the 95 % percentile interval of its resamples; `None` is what has no value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Interval {
    pub value: Option<f64>,
    pub low: Option<f64>,
    pub high: Option<f64>,
}

impl Interval {
    /// Resamples without a value are left out.
    pub(super) fn of(value: f64, resampled: impl IntoIterator<Item = f64>) -> Self {
        let known = |value: f64| value.is_finite().then_some(value);
        let values: Vec<f64> = resampled.into_iter().filter(|value| value.is_finite()).collect();
        if values.is_empty() {
            return Self { value: known(value), low: None, high: None };
        }
        let mut values = Data::new(values);
        let [low, high] = [OUTSIDE, 1.0 - OUTSIDE].map(|share| known(values.quantile(share)));
        Self { value: known(value), low, high }
    }
}

/// Mean think tokens and accuracy of a fixed budget.
pub(super) type BudgetPoint = (f64, f64);

/// The fixed budget, or mixture of two neighbours, that a rule is held against.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Reference {
    /// Mean think tokens.
    pub tokens: f64,
    /// False: no measured budget is as accurate as the rule, and the most accurate one is taken instead.
    pub reached: bool,
    /// True: the smallest measured budget is accurate enough already, and a smaller one might be too.
    pub at_smallest: bool,
}

/// The cheapest fixed budget that is not less accurate than `accuracy`, of a curve with the smallest budget first.
///
/// Between two neighbours the curve is linear: giving a share of the requests the one budget and the rest the other reaches every
/// point of that line. When the whole curve is below `accuracy`, its best point is taken, at its cheapest: that favours the fixed
/// budget. `None` of an empty curve.
pub(super) fn cheapest(curve: &[BudgetPoint], accuracy: f64) -> Option<Reference> {
    let best = curve.iter().map(|budget| budget.1).fold(f64::NEG_INFINITY, f64::max);
    let target = accuracy.min(best);
    let (smallest, others) = curve.split_first()?;
    let reached = accuracy <= best;
    if smallest.1 >= target {
        return Some(Reference { tokens: smallest.0, reached, at_smallest: accuracy <= smallest.1 });
    }
    let at = others.iter().position(|budget| budget.1 >= target)?;
    let ((t0, a0), (t1, a1)) = (curve[at], others[at]);
    Some(Reference { tokens: t0 + (t1 - t0) * (target - a0) / (a1 - a0), reached, at_smallest: false })
}

/// Share of the tokens `of` that is saved; NaN when there are none to save.
pub(super) fn saving(tokens: f64, of: f64) -> f64 {
    if of == 0.0 { f64::NAN } else { 1.0 - tokens / of }
}

/// One setting beside no limit and beside the fixed budgets.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Compared {
    pub tokens: Interval,
    pub accuracy: Interval,
    /// Of the accuracy, to no limit.
    pub difference: Interval,
    /// Of think tokens, against no limit.
    pub saving: Interval,
    /// Against the cheapest fixed budget that is not less accurate.
    pub saving_fixed: Interval,
    /// Against the cheapest that is a little less accurate at most: kinder to the fixed budget.
    pub saving_fixed_within: Interval,
    pub reference: Reference,
}

/// How settings are compared.
#[derive(Clone, Debug)]
pub(super) struct Comparing<'a> {
    /// Which setting is no limit.
    pub base: usize,
    /// Which are the fixed budgets, from the smallest to no limit.
    pub curve: &'a [usize],
    /// Accuracy that a fixed budget may lack.
    pub within: f64,
    pub seed: u64,
    pub resamples: usize,
}

/// Every setting against no limit and against the fixed budgets.
///
/// # Errors
/// There are no problems, the settings do not have the same number of them, or there is no fixed budget.
pub(super) fn compare(settings: &[ProblemMeans], how: &Comparing<'_>) -> anyhow::Result<Vec<Compared>> {
    let problems = settings.first().map_or(0, |setting| setting.tokens.len());
    let same = settings.iter().all(|setting| [setting.tokens.len(), setting.right.len()] == [problems; 2]);
    ensure!(same && problems > 0, "expected the same problems in each setting, at least one");
    ensure!(!how.curve.is_empty(), "no fixed budgets: expected at least one");
    let means = means(settings, &vec![1; problems]);
    let values = how.figures(&means);
    let mut drawn: Vec<Vec<[f64; FIGURES]>> = vec![Vec::with_capacity(how.resamples); settings.len()];
    let mut rng = Pcg64::seed_from_u64(how.seed);
    let mut counts = vec![0_u32; problems];
    for _ in 0..how.resamples {
        counts.fill(0);
        for _ in 0..problems {
            counts[rng.random_range(0..problems)] += 1;
        }
        for (of, figures) in drawn.iter_mut().zip(how.figures(&self::means(settings, &counts))) {
            of.push(figures);
        }
    }
    let curve = how.curve_of(&means);
    let compared = |at: usize| {
        let interval = |figure: usize| Interval::of(values[at][figure], drawn[at].iter().map(|of| of[figure]));
        Some(Compared {
            tokens: interval(0),
            accuracy: interval(1),
            difference: interval(2),
            saving: interval(3),
            saving_fixed: interval(4),
            saving_fixed_within: interval(5),
            reference: cheapest(&curve, means[at].1)?,
        })
    };
    Ok((0..settings.len()).filter_map(compared).collect())
}

/// Mean think tokens and accuracy of each setting, every problem counted so many times.
fn means(settings: &[ProblemMeans], counts: &[u32]) -> Vec<(f64, f64)> {
    let all: f64 = counts.iter().copied().map(f64::from).sum();
    let mean = |values: &[f64]| values.iter().zip(counts).map(|(value, n)| value * f64::from(*n)).sum::<f64>() / all;
    settings.iter().map(|setting| (mean(&setting.tokens), mean(&setting.right))).collect()
}

impl Comparing<'_> {
    fn curve_of(&self, means: &[(f64, f64)]) -> Vec<BudgetPoint> {
        self.curve.iter().map(|at| means[*at]).collect()
    }

    /// In the order of [`Compared`].
    fn figures(&self, means: &[(f64, f64)]) -> Vec<[f64; FIGURES]> {
        let curve = self.curve_of(means);
        let (base_tokens, base_accuracy) = means[self.base];
        let against = |tokens: f64, accuracy: f64| {
            cheapest(&curve, accuracy).map_or(f64::NAN, |reference| saving(tokens, reference.tokens))
        };
        let figures = |&(tokens, accuracy): &(f64, f64)| {
            [
                tokens,
                accuracy,
                accuracy - base_accuracy,
                saving(tokens, base_tokens),
                against(tokens, accuracy),
                against(tokens, accuracy - self.within),
            ]
        };
        means.iter().map(figures).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CURVE: [BudgetPoint; 5] = [(10.0, 0.2), (20.0, 0.6), (40.0, 0.9), (60.0, 0.8), (80.0, 0.95)];

    fn reference(accuracy: f64) -> (f64, bool, bool) {
        let found = cheapest(&CURVE, accuracy).expect("budgets");
        ((1e9 * found.tokens).round() / 1e9, found.reached, found.at_smallest)
    }

    fn sample(tokens: &[f64], right: &[f64]) -> ProblemMeans {
        ProblemMeans { tokens: tokens.to_vec(), right: right.to_vec() }
    }

    /// So many problems with random tokens, of which that share is right.
    fn random(seed: u64, problems: usize, share: f64) -> ProblemMeans {
        let mut rng = Pcg64::seed_from_u64(seed);
        let tokens = (0..problems).map(|_| f64::from(rng.random_range(1_u32..500))).collect();
        let right = (0..problems).map(|_| f64::from(u8::from(rng.random::<f64>() < share))).collect();
        ProblemMeans { tokens, right }
    }

    /// The second setting against the first, which is no limit and the only budget.
    fn against(none: ProblemMeans, other: ProblemMeans, seed: u64) -> Compared {
        let how = Comparing { base: 0, curve: &[0], within: 0.005, seed, resamples: RESAMPLES };
        compare(&[none, other], &how).expect("the same problems")[1]
    }

    fn ends(of: Interval) -> [f64; 3] {
        [of.low, of.value, of.high].map(|end| end.expect("a value"))
    }

    #[test]
    fn the_cheapest_budget_between_two_points() {
        assert_eq!([0.4, 0.75, 0.9].map(reference), [15.0, 30.0, 40.0].map(|tokens| (tokens, true, false)));
        // A dip is no way: the next crossing is behind it.
        assert_eq!(reference(0.92), (76.0, true, false));
    }

    #[test]
    fn the_cheapest_budget_outside_the_curve() {
        assert_eq!(reference(0.1), (10.0, true, true));
        assert_eq!(reference(0.99), (80.0, false, false));
        let single = cheapest(&[(5.0, 0.5)], 0.9);
        assert_eq!(single, Some(Reference { tokens: 5.0, reached: false, at_smallest: false }));
        assert_eq!(cheapest(&[], 0.5), None);
    }

    #[test]
    fn a_saving_of_nothing_is_no_number() {
        assert_eq!(saving(30.0, 40.0), 0.25);
        assert!(saving(0.0, 0.0).is_nan());
        let none = Interval { value: None, low: None, high: None };
        assert_eq!(Interval::of(f64::NAN, [f64::NAN]), none);
        assert_eq!(serde_json::to_string(&none).expect("JSON"), r#"{"value":null,"low":null,"high":null}"#);
    }

    #[test]
    fn equal_settings_differ_by_nothing_in_every_resample() {
        let one = random(5, 300, 0.5);
        let found = against(one.clone(), one, 0);
        assert_eq!((ends(found.difference), ends(found.saving)), ([0.0; 3], [0.0; 3]));
        let [low, value, high] = ends(found.tokens);
        assert!(low < value && value < high);
    }

    #[test]
    fn pairs_cancel_what_problems_differ_in() {
        let one = random(6, 400, 0.5);
        let half = ProblemMeans { tokens: one.tokens.iter().map(|tokens| tokens / 2.0).collect(), ..one.clone() };
        let saved = ends(against(one, half, 0).saving);
        assert!(saved.iter().all(|share| (share - 0.5).abs() < 1e-12), "{saved:?}");
    }

    #[test]
    fn the_interval_is_that_of_the_normal_approximation() {
        let (none, rule) = (random(7, 2000, 0.9), random(8, 2000, 0.9));
        let differences: Vec<f64> = rule.right.iter().zip(&none.right).map(|(one, other)| one - other).collect();
        let mean = differences.iter().sum::<f64>() / 2000.0;
        let variance = differences.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 2000.0;
        let half = 1.96 * (variance / 2000.0).sqrt();
        let [low, value, high] = ends(against(none, rule, 1).difference);
        for end in [high - value, value - low] {
            assert!((end / half - 1.0).abs() < 0.1, "{end}, expected {half}");
        }
    }

    #[test]
    fn resamples_depend_on_the_seed_alone() {
        let of = |seed| against(random(8, 50, 0.5), random(9, 50, 0.5), seed);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1).tokens, of(2).tokens);
    }

    #[test]
    fn degenerate_samples() {
        let one = against(sample(&[10.0], &[1.0]), sample(&[4.0], &[0.0]), 0);
        assert_eq!(ends(one.difference), [-1.0; 3]);
        assert!((ends(one.saving)[0] - 0.6).abs() < 1e-12);
        let how = Comparing { base: 0, curve: &[0], within: 0.005, seed: 0, resamples: 50 };
        let empty = compare(&[sample(&[0.0, 0.0], &[1.0, 1.0])], &how).expect("problems")[0];
        assert_eq!(empty.saving, Interval { value: None, low: None, high: None });
        for bad in [vec![sample(&[1.0], &[1.0]), sample(&[1.0, 2.0], &[1.0, 1.0])], vec![sample(&[], &[])], vec![]] {
            let error = compare(&bad, &how).expect_err("not comparable").to_string();
            assert_eq!(error, "expected the same problems in each setting, at least one");
        }
    }

    #[test]
    fn saving_against_the_fixed_budget_of_equal_accuracy() {
        let settings = [
            sample(&[20.0; 4], &[1.0, 1.0, 0.0, 0.0]),
            sample(&[40.0; 4], &[1.0; 4]),
            sample(&[80.0; 4], &[1.0; 4]),
            sample(&[12.0; 4], &[1.0, 1.0, 1.0, 0.0]),
        ];
        let how = Comparing { base: 2, curve: &[0, 1, 2], within: 0.25, seed: 0, resamples: 50 };
        let rule = compare(&settings, &how).expect("the same problems")[3];
        assert_eq!(rule.reference.tokens, 30.0);
        assert_eq!(rule.saving_fixed.value, Some(1.0 - 12.0 / 30.0));
        assert_eq!(rule.saving_fixed_within.value, Some(0.4), "against 20 tokens, half right");
    }

    proptest! {
        #[test]
        fn no_budget_is_cheaper_and_as_accurate(
            steps in proptest::collection::vec((0.1_f64..50.0, 0.0_f64..1.0), 1..10),
            accuracies in (0.0_f64..1.0, 0.0_f64..1.0),
        ) {
            let mut tokens = 0.0;
            let sum = |(step, accuracy): &(f64, f64)| {
                tokens += step;
                (tokens, *accuracy)
            };
            let curve: Vec<BudgetPoint> = steps.iter().map(sum).collect();
            let (low, high) = (accuracies.0.min(accuracies.1), accuracies.0.max(accuracies.1));
            let [cheap, dear] = [low, high].map(|accuracy| cheapest(&curve, accuracy).expect("budgets"));
            prop_assert!(cheap.tokens <= dear.tokens + 1e-9);
            for (tokens, accuracy) in &curve {
                prop_assert!(*accuracy < low || *tokens >= cheap.tokens - 1e-9);
            }
        }
    }
}
