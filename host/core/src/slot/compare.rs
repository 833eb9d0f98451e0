use crate::Ranker;

/// Number of first candidates that are compared as a set.
const TOP: usize = 8;

/// Compares the orders that two sets of keys give the candidates. It has buffers, so that comparing a step allocates
/// nothing.
///
/// ```
/// let (correlation, overlap) = meridian_core::slot::Compare::default().orders(&[1.0, 2.0, 3.0], &[6.0, 5.0, 4.0]);
/// assert_eq!((correlation, overlap), (-1.0, 1.0));
/// ```
#[derive(Default)]
pub struct Compare {
    ranker: Ranker,
    order: Vec<u32>,
    ranks: [Vec<u32>; 2],
}

impl Compare {
    /// Spearman's rank correlation of two orders of the same candidates (at least two), and the share of the first 8
    /// that both put first.
    pub fn orders(&mut self, one: &[f32], other: &[f32]) -> (f64, f64) {
        let Self { ranker, order, ranks } = self;
        for (keys, ranks) in [one, other].into_iter().zip(ranks.iter_mut()) {
            ranks.clear();
            if ranker.rank(keys, &[], order) {
                ranks.resize(keys.len(), 0);
                for (rank, from) in (0..).zip(&*order) {
                    ranks[*from as usize] = rank;
                }
            } else {
                ranks.extend(0..u32::try_from(keys.len()).unwrap_or(u32::MAX));
            }
        }
        let [one, other] = &*ranks;
        let n = one.len() as f64;
        let squared: f64 = one.iter().zip(other).map(|(a, b)| f64::from(a.abs_diff(*b)).powi(2)).sum();
        let top = TOP.min(one.len());
        let both = one.iter().zip(other).filter(|(a, b)| (**a as usize) < top && (**b as usize) < top).count();
        (1.0 - 6.0 * squared / (n * (n * n - 1.0)), both as f64 / top as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_compared() {
        let mut compare = Compare::default();
        assert_eq!(compare.orders(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), (1.0, 1.0));
        assert_eq!(compare.orders(&[1.0, 2.0, 3.0], &[6.0, 5.0, 4.0]), (-1.0, 1.0));
        let (one, other): (Vec<f32>, Vec<f32>) =
            ((0..16).map(|i| i as f32).collect(), (0..16).map(|i| -(i as f32)).collect());
        assert_eq!(compare.orders(&one, &other), (-1.0, 0.0));
        assert_eq!(compare.orders(&[f32::NAN, 1.0], &[2.0, 1.0]), (1.0, 1.0));
    }
}
