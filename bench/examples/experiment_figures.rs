//! Measures experiments and predictions on simulated engines; one JSON object a line.
//!
//!     experiment_figures known|same|predict RUNS FOLDER

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use meridian_bench::policies::{Choice, Loader, Policies as EnginePolicies, PolicyArg};
use meridian_bench::predict::{Observed, Options, predict};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, Outcome, Simulation, preset};
use meridian_bench::switchback::member;
use meridian_bench::trace::{Generator, TraceRequest, Workload};
use meridian_core::{MeridianConfig, SlotName};
use meridian_engine::recording::{Recorder, RecorderSettings, Recording, SlotSetup};
use meridian_fleet::experiment::{Policies, Report, Settings, State, run};
use meridian_fleet::stats::{Metric, Sample};
use meridian_fleet::{NamedPolicy, PolicyOrigin as Named};
use rand::SeedableRng;
use rand_distr::{Distribution, LogNormal};
use rand_pcg::Pcg64;
use serde_json::json;

const OLD: &str = "native:balanced";
/// Leaves every step to the default, `balanced`: the same policy under another name.
const SAME: &str = "native:noop";
/// The known difference: with `SAME`, each step takes so many times as long.
const DRAG: f64 = 1.1;
/// Requests a second: some two thirds of what the engine can serve.
const RATE: f64 = 2.2;
/// Seconds of a recording, and of the traffic that a prediction is held against.
const RECORDED_S: f64 = 600.0;
/// Policies to predict.
const PREDICTED: [&str; 4] = ["output-first", "pascal", "srpt", "fcfs"];
/// Their headline metrics.
const HEADLINES: [&str; 4] = ["output_itl_mean", "output_itl_p99", "ttft_mean", "ttfo_mean"];

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, runs, folder] = arguments.as_slice() else {
        bail!("expected what to measure, a number of runs, and a folder for recordings")
    };
    let runs: u64 = runs.parse().with_context(|| format!("{runs}: expected a number of runs"))?;
    match what.as_str() {
        "known" => (1..=runs).try_for_each(|seed| experiment(seed, DRAG)),
        "same" => (1..=runs).try_for_each(|seed| experiment(seed, 1.0)),
        "predict" => (1..=runs).try_for_each(|seed| prediction(seed, Path::new(folder))),
        other => bail!("{other}: expected known, same or predict"),
    }
}

fn config() -> anyhow::Result<MeridianConfig> {
    Ok(MeridianConfig::from_toml("[model]\nstrips_reasoning = true")?)
}

/// An engine whose steps vary as those of a real one do: by some percent each, and now and then by much more.
fn engine(seed: u64) -> anyhow::Result<EngineConfig> {
    let mut random = Pcg64::seed_from_u64(seed);
    let usual = LogNormal::new(0.0, 0.06)?;
    let factors = (0..997).map(|i| {
        let pause = if i % 200 == 0 { 4.0 } else { 1.0 };
        (usual.sample(&mut random) * pause) as f32
    });
    let jitter: Arc<[f32]> = factors.collect();
    let engine = preset::named("7b-h100").context("a preset")?;
    Ok(EngineConfig { jitter, max_num_seqs: 128, kv_blocks: 20_000, ..engine })
}

fn policies(dispatch: &str) -> anyhow::Result<EnginePolicies> {
    let dispatch: PolicyArg = dispatch.parse().map_err(anyhow::Error::msg)?;
    EnginePolicies::load(
        &mut Loader::new(config()?),
        &Choice { dispatch, eviction: None, budget: None, inject: None },
        1,
    )
}

fn traffic(seed: u64) -> anyhow::Result<impl Iterator<Item = TraceRequest>> {
    let workload = Workload { requests_per_s: RATE, ..Workload::named("reasoning-chat")? };
    Ok(Generator::new(&workload, seed)?)
}

/// An experiment of 20 pairs of two minutes each, on an engine that is in its stride.
fn experiment(seed: u64, drag: f64) -> anyhow::Result<()> {
    let simulation = Simulation::new(&engine(seed)?, vec![policies(OLD)?], Slo::default(), 1).with_drag(SAME, drag);
    let (member, mut time) = member(simulation, traffic(seed)?, Loader::new(config()?));
    time.pass(120.0);
    let named = |name: &str| NamedPolicy { source: Named::Named(name.into()), options: None };
    let settings = Settings { interval_s: 60.0, warm_up_s: 15.0, pairs: 20, seed, ..Settings::default() };
    let mut state = State::new(settings, "simulated", Default::default());
    run(&mut state, &member, &Policies { old: named(OLD), new: named(SAME) }, &mut time)?;
    let report = Report::of(&state);
    ensure!(report.is_final(), "{:?}", report.stage);
    let restored = member.dispatch().status().active.source == OLD;
    let finding = &report.findings[0];
    println!(
        "{}",
        json!({ "seed": seed, "finding": finding, "restored": restored, "seconds": time.now_s(), "cut": report.cut })
    );
    Ok(())
}

fn simulate(
    engine: &EngineConfig,
    policy: &str,
    requests: &[TraceRequest],
    recorder: Option<Recorder>,
) -> anyhow::Result<Outcome> {
    let mut simulation = Simulation::new(engine, vec![policies(policy)?], Slo::default(), requests.len())
        .with_max_tokens(32_768)
        .observing();
    if let Some(recorder) = recorder {
        let targets = config()?.scheduler.targets();
        simulation = simulation.recorded_by(recorder, SlotSetup { targets, deadline_ms: 2.0, memory_mib: 64 });
    }
    Ok(simulation.run(requests.iter().cloned(), |_| {}))
}

fn sample(outcome: Outcome) -> Sample {
    let seconds = outcome.run.metrics.get("makespan_s").copied().unwrap_or(0.0);
    Sample { counts: outcome.latency.unwrap_or_default(), seconds }
}

/// Record an engine, predict each policy from the recording, and hold that against the same engine under other traffic.
fn prediction(seed: u64, folder: &Path) -> anyhow::Result<()> {
    let dir = folder.join(format!("recording-{seed}"));
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    }
    let engine = engine(seed)?;
    let of = |seed: u64| -> anyhow::Result<Vec<TraceRequest>> {
        Ok(traffic(seed)?.take_while(|request| request.arrival_s < RECORDED_S).collect())
    };
    let recorded = of(seed)?;
    let recorder = Recorder::start(RecorderSettings::new(dir.clone(), 2048)).map_err(anyhow::Error::msg)?;
    let watch = recorder.watch();
    simulate(&engine, OLD, &recorded, Some(recorder))?;
    ensure!(watch.status().dropped == 0, "{} decisions were not recorded", watch.status().dropped);
    let mut files: Vec<_> =
        std::fs::read_dir(&dir)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    files.sort();
    let mut recordings = files.iter().map(|file| Recording::open(file)).collect::<Result<Vec<_>, _>>()?;
    recordings.sort_by_key(|recording| recording.header().file);
    let observed = Observed::read(&recordings)?;
    drop(recordings);
    std::fs::remove_dir_all(&dir)?;
    let held_out = of(1000 + seed)?;
    let before = sample(simulate(&engine, OLD, &held_out, None)?);
    for policy in PREDICTED {
        let options = Options {
            slot: SlotName::Dispatch,
            old: OLD.parse().map_err(anyhow::Error::msg)?,
            new: policy.parse().map_err(anyhow::Error::msg)?,
            config: config()?,
            max_num_seqs: Some(engine.max_num_seqs),
            replicates: 16,
            seed,
            recording: String::new(),
        };
        let predicted = predict(&observed, &options, &mut |_, _| ())?;
        let after = sample(simulate(&engine, policy, &held_out, None)?);
        for name in HEADLINES {
            let metric: Metric = name.parse()?;
            let (Some(before), Some(after)) = (metric.of(&before), metric.of(&after)) else { continue };
            let basis = predicted.basis.as_ref().context("a basis")?;
            println!(
                "{}",
                json!({
                    "seed": seed,
                    "policy": policy,
                    "metric": name,
                    "predicted": predicted.metrics.get(name),
                    "outcome": after / before,
                    "recorded": basis.recorded.get(name),
                    "simulated": basis.simulated.get(name),
                })
            );
        }
    }
    Ok(())
}
