mod advise;
mod calibrate;
mod compare;
pub(crate) mod early_exit;
mod engines;
mod entropies;
mod generate;
mod grid;
mod input;
mod micro;
mod predict;
mod reading;
mod recordings;
mod replay;
mod report;
mod trace;
mod tune;
mod vllm;

use std::path::Path;

use anyhow::ensure;
use clap::Subcommand;
use meridian_bench::policies::PolicyArg;

pub(crate) use self::input::engine_named;

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare stock vLLM's scheduler with Meridian in the real engine; needs the Python package and vLLM
    Vllm(Box<vllm::VllmArgs>),
    /// Time one decision of each slot: a policy against the native default, as ratios from one run
    Micro(micro::MicroArgs),
    /// Replay requests in simulated engines under several policies, side by side
    Replay(Box<replay::ReplayArgs>),
    /// Find the flags of stock vLLM that serve a load best, in simulated engines
    Tune(tune::TuneArgs),
    /// Say which service level an engine can promise at which load, and the meridian.toml for it
    Advise(advise::AdviseArgs),
    /// List the simulated engines, and what vLLM starts with on them
    Engines(engines::EnginesArgs),
    /// Compare policies with the vLLM that people run, over engines, traffic, loads and days with a burst
    Grid(grid::GridArgs),
    /// Fit the simulated engine to recorded runs of a real engine
    Calibrate(calibrate::CalibrateArgs),
    /// Predict what another policy would change, from a recording of an engine
    Predict(predict::PredictArgs),
    /// Fit the entropies of simulated thinking to recorded thoughts
    Entropies(entropies::EntropiesArgs),
    /// Show what a trace holds, and write it in Meridian's format or in that of another tool
    Trace(trace::TraceArgs),
    /// Write a generated workload as a trace
    Generate(generate::GenerateArgs),
    /// Compare two results over the same trace, and report which metrics became better or worse
    Compare(compare::CompareArgs),
    /// Draw results as one HTML file
    Report(report::ReportArgs),
}

pub(crate) fn run(command: BenchCommand, json: bool) -> anyhow::Result<()> {
    match command {
        BenchCommand::Vllm(args) => vllm::run(&args, json),
        BenchCommand::Micro(args) => micro::run(&args, json),
        BenchCommand::Replay(args) => replay::run(&args, json),
        BenchCommand::Tune(args) => tune::run(&args, json),
        BenchCommand::Advise(args) => advise::run(&args, json),
        BenchCommand::Engines(args) => engines::run(&args, json),
        BenchCommand::Grid(args) => grid::run(&args, json),
        BenchCommand::Calibrate(args) => calibrate::run(&args, json),
        BenchCommand::Predict(args) => predict::run(&args, json),
        BenchCommand::Entropies(args) => entropies::run(&args, json),
        BenchCommand::Trace(args) => trace::run(&args, json),
        BenchCommand::Generate(args) => generate::run(&args, json),
        BenchCommand::Compare(args) => compare::run(args, json),
        BenchCommand::Report(args) => report::run(&args, json),
    }
}

/// `meridian policy bench`.
pub(crate) fn time_policy(policy: PolicyArg, candidates: Vec<usize>, json: bool) -> anyhow::Result<()> {
    micro::run(&micro::MicroArgs::of(policy, candidates), json)
}

/// The command line, its paths without their folders.
fn command() -> String {
    let short = |argument: String| {
        let (rest, options) = argument.split_at(argument.find('{').unwrap_or(argument.len()));
        let (flag, paths) = rest.split_at(rest.rfind('=').map_or(0, |at| at + 1));
        // `1/8` is none.
        let without_folder = |path: &str| match path.rsplit_once('/') {
            Some((folder, file)) if Path::new(folder).is_dir() => file.to_owned(),
            _ => path.to_owned(),
        };
        let paths: Vec<String> = paths.split(',').map(without_folder).collect();
        format!("{flag}{}{options}", paths.join(","))
    };
    let arguments = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned());
    let arguments: Vec<String> = arguments.skip_while(|argument| argument != "bench").map(short).collect();
    format!("meridian {}", arguments.join(" "))
}

/// The folder of a model, for `--model`.
fn model_folder(folder: &Path) -> anyhow::Result<String> {
    let shown = folder.display().to_string();
    ensure!(folder.join("config.json").is_file(), "--model {shown}: no config.json there, expected a model's folder");
    Ok(shown)
}
