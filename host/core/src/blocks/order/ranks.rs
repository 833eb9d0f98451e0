//! The ranks that a policy gave to blocks.

use meridian_policy_sdk::eviction::Ranking;

use crate::{EvictionRanker, rank::ordinal};

/// The identity of a ranking: keys of two rankings are never compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankingId {
    /// Number of the policy among those of its owner.
    pub policy: u64,
    /// [`EvictionRanker::ranking`] of that policy.
    pub ranking: u64,
}

impl RankingId {
    /// The ranking of a policy that stays in place.
    pub(crate) fn of(policy: &dyn EvictionRanker) -> Self {
        Self { policy: 0, ranking: policy.ranking() }
    }
}

/// Numbers the rankings in the order of their first use, so that blocks of an earlier ranking go before blocks of a
/// later one.
#[derive(Debug)]
pub struct Epochs {
    latest: u32,
    ranking: Option<RankingId>,
}

impl Default for Epochs {
    fn default() -> Self {
        Self { latest: UNKNOWN + 1, ranking: None }
    }
}

/// The epoch of keys that may belong to either of two rankings: they do not count.
pub(crate) const UNKNOWN: u32 = 0;

/// A policy's key as [`ordinal`], its epoch, and whether the block is kept: keys of two epochs are not compared; the
/// earlier epoch goes first, and in an epoch a kept block after all others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    /// Number of the ranking.
    pub epoch: u32,
    /// Whether the block is kept for a time.
    pub is_kept: bool,
    /// The key; the lowest goes first.
    pub key: u32,
}

impl Rank {
    /// The `i`th of a batch's keys; no key for a candidate that is left to the default.
    pub(crate) fn of(epoch: u32, keys: &[f32], i: usize) -> Self {
        let key = if epoch == UNKNOWN { 0.0 } else { keys.get(i).copied().unwrap_or(0.0) };
        Self { epoch, is_kept: false, key: ordinal(key) }
    }
}

/// A time that is not negative, as a number of the same order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Until(u64);

impl Until {
    pub(crate) fn of(ms: f64) -> Self {
        Self(ms.max(0.0).to_bits())
    }
}

/// A rank, and the end of the time for which its block is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ranked {
    /// The rank.
    pub rank: Rank,
    pub(crate) until: Until,
}

impl Ranked {
    /// The `i`th of a batch's ranks, given at `now_ms`.
    #[must_use]
    pub fn of(epoch: u32, ranking: &Ranking, i: usize, now_ms: f64) -> Self {
        let rank = Rank::of(epoch, &ranking.keys, i);
        match ranking.keep_ms.get(i) {
            Some(ms) if *ms > 0.0 && epoch != UNKNOWN => {
                Self { rank: Rank { is_kept: true, ..rank }, until: Until::of(now_ms + f64::from(*ms)) }
            }
            _ => Self { rank, until: Until::default() },
        }
    }

    /// This rank for a block that is not kept.
    #[must_use]
    pub fn not_kept(self) -> Self {
        Self { rank: Rank { is_kept: false, ..self.rank }, until: Until::default() }
    }
}

/// Number of blocks that get a key of the present ranking in one call, where another ranking had ranked them.
pub const REKEYED_AT_ONCE: usize = 256;

impl Epochs {
    /// The epoch of blocks that are ranked without a policy.
    pub(crate) fn latest(&self) -> u32 {
        self.latest
    }

    /// Blocks with an epoch below this one have another ranking than `ranking`.
    #[must_use]
    pub fn least(&self, ranking: RankingId) -> u32 {
        self.latest + u32::from(self.ranking.is_some_and(|latest| latest != ranking))
    }

    /// The epoch of keys when the ranking changed from `before` to `after` between the call and its answer.
    pub fn of(&mut self, before: RankingId, after: RankingId) -> u32 {
        if before != after {
            // Another thread replaced it meanwhile.
            return UNKNOWN;
        }
        self.latest = self.least(after);
        self.ranking = Some(after);
        self.latest
    }
}
