/// Parameters of the step-time model: a step takes
/// `fixed_ms + decode_token_ms * decodes + prefill_token_ms * prefills + context_token_ms * context` milliseconds.
///
/// ```
/// let fit = meridian_core::StepTime { fixed_ms: 4.0, context_token_ms: 2e-5, ..Default::default() };
/// assert_eq!(fit.before_tokens_ms(100_000), 6.0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    /// Milliseconds that do not depend on the batch.
    pub fixed_ms: f32,
    /// Milliseconds for each decode token.
    pub decode_token_ms: f32,
    /// Milliseconds for each prefill token.
    pub prefill_token_ms: f32,
    /// Milliseconds for each token of context whose KV the decodes read.
    pub context_token_ms: f32,
}

impl StepTime {
    /// Time of a step regardless of its tokens, milliseconds: launching it, and reading the KV of the decoding
    /// requests, `context_tokens` in total.
    #[must_use]
    pub fn before_tokens_ms(&self, context_tokens: u64) -> f32 {
        self.fixed_ms + self.context_token_ms * context_tokens as f32
    }

    /// Time of a step with this load, milliseconds.
    #[must_use]
    pub fn of(&self, load: &StepLoad) -> f32 {
        self.before_tokens_ms(load.context_tokens)
            + self.decode_token_ms * load.decode_tokens as f32
            + self.prefill_token_ms * load.prefill_tokens as f32
    }
}

/// The load of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepLoad {
    /// Tokens of decoding requests.
    pub decode_tokens: u32,
    /// Tokens of prompts, and tokens to compute again after a preemption.
    pub prefill_tokens: u32,
    /// Tokens of context whose KV the decodes read.
    pub context_tokens: u64,
}

/// Learns [`StepTime`] from the engine's own steps: least squares with exponential forgetting, and non-negative
/// parameters.
///
/// ```
/// use meridian_core::{StepLoad, StepTimeModel};
///
/// let mut model = StepTimeModel::default();
/// for step in 0..64 {
///     let prefill_tokens = if step % 4 == 0 { 256 } else { 0 };
///     let load = StepLoad { decode_tokens: 32, prefill_tokens, context_tokens: 0 };
///     model.observe(&load, 5.0 + 0.01 * f64::from(prefill_tokens));
/// }
/// let fit = model.learned().unwrap();
/// assert!((fit.prefill_token_ms - 0.01).abs() < 1e-4);
/// ```
#[derive(Clone, Debug, Default)]
pub struct StepTimeModel {
    /// Weighted sums of the products of (1, decodes, prefills, context).
    xx: [[f64; TERMS]; TERMS],
    /// Weighted sums of (1, decodes, prefills, context) times the measured milliseconds.
    xy: [f64; TERMS],
    steps: u64,
    prefill_steps: u64,
    fit: StepTime,
}

/// Parameters.
const TERMS: usize = 4;
/// Every choice of free parameters except the empty one.
const CHOICES: u8 = 1 << TERMS;
/// Weight of the past after one more step: half of it is gone after about 350 steps.
const FORGETTING: f64 = 0.998;
/// Steps before the model is used.
const MIN_STEPS: u64 = 16;
/// Steps with at least [`MIN_PREFILL_TOKENS`] before the model is used: without them, the prefill cost is a guess.
const MIN_PREFILL_STEPS: u64 = 2;
const MIN_PREFILL_TOKENS: u32 = 8;
/// Longest accepted time of a step, as a multiple of its prediction: a pause of the machine is not a cost of tokens.
const OUTLIER_RATIO: f64 = 3.0;
/// A parameter that the steps do not show is held at this value instead of 0, which would mean "not learned".
const LEAST_TOKEN_MS: f64 = 1e-6;
/// Pull towards zero, as a share of the sums: decides what the steps leave undetermined (a batch that never changes).
const RIDGE: f64 = 1e-6;

impl StepTimeModel {
    /// Take in one measured step.
    pub fn observe(&mut self, load: &StepLoad, step_ms: f64) {
        let StepLoad { decode_tokens, prefill_tokens, context_tokens } = *load;
        if !(step_ms > 0.0 && step_ms.is_finite()) || decode_tokens == 0 && prefill_tokens == 0 {
            return;
        }
        let x = [1.0, f64::from(decode_tokens), f64::from(prefill_tokens), context_tokens as f64];
        let StepTime { fixed_ms, decode_token_ms, prefill_token_ms, context_token_ms } = self.fit;
        let fit = [fixed_ms, decode_token_ms, prefill_token_ms, context_token_ms];
        let predicted: f64 = fit.iter().zip(x).map(|(parameter, x)| f64::from(*parameter) * x).sum();
        let step_ms = if self.is_learned() { step_ms.min(predicted * OUTLIER_RATIO) } else { step_ms };
        for row in 0..TERMS {
            for column in 0..TERMS {
                self.xx[row][column] = self.xx[row][column] * FORGETTING + x[row] * x[column];
            }
            self.xy[row] = self.xy[row] * FORGETTING + x[row] * step_ms;
        }
        self.steps += 1;
        self.prefill_steps += u64::from(prefill_tokens >= MIN_PREFILL_TOKENS);
        self.fit = self.solve();
    }

    /// The model, or `None` before enough measured steps.
    #[must_use]
    pub fn learned(&self) -> Option<StepTime> {
        self.is_learned().then_some(self.fit)
    }

    fn is_learned(&self) -> bool {
        self.steps >= MIN_STEPS && self.prefill_steps >= MIN_PREFILL_STEPS
    }

    /// Non-negative least squares for few unknowns: the best choice of free parameters whose solution is not negative.
    fn solve(&self) -> StepTime {
        let mut best = ([0.0; TERMS], f64::INFINITY);
        for free in (1..CHOICES).rev() {
            let Some(beta) = self.solve_free(free) else { continue };
            // Not finite: sums of absurd times overflow.
            if !beta.iter().all(|b| b.is_finite() && *b >= 0.0) {
                continue;
            }
            if free == CHOICES - 1 {
                // No solution with fewer parameters is closer.
                best = (beta, f64::NEG_INFINITY);
                break;
            }
            // The residual up to a constant: b'XXb - 2 b'Xy.
            let mut residual = 0.0;
            for row in 0..TERMS {
                residual -= 2.0 * beta[row] * self.xy[row];
                for column in 0..TERMS {
                    residual += beta[row] * self.xx[row][column] * beta[column];
                }
            }
            if residual < best.1 {
                best = (beta, residual);
            }
        }
        let [fixed, decode, prefill, context] = best.0;
        StepTime {
            fixed_ms: fixed as f32,
            decode_token_ms: decode.max(LEAST_TOKEN_MS) as f32,
            prefill_token_ms: prefill.max(LEAST_TOKEN_MS) as f32,
            context_token_ms: context as f32,
        }
    }

    /// Solve the normal equations with the parameters outside the bit set `free` held at zero (Gaussian elimination;
    /// the ridge keeps the pivots positive).
    fn solve_free(&self, free: u8) -> Option<[f64; TERMS]> {
        let mut chosen = [0; TERMS];
        let mut n = 0;
        for i in (0..TERMS).filter(|i| free & (1 << i) != 0) {
            chosen[n] = i;
            n += 1;
        }
        let chosen = &chosen[..n];
        let mut a = [[0.0f64; TERMS + 1]; TERMS];
        for (row, &i) in chosen.iter().enumerate() {
            for (column, &j) in chosen.iter().enumerate() {
                a[row][column] = self.xx[i][j];
            }
            a[row][row] += RIDGE * (self.xx[i][i] + 1.0);
            a[row][TERMS] = self.xy[i];
        }
        for pivot in 0..n {
            if a[pivot][pivot] <= 0.0 {
                return None;
            }
            for row in pivot + 1..n {
                let factor = a[row][pivot] / a[pivot][pivot];
                for column in (pivot..n).chain([TERMS]) {
                    a[row][column] -= factor * a[pivot][column];
                }
            }
        }
        let mut beta = [0.0; TERMS];
        for row in (0..n).rev() {
            let known: f64 = (row + 1..n).map(|column| a[row][column] * beta[chosen[column]]).sum();
            beta[chosen[row]] = (a[row][TERMS] - known) / a[row][row];
        }
        Some(beta)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn load(decode_tokens: u32, prefill_tokens: u32, context_tokens: u32) -> StepLoad {
        StepLoad { decode_tokens, prefill_tokens, context_tokens: context_tokens.into() }
    }

    #[test]
    fn silent_until_enough_steps() {
        let mut model = StepTimeModel::default();
        for _ in 0..100 {
            model.observe(&load(32, 0, 0), 5.0);
        }
        assert_eq!(model.learned(), None, "no step had a prefill");
        model.observe(&load(32, 64, 0), 6.0);
        model.observe(&load(32, 64, 0), 6.0);
        assert!(model.learned().is_some());
    }

    #[test]
    fn a_pause_is_not_learned() {
        let mut model = StepTimeModel::default();
        for i in 0..200u32 {
            model.observe(
                &load(32 + i % 8, if i % 4 == 0 { 256 } else { 0 }, 0),
                4.0 + 0.1 * f64::from(32 + i % 8) + if i % 4 == 0 { 5.12 } else { 0.0 },
            );
        }
        let before = model.learned().unwrap();
        model.observe(&load(32, 0, 0), 10_000.0);
        let after = model.learned().unwrap();
        let step_ms = |fit: StepTime| fit.fixed_ms + 36.0 * fit.decode_token_ms;
        assert!((step_ms(after) / step_ms(before) - 1.0).abs() < 0.1, "{before:?} {after:?}");
    }

    #[test]
    fn absurd_times_do_not_become_nan() {
        let mut model = StepTimeModel::default();
        for _ in 0..64 {
            model.observe(&load(1, 9, 5), 2.5e306);
            if let Some(fit) = model.learned() {
                assert!(fit.fixed_ms >= 0.0, "{fit:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn recovers_the_parameters(
            fixed in 0.0f64..20.0,
            decode in 0.01f64..1.0,
            prefill in 0.001f64..0.2,
            context in 0.0f64..1e-4,
            seed in any::<u32>(),
        ) {
            let mut model = StepTimeModel::default();
            let mut state = seed;
            for _ in 0..400 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let (decodes, prefills) = (state >> 8 & 63, if state >> 20 & 3 == 0 { state >> 10 & 1023 } else { 0 });
                let tokens = decodes * (500 + (state >> 4 & 4095));
                let ms = fixed + decode * f64::from(decodes) + prefill * f64::from(prefills);
                model.observe(&load(decodes, prefills, tokens), ms + context * f64::from(tokens));
            }
            let fit = model.learned().unwrap();
            prop_assert!((f64::from(fit.fixed_ms) - fixed).abs() < 0.05 * fixed + 0.05, "{fit:?}");
            prop_assert!((f64::from(fit.decode_token_ms) - decode).abs() < 0.05 * decode + 0.002, "{fit:?}");
            prop_assert!((f64::from(fit.prefill_token_ms) - prefill).abs() < 0.05 * prefill + 0.0002, "{fit:?}");
            prop_assert!((f64::from(fit.context_token_ms) - context).abs() < 0.05 * context + 1e-6, "{fit:?}");
        }

        #[test]
        fn never_negative_nor_nan(
            steps in proptest::collection::vec((0u32..5000, 0u32..100_000, any::<u32>(), any::<f64>()), 0..100),
        ) {
            let mut model = StepTimeModel::default();
            for (decodes, prefills, context, ms) in steps {
                model.observe(&load(decodes, prefills, context), ms);
                if let Some(fit) = model.learned() {
                    prop_assert!(fit.fixed_ms >= 0.0 && fit.decode_token_ms > 0.0 && fit.prefill_token_ms > 0.0, "{fit:?}");
                    prop_assert!(fit.context_token_ms >= 0.0, "{fit:?}");
                }
            }
        }
    }
}
