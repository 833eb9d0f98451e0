//! Predicts what another policy would change, from a recording of the engine: the counterfactual.
//!
//! The simulator is fitted to the recorded steps and replays the recorded requests under the recorded policy and under the
//! other. The ratio of each metric is the prediction. Its interval comes from the same with resampled requests and a model
//! fitted to resampled steps.

mod observed;
mod resample;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use meridian_core::{MeridianConfig, SlotName};
use meridian_engine::control::Version;
use meridian_fleet::stats::{Metric, Sample};
use meridian_fleet::{Basis, PREDICTION_FORMAT, PolicyName, PredictedRatio, Prediction};
use rand::SeedableRng;
use rand_pcg::Pcg64;
use statrs::distribution::{ContinuousCDF, StudentsT};

pub use self::observed::Observed;
use crate::calibrate::fit_steps;
use crate::policies::{Choice, Loader, Policies, PolicyArg, configured};
use crate::results::Slo;
use crate::sim::{EngineConfig, Simulation, StepModel, StepWork};
use crate::trace::TraceRequest;
use crate::vllm::RecordedSteps;

/// The share of later measurements that an interval is meant to hold.
pub const CONFIDENCE: f64 = 0.95;
/// Factors of step times that are kept.
const JITTER: usize = 512;

/// What to predict.
#[derive(Clone, Debug)]
pub struct Options {
    /// The slot that the policies are of: dispatch or eviction.
    pub slot: SlotName,
    /// The policy of the recording.
    pub old: PolicyArg,
    /// The policy in its place.
    pub new: PolicyArg,
    /// Policies of the other slots, targets, KV settings.
    pub config: MeridianConfig,
    /// Most running requests of the engine, where the recording does not show it.
    pub max_num_seqs: Option<u32>,
    /// Resampled recordings; at least 8.
    pub replicates: u32,
    /// Seed of the resampling; equal seeds give equal predictions.
    pub seed: u64,
    /// The recording, by the names of its files.
    pub recording: String,
}

/// Fewest replicates.
pub const FEWEST_REPLICATES: u32 = 8;

/// Predict. `progress` is told how many simulations of how many are over.
///
/// # Errors
/// A policy that cannot be loaded, or too short a recording.
pub fn predict(
    observed: &Observed,
    options: &Options,
    progress: &mut dyn FnMut(u32, u32),
) -> anyhow::Result<Prediction> {
    let Options { slot, replicates, seed, .. } = options;
    ensure!(
        *slot != SlotName::Budget,
        "--slot budget: expected dispatch or eviction: simulated thoughts have no text to judge"
    );
    ensure!(*replicates >= FEWEST_REPLICATES, "--replicates {replicates}: expected at least {FEWEST_REPLICATES}");
    ensure!(observed.seconds > 0.0, "the recording lasts no time");
    let mut loader = Loader::new(options.config.clone());
    let names = [&options.old, &options.new].map(|source| version(&mut loader, *slot, source));
    let [old_name, new_name] = names;
    let (old_name, new_name) = (old_name?, new_name?);
    let requests = resample::completed(observed, *seed);
    let mut bench = Bench { loader, options, observed };
    let runs = 2 * (replicates + 1);
    progress(0, runs);
    let engine = bench.engine(&observed.steps)?;
    let old = bench.simulate(&engine, &options.old, &requests)?;
    progress(1, runs);
    let new = bench.simulate(&engine, &options.new, &requests)?;
    progress(2, runs);
    let mut random = Pcg64::seed_from_u64(*seed);
    let mut drawn = Vec::new();
    for done in 0..*replicates {
        let requests = resample::traffic(&requests, observed.seconds, &mut random);
        let engine = bench.engine(&resample::steps(&observed.steps, &mut random))?;
        let old = bench.simulate(&engine, &options.old, &requests)?;
        progress(2 * done + 3, runs);
        drawn.push((old, bench.simulate(&engine, &options.new, &requests)?));
        progress(2 * done + 4, runs);
    }
    let metrics = Metric::all().filter_map(|metric| Some((metric.to_string(), ratio(metric, &old, &new, &drawn)?)));
    let metrics: BTreeMap<String, PredictedRatio> = metrics.collect();
    let recorded = Sample { counts: observed.measured.clone(), seconds: observed.seconds };
    let of = |sample: &Sample| -> BTreeMap<String, f64> {
        let value = |name: &String| Some((name.clone(), name.parse::<Metric>().ok()?.of(sample)?));
        metrics.keys().filter_map(value).filter(|(_, value)| value.is_finite()).collect()
    };
    let mut notes: Vec<String> = observed.lack().into_iter().collect();
    let (open, all) = (observed.open(), observed.requests.len());
    if open > 0 {
        notes.push(format!("{open} of {all} requests had not ended: their lengths are drawn from longer ones"));
    }
    let ([least, most], chosen) = (observed.asked, observed.max_tokens);
    if least != most {
        notes.push(format!("clients asked for {least} to {most} tokens: in the simulation, all ask for {chosen}"));
    }
    if options.max_num_seqs.is_none() && !observed.knows_seats() {
        notes.push(format!(
            "no request waited for a seat: max_num_seqs is not known, and {} was assumed (--max-num-seqs)",
            engine.max_num_seqs
        ));
    }
    Ok(Prediction {
        format: PREDICTION_FORMAT.into(),
        slot: *slot,
        old: PolicyName::from(&old_name),
        new: PolicyName::from(&new_name),
        recording: options.recording.clone(),
        seed: *seed,
        basis: Some(Basis {
            requests: observed.requests.len() as u64,
            seconds: observed.seconds,
            replicates: *replicates,
            confidence: CONFIDENCE,
            recorded: of(&recorded),
            simulated: of(&old),
            notes,
        }),
        metrics,
    })
}

/// Name, version and digest of a policy.
fn version(loader: &mut Loader, slot: SlotName, source: &PolicyArg) -> anyhow::Result<Version> {
    Ok(match slot {
        SlotName::Dispatch => loader.load::<meridian_core::Dispatch>(source)?.version,
        SlotName::Eviction => loader.load::<meridian_core::Eviction>(source)?.version,
        SlotName::Budget => loader.load::<meridian_core::Budget>(source)?.version,
    })
}

/// The ratio of a metric, with the interval for a later measurement over as much traffic: that one varies as much as the
/// recording did, so the variance is twice that of the resampled ratios.
fn ratio(metric: Metric, old: &Sample, new: &Sample, drawn: &[(Sample, Sample)]) -> Option<PredictedRatio> {
    let least = metric.least_count();
    if [old, new].iter().any(|sample| metric.count(&sample.counts) < least) {
        return None;
    }
    let log = |old: &Sample, new: &Sample| {
        let log = (metric.of(new)? / metric.of(old)?).ln();
        log.is_finite().then_some(log)
    };
    let estimate = log(old, new)?;
    let logs: Vec<f64> = drawn.iter().filter_map(|(old, new)| log(old, new)).collect();
    // A metric that a resampled recording lacks is too rare to speak of.
    if logs.len() < drawn.len() {
        return None;
    }
    let count = logs.len() as f64;
    let mean = logs.iter().sum::<f64>() / count;
    let variance = logs.iter().map(|log| (log - mean).powi(2)).sum::<f64>() / (count - 1.0);
    let student = StudentsT::new(0.0, 1.0, count - 1.0).ok()?;
    let half = (2.0 * variance).sqrt() * student.inverse_cdf(f64::midpoint(1.0, CONFIDENCE));
    let ratio = PredictedRatio { ratio: estimate.exp(), low: (estimate - half).exp(), high: (estimate + half).exp() };
    (ratio.high.is_finite() && ratio.low > 0.0).then_some(ratio)
}

/// The fitted engine, and what simulates it.
struct Bench<'a> {
    loader: Loader,
    options: &'a Options,
    observed: &'a Observed,
}

impl Bench<'_> {
    /// The engine whose steps take as long as these, and vary as much.
    fn engine(&self, steps: &RecordedSteps) -> anyhow::Result<EngineConfig> {
        let step = fit_steps(&[steps]).context("the step time cannot be fitted")?;
        let engine = EngineConfig { jitter: jitter(&step, steps), ..self.observed.engine(step) };
        let max_num_seqs = self.options.max_num_seqs.unwrap_or(engine.max_num_seqs);
        Ok(EngineConfig { max_num_seqs, ..engine })
    }

    fn simulate(
        &mut self,
        engine: &EngineConfig,
        policy: &PolicyArg,
        requests: &[TraceRequest],
    ) -> anyhow::Result<Sample> {
        let (dispatch, eviction) = match self.options.slot {
            SlotName::Eviction => (configured(self.loader.config(), SlotName::Dispatch)?, Some(policy.clone())),
            SlotName::Dispatch | SlotName::Budget => (policy.clone(), None),
        };
        let choice = Choice { dispatch, eviction, budget: None, inject: None };
        let policies = Policies::load(&mut self.loader, &choice, self.options.seed)?;
        let simulation = Simulation::new(engine, vec![policies], Slo::default(), requests.len())
            .with_max_tokens(self.observed.max_tokens)
            .observing();
        let outcome = simulation.run(requests.iter().cloned(), |_| {});
        for watch in self.loader.take_watches() {
            if let Some(why) = watch.given_up() {
                bail!("{why}");
            }
        }
        let seconds = outcome.run.metrics.get("makespan_s").copied().unwrap_or(0.0);
        Ok(Sample { counts: outcome.latency.unwrap_or_default(), seconds })
    }
}

/// How steps deviate from the model: measured time over predicted time, as evenly spaced quantiles in an order of their own.
fn jitter(model: &StepModel, steps: &RecordedSteps) -> Arc<[f32]> {
    let mut factors: Vec<f64> = (0..steps.ms.len())
        .map(|i| {
            let work = StepWork {
                requests: steps.requests[i],
                tokens: steps.tokens[i],
                context_tokens: steps.context_tokens[i],
                attention_pairs: steps.attention_pairs[i],
            };
            steps.ms[i] / model.step_ms(&work)
        })
        .filter(|factor| factor.is_finite())
        .collect();
    if factors.is_empty() {
        return Arc::new([]);
    }
    factors.sort_by(f64::total_cmp);
    let kept = factors.len().min(JITTER);
    let quantiles: Vec<f64> = (0..kept).map(|i| factors[(2 * i + 1) * factors.len() / (2 * kept)]).collect();
    let mean = quantiles.iter().sum::<f64>() / kept as f64;
    quantiles.iter().map(|factor| (factor / mean) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ttft_ms: f64) -> Sample {
        let ttft = (0..200).map(|i| ttft_ms * (1.0 + f64::from(i % 7) / 100.0)).collect();
        let counts = meridian_core::latency::LatencyCounts { ttft, ..Default::default() };
        Sample { counts, seconds: 60.0 }
    }

    #[test]
    fn the_interval_has_the_ratio_and_grows_with_what_varies() {
        let metric: Metric = "ttft_mean".parse().expect("a metric");
        let drawn = |spread: f64| -> Vec<(Sample, Sample)> {
            (0..16).map(|i| (sample(100.0), sample(80.0 * (1.0 + spread * (f64::from(i) / 15.0 - 0.5))))).collect()
        };
        let of = |spread| ratio(metric, &sample(100.0), &sample(80.0), &drawn(spread)).expect("values");
        let (narrow, wide) = (of(0.01), of(0.1));
        assert!((narrow.ratio - 0.8).abs() < 0.001 && narrow.low < 0.8 && narrow.high > 0.8, "{narrow:?}");
        assert!(narrow.high / narrow.low < 1.05 && wide.high / wide.low > 1.15, "{narrow:?} {wide:?}");
        let few = Sample { counts: Default::default(), seconds: 60.0 };
        assert_eq!(ratio(metric, &few, &sample(80.0), &drawn(0.1)), None);
    }

    #[test]
    fn jitter_keeps_the_mean_of_the_steps() {
        let model = StepModel { fixed_ms: 10.0, ..StepModel::default() };
        let ms: Vec<f64> = (0..1000).map(|i| if i % 10 == 0 { 19.0 } else { 9.0 }).collect();
        let ones = vec![1; ms.len()];
        let steps = RecordedSteps {
            requests: ones.clone(),
            tokens: ones,
            context_tokens: vec![0; ms.len()],
            attention_pairs: vec![0; ms.len()],
            ms,
            ..RecordedSteps::default()
        };
        let factors = jitter(&model, &steps);
        let mean = factors.iter().map(|factor| f64::from(*factor)).sum::<f64>() / factors.len() as f64;
        assert!((mean - 1.0).abs() < 1e-6, "{mean}");
        assert_eq!(factors.iter().filter(|factor| **factor > 1.5).count(), 51);
    }
}
