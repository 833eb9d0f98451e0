use std::path::PathBuf;

use clap::Args;
use meridian_bench::grid::{Axes, Broken, Gain, Grid, STOCK, TUNED, broken, gains, table};
use meridian_bench::limits::{RUNS, within};
use meridian_bench::policies::PolicySet;
use meridian_bench::replay::{Input, Options, machine};
use meridian_bench::report::heat_map;
use meridian_bench::results::MadeBy;
use meridian_bench::sim::EngineConfig;
use serde::Serialize;

use super::input::{InputArgs, KeepArgs, SloArgs, WorkloadArgs, configured, engine_named};
use crate::progress::bar;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
For each engine and traffic, the command first finds the capacity: the highest rate at which nine of
ten requests attain the service levels under stock vLLM with the best flags for that rate. At each
part of the capacity, the policies then run against stock vLLM, and against stock vLLM with the best
flags for that rate (see `meridian bench tune`). Ratios are medians over seeds.

Exit code: 0 done, whether or not floors hold; 1 a run failed; 2 bad input.

Examples:
  meridian bench grid --trace requests.csv --engine 7b-h100,8b-a100 --loads 0.8,1.05 --html grid.html
  meridian bench grid --trace chat.jsonl:bimodal --workload multi-turn --policy mine.wasm --save grid.json")]
pub(crate) struct GridArgs {
    /// Simulate these engines: presets (MODEL-GPU), or TOML files that `bench calibrate` wrote
    #[arg(long = "engine", value_name = "PRESET|FILE.toml", value_delimiter = ',', default_value = "7b-h100")]
    engines: Vec<String>,
    /// Read recorded requests; `:bimodal` splits generated tokens into thinking and answer; may be given several times
    #[arg(long = "trace", value_name = "FILE[:bimodal]")]
    traces: Vec<String>,
    /// Generate requests from these workloads: names, or TOML files of parameters
    #[arg(long = "workload", value_name = "NAME|FILE.toml", value_delimiter = ',')]
    workloads: Vec<String>,
    /// Use only the first N requests of a trace, and generate N requests of a workload
    #[arg(long, value_name = "N", default_value_t = 2000)]
    requests: usize,
    /// Run at these parts of the capacity
    #[arg(long, value_name = "F", value_delimiter = ',', default_value = "0.5,0.8,0.95,1.05,1.3")]
    loads: Vec<f64>,
    /// Run this policy, named as for `bench replay`; may be given several times (the configured dispatch policy)
    #[arg(long = "policy", value_name = "POLICY|SLOT=POLICY,...")]
    policies: Vec<PolicySet>,
    /// Use these seeds; 1 replays a trace as it is, others shuffle its requests
    #[arg(long, value_name = "SEED", value_delimiter = ',', default_value = "1,2,3")]
    seeds: Vec<u64>,
    /// Read the targets and KV settings from this meridian.toml
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    slo: SloArgs,
    #[command(flatten)]
    keep: KeepArgs,
}

/// The output of `--json`: the cells, and the verdicts on them.
#[derive(Serialize)]
struct Found<'a> {
    #[serde(flatten)]
    grid: &'a Grid,
    verdicts: Vec<PolicyVerdict<'a>>,
}

#[derive(Serialize)]
struct PolicyVerdict<'a> {
    policy: &'a str,
    against: &'static str,
    broken: Vec<Broken>,
    gains: Vec<Gain>,
}

pub(crate) fn run(args: &GridArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let axes = axes(args).map_err(unusable)?;
    let options = options(args).map_err(unusable)?;
    let pairs = axes.engines.len() * axes.traffic.len();
    let progress = bar((pairs * (1 + axes.loads.len())) as u64, "{pos} of {len}");
    let grid = Grid::run(&axes, &options, &|done, _| progress.set_position(done as u64));
    progress.finish_and_clear();
    let made_by = MadeBy { version: env!("CARGO_PKG_VERSION").into(), command: options.command, machine: machine() };
    let grid = Grid { made_by, requests: args.requests, ..grid? };
    args.keep.write(&grid, || heat_map(&grid))?;
    if !json {
        print_line(table(&grid).trim_end())?;
        return Ok(());
    }
    let verdict = |policy, against| {
        let (broken, gains) = (broken(&grid, policy, against), gains(&grid, policy, against));
        PolicyVerdict { policy, against, broken, gains }
    };
    let verdicts =
        grid.policies().into_iter().flat_map(|policy| [STOCK, TUNED].map(|against| verdict(policy, against)));
    print_json(&Found { grid: &grid, verdicts: verdicts.collect() })
}

fn axes(args: &GridArgs) -> anyhow::Result<Axes> {
    for load in &args.loads {
        anyhow::ensure!((0.01..=100.0).contains(load), "--loads {load}: expected parts of the capacity, 0.01 to 100");
    }
    let engines: Vec<(String, EngineConfig)> =
        args.engines.iter().map(|name| engine_named(name)).collect::<anyhow::Result<_>>()?;
    let mut traffic = Vec::<(String, Input)>::new();
    let mut add = |name: &str, (input, notes): (Input, Vec<String>)| {
        notes.iter().for_each(|note| say(&format!("note: {note}")));
        traffic.push((name.to_owned(), input));
    };
    for trace in &args.traces {
        let input = InputArgs::trace(trace, args.requests)?.read()?;
        let name = match &input.0 {
            Input::Trace { name, .. } | Input::Sessions { name, .. } | Input::Generated { name, .. } => name.clone(),
        };
        add(&name, input);
    }
    for workload in &args.workloads {
        let (name, workload, requests) =
            WorkloadArgs { workload: Some(workload.clone()), requests: Some(args.requests) }.read()?;
        let input = Input::Generated { name: name.clone(), workload: Box::new(workload), requests };
        add(&name, (input, Vec::new()));
    }
    anyhow::ensure!(!traffic.is_empty(), "expected at least one --trace or --workload");
    Ok(Axes { engines, traffic, loads: args.loads.clone() })
}

fn options(args: &GridArgs) -> anyhow::Result<Options> {
    let config = configured(args.config.as_deref())?;
    let mut policies = args.policies.clone();
    if policies.is_empty() {
        policies.push(config.policy.dispatch.source.parse().map_err(anyhow::Error::msg)?);
    }
    let runs = policies.len().saturating_add(2).saturating_mul(args.seeds.len()).saturating_mul(args.loads.len());
    within("runs of an engine and its traffic (policies times loads times seeds):", runs, &RUNS)?;
    Ok(Options { policies, ..Options::stock(args.slo.read()?, args.seeds.clone(), config, super::command()) })
}
