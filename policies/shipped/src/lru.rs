//! vLLM's own order: what stock does, as a policy to compare others with.
//!
//! Of cached blocks the one used longest ago goes first, of one request its tail before its head: the host's own order, so
//! all keys are equal. Of requests the one that was admitted last is preempted first, as vLLM's FCFS does.

use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, Policy, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct Lru;

impl Policy for Lru {
    const NAME: &'static str = "lru";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str =
        "The block used longest ago goes first, the request that was admitted last: stock vLLM.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl EvictionPolicy for Lru {
    const INPUTS: &'static [Column] = &[Column::AgeMs];

    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        match memory.subject {
            Subject::Blocks => 0.0,
            Subject::Requests => candidate.age_ms(),
        }
    }
}

export_policy!(eviction: Lru);
