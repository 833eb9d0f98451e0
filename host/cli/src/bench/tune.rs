use clap::Args;
use meridian_bench::grid::day;
use meridian_bench::metrics::HOLDS;
use meridian_bench::replay::{Options, Rate};
use meridian_bench::report::tuned;
use meridian_bench::steady::{Capacity, RESIDENCES, capacity, steady};
use meridian_bench::tune::{self, Load, tune};

use super::input::{EngineArgs, InputArgs, SloArgs};
use crate::progress::bar;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
The command tries, one kind of flag at a time: tokens of a step from 512 up, active seats, a limit for one prompt and its
adaptive form, a watermark, no reservation of whole prompts, and a bounded queue; then the two best together. It simulates
engines under stock vLLM's own scheduler, without Meridian. The best flags have the most goodput: requests a second that
attain the service levels. The engine keeps its own flags unless others win at least 1 %.

With --sweep, the best single set for 0.5, 0.8 and 0.95 of the capacity and for a day of 0.6, 1.6 (five minutes) and 0.6 of
it: what an operator can set once.

Exit code: 0 done, 1 a run failed, 2 bad input.

Examples:
  meridian bench tune --trace requests.csv --engine 7b-h100 --rate 2.3
  meridian bench tune --workload multi-turn --engine measured.toml --capacity
  meridian bench tune --trace requests.csv --engine 8b-a100 --sweep")]
pub(crate) struct TuneArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Tune for this rate: requests a second, or a multiple of the trace's own rate (2.5 or 2x)
    #[arg(long, value_name = "RATE", default_value = "1x")]
    rate: Rate,
    /// Find the highest steady rate at which nine of ten requests attain the service levels, and tune for it
    #[arg(long, conflicts_with = "rate")]
    capacity: bool,
    /// Find that rate, and tune for parts of it and a day with a burst
    #[arg(long, conflicts_with_all = ["rate", "capacity"])]
    sweep: bool,
    /// Use these seeds; 1 replays a trace as it is, others shuffle its requests
    #[arg(long, value_name = "SEED", value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,
    #[command(flatten)]
    slo: SloArgs,
}

/// Parts of the capacity in a sweep, and minutes of its burst.
const PARTS: [f64; 3] = [0.5, 0.8, 0.95];
const BURST_S: f64 = 300.0;

pub(crate) fn run(args: &TuneArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let options = options(args).map_err(unusable)?;
    let (input, notes) = args.input.read().map_err(unusable)?;
    notes.iter().for_each(|note| say(&format!("note: {note}")));
    let mut loads = Vec::new();
    if args.capacity || args.sweep {
        let progress = bar(1, "capacity");
        let found = capacity(&options, &input, HOLDS);
        progress.finish_and_clear();
        let Some(Capacity { rate, doubled, converged, residence_s, .. }) = found? else {
            anyhow::bail!("no rate is served: nine of ten requests attain the service levels at none");
        };
        if !converged {
            say(&format!(
                "note: not converged: capacity {rate:.4} requests/s, {doubled:.4} in runs of twice the length"
            ));
        }
        let parts: &[f64] = if args.sweep { &PARTS } else { &[1.0] };
        for part in parts {
            let rate = doubled * part;
            let course = Some(steady(&options, &input, rate, RESIDENCES, 0.0)?.course);
            let name = format!("{part} of the capacity: {rate:.4} requests/s");
            loads.push(Load { name, rate: Rate::PerSecond(rate), course });
        }
        if args.sweep {
            let course = Some(day(BURST_S, residence_s));
            loads.push(Load { name: "a day with a burst".into(), rate: Rate::PerSecond(doubled), course });
        }
    } else {
        loads.push(Load { name: args.rate.to_string(), rate: args.rate, course: None });
    }
    let progress = bar(tune::runs(&options.engine, loads.len()) as u64, "{pos} of {len} runs, {eta} left");
    let found = tune(&options, &input, &loads, &mut || progress.inc(1));
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
