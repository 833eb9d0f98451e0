//! The rules of the block manager, one test each.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use meridian_core::{
    BlockId, BlockTier, EvictionCandidate, EvictionRanker, EvictionSubject, Fault, FaultKind, Markers, Memory, Ranking,
    ThinkPhase,
};
use meridian_memory::{
    BeginKv, BlockLocation, BlockManager, Error, Fabric, FabricError, KvMemory, PhaseAwareBlockManager, PhaseRouter,
    RequestId, RoutedRequest, Sections,
};

use BlockTier::{OutputCritical, ThinkActive, ThinkComplete};

const A: RequestId = RequestId(1);
const B: RequestId = RequestId(2);
const C: RequestId = RequestId(3);
const STRIPS: BeginKv = BeginKv { phase: ThinkPhase::Prefill, resumed: None, strips_reasoning: true, now_ms: 0.0 };
const KEEPS: BeginKv = BeginKv { strips_reasoning: false, ..STRIPS };

fn memory(capacity: u64) -> KvMemory {
    KvMemory { capacity_bytes: capacity, block_size_bytes: 1, think_fraction_limit: 1.0 }
}

fn manager(capacity: u64) -> PhaseAwareBlockManager {
    PhaseAwareBlockManager::new(&memory(capacity)).unwrap()
}

/// Begin a request and take it through its phases with this many blocks of each section.
fn run(manager: &PhaseAwareBlockManager, request: RequestId, begin: &BeginKv, sections: [u32; 3]) -> [Vec<BlockId>; 3] {
    manager.begin(request, begin).unwrap();
    let prompt = manager.allocate(request, sections[0]).unwrap().blocks;
    manager.set_phase(request, ThinkPhase::Think, 1).unwrap();
    let think = manager.allocate(request, sections[1]).unwrap().blocks;
    if sections[2] == 0 {
        return [prompt, think, vec![]];
    }
    manager.set_phase(request, ThinkPhase::Output, 1).unwrap();
    [prompt, think, manager.allocate(request, sections[2]).unwrap().blocks]
}

fn tiers(manager: &PhaseAwareBlockManager, blocks: &[Vec<BlockId>; 3]) -> [BlockTier; 3] {
    [0, 1, 2].map(|section| manager.tier(blocks[section][0]).unwrap())
}

#[test]
fn tiers_follow_the_phase() {
    let manager = manager(10);
    let [prompt, think, _] = run(&manager, A, &STRIPS, [1, 1, 0]);
    assert_eq!([manager.tier(prompt[0]), manager.tier(think[0])], [Some(ThinkActive); 2]);
    manager.set_phase(A, ThinkPhase::Prefill, 1).unwrap();
    assert_eq!(manager.tier(think[0]), Some(ThinkActive), "it still thinks");
    manager.set_phase(A, ThinkPhase::Output, 1).unwrap();
    let blocks = [prompt, think, manager.allocate(A, 1).unwrap().blocks];
    assert_eq!(tiers(&manager, &blocks), [OutputCritical, ThinkComplete, OutputCritical]);
    manager.set_phase(A, ThinkPhase::Think, 1).unwrap();
    assert_eq!(tiers(&manager, &blocks)[0], OutputCritical, "one way");
    manager.audit().unwrap();
}

#[test]
fn what_a_finished_request_leaves_behind() {
    for (begin, expected) in [(STRIPS, [ThinkActive, ThinkComplete, ThinkComplete]), (KEEPS, [ThinkActive; 3])] {
        let manager = manager(10);
        let blocks = run(&manager, A, &begin, [2, 2, 2]);
        manager.finish(A, 1.0).unwrap();
        assert_eq!(tiers(&manager, &blocks), expected);
        assert_eq!((manager.stats().cached, manager.stats().attended), (6, 0));
        manager.audit().unwrap();
    }
    let manager = manager(10);
    manager.begin(A, &STRIPS).unwrap();
    manager.set_phase(A, ThinkPhase::Output, 0).unwrap();
    let output = manager.allocate(A, 1).unwrap().blocks[0];
    assert!(manager.release(A));
    assert_eq!(manager.tier(output), Some(ThinkActive), "an answer without thinking can match again");
    assert!(!manager.release(A), "only once");
}

#[test]
fn thinking_is_never_dropped_while_its_request_answers() {
    let manager = manager(6);
    let [_, think, _] = run(&manager, A, &STRIPS, [1, 3, 1]);
    assert_eq!(manager.tier(think[0]), Some(ThinkComplete));
    manager.begin(B, &KEEPS).unwrap();
    assert_eq!(manager.allocate(B, 2), Err(Error::OutOfBlocks { needed: 2, available: 1 }));
    assert_eq!(manager.demote(think[0], ThinkComplete), Ok(()));
    assert_eq!(manager.allocate(B, 2), Err(Error::OutOfBlocks { needed: 2, available: 1 }));
    let evicted = manager.evict_for(B, 1).unwrap();
    assert_eq!((evicted.preempted, evicted.blocks.len(), evicted.by_tier), (vec![A], 5, [0, 0, 5]));
    assert_eq!(manager.stats().output_critical_evictions(), 5);
    manager.audit().unwrap();
}

#[test]
fn the_cache_goes_dead_thinking_first_then_oldest_and_tail_before_head() {
    let manager = manager(8);
    let first = run(&manager, A, &KEEPS, [2, 0, 0]);
    manager.finish(A, 1.0).unwrap();
    let second = run(&manager, B, &STRIPS, [2, 2, 1]);
    manager.finish(B, 2.0).unwrap();
    manager.begin(C, &KEEPS).unwrap();
    let evicted = manager.allocate(C, 8).unwrap().evicted;
    let expected = [second[2][0], second[1][1], second[1][0], first[0][1], first[0][0], second[0][1], second[0][0]];
    assert_eq!(evicted.blocks, expected);
    assert_eq!((evicted.by_tier, manager.stats().dead_think_blocks_evicted()), ([3, 4, 0], 3));
}

#[test]
fn a_touch_keeps_blocks_from_going_and_counts_them_once() {
    let manager = manager(4);
    let [prompt, ..] = run(&manager, A, &KEEPS, [2, 0, 0]);
    manager.finish(A, 1.0).unwrap();
    manager.begin(B, &KEEPS).unwrap();
    manager.begin(C, &BeginKv { phase: ThinkPhase::Output, ..KEEPS }).unwrap();
    assert_eq!(manager.touch(B, &[prompt[0], prompt[0]]), Ok(1));
    assert_eq!(manager.tier(prompt[0]), Some(ThinkActive));
    assert_eq!(manager.touch(C, &prompt), Ok(2));
    assert_eq!(manager.tier(prompt[0]), Some(OutputCritical), "the most critical of both");
    let stats = manager.stats();
    assert_eq!((stats.attended, stats.think_attended, stats.free, stats.cached), (2, 1, 2, 0));
    manager.finish(C, 2.0).unwrap();
    assert_eq!(manager.tier(prompt[0]), Some(ThinkActive));
    assert_eq!(manager.is_attended(prompt[1]), Some(false));
    assert_eq!(manager.touch(B, &[BlockId(99)]), Err(Error::UnknownBlock { block: BlockId(99) }));
    manager.audit().unwrap();
}

#[test]
fn allocation_is_all_or_nothing() {
    let manager = manager(4);
    run(&manager, A, &STRIPS, [1, 1, 0]);
    manager.finish(A, 1.0).unwrap();
    run(&manager, B, &KEEPS, [1, 0, 0]);
    let before = manager.stats();
    assert_eq!(manager.allocate(B, 4), Err(Error::OutOfBlocks { needed: 4, available: 3 }));
    assert_eq!(manager.evict_for(B, 3), Err(Error::OutOfBlocks { needed: 3, available: 2 }));
    assert_eq!(manager.allocate(C, 1), Err(Error::UnknownRequest { id: C }));
    assert_eq!(manager.stats(), before);
    assert_eq!(manager.allocate(B, 3).unwrap().evicted.blocks.len(), 2);
}

#[test]
fn thinking_may_hold_only_its_share() {
    let memory = KvMemory { think_fraction_limit: 0.5, ..memory(10) };
    let manager = PhaseAwareBlockManager::new(&memory).unwrap();
    run(&manager, A, &KEEPS, [1, 3, 0]);
    manager.begin(B, &KEEPS).unwrap();
    assert_eq!(manager.allocate(B, 2), Err(Error::ThinkLimit { needed: 2, attended: 4, limit: 5 }));
    manager.set_phase(A, ThinkPhase::Output, 1).unwrap();
    assert_eq!(manager.allocate(B, 5).unwrap().blocks.len(), 5);
    assert_eq!(manager.allocate(A, 1).unwrap().blocks.len(), 1, "answers are not limited");
    manager.audit().unwrap();
}

#[test]
fn a_request_alone_is_not_limited() {
    let memory = KvMemory { think_fraction_limit: 0.5, ..memory(10) };
    let manager = PhaseAwareBlockManager::new(&memory).unwrap();
    manager.begin(A, &KEEPS).unwrap();
    manager.begin(B, &KEEPS).unwrap();
    assert_eq!(manager.allocate(A, 6).unwrap().blocks.len(), 6, "a prompt beyond the limit");
    assert_eq!(manager.allocate(B, 1), Err(Error::ThinkLimit { needed: 1, attended: 6, limit: 5 }));
    assert_eq!(manager.allocate(A, 1).unwrap().blocks.len(), 1, "and it goes on");
    manager.set_phase(A, ThinkPhase::Output, 0).unwrap();
    assert_eq!(manager.allocate(B, 3).unwrap().blocks.len(), 3);
    manager.audit().unwrap();
}

#[test]
fn dead_thinking_is_known_after_a_preemption() {
    let manager = manager(10);
    run(&manager, A, &STRIPS, [2, 3, 1]);
    manager.begin(B, &KEEPS).unwrap();
    assert_eq!(manager.evict_for(B, 10), Err(Error::OutOfBlocks { needed: 10, available: 6 }));
    assert_eq!(manager.evict_for(B, 6).unwrap().preempted, [A]);
    let resumed = Some(Sections { prompt_blocks: 2, think_blocks: 3 });
    manager.begin(A, &BeginKv { resumed, ..STRIPS }).unwrap();
    // All is prefill to the engine, in two chunks.
    let mut blocks = manager.allocate(A, 4).unwrap().blocks;
    blocks.extend(manager.allocate(A, 2).unwrap().blocks);
    manager.set_phase(A, ThinkPhase::Output, 40).unwrap();
    blocks.extend(manager.allocate(A, 1).unwrap().blocks);
    let tiers = || blocks.iter().map(|block| manager.tier(*block).unwrap()).collect::<Vec<_>>();
    let (prompt, think, output) = (OutputCritical, ThinkComplete, OutputCritical);
    assert_eq!(tiers(), [prompt, prompt, think, think, think, output, output]);
    manager.finish(A, 1.0).unwrap();
    let (kept, dead) = (ThinkActive, ThinkComplete);
    assert_eq!(tiers(), [kept, kept, dead, dead, dead, dead, dead]);
    manager.audit().unwrap();
}

/// What the prompt, think and output blocks of a request are once it ended, with its phase from the router.
fn ends_as(markers: Markers, prompt: &[u32], tokens: &[u32]) -> Vec<BlockTier> {
    let (router, manager) = (PhaseRouter::new(markers), manager(20));
    router.register(A, &RoutedRequest { prompt, ..RoutedRequest::default() }).unwrap();
    manager.begin(A, &STRIPS).unwrap();
    let tell = || {
        let progress = router.progress(A).unwrap();
        manager.set_phase(A, progress.phase, progress.think_tokens).unwrap();
    };
    tell();
    let mut blocks = manager.allocate(A, 1).unwrap().blocks;
    for token in tokens {
        router.process_token(A, *token);
        tell();
        // One token a block.
        blocks.extend(manager.allocate(A, 1).unwrap().blocks);
    }
    assert_eq!(manager.tier(blocks[0]), Some(OutputCritical), "it answers");
    manager.audit().unwrap();
    manager.finish(A, 1.0).unwrap();
    manager.audit().unwrap();
    blocks.iter().map(|block| manager.tier(*block).unwrap()).collect()
}

#[test]
fn the_router_tells_the_manager_what_it_needs() {
    let markers = || Markers::new(vec![vec![7]], vec![vec![8]], vec![]).unwrap();
    let (kept, dead) = (ThinkActive, ThinkComplete);
    assert_eq!(ends_as(Markers::default(), &[1], &[40, 41]), [kept; 3], "single-phase");
    assert_eq!(ends_as(markers(), &[1, 7, 8], &[40, 41]), [kept; 3], "the prompt ends with the end marker");
    assert_eq!(ends_as(markers(), &[1], &[40, 41]), [kept; 3], "undecided, and it answers directly");
    assert_eq!(ends_as(markers(), &[1, 7], &[40, 8, 41]), [kept, dead, dead, dead]);
    assert_eq!(ends_as(markers(), &[1], &[7, 40, 8, 41]), [kept, dead, dead, dead, dead]);
    let resuming = || markers().with_resuming(true);
    assert_eq!(ends_as(resuming(), &[1, 7], &[8, 41, 7, 42, 8, 43]), [kept, dead, dead, dead, dead, dead, dead]);
    let expected = [kept, kept, kept, dead, dead, dead, dead];
    assert_eq!(ends_as(resuming(), &[1], &[40, 41, 7, 42, 8, 43]), expected, "what it answered before it thought");
}

#[test]
fn victims_think_before_they_answer_and_lose_the_least() {
    let manager = manager(12);
    run(&manager, A, &STRIPS, [1, 1, 1]);
    run(&manager, B, &STRIPS, [2, 1, 0]);
    run(&manager, C, &STRIPS, [1, 1, 0]);
    let (young, asks) = (RequestId(4), RequestId(5));
    run(&manager, young, &STRIPS, [1, 1, 0]);
    run(&manager, asks, &STRIPS, [2, 0, 0]);
    assert_eq!(manager.evict_for(asks, 1).unwrap().preempted, [young], "as few as C, but younger");
    assert_eq!(manager.evict_for(asks, 3).unwrap().preempted, [C, B]);
    let last = manager.evict_for(asks, 1).unwrap();
    assert_eq!((last.preempted, last.by_tier), (vec![A], [0, 0, 3]));
    assert_eq!(manager.evict_for(asks, 1), Err(Error::OutOfBlocks { needed: 1, available: 0 }));
    assert_eq!(manager.stats().preemptions, 4);
    manager.begin(A, &STRIPS).unwrap();
}

#[test]
fn nobody_is_preempted_for_nothing() {
    let manager = manager(6);
    let [prompt, ..] = run(&manager, A, &STRIPS, [3, 0, 0]);
    manager.begin(B, &STRIPS).unwrap();
    manager.touch(B, &prompt).unwrap();
    run(&manager, C, &STRIPS, [2, 0, 0]);
    let asks = RequestId(4);
    manager.begin(asks, &STRIPS).unwrap();
    assert_eq!(manager.evict_for(asks, 1).unwrap().preempted, [C], "A and B free nothing, each alone");
    let both = manager.evict_for(asks, 1).unwrap();
    assert_eq!((both.preempted, both.blocks.len()), (vec![B, A], 3));
    manager.audit().unwrap();
}

#[test]
fn demotion_only_lowers() {
    let manager = manager(8);
    let blocks = run(&manager, A, &KEEPS, [1, 1, 1]);
    let prompt = blocks[0][0];
    let refused = |from, to| Err(Error::TierRaised { block: prompt, from, to });
    assert_eq!(manager.demote(prompt, ThinkActive), refused(OutputCritical, ThinkActive), "it is attended");
    manager.demote(prompt, ThinkComplete).unwrap();
    assert_eq!(manager.tier(prompt), Some(ThinkComplete));
    manager.finish(A, 1.0).unwrap();
    assert_eq!(tiers(&manager, &blocks), [ThinkComplete, ThinkActive, ThinkActive], "the mark holds");
    assert_eq!(manager.demote(prompt, ThinkActive), refused(ThinkComplete, ThinkActive));
    manager.demote(blocks[2][0], ThinkComplete).unwrap();
    manager.begin(B, &KEEPS).unwrap();
    manager.touch(B, &[prompt]).unwrap();
    assert_eq!(manager.tier(prompt), Some(ThinkActive), "it did match");
    assert_eq!(manager.stats().cached_by_tier, [1, 1, 0]);
    manager.audit().unwrap();
}

#[test]
fn freeing_caches_nothing_but_leaves_what_others_attend() {
    let manager = manager(6);
    let [prompt, think, _] = run(&manager, A, &KEEPS, [2, 1, 0]);
    manager.begin(B, &KEEPS).unwrap();
    manager.touch(B, &prompt[..1]).unwrap();
    assert_eq!(manager.free(A), Ok(vec![prompt[1], think[0]]));
    assert_eq!((manager.block_location(think[0]), manager.is_attended(prompt[0])), (None, Some(true)));
    assert_eq!(manager.discard(prompt[0]), Err(Error::BlockAttended { block: prompt[0] }));
    manager.finish(B, 1.0).unwrap();
    manager.discard(prompt[0]).unwrap();
    assert_eq!(manager.stats().free, 6);
    assert_eq!(manager.stats().evictions, [0; 3]);
}

#[test]
fn memory_out_of_range_is_named() {
    let refusal = |memory: KvMemory| PhaseAwareBlockManager::new(&memory).unwrap_err().to_string();
    let zero = KvMemory { block_size_bytes: 0, ..memory(1) };
    assert_eq!(refusal(zero), "kv_memory.block_size_bytes: 0: must be above 0");
    assert!(refusal(memory(0)).starts_with("kv_memory.capacity_bytes: 0: must hold"));
    assert!(refusal(memory(1 << 32)).starts_with("kv_memory.capacity_bytes: 4294967296"));
    let nan = KvMemory { think_fraction_limit: f64::NAN, ..memory(1) };
    assert_eq!(refusal(nan), "kv_memory.think_fraction_limit: NaN: must be in (0, 1]");
    assert_eq!(KvMemory { think_fraction_limit: 0.7, ..memory(10) }.think_limit_blocks(), 7);
}

#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Vec<EvictionCandidate>>>>);

impl EvictionRanker for Recorder {
    fn keys(&mut self, _memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        self.0.lock().unwrap().push(candidates.to_vec());
        // Head before tail, and the request that loses most: the reverse of the default.
        keys.extend(candidates.iter().map(|c| c.position as f32 - c.blocks as f32));
        Ok(())
    }
}

#[test]
fn a_policy_orders_inside_a_tier_only() {
    let recorder = Recorder::default();
    let manager = manager(8).with_policy(recorder.clone());
    let blocks = run(&manager, A, &STRIPS, [2, 2, 1]);
    manager.begin(B, &KEEPS).unwrap();
    manager.touch(B, &blocks[0][..1]).unwrap();
    manager.finish(B, 40.0).unwrap();
    manager.finish(A, 50.0).unwrap();
    {
        let batches = recorder.0.lock().unwrap();
        assert_eq!(batches.len(), 1, "B left nothing behind");
        assert_eq!(batches[0].iter().map(|c| c.position).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        assert_eq!(batches[0].iter().map(|c| c.hits).collect::<Vec<_>>(), [1, 0, 0, 0, 0]);
        assert_eq!(batches[0][0].age_ms, 50.0);
    }
    manager.begin(C, &KEEPS).unwrap();
    let evicted = manager.allocate(C, 8).unwrap().evicted.blocks;
    let expected = [blocks[1][0], blocks[1][1], blocks[2][0], blocks[0][0], blocks[0][1]];
    assert_eq!(evicted, expected);
}

#[test]
fn tokens_to_compute_again_are_told_where_a_block_has_a_known_size() {
    for (block_tokens, expected) in [(0, [0, 0]), (16, [16, 48]), (u32::MAX, [u32::MAX; 2])] {
        let recorder = Recorder::default();
        let manager = manager(8).with_policy(recorder.clone()).with_block_tokens(block_tokens);
        run(&manager, A, &KEEPS, [1, 0, 0]);
        manager.finish(A, 1.0).unwrap();
        manager.begin(B, &KEEPS).unwrap();
        manager.allocate(B, 3).unwrap();
        manager.begin(C, &KEEPS).unwrap();
        manager.evict_for(C, 4).unwrap();
        let batches = recorder.0.lock().unwrap();
        let told: Vec<_> = batches.iter().map(|batch| batch[0].computed_tokens).collect();
        assert_eq!(told, expected, "{batches:?}");
    }
}

#[test]
fn a_time_that_is_no_number_is_not_told() {
    let recorder = Recorder::default();
    let manager = manager(8).with_policy(recorder.clone());
    let told = [f64::NAN, 30.0, f64::INFINITY, f64::NAN, 10.0, f64::NEG_INFINITY, 50.0];
    for (id, now_ms) in (1..).zip(told) {
        manager.begin(RequestId(id), &BeginKv { now_ms, ..KEEPS }).unwrap();
        manager.allocate(RequestId(id), 1).unwrap();
        manager.finish(RequestId(id), now_ms).unwrap();
    }
    manager.begin(RequestId(99), &KEEPS).unwrap();
    manager.allocate(RequestId(99), 1).unwrap();
    manager.finish(RequestId(99), 75.0).unwrap();
    let ages: Vec<f32> = recorder.0.lock().unwrap().iter().map(|batch| batch[0].age_ms).collect();
    assert_eq!(ages, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 25.0], "75 after the last good time, 50");
}

struct Faulty;

impl EvictionRanker for Faulty {
    fn keys(&mut self, _memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        keys.push(f32::NAN);
        if candidates.len() == 2 { Err(Fault::new(FaultKind::Trap, "unreachable")) } else { Ok(()) }
    }
}

#[test]
fn a_faulty_policy_costs_its_batch() {
    let manager = manager(8).with_policy(Faulty);
    for (request, blocks) in [(A, 3), (B, 2), (C, 1)] {
        manager.begin(request, &KEEPS).unwrap();
        manager.allocate(request, blocks).unwrap();
    }
    manager.finish(A, 1.0).unwrap();
    manager.finish(B, 1.0).unwrap();
    assert_eq!(manager.stats().policy_faults, 2, "a wrong number of keys, then an error");
    manager.replace_policy(Box::new(meridian_core::OwnOrder));
    manager.finish(C, 1.0).unwrap();
    assert_eq!(manager.stats().policy_faults, 2);
    manager.audit().unwrap();
}

/// The later blocks first or last; keys of the two do not compare.
struct ByNumber(f32);

impl EvictionRanker for ByNumber {
    fn keys(&mut self, _memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        keys.extend(candidates.iter().map(|candidate| match candidate.subject {
            EvictionSubject::Block(block) => self.0 * (1.0 + block.0 as f32),
            EvictionSubject::Request(_) => 0.0,
        }));
        Ok(())
    }
}

#[test]
fn a_policy_that_takes_over_is_asked_about_what_is_cached() {
    let manager = manager(8).with_policy(ByNumber(1.0));
    for (request, blocks) in [(A, 3), (B, 3)] {
        manager.begin(request, &KEEPS).unwrap();
        manager.allocate(request, blocks).unwrap();
        manager.finish(request, 1.0).unwrap();
    }
    manager.replace_policy(Box::new(ByNumber(-1.0)));
    manager.begin(C, &KEEPS).unwrap();
    let evicted = |count| {
        let ids = manager.allocate(C, count).unwrap().evicted.blocks;
        ids.iter().map(|id| id.0).collect::<Vec<_>>()
    };
    assert_eq!(evicted(3), [0], "not asked yet: by the keys of the one before");
    manager.begin(A, &KEEPS).unwrap();
    manager.finish(A, 2.0).unwrap();
    assert_eq!(evicted(2), [5, 4]);
    manager.audit().unwrap();
}

/// Keeps the first block for a time, once; the others have lower keys.
struct KeepsFirst {
    keep_ms: f32,
    asked: Arc<Mutex<Vec<u64>>>,
}

impl EvictionRanker for KeepsFirst {
    fn keys(&mut self, _: &Memory, _: &[EvictionCandidate], _: &mut Vec<f32>) -> Result<(), Fault> {
        Ok(())
    }

    fn rank(&mut self, _: &Memory, candidates: &[EvictionCandidate], ranking: &mut Ranking) -> Result<(), Fault> {
        for candidate in candidates {
            let EvictionSubject::Block(block) = candidate.subject else { continue };
            self.asked.lock().unwrap().push(block.0);
            ranking.keys.push(block.0 as f32);
            ranking.keep_ms.push(if block.0 == 0 { std::mem::take(&mut self.keep_ms) } else { 0.0 });
        }
        Ok(())
    }
}

#[test]
fn a_kept_block_goes_last_until_its_time_is_over_and_is_never_pinned() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let kept = |end_ms: f64, wanted: u32| {
        asked.lock().unwrap().clear();
        let manager = manager(3).with_policy(KeepsFirst { keep_ms: 50.0, asked: asked.clone() });
        manager.begin(A, &KEEPS).unwrap();
        manager.allocate(A, 3).unwrap();
        manager.finish(A, 1.0).unwrap();
        manager.begin(B, &BeginKv { now_ms: end_ms, ..KEEPS }).unwrap();
        manager.audit().unwrap();
        let evicted = manager.allocate(B, wanted).unwrap().evicted.blocks;
        manager.finish(B, end_ms).unwrap();
        manager.audit().unwrap();
        (evicted.iter().map(|block| block.0).collect::<Vec<_>>(), asked.lock().unwrap().len())
    };
    assert_eq!(kept(50.9, 1), (vec![1], 4), "the first is kept");
    assert_eq!(kept(50.9, 3), (vec![1, 2, 0], 6), "all go when memory is short");
    assert_eq!(kept(51.0, 1), (vec![0], 4), "its time is over");
    assert_eq!(kept(51.0, 0), (vec![], 4), "the policy is asked about it again");
}

/// A fabric during whose transfers something else happens.
#[derive(Default)]
struct Meddler {
    manager: Arc<OnceLock<Weak<PhaseAwareBlockManager>>>,
    discarded: Arc<AtomicU64>,
}

impl Meddler {
    fn meddle(&self) {
        let manager = self.manager.get().unwrap().upgrade().unwrap();
        manager.begin(C, &KEEPS).unwrap();
        manager.allocate(C, manager.stats().free + manager.stats().cached).unwrap();
        manager.audit().unwrap();
    }
}

impl Fabric for Meddler {
    fn offload(&self, block: BlockId, _index: u32) -> Result<u64, FabricError> {
        if block.0 == 1 {
            self.meddle();
        }
        Ok(block.0)
    }

    fn ingest(&self, _handle: u64, _index: u32) -> Result<(), FabricError> {
        self.meddle();
        Ok(())
    }

    fn discard(&self, handle: u64) {
        self.discarded.fetch_add(handle + 1, Ordering::Relaxed);
    }
}

#[test]
fn a_block_that_is_evicted_while_it_moves_stays_evicted() {
    let meddler = Meddler::default();
    let (link, discarded) = (meddler.manager.clone(), meddler.discarded.clone());
    let manager = Arc::new(manager(4).with_fabric(meddler));
    link.set(Arc::downgrade(&manager)).unwrap();
    let [prompt, ..] = run(&manager, A, &KEEPS, [3, 0, 0]);
    assert_eq!(manager.offload_block(prompt[0]), Err(Error::BlockAttended { block: prompt[0] }));
    manager.finish(A, 1.0).unwrap();
    assert_eq!(manager.offload_block(prompt[2]), Ok(BlockLocation::Remote { handle: 2 }));
    assert_eq!(manager.offload_block(prompt[1]), Err(Error::UnknownBlock { block: prompt[1] }));
    assert_eq!(discarded.load(Ordering::Relaxed), 2, "the copy that nobody needs");
    manager.free(C).unwrap();
    manager.begin(B, &KEEPS).unwrap();
    let elsewhere = Error::BlockElsewhere { block: prompt[2], expected: "on the device" };
    assert_eq!(manager.touch(B, &prompt[2..]), Err(elsewhere));
    manager.ingest_block(prompt[2]).unwrap();
    assert!(matches!(manager.block_location(prompt[2]), Some(BlockLocation::Device { .. })));
    assert_eq!(manager.touch(B, &prompt[2..]), Ok(1), "the slot was held although everything else was taken");
    manager.audit().unwrap();
}

/// A fabric that names a copy by its block, and in whose transfers another is tried.
#[derive(Default)]
struct ByBlock {
    manager: Arc<OnceLock<Weak<PhaseAwareBlockManager>>>,
    stored: Arc<Mutex<BTreeSet<u64>>>,
}

impl ByBlock {
    fn try_again(&self, block: u64) {
        let (manager, block) = (self.manager.get().unwrap().upgrade().unwrap(), BlockId(block));
        let again = match manager.block_location(block).unwrap() {
            BlockLocation::Device { .. } => manager.offload_block(block).err(),
            BlockLocation::Remote { .. } => manager.ingest_block(block).err(),
        };
        assert_eq!(again, Some(Error::BlockMoving { block }));
    }
}

impl Fabric for ByBlock {
    fn offload(&self, block: BlockId, _index: u32) -> Result<u64, FabricError> {
        self.try_again(block.0);
        self.stored.lock().unwrap().insert(block.0);
        Ok(block.0)
    }

    fn ingest(&self, handle: u64, _index: u32) -> Result<(), FabricError> {
        self.try_again(handle);
        Ok(())
    }

    fn discard(&self, handle: u64) {
        if self.manager.get().unwrap().upgrade().unwrap().block_location(BlockId(handle)).is_some() {
            // Back on the device: a copy that was stored now would go with this one.
            self.try_again(handle);
        }
        assert!(self.stored.lock().unwrap().remove(&handle), "discarded once");
    }
}

fn by_block(remote_blocks: u32) -> (Arc<PhaseAwareBlockManager>, Arc<Mutex<BTreeSet<u64>>>) {
    let fabric = ByBlock::default();
    let (link, stored) = (fabric.manager.clone(), fabric.stored.clone());
    let manager = Arc::new(manager(4).with_fabric(fabric).with_remote_limit(remote_blocks));
    link.set(Arc::downgrade(&manager)).unwrap();
    (manager, stored)
}

#[test]
fn a_block_that_moves_is_not_moved_again() {
    let (manager, stored) = by_block(8);
    let [prompt, ..] = run(&manager, A, &KEEPS, [1, 0, 0]);
    manager.finish(A, 1.0).unwrap();
    for _ in 0..2 {
        let handle = prompt[0].0;
        assert_eq!(manager.offload_block(prompt[0]), Ok(BlockLocation::Remote { handle }));
        assert_eq!(*stored.lock().unwrap(), BTreeSet::from([handle]), "the only copy");
        manager.ingest_block(prompt[0]).unwrap();
        assert!(stored.lock().unwrap().is_empty());
    }
    manager.audit().unwrap();
}

#[test]
fn remote_blocks_are_bounded() {
    let (manager, stored) = by_block(2);
    let [prompt, think, output] = run(&manager, A, &STRIPS, [2, 1, 1]);
    manager.finish(A, 1.0).unwrap();
    for block in [prompt[0], think[0]] {
        manager.offload_block(block).unwrap();
    }
    manager.offload_block(prompt[1]).unwrap();
    assert_eq!(manager.block_location(think[0]), None, "dead thinking goes first");
    manager.offload_block(output[0]).unwrap();
    assert_eq!(manager.block_location(prompt[1]), None, "then the tail of the prompt");
    assert_eq!(*stored.lock().unwrap(), BTreeSet::from([prompt[0].0, output[0].0]));
    let stats = manager.stats();
    assert_eq!((stats.remote, stats.remote_evictions, stats.evictions), (2, 2, [0; 3]));
    manager.audit().unwrap();
}

#[test]
fn threads_leave_the_books_exact() {
    let manager = manager(64);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let manager = &manager;
            scope.spawn(move || {
                for round in 0..500u64 {
                    let request = RequestId(thread * 1000 + round);
                    manager.begin(request, &STRIPS).unwrap();
                    // Another thread may preempt this request at any time.
                    let _ = manager.allocate(request, 8 + (round % 16) as u32);
                    let _ = manager.set_phase(request, ThinkPhase::Think, 1);
                    if manager.allocate(request, 8).is_err() {
                        let _ = manager.evict_for(request, 8);
                    }
                    let _ = manager.set_phase(request, ThinkPhase::Output, 1);
                    manager.release(request);
                }
            });
        }
    });
    manager.audit().unwrap();
    assert_eq!((manager.stats().requests, manager.stats().attended), (0, 0));
}
