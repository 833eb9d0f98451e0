//! The order of eviction inside vLLM's own block pools.

use std::sync::Arc;

use meridian_core::{KvGrowth, LeavingBlock, Memory, Stop, Subject};
use meridian_engine::control::KvStatus;
use meridian_engine::{Driver, Pool};
use pyo3::exceptions::{PyAssertionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::engine::Engine;

/// A mirror of the free blocks of one of vLLM's `BlockPool`s, and the order in which they go; `CachedBlocks` of
/// meridian-core says more. Blocks are named by their `block_id`. Called by the thread that schedules, and takes
/// microseconds.
#[pyclass(frozen, module = "meridian._native")]
pub(crate) struct BlockPool {
    engine: Arc<meridian_engine::Engine>,
    pool: Pool,
}

#[pymethods]
impl Engine {
    /// The engine preempts whoever is last in its running list: when a step may be short of KV blocks, plans put requests
    /// that answer before those that do not.
    fn keep_answers_ahead(&self, groups: u32, lookahead_tokens: u32) {
        let driver = &mut *self.engine.drive();
        let blocks_per_request = driver.growth_blocks();
        driver.keep_answers_ahead(KvGrowth { groups, lookahead_tokens, blocks_per_request });
    }

    /// The mirror of a pool of `blocks` KV blocks, to be filled by `resync`.
    /// With a KV connector what is dead stays in the cache and is the first to go, and no session waits for others.
    fn pool(&self, blocks: u32, block_tokens: u32, has_connector: bool) -> BlockPool {
        let pool = self.engine.drive().add_pool(blocks, block_tokens, has_connector);
        BlockPool { engine: Arc::clone(&self.engine), pool }
    }

    /// The order of eviction of a store beside the engine's memory, of `chunks` chunks.
    fn store(&self, chunks: u32, block_tokens: u32) -> BlockPool {
        let pool = self.engine.drive().add_store(chunks, block_tokens);
        BlockPool { engine: Arc::clone(&self.engine), pool }
    }

    /// The request lost its KV blocks and waits again; `blocks` is how many that only it attended, for one that answers.
    /// True when it answers and one that does not could have gone instead.
    #[pyo3(signature = (request_id, blocks = 0))]
    fn preempted(&self, request_id: &str, blocks: u32) -> bool {
        self.of(request_id, |driver, row| driver.preempted(row, blocks)).unwrap_or(false)
    }

    /// The request has no KV blocks, and nobody chose it: all lost theirs, or it was so before this engine was there.
    fn lost_blocks(&self, request_id: &str) {
        self.of(request_id, Driver::lost_blocks);
    }

    /// Whether a policy reads which blocks waiting requests need.
    #[getter]
    fn reads_awaited(&self) -> bool {
        self.engine.drive().reads_awaited()
    }

    /// Whether a policy reads what is known of a block by the request and the session that used it last.
    #[getter]
    fn reads_chains(&self) -> bool {
        self.engine.drive().reads_chains()
    }

    /// The request stops: `stop` is "turn", "tool" or "preempted", `chains` its blocks in each pool, head first. Call it before
    /// they are freed.
    fn chain_ends(
        &self,
        request_id: &str,
        stop: &str,
        chains: Vec<(PyRef<'_, BlockPool>, Vec<u32>)>,
        now_ms: f64,
    ) -> PyResult<()> {
        let stop = match stop {
            "turn" => Stop::Turn,
            "tool" => Stop::Tool,
            "preempted" => Stop::Preempted,
            other => {
                return Err(PyValueError::new_err(format!("stop: {other:?}: expected turn, tool or preempted")));
            }
        };
        let chains: Vec<_> = chains.into_iter().map(|(pool, blocks)| (pool.pool, blocks)).collect();
        let driver = &mut *self.engine.drive();
        driver.set_clock(now_ms);
        driver.chain_ends(request_id, stop, &chains);
        Ok(())
    }

    /// Whether a policy reads how many KV blocks each request would free: they are dear to count.
    #[getter]
    fn reads_victim_blocks(&self) -> bool {
        self.engine.drive().reads_victim_blocks()
    }

    /// Which of the handles in `running` gives up its KV blocks; `blocks` are those that only it attends, for each, or
    /// empty when nobody reads them. None when one of the handles is not known.
    fn victim(&self, running: &Bound<'_, PyList>, blocks: Vec<u32>, memory: (f64, u32, u32, u32)) -> Option<usize> {
        let (now_ms, free_blocks, cached_blocks, total_blocks) = memory;
        let memory = Memory { now_ms, subject: Subject::Requests, free_blocks, cached_blocks, total_blocks };
        let handles = &mut *self.handles();
        if !handles.find(running, None) {
            return None;
        }
        self.engine.drive().victim(&memory, &handles.running, &blocks)
    }
}

#[pymethods]
impl BlockPool {
    /// Its number in the engine, for `Engine.end`.
    #[getter]
    fn number(&self) -> usize {
        self.pool.number()
    }

    /// Fill the mirror anew from the queue of free blocks, its front first. `tokens` gives for each the tokens of the
    /// prefix that it ends, None when no prompt can find it.
    fn resync(&self, blocks: Vec<u32>, tokens: Vec<Option<u32>>) {
        self.engine.drive().pool(self.pool).resync(blocks.into_iter().zip(tokens));
    }

    /// `taken` were handed out before. `count` of the `free` blocks are to be handed out now, and `ahead` or so in this step.
    /// Returns how many free blocks have no contents, how many may be handed out before the next choice, and the blocks to
    /// be put at the front of the queue for that; None when the mirror does not agree with the queue.
    fn choose(&self, taken: Vec<u32>, count: u32, ahead: u32, free: u32, now_ms: f64) -> Option<(u32, u32, Vec<u32>)> {
        let driver = &mut *self.engine.drive();
        let cached = driver.pool(self.pool);
        cached.taken(&taken, now_ms);
        if cached.free() != free {
            return None;
        }
        // What is put at the front goes before the blocks without contents.
        let count = if cached.empty() > 0 { count } else { count.max(ahead) };
        let chosen = cached.choose(count);
        let ready = if cached.is_in_order() { free } else { count.max(cached.empty()) };
        Some((cached.empty(), ready, chosen))
    }

    /// These were handed out. Returns how many free blocks have no contents.
    fn taken(&self, blocks: Vec<u32>, now_ms: f64) -> u32 {
        let driver = &mut *self.engine.drive();
        let cached = driver.pool(self.pool);
        cached.taken(&blocks, now_ms);
        cached.empty()
    }

    /// These are attended by one more.
    fn touched(&self, blocks: Vec<u32>) {
        self.engine.drive().pool(self.pool).touched(&blocks);
    }

    /// The prompt of a request matched these, its longest cached prefix: it may be the next turn of a session that no client
    /// names.
    fn prefix_matched(&self, request_id: &str, blocks: Vec<u32>) {
        let driver = &mut *self.engine.drive();
        if let Some(row) = driver.find(request_id) {
            driver.prefix_matched(self.pool, row, &blocks);
        }
    }

    /// The prompt of a waiting request matches these, its longest cached prefix.
    fn awaited(&self, blocks: Vec<u32>, now_ms: f64) {
        self.engine.drive().awaited(self.pool, &blocks, now_ms);
    }

    /// The request that waited for these will not come for them.
    fn not_awaited(&self, blocks: Vec<u32>) {
        self.engine.drive().pool(self.pool).not_awaited(&blocks);
    }

    /// A request has ended, which left these chunks in a store: the chain is that which it had in the engine's pools.
    fn stored_chain_ends(&self, request_id: &str, chunks: Vec<u32>) {
        self.engine.drive().stored_chain_ends(self.pool, request_id, &chunks);
    }

    /// A prompt matched these; `shared` are those of them that another request attended.
    fn matched(&self, blocks: Vec<u32>, shared: Vec<u32>) {
        let driver = &mut *self.engine.drive();
        let cached = driver.pool(self.pool);
        cached.matched(&blocks);
        cached.shared(&shared);
    }

    /// No later prompt will match these.
    fn mark_dead(&self, blocks: Vec<u32>) {
        self.engine.drive().pool(self.pool).mark_dead(&blocks);
    }

    /// These lose their last reader, in the order in which they would be freed; `tokens` as for `resync`. Returns those to
    /// be taken out of the prefix cache and all of them in the order in which they are to be freed; None when there is
    /// nothing to change.
    fn leaving(&self, blocks: Vec<u32>, tokens: Vec<Option<u32>>, now_ms: f64) -> Option<(Vec<u32>, Vec<u32>)> {
        let leaving: Vec<_> =
            blocks.iter().zip(tokens).map(|(block, tokens)| LeavingBlock { block: *block, tokens }).collect();
        let order = self.engine.drive().leaving(self.pool, &leaving, now_ms);
        (!order.dead.is_empty() || order.freed != blocks).then_some((order.dead, order.freed))
    }

    /// Ask the policy about what another one has ranked before it; see `CachedBlocks::rekey`. Returns of how many blocks.
    fn rekey(&self, now_ms: f64) -> usize {
        self.engine.drive().rekey(self.pool, now_ms)
    }

    /// These, which are cached, were used at `stamps`; see `CachedBlocks::stamp`.
    fn stamp(&self, blocks: Vec<u32>, stamps: Vec<u64>) {
        self.engine.drive().pool(self.pool).stamp(&blocks, &stamps);
    }

    /// What these hold was taken out of the prefix cache.
    fn emptied(&self, blocks: Vec<u32>) {
        self.engine.drive().pool(self.pool).emptied(&blocks);
    }

    /// The first `count` cached blocks to go.
    fn first(&self, count: usize) -> Vec<u32> {
        self.engine.drive().pool(self.pool).order().take(count).collect()
    }

    /// Free blocks with nothing in them, and cached ones.
    fn counts(&self) -> (u32, u32) {
        let driver = &mut *self.engine.drive();
        let cached = driver.pool(self.pool);
        (cached.empty(), cached.len())
    }

    /// Compare with the queue, given as to `resync`; raises AssertionError at the first difference.
    fn audit(&self, blocks: Vec<u32>, tokens: Vec<Option<u32>>) -> PyResult<()> {
        self.engine.drive().pool(self.pool).audit(blocks.into_iter().zip(tokens)).map_err(PyAssertionError::new_err)
    }
}

/// `meridian.KvStats`.
pub(crate) fn to_dict<'py>(py: Python<'py>, status: &KvStatus) -> PyResult<Bound<'py, PyDict>> {
    let KvStatus {
        evictions,
        offload_evictions,
        hit_tokens,
        missed_tokens,
        recomputed_tokens,
        avoidable_output_preemptions,
        moved_blocks,
        resyncs,
        kept_blocks,
        keeps,
    } = *status;
    let named = |names: [&str; 3], counts: [u64; 3]| -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        for (name, count) in names.iter().zip(counts) {
            dict.set_item(name, count)?;
        }
        Ok(dict)
    };
    let phases = ["prefill", "think", "output"];
    let dict = PyDict::new(py);
    let tiers = ["think_complete", "think_active", "output_critical"];
    dict.set_item("evictions", named(tiers, evictions)?)?;
    dict.set_item("offload_evictions", named(tiers, offload_evictions)?)?;
    dict.set_item("hit_tokens", named(phases, hit_tokens)?)?;
    dict.set_item("missed_tokens", named(phases, missed_tokens)?)?;
    dict.set_item("recomputed_tokens", recomputed_tokens)?;
    dict.set_item("avoidable_output_preemptions", avoidable_output_preemptions)?;
    dict.set_item("moved_blocks", moved_blocks)?;
    dict.set_item("resyncs", resyncs)?;
    dict.set_item("kept_blocks", kept_blocks)?;
    dict.set_item("keeps", named(["hit", "evicted", "expired"], keeps)?)?;
    Ok(dict)
}
