//! Service levels that an engine could not keep even for a request alone.

use anyhow::Context;
use meridian_bench::sim::{EngineConfig, StepModel};
use meridian_core::config::{ServiceLevel, ServiceLevels};
use meridian_core::text::printable;
use meridian_fleet::{EngineClient, Member};

use crate::bench::engine_named;

/// The longest prompt, or thinking, that is looked at where the KV memory of the engine is not known, tokens.
const LONGEST: u32 = 1 << 20;

/// An engine that serves one request.
pub(crate) struct Alone {
    name: String,
    speed: Speed,
    /// Most tokens of a request.
    longest: u32,
}

enum Speed {
    /// Of a simulated engine, whose steps have at most so many tokens.
    Modelled { step: StepModel, chunk: u32 },
    /// As a running engine learned it, milliseconds: a step, and each token of a decode and of a prompt in it.
    Learned { fixed_ms: f64, decode_ms: f64, prefill_ms: f64 },
}

impl Alone {
    /// A preset, a file that `bench calibrate` wrote, or the address of an engine that runs.
    pub(crate) fn named(given: &str) -> anyhow::Result<Self> {
        if given.contains(':') {
            return Self::running(given).with_context(|| format!("--engine {}", printable(given)));
        }
        let (name, EngineConfig { step, max_num_batched_tokens: chunk, kv_blocks, block_tokens, .. }) =
            engine_named(given)?;
        let longest = kv_blocks.saturating_sub(1).saturating_mul(block_tokens);
        Ok(Self { name, speed: Speed::Modelled { step, chunk }, longest })
    }

    fn running(address: &str) -> anyhow::Result<Self> {
        let status = EngineClient::known_at(address)?.status()?;
        let [fixed_ms, decode_ms, prefill_ms] = status
            .step_time_ms
            .context("has not learned how long its steps take, expected an engine that has served requests")?;
        let speed = Speed::Learned { fixed_ms, decode_ms, prefill_ms };
        Ok(Self { name: address.to_owned(), speed, longest: LONGEST })
    }

    /// What of these levels cannot be kept here, a line each.
    pub(crate) fn warnings(&self, levels: &ServiceLevels) -> Vec<String> {
        levels.iter().flat_map(|(name, level)| self.of_level(name, level)).collect()
    }

    /// From arrival until so many tokens are generated, milliseconds.
    fn takes_ms(&self, prompt: u32, generated: u32) -> f64 {
        match self.speed {
            Speed::Modelled { step, chunk } => step.alone_ms(prompt, generated, chunk),
            Speed::Learned { fixed_ms, decode_ms, prefill_ms } => {
                let decodes = f64::from(generated.saturating_sub(1));
                fixed_ms + prefill_ms * f64::from(prompt) + (fixed_ms + decode_ms) * decodes
            }
        }
    }

    fn of_level(&self, name: &str, level: &ServiceLevel) -> Vec<String> {
        let ServiceLevel { ttfo_ms, prompt_ms_per_token: prompt_ms, think_ms_per_token: think_ms, tpot_ms, .. } = level;
        let mut out = Vec::new();
        let mut cannot = |field: &str, value: &f32, why: String| {
            let engine = printable(&self.name);
            out.push(format!("service_levels.{name}.{field}: {value} cannot be kept on {engine}: {why}"));
        };
        let first_ms = self.takes_ms(1, 1);
        let token_ms = self.takes_ms(1, 2) - first_ms;
        if token_ms > f64::from(*tpot_ms) {
            cannot("tpot_ms", tpot_ms, format!("a token takes {token_ms:.2} ms alone"));
        }
        if first_ms > f64::from(ttfo_ms + prompt_ms) {
            cannot("ttfo_ms", ttfo_ms, format!("the first token takes {first_ms:.2} ms alone"));
            return out;
        }
        let allows_ms =
            |per_token_ms: &f32, tokens: u32| f64::from(*ttfo_ms) + f64::from(*per_token_ms) * f64::from(tokens);
        let takes_ms: [&dyn Fn(u32) -> f64; 2] =
            [&|tokens| self.takes_ms(tokens, 1), &|tokens| self.takes_ms(1, tokens.saturating_add(1))];
        for ((field, per_token_ms, what), takes_ms) in
            [("prompt_ms_per_token", prompt_ms, "prompts"), ("think_ms_per_token", think_ms, "thinking")]
                .into_iter()
                .zip(takes_ms)
        {
            let is_kept = |tokens: u32| takes_ms(tokens) <= allows_ms(per_token_ms, tokens);
            let Some(kept) = longest(self.longest, is_kept) else { continue };
            // An example that is clearly longer. Prompts are computed in chunks: one a little longer may be kept again.
            let longer = kept.saturating_add(kept / 4).max(kept + 1).min(self.longest);
            let tokens = if is_kept(longer) { self.longest } else { longer };
            let [takes, allows] = [takes_ms(tokens), allows_ms(per_token_ms, tokens)].map(shown);
            let why =
                format!("of {what} of over {kept} tokens, {tokens} take {takes} alone, and the level allows {allows}");
            cannot(field, per_token_ms, why);
        }
        out
    }
}

/// A number of tokens that are kept while one more is not; `None` if the most are.
fn longest(most: u32, is_kept: impl Fn(u32) -> bool) -> Option<u32> {
    if is_kept(most) {
        return None;
    }
    let (mut kept, mut missed) = (0, most);
    while missed - kept > 1 {
        let middle = kept + (missed - kept) / 2;
        if is_kept(middle) { kept = middle } else { missed = middle }
    }
    Some(kept)
}

fn shown(ms: f64) -> String {
    if ms < 1e4 { format!("{ms:.1} ms") } else { format!("{:.1} s", ms / 1e3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned() -> Alone {
        let speed = Speed::Learned { fixed_ms: 20.0, decode_ms: 0.1, prefill_ms: 0.3 };
        Alone { name: "here".to_owned(), speed, longest: LONGEST }
    }

    #[test]
    fn a_level_that_every_request_can_have_is_not_warned_of() {
        let level = ServiceLevel { prompt_ms_per_token: 0.5, think_ms_per_token: 50.0, ..ServiceLevel::default() };
        assert_eq!(learned().of_level("chat", &level), Vec::<String>::new());
    }

    #[test]
    fn each_part_of_a_level_that_cannot_be_kept_is_named_with_a_request_that_misses_it() {
        let level = ServiceLevel {
            ttfo_ms: 2020.0,
            prompt_ms_per_token: 0.1,
            think_ms_per_token: 10.1,
            tpot_ms: 15.0,
            ..ServiceLevel::default()
        };
        let lines = learned().of_level("chat", &level);
        // 2,000 ms are left for 0.2 ms a token, and 1,999.7 for 10 ms a token.
        let expected = [
            "service_levels.chat.tpot_ms: 15 cannot be kept on here: a token takes 20.10 ms alone",
            "service_levels.chat.prompt_ms_per_token: 0.1 cannot be kept on here: of prompts of over 10000 tokens, 12500 take \
             3770.0 ms alone, and the level allows 3270.0 ms",
            "service_levels.chat.think_ms_per_token: 10.1 cannot be kept on here: of thinking of over 199 tokens, 248 take \
             5005.1 ms alone, and the level allows 4524.8 ms",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_level_that_not_even_one_token_can_have_is_one_line() {
        let level = ServiceLevel { ttfo_ms: 1.0, ..ServiceLevel::default() };
        let expected = "service_levels.chat.ttfo_ms: 1 cannot be kept on here: the first token takes 20.30 ms alone";
        assert_eq!(learned().of_level("chat", &level), [expected]);
    }

    #[test]
    fn the_longest_that_is_kept_is_found() {
        assert_eq!(longest(10, |tokens| tokens < 4), Some(3));
        assert_eq!(longest(10, |_| true), None);
    }
}
