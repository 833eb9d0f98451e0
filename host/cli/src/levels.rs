//! What service levels mean on an engine: which requests would be late there even if they were alone.

use anyhow::Context;
use meridian_bench::sim::StepModel;
use meridian_core::config::{ServiceLevel, ServiceLevels};
use meridian_core::text::printable;
use meridian_fleet::{EngineClient, Member};

use crate::bench::engine_named;

/// Longest prompt and thought that are looked at where the KV memory of the engine is not known.
const LONGEST: u32 = 1 << 20;

/// An engine that serves one request.
pub(crate) struct Alone {
    name: String,
    step: StepModel,
    /// Most tokens of a step.
    chunk: u32,
    /// Most tokens of a request.
    longest: u32,
}

impl Alone {
    /// A preset, a file that `bench calibrate` wrote, or the address of an engine that runs.
    pub(crate) fn named(given: &str) -> anyhow::Result<Self> {
        if given.contains(':') {
            return Self::running(given).with_context(|| format!("--engine {}", printable(given)));
        }
        let (name, engine) = engine_named(given)?;
        let longest = engine.kv_blocks.saturating_sub(1).saturating_mul(engine.block_tokens);
        Ok(Self { name, step: engine.step, chunk: engine.max_num_batched_tokens, longest })
    }

    /// As a running engine has learned it from its own steps.
    fn running(address: &str) -> anyhow::Result<Self> {
        let status = EngineClient::known_at(address)?.status()?;
        let learned =
            status.step_time_ms.context("has not learned how long its steps take, expected one that serves")?;
        Ok(Self { name: address.to_owned(), step: learned_step(learned), chunk: LONGEST, longest: LONGEST })
    }

    /// What of these levels cannot be kept here, a line each.
    pub(crate) fn warnings(&self, levels: &ServiceLevels) -> Vec<String> {
        levels.iter().flat_map(|(name, level)| self.of_level(name, level)).collect()
    }

    fn of_level(&self, name: &str, level: &ServiceLevel) -> Vec<String> {
        let engine = printable(&self.name);
        let [ttfo_ms, prompt_ms, think_ms, tpot_ms] =
            [level.ttfo_ms, level.prompt_ms_per_token, level.think_ms_per_token, level.tpot_ms].map(f64::from);
        let mut out = Vec::new();
        let token_ms = self.step.alone_ms(1, 2, self.chunk) - self.step.alone_ms(1, 1, self.chunk);
        if token_ms > tpot_ms {
            out.push(format!(
                "service_levels.{name}.tpot_ms: {tpot_ms} cannot be kept on {engine}: a token takes {token_ms:.3} ms alone"
            ));
        }
        for (what, field, allowed_ms, takes_ms) in [
            (
                "a prompt",
                "prompt_ms_per_token",
                prompt_ms,
                &(|n| self.step.alone_ms(n, 1, self.chunk)) as &dyn Fn(u32) -> f64,
            ),
            ("a thought", "think_ms_per_token", think_ms, &|n| self.step.alone_ms(1, n.saturating_add(1), self.chunk)),
        ] {
            let allows_ms = |tokens: u32| ttfo_ms + allowed_ms * f64::from(tokens);
            let Some(kept) = longest(self.longest, |tokens| takes_ms(tokens) <= allows_ms(tokens)) else { continue };
            // One that is clearly longer.
            let tokens = kept.saturating_add(kept / 4).max(kept + 1).min(self.longest);
            out.push(format!(
                "service_levels.{name}.{field}: {allowed_ms} cannot be kept on {engine} for {what} of over {kept} tokens: one of \
                 {tokens} takes {} alone, and the level allows {}",
                seconds(takes_ms(tokens)),
                seconds(allows_ms(tokens)),
            ));
        }
        out
    }
}

/// The step time that an engine learned: fixed, a decode token, a prefill token.
fn learned_step([fixed_ms, decode_ms, prefill_ms]: [f64; 3]) -> StepModel {
    StepModel { fixed_ms, request_ms: (decode_ms - prefill_ms).max(0.0), token_ms: prefill_ms, ..StepModel::default() }
}

/// The last number up to which all are kept; `None` if the most is. Allowances grow evenly, and what work takes at least so.
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

fn seconds(ms: f64) -> String {
    format!("{:.1} s", ms / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learned() -> Alone {
        // 20 ms a step, 0.1 ms more for a decode and 0.3 ms for a token of a prompt.
        let step = learned_step([20.0, 0.1, 0.3]);
        Alone { name: "here".to_owned(), step, chunk: LONGEST, longest: LONGEST }
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
            think_ms_per_token: 10.0,
            tpot_ms: 15.0,
            ..ServiceLevel::default()
        };
        let lines = learned().of_level("chat", &level);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(
            lines[0].starts_with("service_levels.chat.tpot_ms: 15 cannot be kept on here: a token takes 20."),
            "{lines:?}"
        );
        // 2,000 ms are left for 0.2 ms a token, and for 10.3 ms a token.
        let expected = "for a prompt of over 10000 tokens: one of 12500 takes 3.8 s alone, and the level allows 3.3 s";
        assert!(lines[1].ends_with(expected), "{lines:?}");
        assert!(lines[2].contains("for a thought of over 19"), "{lines:?}");
    }

    #[test]
    fn nothing_is_kept_where_not_even_one_token_is() {
        assert_eq!(longest(10, |_| false), Some(0));
        assert_eq!(longest(10, |tokens| tokens < 4), Some(3));
        assert_eq!(longest(10, |_| true), None);
    }
}
