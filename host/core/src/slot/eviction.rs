use super::{PolicySlot, Source};
use crate::{Eviction, EvictionCandidate, EvictionRanker, Fault, Memory, Ranking, columns};

/// The eviction slot, owned by a block manager. It is the manager's [`EvictionRanker`], and it never fails.
///
/// ```
/// use meridian_core::slot::EvictionSlot;
/// use meridian_core::{BeginKv, Eviction, KvMemory, MeridianConfig, PhaseAwareBlockManager, RequestId, native};
///
/// let targets = MeridianConfig::default().scheduler.targets();
/// let slot = EvictionSlot::new(native::policy::<Eviction>("tiered-lru", targets, "{}").unwrap(), targets);
/// let control = slot.control();
/// let memory = KvMemory { capacity_bytes: 8, block_size_bytes: 1, think_fraction_limit: 1.0 };
/// let blocks = PhaseAwareBlockManager::new(&memory).unwrap().with_policy(slot);
/// # use meridian_core::BlockManager;
/// blocks.begin(RequestId(1), &BeginKv::default()).unwrap();
/// blocks.allocate(RequestId(1), 3).unwrap();
/// blocks.finish(RequestId(1), 20.0).unwrap();
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
