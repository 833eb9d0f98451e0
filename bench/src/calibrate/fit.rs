//! The step-time model that fits measured steps best.

use anyhow::{Context, ensure};

use crate::sim::{StepModel, StepWork};
use crate::vllm::{RecordedRun, RecordedSteps};

/// Tokens up to which a step waits for the weights, that are tried.
const KNEES: [u32; 9] = [0, 8, 16, 32, 64, 128, 256, 512, 1024];
/// A step that took this many times its prediction is counted as that long in the fit: a pause of the machine is no cost of
/// work. The total is made up for afterwards.
const OUTLIER_RATIO: f64 = 3.0;
/// Fewest steps that tell five parameters.
const MIN_STEPS: usize = 100;

/// Fit the step-time model to the steps of `runs`: least squares, no parameter negative, and the sum of all steps as it was.
///
/// # Errors
/// Too few steps.
pub fn fit(runs: &[RecordedRun]) -> anyhow::Result<StepModel> {
    let steps: Vec<&RecordedSteps> = runs.iter().map(|run| &run.steps).collect();
    fit_steps(&steps)
}

/// Fit the step model to recorded steps.
pub(crate) fn fit_steps(runs: &[&RecordedSteps]) -> anyhow::Result<StepModel> {
    let mut works = Vec::new();
    let mut measured = Vec::new();
    for steps in runs {
        let RecordedSteps { ms, requests, tokens, context_tokens, attention_pairs, .. } = steps;
        for i in 0..ms.len() {
            if tokens[i] > 0 {
                works.push(StepWork {
                    requests: requests[i],
                    tokens: tokens[i],
                    context_tokens: context_tokens[i],
                    attention_pairs: attention_pairs[i],
                });
                measured.push(ms[i]);
            }
        }
    }
    ensure!(works.len() >= MIN_STEPS, "{} steps with tokens, expected at least {MIN_STEPS}", works.len());
    let (arrivals, taking_in) = runs.iter().fold((0.0, 0.0), |(count, ms), steps| {
        let arrivals: u32 = steps.arrivals.iter().sum();
        (count + f64::from(arrivals), ms + steps.arrivals_ms.iter().sum::<f64>())
    });
    let mut best: Option<(f64, StepModel)> = None;
    for knee in KNEES {
        let mut clipped = measured.clone();
        let mut fitted = StepModel::default();
        for _ in 0..3 {
            let Some((model, _)) = least_squares(&works, &clipped, knee) else { break };
            fitted = model;
            for (ms, (work, measured)) in clipped.iter_mut().zip(works.iter().zip(&measured)) {
                *ms = measured.min(OUTLIER_RATIO * model.step_ms(work));
            }
        }
        let residual: f64 = works.iter().zip(&clipped).map(|(work, ms)| (fitted.step_ms(work) - ms).powi(2)).sum();
        if best.is_none_or(|(least, _)| residual < least) {
            best = Some((residual, fitted));
        }
    }
    let (_, model) = best.context("no model fits")?;
    let predicted: f64 = works.iter().map(|work| model.step_ms(work)).sum();
    let scale = measured.iter().sum::<f64>() / predicted;
    ensure!(scale.is_finite() && scale > 0.0, "the steps took no time");
    let model = StepModel::from_values(model.values().map(|value| value * scale));
    Ok(StepModel { arrival_ms: if arrivals > 0.0 { taking_in / arrivals } else { 0.0 }, ..model })
}

const FEATURES: usize = 5;

fn features(work: &StepWork, knee: u32) -> [f64; FEATURES] {
    [
        1.0,
        f64::from(work.requests),
        f64::from(work.tokens.max(knee)),
        work.context_tokens as f64,
        work.attention_pairs as f64,
    ]
}

/// Non-negative least squares: the best of all choices of free parameters whose solution is not negative.
fn least_squares(works: &[StepWork], ms: &[f64], knee: u32) -> Option<(StepModel, f64)> {
    let mut xx = [[0.0; FEATURES]; FEATURES];
    let mut xy = [0.0; FEATURES];
    for (work, ms) in works.iter().zip(ms) {
        let x = features(work, knee);
        for row in 0..FEATURES {
            for column in 0..FEATURES {
                xx[row][column] += x[row] * x[column];
            }
            xy[row] += x[row] * ms;
        }
    }
    let mut best: Option<([f64; FEATURES], f64)> = None;
    for free in 1u32..1 << FEATURES {
        let Some(beta) = solve(&xx, &xy, free) else { continue };
        if beta.iter().any(|value| *value < 0.0) {
            continue;
        }
        // The residual up to a constant: b'XXb - 2 b'Xy.
        let residual: f64 = (0..FEATURES)
            .map(|row| {
                let product: f64 = (0..FEATURES).map(|column| xx[row][column] * beta[column]).sum();
                beta[row] * (product - 2.0 * xy[row])
            })
            .sum();
        if best.is_none_or(|(_, least)| residual < least) {
            best = Some((beta, residual));
        }
    }
    let ([fixed_ms, request_ms, token_ms, kv_token_ms, attention_ms], residual) = best?;
    let weights_ms = token_ms * f64::from(knee);
    Some((
        StepModel { fixed_ms, request_ms, weights_ms, token_ms, kv_token_ms, attention_ms, ..StepModel::default() },
        residual,
    ))
}

/// Normal equations over the parameters in the bits of `free`, by elimination with scaled pivots; the others are 0.
fn solve(xx: &[[f64; FEATURES]; FEATURES], xy: &[f64; FEATURES], free: u32) -> Option<[f64; FEATURES]> {
    let chosen: Vec<usize> = (0..FEATURES).filter(|i| free >> i & 1 == 1).collect();
    let n = chosen.len();
    // Features differ by many orders of magnitude.
    let scale: Vec<f64> = chosen.iter().map(|i| xx[*i][*i].sqrt()).collect();
    if scale.contains(&0.0) {
        return None;
    }
    let mut a = vec![vec![0.0; n + 1]; n];
    for (row, i) in chosen.iter().enumerate() {
        for (column, j) in chosen.iter().enumerate() {
            a[row][column] = xx[*i][*j] / scale[row] / scale[column];
        }
        a[row][n] = xy[*i] / scale[row];
    }
    for pivot in 0..n {
        if a[pivot][pivot] < 1e-10 {
            return None;
        }
        let (above, below) = a.split_at_mut(pivot + 1);
        for row in below {
            let factor = row[pivot] / above[pivot][pivot];
            row.iter_mut().zip(&above[pivot]).skip(pivot).for_each(|(value, pivot)| *value -= factor * pivot);
        }
    }
    let mut beta = [0.0; FEATURES];
    for row in (0..n).rev() {
        let known: f64 = (row + 1..n).map(|column| a[row][column] * beta[chosen[column]] * scale[column]).sum();
        beta[chosen[row]] = (a[row][n] - known) / a[row][row] / scale[row];
    }
    Some(beta)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_of(model: &StepModel, noise: f64) -> RecordedRun {
        let mut state = 7u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as u32
        };
        let mut steps = RecordedSteps::default();
        for i in 0..3000 {
            let mut work = StepWork::default();
            for _ in 0..random() % 64 + 1 {
                work.add(random() % 2000, 1);
            }
            if i % 3 == 0 {
                work.add(random() % 500, random() % 900 + 2);
            }
            let wiggle = 1.0 + noise * (f64::from(random() % 1000) / 500.0 - 1.0);
            steps.ms.push(model.step_ms(&work) * wiggle * if i % 500 == 0 { 20.0 } else { 1.0 });
            steps.requests.push(work.requests);
            steps.tokens.push(work.tokens);
            steps.context_tokens.push(work.context_tokens);
            steps.attention_pairs.push(work.attention_pairs);
            steps.arrivals.push(u32::from(i % 3 == 0));
            steps.arrivals_ms.push(if i % 3 == 0 { 0.3 } else { 0.0 });
        }
        RecordedRun::made_up(steps)
    }

    #[test]
    fn the_times_of_steps_are_found_again() {
        for knee in [0.0, 128.0] {
            let model = StepModel {
                fixed_ms: 4.0,
                request_ms: 0.05,
                weights_ms: 0.02 * knee,
                token_ms: 0.02,
                kv_token_ms: 4e-5,
                attention_ms: 2e-5,
                arrival_ms: 0.3,
                hides_host: false,
            };
            let run = run_of(&model, 0.02);
            let total: f64 = run.steps.ms.iter().sum();
            let fitted = fit(&[run]).expect("enough steps");
            // Pauses are not a cost of work, but they are time: the total of them is spread over all.
            let plain: f64 = total
                / run_of(&model, 0.0)
                    .steps
                    .ms
                    .iter()
                    .zip(0..)
                    .map(|(ms, i)| ms / if i % 500 == 0 { 20.0 } else { 1.0 })
                    .sum::<f64>();
            assert!((fitted.arrival_ms - 0.3).abs() < 1e-9, "{fitted:?}");
            // Requests and context go together, so that their parameters cannot be told apart to the last percent; what a
            // step takes can.
            for (requests, prompt, context) in
                [(1, 0, 100), (64, 0, 64_000), (32, 0, 3000), (20, 700, 20_000), (1, 300, 0)]
            {
                let mut work = StepWork::default();
                (0..requests).for_each(|_| work.add(context / requests, 1));
                if prompt > 0 {
                    work.add(0, prompt);
                }
                let (found, truth) = (fitted.step_ms(&work), plain * model.step_ms(&work));
                assert!((found / truth - 1.0).abs() < 0.03, "{work:?}: {found}, expected {truth}: {fitted:?}");
            }
        }
    }

    #[test]
    fn few_steps_are_refused() {
        let mut run = run_of(&StepModel { fixed_ms: 1.0, ..StepModel::default() }, 0.0);
        run.steps.tokens = vec![0; run.steps.ms.len()];
        assert!(fit(&[run]).expect_err("nothing to fit").to_string().contains("0 steps with tokens"));
    }
}
