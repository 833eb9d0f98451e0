//! `CachedBlocks` beside a queue like the engine's: whatever is told in whatever order, the mirror agrees with the queue,
//! nothing is handed out twice, and what goes first is what a naive ranking says.

use std::collections::BTreeMap;

use meridian_core::{
    CachedBlocks, EvictionCandidate, EvictionRanker, EvictionSubject, Fault, FaultKind, LeavingBlock, Memory, OwnOrder,
};
use proptest::prelude::*;

const BLOCKS: u32 = 24;
const BLOCK_TOKENS: u32 = 4;
const NONE: [u32; 0] = [];

/// Keeps what was matched, and fails now and then.
struct ByHits {
    calls: u32,
    fails_every: u32,
}

impl EvictionRanker for ByHits {
    fn keys(&mut self, _: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        self.calls += 1;
        keys.extend(candidates.iter().map(|candidate| candidate.hits as f32));
        if self.calls.is_multiple_of(self.fails_every) {
            keys.pop();
            return Err(Fault::new(FaultKind::Trap, "now and then"));
        }
        Ok(())
    }
}

/// The engine: a queue of free blocks, readers of the others, and which can be matched.
#[derive(Debug, Default)]
struct Engine {
    queue: Vec<u32>,
    readers: BTreeMap<u32, u32>,
    tokens: BTreeMap<u32, u32>,
}

impl Engine {
    fn new() -> Self {
        Self { queue: (0..BLOCKS).collect(), ..Self::default() }
    }

    fn free(&self) -> Vec<(u32, Option<u32>)> {
        self.queue.iter().map(|block| (*block, self.tokens.get(block).copied())).collect()
    }

    fn take(&mut self, cached: &mut CachedBlocks, count: usize, now_ms: f64) {
        let count = count.min(self.queue.len());
        let chosen = cached.choose(count as u32);
        assert!(chosen.iter().all(|block| self.queue.contains(block)), "what is chosen is free");
        self.queue.retain(|block| !chosen.contains(block));
        self.queue.splice(0..0, chosen);
        let taken: Vec<u32> = self.queue.drain(..count).collect();
        cached.taken(&taken, now_ms);
        for block in taken {
            self.tokens.remove(&block);
            self.readers.insert(block, 1);
        }
    }

    fn let_go(&mut self, cached: &mut CachedBlocks, policy: &mut dyn EvictionRanker, blocks: &[u32], now_ms: f64) {
        let mut leaving = Vec::new();
        for block in blocks {
            let Some(readers) = self.readers.get_mut(block) else { continue };
            *readers -= 1;
            if *readers == 0 {
                self.readers.remove(block);
                leaving.push(LeavingBlock { block: *block, tokens: self.tokens.get(block).copied() });
            }
        }
        let order = cached.leaving(policy, &leaving, now_ms);
        let mut freed = order.freed.clone();
        freed.sort_unstable();
        let mut expected: Vec<u32> = leaving.iter().map(|leaving| leaving.block).collect();
        expected.sort_unstable();
        assert_eq!(freed, expected, "all that leave are freed, once");
        self.tokens.retain(|block, _| !order.dead.contains(block));
        let (kept, empty): (Vec<u32>, Vec<u32>) =
            order.freed.into_iter().partition(|block| self.tokens.contains_key(block));
        self.queue.splice(0..0, empty);
        self.queue.extend(kept);
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Take(usize),
    Hash(usize),
    Touch(usize),
    Match(usize),
    Dead(usize),
    LetGo(Vec<usize>),
    Drop(usize),
    Resync,
}

fn operation() -> impl Strategy<Value = Operation> {
    let any = 0..BLOCKS as usize;
    prop_oneof![
        4 => (1..6usize).prop_map(Operation::Take),
        4 => any.clone().prop_map(Operation::Hash),
        2 => any.clone().prop_map(Operation::Touch),
        2 => any.clone().prop_map(Operation::Match),
        2 => any.clone().prop_map(Operation::Dead),
        4 => prop::collection::vec(any.clone(), 1..8).prop_map(Operation::LetGo),
        1 => any.prop_map(Operation::Drop),
        1 => Just(Operation::Resync),
    ]
}

fn run(operations: &[Operation], policy: &mut dyn EvictionRanker) {
    let mut engine = Engine::new();
    let mut cached = CachedBlocks::new(BLOCKS, BLOCK_TOKENS);
    cached.resync(engine.free());
    for (step, operation) in operations.iter().enumerate() {
        let now_ms = step as f64;
        let attended: Vec<u32> = engine.readers.keys().copied().collect();
        let nth = |i: usize| (!attended.is_empty()).then(|| attended[i % attended.len()]);
        match operation {
            Operation::Take(count) => engine.take(&mut cached, *count, now_ms),
            Operation::Hash(i) => {
                if let Some(block) = nth(*i) {
                    engine.tokens.insert(block, BLOCK_TOKENS * (1 + *i as u32));
                }
            }
            Operation::Touch(i) => {
                let block = *i as u32;
                if engine.tokens.contains_key(&block) || engine.readers.contains_key(&block) {
                    engine.queue.retain(|free| *free != block);
                    *engine.readers.entry(block).or_default() += 1;
                    cached.touched(&[block]);
                }
            }
            Operation::Match(i) => cached.matched(&[*i as u32]),
            Operation::Dead(i) => cached.mark_dead(&nth(*i).into_iter().collect::<Vec<_>>()),
            Operation::LetGo(picks) => {
                let mut blocks: Vec<u32> = picks.iter().filter_map(|i| nth(*i)).collect();
                blocks.sort_unstable();
                blocks.dedup();
                engine.let_go(&mut cached, policy, &blocks, now_ms);
            }
            Operation::Drop(i) => {
                let block = *i as u32;
                if engine.tokens.remove(&block).is_some() && engine.queue.contains(&block) {
                    engine.queue.retain(|free| *free != block);
                    engine.queue.insert(0, block);
                    cached.emptied(&[block]);
                }
            }
            Operation::Resync => cached.resync(engine.free()),
        }
        cached.audit(engine.free()).unwrap_or_else(|error| panic!("step {step}, {operation:?}: {error}"));
    }
}

proptest! {
    #[test]
    fn the_mirror_agrees_with_the_queue(operations in prop::collection::vec(operation(), 1..120), fails_every in 2..9u32) {
        run(&operations, &mut OwnOrder);
        run(&operations, &mut ByHits { calls: 0, fails_every });
    }
}

fn full(blocks: &[u32]) -> Vec<LeavingBlock> {
    blocks.iter().map(|block| LeavingBlock { block: *block, tokens: Some(BLOCK_TOKENS) }).collect()
}

fn pool() -> CachedBlocks {
    let mut cached = CachedBlocks::new(6, BLOCK_TOKENS);
    cached.resync((0..6).map(|block| (block, None)));
    cached.taken(&[0, 1, 2, 3, 4, 5], 0.0);
    cached
}

#[test]
fn by_default_the_queue_is_left_as_it_is() {
    let mut cached = pool();
    cached.leaving(&mut OwnOrder, &full(&[2, 1, 0]), 1.0);
    cached.leaving(&mut OwnOrder, &full(&[5]), 2.0);
    assert_eq!(cached.order().collect::<Vec<_>>(), [2, 1, 0, 5]);
    assert_eq!(cached.choose(2), NONE, "the queue hands out 2 and 1 by itself");
}

#[test]
fn what_was_matched_is_kept_across_batches() {
    let mut cached = pool();
    let mut policy = ByHits { calls: 0, fails_every: u32::MAX };
    cached.matched(&[0, 1]);
    cached.leaving(&mut policy, &full(&[1, 0]), 1.0);
    cached.leaving(&mut policy, &full(&[3, 2]), 2.0);
    assert_eq!(cached.choose(3), [3, 2, 1], "the later ones first: nobody matched them");
    assert_eq!(cached.stats().moved, 3);
}

#[test]
fn empty_blocks_go_first() {
    let mut cached = pool();
    let mut policy = ByHits { calls: 0, fails_every: u32::MAX };
    cached.matched(&[0]);
    cached.leaving(&mut policy, &full(&[0]), 1.0);
    cached.leaving(&mut policy, &full(&[1]), 2.0);
    cached.leaving(&mut policy, &[LeavingBlock { block: 2, tokens: None }], 3.0);
    assert_eq!(cached.choose(1), NONE);
    assert_eq!(cached.choose(2), [1]);
}

#[test]
fn dead_thinking_is_dropped_unless_somebody_else_matched_it() {
    let mut cached = pool();
    cached.mark_dead(&[1, 2, 3]);
    cached.shared(&[2]);
    cached.mark_dead(&[2]);
    cached.matched(&[3]);
    let order = cached.leaving(&mut OwnOrder, &full(&[3, 2, 1, 0]), 1.0);
    assert_eq!((order.dead, order.freed), (vec![1], vec![1, 3, 2, 0]));
    assert_eq!(cached.stats().evictions, [1, 0, 0]);
}

#[test]
fn a_store_that_keeps_dead_thinking_gives_it_up_first() {
    let mut cached = CachedBlocks::new(6, BLOCK_TOKENS).keeping_dead();
    cached.leaving(&mut OwnOrder, &full(&[0, 1]), 1.0);
    cached.mark_dead(&[1, 2]);
    let order = cached.leaving(&mut OwnOrder, &full(&[2, 3]), 2.0);
    assert_eq!((order.dead, order.freed), (vec![], vec![2, 3]));
    assert_eq!(cached.order().collect::<Vec<_>>(), [1, 2, 0, 3]);
    cached.taken(&[1, 2, 0], 3.0);
    assert_eq!(cached.stats().evictions, [2, 1, 0]);
}

#[test]
fn a_block_that_is_used_again_starts_anew() {
    let mut cached = pool();
    cached.mark_dead(&[0]);
    cached.leaving(&mut OwnOrder, &full(&[0]), 1.0);
    cached.taken(&[0], 2.0);
    let order = cached.leaving(&mut OwnOrder, &full(&[0]), 3.0);
    assert!(order.dead.is_empty());
    cached.taken(&[0], 4.0);
    assert_eq!(cached.stats().evictions, [1, 1, 0]);
}

/// Stands for a slot: policy after policy, each with a scale of its own. Keys of two of them do not compare: those of an
/// even one rise with the block's number, those of an odd one fall, and all of one are far above all of another.
struct Swapped {
    number: u64,
    asked: Vec<usize>,
}

impl Swapped {
    fn new() -> Self {
        Self { number: 0, asked: Vec::new() }
    }

    fn key(number: u64, block: u64) -> f32 {
        let far = [0.0, 1e6, -1e6][number as usize % 3];
        far + if number.is_multiple_of(2) { block as f32 } else { -(block as f32) }
    }
}

impl EvictionRanker for Swapped {
    fn keys(&mut self, _: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        self.asked.push(candidates.len());
        keys.extend(candidates.iter().map(|candidate| match candidate.subject {
            EvictionSubject::Block(block) => Self::key(self.number, block.0),
            EvictionSubject::Request(_) => f32::NAN,
        }));
        Ok(())
    }

    fn ranking(&self) -> u64 {
        self.number
    }
}

#[test]
fn keys_of_two_policies_are_not_compared() {
    let mut cached = pool();
    let mut policy = Swapped::new();
    cached.leaving(&mut policy, &full(&[2, 0, 1]), 1.0);
    assert_eq!(cached.order().collect::<Vec<_>>(), [0, 1, 2]);
    // Its keys are far below those that are there.
    policy.number = 2;
    cached.leaving(&mut policy, &full(&[4, 3]), 2.0);
    assert_eq!(cached.order().collect::<Vec<_>>(), [0, 1, 2, 3, 4], "what another ranked goes first, in its order");
    assert_eq!(cached.rekey(&mut policy, 3.0), 3);
    assert_eq!(cached.order().collect::<Vec<_>>(), [0, 1, 2, 3, 4], "now all are of one scale");
    assert_eq!(cached.rekey(&mut policy, 4.0), 0);
    policy.number = 1;
    assert_eq!(cached.rekey(&mut policy, 5.0), 5);
    assert_eq!(cached.order().collect::<Vec<_>>(), [4, 3, 2, 1, 0]);
    assert_eq!(policy.asked, [3, 2, 3, 5]);
}

#[test]
fn what_is_cached_is_ranked_anew_a_part_at_a_time() {
    const MANY: u32 = 1000;
    let mut cached = CachedBlocks::new(MANY, BLOCK_TOKENS);
    let mut policy = Swapped::new();
    let all: Vec<u32> = (0..MANY).collect();
    cached.leaving(&mut policy, &full(&all), 1.0);
    policy.number = 1;
    for left in [744, 488, 232, 0] {
        cached.rekey(&mut policy, 2.0);
        // Those that would have gone last are asked about first; the rest goes as before.
        let expected: Vec<u32> = (0..left).chain((left..MANY).rev()).collect();
        assert_eq!(cached.order().collect::<Vec<_>>(), expected);
    }
    assert_eq!(policy.asked, [1000, 256, 256, 256, 232]);
}

/// Somebody else puts another policy in place while this one answers.
struct Overtaken {
    number: std::cell::Cell<u64>,
}

impl EvictionRanker for Overtaken {
    fn keys(&mut self, _: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
        keys.extend((0..candidates.len()).map(|i| i as f32));
        Ok(())
    }

    fn ranking(&self) -> u64 {
        self.number.replace(self.number.get() + 1)
    }
}

#[test]
fn keys_of_a_policy_that_is_replaced_meanwhile_do_not_count() {
    let mut cached = pool();
    cached.leaving(&mut Overtaken { number: 0.into() }, &full(&[2, 0, 1]), 1.0);
    cached.leaving(&mut Swapped::new(), &full(&[5]), 2.0);
    assert_eq!(cached.order().collect::<Vec<_>>(), [2, 0, 1, 5]);
    assert_eq!(cached.rekey(&mut Swapped::new(), 3.0), 3);
    assert_eq!(cached.order().collect::<Vec<_>>(), [0, 1, 2, 5]);
}

proptest! {
    /// After any swaps the order is one of whole policies: of two blocks of a tier the one that an earlier policy ranked goes
    /// first, and of one policy's the one with the lower key.
    #[test]
    fn the_order_never_compares_keys_of_two_policies(
        steps in prop::collection::vec((0..4u8, prop::collection::vec(0..BLOCKS, 1..8), any::<bool>()), 1..80),
    ) {
        let mut cached = CachedBlocks::new(BLOCKS, BLOCK_TOKENS).keeping_dead();
        let mut policy = Swapped::new();
        // Who ranked each cached block last, and whether it is dead.
        let mut ranked = BTreeMap::new();
        for (now_ms, (what, blocks, dead)) in steps.into_iter().enumerate() {
            match what {
                0 => policy.number += 1,
                1 => {
                    let order: Vec<u32> = cached.order().collect();
                    let asked = cached.rekey(&mut policy, now_ms as f64);
                    let stale = ranked.values().filter(|(number, _)| *number != policy.number).count();
                    prop_assert_eq!(asked, stale);
                    order.into_iter().for_each(|block| ranked.get_mut(&block).unwrap().0 = policy.number);
                }
                2 => {
                    cached.taken(&blocks, now_ms as f64);
                    ranked.retain(|block, _| !blocks.contains(block));
                }
                _ => {
                    let mut blocks = blocks;
                    blocks.sort_unstable();
                    blocks.dedup();
                    cached.taken(&blocks, now_ms as f64);
                    if dead {
                        cached.mark_dead(&blocks);
                    }
                    cached.leaving(&mut policy, &full(&blocks), now_ms as f64);
                    ranked.extend(blocks.iter().map(|block| (*block, (policy.number, dead))));
                }
            }
            let place = |block: &u32| {
                let (number, dead) = ranked[block];
                (!dead, number, Swapped::key(number, u64::from(*block)))
            };
            let order: Vec<u32> = cached.order().collect();
            prop_assert_eq!(order.len(), ranked.len());
            prop_assert!(order.windows(2).all(|pair| place(&pair[0]) < place(&pair[1])), "{:?}", order);
        }
    }
}

#[test]
fn a_mirror_that_is_wrong_is_told_apart() {
    let mut cached = pool();
    cached.leaving(&mut OwnOrder, &full(&[0]), 1.0);
    assert!(cached.audit([(0, Some(4))]).is_ok());
    for queue in [vec![], vec![(0, None)], vec![(1, Some(4))], vec![(0, Some(4)), (1, None)], vec![(9, None)]] {
        assert!(cached.audit(queue.clone()).is_err(), "{queue:?}");
    }
}
