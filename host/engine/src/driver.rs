use std::collections::HashMap;
use std::sync::Arc;

use meridian_core::config::STOCK;
use meridian_core::{
    EngineFacts, Error, MeridianConfig, NewRequest, PhaseEvent, Plan, RequestId, RequestState, RowId, ThinkPhase,
};
use meridian_runtime::control::ProcessStatus;
use meridian_runtime::traces::{FinishedRequest, Traces};
use meridian_runtime::{BudgetSlot, DispatchEngine, DispatchSlot, EvictionSlot};

use crate::Settings;
use crate::kv::Kv;
use crate::thinking::Thinking;

/// An engine as the thread that schedules sees it: what it tells of its requests, and the plan of each step.
///
/// A step is [`Driver::plan`] (or [`Driver::keep`], where the engine is stock), then [`Driver::scheduled`], and when its
/// tokens are there [`Driver::generated`]. Each call takes microseconds; a policy that is asked has its deadline.
pub struct Driver {
    pub(crate) dispatch: DispatchEngine,
    pub(crate) eviction: EvictionSlot,
    pub(crate) budget: BudgetSlot,
    pub(crate) config: MeridianConfig,
    pub(crate) settings: Settings,
    /// The engine's text id -> row.
    by_id: HashMap<Box<str>, RowId>,
    /// Number of the next request; numbers are not used again.
    next_id: u64,
    /// Requests that waited at the latest step.
    pub(crate) waiting: u32,
    pub(crate) thinking: Option<Thinking>,
    pub(crate) kv: Kv,
    /// Told of every request that ends.
    pub(crate) traces: Option<Arc<Traces>>,
    /// The configuration has no say in KV memory or thinking: the engine is stock while each slot's configured policy is.
    leaves_the_rest: bool,
    events: Vec<PhaseEvent>,
}

impl Driver {
    pub(crate) fn new(
        config: MeridianConfig,
        settings: Settings,
        dispatch: DispatchSlot,
        eviction: EvictionSlot,
        budget: BudgetSlot,
    ) -> Self {
        let markers = settings.markers.clone();
        let mut dispatch = DispatchEngine::new(dispatch, markers, &config.scheduler, settings.block_tokens);
        dispatch.set_steps_ahead(settings.steps_ahead);
        if settings.priority_first {
            dispatch.put_priority_first();
        }
        let leaves_the_rest = config.leaves_memory_and_thinking();
        Self {
            dispatch,
            eviction,
            budget,
            config,
            settings,
            by_id: HashMap::new(),
            next_id: 0,
            waiting: 0,
            thinking: None,
            kv: Kv::default(),
            traces: None,
            leaves_the_rest,
            events: Vec::new(),
        }
    }

    /// A request arrived. The times of `request` are on the clock of [`EngineFacts::now_ms`].
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] when the id is live, [`Error::NotATime`].
    pub fn arrived(&mut self, id: &str, request: &NewRequest<'_>) -> Result<RowId, Error> {
        if let Some(request) = self.find(id).and_then(|row| self.request(row)) {
            return Err(Error::DuplicateRequest { id: request.id() });
        }
        let row = self.dispatch.table_mut().insert(RequestId(self.next_id), request)?;
        self.next_id += 1;
        self.by_id.insert(id.into(), row);
        Ok(row)
    }

    /// The row of a live request.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<RowId> {
        self.by_id.get(id).copied()
    }

    /// What is known of a live request.
    #[must_use]
    pub fn request(&self, row: RowId) -> Option<&RequestState> {
        self.dispatch.table().get(row)
    }

    /// Plan one step over the running list and the waiting candidates, both in the engine's present order. `waiting` of the
    /// facts counts all that wait. A part of the cached blocks that another eviction policy has ranked is ranked anew.
    pub fn plan(&mut self, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) -> &Plan {
        self.waiting = facts.waiting;
        self.rekey_pools(facts.now_ms);
        if let Some(thinking) = &self.thinking {
            self.dispatch.refresh_signals(running, waiting, |request| thinking.signals(request.0));
        }
        self.dispatch.plan(facts, running, waiting)
    }

    /// In the place of [`Driver::plan`], for a step of an engine that [`Driver::is_stock`] and not [`Driver::is_watched`]:
    /// the engine keeps its own order and budget.
    pub fn keep(&mut self, facts: &EngineFacts) {
        self.waiting = facts.waiting;
        self.dispatch.keep(facts);
    }

    /// The engine scheduled the step that was planned at `now_ms`: tokens of each request, and those of nobody's request
    /// (probes).
    pub fn scheduled(&mut self, now_ms: f64, given: &[(RowId, u32)], besides: u32) {
        self.dispatch.scheduled(now_ms, given.iter().copied());
        self.dispatch.scheduled_besides(besides);
    }

    /// The request was admitted with this many of its tokens already computed (prefix cache).
    pub fn admitted(&mut self, row: RowId, cached_tokens: u32) {
        self.dispatch.admitted(row, cached_tokens);
    }

    /// The engine's own count of a request's computed tokens.
    pub fn set_computed(&mut self, row: RowId, computed_tokens: u32) {
        self.dispatch.table_mut().set_computed(row, computed_tokens);
    }

    /// What is reported next happened at `now_ms`. Without it, at the plan of the latest step.
    pub fn set_clock(&mut self, now_ms: f64) {
        self.dispatch.set_clock(now_ms);
    }

    /// Tokens were generated for the request, in order.
    pub fn generated(&mut self, row: RowId, tokens: &[u32]) {
        self.events.clear();
        self.dispatch.table_mut().generated(row, tokens, &mut self.events);
        if let (Some(thinking), Some(request)) = (&mut self.thinking, self.dispatch.table().get(row)) {
            thinking.generated(request.id().0, tokens, self.dispatch.now_ms());
        }
    }

    /// The request lost its KV blocks and waits again; `blocks` is how many that only it attended. True when it answers and
    /// one that does not could have gone instead.
    pub fn preempted(&mut self, row: RowId, blocks: u32) -> bool {
        if self.request(row).is_some_and(|request| request.phase() == ThinkPhase::Output) {
            self.kv.output_critical_evictions += u64::from(blocks);
        }
        self.dispatch.preempted(row)
    }

    /// The request has no KV blocks, and nobody chose it: all lost theirs, or it was so before this engine was there.
    pub fn lost_blocks(&mut self, row: RowId) {
        self.dispatch.lost_blocks(row);
    }

    /// The request is over; `reason` is the engine's word for why. Returns the row that it had.
    pub fn finished(&mut self, id: &str, reason: &str) -> Option<RowId> {
        let row = self.by_id.remove(id);
        if let Some(row) = row {
            if let (Some(traces), Some(request)) = (&self.traces, self.dispatch.table().get(row)) {
                let version = self.dispatch.slot().version();
                traces.request(FinishedRequest {
                    reason: reason.to_owned(),
                    policy: (version.name.clone(), version.version.clone()),
                    ..FinishedRequest::of(request, id, self.dispatch.now_ms())
                });
            }
            if let (Some(thinking), Some(request)) = (&mut self.thinking, self.dispatch.table().get(row)) {
                thinking.remove(request.id().0);
            }
            self.dispatch.table_mut().remove(row);
        }
        if self.dispatch.table().is_empty() {
            self.dispatch.idle();
        }
        row
    }

    /// The engine ran dry: the time until the next step is not a step's.
    pub fn idle(&mut self) {
        self.dispatch.idle();
    }

    /// What the latest plan left to run could not run, and the engine lifted its caps.
    pub fn overruled(&mut self) {
        self.dispatch.overruled();
    }

    /// Whether the next step is the engine's own: `native:fcfs` decides in the dispatch slot, and neither the configuration
    /// nor a swap has a say in KV memory or thinking. The engine is only followed then.
    #[must_use]
    pub fn is_stock(&self) -> bool {
        let policy = &self.config.policy;
        self.leaves_the_rest
            && self.dispatch.slot().is_decided_by(STOCK)
            && (!self.config.kv_memory.enabled || self.eviction.is_decided_by(&policy.eviction.source))
            && self.budget.is_decided_by(&policy.budget.source)
    }

    /// Whether a shadow or a recording sees what the dispatch slot decides.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.dispatch.slot().is_watched()
    }

    /// The mirror, the dispatch slot and the learned step time.
    #[must_use]
    pub fn dispatch(&self) -> &DispatchEngine {
        &self.dispatch
    }

    /// The eviction slot, to ask it about anything.
    pub fn eviction(&mut self) -> &mut EvictionSlot {
        &mut self.eviction
    }

    /// The budget slot, to ask it about anything.
    pub fn budget(&mut self) -> &mut BudgetSlot {
        &mut self.budget
    }

    /// The configuration it was started with.
    #[must_use]
    pub fn config(&self) -> &MeridianConfig {
        &self.config
    }

    /// What it was told when it was started.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Fill in what a status tells of the engine itself.
    pub(crate) fn describe(&self, status: &mut ProcessStatus) {
        status.requests = self.dispatch.phases();
        status.waiting = u64::from(self.waiting);
        status.preemptions = self.dispatch.preemptions();
        status.kv = self.kv_status();
        status.budget = self.thinking_status();
        let step_time = self.dispatch.step_time();
        status.step_time_ms =
            step_time.map(|fit| [fit.fixed_ms, fit.decode_token_ms, fit.prefill_token_ms].map(f64::from));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use meridian_core::budget::{Measured, Report};
    use meridian_core::{
        Batch, Budget, Column, Decision, Description, EntropySignal, Eviction, Fault, Markers, Policy, native,
    };
    use meridian_runtime::PolicySlot;
    use meridian_runtime::thinking::ClientBudget;

    use super::*;
    use crate::ThinkTokens;

    /// Keeps what it was shown.
    struct Reads {
        description: Description,
        seen: Arc<Mutex<Vec<f32>>>,
    }

    impl Policy for Reads {
        fn description(&self) -> &Description {
            &self.description
        }

        fn inputs(&self) -> &[Column] {
            &[Column::Eat, Column::EatVariance, Column::Rpdi]
        }

        fn decide(&mut self, batch: &Batch<'_>, _: &mut Decision) -> Result<(), Fault> {
            *self.seen.lock().expect("no panic") = batch.columns.to_vec();
            Ok(())
        }

        fn recover(&mut self) -> Result<(), Fault> {
            Ok(())
        }
    }

    #[test]
    fn a_dispatch_policy_sees_what_the_probes_measured() {
        let config = MeridianConfig::from_toml("[scheduler]\nmin_think_tokens = 1\n").expect("a configuration");
        let targets = config.scheduler.targets();
        let seen = Arc::<Mutex<Vec<f32>>>::default();
        let policy = Reads { description: Description::default(), seen: Arc::clone(&seen) };
        let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("usable markers");
        let settings = Settings { markers, ..Settings::default() };
        let mut driver = Driver::new(
            config,
            settings,
            DispatchSlot::new(Box::new(policy), targets),
            PolicySlot::new(native::default_policy::<Eviction>(targets), targets),
            PolicySlot::new(native::default_policy::<Budget>(targets), targets),
        );
        driver
            .follow_thinking(ThinkTokens { forced: vec![8], ..ThinkTokens::default() }, true)
            .expect("8 ends thinking");
        let request = NewRequest { prompt: &[1, 7], max_tokens: 1000, ..NewRequest::default() };
        let row = driver.arrived("a", &request).expect("a free id");
        let (key, _) =
            driver.enroll("a", request.prompt, request.max_tokens, ClientBudget::default()).expect("it lives");
        let facts = EngineFacts { token_budget: 64, free_seats: 1, decode_tokens: 1, ..EngineFacts::default() };
        let is_unmeasured = |seen: &Mutex<Vec<f32>>| seen.lock().expect("no panic").iter().all(|value| value.is_nan());

        driver.plan(&facts, &[], &[row]);
        assert!(is_unmeasured(&seen));
        driver.admitted(row, 0);
        driver.scheduled(0.0, &[(row, 2)], 0);
        let mut now_ms = 0.0;
        // Until its first probe is due, runs and comes back with an entropy of 3 bits.
        let due = loop {
            driver.set_clock(now_ms);
            driver.generated(row, &[40]);
            now_ms += 10.0;
            driver.judge_thinking(now_ms, 0, 0);
            let budgets = driver.thinking().expect("followed");
            if let Some((_, tokens)) = budgets.due().next() {
                break tokens;
            }
            assert!(now_ms < 10_000.0, "no probe is due");
        };
        let budgets = driver.thinking().expect("followed");
        budgets.probe_runs(key, 1);
        let mut datagram = Vec::new();
        let entropy_nats = EntropySignal::from_bits(3.0).nats() as f32;
        Report { key, token: due, what: Measured::Probe, entropy_nats }.write(&mut datagram);
        budgets.received(&datagram);
        budgets.probed(key, None);
        driver.plan(&EngineFacts { now_ms, ..facts }, &[row], &[]);
        let measured = seen.lock().expect("no panic").clone();
        assert!((measured[0] - 3.0).abs() < 1e-5, "{measured:?}");
        assert!(measured[2].is_nan(), "no window of entropies is full: {measured:?}");
    }
}
