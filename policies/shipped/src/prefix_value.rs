//! Keeps what was matched again.
//!
//! Of cached blocks that were matched again, the one with fewer matches goes first, beyond `cap` all alike, and of equals
//! the one further from the head of its chain, so that what is left is still a prefix. Blocks that were never matched go
//! before them, in the host's own order. Of requests the one that has computed the fewest tokens is preempted first.

use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, Policy, export_policy};
use serde::Deserialize;

/// Blocks of a chain that are told apart; with at most [`MAX_CAP`] matches every key is an integer below 2^24, exact.
const POSITIONS: f32 = 65_536.0;

const MAX_CAP: u32 = 255;

#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Options {
    cap: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { cap: 8 }
    }
}

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct PrefixValue {
    /// Matches beyond these do not count.
    cap: f32,
}

impl Policy for PrefixValue {
    const NAME: &'static str = "prefix-value";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Keeps the blocks that were matched again, the head of a chain before its tail.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        let Options { cap } = init.config()?;
        if !(1..=MAX_CAP).contains(&cap) {
            return Err(format!("cap: {cap}: must be in 1..={MAX_CAP}"));
        }
        Ok(Self { cap: cap as f32 })
    }
}

impl EvictionPolicy for PrefixValue {
    const INPUTS: &'static [Column] = &[Column::Position, Column::Hits, Column::ComputedTokens];

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        if memory.subject == Subject::Requests {
            return candidate.computed_tokens();
        }
        let (hits, position) = (candidate.hits(), candidate.position());
        if hits < 1.0 {
            return 0.0;
        }
        // Comparisons: `f32::min` is a call in WebAssembly.
        let counted = if hits < self.cap { hits } else { self.cap };
        let depth = if position < POSITIONS { position } else { POSITIONS - 1.0 };
        counted * POSITIONS - depth
    }
}

export_policy!(eviction: PrefixValue);

#[cfg(test)]
mod tests {
    use super::*;

    fn made(config_json: &str) -> Result<PrefixValue, String> {
        crate::made(config_json)
    }

    #[test]
    fn cap_has_a_range() {
        assert_eq!(made("{}").unwrap().cap, 8.0);
        assert_eq!(made("{\"cap\": 255}").unwrap().cap, 255.0);
        assert_eq!(made("{\"cap\": 0}").unwrap_err(), "cap: 0: must be in 1..=255");
        assert_eq!(made("{\"cap\": 256}").unwrap_err(), "cap: 256: must be in 1..=255");
        assert!(made("{\"caps\": 1}").is_err());
    }

    #[test]
    fn keys_are_exact_at_the_largest_values() {
        let mut policy = made("{\"cap\": 255}").unwrap();
        let mut ranking = meridian_policy_sdk::eviction::Ranking::default();
        let columns = [65_535.0, 65_534.0, 255.0, 255.0, 0.0, 0.0];
        meridian_policy_sdk::eviction::rank(&mut policy, &Memory::default(), 2, &columns, &mut ranking);
        assert_eq!(ranking.keys, [255.0 * POSITIONS - 65_535.0, 255.0 * POSITIONS - 65_534.0]);
    }
}
