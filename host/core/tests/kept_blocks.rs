//! `CachedBlocks` with a policy whose keys depend on time: blocks that are kept go last until their time is over, then by
//! their keys, and the policy is asked again; and what a policy is told of the chains and sessions that used blocks last.

use std::collections::HashMap;

use meridian_core::{
    CachedBlocks, ChainFacts, EngineMirror, EvictionCandidate, EvictionRanker, EvictionSubject, Fault, KeepStats,
    LeavingBlock, Markers, Memory, NewRequest, Ranking, SessionFacts, Stop,
};
use proptest::prelude::*;

const BLOCK_TOKENS: u32 = 16;

/// Keys and times by block number; keeps what it was asked about.
#[derive(Default)]
struct Keeps {
    keys: HashMap<u64, f32>,
    keep_ms: HashMap<u64, f32>,
    seen: Vec<EvictionCandidate>,
}

fn block(candidate: &EvictionCandidate) -> u64 {
    match candidate.subject {
        EvictionSubject::Block(block) => block.0,
        EvictionSubject::Request(request) => request,
    }
}

impl EvictionRanker for Keeps {
    fn keys(&mut self, _: &Memory, _: &[EvictionCandidate], _: &mut Vec<f32>) -> Result<(), Fault> {
        unreachable!("the times are asked for")
    }

    fn rank(&mut self, _: &Memory, candidates: &[EvictionCandidate], ranking: &mut Ranking) -> Result<(), Fault> {
        self.seen.extend_from_slice(candidates);
        let of = |map: &HashMap<u64, f32>, candidate| map.get(&block(candidate)).copied().unwrap_or(0.0);
        ranking.keys.extend(candidates.iter().map(|candidate| of(&self.keys, candidate)));
        ranking.keep_ms.extend(candidates.iter().map(|candidate| of(&self.keep_ms, candidate)));
        Ok(())
    }
}

fn pool(blocks: u32) -> CachedBlocks {
    let mut cached = CachedBlocks::new(blocks, BLOCK_TOKENS);
    cached.resync((0..blocks).map(|block| (block, None)));
    let all: Vec<u32> = (0..blocks).collect();
    cached.taken(&all, 0.0);
    cached
}

/// Full blocks of one chain, head first, that lose their last reader.
fn release(cached: &mut CachedBlocks, policy: &mut Keeps, blocks: &[u32], now_ms: f64) {
    let leaving: Vec<_> = blocks
        .iter()
        .enumerate()
        .map(|(i, block)| LeavingBlock { block: *block, tokens: Some((i as u32 + 1) * BLOCK_TOKENS) })
        .rev()
        .collect();
    cached.leaving(policy, &leaving, now_ms);
}

fn order(cached: &CachedBlocks) -> Vec<u32> {
    cached.order().collect()
}

#[test]
fn a_kept_block_goes_last_until_its_time_is_over_and_is_never_pinned() {
    let mut cached = pool(4);
    let mut policy =
        Keeps { keep_ms: [(0, 100.0), (1, 50.0)].into(), keys: [(0, 2.0), (1, 1.0)].into(), ..Keeps::default() };
    for block in 0..4 {
        release(&mut cached, &mut policy, &[block], 1.0);
    }
    assert_eq!(order(&cached), [2, 3, 1, 0], "kept ones by their keys, behind those that are not");
    assert_eq!(cached.choose(4), [2, 3, 1, 0], "all go when memory is short");
    // The policy would keep it no more.
    policy.keep_ms.clear();
    policy.seen.clear();
    assert_eq!(cached.rekey(&mut policy, 50.9), 0);
    assert_eq!(cached.rekey(&mut policy, 51.0), 1, "the first is over");
    assert_eq!(policy.seen.iter().map(block).collect::<Vec<_>>(), [1]);
    assert_eq!(order(&cached), [2, 3, 1, 0], "its key is higher than theirs");
    policy.keys.insert(0, -1.0);
    assert_eq!(cached.rekey(&mut policy, 1000.0), 1);
    assert_eq!(order(&cached), [0, 2, 3, 1], "the new key counts");
    assert_eq!(cached.rekey(&mut policy, 2000.0), 0, "asked once");
}

#[test]
fn what_ends_the_time_of_a_kept_block_is_counted() {
    let mut cached = pool(6);
    let mut policy = Keeps { keep_ms: (0..5).map(|block| (block, 10.0)).collect(), ..Keeps::default() };
    let all: Vec<u32> = (0..6).collect();
    release(&mut cached, &mut policy, &all, 1.0);
    assert_eq!((cached.kept(), cached.len(), cached.stats().keeps), (5, 6, KeepStats::default()));
    cached.touched(&[0, 5]);
    cached.taken(&[1], 10.9);
    // The engine drops the contents of one; the policy ranks another again.
    cached.emptied(&[2]);
    cached.awaited(&mut policy, &[3], 10.9);
    assert_eq!((cached.kept(), cached.stats().keeps), (2, KeepStats { hits: 1, evicted: 1, expired: 0 }));
    // The time of one is over in the moment in which it is handed out, that of the other later.
    cached.taken(&[4], 11.0);
    assert_eq!((cached.kept(), cached.stats().keeps), (1, KeepStats { hits: 1, evicted: 1, expired: 1 }));
    policy.keep_ms.clear();
    cached.rekey(&mut policy, 20.9);
    cached.touched(&[3]);
    assert_eq!((cached.kept(), cached.stats().keeps), (0, KeepStats { hits: 1, evicted: 1, expired: 2 }));
}

#[test]
fn a_block_that_is_kept_only_because_its_request_came_is_no_hit() {
    let mut cached = pool(2);
    let mut policy = Keeps { keep_ms: [(0, 10.0)].into(), ..Keeps::default() };
    release(&mut cached, &mut policy, &[0, 1], 1.0);
    policy.keep_ms = [(0, 10.0), (1, 10.0)].into();
    cached.awaited(&mut policy, &[0, 1], 2.0);
    assert_eq!(cached.kept(), 2);
    cached.touched(&[0, 1]);
    assert_eq!(cached.stats().keeps, KeepStats { hits: 1, evicted: 0, expired: 0 });
}

#[test]
fn time_is_over_when_blocks_are_chosen_too() {
    let mut cached = pool(3);
    let mut policy = Keeps { keep_ms: [(0, 10.0)].into(), ..Keeps::default() };
    for block in 0..3 {
        release(&mut cached, &mut policy, &[block], 1.0);
    }
    assert_eq!(cached.choose(1), [1]);
    // No step has come between.
    cached.taken(&[1], 20.0);
    assert!(cached.choose(1).is_empty(), "the queue has it at its front");
    assert_eq!(order(&cached), [0, 2]);
}

#[test]
fn times_that_are_no_times_keep_nothing() {
    for keep_ms in [0.0, -5.0, f32::NAN, f32::NEG_INFINITY] {
        let mut cached = pool(2);
        let mut policy = Keeps { keep_ms: [(0, keep_ms)].into(), ..Keeps::default() };
        release(&mut cached, &mut policy, &[0], 1.0);
        release(&mut cached, &mut policy, &[1], 2.0);
        assert_eq!(order(&cached), [0, 1], "{keep_ms}");
    }
    let mut cached = pool(2);
    let mut policy = Keeps { keep_ms: [(0, f32::INFINITY)].into(), ..Keeps::default() };
    release(&mut cached, &mut policy, &[0], 1.0);
    release(&mut cached, &mut policy, &[1], 2.0);
    cached.rekey(&mut policy, 1e300);
    assert_eq!(order(&cached), [1, 0]);
    assert_eq!(cached.choose(2), [1, 0], "even for ever it is not pinned");
}

#[test]
fn at_most_256_blocks_are_asked_about_before_a_step() {
    let mut cached = pool(1000);
    let mut policy = Keeps { keep_ms: (0..1000).map(|block| (block, 5.0)).collect(), ..Keeps::default() };
    let all: Vec<u32> = (0..1000).collect();
    release(&mut cached, &mut policy, &all, 1.0);
    policy.keep_ms.clear();
    let asked: Vec<usize> = (0..5).map(|step| cached.rekey(&mut policy, 10.0 + f64::from(step))).collect();
    assert_eq!(asked, [256, 256, 256, 232, 0]);
}

#[test]
fn a_policy_sees_the_chain_and_the_session_that_used_a_block_last() {
    let mut cached = pool(6);
    let mut policy = Keeps::default();
    let session =
        SessionFacts { session: 7, turn: 3, stopped_for_tool: true, gap_ms: 250.0, ..SessionFacts::default() };
    let facts =
        ChainFacts { tokens: 60, prompt_tokens: 40, priority: -2, token_ms: 0.5, ended_ms: Some(90.0), session };
    cached.matched(&[0, 1]);
    cached.matched(&[0]);
    cached.chain_ends(&[0, 1, 2], &facts);
    release(&mut cached, &mut policy, &[0, 1, 2], 100.0);
    let [tail, middle, head] = [0, 1, 2].map(|i| policy.seen[i]);
    assert_eq!((block(&head), block(&tail)), (0, 2));
    for seen in [head, middle, tail] {
        assert_eq!((seen.chain_tokens, seen.chain_blocks, seen.chain_hits, seen.priority), (60, 3, 3, -2));
        assert_eq!((seen.idle_ms, seen.recompute_ms), (10.0, 8.0));
        assert_eq!((seen.session.session, seen.session.turn, seen.session.gap_ms), (7, 3, 250.0));
        assert!(seen.session.stopped_for_tool && seen.session.last_gap_ms.is_nan());
    }
    assert_eq!([head, middle, tail].map(|seen| seen.is_generated), [false, false, true], "the third ends at 48 tokens");
    assert_eq!(cached.chains(), 1);
    // Another request uses the head, and is preempted.
    cached.touched(&[0]);
    cached.chain_ends(&[0, 3], &ChainFacts { tokens: 20, ..ChainFacts::default() });
    policy.seen.clear();
    release(&mut cached, &mut policy, &[0, 3], 200.0);
    assert_eq!((policy.seen[1].chain_tokens, policy.seen[1].idle_ms, policy.seen[1].chain_hits), (20, 0.0, 2));
    assert_eq!(cached.chains(), 2);
    // What is handed out has no chain; one without blocks is forgotten.
    cached.taken(&[1, 2], 300.0);
    assert_eq!(cached.chains(), 1);
    cached.audit([(0, Some(16)), (3, Some(32))]).expect("it agrees");
}

#[test]
fn the_next_turn_of_a_session_without_a_name_is_found_by_its_prompt() {
    let mut mirror = EngineMirror::new(Markers::default());
    let mut cached = pool(8);
    let mut policy = Keeps::default();
    let arrive = |mirror: &mut EngineMirror, arrival_ms| {
        let new = NewRequest { prompt_tokens: 40, arrival_ms, ..NewRequest::default() };
        mirror.table.insert(&new).expect("finite times")
    };
    let first = arrive(&mut mirror, 0.0);
    mirror.hold_time(100.0);
    let facts = mirror.chain_ends(first, Stop::Turn);
    cached.chain_ends(&[0, 1, 2], &facts);
    mirror.table.remove(first);
    assert_eq!((facts.session.session, facts.session.turn), (1, 1));
    release(&mut cached, &mut policy, &[0, 1, 2], 100.0);
    assert_eq!(cached.continued(&[0]), None, "only the system prompt is the same");
    assert_eq!(cached.continued(&[0, 1]), Some(1), "all whole blocks of the prompt");
    assert_eq!((cached.continued(&[]), cached.continued(&[7]), cached.continued(&[99])), (None, None, None));
    let second = arrive(&mut mirror, 350.0);
    mirror.continues(second, 1);
    mirror.hold_time(400.0);
    let facts = mirror.chain_ends(second, Stop::Tool);
    assert_eq!((facts.session.session, facts.session.turn, facts.session.last_gap_ms), (1, 2, 250.0));
    // A client that names its sessions is believed.
    let new = NewRequest { session: "named", arrival_ms: 500.0, ..NewRequest::default() };
    let named = mirror.table.insert(&new).expect("finite times");
    mirror.continues(named, 1);
    assert_eq!(mirror.chain_ends(named, Stop::Preempted).session.session, 2);
}

#[derive(Clone, Debug)]
enum Operation {
    Release { chain: Vec<usize>, keep_ms: Vec<f32> },
    Take(usize),
    Match(usize),
    Wait(f32),
    Step,
}

fn operation() -> impl Strategy<Value = Operation> {
    let keep = prop_oneof![Just(0.0f32), 0.0..40.0f32, Just(f32::INFINITY)];
    prop_oneof![
        4 => (prop::collection::vec(0..16usize, 1..6), prop::collection::vec(keep, 16))
            .prop_map(|(chain, keep_ms)| Operation::Release { chain, keep_ms }),
        3 => (1..6usize).prop_map(Operation::Take),
        2 => (0..16usize).prop_map(Operation::Match),
        2 => (0.0..30.0f32).prop_map(Operation::Wait),
        2 => Just(Operation::Step),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever comes in whatever order, the order is that of a naive list: not kept before kept, then by key and release.
    #[test]
    fn the_order_is_that_of_a_naive_ranking(operations in prop::collection::vec(operation(), 1..60)) {
        let mut cached = pool(16);
        let mut policy = Keeps { keys: (0..16).map(|block| (block, (block % 3) as f32)).collect(), ..Keeps::default() };
        // Of each cached block the end of its time, its key and its stamp.
        let mut naive: HashMap<u32, (f64, u32, u64)> = HashMap::new();
        let (mut now_ms, mut stamp) = (1.0f64, 0u64);
        for operation in operations {
            match operation {
                Operation::Release { chain, keep_ms } => {
                    let mut blocks: Vec<u32> = chain.iter().map(|block| *block as u32).collect();
                    blocks.sort_unstable();
                    blocks.dedup();
                    blocks.retain(|block| !naive.contains_key(block));
                    policy.keep_ms = keep_ms.iter().enumerate().map(|(block, ms)| (block as u64, *ms)).collect();
                    // Some of them are warm for some time.
                    let session = SessionFacts { session: 1 + blocks.len() as u32 % 3, ..SessionFacts::default() };
                    let (token_ms, ended_ms) = (chain[0] as f32 * 0.1, Some(now_ms));
                    let facts = ChainFacts { tokens: 9, token_ms, ended_ms, session, ..ChainFacts::default() };
                    cached.chain_ends(&blocks, &facts);
                    release(&mut cached, &mut policy, &blocks, now_ms);
                    // Of a batch the lower go in first, those that are not kept before the others, the tail before the head.
                    let mut order: Vec<_> = blocks.iter().rev().enumerate().map(|(i, block)| {
                        let ms = keep_ms[*block as usize];
                        ((ms > 0.0, block % 3, i), *block, ms)
                    }).collect();
                    order.sort_unstable_by_key(|(place, ..)| *place);
                    for (_, block, ms) in order {
                        naive.insert(block, (if ms > 0.0 { now_ms + f64::from(ms) } else { 0.0 }, block % 3, stamp));
                        stamp += 1;
                    }
                    policy.keep_ms.clear();
                }
                Operation::Take(count) => {
                    let taken: Vec<u32> = cached.order().take(count).collect();
                    cached.taken(&taken, now_ms);
                    naive.retain(|block, _| !taken.contains(block));
                }
                Operation::Match(block) => {
                    cached.matched(&[block as u32]);
                    cached.touched(&[block as u32]);
                    naive.remove(&(block as u32));
                }
                Operation::Wait(ms) => {
                    now_ms += f64::from(ms);
                    assert!(cached.warm(now_ms, |session| session % 2 == 0) <= cached.len());
                }
                Operation::Step => {
                    // What is over is asked about, and not kept again.
                    cached.rekey(&mut policy, now_ms);
                }
            }
            cached.rekey(&mut policy, now_ms);
            let mut expected: Vec<_> =
                naive.iter().map(|(block, (until, key, stamp))| ((*until > now_ms, *key, *stamp), *block)).collect();
            expected.sort_unstable();
            prop_assert_eq!(order(&cached), expected.into_iter().map(|(_, block)| block).collect::<Vec<_>>());
            let mut free: Vec<_> = naive.keys().map(|block| (*block, Some(16))).collect();
            free.sort_unstable();
            // Blocks that were handed out or matched are in use.
            prop_assert_eq!(cached.audit(free), Ok(()));
            prop_assert!(cached.chains() <= 16);
        }
    }
}
