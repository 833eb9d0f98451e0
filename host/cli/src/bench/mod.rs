mod calibrate;
mod compare;
mod generate;
mod input;
mod micro;
mod replay;
mod report;
mod vllm;

use clap::Subcommand;

#[derive(Subcommand)]
pub(crate) enum BenchCommand {
    /// Compare stock vLLM's scheduler with Meridian's in the real engine; needs the Python package and vLLM
    Vllm(vllm::VllmArgs),
    /// Time one decision of each slot: a policy against the native default, as ratios from one run
    Micro(micro::MicroArgs),
    /// Replay requests in simulated engines under several policies, side by side
    Replay(Box<replay::ReplayArgs>),
    /// Fit the simulated engine to recorded runs of a real one
    Calibrate(calibrate::CalibrateArgs),
    /// Write a generated workload as a trace
    Generate(generate::GenerateArgs),
    /// Compare two results over the same trace, and tell which metrics became better or worse
    Compare(compare::CompareArgs),
    /// Draw results as one HTML file
    Report(report::ReportArgs),
}

pub(crate) fn run(command: BenchCommand, json: bool) -> anyhow::Result<()> {
    match command {
        BenchCommand::Vllm(args) => vllm::run(&args, json),
        BenchCommand::Micro(args) => micro::run(&args, json),
        BenchCommand::Replay(args) => replay::run(&args, json),
        BenchCommand::Calibrate(args) => calibrate::run(&args, json),
        BenchCommand::Generate(args) => generate::run(&args, json),
        BenchCommand::Compare(args) => compare::run(args, json),
        BenchCommand::Report(args) => report::run(&args, json),
    }
}
