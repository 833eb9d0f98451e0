//! The order of eviction of the KV blocks of an engine.

mod cached;
mod chains;
pub mod order;
mod policy;

pub use cached::{CachedBlocks, CachedStats, KeepStats, Leaving, LeavingBlock};
pub use chains::ChainFacts;
pub(crate) use chains::WARM;
pub use policy::{EvictionCandidate, EvictionRanker, EvictionSubject, OwnOrder, ranked_or_default};
