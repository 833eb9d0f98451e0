use meridian_core::order::RankingId;
use meridian_core::{EvictionCandidate, EvictionRanker, Memory, Ranking, ranked_or_default};

/// The policy and its faults.
pub(super) struct Judge {
    policy: Box<dyn EvictionRanker>,
    pub(super) faults: u64,
    /// Number of replacements of the policy.
    replaced: u64,
}

impl Judge {
    pub(super) fn new(policy: Box<dyn EvictionRanker>) -> Self {
        Self { policy, faults: 0, replaced: 0 }
    }

    /// Use another policy; returns the previous one.
    pub(super) fn replace(&mut self, policy: Box<dyn EvictionRanker>) -> Box<dyn EvictionRanker> {
        self.replaced += 1;
        std::mem::replace(&mut self.policy, policy)
    }

    /// The ranking of keys from now.
    pub(super) fn ranking(&self) -> RankingId {
        RankingId { policy: self.replaced, ranking: self.policy.ranking() }
    }

    /// One key per candidate, or none for the default, and times to keep. Keeps nothing when the policy panics.
    pub(super) fn rank(&mut self, memory: &Memory, candidates: &[EvictionCandidate]) -> Ranking {
        let (ranking, failed) = ranked_or_default(&mut *self.policy, memory, candidates);
        self.faults += u64::from(failed);
        ranking
    }
}
