//! A discrete-event simulation of vLLM V1 engines behind a router.
//!
//! What is simulated: continuous batching with chunked prefill, limits of tokens and sequences, a block pool with prefix cache
//! and LRU, preemption by recomputing, phases, and optionally early exit. What is not: the model. How long a step takes is a
//! [`StepModel`]. Each engine has the [`Driver`](meridian_engine::Driver) that vLLM's plugin drives, with the same slots and
//! policies, native or WebAssembly, and the host's order of the KV blocks. Engines may be parted into some that think and
//! some that answer ([`HandoffFleet`]).
//!
//! A run is deterministic: the same requests, configuration and seed give the same schedule. Memory is linear in the requests
//! that are live, and in the conversations so far: what was said in one may be asked for again.

use std::sync::Arc;

mod belady;
mod cluster;
mod content;
mod driven;
mod early_exit;
mod engine;
mod handoff;
mod live;
mod pool;
pub mod preset;
mod recorder;
mod sessions;
mod step;
mod step_model;
mod timeline;

pub use cluster::{Outcome, Router, Simulation, Swap};
pub use driven::Driven;
pub use handoff::{HandoffFleet, Transfer};
pub use recorder::RequestTimes;
pub use sessions::{Admitted, ClosedLoop};
pub use step_model::{StepModel, StepWork};

pub(crate) use self::belady::Belady;
pub(crate) use crate::policies::Policies;

/// One engine.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// How long a step takes.
    pub step: StepModel,
    /// Most running requests (vLLM: `max_num_seqs`).
    pub max_num_seqs: u32,
    /// Most tokens of a step (vLLM: `max_num_batched_tokens`).
    pub max_num_batched_tokens: u32,
    /// Most requests that run at a time (vLLM: `max_num_active_seqs`); 0 for `max_num_seqs`.
    pub max_num_active_seqs: u32,
    /// Most tokens of one prompt in a step beside other requests (vLLM: `long_prefill_token_threshold`); 0 for no limit.
    pub long_prefill_token_threshold: u32,
    /// That limit is at least a fair share of the step (vLLM: `long_prefill_token_threshold_adaptive`).
    pub long_prefill_token_threshold_adaptive: bool,
    /// Share of the KV blocks that admission leaves free (vLLM: `watermark`).
    pub watermark: f64,
    /// Admission needs blocks for the whole prompt, not for its first chunk only (vLLM: `scheduler_reserve_full_isl`).
    pub scheduler_reserve_full_isl: bool,
    /// Requests from which on further ones are turned away with 503 (vLLM: `max_num_queued_reqs`); 0 for no limit.
    pub max_num_queued_reqs: u32,
    /// KV blocks, the one that vLLM keeps for itself included.
    pub kv_blocks: u32,
    /// Tokens of a KV block.
    pub block_tokens: u32,
    /// KV blocks in which a request keeps its state, of a hybrid model (Mamba, GDN): prompts are then computed in whole
    /// blocks. 0 for a model without such layers.
    pub state_blocks: u32,
    /// Full blocks stay for later prompts.
    pub prefix_caching: bool,
    /// Bytes of the KV of one token, which a handoff moves; 0 if not known.
    pub kv_token_bytes: f64,
    /// Factors of the step time; each step takes one of them. Empty: every step takes what [`StepModel`] says.
    pub jitter: Arc<[f32]>,
}

impl EngineConfig {
    /// How many requests may run at a time.
    #[must_use]
    pub fn seats(&self) -> u32 {
        match self.max_num_active_seqs {
            0 => self.max_num_seqs,
            active => active.min(self.max_num_seqs),
        }
    }
}

impl EngineConfig {
    /// Of `tokens` of a prompt from `start` on, those that a step of at most `most` tokens computes, when the request has
    /// `known` tokens: parts end with a block, and so does the last but one (vllm/v1/core/sched/scheduler.py:
    /// `_mamba_block_aligned_split`).
    #[must_use]
    pub(crate) fn whole_blocks(&self, start: u32, tokens: u32, known: u32, most: u32) -> u32 {
        if self.state_blocks == 0 || start + 1 >= known {
            return tokens;
        }
        let floor = |end: u32| end / self.block_tokens * self.block_tokens;
        let mut end = start + tokens;
        if end < known && (floor(end) > start || self.block_tokens <= most) {
            end = floor(end);
        }
        let last = floor(known - 1);
        let stop = if start < last { end.min(last) } else { end };
        stop.saturating_sub(start)
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            step: StepModel::default(),
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            max_num_active_seqs: 0,
            long_prefill_token_threshold: 0,
            long_prefill_token_threshold_adaptive: false,
            watermark: 0.0,
            scheduler_reserve_full_isl: true,
            max_num_queued_reqs: 0,
            kv_blocks: 65_536,
            block_tokens: 16,
            state_blocks: 0,
            prefix_caching: true,
            kv_token_bytes: 0.0,
            jitter: Arc::new([]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// vLLM's `_mamba_block_aligned_split` for blocks of 528 tokens.
    #[test]
    fn a_hybrid_model_computes_its_prompts_in_whole_blocks() {
        let engine = EngineConfig { block_tokens: 528, state_blocks: 1, ..EngineConfig::default() };
        // Start, tokens, known tokens, tokens of the step -> tokens that are computed.
        let cases = [
            ((0, 1600, 1600, 2048), 1584),
            ((1584, 16, 1600, 2048), 16),
            ((0, 700, 1600, 2048), 528),
            ((528, 527, 1600, 2048), 0),
            ((528, 400, 1600, 500), 400),
            ((0, 1056, 1056, 2048), 528),
            ((0, 20, 20, 2048), 20),
            ((1600, 1, 1601, 2048), 1),
        ];
        for ((start, tokens, known, most), computed) in cases {
            assert_eq!(engine.whole_blocks(start, tokens, known, most), computed, "{start}, {tokens} of {known}");
        }
        assert_eq!(EngineConfig::default().whole_blocks(0, 700, 1600, 2048), 700);
    }
}
