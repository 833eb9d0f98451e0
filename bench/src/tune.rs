//! The flags of stock vLLM that serve a load best: what an operator finds by trying. An operator sets them once, for a
//! whole sweep of loads; the best for each load alone are a bound.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::load::Course;
use crate::replay::{Input, Options, Rate, replay};
use crate::results::Run;
use crate::sim::EngineConfig;

/// Goodput that other flags than the engine's own must win to be worth setting, as a share of it.
pub const WORTH: f64 = 0.01;
/// Values of `max_num_batched_tokens` that are tried, beside the engine's own.
const BATCHED_TOKENS: [u32; 5] = [8192, 4096, 2048, 1024, 512];
/// Parts of the seats that are tried as `max_num_active_seqs`.
const ACTIVE_PARTS: [u32; 3] = [2, 4, 8];
/// Parts of the tokens of a step that are tried as `long_prefill_token_threshold`.
const THRESHOLD_PART: u32 = 4;
/// Share of the KV blocks that is tried as `watermark`.
const WATERMARK: f64 = 0.05;
/// Factors of the seats that are tried as `max_num_queued_reqs`.
const QUEUE_PARTS: [f64; 2] = [0.25, 1.0];

/// The flags that shape the steps and the queue of stock vLLM, as of `vllm serve`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Flags {
    /// Most running requests.
    pub max_num_seqs: u32,
    /// Most requests that run at a time; 0 for `max_num_seqs`.
    pub max_num_active_seqs: u32,
    /// Most tokens of a step.
    pub max_num_batched_tokens: u32,
    /// Most tokens of one prompt in a step; 0 for no limit.
    pub long_prefill_token_threshold: u32,
    /// That limit is at least a fair share of the step.
    pub long_prefill_token_threshold_adaptive: bool,
    /// Share of the KV blocks that admission leaves free.
    pub watermark: f64,
    /// Admission needs blocks for the whole prompt.
    pub scheduler_reserve_full_isl: bool,
    /// Requests from which on further ones are turned away; 0 for no limit.
    pub max_num_queued_reqs: u32,
}

impl Flags {
    /// Those of an engine.
    #[must_use]
    pub fn of(engine: &EngineConfig) -> Self {
        Self {
            max_num_seqs: engine.max_num_seqs,
            max_num_active_seqs: engine.max_num_active_seqs,
            max_num_batched_tokens: engine.max_num_batched_tokens,
            long_prefill_token_threshold: engine.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive: engine.long_prefill_token_threshold_adaptive,
            watermark: engine.watermark,
            scheduler_reserve_full_isl: engine.scheduler_reserve_full_isl,
            max_num_queued_reqs: engine.max_num_queued_reqs,
        }
    }

    /// The engine with these.
    #[must_use]
    pub fn set(self, engine: &EngineConfig) -> EngineConfig {
        EngineConfig {
            max_num_seqs: self.max_num_seqs,
            max_num_active_seqs: self.max_num_active_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            long_prefill_token_threshold: self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive: self.long_prefill_token_threshold_adaptive,
            watermark: self.watermark,
            scheduler_reserve_full_isl: self.scheduler_reserve_full_isl,
            max_num_queued_reqs: self.max_num_queued_reqs,
            ..engine.clone()
        }
    }

    /// So many tokens a step. vLLM takes no fewer than seats.
    #[must_use]
    pub fn with_tokens(self, tokens: u32) -> Self {
        Self { max_num_batched_tokens: tokens, max_num_seqs: self.max_num_seqs.min(tokens), ..self }
    }

    /// As `vllm serve` takes them: those that differ from `own`; empty when none does.
    #[must_use]
    pub fn over(self, own: Self) -> String {
        let mut out = Vec::new();
        let mut number = |name: &str, value: String, is_own: bool| {
            if !is_own {
                out.push(format!("--{name} {value}"));
            }
        };
        let Self { max_num_seqs, max_num_active_seqs, max_num_batched_tokens, long_prefill_token_threshold, .. } = self;
        number("max-num-seqs", max_num_seqs.to_string(), max_num_seqs == own.max_num_seqs);
        let is_own = max_num_active_seqs == own.max_num_active_seqs;
        number("max-num-active-seqs", max_num_active_seqs.to_string(), is_own);
        let is_own = max_num_batched_tokens == own.max_num_batched_tokens;
        number("max-num-batched-tokens", max_num_batched_tokens.to_string(), is_own);
        let is_own = long_prefill_token_threshold == own.long_prefill_token_threshold;
        number("long-prefill-token-threshold", long_prefill_token_threshold.to_string(), is_own);
        number("watermark", self.watermark.to_string(), self.watermark == own.watermark);
        let is_own = self.max_num_queued_reqs == own.max_num_queued_reqs;
        number("max-num-queued-reqs", self.max_num_queued_reqs.to_string(), is_own);
        let mut switch = |name: &str, is_on: bool, was_on: bool| match (is_on, was_on) {
            (true, false) => out.push(format!("--{name}")),
            (false, true) => out.push(format!("--no-{name}")),
            _ => {}
        };
        let adaptive = (self.long_prefill_token_threshold_adaptive, own.long_prefill_token_threshold_adaptive);
        switch("long-prefill-token-threshold-adaptive", adaptive.0, adaptive.1);
        let reserves = (self.scheduler_reserve_full_isl, own.scheduler_reserve_full_isl);
        switch("scheduler-reserve-full-isl", reserves.0, reserves.1);
        out.join(" ")
    }
}

impl fmt::Display for Flags {
    /// As `vllm serve` takes them: seats, tokens, and what is set beside them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { max_num_seqs, max_num_batched_tokens, .. } = *self;
        let plain = Self { max_num_seqs, max_num_batched_tokens, ..Self::of(&EngineConfig::default()) };
        write!(f, "--max-num-seqs {max_num_seqs} --max-num-batched-tokens {max_num_batched_tokens}")?;
        match self.over(plain) {
            rest if rest.is_empty() => Ok(()),
            rest => write!(f, " {rest}"),
        }
    }
}

/// What is tried first, the engine's own flags before the others: one kind of flag at a time.
#[must_use]
pub fn candidates(engine: &EngineConfig) -> Vec<Flags> {
    let own = Flags::of(engine);
    let tokens = BATCHED_TOKENS.into_iter().filter(|tokens| *tokens < own.max_num_batched_tokens);
    let seats = ACTIVE_PARTS.into_iter().map(|part| own.max_num_seqs / part).filter(|seats| *seats > 0);
    let threshold = (own.max_num_batched_tokens / THRESHOLD_PART).max(1);
    let limited = Flags { long_prefill_token_threshold: threshold, ..own };
    let queued = QUEUE_PARTS.into_iter().map(|part| (f64::from(own.max_num_seqs) * part) as u32);
    let mut out = vec![own];
    out.extend(tokens.map(|tokens| own.with_tokens(tokens)));
    out.extend(seats.map(|seats| Flags { max_num_active_seqs: seats, ..own }));
    out.extend([limited, Flags { long_prefill_token_threshold_adaptive: true, ..limited }]);
    out.push(Flags { watermark: WATERMARK, ..own });
    out.push(Flags { scheduler_reserve_full_isl: false, ..own });
    out.extend(queued.filter(|most| *most > 0).map(|most| Flags { max_num_queued_reqs: most, ..own }));
    out
}

/// The best of what was tried together: tokens of one, seats and limits of the other.
fn joined(one: Flags, other: Flags, own: Flags) -> Flags {
    let mut out = one;
    if other.max_num_batched_tokens != own.max_num_batched_tokens {
        out = out.with_tokens(other.max_num_batched_tokens);
        out.max_num_active_seqs = out.max_num_active_seqs.min(out.max_num_seqs);
    }
    if other.max_num_active_seqs != own.max_num_active_seqs {
        out.max_num_active_seqs = other.max_num_active_seqs.min(out.max_num_seqs);
    }
    if other.long_prefill_token_threshold != own.long_prefill_token_threshold {
        out.long_prefill_token_threshold = other.long_prefill_token_threshold.min(out.max_num_batched_tokens);
        out.long_prefill_token_threshold_adaptive = other.long_prefill_token_threshold_adaptive;
    }
    if other.watermark != own.watermark {
        out.watermark = other.watermark;
    }
    if other.scheduler_reserve_full_isl != own.scheduler_reserve_full_isl {
        out.scheduler_reserve_full_isl = other.scheduler_reserve_full_isl;
    }
    if other.max_num_queued_reqs != own.max_num_queued_reqs {
        out.max_num_queued_reqs = other.max_num_queued_reqs;
    }
    out
}

/// A load that flags are tried under.
#[derive(Clone, Debug)]
pub struct Load {
    /// Its name.
    pub name: String,
    /// Requests a second.
    pub rate: Rate,
    /// Over time; none for the trace as it is.
    pub course: Option<Course>,
}

/// Flags, and the runs of stock vLLM with them: one a load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// The flags.
    pub flags: Flags,
    /// As `vllm serve` takes them; empty for the engine's own.
    pub shown: String,
    /// By load: the metrics by the keys of [`crate::results::METRICS`]. A load is missing where flags that serve the
    /// hardest loads worse were not tried further.
    pub metrics: BTreeMap<String, BTreeMap<String, f64>>,
}

/// What tuning has found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    /// The flags of the best goodput over all loads, a geometric mean; the engine's own where no others are
    /// [worth](WORTH) setting.
    pub best: Flags,
    /// The best for each load alone.
    pub best_of: BTreeMap<String, Flags>,
    /// Everything that was tried, the engine's own flags first.
    pub tried: Vec<Tried>,
}

/// Flags that are tried under every load, after the hardest.
const FINALISTS: usize = 4;

/// How many runs [`tune`] makes at most.
#[must_use]
pub fn runs(engine: &EngineConfig, loads: usize) -> usize {
    candidates(engine).len() + 1 + FINALISTS * loads.saturating_sub(1)
}

/// The baseline of `options` with these flags under a load; means over the seeds.
fn attempt(options: &Options, input: &Input, load: &Load, flags: Flags) -> anyhow::Result<Vec<Run>> {
    let options = Options {
        engine: flags.set(&options.engine),
        policies: Vec::new(),
        rates: vec![load.rate],
        course: load.course.clone(),
        budget: None,
        swaps: Vec::new(),
        ..options.clone()
    };
    Ok(replay(&options, input, &mut |_, _, _| {})?.runs)
}

fn means(runs: &[Run]) -> BTreeMap<String, f64> {
    let mut metrics = BTreeMap::<String, f64>::new();
    for (key, value) in runs.iter().flat_map(|run| &run.metrics) {
        *metrics.entry(key.clone()).or_default() += value / runs.len() as f64;
    }
    metrics
}

/// The best flags for the baseline of `options`: one kind of flag at a time under the last of `loads`, the hardest, then the
/// two best joined, then the best few under all. `progress` is called after each of the [`runs`].
///
/// # Errors
/// Nothing to replay.
pub fn tune(options: &Options, input: &Input, loads: &[Load], progress: &mut dyn FnMut()) -> anyhow::Result<Tuned> {
    let own = Flags::of(&options.engine);
    let Some((hardest, others)) = loads.split_last() else { anyhow::bail!("expected at least one load") };
    let mut tried = Vec::<Tried>::new();
    let mut run = |tried: &mut Tried, load: &Load| -> anyhow::Result<()> {
        tried.metrics.insert(load.name.clone(), means(&attempt(options, input, load, tried.flags)?));
        progress();
        Ok(())
    };
    let fresh = |flags: Flags| Tried { flags, shown: flags.over(own), metrics: BTreeMap::new() };
    for flags in candidates(&options.engine) {
        let mut found = fresh(flags);
        run(&mut found, hardest)?;
        tried.push(found);
    }
    let goodput = |tried: &Tried, load: &str| {
        tried.metrics.get(load).and_then(|metrics| metrics.get("goodput_rps")).copied().unwrap_or(0.0)
    };
    let order = |tried: &[Tried]| {
        let mut order: Vec<usize> = (1..tried.len()).collect();
        order.sort_by(|a, b| goodput(&tried[*b], &hardest.name).total_cmp(&goodput(&tried[*a], &hardest.name)));
        order
    };
    let two = order(&tried);
    if let [one, other, ..] = two[..] {
        let mut both = fresh(joined(tried[one].flags, tried[other].flags, own));
        if tried.iter().all(|tried| tried.flags != both.flags) {
            run(&mut both, hardest)?;
            tried.push(both);
        }
    }
    let finalists: Vec<usize> = std::iter::once(0).chain(order(&tried).into_iter().take(FINALISTS - 1)).collect();
    for at in &finalists {
        for load in others {
            run(&mut tried[*at], load)?;
        }
    }
    let best_of = loads.iter().map(|load| (load.name.clone(), best(&tried, |tried| goodput(tried, &load.name))));
    let overall = |tried: &Tried| loads.iter().map(|load| goodput(tried, &load.name).max(1e-9).ln()).sum::<f64>();
    let per_load = loads.len() as f64;
    let of_all: Vec<Tried> = finalists.iter().map(|at| tried[*at].clone()).collect();
    Ok(Tuned { best: best(&of_all, |tried| (overall(tried) / per_load).exp()), best_of: best_of.collect(), tried })
}

/// The flags of the best score, or the first where no others are worth it.
fn best(tried: &[Tried], score: impl Fn(&Tried) -> f64) -> Flags {
    let [own, others @ ..] = tried else { unreachable!("the engine's own flags are tried first") };
    let best = others.iter().fold(own, |best, other| if score(other) > score(best) { other } else { best });
    if score(best) > (1.0 + WORTH) * score(own) { best.flags } else { own.flags }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(seats: u32, tokens: u32) -> EngineConfig {
        EngineConfig { max_num_seqs: seats, max_num_batched_tokens: tokens, ..EngineConfig::default() }
    }

    fn tried(tokens: u32, goodput: f64) -> Tried {
        let flags = Flags::of(&engine(256, tokens));
        let metrics = BTreeMap::from([("goodput_rps".to_owned(), goodput)]);
        Tried { flags, shown: String::new(), metrics: BTreeMap::from([("l".to_owned(), metrics)]) }
    }

    fn best_tokens(tried: &[Tried]) -> u32 {
        best(tried, |tried| tried.metrics["l"]["goodput_rps"]).max_num_batched_tokens
    }

    #[test]
    fn other_flags_must_be_worth_setting() {
        let own = tried(8192, 1.0);
        assert_eq!(best_tokens(&[own.clone(), tried(512, 1.005)]), 8192);
        assert_eq!(best_tokens(&[own.clone(), tried(2048, 1.02), tried(512, 1.2), tried(256, 1.1)]), 512);
        assert_eq!(best_tokens(&[own]), 8192);
    }

    #[test]
    fn vllm_would_take_every_candidate() {
        for engine in [engine(1024, 8192), engine(256, 2048), engine(32, 96)] {
            let all = candidates(&engine);
            assert_eq!(all[0], Flags::of(&engine));
            for flags in all {
                assert!(flags.max_num_batched_tokens >= flags.max_num_seqs, "{flags}");
                assert!(flags.max_num_active_seqs <= flags.max_num_seqs, "{flags}");
            }
        }
    }

    #[test]
    fn flags_are_as_vllm_takes_them() {
        let own = Flags::of(&engine(1024, 8192));
        assert_eq!(own.over(own), "");
        assert_eq!(own.with_tokens(512).over(own), "--max-num-seqs 512 --max-num-batched-tokens 512");
        let flags = Flags { long_prefill_token_threshold: 128, long_prefill_token_threshold_adaptive: true, ..own };
        let shown = "--long-prefill-token-threshold 128 --long-prefill-token-threshold-adaptive";
        assert_eq!(flags.over(own), shown);
        assert_eq!(flags.to_string(), format!("--max-num-seqs 1024 --max-num-batched-tokens 8192 {shown}"));
        let flags = Flags { scheduler_reserve_full_isl: false, watermark: 0.05, ..own };
        assert_eq!(flags.over(own), "--watermark 0.05 --no-scheduler-reserve-full-isl");
    }

    #[test]
    fn joined_flags_are_valid() {
        let own = Flags::of(&engine(1024, 8192));
        let both = joined(Flags { max_num_active_seqs: 512, ..own }, own.with_tokens(256), own);
        assert_eq!((both.max_num_seqs, both.max_num_batched_tokens), (256, 256));
        assert_eq!(joined(own, Flags { max_num_queued_reqs: 9, ..own }, own).max_num_queued_reqs, 9);
    }
}
