use std::ffi::OsString;
use std::process::Command;

use anyhow::Context;
use clap::Args;

#[derive(Args)]
#[command(disable_help_flag = true, after_help = "Example: meridian bench vllm --scenario multi-turn --kv-blocks 900")]
pub(crate) struct VllmArgs {
    /// Passed on; `--help` lists them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Hand over to the Python package: the engine is there. The command that the wheel installs does not come here.
pub(crate) fn run(args: &VllmArgs, json: bool) -> anyhow::Result<()> {
    let python = std::env::var_os("MERIDIAN_PYTHON").unwrap_or_else(|| "python3".into());
    let status = Command::new(&python)
        .args(["-m", "meridian.bench"])
        .args(&args.args)
        .args(json.then_some("--json"))
        .status()
        .with_context(|| format!("{}: cannot be started (MERIDIAN_PYTHON names another)", python.display()))?;
    match status.code() {
        Some(0) => Ok(()),
        code => std::process::exit(code.unwrap_or(1)),
    }
}
