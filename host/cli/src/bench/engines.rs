use clap::Args;
use meridian_bench::sim::preset;

use crate::{print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
Seats and tokens of a step are the defaults of vLLM's API server for that GPU; KV memory is what its default share of the
memory leaves beside the weights. Step times come from data sheets (bench/src/sim/preset.rs names the sources).

Example:
  meridian bench engines --json")]
pub(crate) struct EnginesArgs {}

pub(crate) fn run(_: &EnginesArgs, json: bool) -> anyhow::Result<()> {
    let presets = preset::all();
    if json {
        return print_json(&presets);
    }
    print_line(&format!(
        "{:18} {:>4}  {:22} {:>7} {:>8} {:>7} {:>11} {:>12}",
        "engine", "GPUs", "GPU", "GiB", "seats", "tokens", "KV tokens", "weights, ms"
    ))?;
    for each in presets {
        print_line(&format!(
            "{:18} {:>4}  {:22} {:>7.1} {:>8} {:>7} {:>11} {:>12.2}",
            each.name,
            each.gpus,
            each.device,
            each.memory_gib,
            each.max_num_seqs,
            each.max_num_batched_tokens,
            each.kv_tokens,
            each.weights_ms
        ))?;
    }
    Ok(())
}
