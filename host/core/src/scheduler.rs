//! [`MeridianScheduler`]: the dispatch slot, the planner, and the requests that both see.

use std::fmt;

use meridian_policy_sdk::Decision;

use crate::config::ServiceLevels;
use crate::slot::{DispatchSlot, Source};
use crate::table::SessionMemory;
use crate::{
    CachedBlocks, Column, EngineFacts, EngineMirror, KvGrowth, Markers, Plan, Planner, RowId, SchedulerConfig, StepTime,
};

/// Waiting requests that a policy sees in one step; the others keep their place behind them.
pub const WAITING_WINDOW: usize = 4096;

/// Plans the steps of an engine with queues, such as vLLM. The engine reports its requests to
/// [`MeridianScheduler::mirror`] and carries out the plans of [`MeridianScheduler::plan`]. One thread uses it.
///
/// The policy of a [`DispatchSlot`] decides the order, the tokens of the step and the tokens of each request. The host
/// itself ensures that no request is lost or duplicated, and that the engine's token budget holds. A request without
/// tokens for longer than `max_defer_ms` (a waiting one: while a seat was free, and when its turn has come) gets some in
/// the next step, as far as that step's budget allows, the longest first. A policy that faults costs only that decision:
/// the default decides the same step.
///
/// ```
/// use meridian_core::slot::DispatchSlot;
/// use meridian_core::{EngineFacts, Markers, MeridianScheduler, NewRequest, SchedulerConfig, native};
///
/// let config = SchedulerConfig::default();
/// let slot = DispatchSlot::new(native::default_policy(config.targets()), config.targets());
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let mut scheduler = MeridianScheduler::for_engine(slot, markers, &config, 16);
///
/// let row = scheduler.mirror().table.insert(&NewRequest { prompt: &[1, 2, 7], ..NewRequest::default() })?;
/// let facts = EngineFacts { token_budget: 2048, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
/// assert_eq!(scheduler.plan(&facts, &[], &[row]).token_budget, 2048);
/// scheduler.scheduled(facts.now_ms, [(row, 3)]);
/// assert_eq!(scheduler.mirror().table[row].computed_tokens(), 3);
/// # Ok::<(), meridian_core::Error>(())
/// ```
pub struct MeridianScheduler {
    mirror: EngineMirror,
    slot: DispatchSlot,
    planner: Planner,
    max_defer_ms: f32,
    session_wait_ms: f32,
    block_tokens: u32,
    last_source: Option<Source>,
    /// Buffer of one step.
    candidates: Vec<RowId>,
    /// What the slot was told of ended requests.
    ended: u64,
}

impl MeridianScheduler {
    /// A scheduler without requests. `block_tokens` is the size of a KV block.
    #[must_use]
    pub fn for_engine(slot: DispatchSlot, markers: Markers, config: &SchedulerConfig, block_tokens: u32) -> Self {
        let block_tokens = block_tokens.max(1);
        let mut planner = Planner::default().with_block_tokens(block_tokens);
        if config.preempt_for_waiting {
            planner.preempt_for_waiting();
        }
        Self {
            mirror: EngineMirror::new(markers),
            slot,
            planner,
            max_defer_ms: config.max_defer_ms,
            session_wait_ms: config.session_wait_ms,
            block_tokens,
            last_source: None,
            candidates: Vec::new(),
            ended: 0,
        }
    }

    /// The learned step time; `None` before enough steps.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        self.mirror.step_time()
    }

    /// The mirror of the engine, to update and to read.
    pub fn mirror(&mut self) -> &mut EngineMirror {
        &mut self.mirror
    }

    /// Promise these service levels to the requests that arrive; before the first of them.
    pub fn promise(&mut self, levels: &ServiceLevels) {
        self.mirror.table.promise(levels);
    }

    /// Defer requests for at most this long from now on.
    pub fn set_max_defer_ms(&mut self, max_defer_ms: f32) {
        self.max_defer_ms = max_defer_ms;
    }

    /// Whether a policy of the dispatch slot reads what KV memory sessions have.
    #[must_use]
    pub fn reads_sessions(&self) -> bool {
        self.slot.reads(Column::ResidentTokens) || self.slot.reads(Column::RoomTokens)
    }

    /// Let requests of cold sessions wait for warm ones for at most this long from now on; 0 for not at all.
    pub fn set_session_wait_ms(&mut self, session_wait_ms: f32) {
        self.session_wait_ms = session_wait_ms;
    }

    /// The dispatch slot.
    pub fn slot(&mut self) -> &mut DispatchSlot {
        &mut self.slot
    }

    /// The decider of the latest step.
    pub fn last_source(&mut self) -> Option<Source> {
        self.last_source
    }

    /// Put priorities before the policy's keys; see [`Planner::put_priority_first`].
    pub fn put_priority_first(&mut self) {
        self.planner.put_priority_first();
    }

    /// Prompts are computed in whole state blocks; see [`Planner::compute_state_blocks`].
    pub fn compute_state_blocks(&mut self, tokens: u32) {
        self.planner.compute_state_blocks(tokens);
    }

    /// Keep answers ahead; see [`Planner::keep_answers_ahead`].
    pub fn keep_answers_ahead(&mut self, growth: KvGrowth) {
        self.planner.keep_answers_ahead(growth);
    }

    /// Tell the policies what KV memory sessions have, before [`MeridianScheduler::plan`] of the same step; in `cached`, the
    /// engine's pool. No session waits for others where what it has lost is `loaded` by a KV connector. Does nothing where
    /// layers take their own blocks from the pool, in groups.
    pub fn note_sessions(
        &mut self,
        cached: &mut CachedBlocks,
        loaded: bool,
        facts: &EngineFacts,
        running: &[RowId],
        waiting: &[RowId],
    ) {
        if waiting.is_empty() || !self.planner.keeps_all_blocks() || !self.reads_sessions() {
            return;
        }
        let for_prompts = self.planner.blocks_of_prompts(&self.mirror.table, facts, running, i32::MAX);
        let warm = cached.warm(facts.now_ms, |session| self.mirror.table.waits(session));
        let room = i64::from(facts.free_blocks) - i64::from(for_prompts) - i64::from(warm);
        let block_tokens = self.block_tokens;
        let waits = self.session_wait_ms > 0.0 && !loaded;
        let memory = SessionMemory {
            room_tokens: if waits { (room * i64::from(block_tokens)) as f32 } else { f32::INFINITY },
            holds_ms: waits.then_some(f64::from(self.session_wait_ms)),
            step_tokens: facts.token_budget,
        };
        let tokens = |session| cached.of_session(session).saturating_mul(block_tokens);
        self.mirror.table.set_memory(memory, waiting, tokens);
    }

    /// Plan one step over the running list and the waiting candidates of an engine, both in its present order. The
    /// engine schedules, and [`MeridianScheduler::scheduled`] follows.
    pub fn plan(&mut self, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) -> &Plan {
        let Self { mirror, slot, planner, max_defer_ms, block_tokens, last_source, candidates, ended, .. } = self;
        let facts = &EngineFacts { now_ms: mirror.hold_time(facts.now_ms), ..*facts };
        let step = mirror.begin_step(facts, running, waiting);
        planner.refuse(&mut mirror.table, facts.now_ms, running.len());
        candidates.clear();
        candidates.extend_from_slice(running);
        candidates.extend_from_slice(waiting);
        slot.note_finished(mirror.table.ended_since(ended));
        let reads_room = slot.is_read_by_active(Column::RoomTokens);
        let (source, decision) = slot.decide(&step, &mirror.table, candidates, *block_tokens);
        if source == Source::Active && !reads_room {
            mirror.table.no_room_was_read();
        }
        *last_source = Some(source);
        let plan = planner.plan(&mirror.table, facts, running, waiting, decision, *max_defer_ms);
        mirror.will_preempt(&plan.preempted, facts.waiting as usize);
        mirror.table.forget_memory();
        if plan.overruled && source == Source::Active {
            slot.overruled();
        }
        plan
    }

    /// The latest plan.
    pub fn latest_plan(&mut self) -> &Plan {
        self.planner.latest()
    }

    /// Report that no request that the latest plan left could run, so that the engine lifted the plan's caps.
    pub fn overruled(&mut self) {
        if self.last_source == Some(Source::Active) {
            self.slot.overruled();
        }
    }

    /// Replaces [`MeridianScheduler::plan`] for a step that the engine plans itself, because
    /// [`STOCK`](crate::config::STOCK) decides without a shadow or a recording. Counts the decision, and calls no
    /// policy.
    pub fn keep(&mut self, facts: &EngineFacts) {
        let Self { mirror, slot, planner, max_defer_ms, last_source, ended, .. } = self;
        let facts = &EngineFacts { now_ms: mirror.hold_time(facts.now_ms), ..*facts };
        mirror.begin_step(facts, &[], &[]);
        // A policy that comes later is not told of what ended before it.
        mirror.table.ended_since(ended);
        mirror.will_preempt(&[], 0);
        planner.refuse(&mut mirror.table, facts.now_ms, 0);
        slot.kept(facts.now_ms);
        *last_source = Some(Source::Active);
        planner.plan(&mirror.table, facts, &[], &[], &Decision::default(), *max_defer_ms);
    }

    /// Report the planned step, which began at `now_ms`: `given` tokens for each request.
    pub fn scheduled(&mut self, now_ms: f64, given: impl IntoIterator<Item = (RowId, u32)>) {
        let Self { mirror, planner, .. } = self;
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
