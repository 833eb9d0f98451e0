use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use clap::Args;
use meridian_bench::limits::{NUM_SEQS, within};
use meridian_bench::policies::PolicyArg;
use meridian_bench::predict::{self, FEWEST_REPLICATES, Observed, predict};
use meridian_core::{MeridianConfig, PolicySource, SlotName};
use meridian_engine::recording::RecordedPolicy;
use meridian_fleet::{Basis, PredictedRatio, Prediction};
use meridian_wasm::{MAX_COMPONENT_BYTES, read_regular, sha256_of};

use super::input::configured;
use super::recordings;
use crate::ctl::slot_parser;
use crate::progress::bar;
use crate::replay::sort_as_written;
use crate::{Unusable, print_json, print_line};

/// Most resampled recordings.
const MOST_REPLICATES: u32 = 1000;

#[derive(Args)]
#[command(after_help = "\
The command fits the simulator to the recorded steps, and replays the recorded requests under the
recorded policy and under the new one. The prediction is the ratio of each metric, new over old. Its
interval is meant to hold 95 % of the ratios that are measured later over as much traffic.

The table shows each metric of the old policy as recorded and as simulated: where the two differ
much, do not trust the prediction.

Exit code: 0 done, 1 a simulation failed, 2 the recording or a policy cannot be used.

Examples:
  meridian bench predict recordings --policy native:srpt --out predicted.json
  meridian bench predict recordings/dispatch-4711-*.arrow --policy mine.wasm --config meridian.toml
  meridian bench predict recordings --slot eviction --policy native:prefix-value --old native:lru")]
pub(crate) struct PredictArgs {
    /// Read these recordings of one engine process, or those in this folder
    #[arg(required = true, value_name = "RECORDING|FOLDER")]
    recordings: Vec<PathBuf>,
    /// Predict the change to this policy
    #[arg(long, value_name = "POLICY")]
    policy: PolicyArg,
    /// Change the policy of this slot
    #[arg(long, value_parser = slot_parser(), default_value = "dispatch")]
    slot: SlotName,
    /// Compare with this policy; by default, with the recorded one
    #[arg(long, value_name = "POLICY")]
    old: Option<PolicyArg>,
    /// Read the other policies and the KV settings from this meridian.toml
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Run at most this many requests at once, where the recording does not show the engine's limit
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<u32>,
    /// Resample the recording this many times, for the intervals
    #[arg(long, value_name = "N", default_value_t = 24)]
    replicates: u32,
    /// Use this seed; the same seed gives the same prediction
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Write the prediction to this file, for --predicted of a roll-out or an experiment
    #[arg(long, value_name = "FILE.json")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &PredictArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let (observed, options) = read(args).map_err(unusable)?;
    let progress = bar(0, "{pos} of {len} simulations");
    let prediction = predict(&observed, &options, &mut |done, all| {
        progress.set_length(all.into());
        progress.set_position(done.into());
    });
    progress.finish_and_clear();
    let prediction = prediction?;
    if let Some(path) = &args.out {
        let text = serde_json::to_string(&prediction)?;
        std::fs::write(path, text).with_context(|| format!("--out: {}: cannot be written", path.display()))?;
    }
    if json { print_json(&prediction) } else { print(&prediction) }
}

fn read(args: &PredictArgs) -> anyhow::Result<(Observed, predict::Options)> {
    within("--replicates", args.replicates, &(FEWEST_REPLICATES..=MOST_REPLICATES))?;
    let max_num_seqs = args.max_num_seqs.map(|seats| within("--max-num-seqs", seats, &NUM_SEQS)).transpose()?;
    let (recordings, others) = recordings::open(&args.recordings)?;
    let recorded = &recordings[recordings.len() - 1].header().policy;
    let mut config = configured(args.config.as_deref())?;
    take_targets(&mut config, recorded);
    let decided = match args.slot {
        SlotName::Dispatch => Some(recorded),
        slot => {
            let mut of_slot: Vec<_> = others.iter().filter(|recording| recording.slot() == slot).collect();
            sort_as_written(&mut of_slot, |recording| recording.header());
            of_slot.last().map(|recording| &recording.header().policy)
        }
    };
    let old = match (&args.old, decided) {
        (Some(old), _) => old.clone(),
        (None, Some(recorded)) => source_of(recorded)?,
        (None, None) => bail!("--old: no recording of slot {} is given, expected the old policy", args.slot.label()),
    };
    if args.slot == SlotName::Eviction {
        // The dispatch policy stays.
        set_dispatch(&mut config, &source_of(recorded)?)?;
    }
    let observed = Observed::read(&recordings)?;
    let recording = recordings::name(&recordings);
    let options = predict::Options {
        slot: args.slot,
        old,
        new: args.policy.clone(),
        config,
        max_num_seqs,
        replicates: args.replicates,
        seed: args.seed,
        recording,
    };
    Ok((observed, options))
}

/// The targets that the recorded policy started with.
fn take_targets(config: &mut MeridianConfig, recorded: &RecordedPolicy) {
    let targets = recorded.targets;
    let scheduler = &mut config.scheduler;
    scheduler.output_tpot_budget_ms = targets.output_tpot_budget_ms;
    scheduler.think_tpot_budget_ms = targets.think_tpot_budget_ms;
    scheduler.think_batch_multiplier = targets.think_batch_multiplier;
    scheduler.max_defer_ms = targets.max_defer_ms;
}

fn set_dispatch(config: &mut MeridianConfig, policy: &PolicyArg) -> anyhow::Result<()> {
    config.policy.dispatch.source.clone_from(&policy.source);
    config.policy.dispatch.config = serde_json::from_str(&policy.options)
        .with_context(|| format!("{}: the options of the recorded policy", policy.options))?;
    Ok(())
}

/// The recorded policy, if it is still where it came from.
fn source_of(recorded: &RecordedPolicy) -> anyhow::Result<PolicyArg> {
    let version = &recorded.version;
    let source = &version.source;
    if PolicySource::of(source).is_file() {
        let path = Path::new(source);
        let named =
            || format!("the recorded policy {} came from {source:?}: name its component with --old", version.name);
        ensure!(path.is_file(), "{}, which is no file here", named());
        let bytes = read_regular(path, MAX_COMPONENT_BYTES).with_context(named)?;
        let bytes = bytes.with_context(|| format!("{}: is larger than 32 MiB", named()))?;
        // Before anything of it is parsed: a recording may name any file.
        let found = sha256_of(&bytes);
        ensure!(found == version.sha256, "{}: that file has another digest now, {found}", named());
    }
    let options = if recorded.options == "{}" { "" } else { &recorded.options };
    format!("{source}{options}").parse().map_err(anyhow::Error::msg)
}

fn print(prediction: &Prediction) -> anyhow::Result<()> {
    let Prediction { slot, old, new, metrics, recording, basis, .. } = prediction;
    let Basis { requests, seconds, recorded, simulated, notes, .. } = basis.clone().unwrap_or_default();
    print_line(&format!("recording  {recording}: {requests} requests in {seconds:.0} s"))?;
    print_line(&format!("change     {} {} to {} {} ({})", old.name, old.version, new.name, new.version, slot.label()))?;
    print_line(&format!(
        "\n{:22} {:>12} {:>12} {:>9} {:>17}",
        "metric", "old recorded", "simulated", "new/old", "95 % interval"
    ))?;
    let cell = |values: &std::collections::BTreeMap<String, f64>, name: &str| {
        values.get(name).map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"))
    };
    for name in SHOWN {
        let Some(PredictedRatio { ratio, low, high }) = metrics.get(name) else { continue };
        let interval = format!("{low:.3} to {high:.3}");
        print_line(&format!(
            "{name:22} {:>12} {:>12} {ratio:>9.3} {interval:>17}",
            cell(&recorded, name),
            cell(&simulated, name)
        ))?;
    }
    print_line("\nTimes are milliseconds, rates are per second.")?;
    notes.iter().try_for_each(|note| print_line(&format!("note: {note}")))?;
    Ok(())
}

/// Metrics of the table; the file has all.
const SHOWN: [&str; 16] = [
    "output_itl_mean",
    "output_itl_p50",
    "output_itl_p99",
    "think_itl_mean",
    "think_itl_p99",
    "queue_mean",
    "ttft_mean",
    "ttft_p50",
    "ttft_p99",
    "ttfo_mean",
    "ttfo_p50",
    "ttfo_p99",
    "e2e_mean",
    "e2e_p50",
    "token_rate",
    "recomputed_share",
];
