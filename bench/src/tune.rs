//! The flags of stock vLLM that serve a load best, and the most load that they serve: what an operator finds by trying.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::policies::PolicySet;
use crate::replay::{Input, Options, Rate, replay};
use crate::sim::EngineConfig;

/// Goodput that other flags than the engine's own must win to be worth setting, as a share of it.
pub const WORTH: f64 = 0.01;
/// SLO attainment at which a load counts as served.
pub const SERVED: f64 = 0.9;
/// Values of `max_num_batched_tokens` that are tried, beside the engine's own.
const BATCHED_TOKENS: [u32; 6] = [8192, 4096, 2048, 1024, 512, 256];
/// Parts of it that are tried as `long_prefill_token_threshold`.
const THRESHOLD_PARTS: [u32; 2] = [2, 4];
/// Factor between two rates of the search while no two rates enclose the capacity, and the factor between them at which it ends.
const STRIDE: f64 = 1.5;
const NEAR: f64 = 1.02;
/// Strides up and down before a search gives up.
const MOST_STRIDES: usize = 16;

/// The flags that shape the steps of stock vLLM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flags {
    /// Most tokens of a step.
    pub max_num_batched_tokens: u32,
    /// Most tokens of one prompt in a step; 0 for no limit.
    pub long_prefill_token_threshold: u32,
}

impl Flags {
    /// Those of an engine.
    #[must_use]
    pub fn of(engine: &EngineConfig) -> Self {
        Self {
            max_num_batched_tokens: engine.max_num_batched_tokens,
            long_prefill_token_threshold: engine.long_prefill_token_threshold,
        }
    }

    /// The engine with these.
    #[must_use]
    pub fn set(self, engine: &EngineConfig) -> EngineConfig {
        let Self { max_num_batched_tokens, long_prefill_token_threshold } = self;
        EngineConfig { max_num_batched_tokens, long_prefill_token_threshold, ..engine.clone() }
    }
}

impl fmt::Display for Flags {
    /// As `vllm serve` takes them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--max-num-batched-tokens {}", self.max_num_batched_tokens)?;
        if self.long_prefill_token_threshold > 0 {
            write!(f, " --long-prefill-token-threshold {}", self.long_prefill_token_threshold)?;
        }
        Ok(())
    }
}

/// Flags, and the metrics of stock vLLM with them: means over seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// The flags.
    pub flags: Flags,
    /// By the keys of [`crate::results::METRICS`].
    pub metrics: BTreeMap<String, f64>,
}

impl Tried {
    fn of(&self, key: &str) -> f64 {
        self.metrics.get(key).copied().unwrap_or(0.0)
    }
}

/// What tuning has found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    /// Offered load, requests a second.
    pub rate: f64,
    /// The flags of the best goodput; the engine's own where no others are [worth](WORTH) setting.
    pub best: Flags,
    /// Everything that was tried, the engine's own flags first.
    pub tried: Vec<Tried>,
}

/// The values that are tried first: `max_num_batched_tokens`, the engine's own first. vLLM takes none below `max_num_seqs`.
fn sizes(engine: &EngineConfig) -> Vec<Flags> {
    let own = Flags::of(engine);
    let others = BATCHED_TOKENS.into_iter().filter(|tokens| *tokens >= engine.max_num_seqs);
    let others = others.map(|max_num_batched_tokens| Flags { max_num_batched_tokens, ..own });
    std::iter::once(own).chain(others.filter(|flags| *flags != own)).collect()
}

/// How many runs [`tune`] makes of each seed.
#[must_use]
pub fn runs(engine: &EngineConfig) -> usize {
    sizes(engine).len() + THRESHOLD_PARTS.len()
}

/// The baseline of `options` with these flags at a rate, means over the seeds; the rate in requests a second.
fn attempt(options: &Options, input: &Input, rate: Rate, flags: Flags) -> anyhow::Result<(f64, Tried)> {
    let options = Options {
        engine: flags.set(&options.engine),
        policies: Vec::new(),
        rates: vec![rate],
        budget: None,
        swaps: Vec::new(),
        ..options.clone()
    };
    let results = replay(&options, input, &mut |_, _, _| {})?;
    let mut metrics = BTreeMap::<String, f64>::new();
    for (key, value) in results.runs.iter().flat_map(|run| &run.metrics) {
        *metrics.entry(key.clone()).or_default() += value / results.runs.len() as f64;
    }
    Ok((results.runs.first().map_or(0.0, |run| run.rate), Tried { flags, metrics }))
}

/// The best flags for the baseline of `options` at a rate, by goodput: first `max_num_batched_tokens`, then a limit for one prompt.
/// `progress` is called after each of the [`runs`].
///
/// # Errors
/// Nothing to replay.
pub fn tune(options: &Options, input: &Input, rate: Rate, progress: &mut dyn FnMut()) -> anyhow::Result<Tuned> {
    let mut tried = Vec::<Tried>::new();
    let mut per_second = 0.0;
    let mut try_these = |flags: Flags, tried: &mut Vec<Tried>| -> anyhow::Result<()> {
        let (at, found) = attempt(options, input, rate, flags)?;
        per_second = at;
        tried.push(found);
        progress();
        Ok(())
    };
    for flags in sizes(&options.engine) {
        try_these(flags, &mut tried)?;
    }
    let size = best(&tried);
    for part in THRESHOLD_PARTS {
        let long_prefill_token_threshold = (size.max_num_batched_tokens / part).max(1);
        try_these(Flags { long_prefill_token_threshold, ..size }, &mut tried)?;
    }
    Ok(Tuned { rate: per_second, best: best(&tried), tried })
}

/// The flags of the best goodput, or the first where no others are worth it.
fn best(tried: &[Tried]) -> Flags {
    let goodput = |tried: &Tried| tried.of("goodput_rps");
    let [own, others @ ..] = tried else { unreachable!("the engine's own flags are tried first") };
    let best = others.iter().fold(own, |best, other| if goodput(other) > goodput(best) { other } else { best });
    if goodput(best) > (1.0 + WORTH) * goodput(own) { best.flags } else { own.flags }
}

/// The highest rate, to 2 %, that stock vLLM serves with the best `max_num_batched_tokens` for it: with an SLO attainment of
/// at least [`SERVED`]. `None` where it serves none.
///
/// # Errors
/// Nothing to replay.
pub fn capacity(options: &Options, input: &Input) -> anyhow::Result<Option<f64>> {
    let options = Options { baseline: "fcfs".parse().map_err(anyhow::Error::msg)?, ..options.clone() };
    highest(&options, input, sizes(&options.engine))
}

/// The highest rate that these policies serve with the engine's own flags.
///
/// # Errors
/// A policy that does not load or goes on faulting; nothing to replay.
pub fn capacity_under(policies: &PolicySet, options: &Options, input: &Input) -> anyhow::Result<Option<f64>> {
    let options = Options { baseline: policies.clone(), ..options.clone() };
    highest(&options, input, vec![Flags::of(&options.engine)])
}

fn highest(options: &Options, input: &Input, mut candidates: Vec<Flags>) -> anyhow::Result<Option<f64>> {
    let mut serves = |rate: Rate| -> anyhow::Result<(f64, bool)> {
        let mut per_second = 0.0;
        for at in 0..candidates.len() {
            let (rate, found) = attempt(options, input, rate, candidates[at])?;
            per_second = rate;
            if found.of("slo_attainment") >= SERVED {
                // Likely to do for the next rate too.
                candidates.swap(0, at);
                return Ok((per_second, true));
            }
        }
        Ok((per_second, false))
    };
    let (mut rate, served) = serves(Rate::TimesItsOwn(1.0))?;
    let (mut low, mut high) = if served { (Some(rate), None) } else { (None, Some(rate)) };
    for _ in 0..MOST_STRIDES {
        match (low, high) {
            (Some(_), None) => rate *= STRIDE,
            (None, Some(_)) => rate /= STRIDE,
            _ => break,
        }
        let bound = if serves(Rate::PerSecond(rate))?.1 { &mut low } else { &mut high };
        *bound = Some(rate);
    }
    let (Some(mut low), Some(mut high)) = (low, high) else { return Ok(low) };
    while high / low > NEAR {
        let middle = (low * high).sqrt();
        if serves(Rate::PerSecond(middle))?.1 { low = middle } else { high = middle }
    }
    Ok(Some(low))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(tokens: u32, goodput: f64) -> Tried {
        Tried {
            flags: Flags { max_num_batched_tokens: tokens, long_prefill_token_threshold: 0 },
            metrics: BTreeMap::from([("goodput_rps".to_owned(), goodput)]),
        }
    }

    #[test]
    fn other_flags_must_be_worth_setting() {
        let own = tried(8192, 1.0);
        assert_eq!(best(&[own.clone(), tried(512, 1.005)]).max_num_batched_tokens, 8192);
        assert_eq!(
            best(&[own.clone(), tried(2048, 1.02), tried(512, 1.2), tried(256, 1.1)]).max_num_batched_tokens,
            512
        );
        assert_eq!(best(&[own]).max_num_batched_tokens, 8192);
    }

    #[test]
    fn sizes_begin_with_the_engines_own_and_hold_its_sequences() {
        let engine = EngineConfig { max_num_seqs: 512, max_num_batched_tokens: 3000, ..EngineConfig::default() };
        let tokens: Vec<u32> = sizes(&engine).iter().map(|flags| flags.max_num_batched_tokens).collect();
        assert_eq!(tokens, [3000, 8192, 4096, 2048, 1024, 512]);
    }

    #[test]
    fn flags_are_as_vllm_takes_them() {
        let mut flags = Flags { max_num_batched_tokens: 512, long_prefill_token_threshold: 0 };
        assert_eq!(flags.to_string(), "--max-num-batched-tokens 512");
        flags.long_prefill_token_threshold = 128;
        assert_eq!(flags.to_string(), "--max-num-batched-tokens 512 --long-prefill-token-threshold 128");
    }
}
