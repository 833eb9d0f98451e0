//! The sums over one row, and what follows from them.

use std::ops::RangeInclusive;

use super::simd::Kind;
use crate::{EatState, RowStats};

/// Temperatures of the pass in `f32`: with these `LOWEST * T` and `1 / T` are normal numbers, and the products that are
/// not are too small to count.
pub(super) const TAME: RangeInclusive<f32> = f32::from_bits((127 - 100) << 23)..=f32::from_bits((127 + 100) << 23);

impl RowStats {
    /// A row that is no distribution.
    pub const NONE: Self = Self {
        entropy: f32::NAN,
        max: f32::NAN,
        logsumexp: f32::NAN,
        probability: f32::NAN,
        top: -1,
        eat: EatState { mean: 0.0, variance: 0.0, probes: 0 },
    };
}

/// What a row that is a distribution adds up to at a temperature `T`, with `m` its largest logit.
pub(crate) struct Sums {
    pub(super) temperature: f64,
    /// `m`.
    pub(super) max: f32,
    /// No logit before this one is `m`, and one of the next is.
    pub(super) from: usize,
    /// Sum of `exp((x - m) / T)`; at least 1.
    pub(super) exp: f64,
    /// Sum of `(x - m) exp((x - m) / T)`, not divided by `T`.
    pub(super) weighted: f64,
}

impl Sums {
    /// The loop in `f64`, for temperatures that `f32` has no room for. Nobody samples with these; they are here so that
    /// every temperature has its own answer.
    pub(super) fn plain<K: Kind>(row: &[K::Raw], temperature: f32) -> Option<Self> {
        let logits = || row.iter().map(|raw| K::value(*raw));
        if !logits().all(|x| x < f32::INFINITY) {
            return None;
        }
        let max = logits().fold(f32::NEG_INFINITY, f32::max);
        if max == f32::NEG_INFINITY {
            return None;
        }
        let temperature = f64::from(temperature);
        let mut sums = Self { temperature, max, from: 0, exp: 0.0, weighted: 0.0 };
        for x in logits().filter(|x| *x > f32::NEG_INFINITY) {
            let d = f64::from(x) - f64::from(max);
            let e = (d / temperature).exp();
            sums.exp += e;
            sums.weighted += d * e;
        }
        Some(sums)
    }

    /// The entropy, in nats.
    pub(crate) fn nats(&self) -> f32 {
        let nats = self.exp.ln() - self.weighted / self.exp / self.temperature;
        // Rounding may leave a sure row a little below 0. Not f64::max, which would hide a NaN.
        if nats < 0.0 { 0.0 } else { nats as f32 }
    }

    /// All that is said of `row`, whose sums these are, and of one of its tokens.
    pub(crate) fn stats<K: Kind>(&self, row: &[K::Raw], token: Option<usize>) -> RowStats {
        let max = f64::from(self.max);
        let probability = |raw: &K::Raw| ((f64::from(K::value(*raw)) - max) / self.temperature).exp() / self.exp;
        let after = row[self.from..].iter().position(|raw| K::value(*raw) == self.max);
        RowStats {
            entropy: self.nats(),
            max: self.max,
            logsumexp: (max / self.temperature + self.exp.ln()) as f32,
            probability: token.and_then(|token| row.get(token)).map_or(f32::NAN, |raw| probability(raw) as f32),
            top: after.map_or(-1, |after| (self.from + after) as i32),
            eat: EatState::default(),
        }
    }
}
