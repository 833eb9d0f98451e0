use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use meridian_bench::exit::SCENARIO as EXIT_SCENARIO;
use meridian_bench::limits::{BATCHED_TOKENS, KV_BLOCKS, NUM_SEQS, RUNS, within};
use meridian_bench::policies::PolicySet;
use meridian_bench::report::{html, table};
use meridian_bench::results::{Results, Slo};
use meridian_bench::trace::{Format, Prefix, ReadOptions, TraceRequest, read};
use meridian_bench::vllm::{
    Chats, Comparison, Contestant, Dtype, EngineSize, JobEngine, Load, Progress, Python, SCENARIOS, STOCK, Scenario,
    Setting, file_name, meridian_config,
};
use serde_json::json;

use crate::progress::bar;
use crate::{Said, Unusable, print_json, print_line, say};

/// Turns of all chats: each is a request.
const TURNS: std::ops::RangeInclusive<usize> = 1..=10_000;
/// Tokens that a chat may open with.
const CONTEXT: std::ops::RangeInclusive<u32> = 0..=10_000_000;
/// Tokens of a request.
const MODEL_LEN: std::ops::RangeInclusive<u32> = 64..=100_000_000;
/// Seeds that an engine takes.
const SEEDS: std::ops::RangeInclusive<u64> = 0..=u32::MAX as u64;
/// Tokens of a request that a template and an end marker may take.
const RESERVED_TOKENS: u32 = 16;

#[derive(Args)]
#[command(after_help = "\
Each engine runs in a process of its own, one after the other. A policy is named as for `bench replay`; `stock` is vLLM's own
scheduler, and comes first where it is not named; `stock:512` is the same with --max-num-batched-tokens 512. MERIDIAN_PYTHON names a Python with Meridian and vLLM.

Examples:
  meridian bench vllm --scenario loaded,kv-tight --policy stock:512 --policy balanced --policy mine.wasm
  meridian bench vllm --scenario multi-turn --kv-blocks 600,900 --seeds 1,2,3
  meridian bench vllm --trace requests.csv --max-model-len 4000 --policy pascal --html report.html
  meridian bench vllm --scenario early-exit --help

Exit code: 0 done, 1 a run failed or a policy faulted, 2 bad input.")]
pub(crate) struct VllmArgs {
    /// loaded, kv-tight, multi-turn; early-exit asks another question and has options of its own
    #[arg(long = "scenario", value_name = "NAME", value_delimiter = ',', conflicts_with = "trace")]
    scenarios: Vec<String>,
    /// Recorded requests instead, in any format that `bench replay` reads
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Format of the trace, when it is not the one that its first line looks like
    #[arg(long, value_name = "FORMAT", requires = "trace")]
    format: Option<Format>,
    /// Only the first requests of the trace
    #[arg(long, value_name = "N", requires = "trace")]
    requests: Option<usize>,
    /// Multiply every length of the trace
    #[arg(long, value_name = "F", default_value_t = 1.0, requires = "trace")]
    scale_tokens: f64,
    /// Multiply every arrival time of the trace
    #[arg(long, value_name = "F", default_value_t = 1.0, requires = "trace")]
    scale_time: f64,
    /// All requests of the trace are there from the start
    #[arg(long, requires = "trace")]
    at_once: bool,
    /// Policies to compare with stock vLLM; may be given several times (balanced)
    #[arg(long = "policy", value_name = "POLICY|SLOT=POLICY,...|stock[:TOKENS]")]
    policies: Vec<Named>,
    /// Leave stock vLLM out: the first policy is what the others are compared with
    #[arg(long, requires = "policies")]
    without_stock: bool,
    /// A field of Meridian's configuration; may be given several times
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", value_parser = setting)]
    settings: Vec<Setting>,
    /// Seeds: of the requests of a scenario, and of the tokens of prompts
    #[arg(long, value_name = "SEED", value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,
    /// KV blocks of the engine, instead of the scenario's; a comparison for each
    #[arg(long, value_name = "N", value_delimiter = ',')]
    kv_blocks: Vec<u32>,
    /// Most running requests, instead of the scenario's
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<u32>,
    /// Most tokens of a step, instead of the scenario's
    #[arg(long, value_name = "N")]
    max_num_batched_tokens: Option<u32>,
    /// Most tokens of a request, instead of the scenario's
    #[arg(long, value_name = "N")]
    max_model_len: Option<u32>,
    /// multi-turn: conversations
    #[arg(long, value_name = "N")]
    sessions: Option<usize>,
    /// multi-turn: turns of each
    #[arg(long, value_name = "N")]
    turns: Option<usize>,
    /// multi-turn: tokens that the first turn has more
    #[arg(long, value_name = "N")]
    context_tokens: Option<u32>,
    /// multi-turn: seconds from an answer to the next turn
    #[arg(long, value_name = "S")]
    gap_s: Option<f64>,
    /// multi-turn: the template keeps the thinking of earlier turns
    #[arg(long)]
    preserve_thinking: bool,
    /// Random tokens in the place of the model's: hit rates and preemptions in a fraction of the time, and no latencies
    #[arg(long)]
    no_model: bool,
    /// Folder of a model; without it a small one with random weights
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// bfloat16, or float32, which compares outputs as well (bfloat16 where the processor computes in it)
    #[arg(long, value_name = "TYPE", default_value_t)]
    dtype: Dtype,
    /// Compare outputs in bfloat16 too: there they are equal only where every batch was
    #[arg(long)]
    compare_outputs: bool,
    /// Keep every run's job, rows and log here, and the results
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Keep the results as JSON, for `bench compare` and `bench report`; with several, a file each in this folder
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
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

/// What is sent, and to an engine of which size.
struct Sent {
    source: String,
    about: String,
    rounds: Vec<(u64, Arc<[TraceRequest]>)>,
    engine: JobEngine,
    settings: Vec<Setting>,
    chats: Option<Chats>,
}

pub(crate) fn run(args: &VllmArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let contestants = contestants(args).map_err(unusable)?;
    args.seeds.iter().try_for_each(|seed| within("--seeds", *seed, &SEEDS).map(|_| ())).map_err(unusable)?;
    let sizes = args.kv_blocks.len().max(1).saturating_mul(args.scenarios.len().max(1));
    let runs = sizes.saturating_mul(args.seeds.len()).saturating_mul(contestants.len());
    within("runs (scenarios times KV sizes times seeds times policies):", runs, &RUNS).map_err(unusable)?;
    let all = sent(args).map_err(unusable)?;
    if all.len() > 1 && args.html.is_some() {
        return Err(unusable(anyhow::anyhow!("--html: {} comparisons, expected one", all.len())));
    }
    for sent in &all {
        for contestant in contestants.iter().filter(|contestant| contestant.scheduler != STOCK) {
            let settings: Vec<Setting> =
                [&sent.settings, &contestant.settings, &args.settings].into_iter().flatten().cloned().collect();
            meridian_config(&settings).map_err(unusable)?;
        }
    }
    let python = Python::default();
    let model = match &args.model {
        Some(model) => super::model_folder(model).map_err(unusable)?,
        None => python
            .small_model()
            .map_err(|error| if error.is_input() { unusable(error.into()) } else { error.into() })?,
    };
    let scratch = match &args.out {
        None => Some(tempfile::Builder::new().prefix("meridian-bench-vllm-").tempdir().context("a folder of its own")?),
        Some(_) => None,
    };
    let out = scratch.as_ref().map_or_else(|| args.out.clone().unwrap_or_default(), |folder| folder.path().to_owned());
    let several = all.len() > 1;
    if let (Some(folder), true) = (&args.save, several) {
        std::fs::create_dir_all(folder).with_context(|| format!("--save {}", folder.display())).map_err(unusable)?;
    }
    std::fs::create_dir_all(&out).with_context(|| format!("--out {}", out.display())).map_err(unusable)?;
    let bar = bar(runs as u64, "{msg}");
    let mut found = Vec::with_capacity(all.len());
    for sent in all {
        let Sent { source, about, rounds, engine, settings, chats } = sent;
        let comparison = Comparison {
            source,
            rounds,
            contestants: contestants.clone(),
            model: model.clone(),
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
            out: out.clone(),
            command: super::command(),
        };
        let results = comparison.run(&python, &mut |progress| match progress {
            Progress::Begins(what) if bar.is_hidden() => say(&format!("{what} ...")),
            Progress::Begins(what) => bar.set_message(what.to_owned()),
            Progress::Ended(line) => {
                bar.inc(1);
                bar.suspend(|| say(line));
            }
        });
        let results = match results {
            Ok(results) => results,
            Err(error) => {
                bar.finish_and_clear();
                // What it said stays.
                scratch.map(tempfile::TempDir::keep);
                return Err(error.into());
            }
        };
        let named = format!("{}.results.json", file_name(&results.trace.source));
        if args.out.is_some() {
            write(&out.join(&named), &results)?;
        }
        if let Some(path) = &args.save {
            write(&if several { path.join(&named) } else { path.clone() }, &results)?;
        }
        if !json {
            bar.suspend(|| {
                print_line(&heading(&about, &results))?;
                print_line(&format!("\n{}\n", table(&results).trim_end()))
            })?;
        }
        found.push(results);
    }
    bar.finish_and_clear();
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

fn sent(args: &VllmArgs) -> anyhow::Result<Vec<Sent>> {
    let sizes: Vec<Option<u32>> =
        if args.kv_blocks.is_empty() { vec![None] } else { args.kv_blocks.iter().copied().map(Some).collect() };
    let mut out = Vec::new();
    let base = match &args.trace {
        Some(path) => vec![from_trace(args, path)?],
        None => {
            let named = if args.scenarios.is_empty() { vec!["multi-turn".to_owned()] } else { args.scenarios.clone() };
            named.iter().map(|name| from_scenario(args, name)).collect::<anyhow::Result<_>>()?
        }
    };
    for of in base {
        for size in &sizes {
            let source = match size {
                Some(blocks) if sizes.len() > 1 => format!("{}, {blocks} KV blocks", of.source),
                _ => of.source.clone(),
            };
            let mut engine = of.engine;
            if let Some(blocks) = size {
                engine.kv_blocks = Some(within("--kv-blocks", *blocks, &KV_BLOCKS)?);
            }
            let Sent { about, rounds, settings, chats, .. } = &of;
            let (about, rounds, settings) = (about.clone(), rounds.clone(), settings.clone());
            out.push(Sent { source, about, rounds, engine, settings, chats: *chats });
        }
    }
    Ok(out)
}

fn size(args: &VllmArgs, of: EngineSize) -> anyhow::Result<EngineSize> {
    Ok(EngineSize {
        max_num_seqs: within("--max-num-seqs", args.max_num_seqs.unwrap_or(of.max_num_seqs), &NUM_SEQS)?,
        max_num_batched_tokens: within(
            "--max-num-batched-tokens",
            args.max_num_batched_tokens.unwrap_or(of.max_num_batched_tokens),
            &BATCHED_TOKENS,
        )?,
        ..of
    })
}

fn own(settings: &[(&str, &str)]) -> Vec<Setting> {
    settings.iter().map(|(field, value)| ((*field).to_owned(), (*value).to_owned())).collect()
}

fn from_scenario(args: &VllmArgs, name: &str) -> anyhow::Result<Sent> {
    anyhow::ensure!(name != EXIT_SCENARIO, "--scenario {name}: stands alone: meridian bench vllm --scenario {name}");
    let known = || SCENARIOS.map(|scenario| scenario.name).join(", ");
    let mut scenario = Scenario::named(name)
        .with_context(|| format!("--scenario {name}: expected one of {}, {EXIT_SCENARIO}", known()))?;
    let mut settings = own(scenario.settings);
    let mut chats = None;
    match &mut scenario.load {
        Load::Chats(of) => {
            of.sessions = within("--sessions", args.sessions.unwrap_or(of.sessions), &TURNS)?;
            of.turns = within("--turns", args.turns.unwrap_or(of.turns), &TURNS)?;
            within("--sessions times --turns:", of.sessions * of.turns, &TURNS)?;
            of.context_tokens = within("--context-tokens", args.context_tokens.unwrap_or(of.context_tokens), &CONTEXT)?;
            of.gap_s = args.gap_s.unwrap_or(of.gap_s);
            of.preserves_thinking = args.preserve_thinking;
            anyhow::ensure!((0.0..3600.0).contains(&of.gap_s), "--gap-s {}: expected seconds, 0 to 3600", of.gap_s);
            settings.push(("model.strips_reasoning".into(), (!of.preserves_thinking).to_string()));
            chats = Some(*of);
        }
        Load::Open(_) => {
            let given = args.sessions.is_some() || args.turns.is_some() || args.context_tokens.is_some();
            let given = given || args.gap_s.is_some() || args.preserve_thinking;
            anyhow::ensure!(
                !given,
                "--sessions, --turns, --context-tokens, --gap-s, --preserve-thinking: {name} has no sessions"
            );
        }
    }
    let rounds: Vec<(u64, Arc<[TraceRequest]>)> =
        args.seeds.iter().map(|seed| (*seed, scenario.requests(*seed).into())).collect();
    let longest = rounds.iter().map(|(_, requests)| scenario.context_tokens(requests)).max().unwrap_or(0);
    let context = within("--max-model-len", args.max_model_len.unwrap_or(longest), &MODEL_LEN)?;
    let rounds = if chats.is_some() {
        // A turn holds what was said before it: none can be made shorter.
        anyhow::ensure!(
            context >= longest,
            "--max-model-len {context}: expected at least {longest}, which the longest turn needs"
        );
        rounds
    } else {
        rounds.into_iter().map(|(seed, requests)| (seed, clipped(&requests, context))).collect()
    };
    let engine = JobEngine::new(size(args, scenario.engine)?, context);
    Ok(Sent { source: name.to_owned(), about: scenario.about.to_owned(), rounds, engine, settings, chats })
}

fn from_trace(args: &VllmArgs, path: &Path) -> anyhow::Result<Sent> {
    let positive = |name: &str, value: f64| {
        anyhow::ensure!(value.is_finite() && value > 0.0, "--{name} {value}: expected a number above 0");
        Ok(value)
    };
    let (tokens, time) = (positive("scale-tokens", args.scale_tokens)?, positive("scale-time", args.scale_time)?);
    let scenario = Scenario::named("loaded").context("a scenario")?;
    let read = read(path, args.format, &ReadOptions { limit: args.requests, ..ReadOptions::default() })?;
    read.notes.iter().for_each(|note| say(&format!("note: {note}")));
    let together = read.requests.iter().filter(|request| request.prefix != Prefix::None).count();
    if together > 0 {
        // What they share would have to be said in tokens, and who comes after whom is the engine's to say.
        say(&format!(
            "note: {together} requests are turns of a conversation or share blocks: each is sent as one of its own"
        ));
    }
    let scaled = |count: u32, least: u32| ((f64::from(count) * tokens).round() as u32).max(least);
    let requests: Vec<TraceRequest> = read
        .requests
        .into_iter()
        .map(|request| TraceRequest {
            arrival_s: request.arrival_s * time,
            prompt_tokens: scaled(request.prompt_tokens, 1),
            think_tokens: scaled(request.think_tokens, 0),
            output_tokens: scaled(request.output_tokens, 1),
            prefix: Prefix::None,
            ..request
        })
        .collect();
    let context = args.max_model_len.unwrap_or_else(|| scenario.context_tokens(&requests));
    let context = within("--max-model-len", context, &MODEL_LEN)?;
    let fit = clipped(&requests, context);
    let cut = requests.iter().zip(fit.iter()).filter(|(one, other)| one != other).count();
    if cut > 0 {
        say(&format!("note: {cut} of {} requests clipped to {context} tokens", requests.len()));
    }
    let rounds = args.seeds.iter().map(|seed| (*seed, Arc::clone(&fit))).collect();
    let engine = JobEngine::new(size(args, scenario.engine)?, context);
    let settings = own(scenario.settings);
    Ok(Sent { source: read.name, about: "a trace".into(), rounds, engine, settings, chats: None })
}

/// With what the template adds, no request is longer than the context.
fn clipped(requests: &[TraceRequest], context: u32) -> Arc<[TraceRequest]> {
    requests.iter().map(|request| request.clipped(context.saturating_sub(RESERVED_TOKENS).max(2))).collect()
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
