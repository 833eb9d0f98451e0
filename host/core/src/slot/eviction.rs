use super::{PolicySlot, Source};
use crate::{Eviction, EvictionCandidate, EvictionRanker, Fault, Memory, Ranking, columns};

/// The eviction slot, owned by a block manager. It is the manager's [`EvictionRanker`], and it never fails.
///
/// ```
/// use meridian_core::slot::EvictionSlot;
/// use meridian_core::{CachedBlocks, Eviction, LeavingBlock, MeridianConfig, native};
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// let mut slot = EvictionSlot::new(native::policy::<Eviction>("tiered-lru", targets, "{}").unwrap(), targets);
/// let control = slot.control();
/// let mut cached = CachedBlocks::new(4, 32);
/// cached.resync([0, 1, 2, 3].map(|block| (block, None)));
/// cached.taken(&[0], 1.0);
/// cached.leaving(&mut slot, &[LeavingBlock { block: 0, tokens: Some(32) }], 2.0);
/// assert_eq!(control.status().decisions, [1, 0, 0]);
/// ```
pub type EvictionSlot = PolicySlot<Eviction>;

impl PolicySlot<Eviction> {
    /// Rank one batch of blocks or requests. Always returns a key for each, or none at all for the manager's own order.
    pub fn decide(&mut self, memory: &Memory, candidates: &[EvictionCandidate]) -> (Source, &Ranking) {
        self.decide_by(memory, candidates.len(), |inputs, out| columns::fill_eviction(inputs, candidates, out))
    }
}

impl EvictionRanker for PolicySlot<Eviction> {
    fn keys(&mut self, memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        keys.extend_from_slice(&self.decide(memory, candidates).1.keys);
        Ok(())
    }

    fn rank(&mut self, memory: &Memory, candidates: &[EvictionCandidate], ranking: &mut Ranking) -> Result<(), Fault> {
        let Ranking { keys, keep_ms } = self.decide(memory, candidates).1;
        ranking.keys.extend_from_slice(keys);
        ranking.keep_ms.extend_from_slice(keep_ms);
        Ok(())
    }

    fn ranking(&self) -> u64 {
        self.facts().stay
    }
}
