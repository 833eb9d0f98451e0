use std::path::PathBuf;

use clap::Args;
use meridian_bench::grid::{Axes, Broken, Cell, Gain, Grid, Kept, OPPONENTS, broken, gains, table};
use meridian_bench::limits::{RUNS, within};
use meridian_bench::policies::PolicySet;
use meridian_bench::replay::{Input, Options, machine};
use meridian_bench::report::heat_map;
use meridian_bench::results::MadeBy;
use meridian_bench::sim::EngineConfig;
use serde::Serialize;

use super::input::{
    InputArgs, KeepArgs, Part, PromiseArgs, SessionArgs, SloArgs, WorkloadArgs, configured, engine_named,
};
use crate::progress::bar;
use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
For each engine and traffic, the command first finds the capacity: the highest steady rate at which nine of ten requests
attain the service levels under stock vLLM as it starts. A steady run is at least 20 times as long as a request lives; a
capacity that moves by 2 % when runs are twice as long is marked and enters no median. The policies then run at parts of the
capacity, and through days of 0.6, 1.6 and 0.6 of it, against stock vLLM as it starts, with its best single set of flags,
with the best flags for each load, and against two schedulers that know every length. Sessions in closed loop run as many
at a time as leave stock vLLM half the prefix hits of an unlimited cache.

Rows are kept beside --save while the command runs; if it is interrupted, the same command goes on where it was.

Exit code: 0 done, whether or not floors hold; 1 a run failed; 2 bad input.

Examples:
  meridian bench grid --trace requests.csv --engine 7b-h100,8b-a100 --loads 0.8,0.95 --html grid.html
  meridian bench grid --trace chat.jsonl:bimodal --workload multi-turn --policy mine.wasm --save grid.json")]
pub(crate) struct GridArgs {
    /// Simulate these engines: presets (see `meridian bench engines`), or TOML files that `bench calibrate` wrote
    #[arg(long = "engine", value_name = "PRESET|FILE.toml", value_delimiter = ',', default_value = "7b-h100")]
    engines: Vec<String>,
    /// Read recorded requests or sessions; `:bimodal` splits generated tokens into thinking and answer; may be given several
    /// times
    #[arg(long = "trace", value_name = "FILE[:bimodal]")]
    traces: Vec<String>,
    /// Generate requests from these workloads: names, or TOML files of parameters
    #[arg(long = "workload", value_name = "NAME|FILE.toml", value_delimiter = ',')]
    workloads: Vec<String>,
    /// Run at these parts of the capacity
    #[arg(long, value_name = "F", value_delimiter = ',', default_value = "0.5,0.8,0.95")]
    loads: Vec<f64>,
    /// Run days with a burst of so many minutes
    #[arg(long = "bursts", value_name = "MINUTES", value_delimiter = ',', default_value = "5,15")]
    bursts: Vec<f64>,
    /// Run this policy, named as for `bench replay`; may be given several times (the configured dispatch policy)
    #[arg(long = "policy", value_name = "POLICY|SLOT=POLICY,...")]
    policies: Vec<PolicySet>,
    /// Use this seed; 1 replays a trace as it is, others shuffle its requests
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
    /// Read the targets and KV settings from this meridian.toml
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    slo: SloArgs,
    #[command(flatten)]
    promise: PromiseArgs,
    #[command(flatten)]
    sessions: GridSessionArgs,
    #[command(flatten)]
    keep: KeepArgs,
}

/// How traces of sessions are replayed.
#[derive(Args)]
pub(crate) struct GridSessionArgs {
    /// Use every Nth session, from the Kth on
    #[arg(long, value_name = "K/N", default_value = "1/1", requires = "traces")]
    part: Part,
    /// Divide the tokens of sessions by this, for a smaller engine; it must divide the trace's block size
    #[arg(long, value_name = "N", default_value_t = 1)]
    shrink: u32,
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
    /// Over the hard cells: loads from 0.95 of the capacity on, days and sessions.
    medians: Vec<Gain>,
}

pub(crate) fn run(args: &GridArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let axes = axes(args).map_err(unusable)?;
    let options = options(args).map_err(unusable)?;
    let rows = axes.engines.len() * axes.traffic.len();
    let path = args.keep.save.as_ref().map(|path| {
        let mut name = path.clone().into_os_string();
        name.push(".rows");
        PathBuf::from(name)
    });
    let kept = path.as_deref().map_or_else(|| Ok(Kept::default()), Kept::read).map_err(unusable)?;
    if !kept.is_empty() {
        say(&format!("{} rows were kept by a run that was interrupted", kept.len()));
    }
    let progress = bar((rows * axes.parts()) as u64, "{pos} of {len}, {eta} left: {msg}");
    let grid = Grid::run(&axes, &options, &kept, &|done, _, row| {
        progress.set_position(done as u64);
        progress.set_message(row.to_owned());
    });
    progress.finish_and_clear();
    let made_by = MadeBy { version: env!("CARGO_PKG_VERSION").into(), command: options.command, machine: machine() };
    let grid = Grid { made_by, ..grid? };
    args.keep.write(&grid, || heat_map(&grid))?;
    if let Some(path) = path {
        // Whoever cannot remove it runs nothing twice.
        let _ = std::fs::remove_file(path);
    }
    if !json {
        print_line(table(&grid).trim_end())?;
        return Ok(());
    }
    let verdict = |policy, against| {
        let (broken, medians) = (broken(&grid, policy, against), gains(&grid, policy, against, Cell::is_hard));
        PolicyVerdict { policy, against, broken, medians }
    };
    let verdicts = grid.policies().into_iter().flat_map(|policy| OPPONENTS.map(|against| verdict(policy, against)));
    print_json(&Found { grid: &grid, verdicts: verdicts.collect() })
}

fn axes(args: &GridArgs) -> anyhow::Result<Axes> {
    for load in &args.loads {
        anyhow::ensure!((0.01..=1.0).contains(load), "--loads {load}: expected parts of the capacity, 0.01 to 1");
    }
    for minutes in &args.bursts {
        anyhow::ensure!((0.1..=600.0).contains(minutes), "--bursts {minutes}: expected minutes, 0.1 to 600");
    }
    let engines: Vec<(String, EngineConfig)> =
        args.engines.iter().map(|name| engine_named(name)).collect::<anyhow::Result<_>>()?;
    let mut traffic = Vec::<(String, Input)>::new();
    let mut add = |name: &str, (input, notes): (Input, Vec<String>)| {
        notes.iter().for_each(|note| say(&format!("note: {note}")));
        traffic.push((name.to_owned(), input));
    };
    for trace in &args.traces {
        let input =
            InputArgs::trace(trace)?.read_with(Some(&SessionArgs::chosen(args.sessions.part, args.sessions.shrink)))?;
        let name = match &input.0 {
            Input::Trace { name, .. } | Input::Sessions { name, .. } | Input::Generated { name, .. } => name.clone(),
        };
        add(&name, input);
    }
    for workload in &args.workloads {
        let (name, workload, requests) = WorkloadArgs { workload: Some(workload.clone()), requests: None }.read()?;
        let input = Input::Generated { name: name.clone(), workload: Box::new(workload), requests };
        add(&name, (input, Vec::new()));
    }
    anyhow::ensure!(!traffic.is_empty(), "expected at least one --trace or --workload");
    Ok(Axes { engines, traffic, loads: args.loads.clone(), bursts: args.bursts.clone() })
}

fn options(args: &GridArgs) -> anyhow::Result<Options> {
    let mut config = configured(args.config.as_deref())?;
    let slo = args.slo.read()?;
    args.promise.add(&mut config, &slo)?;
    let mut policies = args.policies.clone();
    if policies.is_empty() {
        policies.push(config.policy.dispatch.source.parse().map_err(anyhow::Error::msg)?);
    }
    within("--policy: their number", policies.len(), &RUNS)?;
    Ok(Options { policies, ..Options::stock(slo, vec![args.seed], config, super::command()) })
}
