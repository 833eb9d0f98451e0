//! The interval of a mean change, by the method of batch means.
//!
//! Requests that follow each other share queues, so their latencies are correlated, and so are, less, the means of
//! neighbouring batches. Plain Student's t and a bootstrap of single batches both take them for independent, and give
//! intervals that are too short. The method of batch means lets batches be so long that their means hardly depend on
//! each other: 10 to 30 of them are enough, more gain little and risk dependence (B. Schmeiser, "Batch size effects in
//! the analysis of simulation output", Operations Research 30(3), 1982; validity: Glynn and Lim, "Asymptotic validity
//! of batch means steady-state confidence intervals", 2009). So consecutive batches of a seed are joined until about
//! [`MOST`] remain over all seeds, which are independent. What correlation of neighbours is left widens the interval
//! as for a first-order autoregressive process, as N-Skart does (Tafazzoli, Steiger and Wilson, IEEE Transactions on
//! Automatic Control 56(2), 2011); a negative one, mostly chance, is not used to shorten it.

use statrs::distribution::{ContinuousCDF, StudentsT};

/// Fewest pairs that give an interval.
pub(super) const MIN_PAIRS: usize = 3;

/// Most means that an interval comes from.
const MOST: usize = 16;

/// Correlation of neighbours above which the interval would be mostly guessed.
const MOST_CORRELATED: f64 = 0.9;

/// A mean with its interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Estimate {
    pub mean: f64,
    /// Half of the interval at [`super::CONFIDENCE`].
    pub half_width: f64,
    /// Two-sided, that the true mean is 0.
    pub p: f64,
    /// Means after joining.
    pub pairs: usize,
}

/// Of the changes of each seed's batches, in their order; nothing of fewer than [`MIN_PAIRS`].
pub(super) fn estimate(seeds: &[Vec<f64>]) -> Option<Estimate> {
    let seeds: Vec<&Vec<f64>> = seeds.iter().filter(|changes| !changes.is_empty()).collect();
    let most = (MOST / seeds.len().max(1)).max(1);
    let joined: Vec<Vec<f64>> = seeds.iter().map(|changes| join(changes, most)).collect();
    let pairs = joined.iter().map(Vec::len).sum::<usize>();
    if pairs < MIN_PAIRS {
        return None;
    }
    let count = pairs as f64;
    let mean = joined.iter().flatten().sum::<f64>() / count;
    let squares: f64 = joined.iter().flatten().map(|change| (change - mean).powi(2)).sum();
    if !mean.is_finite() || !squares.is_finite() {
        // The values are beyond what can be added up: nothing is known.
        return Some(Estimate { mean, half_width: f64::INFINITY, p: 1.0, pairs });
    }
    // Below what rounding makes of equal changes: there is nothing random in them.
    if squares.sqrt() <= 1e-12 * mean.abs() * count || squares == 0.0 {
        return Some(Estimate { mean, half_width: 0.0, p: if mean == 0.0 { 1.0 } else { 0.0 }, pairs });
    }
    let products: f64 =
        joined.iter().flat_map(|changes| changes.windows(2)).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum();
    // Of few values it comes out too small, by about (1 + 4r) / n (F. Marriott and J. Pope, Biometrika 41, 1954).
    let found = products / squares;
    let correlation = (found + (1.0 + 4.0 * found.max(0.0)) / count).clamp(0.0, MOST_CORRELATED);
    // As many independent means as would know as much.
    let effective = (count * (1.0 - correlation) / (1.0 + correlation)).max(2.0);
    let freedom = effective - 1.0;
    let error = (squares / (count - 1.0) / effective).sqrt();
    let student = student(freedom);
    let half_width = error * student.inverse_cdf(f64::midpoint(1.0, super::CONFIDENCE));
    Some(Estimate { mean, half_width, p: 2.0 * student.sf((mean / error).abs()), pairs })
}

/// Means of at most that many groups of consecutive values, of sizes that differ by one at most.
fn join(values: &[f64], most: usize) -> Vec<f64> {
    let groups = values.len().min(most);
    (0..groups)
        .map(|at| {
            let group = &values[at * values.len() / groups..(at + 1) * values.len() / groups];
            group.iter().sum::<f64>() / group.len() as f64
        })
        .collect()
}

/// Holm's step-down correction: the chance of any false rejection stays at the level that corrected values are held
/// against, however the tests depend on each other (S. Holm, Scandinavian Journal of Statistics 6(2), 1979).
pub(super) fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&x, &y| p[x].total_cmp(&p[y]));
    let mut corrected = vec![1.0; p.len()];
    let mut largest = 0.0_f64;
    for (rank, &at) in order.iter().enumerate() {
        largest = largest.max((p[at] * (p.len() - rank) as f64).min(1.0));
        corrected[at] = largest;
    }
    corrected
}

/// Student's distribution with so many degrees of freedom, which need not be whole.
fn student(freedom: f64) -> StudentsT {
    StudentsT::new(0.0, 1.0, freedom).expect("at least one degree of freedom")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn student_is_as_in_printed_tables() {
        for (freedom, t) in [(1.0, 12.706), (2.0, 4.303), (9.0, 2.262), (19.0, 2.093), (29.0, 2.045), (1e4, 1.960)] {
            let found = student(freedom).inverse_cdf(0.975);
            assert!((found - t).abs() < 1e-3, "{freedom}: {found}");
        }
    }

    #[test]
    fn holm_as_in_a_worked_example() {
        let found = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (found, expected) in found.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        }
    }

    #[test]
    fn correlated_neighbours_widen_the_interval() {
        let wave: Vec<f64> = (0..24).map(|i| if (i / 6) % 2 == 0 { 1.0 } else { -0.9 }).collect();
        let mixed: Vec<f64> = (0..24).map(|i| if i % 2 == 0 { 1.0 } else { -0.9 }).collect();
        let (wave, mixed) = (estimate(&[wave]).expect("enough"), estimate(&[mixed]).expect("enough"));
        assert!(wave.half_width > 1.5 * mixed.half_width, "{wave:?} {mixed:?}");
    }

    #[test]
    fn what_cannot_be_added_up_says_nothing() {
        for changes in [vec![1e308, 1e308, -1e308, 1e308], vec![f64::NEG_INFINITY, 1.0, 2.0], vec![f64::NAN, 1.0, 2.0]]
        {
            let found = estimate(&[changes]).expect("enough");
            assert_eq!((found.p, found.half_width), (1.0, f64::INFINITY));
        }
    }

    #[test]
    fn many_batches_are_joined() {
        assert_eq!(join(&[1.0, 3.0, 5.0, 7.0], 2), [2.0, 6.0]);
        let found = estimate(&vec![vec![0.5; 50]; 3]).expect("enough");
        assert_eq!((found.pairs, found.p, found.half_width), (15, 0.0, 0.0));
        assert_eq!(estimate(&[vec![1.0, 2.0]]), None);
    }
}
