//! What goes first when KV memory is short.
//!
//! ```
//! use meridian_policy_sdk::eviction::{Candidate, Column, EvictionPolicy, Memory};
//! use meridian_policy_sdk::{Init, Policy, export_policy};
//!
//! /// Keeps what was matched again.
//! struct LeastHits;
//!
//! impl Policy for LeastHits {
//!     const NAME: &'static str = "least-hits";
//!     const VERSION: &'static str = "0.1.0";
//!     const SUMMARY: &'static str = "Blocks that were never matched again go first.";
//!
//!     fn new(init: Init<'_>) -> Result<Self, String> {
//!         init.no_config().map(|()| Self)
//!     }
//! }
//!
//! impl EvictionPolicy for LeastHits {
//!     const INPUTS: &'static [Column] = &[Column::Hits];
//!
//!     fn key(&self, _memory: &Memory, candidate: &Candidate<'_, Self>) -> f32 {
//!         candidate.hits()
//!     }
//! }
//!
//! export_policy!(eviction: LeastHits);
//! ```

use crate::Policy;
use crate::inputs::{candidate, column_enum, rows};

column_enum! {
    /// A fact about each candidate that a policy may ask for; `wit/eviction.wit` gives unit and range.
    ///
    /// The discriminants are the order of the WIT enum.
    Column {
        Tier,
        Blocks,
        Position,
        Hits,
        AgeMs,
        ComputedTokens,
    }
}

/// What the candidates of a batch are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Subject {
    /// Cached blocks that a finished request leaves behind.
    #[default]
    Blocks = 0,
    /// Live requests, one of which at least has to be preempted.
    Requests = 1,
}

/// Facts about KV memory; `wit/eviction.wit` documents each.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
#[allow(missing_docs)] // documented in wit/eviction.wit, the one place
pub struct Memory {
    pub now_ms: f64,
    pub subject: Subject,
    pub free_blocks: u32,
    pub cached_blocks: u32,
    pub total_blocks: u32,
}

/// An eviction policy: a key for each candidate of a batch. The host calls it from one thread, with its block manager
/// locked: it must not block.
pub trait EvictionPolicy: Policy {
    /// The columns that `key` reads, no column twice.
    const INPUTS: &'static [Column];

    /// The candidate's key: lower goes first, equal keys go by the host's default, NaN goes last.
    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32;

    /// Whether the policy ranks this batch at all; `false` leaves it to the host's default.
    fn applies(&self, _memory: &Memory) -> bool {
        true
    }
}

candidate! {
    /// A block or a request of the batch, seen through the columns its policy asked for.
    Candidate for EvictionPolicy by Column;
    tier Tier "0 dead thinking, 1 of a request that does not answer, 2 of an answer.";
    blocks Blocks "Device blocks that come free.";
    position Position "Distance of a block from the head of its request's chain, blocks; 0 for a request.";
    hits Hits "How often a block was matched again; 0 for a request.";
    age_ms AgeMs "Milliseconds since a block was allocated, or since a request began to hold blocks.";
    computed_tokens ComputedTokens "Tokens whose KV would have to be computed again; 0 when the host does not know.";
}

/// Rank one batch with `policy`, into `keys`, which is cleared. `columns` is laid out as in WIT `eviction.rank`.
///
/// # Panics
/// When `columns` does not hold `P::INPUTS.len() * candidates` values.
pub fn rank<P: EvictionPolicy>(policy: &P, memory: &Memory, candidates: usize, columns: &[f32], keys: &mut Vec<f32>) {
    keys.clear();
    if policy.applies(memory) {
        let rows = rows(P::INPUTS.len(), candidates, columns);
        keys.extend((0..candidates).map(|i| policy.key(memory, &Candidate::new(&rows, i))));
    }
}
