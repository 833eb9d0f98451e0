use clap::Args;
use meridian_bench::replay::{Options, Rate};
use meridian_bench::report::tuned;
use meridian_bench::tune::{self, tune};

use super::input::{EngineArgs, InputArgs, SloArgs};
use crate::progress::bar;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
The command tries max_num_batched_tokens from 256 to 8192, then a long_prefill_token_threshold of a
half and a quarter of the best value. It simulates engines under stock vLLM's own scheduler, without
Meridian. The best flags have the most goodput: requests a second that attain the service levels.
The engine keeps its own flags unless others win at least 1 %.

Exit code: 0 done, 1 a run failed, 2 bad input.

Examples:
  meridian bench tune --trace requests.csv --engine 7b-h100 --rate 2.3
  meridian bench tune --workload multi-turn --engine measured.toml --capacity")]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Tune for this rate: requests a second, or a multiple of the trace's own rate (2.5 or 2x)
    #[arg(long, value_name = "RATE", default_value = "1x")]
    rate: Rate,
    /// Find the highest rate at which nine of ten requests attain the service levels, and tune for it
    #[arg(long, conflicts_with = "rate")]
    capacity: bool,
    /// Use these seeds; 1 replays a trace as it is, others shuffle its requests
    #[arg(long, value_name = "SEED", value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,
    #[command(flatten)]
    slo: SloArgs,
}

pub(crate) fn run(args: &TuneArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let options = options(args).map_err(unusable)?;
    let (input, notes) = args.input.read().map_err(unusable)?;
    notes.iter().for_each(|note| say(&format!("note: {note}")));
    let rate = if args.capacity {
        let progress = bar(1, "capacity");
        let found = tune::capacity(&options, &input);
        progress.finish_and_clear();
        let Some(rate) = found? else {
            anyhow::bail!("no rate is served: nine of ten requests attain the service levels at none");
        };
        Rate::PerSecond(rate)
    } else {
        args.rate
    };
    let progress = bar(tune::runs(&options.engine) as u64, "{pos} of {len} flags");
    let found = tune(&options, &input, rate, &mut || progress.inc(1));
    progress.finish_and_clear();
    let found = found?;
    if json {
        return print_json(&found);
    }
    print_line(tuned(&found).trim_end())?;
    Ok(())
}

fn options(args: &TuneArgs) -> anyhow::Result<Options> {
    let (engine, engine_name, config) = args.engine.read()?;
    let stock = Options::stock(args.slo.read()?, args.seeds.clone(), config, super::command());
    Ok(Options { engine, engine_name, ..stock })
}
