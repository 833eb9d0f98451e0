//! The part of an engine's KV memory that Meridian manages.

use std::collections::{HashMap, VecDeque};

use meridian_core::{
    CachedBlocks, ChainFacts, EngineFacts, EvictionColumn, KeepStats, KvGrowth, Leaving, LeavingBlock, Memory, RowId,
    Stop,
};

use crate::Driver;
use crate::control::KvStatus;

/// A pool of the engine's KV blocks, or a store beside it, with an order of eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool(usize);

impl Pool {
    /// Its number in the engine.
    #[must_use]
    pub fn number(self) -> usize {
        self.0
    }
}

/// The pools of one engine.
#[derive(Default)]
pub(crate) struct Kv {
    /// Meridian manages the engine's own pools.
    orders: bool,
    pools: Vec<Kept>,
    /// KV blocks that answers in progress have lost.
    pub(crate) output_critical_evictions: u64,
    ended: EndedChains,
}

/// Chains of requests that have ended, for stores that hear of it later.
#[derive(Default)]
struct EndedChains {
    facts: HashMap<Box<str>, ChainFacts>,
    order: VecDeque<Box<str>>,
}

impl EndedChains {
    const KEPT: usize = 4096;

    fn insert(&mut self, id: &str, facts: ChainFacts) {
        if self.facts.insert(id.into(), facts).is_none() {
            self.order.push_back(id.into());
        }
        while self.order.len() > Self::KEPT
            && let Some(first) = self.order.pop_front()
        {
            self.facts.remove(&first);
        }
    }

    /// The facts stay until they are the oldest: a store may ask for each group of layers.
    fn of(&self, id: &str) -> Option<&ChainFacts> {
        self.facts.get(id)
    }
}

struct Kept {
    blocks: CachedBlocks,
    /// The store lies beside the engine's memory.
    is_store: bool,
    /// A KV connector may load what the pool has not.
    has_connector: bool,
}

/// Tokens of a KV block in most engines: vLLM's default on GPUs.
const USUAL_BLOCK_TOKENS: f64 = 16.0;

impl Driver {
    /// Free KV blocks that admission leaves for each running request: the configured number, or as many tokens where
    /// those of a hybrid model are larger than 16 tokens.
    #[must_use]
    pub fn growth_blocks(&self) -> f64 {
        let larger = self.settings.state_block.map_or(1.0, |tokens| f64::from(tokens.max(1)) / USUAL_BLOCK_TOKENS);
        self.config.kv_memory.growth_blocks / larger.max(1.0)
    }

    /// Tell the planner that the engine preempts the last request in its running list. When a step may lack KV blocks,
    /// plans then put requests that answer before those that do not.
    pub fn keep_answers_ahead(&mut self, growth: KvGrowth) {
        self.kv.orders = true;
        self.scheduler.keep_answers_ahead(growth);
    }

    /// Add the mirror of a pool of `blocks` KV blocks; fill it with [`CachedBlocks::resync`]. With a KV connector,
    /// dead blocks stay in the cache and go first, and no session waits for others: the connector may load what it has lost.
    pub fn add_pool(&mut self, blocks: u32, block_tokens: u32, has_connector: bool) -> Pool {
        let blocks = CachedBlocks::new(blocks, block_tokens);
        let blocks = if has_connector { blocks.keeping_dead() } else { blocks };
        self.add(Kept { blocks, is_store: false, has_connector })
    }

    /// Add the order of eviction of a store of `chunks` chunks beside the engine's memory.
    pub fn add_store(&mut self, chunks: u32, block_tokens: u32) -> Pool {
        let blocks = CachedBlocks::new(chunks, block_tokens).keeping_dead();
        self.add(Kept { blocks, is_store: true, has_connector: false })
    }

    fn add(&mut self, kept: Kept) -> Pool {
        self.kv.pools.push(kept);
        Pool(self.kv.pools.len() - 1)
    }

    /// The mirror of a pool, to update it.
    ///
    /// # Panics
    /// When this engine has no such pool: a pool belongs to the engine that added it. [`Driver::leaving`] and
    /// [`Driver::rekey`] panic likewise.
    pub fn pool(&mut self, pool: Pool) -> &mut CachedBlocks {
        &mut self.kv.pools[pool.0].blocks
    }

    /// Report the blocks that the pool of this number handed out in a step; one that is not there is left out.
    pub fn taken(&mut self, pool: usize, blocks: &[u32], now_ms: f64) {
        if let Some(pool) = self.kv.pools.get_mut(pool) {
            pool.blocks.taken(blocks, now_ms);
        }
    }

    /// Report that a request stops, before its blocks leave: `chains` are its blocks in each pool, head first. Its session
    /// pauses from now, unless it is preempted.
    pub fn chain_ends(&mut self, id: &str, stop: Stop, chains: &[(Pool, Vec<u32>)]) {
        let Some(row) = self.find(id) else { return };
        let facts = self.scheduler.mirror().chain_ends(row, stop);
        for (pool, blocks) in chains {
            self.pool(*pool).chain_ends(blocks, &facts);
        }
        if stop != Stop::Preempted && self.kv.pools.iter().any(|pool| pool.is_store) {
            self.kv.ended.insert(id, facts);
        }
    }

    /// Report that a request has ended which left these chunks in a store, in the order of its chain. A store hears of it later
    /// than the engine's pools; the facts are those of [`Driver::chain_ends`], of the latest 4,096 requests.
    pub fn stored_chain_ends(&mut self, store: Pool, id: &str, chunks: &[u32]) {
        if let Some(facts) = self.kv.ended.of(id).copied() {
            self.pool(store).chain_ends(chunks, &facts);
        }
    }

    /// Report that the prompt of a request matched `blocks` of a pool, its longest cached prefix: where its client names no
    /// session, it may be the next turn of one that the host found.
    pub fn prefix_matched(&mut self, pool: Pool, row: RowId, blocks: &[u32]) {
        if let Some(session) = self.pool(pool).continued(blocks) {
            self.scheduler.mirror().continues(row, session);
        }
    }

    /// Report that the prompt of a request that has arrived matches `blocks` of a pool, its longest cached prefix, while it waits
    /// for admission; see [`CachedBlocks::awaited`].
    pub fn awaited(&mut self, pool: Pool, blocks: &[u32], now_ms: f64) {
        self.kv.pools[pool.0].blocks.awaited(&mut self.eviction, blocks, now_ms);
    }

    /// Whether a policy reads which blocks are awaited; matching the prompt of each request that arrives is not free.
    #[must_use]
    pub fn reads_awaited(&self) -> bool {
        self.eviction.reads(EvictionColumn::Awaited)
    }

    /// Whether a policy reads what is known of a block by the request and the session that used it last; reporting the
    /// chains of all requests that stop is not free.
    #[must_use]
    pub fn reads_chains(&self) -> bool {
        use EvictionColumn as Column;
        [
            Column::ChainTokens,
            Column::ChainBlocks,
            Column::ChainHits,
            Column::Generated,
            Column::Session,
            Column::Turn,
            Column::IdleMs,
            Column::LastGapMs,
            Column::GapMs,
            Column::GapSpreadMs,
            Column::Gaps,
            Column::StoppedForTool,
            Column::Priority,
            Column::RecomputeMs,
        ]
        .into_iter()
        .any(|column| self.eviction.reads(column))
            || self.scheduler.reads_sessions()
    }

    /// Report that these blocks lose their last reader; see [`CachedBlocks::leaving`].
    pub fn leaving(&mut self, pool: Pool, blocks: &[LeavingBlock], now_ms: f64) -> Leaving {
        self.kv.pools[pool.0].blocks.leaving(&mut self.eviction, blocks, now_ms)
    }

    /// Rank blocks again that another policy has ranked; see [`CachedBlocks::rekey`]. Returns the number of blocks.
    /// [`Driver::plan`] does so for the engine's own pools.
    pub fn rekey(&mut self, pool: Pool, now_ms: f64) -> usize {
        self.kv.pools[pool.0].blocks.rekey(&mut self.eviction, now_ms)
    }

    /// Tell the dispatch policy what KV memory sessions have.
    pub(crate) fn note_sessions(&mut self, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) {
        // An earlier one is of a hook that was replaced.
        if let Some(pool) = self.kv.pools.iter_mut().rfind(|pool| !pool.is_store) {
            self.scheduler.note_sessions(&mut pool.blocks, pool.has_connector, facts, running, waiting);
        }
    }

    /// The same for the engine's own pools, for steps without a plan.
    pub fn rekey_pools(&mut self, now_ms: f64) {
        for Kept { blocks, .. } in self.kv.pools.iter_mut().filter(|pool| !pool.is_store) {
            blocks.rekey(&mut self.eviction, now_ms);
        }
    }

    /// Whether a policy reads how many KV blocks each request would free; counting them is expensive.
    #[must_use]
    pub fn reads_victim_blocks(&self) -> bool {
        self.eviction.reads(EvictionColumn::Blocks)
    }

    /// The index of the request in `running` that gives up its KV blocks. `blocks` counts the blocks that only it uses,
    /// for each request, or is empty if no policy reads them. `None` leaves the choice to the engine.
    pub fn victim(&mut self, memory: &Memory, running: &[RowId], blocks: &[u32]) -> Option<usize> {
        self.scheduler.mirror().victim(&mut self.eviction, memory, running, blocks)
    }

    /// Counters of the engine's KV memory; `None` if the engine manages it alone.
    #[must_use]
    pub fn kv_status(&mut self) -> Option<KvStatus> {
        let Kv { orders, pools, output_critical_evictions, .. } = &self.kv;
        if !orders && !pools.iter().any(|pool| pool.is_store) {
            return None;
        }
        let counts = self.scheduler.mirror().kv_counts();
        let mut status = KvStatus {
            hit_tokens: counts.hit_tokens,
            missed_tokens: counts.missed_tokens,
            recomputed_tokens: counts.recomputed_tokens,
            avoidable_output_preemptions: counts.avoidable_output_preemptions,
            ..KvStatus::default()
        };
        for Kept { blocks, is_store, .. } in pools {
            let stats = blocks.stats();
            let evictions = if *is_store { &mut status.offload_evictions } else { &mut status.evictions };
            for (total, count) in evictions.iter_mut().zip(stats.evictions) {
                *total += count;
            }
            if !is_store {
                status.moved_blocks += stats.moved;
                status.resyncs += stats.resyncs;
                status.kept_blocks += u64::from(blocks.kept());
                let KeepStats { hits, evicted, expired } = stats.keeps;
                for (total, count) in status.keeps.iter_mut().zip([hits, evicted, expired]) {
                    *total += count;
                }
            }
        }
        status.evictions[2] += output_critical_evictions;
        Some(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chains_of_ended_requests_are_remembered_and_bounded() {
        let mut ended = EndedChains::default();
        let facts = |tokens| ChainFacts { tokens, ..ChainFacts::default() };
        for i in 0..=EndedChains::KEPT as u32 {
            ended.insert(&i.to_string(), facts(i));
        }
        assert_eq!(ended.of("0"), None, "the oldest is forgotten");
        assert_eq!(ended.of("1").map(|facts| facts.tokens), Some(1));
        // A later request with the same id.
        ended.insert("1", facts(9));
        assert_eq!(ended.of("1").map(|facts| facts.tokens), Some(9));
        assert_eq!((ended.facts.len(), ended.order.len()), (EndedChains::KEPT, EndedChains::KEPT));
    }
}
