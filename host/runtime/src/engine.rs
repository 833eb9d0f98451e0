use meridian_core::{
    Column, Decision, EngineFacts, EngineMirror, EvictionRanker, KvCounts, KvGrowth, Markers, Memory, Plan, Planner,
    RequestId, RequestTable, RowId, SchedulerConfig, Signals, StepTime,
};

use crate::slot::DispatchSlot;
use crate::stats::{SlotStats, Source};

/// The mirror, the slot and the planner of one engine, driven once a step: [`DispatchEngine::plan`], then the engine
/// schedules, then [`DispatchEngine::scheduled`].
pub struct DispatchEngine {
    mirror: EngineMirror,
    slot: DispatchSlot,
    planner: Planner,
    max_defer_ms: f32,
    block_tokens: u32,
    candidates: Vec<RowId>,
    last_source: Option<Source>,
}

impl DispatchEngine {
    /// An engine without requests. `block_tokens` is the size of a KV block.
    #[must_use]
    pub fn new(slot: DispatchSlot, markers: Markers, scheduler: &SchedulerConfig, block_tokens: u32) -> Self {
        let block_tokens = block_tokens.max(1);
        Self {
            mirror: EngineMirror::new(markers),
            slot,
            planner: Planner::default().with_block_tokens(block_tokens),
            max_defer_ms: scheduler.max_defer_ms,
            block_tokens,
            candidates: Vec::new(),
            last_source: None,
        }
    }

    /// See [`EngineMirror::set_steps_ahead`].
    pub fn set_steps_ahead(&mut self, steps: usize) {
        self.mirror.set_steps_ahead(steps);
    }

    /// The mirror's requests.
    #[must_use]
    pub fn table(&self) -> &RequestTable {
        &self.mirror.table
    }

    /// The mirror's requests, to feed them.
    pub fn table_mut(&mut self) -> &mut RequestTable {
        &mut self.mirror.table
    }

    /// What is reported next happened at `now_ms`. Without it, at the plan of the latest step.
    pub fn set_clock(&mut self, now_ms: f64) {
        self.mirror.hold_time(now_ms);
    }

    /// The latest time the engine told, 0 before any.
    #[must_use]
    pub fn now_ms(&self) -> f64 {
        self.mirror.now_ms()
    }

    /// The slot.
    #[must_use]
    pub fn slot(&self) -> &DispatchSlot {
        &self.slot
    }

    /// What the slot has done.
    #[must_use]
    pub fn stats(&self) -> SlotStats {
        self.slot.stats()
    }

    /// Who decided the last step.
    #[must_use]
    pub fn last_source(&self) -> Option<Source> {
        self.last_source
    }

    /// The learned step time.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        self.mirror.step_time()
    }

    /// Live requests in prefill, think and output.
    #[must_use]
    pub fn phases(&self) -> [u64; 3] {
        self.mirror.phases()
    }

    /// Preemptions of requests in prefill, think and output.
    #[must_use]
    pub fn preemptions(&self) -> [u64; 3] {
        self.mirror.preemptions()
    }

    /// Take in what was measured of the candidates' thinking: for a policy that reads it, a shadow or a recording, and nothing
    /// otherwise. `of` tells it of a request.
    pub fn refresh_signals(&mut self, running: &[RowId], waiting: &[RowId], of: impl Fn(RequestId) -> Option<Signals>) {
        if !self.slot.shows(&[Column::Eat, Column::EatVariance, Column::Rpdi]) {
            return;
        }
        let table = &mut self.mirror.table;
        for row in running.iter().chain(waiting) {
            if let Some(signals) = table.get(*row).and_then(|request| of(request.id())) {
                table.set_signals(*row, signals);
            }
        }
    }

    /// Plan one step over the running list and the waiting candidates, both in the engine's present order.
    pub fn plan(&mut self, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) -> &Plan {
        let facts = &EngineFacts { now_ms: self.mirror.hold_time(facts.now_ms), ..*facts };
        let step = self.mirror.begin_step(facts, running, waiting);
        self.candidates.clear();
        self.candidates.extend_from_slice(running);
        self.candidates.extend_from_slice(waiting);
        let (source, decision) = self.slot.decide(&step, &self.mirror.table, &self.candidates, self.block_tokens);
        self.last_source = Some(source);
        let plan = self.planner.plan(&self.mirror.table, facts, running, waiting, decision, self.max_defer_ms);
        if plan.overruled && source == Source::Active {
            self.slot.count_idle_plan();
        }
        plan
    }

    /// What the latest plan left to run could not run, and the engine lifted the plan's caps to have something to do.
    pub fn overruled(&mut self) {
        if self.last_source == Some(Source::Active) {
            self.slot.count_idle_plan();
        }
    }

    /// The same for a step that the engine keeps to itself, because [`STOCK`](meridian_core::config::STOCK) decides and
    /// nobody watches: it is followed, and the decision is counted, but nobody is asked.
    pub fn keep(&mut self, facts: &EngineFacts) {
        let facts = &EngineFacts { now_ms: self.mirror.hold_time(facts.now_ms), ..*facts };
        self.mirror.begin_step(facts, &[], &[]);
        self.slot.count_unasked(facts.now_ms);
        self.last_source = Some(Source::Active);
        self.planner.plan(&self.mirror.table, facts, &[], &[], &Decision::default(), self.max_defer_ms);
    }

    /// Put priorities before the policy's keys; see [`Planner::put_priority_first`].
    pub fn put_priority_first(&mut self) {
        self.planner.put_priority_first();
    }

    /// The engine scheduled the planned step, which began at `now_ms`: `given` tokens for each request.
    pub fn scheduled(&mut self, now_ms: f64, given: impl IntoIterator<Item = (RowId, u32)>) {
        let now_ms = self.mirror.hold_time(now_ms);
        let tokens = self.mirror.scheduled(now_ms, given);
        self.planner.settle(&mut self.mirror.table, tokens, now_ms);
    }

    /// See [`EngineMirror::scheduled_besides`].
    pub fn scheduled_besides(&mut self, tokens: u32) {
        self.mirror.scheduled_besides(tokens);
    }

    /// The request was admitted with this many of its tokens found in the prefix cache.
    pub fn admitted(&mut self, slot: RowId, cached_tokens: u32) {
        self.mirror.admitted(slot, cached_tokens);
    }

    /// See [`EngineMirror::lost_blocks`].
    pub fn lost_blocks(&mut self, slot: RowId) {
        self.mirror.lost_blocks(slot);
    }

    /// See [`EngineMirror::preempted`].
    pub fn preempted(&mut self, slot: RowId) -> bool {
        self.mirror.preempted(slot)
    }

    /// See [`Planner::keep_answers_ahead`].
    pub fn keep_answers_ahead(&mut self, growth: KvGrowth) {
        self.planner.keep_answers_ahead(growth);
    }

    /// See [`EngineMirror::victim`].
    pub fn victim(
        &self,
        policy: &mut dyn EvictionRanker,
        memory: &Memory,
        running: &[RowId],
        blocks: &[u32],
    ) -> Option<usize> {
        self.mirror.victim(policy, memory, running, blocks)
    }

    /// See [`EngineMirror::kv_counts`].
    #[must_use]
    pub fn kv_counts(&self) -> KvCounts {
        self.mirror.kv_counts()
    }

    /// The engine has nothing to do: the time until the next step is not a step's.
    pub fn idle(&mut self) {
        self.mirror.idle();
    }
}
