use std::path::PathBuf;

use clap::Args;
use meridian_bench::micro;

use crate::{print_json, print_line};

#[derive(Args)]
#[command(after_help = "Example: meridian bench micro --policy target/policies/output-first.wasm")]
pub(crate) struct MicroArgs {
    /// Folder with output-first.wasm and noop.wasm
    #[arg(long, default_value = "target/policies")]
    policies: PathBuf,
    /// Component to time against native:output-first
    #[arg(long)]
    policy: Option<PathBuf>,
    /// Candidates a step
    #[arg(long, value_delimiter = ',', default_values_t = [16, 64, 256, 1024, 4096])]
    candidates: Vec<usize>,
}

pub(crate) fn run(args: MicroArgs, json: bool) -> anyhow::Result<()> {
    let MicroArgs { policies, policy, candidates } = args;
    let policy = policy.unwrap_or_else(|| policies.join("output-first.wasm"));
    let report = micro::run(&policy, &policies.join("noop.wasm"), &candidates, &mut |line| eprintln!("{line}"))?;
    if json {
        return print_json(&report);
    }
    print_line(&format!("no-op call         {:>9.0} ns", report.noop_call_ns))?;
    print_line(&format!("{:>10} {:>12} {:>12} {:>7}  spread", "candidates", "native ns", "wasm ns", "ratio"))?;
    for row in &report.rows {
        print_line(&format!(
            "{:>10} {:>12.0} {:>12.0} {:>7.2}  {:.2}-{:.2}",
            row.candidates, row.native_ns, row.wasm_ns, row.ratio, row.ratio_low, row.ratio_high
        ))?;
    }
    Ok(())
}
