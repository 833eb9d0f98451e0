//! What an engine tells of single requests and steps: explanations and timelines.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use meridian_core::latency::{Latencies, LatencyCounts};
use meridian_core::slot::{DecisionMark, PolicySlot};
use meridian_core::{EngineFacts, RequestState, RowId, SlotKind, SlotName, ThinkPhase, Transition};

use crate::Driver;
use crate::control::{Insight, LatencyReport};
use crate::explain::Explanation;
use crate::otlp::TraceParent;
use crate::timeline::{Timeline, TimelineDecision, TimelineStep};

/// Ended requests whose explanations are kept.
const KEPT_EXPLANATIONS: usize = 1024;
/// Ids of requests that are kept for explanations of others.
const KEPT_NAMES: usize = 8192;
/// Requests that are named at most where several have a text in their id.
const MOST_NAMED: usize = 64;

/// What the driver keeps for those who ask.
#[derive(Default)]
pub(crate) struct Observations {
    pub(crate) timeline: Option<Box<Timeline>>,
    /// The trace context of each live request that came with one.
    pub(crate) parents: HashMap<RowId, TraceParent>,
    /// Explanations of ended requests, oldest first, and whether they are kept.
    ended: VecDeque<Explanation>,
    keeps_ended: bool,
    /// Names of the latest requests.
    names: VecDeque<(u32, Box<str>)>,
    /// Largest difference of the engine's clock and the host's, milliseconds: reports of time come late, never early.
    clock: Option<(Instant, f64)>,
}

impl Driver {
    /// Explain ended requests from now on, and observe latencies of at most `tenants` tenants.
    pub fn observe(&mut self, tenants: usize) {
        self.seen.keeps_ended = true;
        self.scheduler.mirror().table.observe_latencies(Latencies::new(tenants));
    }

    /// Latencies of all tenants since [`Driver::observe`]; `None` before it.
    pub fn latency(&mut self) -> Option<LatencyCounts> {
        let mirror = self.scheduler.mirror();
        let recomputed_tokens = mirror.kv_counts().recomputed_tokens;
        let (in_time, missed) = mirror.table.attained();
        Some(LatencyCounts { recomputed_tokens, in_time, missed, ..mirror.table.latencies()?.counts() })
    }

    /// Join the trace of the caller of this request.
    pub fn join_trace(&mut self, row: RowId, parent: TraceParent) {
        if self.traces.is_some() && self.request(row).is_some() {
            self.seen.parents.insert(row, parent);
        }
    }

    pub(crate) fn see_arrival(&mut self, id: &str, row: RowId) {
        let Some(number) = self.request(row).map(RequestState::number) else { return };
        if let Some(timeline) = &mut self.seen.timeline {
            timeline.name(number, id);
        }
        if self.seen.keeps_ended {
            if self.seen.names.len() == KEPT_NAMES {
                self.seen.names.pop_front();
            }
            self.seen.names.push_back((number, id.into()));
        }
    }

    pub(crate) fn explain_ended(&mut self, id: &str, row: RowId, reason: &str) -> Option<Explanation> {
        if !self.seen.keeps_ended && self.traces.is_none() {
            return None;
        }
        let version = self.scheduler.slot().version();
        let mirror = self.scheduler.mirror();
        let request = mirror.table.get(row)?;
        let explanation = Explanation {
            state: reason.to_owned(),
            ended: true,
            policy: format!("{} {}", version.name, version.version),
            waits_for: None,
            ..Explanation::of(&mirror.table, request, id, mirror.now_ms())
        };
        if self.seen.keeps_ended {
            if self.seen.ended.len() == KEPT_EXPLANATIONS {
                self.seen.ended.pop_front();
            }
            self.seen.ended.push_back(explanation.clone());
        }
        Some(explanation)
    }

    /// Where the time of a request went. `request` is its id, or a part of it that only one request has.
    ///
    /// # Errors
    /// One line: no request or several have it.
    pub fn explain(&mut self, request: &str) -> Result<Explanation, String> {
        let explanation = self.find_explained(request)?;
        let names = &self.seen.names;
        let name = |number: u32| names.iter().rev().find(|(of, _)| *of == number).map(|(_, id)| id.to_string());
        Ok(explanation.with_admissions(self.scheduler.mirror().table.admissions()).with_names(name))
    }

    fn find_explained(&mut self, request: &str) -> Result<Explanation, String> {
        let live =
            self.by_id.iter().filter(|(id, _)| id.contains(request)).map(|(id, row)| (id.to_string(), Some(*row)));
        let ended = self.seen.ended.iter().filter(|ended| ended.request.contains(request));
        let mut found: Vec<(String, Option<RowId>)> =
            live.chain(ended.map(|ended| (ended.request.clone(), None))).collect();
        if found.iter().any(|(id, _)| id == request) {
            found.retain(|(id, _)| id == request);
        }
        found.sort_by(|(one, _), (other, _)| choice_of(one).cmp(&choice_of(other)));
        found.dedup_by(|(later, _), (earlier, _)| later == earlier);
        let (id, row) = match found.as_slice() {
            [] => return Err(format!("{request}: no live request has this id, and none of the latest that ended")),
            [one] => one.clone(),
            several => {
                let named: Vec<_> = several.iter().take(MOST_NAMED).map(|(id, _)| id.as_str()).collect();
                let more = if several.len() > MOST_NAMED { " ..." } else { "" };
                let (count, named) = (several.len(), named.join(", "));
                return Err(format!("{request}: {count} requests have this in their id: {named}{more}"));
            }
        };
        let Some(row) = row else {
            let ended = self.seen.ended.iter().rev().find(|ended| ended.request == id);
            return ended.cloned().ok_or_else(|| format!("{request}: no such request"));
        };
        let version = self.scheduler.slot().version();
        let mirror = self.scheduler.mirror();
        let live = mirror.table.get(row).ok_or_else(|| format!("{request}: no such request"))?;
        let policy = format!("{} {}", version.name, version.version);
        Ok(Explanation { policy, ..Explanation::of(&mirror.table, live, &id, mirror.now_ms()) })
    }

    /// Begin a timeline; an unfinished one is dropped.
    pub fn begin_timeline(&mut self) {
        let now_ms = self.scheduler.mirror().now_ms();
        let mut timeline = Timeline::new(&self.settings.model, now_ms);
        let table = &mut self.scheduler.mirror().table;
        table.keep_transitions(true);
        for (id, row) in &self.by_id {
            if let Some(request) = table.get(*row) {
                timeline.name(request.number(), id);
                let doing = request.account().doing();
                timeline.transition(Transition { number: request.number(), at_ms: now_ms, doing });
            }
        }
        self.keep_marks(true);
        self.seen.clock = None;
        self.seen.timeline = Some(Box::new(timeline));
    }

    /// End the timeline, and return it; `None` without one.
    pub fn end_timeline(&mut self) -> Option<Timeline> {
        let mut timeline = self.seen.timeline.take()?;
        self.take_seen(&mut timeline);
        self.scheduler.mirror().table.keep_transitions(false);
        self.keep_marks(false);
        timeline.end(self.scheduler.mirror().now_ms());
        Some(*timeline)
    }

    fn keep_marks(&mut self, keep: bool) {
        self.scheduler.slot().keep_marks(keep);
        self.eviction.keep_marks(keep);
        self.budget.keep_marks(keep);
    }

    /// The engine says that it is `now_ms`.
    pub(crate) fn see_clock(&mut self, now_ms: f64) {
        if self.seen.timeline.is_none() || self.settings.simulates_time {
            return;
        }
        let (base, ahead_ms) = self.seen.clock.get_or_insert_with(|| (Instant::now(), now_ms));
        *ahead_ms = ahead_ms.max(now_ms - base.elapsed().as_secs_f64() * 1e3);
    }

    /// A step was planned, or kept as the engine's own.
    pub(crate) fn see_plan(&mut self, facts: &EngineFacts) {
        let Some(mut timeline) = self.seen.timeline.take() else { return };
        self.take_seen(&mut timeline);
        let source = self.scheduler.last_source();
        let plan = self.scheduler.latest_plan();
        let mut step = TimelineStep {
            token_budget: plan.token_budget,
            engine_budget: facts.token_budget,
            waiting: facts.waiting,
            free_blocks: facts.free_blocks,
            capped: u32::try_from(plan.token_caps.len()).unwrap_or(u32::MAX),
            source,
            ..TimelineStep::default()
        };
        step.begin_ms = self.scheduler.mirror().now_ms();
        timeline.step(step);
        self.seen.timeline = Some(timeline);
    }

    pub(crate) fn see_scheduled(&mut self, given: &[(RowId, u32)], besides: u32) {
        let Some(timeline) = &mut self.seen.timeline else { return };
        let mirror = self.scheduler.mirror();
        let mut running = [0; 3];
        for (row, tokens) in given {
            let Some(request) = mirror.table.get(*row) else { continue };
            // A request that has its whole prompt in this step computes a prompt too.
            let is_prefill = request.first_token_ms().is_none() || *tokens > 1;
            let phase = if request.first_token_ms().is_none() { ThinkPhase::Prefill } else { request.phase() };
            running[phase as usize] += 1;
            if is_prefill {
                timeline.prefill(request.number(), *tokens);
            }
        }
        let cause = mirror.table.cause_of_waiting();
        let load = mirror.latest_load();
        if let Some(step) = timeline.open_step() {
            step.running = running;
            step.cause = Some(cause);
            step.probe_tokens = besides;
            if let Some((load, predicted_ms)) = load {
                (step.decode_tokens, step.prefill_tokens) = (load.decode_tokens, load.prefill_tokens);
                step.predicted_ms = predicted_ms;
            }
        }
    }

    /// Take over what slots and requests did since the last call.
    fn take_seen(&mut self, timeline: &mut Timeline) {
        let lost = self.scheduler.mirror().table.take_transitions(|transition| timeline.transition(transition));
        timeline.lose(lost);
        let (clock, now_ms) = (self.seen.clock, self.scheduler.mirror().now_ms());
        if clock.is_none() && !self.settings.simulates_time {
            return;
        }
        take_marks(self.scheduler.slot(), clock, now_ms, timeline);
        take_marks(&mut self.eviction, clock, now_ms, timeline);
        take_marks(&mut self.budget, clock, now_ms, timeline);
    }
}

/// Without a clock, the decisions were made at `now_ms` and took no time.
fn take_marks<K: SlotKind>(
    slot: &mut PolicySlot<K>,
    clock: Option<(Instant, f64)>,
    now_ms: f64,
    timeline: &mut Timeline,
) {
    let name: SlotName = K::NAME;
    for DecisionMark { started, took, source, candidates, policy, sha256, fault } in slot.take_marks() {
        let at_ms = |(base, ahead_ms): (Instant, f64)| match started.checked_duration_since(base) {
            Some(after) => ahead_ms + after.as_secs_f64() * 1e3,
            None => ahead_ms - (base - started).as_secs_f64() * 1e3,
        };
        let digest: String = sha256.chars().take(8).collect();
        timeline.decision(TimelineDecision {
            slot: name,
            begin_ms: clock.map_or(now_ms, at_ms),
            ms: clock.map(|_| took.as_secs_f64() * 1e3),
            policy: if digest.is_empty() { policy } else { format!("{policy} {digest}") },
            source,
            candidates: u32::try_from(candidates).unwrap_or(u32::MAX),
            fault,
        });
    }
}

/// The client's request, and which choice of it: vLLM makes one request for each, and puts its number and `_` before the id.
fn choice_of(id: &str) -> (&str, Option<u64>) {
    let choice = id.split_once('_').and_then(|(number, of)| Some((of, number.parse().ok()?)));
    choice.map_or((id, None), |(of, number)| (of, Some(number)))
}

/// The insight of an engine, once its driver exists.
pub(crate) struct DriverInsight {
    driver: Arc<OnceLock<Weak<Mutex<Driver>>>>,
    started: Instant,
    /// See [`LatencyReport::run`].
    run: String,
}

impl DriverInsight {
    pub(crate) fn new(driver: Arc<OnceLock<Weak<Mutex<Driver>>>>) -> Self {
        // The process id alone is always 1 in a container. A clock that stands still makes two runs alike only if their
        // process ids are too.
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let run = format!("{}-{:x}", std::process::id(), since_epoch.as_nanos());
        Self { driver, started: Instant::now(), run }
    }

    fn with<T>(&self, call: impl FnOnce(&mut Driver) -> T) -> Option<T> {
        let driver = self.driver.get().and_then(Weak::upgrade)?;
        let mut driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
        Some(call(&mut driver))
    }
}

impl Insight for DriverInsight {
    fn explain(&self, request: &str) -> Result<Explanation, String> {
        self.with(|driver| driver.explain(request)).unwrap_or_else(|| Err("the engine ends".into()))
    }

    fn begin_timeline(&self) {
        self.with(Driver::begin_timeline);
    }

    fn end_timeline(&self) -> Option<Timeline> {
        self.with(Driver::end_timeline).flatten()
    }

    fn latency(&self) -> Option<LatencyReport> {
        let uptime_s = self.started.elapsed().as_secs_f64();
        let counts = self.with(Driver::latency).flatten()?;
        Some(LatencyReport { run: self.run.clone(), uptime_s, counts })
    }
}
