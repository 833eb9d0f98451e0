use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;
use clap::Subcommand;
use meridian_bench::micro;

use crate::{print_json, print_line};

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare stock vLLM's scheduler with Meridian's in the real engine; needs the Python package and vLLM
    #[command(
        disable_help_flag = true,
        after_help = "Example: meridian bench vllm --scenario multi-turn --kv-blocks 900"
    )]
    Vllm {
        /// Passed on; `--help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Time one decision: native against WebAssembly, as ratios from one run
    #[command(after_help = "Example: meridian bench micro --policy target/policies/output-first.wasm")]
    Micro {
        /// Folder with output-first.wasm and noop.wasm
        #[arg(long, default_value = "target/policies")]
        policies: PathBuf,
        /// Component to time against native:output-first
        #[arg(long)]
        policy: Option<PathBuf>,
        /// Candidates a step
        #[arg(long, value_delimiter = ',', default_values_t = [16, 64, 256, 1024, 4096])]
        candidates: Vec<usize>,
    },
}

pub(crate) fn run(command: BenchCommand, json: bool) -> anyhow::Result<()> {
    let (policies, policy, candidates) = match command {
        BenchCommand::Vllm { args } => return vllm(&args, json),
        BenchCommand::Micro { policies, policy, candidates } => (policies, policy, candidates),
    };
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

/// Hand over to the Python package: the engine is there. The command that the wheel installs does not come here.
fn vllm(args: &[OsString], json: bool) -> anyhow::Result<()> {
    let python = std::env::var_os("MERIDIAN_PYTHON").unwrap_or_else(|| "python3".into());
    let status = Command::new(&python)
        .args(["-m", "meridian.bench"])
        .args(args)
        .args(json.then_some("--json"))
        .status()
        .with_context(|| format!("{}: cannot be started (MERIDIAN_PYTHON names another)", python.display()))?;
    match status.code() {
        Some(0) => Ok(()),
        code => std::process::exit(code.unwrap_or(1)),
    }
}
