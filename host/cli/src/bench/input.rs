//! Command-line options for simulated requests and engines.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use clap::Args;
use meridian_bench::calibrate::EngineFile;
use meridian_bench::limits::{BATCHED_TOKENS, BLOCK_TOKENS, KV_BLOCKS, NUM_SEQS, REQUESTS, within};
use meridian_bench::predict::Observed;
use meridian_bench::read::{MAX_TOML_BYTES, read_text};
use meridian_bench::replay::Input;
use meridian_bench::results::Slo;
use meridian_bench::sim::{Admitted, EngineConfig, preset};
use meridian_bench::trace::{Session, Workload};
use meridian_core::config::{Late, ServiceLevel};
use meridian_core::{MeridianConfig, PolicySource};
use meridian_engine::config_file::{self, ConfigFile};
use serde::Serialize;

use super::reading::ReadArgs;
use super::recordings;

#[derive(Args)]
pub(crate) struct WorkloadArgs {
    /// Generate requests from this workload: a name, or a TOML file of parameters
    #[arg(long, value_name = "NAME|FILE.toml")]
    pub(crate) workload: Option<String>,
    /// Use only the first N requests of a trace, or generate N requests (2000); at most 2000000
    #[arg(long, value_name = "N")]
    pub(crate) requests: Option<usize>,
}

#[derive(Args)]
pub(crate) struct InputArgs {
    /// Read recorded requests: a trace in any format that `bench trace` recognises, plain or packed by gzip or zstd; a
    /// recording (.arrow), or a folder of those of one engine process
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    reading: ReadArgs,
    #[command(flatten)]
    workload: WorkloadArgs,
}

/// How a trace of sessions is replayed.
#[derive(Args)]
pub(crate) struct SessionArgs {
    /// Keep this many sessions of the trace under way; when one ends, the next begins
    #[arg(long, value_name = "N", default_value_t = 32, requires = "trace")]
    at_once: u32,
    /// Use every Nth session, from the Kth on: 1/2 to choose a policy's options, 2/2 to report on them
    #[arg(long, value_name = "K/N", default_value = "1/1", requires = "trace")]
    part: Part,
    /// Divide the tokens of sessions by this, for a smaller engine; it must divide the trace's block size
    #[arg(long, value_name = "N", default_value_t = 1, requires = "trace")]
    shrink: u32,
    /// Make the gaps of sessions so many times as long
    #[arg(long, value_name = "TIMES", default_value_t = 1.0, requires = "trace")]
    scale_gaps: f64,
    /// Make those gaps so many times as long again that follow a turn which no tool call ended
    #[arg(long, value_name = "TIMES", default_value_t = 1.0, requires = "trace")]
    scale_user_gaps: f64,
    /// Let at most this many sessions into the engine, each until its user pauses, and the others wait; `pinned`: as many as
    /// fit, each until it ends
    #[arg(long, value_name = "N|pinned", value_parser = admitted, requires = "trace")]
    admit_sessions: Option<Admitted>,
}

fn admitted(text: &str) -> Result<Admitted, String> {
    match text.parse() {
        Ok(sessions @ 1..) => Ok(Admitted::AtMost(sessions)),
        Err(_) if text == "pinned" => Ok(Admitted::Pinned),
        _ => Err(format!("{text}: expected a number from 1, or pinned")),
    }
}

/// Every so many sessions, from one on.
#[derive(Clone, Copy)]
pub(crate) struct Part {
    /// From 1.
    number: usize,
    of: usize,
}

impl std::str::FromStr for Part {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let split = text.split_once('/').and_then(|(number, of)| Some((number.parse().ok()?, of.parse().ok()?)));
        match split {
            Some((number, of)) if (1..=of).contains(&number) => Ok(Self { number, of }),
            _ => Err(format!("{text}: expected K/N, K from 1 to N")),
        }
    }
}

impl SessionArgs {
    /// These sessions, their tokens divided by `shrink`; how many at a time is found out.
    pub(crate) fn chosen(part: Part, shrink: u32) -> Self {
        Self { at_once: 1, part, shrink, scale_gaps: 1.0, scale_user_gaps: 1.0, admit_sessions: None }
    }

    fn of(&self, name: String, sessions: Vec<Session>) -> anyhow::Result<Input> {
        let at_once = within("--at-once", self.at_once, &NUM_SEQS)?;
        for (option, times) in [("--scale-gaps", self.scale_gaps), ("--scale-user-gaps", self.scale_user_gaps)] {
            ensure!((0.0..=1e6).contains(&times), "{option} {times}: expected a number from 0 to 1e6");
        }
        let Part { number, of } = self.part;
        let chosen = sessions.iter().skip(number - 1).step_by(of).map(|session| {
            let shrunk = session.shrunk(self.shrink).with_context(|| {
                format!("--shrink {}: expected a divisor of {}, the block size", self.shrink, session.block_tokens)
            })?;
            Ok(shrunk.with_gaps(self.scale_gaps, self.scale_user_gaps))
        });
        let sessions: Arc<[Session]> = chosen.collect::<anyhow::Result<_>>()?;
        ensure!(!sessions.is_empty(), "--part {number}/{of}: has no session, expected a smaller K");
        Ok(Input::Sessions { name, sessions, at_once, admitted: self.admit_sessions.unwrap_or_default() })
    }
}

/// Files for the results, besides the terminal.
#[derive(Args)]
pub(crate) struct KeepArgs {
    /// Keep the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) save: Option<PathBuf>,
    /// Draw the results as one HTML file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

impl KeepArgs {
    /// Write the files that the options name.
    pub(crate) fn write(&self, results: &impl Serialize, html: impl FnOnce() -> String) -> anyhow::Result<()> {
        let write = |path: &Path, text: String| {
            std::fs::write(path, text).with_context(|| format!("{}: cannot be written", path.display()))
        };
        if let Some(path) = &self.save {
            write(path, serde_json::to_string(results)?)?;
        }
        if let Some(path) = &self.html {
            write(path, html())?;
        }
        Ok(())
    }
}

/// Default number of generated requests.
const GENERATED: usize = 2000;

impl InputArgs {
    /// A trace as `FILE` or `FILE:bimodal`.
    pub(crate) fn trace(given: &str) -> anyhow::Result<Self> {
        let (path, think) = given.strip_suffix(":bimodal").map_or((given, "none"), |path| (path, "bimodal"));
        Ok(Self {
            trace: Some(path.into()),
            reading: ReadArgs::thinking(think),
            workload: WorkloadArgs { workload: None, requests: None },
        })
    }

    /// The requests, and notes on how they were read. Sessions are refused: they arrive in closed loop.
    pub(crate) fn read(&self) -> anyhow::Result<(Input, Vec<String>)> {
        self.read_with(None)
    }

    /// The requests, or sessions in closed loop if `closed_loop` is given, and notes on how they were read.
    pub(crate) fn read_with(&self, closed_loop: Option<&SessionArgs>) -> anyhow::Result<(Input, Vec<String>)> {
        let Some(path) = &self.trace else {
            let (name, workload, requests) = self.workload.read()?;
            return Ok((Input::Generated { name, workload: Box::new(workload), requests }, Vec::new()));
        };
        self.workload.count()?;
        if recordings::are_at(path) {
            self.reading.refuse_for_recording(path)?;
            return self.recorded(path);
        }
        let trace = self.reading.read(path, self.workload.requests)?;
        if trace.format.has_sessions() {
            let Some(args) = closed_loop else {
                bail!("{}: has sessions in closed loop, which only `meridian bench replay` plays", trace.name);
            };
            return Ok((args.of(trace.name, trace.sessions)?, trace.notes));
        }
        Ok((Input::Trace { name: trace.name, requests: trace.requests.into() }, trace.notes))
    }

    /// The requests of an engine's own recordings. One that had not ended has the lengths that it had reached.
    fn recorded(&self, path: &Path) -> anyhow::Result<(Input, Vec<String>)> {
        let (recordings, _) = recordings::open(&[path.to_owned()])?;
        let observed = Observed::read(&recordings)?;
        let mut notes: Vec<String> = observed.lack().into_iter().collect();
        let (open, all) = (observed.open(), observed.requests.len());
        if open > 0 {
            notes.push(format!("{open} of {all} requests had not ended, and have the lengths that they had reached"));
        }
        let mut requests = observed.requests;
        requests.truncate(self.workload.requests.unwrap_or(usize::MAX));
        if let Some(most) = self.reading.clip_tokens {
            requests.iter_mut().for_each(|request| *request = request.clipped(most));
        }
        Ok((Input::Trace { name: recordings::name(&recordings), requests: requests.into() }, notes))
    }
}

impl WorkloadArgs {
    /// The generated workload with its name, and how many requests of it.
    pub(crate) fn read(&self) -> anyhow::Result<(String, Workload, usize)> {
        let requests = self.count()?;
        let given = self.workload.as_deref().unwrap_or(Workload::NAMES[0]);
        if !given.ends_with(".toml") {
            return Ok((given.to_owned(), Workload::named(given)?, requests));
        }
        let path = PathBuf::from(given);
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        let text = read_text(&path, MAX_TOML_BYTES)?;
        let workload = Workload::from_toml(&text).with_context(|| name.clone())?;
        Ok((name, workload, requests))
    }

    fn count(&self) -> anyhow::Result<usize> {
        within("--requests", self.requests.unwrap_or(GENERATED), &REQUESTS)
    }
}

#[derive(Args)]
pub(crate) struct SloArgs {
    /// Set the service level of the time from arrival to the first answer token, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = Slo::default().ttfo_ms)]
    slo_ttfo_ms: f64,
    /// Add this to --slo-ttfo-ms for each token of the prompt, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = Slo::default().prompt_ms)]
    slo_prompt_ms: f64,
    /// Instead of these: so many times what the request takes to its first answer token in an engine of its own; 0 for none
    #[arg(long, value_name = "FACTOR", default_value_t = Slo::default().alone)]
    slo_alone: f64,
    /// Add this to --slo-ttfo-ms for each thinking token, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = Slo::default().think_ms)]
    slo_think_ms: f64,
    /// Set the service level of the mean gap between two answer tokens, in milliseconds
    #[arg(long, value_name = "MS", default_value_t = Slo::default().tpot_ms)]
    slo_tpot_ms: f64,
    /// Set the reading speed for QoE, in tokens a second
    #[arg(long, value_name = "N", default_value_t = Slo::default().reading_tok_s)]
    reading_tok_s: f64,
}

impl SloArgs {
    /// The service levels.
    pub(crate) fn read(&self) -> anyhow::Result<Slo> {
        let positive = |name: &str, value: f64| {
            ensure!(value.is_finite() && value > 0.0, "--{name} {value}: expected a number above 0");
            Ok(value)
        };
        let or_none = |name: &str, value: f64| if value == 0.0 { Ok(0.0) } else { positive(name, value) };
        Ok(Slo {
            ttfo_ms: positive("slo-ttfo-ms", self.slo_ttfo_ms)?,
            prompt_ms: or_none("slo-prompt-ms", self.slo_prompt_ms)?,
            alone: or_none("slo-alone", self.slo_alone)?,
            think_ms: or_none("slo-think-ms", self.slo_think_ms)?,
            tpot_ms: positive("slo-tpot-ms", self.slo_tpot_ms)?,
            reading_tok_s: positive("reading-tok-s", self.reading_tok_s)?,
        })
    }
}

#[derive(Args)]
pub(crate) struct PromiseArgs {
    /// Promise the policies this service level for every request, as a level in [service_levels] of --config does; `refuse`:
    /// late requests are refused, `last`: they go last
    #[arg(long, value_name = "LATE", num_args = 0..=1, require_equals = true, default_missing_value = "last", value_parser = late)]
    promise: Option<Late>,
}

fn late(text: &str) -> Result<Late, String> {
    match text {
        "last" => Ok(Late::Last),
        "refuse" => Ok(Late::Refuse),
        _ => Err("expected last or refuse".into()),
    }
}

impl PromiseArgs {
    /// Promise the level that is measured, if the option is given.
    ///
    /// # Errors
    /// As [`promise`].
    pub(crate) fn add(&self, config: &mut MeridianConfig, slo: &Slo) -> anyhow::Result<()> {
        self.promise.map_or(Ok(()), |late| promise(config, slo, late).context("--promise"))
    }
}

/// Promise this service level to every request to which the configuration promises none: policies then know of it.
///
/// # Errors
/// The level cannot be promised.
pub(crate) fn promise(config: &mut MeridianConfig, slo: &Slo, late: Late) -> anyhow::Result<()> {
    ensure!(slo.alone == 0.0, "--slo-alone {}: no level can promise it, expected --slo-ttfo-ms", slo.alone);
    let levels = &mut config.service_levels;
    ensure!(
        !levels.values().any(|level| level.default),
        "the configuration has a default service level already, expected one of the two"
    );
    let Slo { ttfo_ms, prompt_ms, think_ms, tpot_ms, .. } = *slo;
    let level = ServiceLevel {
        ttfo_ms: ttfo_ms as f32,
        prompt_ms_per_token: prompt_ms as f32,
        think_ms_per_token: think_ms as f32,
        tpot_ms: tpot_ms as f32,
        late,
        longest_wait_ms: ServiceLevel::default().longest_wait_ms.max(ttfo_ms as f32),
        default: true,
        ..ServiceLevel::default()
    };
    let other = levels.insert("measured".to_owned(), level);
    ensure!(other.is_none(), "service_levels.measured: is there already, expected another name");
    config.validate()?;
    Ok(())
}

/// The configuration in a file, its component paths joined to the folder of the file. Without a file, the defaults and
/// a template that strips thinking.
pub(crate) fn configured(path: Option<&Path>) -> anyhow::Result<MeridianConfig> {
    let Some(path) = path else { return Ok(MeridianConfig::from_toml("[model]\nstrips_reasoning = true")?) };
    let ConfigFile { base_dir, parsed, .. } = config_file::load(Some(path))?;
    let mut config = parsed.config;
    let policy = &mut config.policy;
    for slot in [&mut policy.dispatch, &mut policy.eviction, &mut policy.budget] {
        if PolicySource::of(&slot.source).is_file() {
            slot.source = base_dir.join(&slot.source).display().to_string();
        }
    }
    Ok(config)
}

/// The engine of a preset or a file, with its name.
pub(crate) fn engine_named(given: &str) -> anyhow::Result<(String, EngineConfig)> {
    if !given.ends_with(".toml") {
        let unknown = || {
            format!(
                "--engine {given}: unknown preset, expected one of {}",
                preset::all().into_iter().map(|preset| preset.name).collect::<Vec<_>>().join(", ")
            )
        };
        return Ok((given.to_owned(), preset::named(given).with_context(unknown)?));
    }
    let path = PathBuf::from(given);
    let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    Ok((name, EngineFile::read(&path)?))
}

#[derive(Args)]
pub(crate) struct EngineArgs {
    /// Simulate this engine: a preset (MODEL-GPU), or a TOML file that `bench calibrate` wrote
    #[arg(long, value_name = "PRESET|FILE.toml", default_value = "7b-h100")]
    engine: String,
    /// Run at most this many requests at once, instead of the engine's limit
    #[arg(long, value_name = "N")]
    max_num_seqs: Option<u32>,
    /// Limit a step to this many tokens, instead of the engine's limit
    #[arg(long, value_name = "N")]
    max_num_batched_tokens: Option<u32>,
    /// Limit one prompt to this many tokens in a step beside other requests; 0 for no limit
    #[arg(long, value_name = "N", default_value_t = 0)]
    long_prefill_token_threshold: u32,
    /// Give the engine this many KV blocks, instead of its own number
    #[arg(long, value_name = "N")]
    kv_blocks: Option<u32>,
    /// Divide the KV memory into blocks of this many tokens, instead of the engine's own size
    #[arg(long, value_name = "N")]
    block_tokens: Option<u32>,
    /// Simulate a hybrid model: compute prompts in whole blocks (--block-tokens), and keep each request's state in this many
    /// more of them
    #[arg(long, value_name = "N", default_value_t = 0)]
    state_blocks: u32,
    /// Disable prefix caching
    #[arg(long)]
    no_prefix_caching: bool,
    /// Read targets and KV settings from this meridian.toml; without it, use the defaults and a template that strips
    /// thinking
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl EngineArgs {
    /// The engine, its name, and Meridian's configuration.
    pub(crate) fn read(&self) -> anyhow::Result<(EngineConfig, String, MeridianConfig)> {
        let (name, mut engine) = engine_named(&self.engine)?;
        let replace = |named: &str, value: Option<u32>, limits, own: &mut u32| -> anyhow::Result<()> {
            *own = within(named, value.unwrap_or(*own), limits)?;
            Ok(())
        };
        replace("--max-num-seqs", self.max_num_seqs, &NUM_SEQS, &mut engine.max_num_seqs)?;
        let batched = &mut engine.max_num_batched_tokens;
        replace("--max-num-batched-tokens", self.max_num_batched_tokens, &BATCHED_TOKENS, batched)?;
        if let Some(tokens) = self.block_tokens {
            within("--block-tokens", tokens, &BLOCK_TOKENS)?;
            let all = u64::from(engine.kv_blocks) * u64::from(engine.block_tokens);
            engine.kv_blocks = u32::try_from(all / u64::from(tokens)).unwrap_or(u32::MAX).max(*KV_BLOCKS.start());
            engine.block_tokens = tokens;
        }
        replace("--kv-blocks", self.kv_blocks, &KV_BLOCKS, &mut engine.kv_blocks)?;
        engine.long_prefill_token_threshold = self.long_prefill_token_threshold;
        engine.state_blocks = within("--state-blocks", self.state_blocks, &(0..=64))?;
        engine.prefix_caching = !self.no_prefix_caching;
        let config = configured(self.config.as_deref())?;
        Ok((engine, name, config))
    }
}
