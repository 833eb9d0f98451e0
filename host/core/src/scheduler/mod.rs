//! [`MeridianScheduler`]: the dispatch slot, the planner, and the requests that both see.

mod queues;
mod types;

use std::fmt;

use meridian_policy_sdk::Decision;

use self::queues::Requests;
use crate::slot::{DispatchSlot, Source};
use crate::sync::{Mutex, get_mut, lock};
use crate::{
    EngineFacts, EngineMirror, Fault, KvGrowth, Markers, Plan, Planner, RowId, SchedulerConfig, StepTime, native,
};

pub use self::types::{Grant, QueueStats, ScheduledBatch, StepLimits};

/// Waiting requests that a policy sees in one step; the others keep their place behind them.
pub const WAITING_WINDOW: usize = 4096;

/// Plans the steps of an engine. With [`MeridianScheduler::for_engine`], it plans over the queues of an engine such as
/// vLLM. With [`MeridianScheduler::new`], the queues are its own: the caller submits requests, takes a batch for each
/// step, and reports generated tokens.
///
/// The policy of a [`DispatchSlot`] decides the order, the tokens of the step and the tokens of each request. The default is the host's own
/// `balanced`: every decode, the output phase first, and as many prompt tokens beside them as they can bear. Among
/// waiting requests, it takes the one that has waited longest for its cost; before that, it goes by priority, and near
/// deadlines have the highest priority. Candidates of equal keys go in their present order, running ones first. The
/// tenant of a request is a fact for policies.
///
/// The scheduler itself ensures that no request is lost or duplicated, and that the token budget and the number of
/// running requests hold. A request without tokens for longer than `max_defer_ms` (a waiting one: while a seat was
/// free, and when its turn has come) gets some in the next step, as far as that step's budget allows, the longest
/// first. A policy that faults costs only that decision: the default decides the same step.
///
/// `Send + Sync`, with its own queues. One thread schedules at a time. While a policy decides, no lock is held that
/// [`MeridianScheduler::submit`], [`MeridianScheduler::generated`] or [`MeridianScheduler::finish`] would wait for.
///
/// ```
/// use meridian_core::{Markers, MeridianScheduler, NewRequest, RequestId, SchedulerConfig, StepLimits};
///
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let scheduler = MeridianScheduler::new(&SchedulerConfig::default(), markers);
/// for id in 0..3 {
///     scheduler.submit(RequestId(id), &NewRequest { prompt: &[1, 7], ..NewRequest::default() })?;
/// }
/// let limits = StepLimits { token_budget: 5, max_running: 2, ..StepLimits::default() };
/// let batch = scheduler.schedule_batch(&limits);
/// assert_eq!(batch.think.iter().map(|grant| (grant.request.0, grant.tokens)).collect::<Vec<_>>(), [(0, 2), (1, 2)]);
/// assert!(scheduler.finish(RequestId(0)));
/// assert_eq!(scheduler.queues().waiting, 1);
/// # Ok::<(), meridian_core::Error>(())
/// ```
pub struct MeridianScheduler {
    requests: Mutex<Requests>,
    /// Locked before the other, never after.
    deciding: Mutex<Deciding>,
    max_defer_ms: f32,
}

/// The scheduling thread's data besides the requests, and buffers for one step.
struct Deciding {
    slot: DispatchSlot,
    planner: Planner,
    block_tokens: u32,
    last_source: Option<Source>,
    running: Vec<RowId>,
    waiting: Vec<RowId>,
    candidates: Vec<RowId>,
    caps: Vec<u32>,
    given: Vec<(RowId, u32)>,
    /// What the slot was told of ended requests.
    ended: u64,
}

impl MeridianScheduler {
    /// A scheduler with its own queues and the native default policy.
    #[must_use]
    pub fn new(config: &SchedulerConfig, markers: Markers) -> Self {
        let targets = config.targets();
        Self::with_slot(DispatchSlot::new(native::default_policy(targets), targets), markers, config)
    }

    /// The same with another policy.
    #[must_use]
    pub fn with_slot(slot: DispatchSlot, markers: Markers, config: &SchedulerConfig) -> Self {
        Self::made(slot, Planner::owning_queues(), markers, config, 1)
    }

    /// Faults of the policies so far, and the latest. Waits for a running decision.
    #[must_use]
    pub fn faults(&self) -> (u64, Option<Fault>) {
        let slot = &lock(&self.deciding).slot;
        (slot.fault_count(), slot.last_fault())
    }

    fn made(
        slot: DispatchSlot,
        planner: Planner,
        markers: Markers,
        config: &SchedulerConfig,
        block_tokens: u32,
    ) -> Self {
        let deciding = Deciding {
            slot,
            planner,
            block_tokens,
            last_source: None,
            running: Vec::new(),
            waiting: Vec::new(),
            candidates: Vec::new(),
            caps: Vec::new(),
            given: Vec::new(),
            ended: 0,
        };
        Self {
            requests: Mutex::new(Requests::new(EngineMirror::new(markers))),
            deciding: Mutex::new(deciding),
            max_defer_ms: config.max_defer_ms,
        }
    }

    /// The learned step time; `None` before enough steps.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        lock(&self.requests).mirror.step_time()
    }
}

/// For an engine with its own queues.
impl MeridianScheduler {
    /// A scheduler for an engine with its own queues. The engine reports its requests to [`MeridianScheduler::mirror`]
    /// and carries out the plans of [`MeridianScheduler::plan`]. `block_tokens` is the size of a KV block.
    #[must_use]
    pub fn for_engine(slot: DispatchSlot, markers: Markers, config: &SchedulerConfig, block_tokens: u32) -> Self {
        let block_tokens = block_tokens.max(1);
        let mut planner = Planner::default().with_block_tokens(block_tokens);
        if config.preempt_for_waiting {
            planner.preempt_for_waiting();
        }
        Self::made(slot, planner, markers, config, block_tokens)
    }

    /// The mirror of the engine, to update and to read. Takes no lock.
    pub fn mirror(&mut self) -> &mut EngineMirror {
        &mut get_mut(&mut self.requests).mirror
    }

    /// The dispatch slot. Takes no lock.
    pub fn slot(&mut self) -> &mut DispatchSlot {
        &mut get_mut(&mut self.deciding).slot
    }

    /// The decider of the latest step.
    pub fn last_source(&mut self) -> Option<Source> {
        get_mut(&mut self.deciding).last_source
    }

    /// Put priorities before the policy's keys; see [`Planner::put_priority_first`].
    pub fn put_priority_first(&mut self) {
        get_mut(&mut self.deciding).planner.put_priority_first();
    }

    /// Keep answers ahead; see [`Planner::keep_answers_ahead`].
    pub fn keep_answers_ahead(&mut self, growth: KvGrowth) {
        get_mut(&mut self.deciding).planner.keep_answers_ahead(growth);
    }

    /// Plan one step over the running list and the waiting candidates of an engine, both in its present order. The
    /// engine schedules, and [`MeridianScheduler::scheduled`] follows.
    pub fn plan(&mut self, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) -> &Plan {
        let Requests { mirror, .. } = get_mut(&mut self.requests);
        let Deciding { slot, planner, block_tokens, last_source, candidates, ended, .. } = get_mut(&mut self.deciding);
        let facts = &EngineFacts { now_ms: mirror.hold_time(facts.now_ms), ..*facts };
        let step = mirror.begin_step(facts, running, waiting);
        candidates.clear();
        candidates.extend_from_slice(running);
        candidates.extend_from_slice(waiting);
        let table = &mirror.table;
        slot.note_finished(table.ended_since(ended));
        let (source, decision) = slot.decide(&step, table, candidates, *block_tokens);
        *last_source = Some(source);
        let plan = planner.plan(table, facts, running, waiting, decision, self.max_defer_ms);
        mirror.will_preempt(&plan.preempted, facts.waiting as usize);
        if plan.overruled && source == Source::Active {
            slot.overruled();
        }
        plan
    }

    /// The latest plan.
    pub fn latest_plan(&mut self) -> &Plan {
        get_mut(&mut self.deciding).planner.latest()
    }

    /// Report that no request that the latest plan left could run, so that the engine lifted the plan's caps.
    pub fn overruled(&mut self) {
        let Deciding { slot, last_source, .. } = get_mut(&mut self.deciding);
        if *last_source == Some(Source::Active) {
            slot.overruled();
        }
    }

    /// Replaces [`MeridianScheduler::plan`] for a step that the engine plans itself, because
    /// [`STOCK`](crate::config::STOCK) decides without a shadow or a recording. Counts the decision, and calls no
    /// policy.
    pub fn keep(&mut self, facts: &EngineFacts) {
        let Requests { mirror, .. } = get_mut(&mut self.requests);
        let Deciding { slot, planner, last_source, ended, .. } = get_mut(&mut self.deciding);
        let facts = &EngineFacts { now_ms: mirror.hold_time(facts.now_ms), ..*facts };
        mirror.begin_step(facts, &[], &[]);
        // A policy that comes later is not told of what ended before it.
        mirror.table.ended_since(ended);
        mirror.will_preempt(&[], 0);
        slot.kept(facts.now_ms);
        *last_source = Some(Source::Active);
        planner.plan(&mirror.table, facts, &[], &[], &Decision::default(), self.max_defer_ms);
    }

    /// Report the planned step, which began at `now_ms`: `given` tokens for each request.
    pub fn scheduled(&mut self, now_ms: f64, given: impl IntoIterator<Item = (RowId, u32)>) {
        let Requests { mirror, .. } = get_mut(&mut self.requests);
        let Deciding { planner, .. } = get_mut(&mut self.deciding);
        let now_ms = mirror.hold_time(now_ms);
        let tokens = mirror.scheduled(now_ms, given);
        planner.settle(&mut mirror.table, tokens, now_ms);
    }
}

impl fmt::Debug for MeridianScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeridianScheduler").field("max_defer_ms", &self.max_defer_ms).finish_non_exhaustive()
    }
}
