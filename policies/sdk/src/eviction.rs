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
use crate::inputs::{candidate, column_enum, facts, rows};

__eviction_columns! {
    column_enum!
    /// A fact about each candidate that a policy may ask for.
    ///
    /// The discriminants are the order of the WIT enum.
    Column
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

__eviction_memory! {
    facts!
    /// Facts about KV memory now.
    #[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
    Memory {}
}

/// An eviction policy: a key for each candidate of a batch. The host calls it from one thread, with its block manager
/// locked: it must not block.
pub trait EvictionPolicy: Policy {
    /// The columns that `key` reads, no column twice.
    const INPUTS: &'static [Column];

    /// Take note of the batch, before the first key is asked for.
    fn observe(&mut self, _memory: &Memory, _batch: &Candidates<'_, Self>) {}

    /// The candidate's key: lower goes first, equal keys go by the host's default, NaN goes last.
    fn key(&self, memory: &Memory, candidate: &Candidate<'_, Self>) -> f32;

    /// For how many milliseconds from now the block is kept: until then it goes after the blocks of its tier that are not
    /// kept, then by its key, and the policy is asked about it again. 0, less or NaN: not at all. Means nothing for requests.
    fn keep_ms(&self, _memory: &Memory, _candidate: &Candidate<'_, Self>) -> f32 {
        0.0
    }

    /// Whether the policy ranks this batch at all; `false` leaves it to the host's default.
    fn applies(&self, _memory: &Memory) -> bool {
        true
    }
}

__eviction_columns! {
    candidate!
    /// A block or a request of the batch, seen through the columns its policy asked for.
    Candidate in Candidates for EvictionPolicy by Column
}

/// What a policy decided; the fields are those of the WIT record `ranking`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ranking {
    /// A key for each candidate; empty leaves the batch to the default.
    pub keys: Vec<f32>,
    /// For how many milliseconds each block is kept; empty when none is.
    pub keep_ms: Vec<f32>,
}

impl Ranking {
    /// Forget the last decision, keep its memory.
    pub fn clear(&mut self) {
        self.keys.clear();
        self.keep_ms.clear();
    }
}

/// Rank one batch with `policy`, into `ranking`, which is cleared. `columns` is laid out as in WIT `eviction.rank`.
///
/// # Panics
/// When `columns` does not hold `P::INPUTS.len() * candidates` values.
pub fn rank<P: EvictionPolicy>(
    policy: &mut P,
    memory: &Memory,
    candidates: usize,
    columns: &[f32],
    ranking: &mut Ranking,
) {
    ranking.clear();
    if policy.applies(memory) {
        let rows = Candidates::<P>::rows(candidates, columns);
        let observed = rows;
        policy.observe(memory, &Candidates::new(&observed, candidates));
        let policy = &*policy;
        ranking.keys.extend((0..candidates).map(|i| policy.key(memory, &Candidate::new(&rows, i))));
        if memory.subject == Subject::Blocks {
            ranking.keep_ms.extend((0..candidates).map(|i| policy.keep_ms(memory, &Candidate::new(&rows, i))));
            if !ranking.keep_ms.iter().any(|ms| *ms > 0.0) {
                ranking.keep_ms.clear();
            }
        }
    }
}
