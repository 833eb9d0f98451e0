//! The block pool of an engine: vLLM's queue of free blocks and its prefix cache (vllm/v1/core/block_pool.py), and on top of
//! it the host's own order of eviction, driven as the plugin drives it (python/meridian/vllm/kv.py).

use std::collections::HashMap;

use foldhash::fast::FixedState;
use meridian_core::{CachedBlocks, ChainFacts, EvictionRanker, LeavingBlock};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    readers: u32,
    /// 0 for a block that no prompt can find.
    key: u64,
    /// Tokens of the prefix that it ends.
    tokens: u32,
    before: u32,
    after: u32,
}

/// A pool of KV blocks, named by number from 0.
pub(super) struct Pool {
    blocks: Vec<Block>,
    by_key: HashMap<u64, u32, FixedState>,
    /// Further blocks that hold the same: requests that came together computed it each for itself.
    twins: HashMap<u64, Vec<u32>, FixedState>,
    first: u32,
    last: u32,
    free: u32,
    cached: u32,
    mirror: Option<CachedBlocks>,
    kept: Vec<LeavingBlock>,
}

impl Pool {
    /// `blocks` free blocks. With `orders` the host has a say in what goes first.
    pub(super) fn new(blocks: u32, block_tokens: u32, orders: bool) -> Self {
        let link = |i: u32| Block {
            readers: 0,
            key: 0,
            tokens: 0,
            before: if i == 0 { NONE } else { i - 1 },
            after: if i + 1 == blocks { NONE } else { i + 1 },
        };
        let mirror = orders.then(|| {
            let mut mirror = CachedBlocks::new(blocks, block_tokens);
            mirror.resync((0..blocks).map(|block| (block, None)));
            mirror
        });
        Self {
            blocks: (0..blocks).map(link).collect(),
            by_key: HashMap::default(),
            twins: HashMap::default(),
            first: if blocks == 0 { NONE } else { 0 },
            last: blocks.checked_sub(1).unwrap_or(NONE),
            free: blocks,
            cached: 0,
            mirror,
            kept: Vec::new(),
        }
    }

    pub(super) fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub(super) fn free(&self) -> u32 {
        self.free
    }

    /// Free blocks that a prompt can find.
    pub(super) fn cached(&self) -> u32 {
        self.cached
    }

    pub(super) fn find(&self, key: u64) -> Option<u32> {
        self.by_key.get(&key).copied()
    }

    pub(super) fn is_free(&self, block: u32) -> bool {
        self.blocks[block as usize].readers == 0
    }

    /// Another request reads these blocks.
    pub(super) fn touch(&mut self, blocks: &[u32]) {
        for block in blocks {
            if self.blocks[*block as usize].readers == 0 {
                self.unlink(*block);
            }
            self.blocks[*block as usize].readers += 1;
        }
        if let Some(mirror) = &mut self.mirror {
            mirror.touched(blocks);
        }
    }

    /// A prompt found these blocks. One that resumes finds what it computed itself: that is no reuse.
    pub(super) fn matched(&mut self, blocks: &[u32], resumes: bool) {
        if let Some(mirror) = &mut self.mirror {
            if !resumes {
                mirror.matched(blocks);
            }
            let shared: Vec<u32> =
                blocks.iter().copied().filter(|block| self.blocks[*block as usize].readers > 1).collect();
            mirror.shared(&shared);
        }
    }

    /// How many of these blocks nobody else reads.
    pub(super) fn unshared(&self, blocks: &[u32]) -> u32 {
        blocks.iter().filter(|block| self.blocks[**block as usize].readers == 1).count() as u32
    }

    /// Hand `count` blocks out, from the front of the queue; what they held is gone. The caller has seen to it that they
    /// are free.
    pub(super) fn take(&mut self, count: u32, now_ms: f64, out: &mut Vec<u32>) {
        let chosen = self.mirror.as_mut().map(|mirror| mirror.choose(count)).unwrap_or_default();
        for block in chosen.iter().rev() {
            self.unlink(*block);
            self.link_first(*block);
        }
        let from = out.len();
        for _ in 0..count {
            let block = self.first;
            self.unlink(block);
            self.forget(block);
            self.blocks[block as usize].readers = 1;
            out.push(block);
        }
        if let Some(mirror) = &mut self.mirror {
            mirror.taken(&out[from..], now_ms);
        }
    }

    /// The block is full: a prompt can find it.
    pub(super) fn fill(&mut self, block: u32, key: u64, tokens: u32) {
        match self.by_key.entry(key) {
            std::collections::hash_map::Entry::Vacant(vacant) => _ = vacant.insert(block),
            std::collections::hash_map::Entry::Occupied(_) => self.twins.entry(key).or_default().push(block),
        }
        self.blocks[block as usize].key = key;
        self.blocks[block as usize].tokens = tokens;
    }

    /// The chain of a request that stops, before it lets go of its blocks.
    pub(super) fn chain_ends(&mut self, blocks: &[u32], facts: &ChainFacts) {
        if let Some(mirror) = &mut self.mirror {
            mirror.chain_ends(blocks, facts);
        }
    }

    /// The prompt of a request that has arrived matches these blocks.
    pub(super) fn awaited(&mut self, policy: &mut dyn EvictionRanker, blocks: &[u32], now_ms: f64) {
        if let Some(mirror) = &mut self.mirror {
            mirror.awaited(policy, blocks, now_ms);
        }
    }

    /// The host's order, if it has a say.
    pub(super) fn mirror(&mut self) -> Option<&mut CachedBlocks> {
        self.mirror.as_mut()
    }

    /// Before a step: blocks whose time is over, or that another policy ranked.
    pub(super) fn rekey(&mut self, policy: &mut dyn EvictionRanker, now_ms: f64) {
        if let Some(mirror) = &mut self.mirror {
            mirror.rekey(policy, now_ms);
        }
    }

    /// No later prompt will match what a request that ends has in `blocks` beyond `from` tokens.
    pub(super) fn mark_dead(&mut self, blocks: &[u32], block_tokens: u32, from: u32) {
        let Some(mirror) = &mut self.mirror else { return };
        let first = (from / block_tokens) as usize;
        let dead: Vec<u32> = blocks
            .iter()
            .enumerate()
            .skip(first)
            .filter(|(position, block)| {
                self.blocks[**block as usize].key != 0 && (*position as u32 + 1) * block_tokens > from
            })
            .map(|(_, block)| *block)
            .rev()
            .collect();
        mirror.mark_dead(&dead);
    }

    /// A request lets go of its blocks. The last of them goes first, because it is of the least use without the others.
    pub(super) fn release(&mut self, policy: &mut dyn EvictionRanker, blocks: &mut Vec<u32>, now_ms: f64) {
        self.kept.clear();
        for block in blocks.drain(..).rev() {
            let entry = &mut self.blocks[block as usize];
            entry.readers -= 1;
            if entry.readers == 0 {
                let tokens = (entry.key != 0).then_some(entry.tokens);
                self.kept.push(LeavingBlock { block, tokens });
            }
        }
        let kept = std::mem::take(&mut self.kept);
        match self.mirror.as_mut().map(|mirror| mirror.leaving(policy, &kept, now_ms)) {
            Some(order) => {
                for block in order.dead {
                    self.forget(block);
                }
                self.put_back(order.freed.iter().copied());
            }
            None => self.put_back(kept.iter().map(|leaving| leaving.block)),
        }
        self.kept = kept;
    }

    /// What no prompt can find goes to the front of the queue, the rest to its end, both in the order given.
    fn put_back(&mut self, freed: impl DoubleEndedIterator<Item = u32> + Clone) {
        for block in freed.clone().rev() {
            if self.blocks[block as usize].key == 0 {
                self.link_first(block);
            }
        }
        for block in freed {
            if self.blocks[block as usize].key != 0 {
                self.link_last(block);
            }
        }
    }

    fn forget(&mut self, block: u32) {
        let key = std::mem::take(&mut self.blocks[block as usize].key);
        if key == 0 {
            return;
        }
        let Some(twins) = self.twins.get_mut(&key) else {
            self.by_key.remove(&key);
            return;
        };
        if self.by_key.get(&key) == Some(&block) {
            self.by_key.insert(key, twins.remove(0));
        } else {
            twins.retain(|twin| *twin != block);
        }
        if twins.is_empty() {
            self.twins.remove(&key);
        }
    }

    fn unlink(&mut self, block: u32) {
        let Block { before, after, key, .. } = self.blocks[block as usize];
        match before {
            NONE => self.first = after,
            _ => self.blocks[before as usize].after = after,
        }
        match after {
            NONE => self.last = before,
            _ => self.blocks[after as usize].before = before,
        }
        self.free -= 1;
        self.cached -= u32::from(key != 0);
    }

    fn link_first(&mut self, block: u32) {
        let first = std::mem::replace(&mut self.first, block);
        (self.blocks[block as usize].before, self.blocks[block as usize].after) = (NONE, first);
        match first {
            NONE => self.last = block,
            _ => self.blocks[first as usize].before = block,
        }
        self.linked(block);
    }

    fn link_last(&mut self, block: u32) {
        let last = std::mem::replace(&mut self.last, block);
        (self.blocks[block as usize].before, self.blocks[block as usize].after) = (last, NONE);
        match last {
            NONE => self.first = block,
            _ => self.blocks[last as usize].after = block,
        }
        self.linked(block);
    }

    fn linked(&mut self, block: u32) {
        self.free += 1;
        self.cached += u32::from(self.blocks[block as usize].key != 0);
    }

    /// The front of the queue first, for tests.
    #[cfg(test)]
    pub(super) fn queue(&self) -> Vec<u32> {
        std::iter::successors((self.first != NONE).then_some(self.first), |block| {
            let after = self.blocks[*block as usize].after;
            (after != NONE).then_some(after)
        })
        .collect()
    }

    /// Whether the counts and the host's mirror agree with the queue, for tests.
    #[cfg(test)]
    pub(super) fn audit(&self) {
        let queue = self.queue();
        assert_eq!(queue.len(), self.free as usize);
        assert_eq!(queue.iter().filter(|block| self.blocks[**block as usize].key != 0).count(), self.cached as usize);
        assert!(queue.iter().all(|block| self.blocks[*block as usize].readers == 0));
        let twins = self.twins.iter().flat_map(|(key, blocks)| blocks.iter().map(move |block| (key, block)));
        for (key, block) in self.by_key.iter().chain(twins) {
            assert_eq!(self.blocks[*block as usize].key, *key);
        }
        if let Some(mirror) = &self.mirror {
            let of = |block: &u32| {
                let Block { key, tokens, .. } = self.blocks[*block as usize];
                (*block, (key != 0).then_some(tokens))
            };
            mirror.audit(queue.iter().map(of)).expect("the mirror agrees");
        }
    }
}

#[cfg(test)]
mod tests {
    use meridian_core::OwnOrder;

    use super::*;

    #[test]
    fn the_least_recently_used_block_goes_first_and_a_dead_one_before_it() {
        for orders in [false, true] {
            let mut pool = Pool::new(4, 16, orders);
            let (mut first, mut second) = (Vec::new(), Vec::new());
            pool.take(2, 0.0, &mut first);
            pool.take(2, 0.0, &mut second);
            for (i, block) in first.iter().chain(&second).enumerate() {
                pool.fill(*block, i as u64 + 1, (i as u32 % 2 + 1) * 16);
            }
            let (kept, dead) = (first.clone(), second.clone());
            pool.release(&mut OwnOrder, &mut first, 1.0);
            pool.mark_dead(&second, 16, 16);
            pool.release(&mut OwnOrder, &mut second, 2.0);
            pool.audit();
            assert_eq!((pool.free(), pool.cached()), (4, if orders { 3 } else { 4 }));
            let expected = if orders {
                vec![dead[1], kept[1], kept[0], dead[0]]
            } else {
                vec![kept[1], kept[0], dead[1], dead[0]]
            };
            assert_eq!(pool.queue(), expected);
            pool.touch(&[kept[0]]);
            assert_eq!(pool.find(1), Some(kept[0]));
            pool.take(3, 3.0, &mut first);
            pool.audit();
            assert_eq!((pool.free(), pool.find(2)), (0, None));
        }
    }

    #[test]
    fn a_copy_is_found_when_the_other_is_gone() {
        let mut pool = Pool::new(3, 16, true);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        pool.take(1, 0.0, &mut first);
        pool.take(1, 0.0, &mut second);
        let copies = [first[0], second[0]];
        copies.iter().for_each(|block| pool.fill(*block, 7, 16));
        assert_eq!((pool.find(7), pool.unshared(&copies)), (Some(copies[0]), 2));
        pool.release(&mut OwnOrder, &mut first, 1.0);
        pool.release(&mut OwnOrder, &mut second, 2.0);
        // The empty one goes first, then the copy that was let go of first.
        pool.take(2, 3.0, &mut first);
        assert_eq!(pool.find(7), Some(copies[1]));
        pool.take(1, 4.0, &mut first);
        assert_eq!(pool.find(7), None);
        pool.audit();
    }
}
