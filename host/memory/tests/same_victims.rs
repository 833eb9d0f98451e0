//! `tiered-lru` is one rule: the block manager's own order and the slot's native default choose the same victims.

use meridian_core::slot::EvictionSlot;
use meridian_core::{Eviction, OwnOrder, SchedulerConfig, ThinkPhase, native};
use meridian_memory::{BeginKv, BlockManager, KvMemory, PhaseAwareBlockManager, RequestId};
use proptest::prelude::*;

const BEGIN: BeginKv = BeginKv { phase: ThinkPhase::Prefill, resumed: None, strips_reasoning: false, now_ms: 0.0 };
const ASKS: RequestId = RequestId(1000);

/// Requests with so many blocks of their own, and so many of the first one's.
fn victims(manager: &PhaseAwareBlockManager, requests: &[(u32, usize)], needed: u32) -> Vec<RequestId> {
    let mut first = Vec::new();
    for (id, (own, shared)) in (0..).map(RequestId).zip(requests) {
        manager.begin(id, &BEGIN).unwrap();
        manager.touch(id, &first[..(*shared).min(first.len())]).unwrap();
        let blocks = manager.allocate(id, *own).unwrap().blocks;
        if id == RequestId(0) {
            first = blocks;
        }
    }
    manager.begin(ASKS, &BEGIN).unwrap();
    manager.evict_for(ASKS, needed).map(|evicted| evicted.preempted).unwrap_or_default()
}

fn manager() -> PhaseAwareBlockManager {
    let memory = KvMemory { capacity_bytes: 512, block_size_bytes: 1, think_fraction_limit: 1.0 };
    PhaseAwareBlockManager::new(&memory).unwrap().with_block_tokens(16)
}

fn shipped() -> EvictionSlot {
    let targets = SchedulerConfig::default().targets();
    EvictionSlot::new(native::policy::<Eviction>("tiered-lru", targets, "{}").unwrap(), targets)
}

#[test]
fn what_was_computed_counts_and_not_what_comes_free() {
    // The second has computed six blocks of which one is its own, the third two of its own.
    let requests = [(5, 0), (1, 5), (2, 0)];
    assert_eq!(victims(&manager().with_policy(OwnOrder), &requests, 1), [RequestId(2)]);
    assert_eq!(victims(&manager().with_policy(shipped()), &requests, 1), [RequestId(2)]);
}

proptest! {
    #[test]
    fn both_choose_the_same(requests in proptest::collection::vec((1u32..20, 0usize..20), 1..20), needed in 1u32..60) {
        let (own, slot) = (manager().with_policy(OwnOrder), manager().with_policy(shipped()));
        prop_assert_eq!(victims(&own, &requests, needed), victims(&slot, &requests, needed));
    }
}
