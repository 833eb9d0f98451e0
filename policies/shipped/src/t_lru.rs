//! Least recently used, but first what a next turn can do without (T-LRU).
//!
//! The end of each chain goes first: as many tokens as the session's next turn may compute again, beside its new ones, and
//! still have its first token within `ttft_ms`. What is left goes by use, as with `lru`. So short conversations, which meet
//! the target without any cache, make room for long ones. What a waiting request needs is kept until it is admitted.

use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, Policy, awaited_since, export_policy};
use serde::Deserialize;

/// Goes before the others of its tier.
const SPARE: f32 = 0.0;
const NEEDED: f32 = 1.0;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    ttft_ms: f32,
    new_tokens: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { ttft_ms: 200.0, new_tokens: 512 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct TLru {
    ttft_ms: f32,
    new_tokens: f32,
}

impl Policy for TLru {
    const NAME: &'static str = "t-lru";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "First what a next turn can compute again within its TTFT target, then least recently used.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { ttft_ms, new_tokens } = init.config()?;
        if !(ttft_ms > 0.0 && ttft_ms <= 3.6e6) {
            return Err(format!("ttft_ms: {ttft_ms}: must be above 0 and at most 3600000"));
        }
        Ok(Self { ttft_ms, new_tokens: new_tokens as f32 })
    }
}

impl EvictionPolicy for TLru {
    const INPUTS: &'static [Column] =
        &[Column::Position, Column::ComputedTokens, Column::ChainTokens, Column::RecomputeMs, Column::Awaited];

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        let (tokens, recompute_ms) = (candidate.computed_tokens(), candidate.recompute_ms());
        if memory.subject == Subject::Requests {
            return tokens;
        }
        if candidate.awaited() > 0.0 {
            return awaited_since(memory.now_ms).0;
        }
        if tokens <= 0.0 || recompute_ms <= 0.0 || candidate.chain_tokens() <= 0.0 {
            return NEEDED;
        }
        // Without this block the next turn computes from its first token to the end of the chain, and its own.
        let missing = candidate.chain_tokens() - candidate.position() * tokens + self.new_tokens;
        if missing * (recompute_ms / tokens) <= self.ttft_ms { SPARE } else { NEEDED }
    }

    fn keep_ms(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if candidate.awaited() > 0.0 { awaited_since(memory.now_ms).1 } else { 0.0 }
    }
}

export_policy!(eviction: TLru);
