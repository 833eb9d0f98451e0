use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use meridian_bench::exit::{EntropyModel, ExitRecording};

use crate::{Unusable, print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
First record thoughts in the real engine; the recording is early-exit-tune.json:
  meridian bench vllm --scenario early-exit --quick --tune 600 --out runs

Simulated thinking (`bench replay` with a budget policy) uses the model in bench/results/entropies.json.

Example:
  meridian bench entropies runs/early-exit-tune.json --out bench/results/entropies.json")]
pub(crate) struct EntropiesArgs {
    /// Fit the model to these recorded thoughts
    #[arg(value_name = "RECORDING.json")]
    recording: PathBuf,
    /// Describe in the model what was recorded
    #[arg(long, value_name = "TEXT", default_value = "models/arith-reasoner, T=0.6, a probe at every line")]
    source: String,
    /// Write the model to this file
    #[arg(long, value_name = "FILE.json")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &EntropiesArgs, json: bool) -> anyhow::Result<()> {
    let recording = ExitRecording::read(&args.recording).map_err(|error| error.context(Unusable))?;
    let model = EntropyModel::fit(&recording, &args.source).map_err(|error| error.context(Unusable))?;
    if let Some(path) = &args.out {
        let text = serde_json::to_string(&model).context("a model is an object of numbers")? + "\n";
        std::fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    if json {
        return print_json(&model);
    }
    print_line(&format!("{} thoughts: {}", model.thoughts, model.source))?;
    print_line(&format!("{:34} {:>8} {:>8} {:>8}", "", "lowest", "median", "highest"))?;
    for (name, of) in [
        ("part of a thought until it settles", &model.settles),
        ("bits before", &model.unsettled_bits),
        ("bits from there on", &model.settled_bits),
    ] {
        let (low, middle, high) = (of[0], of[of.len() / 2], of[of.len() - 1]);
        print_line(&format!("{name:34} {low:>8.3} {middle:>8.3} {high:>8.3}"))?;
    }
    Ok(())
}
