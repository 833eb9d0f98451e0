//! Preempts the request that loses the fewest computed tokens.
//!
//! A preempted request computes its whole chain again, so what a preemption wastes is what the victim has computed, not
//! what comes free with it. Of equals the host's order decides, the youngest first. Blocks are left to the host.

use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory, Subject};
use meridian_policy_sdk::{Init, Policy, export_policy};

/// The policy.
#[derive(Clone, Copy, Debug)]
pub struct LeastComputedFirst;

impl Policy for LeastComputedFirst {
    const NAME: &'static str = "least-computed-first";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Preempts the request that has computed the fewest tokens; leaves blocks alone.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl EvictionPolicy for LeastComputedFirst {
    const INPUTS: &'static [Column] = &[Column::ComputedTokens];

    fn key(&self, _memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        candidate.computed_tokens()
    }

    fn applies(&self, memory: &Memory) -> bool {
        memory.subject == Subject::Requests
    }
}

export_policy!(eviction: LeastComputedFirst);
