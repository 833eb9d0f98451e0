/// Parameters of the step-time model: a step takes `fixed_ms + decode_token_ms * decodes + prefill_token_ms * prefills`.
///
/// ```
/// let fit = meridian_core::StepTime { fixed_ms: 4.0, decode_token_ms: 0.1, prefill_token_ms: 0.01 };
/// assert_eq!(fit.fixed_ms, 4.0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Milliseconds that do not depend on the batch.
    pub fixed_ms: f32,
    /// Milliseconds for each decode token.
    pub decode_token_ms: f32,
    /// Milliseconds for each prefill token.
    pub prefill_token_ms: f32,
}

/// Learns [`StepTime`] from the engine's own steps: least squares with exponential forgetting, parameters not negative.
///
/// ```
/// let mut model = meridian_core::StepTimeModel::default();
/// for step in 0..64 {
///     let prefill = if step % 4 == 0 { 256 } else { 0 };
///     model.observe(32, prefill, 5.0 + 0.01 * f64::from(prefill));
/// }
/// let fit = model.learned().unwrap();
/// assert!((fit.prefill_token_ms - 0.01).abs() < 1e-4);
/// ```
#[derive(Clone, Debug, Default)]
pub struct StepTimeModel {
    /// Weighted sums of the products of (1, decodes, prefills), upper triangle used.
    xx: [[f64; 3]; 3],
    /// Weighted sums of (1, decodes, prefills) times the measured milliseconds.
    xy: [f64; 3],
    steps: u64,
    prefill_steps: u64,
    fit: StepTime,
}

/// Weight of the past after one more step: half of it is gone after about 350 steps.
const FORGETTING: f64 = 0.998;
/// Steps before the model is used.
const MIN_STEPS: u64 = 16;
/// Steps with at least [`MIN_PREFILL_TOKENS`] before the model is used: without them the prefill cost is a guess.
const MIN_PREFILL_STEPS: u64 = 2;
const MIN_PREFILL_TOKENS: u32 = 8;
/// A step that took this many times its prediction is taken as that long: a pause of the machine is not a cost of tokens.
const OUTLIER_RATIO: f64 = 3.0;
/// A parameter that the steps do not show is held at this instead of 0, which would mean "not learned".
const LEAST_TOKEN_MS: f64 = 1e-6;
/// Pull towards zero, as a share of the sums: decides what the steps leave open (a batch that never changes).
const RIDGE: f64 = 1e-6;

impl StepTimeModel {
    /// Take in one measured step.
    pub fn observe(&mut self, decode_tokens: u32, prefill_tokens: u32, step_ms: f64) {
        if !(step_ms > 0.0 && step_ms.is_finite()) || decode_tokens == 0 && prefill_tokens == 0 {
            return;
        }
        let x = [1.0, f64::from(decode_tokens), f64::from(prefill_tokens)];
        let predicted = f64::from(self.fit.fixed_ms)
            + f64::from(self.fit.decode_token_ms) * x[1]
            + f64::from(self.fit.prefill_token_ms) * x[2];
        let step_ms = if self.is_learned() { step_ms.min(predicted * OUTLIER_RATIO) } else { step_ms };
        for row in 0..3 {
            for column in 0..3 {
                self.xx[row][column] = self.xx[row][column] * FORGETTING + x[row] * x[column];
            }
            self.xy[row] = self.xy[row] * FORGETTING + x[row] * step_ms;
        }
        self.steps += 1;
        self.prefill_steps += u64::from(prefill_tokens >= MIN_PREFILL_TOKENS);
        self.fit = self.solve();
    }

    /// The model, or `None` until enough steps were measured.
    #[must_use]
    pub fn learned(&self) -> Option<StepTime> {
        self.is_learned().then_some(self.fit)
    }

    fn is_learned(&self) -> bool {
        self.steps >= MIN_STEPS && self.prefill_steps >= MIN_PREFILL_STEPS
    }

    /// Non-negative least squares for three unknowns: the best of the seven non-empty choices of free parameters whose
    /// solution is not negative.
    fn solve(&self) -> StepTime {
        let mut best = ([0.0; 3], f64::INFINITY);
        for free in (1u8..8).rev() {
            let Some(beta) = self.solve_free(free) else { continue };
            // Not finite: sums of absurd times overflow.
            if !beta.iter().all(|b| b.is_finite() && *b >= 0.0) {
                continue;
            }
            if free == 7 {
                // Nothing with fewer parameters is nearer.
                best = (beta, f64::NEG_INFINITY);
                break;
            }
            // The residual up to a constant: b'XXb - 2 b'Xy.
            let mut residual = 0.0;
            for row in 0..3 {
                residual -= 2.0 * beta[row] * self.xy[row];
                for column in 0..3 {
                    residual += beta[row] * self.xx[row][column] * beta[column];
                }
            }
            if residual < best.1 {
                best = (beta, residual);
            }
        }
        let [fixed, decode, prefill] = best.0;
        StepTime {
            fixed_ms: fixed as f32,
            decode_token_ms: decode.max(LEAST_TOKEN_MS) as f32,
            prefill_token_ms: prefill.max(LEAST_TOKEN_MS) as f32,
        }
    }

    /// Solve the normal equations with the parameters outside the bit set `free` held at zero (Gaussian elimination; the
    /// ridge keeps the pivots positive).
    fn solve_free(&self, free: u8) -> Option<[f64; 3]> {
        let chosen: Vec<usize> = (0..3).filter(|i| free & (1 << i) != 0).collect();
        let n = chosen.len();
        let mut a = [[0.0f64; 4]; 3];
        for (row, &i) in chosen.iter().enumerate() {
            for (column, &j) in chosen.iter().enumerate() {
                a[row][column] = self.xx[i][j];
            }
            a[row][row] += RIDGE * (self.xx[i][i] + 1.0);
            a[row][3] = self.xy[i];
        }
        for pivot in 0..n {
            if a[pivot][pivot] <= 0.0 {
                return None;
            }
            for row in pivot + 1..n {
                let factor = a[row][pivot] / a[pivot][pivot];
                for column in (pivot..n).chain([3]) {
                    a[row][column] -= factor * a[pivot][column];
                }
            }
        }
        let mut beta = [0.0; 3];
        for row in (0..n).rev() {
            let known: f64 = (row + 1..n).map(|column| a[row][column] * beta[chosen[column]]).sum();
            beta[chosen[row]] = (a[row][3] - known) / a[row][row];
        }
        Some(beta)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn silent_until_enough_steps() {
        let mut model = StepTimeModel::default();
        for _ in 0..100 {
            model.observe(32, 0, 5.0);
        }
        assert_eq!(model.learned(), None, "no step had a prefill");
        model.observe(32, 64, 6.0);
        model.observe(32, 64, 6.0);
        assert!(model.learned().is_some());
    }

    #[test]
    fn a_pause_is_not_learned() {
        let mut model = StepTimeModel::default();
        for i in 0..200u32 {
            model.observe(
                32 + i % 8,
                if i % 4 == 0 { 256 } else { 0 },
                4.0 + 0.1 * f64::from(32 + i % 8) + if i % 4 == 0 { 5.12 } else { 0.0 },
            );
        }
        let before = model.learned().unwrap();
        model.observe(32, 0, 10_000.0);
        let after = model.learned().unwrap();
        let step_ms = |fit: StepTime| fit.fixed_ms + 36.0 * fit.decode_token_ms;
        assert!((step_ms(after) / step_ms(before) - 1.0).abs() < 0.1, "{before:?} {after:?}");
    }

    #[test]
    fn absurd_times_do_not_become_nan() {
        let mut model = StepTimeModel::default();
        for _ in 0..64 {
            model.observe(1, 9, 2.5e306);
            if let Some(fit) = model.learned() {
                assert!(fit.fixed_ms >= 0.0, "{fit:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn recovers_the_parameters(fixed in 0.0f64..20.0, decode in 0.01f64..1.0, prefill in 0.001f64..0.2, seed in any::<u32>()) {
            let mut model = StepTimeModel::default();
            let mut state = seed;
            for _ in 0..400 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let (decodes, prefills) = (state >> 8 & 63, if state >> 20 & 3 == 0 { state >> 10 & 1023 } else { 0 });
                model.observe(decodes, prefills, fixed + decode * f64::from(decodes) + prefill * f64::from(prefills));
            }
            let fit = model.learned().unwrap();
            prop_assert!((f64::from(fit.fixed_ms) - fixed).abs() < 0.05 * fixed + 0.05, "{fit:?}");
            prop_assert!((f64::from(fit.decode_token_ms) - decode).abs() < 0.05 * decode + 0.002, "{fit:?}");
            prop_assert!((f64::from(fit.prefill_token_ms) - prefill).abs() < 0.05 * prefill + 0.0002, "{fit:?}");
        }

        #[test]
        fn never_negative_nor_nan(steps in proptest::collection::vec((0u32..5000, 0u32..100_000, any::<f64>()), 0..100)) {
            let mut model = StepTimeModel::default();
            for (decodes, prefills, ms) in steps {
                model.observe(decodes, prefills, ms);
                if let Some(fit) = model.learned() {
                    prop_assert!(fit.fixed_ms >= 0.0 && fit.decode_token_ms > 0.0 && fit.prefill_token_ms > 0.0, "{fit:?}");
                }
            }
        }
    }
}
