use super::{Thresholds, is_measured};

/// EAT: entropy after a forced end of thinking, with its moving mean and variance, in bits as in the code of
/// arXiv 2509.26522.
///
/// A probe appends the end-of-thinking marker to the reasoning so far and takes the entropy `x` of the next token. The
/// probes are numbered `i = 0, 1, …`; with `M_0 = x_0` and `V_0 = 0`
///
/// ```text
/// M_i = a x_i + (1 - a) M_{i-1}        V_i = a (x_i - M_i)^2 + (1 - a) V_{i-1}
/// ```
///
/// where the variance takes the *updated* mean. Thinking may end at the first `i >= min_probes` with
/// `V_i < eat_variance_threshold`. The variance alone also ends thinking while a model is stable but uncertain, so
/// `M_i` must not be above `eat_max_bits` either; that guard is not in the paper.
///
/// ```
/// use meridian_core::budget::{Eat, Thresholds};
///
/// let thresholds = Thresholds { ema_alpha: 0.5, min_probes: 1, ..Thresholds::default() };
/// let mut eat = Eat::default();
/// eat.observe(3.0, thresholds.ema_alpha);
/// eat.observe(1.0, thresholds.ema_alpha);
/// assert_eq!((eat.mean(), eat.variance()), (Some(2.0), Some(0.5)));
/// assert!(!eat.fires(&thresholds));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Eat {
    probes: u32,
    mean: f64,
    variance: f64,
}

impl Eat {
    /// Take in the entropy of one probe, in bits; `alpha` in (0, 1] may differ from probe to probe. Returns whether it
    /// counts: a negative or non-finite entropy counts as not measured.
    pub fn observe(&mut self, bits: f64, alpha: f64) -> bool {
        if !is_measured(bits) {
            return false;
        }
        if self.probes == 0 {
            self.mean = bits;
        } else {
            self.mean = alpha * bits + (1.0 - alpha) * self.mean;
            self.variance = alpha * (bits - self.mean).powi(2) + (1.0 - alpha) * self.variance;
        }
        self.probes = self.probes.saturating_add(1);
        true
    }

    /// Number of probes taken in.
    #[must_use]
    pub fn probes(&self) -> u32 {
        self.probes
    }

    /// `M_i`, in bits; `None` before the first probe.
    #[must_use]
    pub fn mean(&self) -> Option<f64> {
        (self.probes > 0).then_some(self.mean)
    }

    /// `V_i`, in bits squared; `None` before the first probe.
    #[must_use]
    pub fn variance(&self) -> Option<f64> {
        (self.probes > 0).then_some(self.variance)
    }

    /// Whether thinking may end after the latest probe.
    #[must_use]
    pub fn fires(&self, thresholds: &Thresholds) -> bool {
        // The number of the latest probe is `probes - 1`.
        self.probes > thresholds.min_probes
            && self.variance < thresholds.eat_variance_threshold
            && self.mean <= thresholds.eat_max_bits
    }
}
