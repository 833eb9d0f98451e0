use crate::RequestId;

/// The limits of one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// Time on the caller's clock, the clock of [`NewRequest::arrival_ms`](meridian_core::NewRequest), milliseconds.
    pub now_ms: f64,
    /// Most tokens in the step, at least 1.
    pub token_budget: u32,
    /// Most requests that run at the same time.
    pub max_running: u32,
    /// Free KV blocks, for policies; admission is by seats, so an engine short of blocks preempts.
    pub free_blocks: u32,
    /// All KV blocks.
    pub total_blocks: u32,
    /// Tokens that one decoding request takes in a step: 1, or more with speculation.
    pub decode_tokens: u32,
    /// Tokens in a KV block.
    pub block_tokens: u32,
}

impl Default for StepLimits {
    fn default() -> Self {
        Self {
            now_ms: 0.0,
            token_budget: 2048,
            max_running: 256,
            free_blocks: 0,
            total_blocks: 0,
            decode_tokens: 1,
            block_tokens: 16,
        }
    }
}

/// Tokens that one request takes in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The request.
    pub request: RequestId,
    /// Number of tokens, at least 1.
    pub tokens: u32,
}

/// The work of one step, most urgent first. Every request appears at most once, in one queue.
///
/// ```
/// use meridian_memory::{Grant, RequestId, ScheduledBatch};
///
/// let think = vec![Grant { request: RequestId(1), tokens: 4 }];
/// assert_eq!(ScheduledBatch { think, ..ScheduledBatch::default() }.tokens(), 4);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduledBatch {
    /// Requests that answer, while a user watches.
    pub output: Vec<Grant>,
    /// Requests that think or are in prefill: throughput work.
    pub think: Vec<Grant>,
    /// Token budget of the step, at most the caller's own budget.
    pub token_budget: u32,
}

impl ScheduledBatch {
    /// Tokens in the step.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.output.iter().chain(&self.think).map(|grant| grant.tokens).sum()
    }
}

/// Requests in each state.
///
/// ```
/// use meridian_core::{Markers, NewRequest, SchedulerConfig};
/// use meridian_memory::{OwnQueues, QueueStats, RequestId};
///
/// let queues = OwnQueues::new(&SchedulerConfig::default(), Markers::default());
/// queues.submit(RequestId(1), &NewRequest::default())?;
/// assert_eq!(queues.stats(), QueueStats { waiting: 1, ..QueueStats::default() });
/// # Ok::<(), meridian_memory::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueStats {
    /// Running and answering.
    pub output: usize,
    /// Running and thinking.
    pub think: usize,
    /// Running and in prefill.
    pub prefill: usize,
    /// Waiting, preempted ones included.
    pub waiting: usize,
}
