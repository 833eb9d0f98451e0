use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use meridian_bench::read::read;
use meridian_bench::report::html;

use crate::{Unusable, print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
The file needs no network and no script. You can mail, archive and print it.

Example:
  meridian bench report results.json --out report.html")]
pub(crate) struct ReportArgs {
    /// Results that `bench replay --save` or `bench vllm --save` wrote
    #[arg(value_name = "RESULTS.json")]
    results: PathBuf,
    /// Write the HTML to this file, and replace any existing file
    #[arg(long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
}

pub(crate) fn run(args: &ReportArgs, json: bool) -> anyhow::Result<()> {
    let results = read(&args.results).map_err(|error| anyhow::Error::from(error).context(Unusable))?;
    let page = html(&results);
    std::fs::write(&args.out, &page).with_context(|| format!("{}: cannot be written", args.out.display()))?;
    let (out, runs, bytes) = (args.out.display().to_string(), results.runs.len(), page.len());
    if json {
        return print_json(&serde_json::json!({ "ok": true, "out": out, "runs": runs, "bytes": bytes }));
    }
    Ok(print_line(&format!("{out}: {runs} runs, {} KiB", bytes.div_ceil(1024)))?)
}
