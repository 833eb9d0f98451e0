//! Least recently used inside a tier: the native default of the eviction slot.
//!
//! Blocks keep the host's own order, which is that of use: the block last used longest ago goes first, of one request
//! its tail before its head, so that what is left is still a prefix. Among requests the one that loses the fewest computed
//! tokens goes first; of equals, and where the host knows no tokens, the host's order decides.

use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, Policy, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct TieredLru;

impl Policy for TieredLru {
    const NAME: &'static str = "tiered-lru";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Inside a tier the block used longest ago goes first, the request that loses least.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl EvictionPolicy for TieredLru {
    const INPUTS: &'static [Column] = &[Column::ComputedTokens];

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        match memory.subject {
            Subject::Blocks => 0.0,
            Subject::Requests => candidate.computed_tokens(),
        }
    }
}

export_policy!(eviction: TieredLru);
