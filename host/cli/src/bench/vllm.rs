mod sent;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use indicatif::ProgressBar;
use meridian_bench::limits::{BATCHED_TOKENS, RUNS, within};
use meridian_bench::policies::PolicySet;
use meridian_bench::report::{html, table};
use meridian_bench::results::{Results, Slo};
use meridian_bench::vllm::{
    Comparison, Contestant, Dtype, Progress, Python, STOCK, Setting, file_name, meridian_config,
};
use serde_json::json;

use self::sent::{Sent, sent};
use super::reading::ReadArgs;
use crate::progress::bar;
use crate::{Said, Unusable, print_json, print_line, say};

/// Seeds that an engine takes.
const SEEDS: std::ops::RangeInclusive<u64> = 0..=u32::MAX as u64;

#[derive(Args)]
#[command(after_help = "\
Each engine runs in its own process, one after the other. Name policies as for `bench replay`.
`stock` is vLLM's own scheduler; it comes first unless you name it. `stock:512` is the same with
--max-num-batched-tokens 512. MERIDIAN_PYTHON names a Python with Meridian and vLLM.

Exit code: 0 done, 1 a run failed or a policy faulted, 2 bad input.

Examples:
  meridian bench vllm --scenario loaded,kv-tight --policy stock:512 --policy balanced --policy mine.wasm
  meridian bench vllm --scenario multi-turn --kv-blocks 600,900 --seeds 1,2,3
  meridian bench vllm --trace requests.csv --max-model-len 4000 --policy pascal --html report.html
  meridian bench vllm --scenario early-exit --help")]
pub(crate) struct VllmArgs {
    /// Run these scenarios: loaded, kv-tight, multi-turn (multi-turn). early-exit runs alone and has its own options
    #[arg(long = "scenario", value_name = "NAME", value_delimiter = ',', conflicts_with = "trace")]
    scenarios: Vec<String>,
    /// Send recorded requests instead, from a file in any format that `bench replay` reads
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    reading: ReadArgs,
    /// Send only the first N requests of the trace, or N requests of an open scenario
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Send this many requests a second, instead of the rate of an open scenario
    #[arg(long, value_name = "R", conflicts_with = "trace")]
    rate: Option<f64>,
    /// Multiply every length of the trace by this factor
    #[arg(long, value_name = "F", default_value_t = 1.0, requires = "trace")]
    scale_tokens: f64,
    /// Multiply every arrival time of the trace by this factor
    #[arg(long, value_name = "F", default_value_t = 1.0, requires = "trace")]
    scale_time: f64,
    /// Send all requests of the trace at the start
    #[arg(long, requires = "trace")]
    at_once: bool,
    /// Compare this policy with stock vLLM; may be given several times (balanced)
    #[arg(long = "policy", value_name = "POLICY|SLOT=POLICY,...|stock[:TOKENS]")]
    policies: Vec<Named>,
    /// Leave out stock vLLM, and compare the other policies with the first one
    #[arg(long, requires = "policies")]
    without_stock: bool,
    /// Set a field of Meridian's configuration; may be given several times
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", value_parser = setting)]
    settings: Vec<Setting>,
    /// Set the seeds of a scenario's requests and of the prompt tokens
    #[arg(long, value_name = "SEED", value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,
    /// Give the engine this many KV blocks, instead of the scenario's number; one comparison for each value
    #[arg(long, value_name = "N", value_delimiter = ',')]
    kv_blocks: Vec<u32>,
    /// Run at most this many requests at once, instead of the scenario's limit
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<u32>,
    /// Limit a step to this many tokens, instead of the scenario's limit
    #[arg(long, value_name = "N")]
    max_num_batched_tokens: Option<u32>,
    /// Limit a request to this many tokens, instead of the scenario's limit
    #[arg(long, value_name = "N")]
    max_model_len: Option<u32>,
    /// multi-turn: number of conversations
    #[arg(long, value_name = "N")]
    sessions: Option<usize>,
    /// multi-turn: number of turns in each conversation
    #[arg(long, value_name = "N")]
    turns: Option<usize>,
    /// multi-turn: additional tokens in the first turn
    #[arg(long, value_name = "N")]
    context_tokens: Option<u32>,
    /// multi-turn: seconds from an answer to the next turn
    #[arg(long, value_name = "S")]
    gap_s: Option<f64>,
    /// multi-turn: keep the thinking of earlier turns in the prompt
    #[arg(long)]
    preserve_thinking: bool,
    /// Generate random tokens without the model; measures hit rates and preemptions much faster, but no latencies
    #[arg(long)]
    no_model: bool,
    /// Load the model in this folder; by default, a small model with random weights
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Compute in bfloat16 (the default where the processor supports it) or in float32, which also compares outputs
    #[arg(long, value_name = "TYPE", default_value_t)]
    dtype: Dtype,
    /// Compare outputs in bfloat16 too; there, outputs are equal only if every batch was equal
    #[arg(long)]
    compare_outputs: bool,
    /// Keep the results and every run's job, rows and log in this folder
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Keep the results as JSON, for `bench compare` and `bench report`; for several comparisons, name a folder
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Print every metric, not the ten that matter most
    #[arg(long)]
    all: bool,
    /// Draw the results of one comparison as one HTML file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// A column, as the command line names it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Named {
    /// With so many tokens a step, where they are named.
    Stock(Option<u32>),
    Policies(Box<PolicySet>),
}

impl std::str::FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == STOCK {
            return Ok(Self::Stock(None));
        }
        let Some(tokens) = text.strip_prefix("stock:") else { return Ok(Self::Policies(Box::new(text.parse()?))) };
        let known = tokens.parse().ok().filter(|tokens| BATCHED_TOKENS.contains(tokens));
        let (least, most) = (BATCHED_TOKENS.start(), BATCHED_TOKENS.end());
        known.map(|tokens| Self::Stock(Some(tokens))).ok_or(format!("{text}: expected {least} to {most} tokens a step"))
    }
}

/// Where runs are carried out, and of which model.
struct Place {
    python: Python,
    model: String,
    out: PathBuf,
}

/// What the command line asks for, checked.
struct Job {
    contestants: Vec<Contestant>,
    all: Vec<Sent>,
    /// Engines to start, one after the other.
    runs: usize,
}

impl Job {
    fn new(args: &VllmArgs) -> anyhow::Result<Self> {
        let contestants = contestants(args)?;
        args.seeds.iter().try_for_each(|seed| within("--seeds", *seed, &SEEDS).map(|_| ()))?;
        let sizes = args.kv_blocks.len().max(1).saturating_mul(args.scenarios.len().max(1));
        let runs = sizes.saturating_mul(args.seeds.len()).saturating_mul(contestants.len());
        within("runs (scenarios times KV sizes times seeds times policies):", runs, &RUNS)?;
        let all = sent(args)?;
        anyhow::ensure!(all.len() == 1 || args.html.is_none(), "--html: {} comparisons, expected one", all.len());
        for sent in &all {
            for contestant in contestants.iter().filter(|contestant| contestant.scheduler != STOCK) {
                let settings: Vec<Setting> =
                    [&sent.settings, &contestant.settings, &args.settings].into_iter().flatten().cloned().collect();
                meridian_config(&settings)?;
            }
        }
        if let (Some(folder), true) = (&args.save, all.len() > 1) {
            std::fs::create_dir_all(folder).with_context(|| format!("--save {}", folder.display()))?;
        }
        Ok(Self { contestants, all, runs })
    }
}

pub(crate) fn run(args: &VllmArgs, json: bool) -> anyhow::Result<()> {
    let asked = Job::new(args).map_err(|error| error.context(Unusable))?;
    let python = Python::default();
    let model = match &args.model {
        Some(model) => super::model_folder(model).context(Unusable)?,
        None => python.small_model().map_err(|error| {
            let is_input = error.is_input();
            let error = anyhow::Error::from(error);
            if is_input { error.context(Unusable) } else { error }
        })?,
    };
    let scratch = match &args.out {
        None => Some(tempfile::Builder::new().prefix("meridian-bench-vllm-").tempdir().context("a folder of its own")?),
        Some(_) => None,
    };
    let out = scratch.as_ref().map_or_else(|| args.out.clone().unwrap_or_default(), |folder| folder.path().to_owned());
    std::fs::create_dir_all(&out).with_context(|| format!("--out {}", out.display())).context(Unusable)?;
    let bar = bar(asked.runs as u64, "{msg}");
    let found = compared(args, json, asked, &Place { python, model, out }, &bar);
    bar.finish_and_clear();
    let found = found.inspect_err(|_| {
        // What it said stays.
        scratch.map(tempfile::TempDir::keep);
    })?;
    if let (Some(path), [results]) = (&args.html, &found[..]) {
        std::fs::write(path, html(results)).with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    if json {
        print_json(&json!({ "comparisons": found }))?;
    }
    if let Some(out) = &args.out {
        say(&format!("Every run's job, rows and log: {}", out.display()));
    }
    let faulted =
        |results: &Results| results.runs.iter().any(|run| run.metrics.get("faults").is_some_and(|n| *n > 0.0));
    if found.iter().any(faulted) {
        say("error: a policy faulted, see the notes");
        return Err(Said.into());
    }
    Ok(())
}

/// Run every comparison, print its table and keep its results.
fn compared(args: &VllmArgs, json: bool, asked: Job, place: &Place, bar: &ProgressBar) -> anyhow::Result<Vec<Results>> {
    let Job { contestants, all, .. } = asked;
    let several = all.len() > 1;
    let mut found = Vec::with_capacity(all.len());
    for Sent { source, about, rounds, engine, settings, chats } in all {
        let comparison = Comparison {
            source,
            rounds,
            contestants: contestants.clone(),
            model: place.model.clone(),
            engine,
            settings,
            given: args.settings.clone(),
            dtype: args.dtype,
            realtime: !args.at_once,
            preserves_thinking: chats.is_some_and(|chats| chats.preserves_thinking),
            gap_s: chats.map_or(0.0, |chats| chats.gap_s),
            no_model: args.no_model,
            keeps_outputs: (args.compare_outputs || args.dtype == Dtype::Float32) && !args.no_model,
            slo: Slo::default(),
            out: place.out.clone(),
            command: super::command(),
        };
        let results = comparison.run(&place.python, &mut |progress| match progress {
            Progress::Begins(what) if bar.is_hidden() => say(&format!("{what} ...")),
            Progress::Begins(what) => bar.set_message(what.to_owned()),
            Progress::Ended(line) => {
                bar.inc(1);
                bar.suspend(|| say(line));
            }
        })?;
        let named = format!("{}.results.json", file_name(&results.trace.source));
        if args.out.is_some() {
            write(&place.out.join(&named), &results)?;
        }
        if let Some(path) = &args.save {
            write(&if several { path.join(&named) } else { path.clone() }, &results)?;
        }
        if !json {
            bar.suspend(|| {
                print_line(&heading(&about, &results))?;
                print_line(&format!("\n{}\n", table(&results, args.all).trim_end()))
            })?;
        }
        found.push(results);
    }
    Ok(found)
}

fn write(path: &Path, results: &Results) -> anyhow::Result<()> {
    let text = serde_json::to_string(results)?;
    std::fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display()))
}

fn heading(about: &str, results: &Results) -> String {
    let Results { trace, engine, made_by, .. } = results;
    format!(
        "\n{}: {about} ({} requests)\n{}, on {}; {} KV blocks of {} tokens, at most {} running and {} tokens a step",
        trace.source,
        trace.requests,
        engine.preset,
        made_by.machine,
        engine.kv_blocks,
        engine.block_tokens,
        engine.max_num_seqs,
        engine.max_num_batched_tokens
    )
}

fn contestants(args: &VllmArgs) -> anyhow::Result<Vec<Contestant>> {
    let mut named = args.policies.clone();
    if named.is_empty() {
        named.push("balanced".parse().map_err(anyhow::Error::msg)?);
    }
    if !named.contains(&Named::Stock(None)) && !args.without_stock {
        named.insert(0, Named::Stock(None));
    }
    let mut out = Vec::<Contestant>::new();
    for of in named {
        let mut made = match of {
            Named::Stock(tokens) => Contestant::stock(tokens),
            Named::Policies(policies) => Contestant::meridian(&policies, "native:balanced")?,
        };
        // Results are told apart by the label.
        let same = (1..).map(|n| if n == 1 { made.label.clone() } else { format!("{} #{n}", made.label) });
        made.label = same.into_iter().find(|label| out.iter().all(|other| other.label != *label)).unwrap_or_default();
        out.push(made);
    }
    Ok(out)
}

fn setting(text: &str) -> Result<Setting, String> {
    match text.split_once('=') {
        Some((field, value)) if field.contains('.') => Ok((field.to_owned(), value.to_owned())),
        _ => Err(format!("{text}: expected SECTION.KEY=VALUE")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_names_its_section() {
        assert_eq!(setting("a.b=c=d"), Ok(("a.b".into(), "c=d".into())));
        assert!(setting("b=1").is_err() && setting("a.b").is_err());
    }
}
