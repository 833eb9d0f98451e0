use std::path::PathBuf;

use clap::Args;
use meridian_bench::compare::{Comparison, Options, compare};
use meridian_bench::read::read;
use serde::Serialize;

use crate::{Said, Unusable, print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
The command pairs runs by policy, rate and seed.

Exit code: 0 nothing became worse from A to B, 1 something did, 2 the two cannot be compared.

Examples:
  meridian bench compare main.json branch.json --min-change 0.02
  meridian bench compare all.json all.json --policy-a fcfs --policy-b output-first.wasm")]
pub(crate) struct CompareArgs {
    /// Reference results
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// Results over the same trace
    #[arg(value_name = "B.json")]
    b: PathBuf,
    /// Compare only this policy of A, and the same policy of B unless --policy-b names another
    #[arg(long, value_name = "NAME")]
    policy_a: Option<String>,
    /// Compare only this policy of B
    #[arg(long, value_name = "NAME")]
    policy_b: Option<String>,
    /// Treat a change smaller than this share as noise
    #[arg(long, value_name = "SHARE", default_value_t = 0.01)]
    min_change: f64,
}

#[derive(Serialize)]
struct Compared<'a> {
    ok: bool,
    #[serde(flatten)]
    comparison: &'a Comparison,
}

pub(crate) fn run(args: CompareArgs, json: bool) -> anyhow::Result<()> {
    let comparison = compared(args).map_err(|error| error.context(Unusable))?;
    let ok = comparison.exit_code() == 0;
    if json {
        print_json(&Compared { ok, comparison: &comparison })?;
    } else {
        print_line(comparison.to_string().trim_end())?;
    }
    if ok { Ok(()) } else { Err(Said.into()) }
}

fn compared(args: CompareArgs) -> anyhow::Result<Comparison> {
    let CompareArgs { a, b, policy_a, policy_b, min_change } = args;
    Ok(compare(&read(&a)?, &read(&b)?, &Options { policy_a, policy_b, min_change })?)
}
