use clap::Args;
use meridian_bench::advise::Advice;
use meridian_bench::replay::Options;
use meridian_core::config::Late;

use super::input::{EngineArgs, InputArgs, SloArgs, promise};
use crate::progress::bar;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
The command simulates stock vLLM as it starts and with its best flags, and the configured policy that knows the level. It
prints the steady rates at which each keeps the level for 95 of 100 requests, what could be promised below that, who is in
time through a burst, and the meridian.toml for the level. It takes minutes.

Exit code: 0 done, 1 a run failed, 2 bad input.

Examples:
  meridian bench advise --trace requests.csv --engine 7b-h100
  meridian bench advise --trace requests.csv --engine measured.toml --slo-ttfo-ms 3000 --slo-tpot-ms 40 --json")]
pub(crate) struct AdviseArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    engine: EngineArgs,
    #[command(flatten)]
    slo: SloArgs,
}

pub(crate) fn run(args: &AdviseArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let [stock, promised, refusing] = options(args).map_err(unusable)?;
    let (input, notes) = args.input.read().map_err(unusable)?;
    notes.iter().for_each(|note| say(&format!("note: {note}")));
    let progress = bar(1, "part {pos} of {len}, {elapsed} so far");
    let advice = Advice::of(&stock, &promised, &refusing, &input, &mut |part, parts| {
        progress.set_length(parts as u64);
        progress.set_position(part as u64);
    });
    progress.finish_and_clear();
    let advice = advice?;
    if json {
        return print_json(&advice);
    }
    print_line(advice.text().trim_end())?;
    Ok(())
}

/// Stock vLLM, and the configured policy with the level, late requests last or refused.
fn options(args: &AdviseArgs) -> anyhow::Result<[Options; 3]> {
    let (engine, engine_name, config) = args.engine.read()?;
    let slo = args.slo.read()?;
    let stock = Options::stock(slo, vec![1], config.clone(), super::command());
    let stock = Options { engine, engine_name, ..stock };
    let with = |late: Late| -> anyhow::Result<Options> {
        let mut config = config.clone();
        promise(&mut config, &slo, late)?;
        let baseline = config.policy.dispatch.source.parse().map_err(anyhow::Error::msg)?;
        Ok(Options { config, baseline, ..stock.clone() })
    };
    Ok([stock.clone(), with(Late::Last)?, with(Late::Refuse)?])
}
