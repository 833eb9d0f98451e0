//! The KV memory of an engine, as far as Meridian has a say in it.

use meridian_core::{CachedBlocks, EvictionColumn, KvGrowth, Leaving, LeavingBlock, Memory, RowId};
use meridian_runtime::control::KvStatus;

use crate::Driver;

/// A pool of the engine's KV blocks, or a store beside it, whose order of eviction is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool(usize);

/// The pools of one engine.
#[derive(Default)]
pub(crate) struct Kv {
    /// Meridian has a say in the engine's own pools.
    orders: bool,
    pools: Vec<Kept>,
    /// KV blocks that answers in progress have lost.
    pub(crate) output_critical_evictions: u64,
}

struct Kept {
    blocks: CachedBlocks,
    /// Beside the engine's memory.
    is_store: bool,
}

impl Driver {
    /// The engine preempts whoever is last in its running list: when a step may be short of KV blocks, plans put requests
    /// that answer before those that do not.
    pub fn keep_answers_ahead(&mut self, growth: KvGrowth) {
        self.kv.orders = true;
        self.scheduler.keep_answers_ahead(growth);
    }

    /// The mirror of a pool of `blocks` KV blocks, to be filled by [`CachedBlocks::resync`]. With `keeps_dead` what is dead
    /// stays in the cache and is the first to go.
    pub fn add_pool(&mut self, blocks: u32, block_tokens: u32, keeps_dead: bool) -> Pool {
        let blocks = CachedBlocks::new(blocks, block_tokens);
        self.add(if keeps_dead { blocks.keeping_dead() } else { blocks }, false)
    }

    /// The order of eviction of a store beside the engine's memory, of `chunks` chunks.
    pub fn add_store(&mut self, chunks: u32, block_tokens: u32) -> Pool {
        self.add(CachedBlocks::new(chunks, block_tokens).keeping_dead(), true)
    }

    fn add(&mut self, blocks: CachedBlocks, is_store: bool) -> Pool {
        self.kv.pools.push(Kept { blocks, is_store });
        Pool(self.kv.pools.len() - 1)
    }

    /// The mirror of a pool, to feed it.
    ///
    /// # Panics
    /// When this engine has no such pool: one belongs to the engine that added it. So do [`Driver::leaving`] and
    /// [`Driver::rekey`].
    pub fn pool(&mut self, pool: Pool) -> &mut CachedBlocks {
        &mut self.kv.pools[pool.0].blocks
    }

    /// These blocks lose their last reader; see [`CachedBlocks::leaving`].
    pub fn leaving(&mut self, pool: Pool, blocks: &[LeavingBlock], now_ms: f64) -> Leaving {
        self.kv.pools[pool.0].blocks.leaving(&mut self.eviction, blocks, now_ms)
    }

    /// Ask the policy about what another one has ranked before it; see [`CachedBlocks::rekey`]. Returns of how many blocks.
    /// [`Driver::plan`] does so for the engine's own pools.
    pub fn rekey(&mut self, pool: Pool, now_ms: f64) -> usize {
        self.kv.pools[pool.0].blocks.rekey(&mut self.eviction, now_ms)
    }

    /// The same for the engine's own pools, where a step is not planned.
    pub fn rekey_pools(&mut self, now_ms: f64) {
        for Kept { blocks, .. } in self.kv.pools.iter_mut().filter(|pool| !pool.is_store) {
            blocks.rekey(&mut self.eviction, now_ms);
        }
    }

    /// Whether a policy reads how many KV blocks each request would free: they are dear to count.
    #[must_use]
    pub fn reads_victim_blocks(&self) -> bool {
        self.eviction.reads(EvictionColumn::Blocks)
    }

    /// Which of `running` gives up its KV blocks; `blocks` are those that only it attends, for each, or empty when nobody
    /// reads them. `None` leaves it to the engine.
    pub fn victim(&mut self, memory: &Memory, running: &[RowId], blocks: &[u32]) -> Option<usize> {
        self.scheduler.mirror().victim(&mut self.eviction, memory, running, blocks)
    }

    /// What became of the engine's KV memory; `None` where it is the engine's own affair.
    #[must_use]
    pub fn kv_status(&mut self) -> Option<KvStatus> {
        let Kv { orders, pools, output_critical_evictions } = &self.kv;
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
        for Kept { blocks, is_store } in pools {
            let stats = blocks.stats();
            let evictions = if *is_store { &mut status.offload_evictions } else { &mut status.evictions };
            for (total, count) in evictions.iter_mut().zip(stats.evictions) {
                *total += count;
            }
            if !is_store {
                status.moved_blocks += stats.moved;
                status.resyncs += stats.resyncs;
            }
        }
        status.evictions[2] += output_critical_evictions;
        Some(status)
    }
}
