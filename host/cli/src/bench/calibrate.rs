use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use meridian_bench::calibrate::{EngineFile, Errors, check, fit};
use meridian_bench::sim::StepModel;
use meridian_bench::vllm::RecordedRun;

use crate::{Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
First record runs in the real engine:
  meridian bench vllm --trace requests.csv --policy output-first --out runs

Errors are mean absolute percentage errors over requests. The errors of a run that the model was
fitted to prove little.

Example:
  meridian bench calibrate fit-1.json fit-2.json --test other.json --out engine.toml")]
pub(crate) struct CalibrateArgs {
    /// Fit the step-time model to these runs
    #[arg(value_name = "RUN.json", required = true)]
    runs: Vec<PathBuf>,
    /// Check the model on this run; may be given several times
    #[arg(long = "test", value_name = "RUN.json")]
    tests: Vec<PathBuf>,
    /// Write the engine to this file, for `bench replay --engine`
    #[arg(long, value_name = "FILE.toml")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &CalibrateArgs, json: bool) -> anyhow::Result<()> {
    let read = |paths: &[PathBuf]| -> anyhow::Result<Vec<RecordedRun>> {
        paths.iter().map(|path| RecordedRun::read(path).map_err(|error| error.context(Unusable))).collect()
    };
    let (fitted, tests) = (read(&args.runs)?, read(&args.tests)?);
    let model = fit(&fitted).map_err(|error| error.context(Unusable))?;
    let engine = fitted[0].engine(model);
    let mut errors = Vec::new();
    for (runs, is_fitted) in [(&fitted, true), (&tests, false)] {
        for run in runs {
            say(&format!("simulating {}", run.name));
            errors.push(check(run, model, is_fitted)?);
        }
    }
    if let Some(path) = &args.out {
        let text = toml_of(&EngineFile::of(&engine))?;
        std::fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    if json {
        return print_json(&serde_json::json!({ "engine": EngineFile::of(&engine), "errors": errors }));
    }
    for (name, value) in StepModel::NAMES.iter().zip(model.values()) {
        print_line(&format!("{name:14} {value:>12.6} ms"))?;
    }
    print_line(&format!(
        "\n{:24} {:20} {:>8} {:>8} {:>8} {:>8} {:>8}  mean absolute error in %",
        "run", "scheduler", "requests", "e2e", "TTFT", "TTFO", "ITL"
    ))?;
    for Errors { run, scheduler, is_fitted, requests, e2e, ttft, ttfo, itl, e2e_bias, .. } in &errors {
        let kind = if *is_fitted { "fitted to" } else { "not fitted to" };
        let scheduler = scheduler.rsplit('/').next().unwrap_or_default();
        print_line(&format!(
            "{run:24} {scheduler:20} {requests:>8} {e2e:>8.2} {ttft:>8.2} {ttfo:>8.2} {itl:>8.2}  {kind}, {e2e_bias:+.2} end to end as a whole"
        ))?;
    }
    if tests.is_empty() {
        print_line("No --test run was given: how far the model is off on others is not known.")?;
    }
    Ok(())
}

fn toml_of(file: &EngineFile) -> anyhow::Result<String> {
    Ok(format!(
        "# Written by `meridian bench calibrate`; times in milliseconds.\n{}",
        toml::to_string(file).context("an engine is a table of numbers")?
    ))
}
