use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use meridian_core::budget::{ClientBudget, Enrolled, ThinkBudgets};
use meridian_core::config::STOCK;
use meridian_core::slot::{BudgetSlot, DispatchSlot, EvictionSlot};
use meridian_core::{
    Budget, EngineFacts, Error, Eviction, MeridianConfig, MeridianScheduler, ModelConfig, NewRequest, PhaseEvent, Plan,
    PolicySource, RequestState, RowId, ThinkPhase,
};

use crate::Settings;
use crate::control::{ProcessStatus, TracesStatus};
use crate::insight::Observations;
use crate::kv::Kv;
use crate::live::LiveChanges;
use crate::otlp::{FinishedRequest, Traces};
use crate::slots::strike_limits;

/// An engine as the scheduling thread sees it: the thread reports its requests, and gets the plan of each step.
///
/// A step is [`Driver::plan`] (or [`Driver::keep`], where the engine is stock), then [`Driver::scheduled`], then
/// [`Driver::generated`] when its tokens have arrived. Each call takes microseconds; a policy that it asks has a
/// deadline.
pub struct Driver {
    pub(crate) scheduler: MeridianScheduler,
    pub(crate) eviction: EvictionSlot,
    pub(crate) budget: BudgetSlot,
    pub(crate) config: MeridianConfig,
    pub(crate) settings: Settings,
    /// The engine's text id -> row.
    pub(crate) by_id: HashMap<Box<str>, RowId>,
    /// Number of waiting requests at the latest step.
    pub(crate) waiting: u32,
    pub(crate) thinking: Option<ThinkBudgets>,
    pub(crate) kv: Kv,
    /// Receives every request that ends.
    pub(crate) traces: Option<Arc<Traces>>,
    /// The configuration leaves KV memory and thinking to the engine: it is stock while each slot is decided
    /// by what the configuration lets decide.
    leaves_the_rest: bool,
    events: Vec<(RowId, PhaseEvent)>,
    /// How often each [`PhaseEvent`] was seen, in the order of [`PhaseEvent::ALL`].
    phase_events: [u64; 3],
    reaped_ms: Option<f64>,
    /// Free KV blocks and all of them, at the latest step.
    blocks: [u32; 2],
    pub(crate) seen: Observations,
    /// Changes of live requests from other threads.
    pub(crate) changes: Arc<LiveChanges>,
}

/// A request that the engine has taken in.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrived {
    /// Its row.
    pub row: RowId,
    /// Data for the request's sampler; `None` if its thinking is not followed.
    pub sampler: Option<Enrolled>,
}

/// Time without news after which a request that the engine does not have is forgotten.
const STALE: Duration = Duration::from_secs(60);

impl Driver {
    /// An engine with these slots and no services, for a caller that loads its policies itself. Other callers start an
    /// [`Engine`](crate::Engine).
    #[must_use]
    pub fn new(
        config: MeridianConfig,
        settings: Settings,
        dispatch: DispatchSlot,
        eviction: EvictionSlot,
        budget: BudgetSlot,
    ) -> Self {
        let markers = settings.markers.clone();
        let mut scheduler = MeridianScheduler::for_engine(dispatch, markers, &config.scheduler, settings.block_tokens);
        scheduler.mirror().set_steps_ahead(settings.steps_ahead);
        scheduler.promise(&config.service_levels);
        if let Some(tokens) = settings.state_block {
            scheduler.compute_state_blocks(tokens);
        }
        if settings.priority_first {
            scheduler.put_priority_first();
        }
        let leaves_the_rest = config.leaves_memory_and_thinking();
        Self {
            scheduler,
            eviction,
            budget,
            config,
            settings,
            by_id: HashMap::new(),
            waiting: 0,
            thinking: None,
            kv: Kv::default(),
            traces: None,
            leaves_the_rest,
            events: Vec::new(),
            phase_events: [0; 3],
            reaped_ms: None,
            blocks: [0; 2],
            seen: Observations::default(),
            changes: Arc::default(),
        }
    }

    /// Add a request. The times of `request` are on the clock of [`EngineFacts::now_ms`]. With `client`, the options of
    /// its client, the engine follows its thinking if [`Driver::follow_thinking`] has been called.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] when the id is live, [`Error::NotATime`].
    pub fn arrived(
        &mut self,
        id: &str,
        request: &NewRequest<'_>,
        client: Option<ClientBudget>,
    ) -> Result<Arrived, Error> {
        if let Some(row) = self.find(id)
            && self.request(row).is_some()
        {
            return Err(Error::DuplicateRequest { id: id.into() });
        }
        let asked = client.as_ref().and_then(|client| client.max_think_tokens).unwrap_or(u32::MAX);
        let max_think_tokens = request.max_think_tokens.min(self.config.scheduler.max_think_tokens).min(asked);
        let model = if request.model.is_empty() { self.settings.model.as_str() } else { request.model };
        let table = &mut self.scheduler.mirror().table;
        let row = table.insert(&NewRequest { max_think_tokens, model, ..*request })?;
        if let Some(event) = table[row].entered() {
            self.phase_events[event as usize] += 1;
        }
        self.by_id.insert(id.into(), row);
        self.see_arrival(id, row);
        let table = &mut self.scheduler.mirror().table;
        let sampler = client.zip(self.thinking.as_mut()).and_then(|(client, thinking)| {
            // The row also holds the measurements and limits of its thinking.
            thinking.enroll(table, row, id, client)
        });
        Ok(Arrived { row, sampler })
    }

    /// The row of a live request.
    #[must_use]
    pub fn find(&self, id: &str) -> Option<RowId> {
        self.by_id.get(id).copied()
    }

    /// The state of a live request.
    #[must_use]
    pub fn request(&mut self, row: RowId) -> Option<&RequestState> {
        self.scheduler.mirror().table.get(row)
    }

    /// Plan one step over the running list and the waiting candidates, both in the engine's current order. `waiting` of
    /// the facts counts all waiting requests. The call also ranks some cached blocks again that another eviction policy
    /// ranked.
    pub fn plan(&mut self, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) -> &Plan {
        self.waiting = facts.waiting;
        self.blocks = [facts.free_blocks, facts.total_blocks];
        self.rekey_pools(facts.now_ms);
        self.note_sessions(facts, running, waiting);
        if self.seen.timeline.is_some() {
            self.see_clock(facts.now_ms);
            self.scheduler.plan(facts, running, waiting);
            self.see_plan(facts);
            return self.scheduler.latest_plan();
        }
        self.scheduler.plan(facts, running, waiting)
    }

    /// Replaces [`Driver::plan`] for a step of an engine that [`Driver::is_stock`] and not [`Driver::is_watched`]: the
    /// engine keeps its own order and budget.
    pub fn keep(&mut self, facts: &EngineFacts) {
        self.waiting = facts.waiting;
        self.blocks = [facts.free_blocks, facts.total_blocks];
        self.scheduler.keep(facts);
        if self.seen.timeline.is_some() {
            self.see_clock(facts.now_ms);
            self.see_plan(facts);
        }
    }

    /// Report the step planned at `now_ms`: the tokens of each request, and in `besides` those of requests that the
    /// table does not hold (probes).
    pub fn scheduled(&mut self, now_ms: f64, given: &[(RowId, u32)], besides: u32) {
        self.scheduler.scheduled(now_ms, given.iter().copied());
        self.scheduler.mirror().scheduled_besides(besides);
        if self.seen.timeline.is_some() {
            self.see_scheduled(given, besides);
        }
    }

    /// Report that the request was admitted with this many of its tokens already computed (prefix cache).
    pub fn admitted(&mut self, row: RowId, cached_tokens: u32) {
        self.scheduler.mirror().admitted(row, cached_tokens);
    }

    /// Report the engine's own count of a request's computed tokens.
    pub fn set_computed(&mut self, row: RowId, computed_tokens: u32) {
        self.scheduler.mirror().table.set_computed(row, computed_tokens);
    }

    /// Set the time of the next reports. Without this call, it is the time of the latest plan.
    pub fn set_clock(&mut self, now_ms: f64) {
        self.scheduler.mirror().hold_time(now_ms);
        self.see_clock(now_ms);
    }

    /// Report the tokens that a step has generated, in order for each request; a speculating engine may report several
    /// per request. Requests that are not live are skipped.
    pub fn generated(&mut self, tokens: &[(RowId, u32)]) {
        self.events.clear();
        let table = &mut self.scheduler.mirror().table;
        match &mut self.thinking {
            Some(thinking) => thinking.generated(table, tokens, &mut self.events),
            None => table.generated_in_step(tokens, &mut self.events),
        }
        for (_, event) in &self.events {
            self.phase_events[*event as usize] += 1;
        }
    }

    /// Remove the requests that the engine has lost without a notice: those that `has` does not know and that had no
    /// news for a minute. Returns their rows. A call within a minute of the last one does nothing.
    pub fn reap(&mut self, now_ms: f64, has: impl Fn(&str) -> bool) -> Vec<RowId> {
        let now_ms = self.scheduler.mirror().hold_time(now_ms);
        if self.reaped_ms.is_some_and(|then_ms| now_ms - then_ms <= STALE.as_secs_f64() * 1e3) {
            return Vec::new();
        }
        self.reaped_ms = Some(now_ms);
        let there: HashSet<RowId> = self.by_id.iter().filter(|(id, _)| has(id)).map(|(_, row)| *row).collect();
        let stale = self.scheduler.mirror().table.stale(STALE, |row| there.contains(&row));
        let lost: Vec<Box<str>> =
            self.by_id.iter().filter(|(_, row)| stale.contains(row)).map(|(id, _)| id.clone()).collect();
        lost.iter().filter_map(|id| self.finished(id, "lost")).collect()
    }

    /// Report that the request lost its KV blocks and waits again; `blocks` counts those that only it used. Returns
    /// true when it answers and a request that does not answer could have gone instead.
    pub fn preempted(&mut self, row: RowId, blocks: u32) -> bool {
        if self.request(row).is_some_and(|request| request.phase() == ThinkPhase::Output) {
            self.kv.output_critical_evictions += u64::from(blocks);
        }
        self.scheduler.mirror().preempted(row)
    }

    /// Report that the request has no KV blocks without any policy's choice: all lost theirs, or it had none before.
    pub fn lost_blocks(&mut self, row: RowId) {
        self.scheduler.mirror().lost_blocks(row);
    }

    /// Remove an ended request; `reason` is the engine's word for the reason. Returns the row that it had.
    pub fn finished(&mut self, id: &str, reason: &str) -> Option<RowId> {
        let row = self.by_id.remove(id);
        if let Some(row) = row {
            let explained = self.explain_ended(id, row, reason);
            let parent = self.seen.parents.remove(&row);
            let mirror = self.scheduler.mirror();
            if let Some(request) = mirror.table.get(row) {
                if let (Some(traces), Some(explained)) = (&self.traces, explained) {
                    let (name, version) = explained.policy.split_once(' ').unwrap_or((&explained.policy, ""));
                    traces.request(FinishedRequest {
                        reason: reason.to_owned(),
                        policy: (name.to_owned(), version.to_owned()),
                        parent,
                        explanation: Some(explained),
                        ..FinishedRequest::of(request, id, mirror.now_ms())
                    });
                }
                if let Some(thinking) = &mut self.thinking {
                    thinking.finished(&mirror.table, row);
                }
            }
            self.scheduler.mirror().table.remove(row);
        }
        if self.scheduler.mirror().table.is_empty() {
            self.idle();
        }
        row
    }

    /// Report that the engine is idle: the time until the next step belongs to no step.
    pub fn idle(&mut self) {
        self.scheduler.mirror().idle();
        let now_ms = self.scheduler.mirror().now_ms();
        if let Some(timeline) = &mut self.seen.timeline {
            timeline.step_ends(now_ms);
        }
    }

    /// Report that the latest plan left no runnable request, so that the engine lifted its caps.
    pub fn overruled(&mut self) {
        self.scheduler.overruled();
    }

    /// Whether the next step is the engine's own: `native:fcfs` decides in the dispatch slot, and neither the
    /// configuration nor a swap affects KV memory or thinking. Meridian then only follows the engine.
    #[must_use]
    pub fn is_stock(&mut self) -> bool {
        let policy = &self.config.policy;
        self.leaves_the_rest
            && self.scheduler.slot().is_decided_by(STOCK)
            && (!self.config.kv_memory.enabled || self.eviction.is_decided_by(policy.eviction.deciding::<Eviction>()))
            && self.budget.is_decided_by(policy.budget.deciding::<Budget>())
    }

    /// Whether a shadow or a recording sees the decisions of the dispatch slot.
    #[must_use]
    pub fn is_watched(&mut self) -> bool {
        self.scheduler.slot().is_watched()
    }

    /// Take over the settings that change while the engine runs; `config_watch` has their names.
    pub(crate) fn adopt(&mut self, config: &MeridianConfig) {
        let Self { scheduler, eviction, budget, config: own, .. } = self;
        own.scheduler.max_defer_ms = config.scheduler.max_defer_ms;
        scheduler.set_max_defer_ms(config.scheduler.max_defer_ms);
        own.scheduler.session_wait_ms = config.scheduler.session_wait_ms;
        scheduler.set_session_wait_ms(config.scheduler.session_wait_ms);
        (own.policy.max_strikes, own.policy.strike_window_s) =
            (config.policy.max_strikes, config.policy.strike_window_s);
        let limits = strike_limits(config);
        scheduler.slot().control().set_strike_limits(limits);
        eviction.control().set_strike_limits(limits);
        budget.control().set_strike_limits(limits);
    }

    /// Whether any service level is configured.
    #[must_use]
    pub fn promises(&self) -> bool {
        !self.config.service_levels.is_empty()
    }

    /// The mirror, the dispatch slot and the learned step time.
    pub fn scheduler(&mut self) -> &mut MeridianScheduler {
        &mut self.scheduler
    }

    /// The eviction slot, for direct questions.
    pub fn eviction(&mut self) -> &mut EvictionSlot {
        &mut self.eviction
    }

    /// The budget slot, for direct questions.
    pub fn budget(&mut self) -> &mut BudgetSlot {
        &mut self.budget
    }

    /// The configuration that the engine started with.
    #[must_use]
    pub fn config(&self) -> &MeridianConfig {
        &self.config
    }

    /// The settings that the engine started with.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What may change the outputs of requests that ask for nothing, in a line; see [`MeridianConfig::outputs`].
    #[must_use]
    pub fn outputs(&self) -> String {
        if self.thinking.is_none() {
            // No sampler can end any thinking; the front end alone applies stop strings.
            let model = ModelConfig { stop_strings: self.config.model.stop_strings, ..ModelConfig::default() };
            let service_levels = self.config.service_levels.clone();
            return MeridianConfig { model, service_levels, ..MeridianConfig::default() }.outputs();
        }
        let source = self.config.policy.budget.deciding::<Budget>();
        let is_swapped = PolicySource::of(source).native().is_some() && !self.budget.is_decided_by(source);
        match (self.config.outputs(), is_swapped) {
            (outputs, false) => outputs,
            (_, true) if self.config.leaves_outputs() => "a budget policy that was put in ends thinking".into(),
            (outputs, true) => format!("{outputs}; a budget policy that was put in ends thinking"),
        }
    }

    /// Fill in the part of a status that describes the engine itself.
    pub(crate) fn describe(&mut self, status: &mut ProcessStatus) {
        status.requests = self.scheduler.mirror().phases();
        status.phase_events = self.phase_events;
        status.waiting = u64::from(self.waiting);
        status.preemptions = self.scheduler.mirror().preemptions();
        status.kv = self.kv_status();
        status.budget = self.thinking_status();
        status.outputs = self.outputs();
        status.sessions = self.scheduler.mirror().live_sessions();
        status.service_levels = self.scheduler.mirror().table.level_counts();
        if let Some(latencies) = self.scheduler.mirror().table.latencies() {
            status.latency = latencies.tenants();
            status.steps = latencies.steps().to_vec();
        }
        status.blocks = (self.blocks[1] > 0).then(|| self.blocks.map(u64::from));
        let sent = self.traces.as_ref().map(|traces| traces.sent());
        status.traces = sent.map(|sent| TracesStatus { sent: sent.requests, lost: sent.lost });
        let step_time = self.scheduler.step_time();
        status.step_time_ms =
            step_time.map(|fit| [fit.fixed_ms, fit.decode_token_ms, fit.prefill_token_ms].map(f64::from));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use meridian_core::budget::{Measured, Report};
    use meridian_core::slot::PolicySlot;
    use meridian_core::{
        Batch, Budget, Column, Decision, Description, EntropySignal, Eviction, Fault, Markers, Policy, native,
    };

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
        let arrived = driver.arrived("a", &request, Some(ClientBudget::default())).expect("a free id");
        let (row, key) = (arrived.row, arrived.sampler.expect("its thinking is followed").key);
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
            driver.generated(&[(row, 40)]);
            now_ms += 10.0;
            driver.judge_thinking(now_ms, 0, 0);
            let (budgets, table) = driver.thinking().expect("followed");
            if let [(_, tokens)] = budgets.due(table)[..] {
                break tokens;
            }
            assert!(now_ms < 10_000.0, "no probe is due");
        };
        let (budgets, table) = driver.thinking().expect("followed");
        budgets.probe_runs(table, key, 1);
        let mut message = Vec::new();
        let entropy_nats = EntropySignal::from_bits(3.0).nats();
        Report { key, token: due, ahead: 0, what: Measured::Probe, entropy_nats, confidence: f32::NAN }
            .write(&mut message);
        budgets.received(table, &message);
        budgets.probed(table, key, None);
        driver.plan(&EngineFacts { now_ms, ..facts }, &[row], &[]);
        let measured = seen.lock().expect("no panic").clone();
        assert!((measured[0] - 3.0).abs() < 1e-5, "{measured:?}");
        assert!(measured[2].is_nan(), "no window of entropies is full: {measured:?}");
    }
}
