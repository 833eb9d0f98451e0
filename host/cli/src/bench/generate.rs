use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use meridian_bench::trace::{Generator, write_csv};

use super::input::WorkloadArgs;
use crate::{Unusable, print_json, print_line};

#[derive(Args)]
#[command(after_help = "Example:\n  meridian bench generate --workload multi-turn --requests 10000 --out requests.csv")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    workload: WorkloadArgs,
    /// Set the seed of the workload
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Write the CSV to this file, and replace any existing file
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
}

pub(crate) fn run(args: &GenerateArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let (name, workload, requests) = args.workload.read().map_err(unusable)?;
    let generator = Generator::new(&workload, args.seed).map_err(|error| unusable(error.into()))?;
    let file =
        std::fs::File::create(&args.out).with_context(|| format!("{}: cannot be written", args.out.display()))?;
    let mut file = BufWriter::new(file);
    write_csv(generator.take(requests), &mut file)?;
    file.flush()?;
    let out = args.out.display().to_string();
    if json {
        return print_json(&serde_json::json!({ "ok": true, "out": out, "workload": name, "requests": requests }));
    }
    Ok(print_line(&format!("{out}: {requests} requests of {name}"))?)
}
