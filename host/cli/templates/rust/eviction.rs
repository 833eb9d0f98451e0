//! Blocks that were never matched again go first, the end of a chain before its head.

use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory};
use meridian_policy_sdk::{Init, Policy, export_policy};

/// The policy.
pub struct {{Type}};

impl Policy for {{Type}} {
    const NAME: &'static str = "{{name}}";
    const VERSION: &'static str = env!("CARGO_PKG_VERSION");
    const SUMMARY: &'static str = "Blocks with few matches and far from the head of their chain go first.";

    fn new(init: Init<'_>) -> Result<Self, String> {
        init.no_config().map(|()| Self)
    }
}

impl EvictionPolicy for {{Type}} {
    const INPUTS: &'static [Column] = &[Column::Hits, Column::Position];

    fn key(&self, _memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
        candidate.hits() - candidate.position()
    }
}

export_policy!(eviction: {{Type}});
