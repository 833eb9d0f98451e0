use meridian_policy_sdk::eviction::Memory;

use crate::rank::ordinal;
use crate::{BlockId, BlockTier, Fault, FaultKind, RequestId};

/// Orders what may be evicted within one tier. Which tier goes first is not a policy's to say.
///
/// The block manager calls it from the thread that finishes a request or runs short of memory, with its lock held: it
/// must neither block nor call the manager. It is called in batches: once with the blocks a finished request leaves
/// behind, and once with the live requests of the least critical class when one of them has to be preempted. An empty
/// answer asks for the default: blocks oldest first, requests as [`OwnOrder`] says. After an `Err` or a wrong number of
/// keys that batch goes by the default and the fault is counted. After a panic nothing has changed.
///
/// ```
/// use meridian_core::{EvictionCandidate, EvictionRanker, Fault, Memory};
///
/// /// Keeps what was reused.
/// struct LeastHits;
///
/// impl EvictionRanker for LeastHits {
///     fn keys(&mut self, _memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
///         keys.extend(candidates.iter().map(|candidate| candidate.hits as f32));
///         Ok(())
///     }
/// }
/// # let mut keys = Vec::new();
/// # LeastHits.keys(&Memory::default(), &[], &mut keys).unwrap();
/// ```
pub trait EvictionRanker: Send {
    /// Write one key per candidate into `keys`, which is empty, by what `memory` tells of the pool: lower goes first, NaN last, equal keys by the default.
    ///
    /// # Errors
    /// A fault costs this batch only.
    fn keys(&mut self, memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault>;

    /// Number of the ranking that the keys of a call now belong to. What passes calls on to a policy that can be replaced
    /// gives another number after each replacement: keys of two rankings are never compared.
    fn ranking(&self) -> u64 {
        0
    }
}

/// Something that may be evicted, and the facts about it.
///
/// ```
/// use meridian_core::{BlockId, BlockTier, EvictionCandidate, EvictionSubject};
///
/// let candidate = EvictionCandidate {
///     subject: EvictionSubject::Block(BlockId(9)),
///     tier: BlockTier::ThinkComplete,
///     blocks: 1,
///     position: 4,
///     hits: 0,
///     age_ms: 1500.0,
///     computed_tokens: 16,
/// };
/// assert!(candidate.tier < BlockTier::ThinkActive);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvictionCandidate {
    /// What would go.
    pub subject: EvictionSubject,
    /// Its tier: for a request that of its phase.
    pub tier: BlockTier,
    /// Device blocks that come free: 1 for a block, for a request those that no other request attends.
    pub blocks: u32,
    /// A block's distance from the head of its request's chain, blocks; 0 for a request.
    pub position: u32,
    /// How often a block was matched again; 0 for a request.
    pub hits: u32,
    /// Milliseconds since a block was allocated, or since a request began.
    pub age_ms: f32,
    /// Tokens whose KV would have to be computed again: those of a block; of a request all it has computed. 0 when it is
    /// not known.
    pub computed_tokens: u32,
}

/// What an [`EvictionCandidate`] is.
///
/// ```
/// use meridian_core::{BlockId, EvictionSubject, RequestId};
///
/// assert_ne!(EvictionSubject::Block(BlockId(1)), EvictionSubject::Request(RequestId(1)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EvictionSubject {
    /// A cached block that no live request attends.
    Block(BlockId),
    /// A live request that would be preempted.
    Request(RequestId),
}

/// The default: within a tier the block last used longest ago, of one request its tail before its head, so that what
/// is left is still a prefix; among requests the one that loses the fewest computed tokens, then the fewest blocks, then the
/// youngest. Where no block size is known, no request has computed any.
///
/// It is the rule of the policy `tiered-lru` without a call: no keys, so that the manager's own order holds.
///
/// ```
/// use meridian_core::{EvictionRanker, Memory, OwnOrder};
///
/// let mut keys = Vec::new();
/// OwnOrder.keys(&Memory::default(), &[], &mut keys).unwrap();
/// assert!(keys.is_empty(), "no keys: the manager's own order");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnOrder;

impl EvictionRanker for OwnOrder {
    fn keys(&mut self, _: &Memory, _: &[EvictionCandidate], _: &mut Vec<f32>) -> Result<(), Fault> {
        Ok(())
    }
}

/// The policy and its faults.
pub(super) struct Judge {
    policy: Box<dyn EvictionRanker>,
    pub(super) faults: u64,
    /// Times that the policy was replaced.
    replaced: u64,
}

impl Judge {
    pub(super) fn new(policy: Box<dyn EvictionRanker>) -> Self {
        Self { policy, faults: 0, replaced: 0 }
    }

    /// Use another policy; returns the one before.
    pub(super) fn replace(&mut self, policy: Box<dyn EvictionRanker>) -> Box<dyn EvictionRanker> {
        self.replaced += 1;
        std::mem::replace(&mut self.policy, policy)
    }

    /// The ranking that keys given now belong to.
    pub(super) fn ranking(&self) -> Ranking {
        Ranking { replaced: self.replaced, number: self.policy.ranking() }
    }

    /// A key per candidate, or none for the default. Holds on to nothing when the policy panics.
    pub(super) fn keys(&mut self, memory: &Memory, candidates: &[EvictionCandidate]) -> Vec<f32> {
        let (keys, failed) = keys_or_default(&mut *self.policy, memory, candidates);
        self.faults += u64::from(failed);
        keys
    }
}

/// Whose keys they are: keys of two rankings are never compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranking {
    replaced: u64,
    number: u64,
}

impl Ranking {
    /// The ranking of a policy that stays in its place.
    pub(super) fn of(policy: &dyn EvictionRanker) -> Self {
        Self { replaced: 0, number: policy.ranking() }
    }
}

/// Numbers the rankings in the order in which they were first used, so that what an earlier one ranked goes before what a
/// later one has.
#[derive(Debug)]
pub(super) struct Epochs {
    latest: u32,
    ranking: Option<Ranking>,
}

impl Default for Epochs {
    fn default() -> Self {
        Self { latest: UNKNOWN + 1, ranking: None }
    }
}

/// The epoch of keys that may be those of either of two rankings: none of them counts.
pub(super) const UNKNOWN: u32 = 0;

/// A policy's key as [`ordinal`](crate::rank::ordinal), and which policy's: keys of two epochs are not compared, those of
/// the earlier go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) epoch: u32,
    pub(super) key: u32,
}

impl Rank {
    /// The `i`th of a batch's keys, none of which is there for what is left to the default.
    pub(super) fn of(epoch: u32, keys: &[f32], i: usize) -> Self {
        let key = if epoch == UNKNOWN { 0.0 } else { keys.get(i).copied().unwrap_or(0.0) };
        Self { epoch, key: ordinal(key) }
    }
}

/// Blocks that get a key of the ranking in force at a time, where another has ranked them before.
pub(super) const REKEYED_AT_ONCE: usize = 256;

impl Epochs {
    /// The epoch of what is ranked without a policy.
    pub(super) fn latest(&self) -> u32 {
        self.latest
    }

    /// What has an epoch below this one was ranked by another than `ranking`.
    pub(super) fn least(&self, ranking: Ranking) -> u32 {
        self.latest + u32::from(self.ranking.is_some_and(|latest| latest != ranking))
    }

    /// The epoch of keys between whose asking and answer the ranking went from `before` to `after`.
    pub(super) fn of(&mut self, before: Ranking, after: Ranking) -> u32 {
        if before != after {
            // Replaced meanwhile, by whichever thread.
            return UNKNOWN;
        }
        self.latest = self.least(after);
        self.ranking = Some(after);
        self.latest
    }
}

/// A key per candidate, or none for the default; and whether the policy failed.
pub(crate) fn keys_or_default(
    policy: &mut dyn EvictionRanker,
    memory: &Memory,
    candidates: &[EvictionCandidate],
) -> (Vec<f32>, bool) {
    let mut keys = Vec::new();
    if candidates.is_empty() {
        return (keys, false);
    }
    let answer = policy.keys(memory, candidates, &mut keys).and_then(|()| match keys.len() {
        0 => Ok(()),
        n if n == candidates.len() => Ok(()),
        n => Err(Fault::new(FaultKind::BadAnswer, format!("{n} keys for {} candidates", candidates.len()))),
    });
    if answer.is_err() {
        keys.clear();
    }
    (keys, answer.is_err())
}
