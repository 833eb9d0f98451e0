//! What a waiting request's prompt has matched: the policy is asked about it when the request arrives, and again when nobody
//! waits for it any more.

use meridian_core::{
    CachedBlocks, ChainFacts, EvictionCandidate, EvictionRanker, Fault, LeavingBlock, Memory, Ranking,
};

/// Keeps what is awaited, by the order of arrival; the rest by age.
#[derive(Default)]
struct Awaiting {
    /// Candidates of each call, and how many of them were awaited.
    asked: Vec<(usize, usize)>,
}

impl EvictionRanker for Awaiting {
    fn keys(&mut self, _: &Memory, _: &[EvictionCandidate], _: &mut Vec<f32>) -> Result<(), Fault> {
        Ok(())
    }

    fn rank(&mut self, memory: &Memory, candidates: &[EvictionCandidate], ranking: &mut Ranking) -> Result<(), Fault> {
        let now = memory.now_ms as f32;
        self.asked.push((candidates.len(), candidates.iter().filter(|candidate| candidate.is_awaited).count()));
        for candidate in candidates {
            ranking.keys.push(if candidate.is_awaited { -now } else { now - candidate.age_ms });
            ranking.keep_ms.push(if candidate.is_awaited { 1e6 } else { 0.0 });
        }
        Ok(())
    }
}

const BLOCKS: u32 = 8;

/// Four chains of two blocks each, which left one after the other.
fn four_chains(policy: &mut Awaiting) -> CachedBlocks {
    let mut cached = CachedBlocks::new(BLOCKS, 16);
    cached.resync((0..BLOCKS).map(|block| (block, None)));
    for chain in 0..4 {
        let (blocks, now_ms) = ([2 * chain, 2 * chain + 1], f64::from(chain) * 10.0);
        cached.taken(&blocks, now_ms);
        cached.chain_ends(&blocks, &ChainFacts { tokens: 32, ended_ms: Some(now_ms), ..ChainFacts::default() });
        let leaving = [(blocks[1], 32), (blocks[0], 16)];
        cached.leaving(policy, &leaving.map(|(block, tokens)| LeavingBlock { block, tokens: Some(tokens) }), now_ms);
    }
    cached
}

fn order(cached: &CachedBlocks) -> Vec<u32> {
    cached.order().collect()
}

fn audit(cached: &CachedBlocks) {
    cached.audit(order(cached).into_iter().map(|block| (block, Some(16)))).expect("the mirror agrees with itself");
}

#[test]
fn what_is_awaited_goes_last_the_earliest_after_all_others() {
    let mut policy = Awaiting::default();
    let mut cached = four_chains(&mut policy);
    assert_eq!(order(&cached), [1, 0, 3, 2, 5, 4, 7, 6]);
    cached.awaited(&mut policy, &[0, 1], 50.0);
    cached.awaited(&mut policy, &[2, 3], 60.0);
    assert_eq!(policy.asked[4..], [(2, 2), (2, 2)]);
    assert_eq!(order(&cached), [5, 4, 7, 6, 3, 2, 1, 0]);
    assert_eq!(cached.choose(3), [5, 4, 7]);
    audit(&cached);
}

#[test]
fn admission_ends_the_wait() {
    let mut policy = Awaiting::default();
    let mut cached = four_chains(&mut policy);
    cached.awaited(&mut policy, &[0, 1], 50.0);
    cached.touched(&[0, 1]);
    cached.leaving(&mut policy, &[LeavingBlock { block: 0, tokens: Some(16) }], 70.0);
    assert_eq!(policy.asked.last(), Some(&(1, 0)));
}

#[test]
fn after_an_abort_the_policy_is_asked_again() {
    let mut policy = Awaiting::default();
    let mut cached = four_chains(&mut policy);
    cached.awaited(&mut policy, &[0, 1], 50.0);
    cached.not_awaited(&[0, 1, 4]);
    audit(&cached);
    assert_eq!(cached.rekey(&mut policy, 55.0), 2, "the blocks of the abort alone");
    assert_eq!(policy.asked.last(), Some(&(2, 0)));
    assert_eq!(order(&cached), [1, 0, 3, 2, 5, 4, 7, 6]);
    assert_eq!(cached.rekey(&mut policy, 56.0), 0);
}

#[test]
fn blocks_in_use_and_unknown_ones_are_awaited_without_a_question() {
    let mut policy = Awaiting::default();
    let mut cached = four_chains(&mut policy);
    cached.touched(&[4, 5]);
    let before = policy.asked.len();
    cached.awaited(&mut policy, &[4, 5, 99], 50.0);
    cached.not_awaited(&[99]);
    assert_eq!(policy.asked.len(), before);
    // The request that uses them ends, and the other one still waits.
    cached.leaving(&mut policy, &[LeavingBlock { block: 4, tokens: Some(16) }], 70.0);
    assert_eq!(policy.asked.last(), Some(&(1, 1)));
    audit_with(&cached, &[5]);
}

fn audit_with(cached: &CachedBlocks, in_use: &[u32]) {
    assert!(order(cached).iter().all(|block| !in_use.contains(block)));
    audit(cached);
}

#[test]
fn a_preempted_request_waits_for_its_own_blocks() {
    let mut policy = Awaiting::default();
    let mut cached = four_chains(&mut policy);
    cached.touched(&[0, 1]);
    cached.chain_ends(&[0, 1], &ChainFacts { tokens: 32, ended_ms: None, ..ChainFacts::default() });
    cached.leaving(&mut policy, &[LeavingBlock { block: 1, tokens: Some(32) }], 70.0);
    assert_eq!(policy.asked.last(), Some(&(1, 1)));
}
