//! The order of eviction inside vLLM's own block pools.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use meridian_core::{CachedBlocks, LeavingBlock};
use meridian_runtime::control::KvStatus;
use pyo3::exceptions::PyAssertionError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::policies::Policies;

/// A mirror of the free blocks of one of vLLM's `BlockPool`s, and the order in which they go; `CachedBlocks` of
/// meridian-core says more. Blocks are named by their `block_id`. Called by the thread that schedules, and takes
/// microseconds.
#[pyclass(frozen, module = "meridian._native")]
pub(crate) struct BlockPool {
    cached: Arc<Mutex<CachedBlocks>>,
    policies: Py<Policies>,
}

impl BlockPool {
    pub(crate) fn new(cached: Arc<Mutex<CachedBlocks>>, policies: Py<Policies>) -> Self {
        Self { cached, policies }
    }

    fn lock(&self) -> MutexGuard<'_, CachedBlocks> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl BlockPool {
    /// Fill the mirror anew from the queue of free blocks, its front first. `tokens` gives for each the tokens of the
    /// prefix that it ends, None when no prompt can find it.
    fn resync(&self, blocks: Vec<u32>, tokens: Vec<Option<u32>>) {
        self.lock().resync(blocks.into_iter().zip(tokens));
    }

    /// Blocks to be put at the front of the queue, of which `free` are free, before `count` are handed out; None when the
    /// mirror does not agree with the queue.
    fn choose(&self, count: u32, free: u32) -> Option<Vec<u32>> {
        let cached = &mut *self.lock();
        (cached.free() == free).then(|| cached.choose(count))
    }

    /// These were handed out.
    fn taken(&self, blocks: Vec<u32>, now_ms: f64) {
        self.lock().taken(&blocks, now_ms);
    }

    /// These are attended by one more.
    fn touched(&self, blocks: Vec<u32>) {
        self.lock().touched(&blocks);
    }

    /// A prompt matched these; `shared` are those of them that another request attended.
    fn matched(&self, blocks: Vec<u32>, shared: Vec<u32>) {
        let cached = &mut *self.lock();
        cached.matched(&blocks);
        cached.shared(&shared);
    }

    /// No later prompt will match these.
    fn mark_dead(&self, blocks: Vec<u32>) {
        self.lock().mark_dead(&blocks);
    }

    /// These lose their last reader, in the order in which they would be freed; `tokens` as for `resync`. Returns those to
    /// be taken out of the prefix cache and all of them in the order in which they are to be freed; None when there is
    /// nothing to change.
    fn leaving(
        &self,
        py: Python<'_>,
        blocks: Vec<u32>,
        tokens: Vec<Option<u32>>,
        now_ms: f64,
    ) -> Option<(Vec<u32>, Vec<u32>)> {
        let leaving: Vec<_> =
            blocks.iter().zip(tokens).map(|(block, tokens)| LeavingBlock { block: *block, tokens }).collect();
        let policies = self.policies.borrow(py);
        let judges = &mut *policies.judges();
        let order = self.lock().leaving(&mut judges.eviction, &leaving, now_ms);
        (!order.dead.is_empty() || order.freed != blocks).then_some((order.dead, order.freed))
    }

    /// Ask the policy about what another one has ranked before it; see `CachedBlocks::rekey`. Returns of how many blocks.
    fn rekey(&self, py: Python<'_>, now_ms: f64) -> usize {
        let policies = self.policies.borrow(py);
        let judges = &mut *policies.judges();
        self.lock().rekey(&mut judges.eviction, now_ms)
    }

    /// These, which are cached, were used at `stamps`; see `CachedBlocks::stamp`.
    fn stamp(&self, blocks: Vec<u32>, stamps: Vec<u64>) {
        self.lock().stamp(&blocks, &stamps);
    }

    /// What these hold was taken out of the prefix cache.
    fn emptied(&self, blocks: Vec<u32>) {
        self.lock().emptied(&blocks);
    }

    /// The first `count` cached blocks to go.
    fn first(&self, count: usize) -> Vec<u32> {
        self.lock().order().take(count).collect()
    }

    /// Free blocks with nothing in them, and cached ones.
    fn counts(&self) -> (u32, u32) {
        let cached = self.lock();
        (cached.empty(), cached.len())
    }

    /// Compare with the queue, given as to `resync`; raises AssertionError at the first difference.
    fn audit(&self, blocks: Vec<u32>, tokens: Vec<Option<u32>>) -> PyResult<()> {
        self.lock().audit(blocks.into_iter().zip(tokens)).map_err(PyAssertionError::new_err)
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
    Ok(dict)
}
