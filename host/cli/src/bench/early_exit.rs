use std::ffi::OsString;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, ensure};
use clap::Parser;
use meridian_bench::exit::{
    BUDGET_TOKENS, BUDGETS, ExitComponent, ExitDocument, Experiment, PROBLEMS, SAMPLES, SCENARIO, SEEDS, TEMPERATURES,
    claims, markdown, notes, svg, table,
};
use meridian_bench::limits::within;
use meridian_bench::vllm::{Dtype, Python, RunError};

use crate::{Unusable, print_json, print_line, say};

/// Size of a measurement, or of a trial.
struct Size {
    problems: usize,
    tune: usize,
    budgets: &'static [u32],
}

/// The last result of the bundled model's first pass comes after 11 to 59 tokens, so that the curve is flat from 60 on.
const FULL: Size = Size { problems: 2000, tune: 800, budgets: &[16, 28, 36, 44, 52, 56, 60, 72] };
const QUICK: Size = Size { problems: 48, tune: 48, budgets: &[16, 40, 64] };

#[derive(Parser)]
#[command(
    name = SCENARIO,
    bin_name = "meridian bench vllm --scenario early-exit",
    no_binary_name = true,
    about = "Measure accuracy against think tokens in the real engine: fixed budgets, EAT, RPDI, patience, DEER and CoDE-Stop",
    after_help = "\
Each engine runs in its own process, one after the other. MERIDIAN_PYTHON names a Python with
Meridian and vLLM. The scenario chooses thresholds on one split of the problems and reports on
another.

Exit code: 0 measured (whether or not the claims hold), 1 a run failed, 2 bad input.

Example:
  meridian bench vllm --scenario early-exit --out runs"
)]
pub(crate) struct EarlyExitArgs {
    /// Report on this many problems (2,000)
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = |text: &str| whole(text, &PROBLEMS)
    )]
    problems: Option<usize>,
    /// Choose thresholds on this many problems (800)
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        value_parser = |text: &str| whole(text, &PROBLEMS)
    )]
    tune: Option<usize>,
    /// Sample each problem this many times
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        allow_negative_numbers = true,
        value_parser = |text: &str| whole(text, &SAMPLES)
    )]
    repeats: usize,
    /// Set the think tokens of the fixed budgets (16,28,36,44,52,56,60,72)
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        allow_negative_numbers = true,
        value_parser = |text: &str| whole(text, &BUDGET_TOKENS)
    )]
    budgets: Vec<u32>,
    /// Let this component decide as well, with DEER's setting: a label of letters and digits, and a file
    #[arg(long, value_name = "LABEL=FILE", value_parser = component)]
    component: Vec<ExitComponent>,
    /// Set the sampling temperature
    #[arg(
        long,
        value_name = "T",
        default_value = "0.6",
        allow_negative_numbers = true,
        value_parser = temperature
    )]
    temperature: f64,
    /// Run a trial instead of a measurement: 48 problems, three budgets
    #[arg(long)]
    quick: bool,
    /// Load the model in this folder; by default, the bundled reasoner of the repository
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Compute in bfloat16 or in float32
    #[arg(long, value_name = "TYPE", default_value = "float32")]
    dtype: Dtype,
    /// Set the seed of the problems, the sampling and the intervals
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        allow_negative_numbers = true,
        value_parser = |text: &str| whole(text, &SEEDS)
    )]
    seed: u64,
    /// Write early-exit.json, early-exit.md, early-exit.svg, every run and its log to this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Do not write early-exit.svg
    #[arg(long)]
    no_plot: bool,
    /// Print one JSON object on stdout instead of the table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of the scenario, when a command line asks for it: the others of `bench vllm` are not its own.
pub(crate) fn options(args: &[OsString]) -> Option<Vec<OsString>> {
    // `--json` may stand before the command.
    let (mut out, args): (Vec<OsString>, Vec<OsString>) = args.iter().skip(1).cloned().partition(|arg| arg == "--json");
    let [first, second, rest @ ..] = &args[..] else { return None };
    let is_named = |at: usize| rest[at] == "--scenario" && rest.get(at + 1).is_some_and(|name| name == SCENARIO);
    let is_joined = |at: usize| rest[at].to_str().and_then(|arg| arg.strip_prefix("--scenario=")) == Some(SCENARIO);
    let at = (0..rest.len()).find(|at| is_named(*at) || is_joined(*at))?;
    out.extend_from_slice(&rest[..at]);
    out.extend_from_slice(&rest[if is_joined(at) { at + 1 } else { at + 2 }..]);
    (first == "bench" && second == "vllm").then_some(out)
}

pub(crate) fn run(args: &EarlyExitArgs) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let python = Python::default();
    let refused = |error: RunError| if error.is_input() { unusable(error.into()) } else { error.into() };
    let mut experiment = experiment(args).map_err(unusable)?;
    experiment.model = match &args.model {
        Some(model) => super::model_folder(model).map_err(unusable)?,
        None => python.reasoner().map_err(refused)?,
    };
    let scratch = match &args.out {
        None => Some(tempfile::Builder::new().prefix("meridian-early-exit-").tempdir().context("a folder of its own")?),
        Some(_) => None,
    };
    experiment.out = scratch.as_ref().map_or_else(|| args.out.clone().unwrap_or_default(), |dir| dir.path().to_owned());
    let named = || format!("--out {}", experiment.out.display());
    std::fs::create_dir_all(&experiment.out).with_context(named).map_err(unusable)?;
    let document = match experiment.run(&python, &mut say) {
        Ok(document) => document,
        Err(error) => {
            // The log of a run that failed stays.
            scratch.map(tempfile::TempDir::keep);
            return Err(refused(error));
        }
    };
    if args.json {
        print_json(&document)?;
    } else {
        print_line(&format!("\n{}\n", table(&document)))?;
        claims(&document).iter().chain(&notes(&document)).try_for_each(|line| print_line(line))?;
    }
    if let Some(out) = &args.out {
        write(&document, out, args.no_plot)?;
        say(&format!("Results, raw rows and logs: {}", out.display()));
    }
    Ok(())
}

/// As the command line says; without model and folder.
fn experiment(args: &EarlyExitArgs) -> anyhow::Result<Experiment> {
    let of = if args.quick { QUICK } else { FULL };
    let problems = args.problems.unwrap_or(of.problems);
    within("--problems times --repeats:", problems.saturating_mul(args.repeats), &SAMPLES)?;
    let mut budgets = if args.budgets.is_empty() { of.budgets.to_vec() } else { args.budgets.clone() };
    within("--budgets: their number", budgets.len(), &BUDGETS)?;
    budgets.sort_unstable();
    let given = || args.budgets.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    ensure!(budgets.windows(2).all(|pair| pair[0] < pair[1]), "--budgets {}: expected different budgets", given());
    if let Some(out) = &args.out {
        ensure!(!out.exists() || out.is_dir(), "--out {}: is no folder, expected one", out.display());
    }
    Ok(Experiment {
        model: String::new(),
        out: PathBuf::new(),
        problems,
        tune: args.tune.unwrap_or(of.tune),
        repeats: args.repeats,
        budgets,
        components: args.component.clone(),
        temperature: args.temperature,
        dtype: args.dtype,
        seed: args.seed,
    })
}

fn write(document: &ExitDocument, folder: &Path, without_plot: bool) -> anyhow::Result<()> {
    let put = |suffix: &str, text: String| {
        let path = folder.join(format!("{SCENARIO}.{suffix}"));
        std::fs::write(&path, text).with_context(|| format!("{}: cannot be written", path.display()))
    };
    put("json", format!("{}\n", serde_json::to_string_pretty(document)?))?;
    put("md", markdown(document))?;
    if without_plot { Ok(()) } else { put("svg", svg(document)?) }
}

fn whole<T: FromStr + PartialOrd + Display>(text: &str, limits: &RangeInclusive<T>) -> Result<T, String> {
    let found = text.trim().parse().ok().filter(|value| limits.contains(value));
    found.ok_or_else(|| format!("expected a whole number, {} to {}", limits.start(), limits.end()))
}

fn component(text: &str) -> Result<ExitComponent, String> {
    let expected =
        || "expected LABEL=FILE, a label of 1 to 32 letters and digits and a component that is there".to_owned();
    let (label, file) = text.split_once('=').ok_or_else(expected)?;
    let is_label = (1..=32).contains(&label.len()) && label.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let file = std::fs::canonicalize(file).ok().filter(|file| is_label && file.is_file()).ok_or_else(expected)?;
    Ok(ExitComponent { label: label.to_owned(), file })
}

fn temperature(text: &str) -> Result<f64, String> {
    // NaN is in no range.
    let found = text.trim().parse().ok().filter(|value| TEMPERATURES.contains(value));
    found.ok_or_else(|| format!("expected a number, {} to {}", TEMPERATURES.start(), TEMPERATURES.end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> anyhow::Result<Experiment> {
        experiment(&EarlyExitArgs::try_parse_from(args)?)
    }

    #[test]
    fn the_scenario_is_known_however_it_is_named() {
        let of = |args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(Into::into).collect();
            options(&args).map(|rest| rest.into_iter().map(|arg| arg.into_string().expect("UTF-8")).collect::<Vec<_>>())
        };
        let named = ["meridian", "--json", "bench", "vllm", "--quick", "--scenario", "early-exit", "--seed", "3"];
        assert_eq!(of(&named), Some(["--json", "--quick", "--seed", "3"].map(str::to_owned).to_vec()));
        assert_eq!(of(&["meridian", "bench", "vllm", "--scenario=early-exit"]), Some(Vec::new()));
        for other in
            [&["bench", "vllm", "--scenario", "loaded"][..], &["bench", "replay", "early-exit"], &["bench"], &[]]
        {
            assert_eq!(of(&[&["meridian"], other].concat()), None, "{other:?}");
        }
        assert_eq!(of(&["meridian", "bench", "vllm", "early-exit"]), None);
        assert_eq!(of(&["meridian", "bench", "vllm", "--scenario", "early-exit,loaded"]), None);
    }

    #[test]
    fn quick_is_small_and_what_is_given_counts() {
        let quick = parsed(&["--quick", "--problems", "70"]).expect("options");
        assert_eq!((quick.problems, quick.tune, quick.budgets.as_slice()), (70, 48, &[16, 40, 64][..]));
        assert_eq!(quick.components, []);
        assert_eq!(parsed(&["--budgets", "40, 20"]).expect("options").budgets, [20, 40]);
        let full = parsed(&[]).expect("options");
        assert_eq!((full.problems, full.tune, full.repeats, full.temperature), (2000, 800, 1, 0.6));
        assert_eq!((full.dtype, full.seed), (Dtype::Float32, 1));
    }

    #[test]
    fn a_component_has_a_label_and_a_file() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let found = component(&format!("C={file}")).expect("a label and a file");
        assert_eq!((found.label.as_str(), found.file.is_absolute()), ("C", true));
        for text in [file.to_owned(), format!("={file}"), format!("a/b={file}"), "C=nowhere.wasm".to_owned()] {
            assert!(component(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for text in ["nan", "-0.1", "2.1", "inf", ""] {
            assert!(temperature(text).is_err(), "{text}");
        }
        for text in ["0", "-1", "1.5", "x", "100001"] {
            assert_eq!(whole(text, &PROBLEMS), Err("expected a whole number, 1 to 100000".to_owned()), "{text}");
        }
        assert!(parsed(&["--problems", "100000", "--repeats", "11"]).is_err());
    }
}
