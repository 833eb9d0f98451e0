//! Fits the step-time model to recorded runs of a real engine, and tells how far the simulator is off on others.
//!
//! A recorded run is what `meridian bench vllm --out DIR` leaves behind of each run: each step's work and time, each request's
//! times.

mod file;
mod fit;
mod simulate;

use anyhow::bail;
use serde::Serialize;

pub use self::file::EngineFile;
pub use self::fit::fit;
pub(crate) use self::fit::fit_steps;
use crate::results::{Run, Slo};
use crate::sim::{Outcome, RequestTimes, StepModel};
use crate::vllm::RecordedRun;

/// A run in a few numbers; milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Means {
    /// Arrival to first token, mean.
    pub ttft_mean_ms: f64,
    /// Arrival to first token of the answer, mean.
    pub ttfo_mean_ms: f64,
    /// Arrival to last token, mean.
    pub e2e_mean_ms: f64,
    /// Gap between two tokens of an answer, 99th percentile.
    pub itl_output_p99_ms: f64,
    /// Gap between two tokens of an answer, mean.
    pub itl_output_mean_ms: f64,
    /// Share of requests that attain the default service level.
    pub slo_attainment: f64,
}

impl Means {
    fn of(times: &[RequestTimes], run: &Run) -> Self {
        let metric = |key: &str| run.metrics.get(key).copied().unwrap_or(0.0);
        let mean = |of: fn(&RequestTimes) -> f64| times.iter().map(of).sum::<f64>() / times.len().max(1) as f64;
        Self {
            ttft_mean_ms: mean(|times| times.ttft_ms),
            ttfo_mean_ms: mean(|times| times.ttfo_ms),
            e2e_mean_ms: mean(|times| times.e2e_ms),
            itl_output_p99_ms: metric("itl_output_p99_ms"),
            itl_output_mean_ms: metric("itl_output_mean_ms"),
            slo_attainment: metric("slo_attainment"),
        }
    }

    fn real(run: &RecordedRun) -> Self {
        Self::of(&run.times(), &run.run(Slo::default()))
    }

    fn simulated(outcome: &Outcome) -> Self {
        Self::of(&outcome.times, &outcome.run)
    }
}

/// Mean absolute percentage errors over the requests of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Errors {
    /// File of the run.
    pub run: String,
    /// Its scheduler.
    pub scheduler: String,
    /// Whether the model was fitted to it.
    pub is_fitted: bool,
    /// Requests.
    pub requests: usize,
    /// End to end, percent, as are the others.
    pub e2e: f64,
    /// Arrival to first token.
    pub ttft: f64,
    /// Arrival to first token of the answer.
    pub ttfo: f64,
    /// Mean gap between two tokens of a request.
    pub itl: f64,
    /// Mean signed error end to end: a run that was slower or faster as a whole.
    pub e2e_bias: f64,
    /// The real run.
    pub real: Means,
    /// The simulated one.
    pub simulated: Means,
    /// Steps of the real run.
    pub steps: u64,
    /// Steps whose work the simulator had as well, one by one. Only where every request was there from the start.
    pub same_steps: Option<u64>,
}

/// Errors of `simulated` against `real`, request by request.
#[must_use]
pub fn errors(real: &[RequestTimes], simulated: &[RequestTimes]) -> [f64; 5] {
    let mape = |of: fn(&RequestTimes) -> f64, signed: bool| {
        let errors: Vec<f64> = real
            .iter()
            .zip(simulated)
            .map(|(real, simulated)| (of(simulated) - of(real)) / of(real))
            .filter(|error| error.is_finite())
            .map(|error| if signed { error } else { error.abs() })
            .collect();
        100.0 * errors.iter().sum::<f64>() / errors.len().max(1) as f64
    };
    [
        mape(|times| times.e2e_ms, false),
        mape(|times| times.ttft_ms, false),
        mape(|times| times.ttfo_ms, false),
        mape(|times| times.itl_ms, false),
        mape(|times| times.e2e_ms, true),
    ]
}

/// The errors of a run.
///
/// # Errors
/// Its policy cannot be loaded, or the simulator did not end every request.
pub fn check(run: &RecordedRun, step: StepModel, is_fitted: bool) -> anyhow::Result<Errors> {
    let outcome = run.simulate(step)?;
    let simulated = &outcome.times;
    let real = run.times();
    if simulated.len() != real.len() {
        bail!("{}: {} of {} requests fit into the engine", run.name, simulated.len(), real.len());
    }
    let [e2e, ttft, ttfo, itl, e2e_bias] = errors(&real, simulated);
    Ok(Errors {
        run: run.name.clone(),
        scheduler: run.scheduler.clone(),
        is_fitted,
        requests: real.len(),
        e2e,
        ttft,
        ttfo,
        itl,
        e2e_bias,
        real: Means::real(run),
        simulated: Means::simulated(&outcome),
        steps: run.steps.ms.len() as u64,
        same_steps: (!run.engine.realtime).then(|| run.same_steps(&outcome.works)),
    })
}
