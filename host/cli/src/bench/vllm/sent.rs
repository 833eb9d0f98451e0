//! The requests of a comparison, and the engine that they are sent to.

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use meridian_bench::exit::SCENARIO as EXIT_SCENARIO;
use meridian_bench::limits::{BATCHED_TOKENS, KV_BLOCKS, NUM_SEQS, within};
use meridian_bench::trace::{Prefix, TraceRequest};
use meridian_bench::vllm::{Chats, EngineSize, JobEngine, Load, SCENARIOS, Scenario, Setting};

use super::VllmArgs;
use crate::say;

/// Requests of a scenario, the turns of all chats included: many more are drawn than are sent.
const REQUESTS: std::ops::RangeInclusive<usize> = 1..=10_000;
/// Tokens that a chat may open with.
const CONTEXT: std::ops::RangeInclusive<u32> = 0..=10_000_000;
/// Tokens of a request.
const MODEL_LEN: std::ops::RangeInclusive<u32> = 64..=100_000_000;
/// Tokens of a request that a template and an end marker may take.
const RESERVED_TOKENS: u32 = 16;

/// What is sent, and to an engine of which size.
pub(super) struct Sent {
    pub source: String,
    pub about: String,
    pub rounds: Vec<(u64, Arc<[TraceRequest]>)>,
    pub engine: JobEngine,
    pub settings: Vec<Setting>,
    pub chats: Option<Chats>,
}

/// What each comparison sends: a scenario or a trace, at each size of KV memory.
pub(super) fn sent(args: &VllmArgs) -> anyhow::Result<Vec<Sent>> {
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
            anyhow::ensure!(
                args.rate.is_none() && args.requests.is_none(),
                "--rate, --requests: {name} has chats: expected --sessions and --turns"
            );
            of.sessions = within("--sessions", args.sessions.unwrap_or(of.sessions), &REQUESTS)?;
            of.turns = within("--turns", args.turns.unwrap_or(of.turns), &REQUESTS)?;
            within("--sessions times --turns:", of.sessions * of.turns, &REQUESTS)?;
            of.context_tokens = within("--context-tokens", args.context_tokens.unwrap_or(of.context_tokens), &CONTEXT)?;
            of.gap_s = args.gap_s.unwrap_or(of.gap_s);
            of.preserves_thinking = args.preserve_thinking;
            anyhow::ensure!((0.0..3600.0).contains(&of.gap_s), "--gap-s {}: expected seconds, 0 to 3600", of.gap_s);
            settings.push(("model.strips_reasoning".into(), (!of.preserves_thinking).to_string()));
            chats = Some(*of);
        }
        Load::Open(of) => {
            of.requests = within("--requests", args.requests.unwrap_or(of.requests), &REQUESTS)?;
            of.rate_per_s = args.rate.map_or(Ok(of.rate_per_s), |rate| positive("rate", rate))?;
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
    let (tokens, time) = (positive("scale-tokens", args.scale_tokens)?, positive("scale-time", args.scale_time)?);
    let scenario = Scenario::named("loaded").context("a scenario")?;
    let read = args.reading.read(path, args.requests)?;
    anyhow::ensure!(
        read.sessions.is_empty(),
        "{}: has sessions in closed loop, which only `meridian bench replay` plays",
        read.name
    );
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

fn positive(name: &str, value: f64) -> anyhow::Result<f64> {
    anyhow::ensure!(value.is_finite() && value > 0.0, "--{name} {value}: expected a number above 0");
    Ok(value)
}

/// With what the template adds, no request is longer than the context.
fn clipped(requests: &[TraceRequest], context: u32) -> Arc<[TraceRequest]> {
    requests.iter().map(|request| request.clipped(context.saturating_sub(RESERVED_TOKENS).max(2))).collect()
}
