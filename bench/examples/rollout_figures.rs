//! Measures roll-outs over simulated engines; one JSON object a line.
//!
//!     rollout_figures equal|slow|starves|many RUNS FOLDER

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use meridian_bench::policies::{Choice, Loader, Policies, PolicyArg};
use meridian_bench::results::Slo;
use meridian_bench::rollout::SimulatedFleet;
use meridian_bench::sim::{EngineConfig, Simulation, StepModel};
use meridian_bench::trace::{Generator, TraceRequest, Workload};
use meridian_core::{MeridianConfig, SlotName};
use meridian_fleet::rollout::{NewPolicy, Outcome, Rollout, RolloutSettings, RolloutState, Start, Store, Wish, wish};
use serde_json::json;

const OLD: &str = "native:balanced";
/// Leaves every step to the default, `balanced`: the same policy under another name.
const SAME: &str = "native:noop";
/// Holds answers back to one token in two seconds while anything else could run.
const STARVES: (&str, &str) = ("native:pascal", r#"{"tpot_ms": 2000.0, "lead_tokens": 1}"#);
/// The bound of a component's decision, milliseconds; a policy that sleeps so long adds it to every step.
const DEADLINE_MS: f64 = 2.0;
/// A step with some 16 decodes of a small model, milliseconds.
const STEP: StepModel = StepModel {
    fixed_ms: 3.5,
    request_ms: 0.03,
    weights_ms: 0.0,
    token_ms: 0.01,
    kv_token_ms: 0.0,
    attention_ms: 0.0,
    arrival_ms: 0.0,
    hides_host: false,
};
const USUAL_STEP_MS: f64 = 4.1;

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [what, runs, folder] = arguments.as_slice() else {
        bail!("expected what to measure, a number of runs, and a folder for states")
    };
    let runs: u64 = runs.parse().with_context(|| format!("{runs}: expected a number of runs"))?;
    let folder = Path::new(folder);
    for seed in 1..=runs {
        match what.as_str() {
            "equal" => roll_out(seed, 6, (SAME, "{}"), 1.0, folder)?,
            "slow" => roll_out(seed, 6, (SAME, "{}"), 1.0 + DEADLINE_MS / USUAL_STEP_MS, folder)?,
            "starves" => roll_out(seed, 6, STARVES, 1.0, folder)?,
            "many" => roll_out(seed, 1000, (SAME, "{}"), 1.0, folder)?,
            other => bail!("{other}: expected equal, slow, starves or many"),
        }
    }
    Ok(())
}

fn loader() -> Loader {
    Loader::new(MeridianConfig::default())
}

/// An engine whose load differs from that of the others by up to a third; each step by up to a tenth.
fn engine(
    seed: u64,
    number: u64,
    is_small: bool,
    drag: f64,
) -> anyhow::Result<(Simulation, impl Iterator<Item = TraceRequest> + use<>)> {
    let config = EngineConfig {
        step: STEP,
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        kv_blocks: if is_small { 4_000 } else { 20_000 },
        jitter: (0..64).map(|i| 0.9 + 0.2 * (i as f32) / 63.0).collect(),
        ..EngineConfig::default()
    };
    let own = 0.75 + 0.5 * ((number * 7919 + seed * 104_729) % 1000) as f64 / 1000.0;
    let rate = own * if is_small { 0.3 } else { 3.0 };
    let workload = Workload { requests_per_s: rate, ..Workload::named("reasoning-chat")? };
    let dispatch: PolicyArg = OLD.parse().map_err(anyhow::Error::msg)?;
    let policies = Policies::load(&mut loader(), &Choice { dispatch, eviction: None, budget: None, inject: None }, 1)?;
    let simulation = Simulation::new(&config, vec![policies], Slo::default(), 100_000).with_drag(SAME, drag);
    let arrivals = Generator::new(&workload, seed * 10_000 + number)?.map(|request| request.clipped(1200));
    Ok((simulation, arrivals))
}

fn roll_out(seed: u64, engines: u64, (source, options): (&str, &str), drag: f64, folder: &Path) -> anyhow::Result<()> {
    let dir = folder.join(format!("rollout-{seed}"));
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    }
    let simulated: Vec<_> = (0..engines).map(|i| engine(seed, i, engines > 100, drag)).collect::<Result<_, _>>()?;
    let fleet = SimulatedFleet::new(simulated, loader);
    // Full queues before it begins.
    fleet.pass(30.0);
    let begun = Instant::now();
    let before = fleet.simulating();
    let mut settings = RolloutSettings::new(SlotName::Dispatch, "20%,50%,100%", 60.0)?;
    (settings.interval_s, settings.settle_s, settings.seed) = (10.0, 5.0, seed);
    settings.guards = vec!["output_itl_p90<=1.05x".parse()?, "ttft_mean<=1.5x".parse()?];
    let intervals = settings.intervals();
    let mut paused = None;
    let own_dir = dir.clone();
    let told = &mut |state: &RolloutState| {
        if state.paused.is_some() && paused.is_none() {
            // Nobody is here to accept.
            paused.clone_from(&state.paused);
            let _ = wish(&own_dir, Wish::Abort);
        }
    };
    let policy = NewPolicy { source: source.into(), options: Some(options.into()), ..NewPolicy::default() };
    let start = Start {
        settings,
        policy,
        component: None,
        fleet: Vec::new(),
        predicted: None,
        roster: &fleet,
        clock: &fleet,
        told,
    };
    let mut rollout = Rollout::begin(Store::lock(&dir)?, start)?;
    let outcome = rollout.run()?;
    let state = rollout.state().clone();
    drop(rollout);
    ensure!(!fleet.has_rests(), "an engine has a shadow or a quarantine: {:?}", state.events);
    let wanted = if outcome == Outcome::Completed { source } else { OLD };
    let right = fleet.deciding().iter().filter(|deciding| *deciding == wanted).count();
    let (outcome, why) = match outcome {
        Outcome::Completed => ("completed", String::new()),
        Outcome::RolledBack { why } => ("rolled-back", why),
        Outcome::Aborted => ("aborted", String::new()),
    };
    // Those after the intervals in shadow, whichever step they belong to.
    let looks = state.measured_intervals().saturating_sub(u64::from(intervals));
    println!(
        "{}",
        json!({
            "seed": seed,
            "outcome": outcome,
            "why": why,
            "looks": looks,
            "engines": engines,
            "right": right,
            "messages": state.messages,
            "seconds": state.at_s - state.started_s,
            "own_s": begun.elapsed().saturating_sub(fleet.simulating().saturating_sub(before)).as_secs_f64(),
            "state_bytes": std::fs::metadata(dir.join("state.json"))?.len(),
            "measured_bytes": std::fs::metadata(dir.join("intervals.jsonl")).map_or(0, |file| file.len()),
            "paused": paused,
        })
    );
    std::fs::remove_dir_all(&dir)?;
    Ok(())
}
