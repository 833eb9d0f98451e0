use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use meridian_bench::grid::below_floor;
use meridian_bench::limits::{REQUESTS, RUNS, engines_within, within};
use meridian_bench::load::{Course, Stage};
use meridian_bench::policies::{Inject, PolicyArg, PolicySet};
use meridian_bench::replay::{MaxTokens, Options, Rate, bound, own_rate, replay, timeline};
use meridian_bench::report::{html, table};
use meridian_bench::results::GivenUp;
use meridian_bench::sim::{Router, Transfer};
use meridian_engine::timeline::chrome_json;

use super::input::{EngineArgs, InputArgs, KeepArgs, PromiseArgs, SessionArgs, SloArgs};
use crate::progress::bar;
use crate::{Said, Unusable, print_json, print_line, say};

#[derive(Args)]
#[command(after_help = "\
A policy is native:NAME (or NAME), or the path of a component, followed by its options:
'pascal{\"tpot_ms\": 40}'. It decides in the dispatch slot. To name policies of several slots, write
dispatch=POLICY, eviction=POLICY and budget=POLICY with commas between them. Without dispatch=, the
configured dispatch policy decides. handoff=6:2 lets six engines think and two answer: at the end of
its thinking, a request and its KV blocks move. [disagg] of --config chooses the requests that move.

Examples:
  meridian bench replay --trace requests.csv --policy output-first --policy pascal --rate 2,4,8 --html report.html
  meridian bench replay --workload reasoning-chat --requests 5000 --policy mine.wasm --seeds 1,2,3 --save mine.json
  meridian bench replay --trace requests.csv --policy eviction=tiered-lru --policy eviction=prefix-value,budget=patience
  meridian bench replay --trace requests.csv --policy balanced --rate 2.3 --day 0.6x600,1.6x300,0.6x900 --html day.html
  meridian bench replay --trace agentic_sessions.jsonl --at-once 32 --policy eviction=prefix-value
  meridian bench replay --engines 8 --engine 32b-h200 --policy handoff=7:1 --policy handoff=6:2 --rate 4,6
  meridian bench replay --trace requests.csv --policy mine.wasm --swap 60=output-first --inject trap:0.01")]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    input: InputArgs,
    #[command(flatten)]
    sessions: SessionArgs,
    #[command(flatten)]
    engine: EngineArgs,
    /// Replay under this policy, or these policies of several slots; may be given several times
    #[arg(long = "policy", value_name = "POLICY|SLOT=POLICY,...|handoff=THINK:ANSWER")]
    policies: Vec<PolicySet>,
    /// Compare the policies with this one; fcfs is stock vLLM
    #[arg(long, value_name = "POLICY|SLOT=POLICY,...", default_value = "fcfs")]
    baseline: PolicySet,
    /// Replay at these rates: requests a second, or a multiple of the trace's own rate (2.5,2x)
    #[arg(long = "rate", value_name = "RATE", value_delimiter = ',', default_value = "1x")]
    rates: Vec<Rate>,
    /// Follow this course of factors of the rate instead of the trace's own: FACTORxSECONDS, or FROM-TOxSECONDS for a ramp. A
    /// trace that is too short comes again in shuffled blocks
    #[arg(long, value_name = "STAGE,...", value_delimiter = ',')]
    day: Vec<Stage>,
    /// Use these seeds; 1 replays a trace as it is, others shuffle its requests
    #[arg(long, value_name = "SEED", value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,
    /// Simulate this many engines behind the router
    #[arg(long, default_value_t = 1)]
    engines: u32,
    /// Route requests by this rule: round-robin, least-loaded, session
    #[arg(long, default_value = "round-robin")]
    router: Router,
    /// Let a handoff take this long beside its bytes, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = Transfer::default().fixed_ms)]
    transfer_ms: f64,
    /// Move this many gigabytes of KV a second into an engine that answers
    #[arg(long, value_name = "GB/S", default_value_t = Transfer::default().gb_s)]
    transfer_gb_s: f64,
    /// Set the eviction policy where --policy names none; by default, the configured policy
    #[arg(long, value_name = "POLICY")]
    eviction: Option<PolicyArg>,
    /// Set the budget policy where --policy names none; it may end thinking early, by entropies like recorded ones (none)
    #[arg(long, value_name = "POLICY")]
    budget: Option<PolicyArg>,
    /// Swap in another policy after this many seconds: 60=native:fcfs; may be given several times
    #[arg(long = "swap", value_name = "T=POLICY", value_parser = swap)]
    swaps: Vec<(f64, PolicyArg)>,
    /// Make the policies fault in a share of their decisions: trap:0.01
    #[arg(long, value_name = "KIND:SHARE")]
    inject: Option<Inject>,
    /// Make every client ask for this many tokens, all that policies know of lengths; `exact`: as many as it needs
    #[arg(long, value_name = "TOKENS", default_value = "32768")]
    max_tokens: MaxTokens,
    /// Set the deadline of requests that have none, in milliseconds after arrival
    #[arg(long, value_name = "MS")]
    deadline_ms: Option<f64>,
    /// Write a timeline of the first engine for Perfetto: of the first policy, rate and seed
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// Print every metric, not the ten that matter most
    #[arg(long)]
    all: bool,
    #[command(flatten)]
    slo: SloArgs,
    #[command(flatten)]
    promise: PromiseArgs,
    #[command(flatten)]
    keep: KeepArgs,
}

pub(crate) fn run(args: &ReplayArgs, json: bool) -> anyhow::Result<()> {
    let unusable = |error: anyhow::Error| error.context(Unusable);
    let options = options(args).map_err(unusable)?;
    let (input, notes) = args.input.read_with(Some(&args.sessions)).map_err(unusable)?;
    options.fits(&input).map_err(unusable)?;
    if let (Some(course), Ok(own)) = (&options.course, own_rate(&input)) {
        for rate in &options.rates {
            let rate = match rate {
                Rate::PerSecond(rate) => *rate,
                Rate::TimesItsOwn(times) => own * times,
            };
            within("--day: its requests", course.requests(rate).ceil() as usize, &REQUESTS).map_err(unusable)?;
        }
    }
    notes.iter().for_each(|note| say(&format!("note: {note}")));
    for policy in args.policies.iter().filter_map(|set| set.dispatch.as_ref()) {
        if let Some(floor) = below_floor(policy.name()) {
            say(&format!("note: {}: {floor}", policy.label));
        }
    }
    let progress = bar(1000, "{msg:28}");
    let mut told = u64::MAX;
    let results = replay(&options, &input, &mut |run, runs, share| {
        let position = (1000.0 * (run as f64 + share) / runs as f64) as u64;
        if position != told {
            told = position;
            progress.set_message(format!("run {} of {runs}", run + 1));
            progress.set_position(position);
        }
    });
    progress.finish_and_clear();
    let mut results = results?;
    if !options.config.service_levels.is_empty() && options.engines == 1 {
        results.most_in_time = bound(&options, &input)?;
        results.notes.extend(results.most_in_time.map(|most| {
            format!("without ending thinking early, any scheduler has at most {most:.3} of the requests in time (first rate, first seed)")
        }));
    }
    if let Some(refused) = results.runs.iter().filter_map(|run| run.metrics.get("refused")).find(|count| **count > 0.0)
    {
        say(&format!(
            "note: {refused} requests need more KV memory than an engine has: they were refused and are in no metric"
        ));
    }
    args.keep.write(&results, || html(&results))?;
    if let Some(out) = &args.timeline {
        let text = chrome_json(&timeline(&options, &input)?);
        std::fs::write(out, text).with_context(|| format!("--timeline: {}: cannot be written", out.display()))?;
    }
    if json {
        print_json(&results)?;
    } else {
        print_line(table(&results, args.all).trim_end())?;
    }
    if results.given_up.is_empty() {
        return Ok(());
    }
    for GivenUp { rate, seed, why, .. } in &results.given_up {
        say(&format!("error: {why} (at {rate} requests a second, seed {seed})"));
    }
    Err(Said.into())
}

fn options(args: &ReplayArgs) -> anyhow::Result<Options> {
    let positive = |name: &str, value: f64| {
        anyhow::ensure!(value.is_finite() && value > 0.0, "--{name} {value}: expected a number above 0");
        Ok(value)
    };
    let (engine, engine_name, mut config) = args.engine.read()?;
    let slo = args.slo.read()?;
    args.promise.add(&mut config, &slo)?;
    let deadline_ms = args.deadline_ms.map(|ms| positive("deadline-ms", ms)).transpose()?;
    engines_within(args.engines, engine.kv_blocks)?;
    let runs = (1 + args.policies.len()).saturating_mul(args.rates.len()).saturating_mul(args.seeds.len());
    within("runs (policies times rates times seeds):", runs, &RUNS)?;
    Ok(Options {
        engine,
        engine_name,
        engines: args.engines,
        router: args.router,
        transfer: Transfer {
            fixed_ms: positive("transfer-ms", args.transfer_ms)?,
            gb_s: positive("transfer-gb-s", args.transfer_gb_s)?,
        },
        slo,
        baseline: args.baseline.clone(),
        policies: args.policies.clone(),
        rates: args.rates.clone(),
        course: (!args.day.is_empty()).then(|| Course::day(args.day.clone())),
        seeds: args.seeds.clone(),
        eviction: args.eviction.clone(),
        budget: args.budget.clone(),
        inject: args.inject,
        swaps: args.swaps.clone(),
        max_tokens: args.max_tokens,
        deadline_ms,
        deadlines_of_slo: false,
        config,
        command: super::command(),
    })
}

fn swap(text: &str) -> Result<(f64, PolicyArg), String> {
    let expected = || format!("{text}: expected SECONDS=POLICY");
    let (at, policy) = text.split_once('=').ok_or_else(expected)?;
    let at: f64 = at.parse().ok().filter(|at: &f64| at.is_finite() && *at >= 0.0).ok_or_else(expected)?;
    Ok((at, policy.parse()?))
}
