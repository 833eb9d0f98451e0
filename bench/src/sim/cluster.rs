//! Engines behind a router, and the clock that they share.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::iter::Peekable;

use meridian_core::Dispatch;
use meridian_core::latency::LatencyCounts;
use meridian_core::slot::{Contender, SlotStats};
use meridian_engine::recording::{Recorder, SlotSetup};
use meridian_engine::timeline::Timeline;

use super::content::Contents;
use super::engine::Engine;
use super::handoff::{Front, HandoffFleet, Move, OnTheWay};
use super::live::{Facts, Live};
use super::recorder::Collector;
use super::sessions::{ClosedLoop, Next};
use super::{EngineConfig, Policies, RequestTimes, StepWork};
use crate::metrics::Measured;
use crate::results::{Event, Run, Slo};
use crate::trace::{Prefix, TraceRequest};

/// Who gets a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Router {
    /// One engine after the other.
    #[default]
    RoundRobin,
    /// The engine with the fewest requests.
    LeastLoaded,
    /// Turns of a conversation stay with their engine, which has their KV; the first goes to the least loaded.
    Session,
}

impl Router {
    /// Every router, with its name.
    pub const ALL: [(&'static str, Self); 3] =
        [("round-robin", Self::RoundRobin), ("least-loaded", Self::LeastLoaded), ("session", Self::Session)];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, router)| *router == self).map_or("", |(name, _)| name)
    }
}

impl std::str::FromStr for Router {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let names: Vec<_> = Self::ALL.iter().map(|(name, _)| *name).collect();
        let found = Self::ALL.iter().find(|(known, _)| *known == name);
        found.map(|(_, router)| *router).ok_or_else(|| format!("{name}: expected one of {}", names.join(", ")))
    }
}

/// Another dispatch policy takes over at a time, in every engine.
pub struct Swap {
    /// Milliseconds since the start.
    pub at_ms: f64,
    /// One for each engine.
    pub candidates: Vec<Contender<Dispatch>>,
    /// For the report.
    pub label: String,
}

/// What a run leaves behind.
pub struct Outcome {
    /// Its metrics; policy, rate and seed are the caller's to fill in.
    pub run: Run,
    /// Each request's times, when they were to be kept.
    pub times: Vec<RequestTimes>,
    /// What each step carried, likewise.
    pub works: Vec<StepWork>,
    /// Equal for runs that gave the same requests the same tokens in the same steps.
    pub digest: u64,
    /// Engine steps.
    pub steps: u64,
    /// What the first engine did, when it was to be kept.
    pub timeline: Option<Timeline>,
    /// Latencies of all engines as they observe them, when they were to.
    pub latency: Option<LatencyCounts>,
}

/// A run.
pub struct Simulation {
    engines: Vec<Engine>,
    router: Router,
    next_engine: usize,
    recorder: Collector,
    contents: Contents,
    swaps: Vec<Swap>,
    config: EngineConfig,
    slo: Slo,
    max_tokens: Option<u32>,
    keeps_thinking: bool,
    /// The engine of each conversation.
    homes: HashMap<u64, usize>,
    /// Turns that wait for the one before.
    early: HashMap<u64, Vec<(usize, TraceRequest)>>,
    busy: HashMap<u64, u32>,
    due: BinaryHeap<Reverse<Due>>,
    ended: Vec<Live>,
    /// Requests of the trace that have arrived.
    offered: usize,
    closed_loop: Option<ClosedLoop>,
    disk: Option<Disk>,
    front: Option<Front>,
}

/// The recording of the first engine.
struct Disk {
    recorder: Recorder,
    /// Steps that it had when the recording was flushed.
    flushed_at: u64,
}

/// A request that arrives after one that it waited for, or after its KV blocks.
struct Due {
    at_ms: f64,
    index: usize,
    coming: Coming,
}

enum Coming {
    Arrives(TraceRequest),
    Moves(OnTheWay),
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at_ms.total_cmp(&other.at_ms).then(self.index.cmp(&other.index))
    }
}

impl Simulation {
    /// Engines of one kind, one for each of `policies`. `requests` is how many will come.
    #[must_use]
    pub fn new(config: &EngineConfig, policies: Vec<Policies>, slo: Slo, requests: usize) -> Self {
        let keeps_thinking = policies.first().is_none_or(|p| !p.config.model.strips_reasoning_or_keep());
        let engines: Vec<Engine> =
            policies.into_iter().enumerate().map(|(number, policies)| Engine::new(number, config, policies)).collect();
        Self {
            recorder: Collector::new(slo, engines.len(), Measured::All(requests.max(1))),
            slo,
            engines,
            router: Router::default(),
            next_engine: 0,
            contents: Contents::default(),
            swaps: Vec::new(),
            config: config.clone(),
            max_tokens: None,
            keeps_thinking,
            homes: HashMap::new(),
            early: HashMap::new(),
            busy: HashMap::new(),
            due: BinaryHeap::new(),
            ended: Vec::new(),
            offered: 0,
            closed_loop: None,
            disk: None,
            front: None,
        }
    }

    /// Measure these requests only; without this all.
    #[must_use]
    pub fn measuring(mut self, measured: Measured) -> Self {
        self.recorder = Collector::new(self.slo, self.engines.len(), measured);
        self
    }

    /// Route requests so.
    #[must_use]
    pub fn with_router(mut self, router: Router) -> Self {
        self.router = router;
        self
    }

    /// Part the engines into some that think and some that answer. The router is that of the first ones.
    #[must_use]
    pub fn with_handoff(mut self, fleet: HandoffFleet) -> Self {
        self.front = Some(Front::new(fleet, self.engines.len(), self.config.kv_token_bytes));
        self
    }

    /// Swap policies while it runs.
    #[must_use]
    pub fn with_swaps(mut self, mut swaps: Vec<Swap>) -> Self {
        // The next one is the last; of equal times the first that was given is the first to come.
        swaps.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
        swaps.reverse();
        self.swaps = swaps;
        self
    }

    /// Clients ask for `max_tokens` at most, whatever they will need: how many tokens a request has left is not known.
    /// Without this they ask for exactly what they need.
    #[must_use]
    pub fn with_max_tokens(mut self, max_tokens: u32) -> Self {
        self.max_tokens = Some(max_tokens);
        self
    }

    /// Keep each request's times and each step's work.
    #[must_use]
    pub fn keeping_times(mut self) -> Self {
        self.recorder.keep();
        self
    }

    /// Simulate sessions until the last one has ended. `progress` as in [`Simulation::run`].
    pub fn run_sessions(mut self, mut sessions: ClosedLoop, progress: impl FnMut(usize)) -> Outcome {
        let first = sessions.begin();
        self.closed_loop = Some(sessions);
        first.into_iter().for_each(|next| self.comes(&next));
        self.run(std::iter::empty(), progress)
    }

    /// Keep a timeline of the first engine; `title` names it.
    #[must_use]
    pub fn with_timeline(mut self, title: &str) -> Self {
        if let Some(engine) = self.engines.first_mut() {
            engine.keep_timeline(title);
        }
        self
    }

    /// Observe latencies as an engine does, for [`Outcome::latency`].
    #[must_use]
    pub fn observing(mut self) -> Self {
        self.engines.iter_mut().for_each(Engine::observe);
        self
    }

    /// Make steps take `factor` times as long while the native policy `source` decides: a difference of a known size.
    #[must_use]
    pub fn with_drag(mut self, source: &str, factor: f64) -> Self {
        self.engines.iter_mut().for_each(|engine| engine.drag(source, factor));
        self
    }

    /// Record the decisions of the first engine's dispatch slot. Its steps wait for the disk now and then, so that none is
    /// dropped.
    #[must_use]
    pub fn recorded_by(mut self, recorder: Recorder, setup: SlotSetup) -> Self {
        if let Some(engine) = self.engines.first_mut() {
            engine.control().record(recorder.tap(setup));
        }
        self.disk = Some(Disk { recorder, flushed_at: 0 });
        self
    }

    /// Simulate until every request has ended. `arrivals` come in order of time. `progress` is called with the requests that
    /// have arrived now and then.
    pub fn run(mut self, arrivals: impl Iterator<Item = TraceRequest>, mut progress: impl FnMut(usize)) -> Outcome {
        let mut arrivals = arrivals.enumerate().peekable();
        self.advance(f64::INFINITY, &mut arrivals, &mut progress);
        self.outcome()
    }

    /// Simulate until that time, or until every request has ended.
    pub(super) fn advance(
        &mut self,
        until_ms: f64,
        arrivals: &mut Peekable<impl Iterator<Item = (usize, TraceRequest)>>,
        progress: &mut impl FnMut(usize),
    ) {
        loop {
            let arrival_ms = arrivals.peek().map(|(_, request)| request.arrival_s * 1e3);
            let due_ms = self.due.peek().map(|Reverse(due)| due.at_ms);
            let coming_ms = [arrival_ms, due_ms].into_iter().flatten().fold(f64::INFINITY, f64::min);
            let (engine, step_ms) = self.next_step_end();
            let swap_ms = self.swaps.last().map_or(f64::INFINITY, |swap| swap.at_ms);
            let next_ms = coming_ms.min(step_ms);
            if next_ms == f64::INFINITY || next_ms.min(swap_ms) > until_ms {
                break;
            }
            if swap_ms <= coming_ms.min(step_ms) {
                self.swap();
            } else if coming_ms < step_ms {
                progress(self.offered);
                // Whatever arrives at the same time is in the same step.
                self.take_in(coming_ms, arrivals);
                self.wake(coming_ms);
            } else {
                self.engines[engine].end(&mut self.recorder, &mut self.ended);
                self.move_on(engine, step_ms);
                self.turns_over(step_ms);
                self.take_in(step_ms, arrivals);
                self.begin(engine, step_ms);
                self.wake(step_ms);
                self.wait_for_disk();
            }
        }
    }

    /// The writer's queue has room for the decisions of so many steps.
    fn wait_for_disk(&mut self) {
        const EVERY: u64 = 128;
        let (Some(disk), Some(engine)) = (&mut self.disk, self.engines.first()) else { return };
        if engine.steps() - disk.flushed_at >= EVERY {
            disk.flushed_at = engine.steps();
            // What could not be written counts as dropped, which the reader sees.
            let _ = disk.recorder.flush();
        }
    }

    /// Whether an engine has requests, or some are to follow on others.
    pub(super) fn is_busy(&self) -> bool {
        !self.due.is_empty() || self.engines.iter().any(|engine| engine.load() > 0)
    }

    /// The engine of that number.
    pub(super) fn engine(&mut self, number: usize) -> Option<&mut Engine> {
        self.engines.get_mut(number)
    }

    /// Engines that have something to do and are idle begin a step.
    fn wake(&mut self, now_ms: f64) {
        for number in 0..self.engines.len() {
            if self.engines[number].ends_ms.is_none() && self.engines[number].load() > 0 {
                self.begin(number, now_ms);
            }
        }
    }

    fn begin(&mut self, number: usize, now_ms: f64) {
        self.engines[number].begin(now_ms, &mut self.recorder);
        for (engine, kept) in self.engines[number].take_pulled() {
            self.engines[engine].release(kept, now_ms);
        }
        for facts in self.engines[number].take_refused() {
            self.turn_over(&facts, f64::NAN, now_ms);
        }
    }

    /// Requests that left an engine are on their way to another.
    fn move_on(&mut self, engine: usize, now_ms: f64) {
        let Some(front) = &mut self.front else { return };
        for leaves in self.engines[engine].take_left() {
            let coming = front.leaves(leaves, engine, now_ms);
            self.due.push(Reverse(Due {
                at_ms: coming.at_ms,
                index: coming.live.facts.index,
                coming: Coming::Moves(coming),
            }));
        }
    }

    /// What arrives at the very time at which a step ends is seen by the next.
    fn take_in(&mut self, now_ms: f64, arrivals: &mut Peekable<impl Iterator<Item = (usize, TraceRequest)>>) {
        while let Some((index, request)) = arrivals.next_if(|(_, request)| request.arrival_s * 1e3 <= now_ms) {
            self.offer(index, request);
        }
        while self.due.peek().is_some_and(|Reverse(due)| due.at_ms <= now_ms) {
            let Reverse(due) = self.due.pop().expect("peeked");
            match due.coming {
                Coming::Arrives(request) => {
                    let mut since_ms = now_ms;
                    if let Some(sessions) = &mut self.closed_loop {
                        match sessions.comes_in(due.index, now_ms) {
                            Some(at_ms) => since_ms = at_ms,
                            None => continue,
                        }
                        self.offered += 1;
                    }
                    self.arrive(due.index, request, since_ms);
                }
                Coming::Moves(OnTheWay { engine, live, request, .. }) => {
                    self.engines[engine].take_over(&request, live, self.max_tokens.unwrap_or(0), now_ms);
                }
            }
        }
    }

    fn next_step_end(&self) -> (usize, f64) {
        let ends = |(i, engine): (usize, &Engine)| (i, engine.ends_ms.unwrap_or(f64::INFINITY));
        let earliest = self.engines.iter().enumerate().map(ends).min_by(|a, b| a.1.total_cmp(&b.1));
        earliest.unwrap_or((0, f64::INFINITY))
    }

    /// A request of the trace: a turn waits for the one before it.
    fn offer(&mut self, index: usize, request: TraceRequest) {
        self.offered = index + 1;
        let at_ms = request.arrival_s * 1e3;
        if let Prefix::Session { id, .. } = request.prefix {
            let turns = self.busy.entry(id).or_default();
            *turns += 1;
            if *turns > 1 {
                self.early.entry(id).or_default().push((index, request));
                return;
            }
        }
        self.arrive(index, request, at_ms);
    }

    fn arrive(&mut self, index: usize, mut request: TraceRequest, at_ms: f64) {
        request.output_tokens = request.output_tokens.max(1);
        request.prompt_tokens = request.prompt_tokens.max(1);
        let end_marker = u32::from(request.think_tokens > 0);
        let most = u64::from(self.config.kv_blocks - 1) * u64::from(self.config.block_tokens);
        let all = [request.prompt_tokens, request.think_tokens, end_marker, request.output_tokens];
        let session = match request.prefix {
            Prefix::Session { id, .. } | Prefix::Ranges { session: id, .. } => Some(id),
            _ => None,
        };
        let facts = Facts {
            index,
            arrival_ms: at_ms,
            batch: self.recorder.batch_of(index, at_ms),
            tenant: self.recorder.tenant(&request.tenant),
            think_tokens: request.think_tokens,
            output_tokens: request.output_tokens,
            session,
            turn: self.closed_loop.as_ref().map(|sessions| sessions.turn_of(index)),
        };
        if all.into_iter().map(u64::from).sum::<u64>() > most {
            self.recorder.refused += 1;
            self.turn_over(&facts, f64::NAN, at_ms);
            return;
        }
        let engine = self.route(session);
        let most = self.config.max_num_queued_reqs as usize;
        if most > 0 && self.engines[engine].load() >= most {
            self.recorder.turned_away(facts.batch, at_ms);
            self.turn_over(&facts, f64::NAN, at_ms);
            return;
        }
        let content = self.contents.of(&request);
        let thinks = self.front.as_mut().filter(|_| request.think_tokens > 0);
        let moves = thinks.map_or_else(Move::default, |front| front.arrives(index, &request, at_ms));
        self.engines[engine].add(&request, facts, content, self.max_tokens.unwrap_or(0), moves);
    }

    /// The engines that requests arrive at.
    fn entrances(&self) -> &[Engine] {
        let thinks = self.front.as_ref().map_or(self.engines.len(), |front| front.think);
        &self.engines[..thinks]
    }

    fn route(&mut self, session: Option<u64>) -> usize {
        let least = |engines: &[Engine]| {
            engines.iter().enumerate().min_by_key(|(_, engine)| engine.load()).map_or(0, |(i, _)| i)
        };
        match (self.router, session) {
            (Router::RoundRobin, _) => {
                self.next_engine = (self.next_engine + 1) % self.entrances().len();
                self.next_engine
            }
            (Router::Session, Some(session)) => match self.homes.get(&session) {
                Some(engine) => *engine,
                None => {
                    let engine = least(self.entrances());
                    *self.homes.entry(session).or_insert(engine)
                }
            },
            (Router::LeastLoaded | Router::Session, _) => least(self.entrances()),
        }
    }

    fn turns_over(&mut self, now_ms: f64) {
        let mut ended = std::mem::take(&mut self.ended);
        for live in ended.drain(..) {
            if let Some(front) = self.front.as_mut().filter(|_| live.think_tokens > 0) {
                front.ended(&live);
            }
            let Live { facts, content, think_tokens, output_tokens, times, .. } = live;
            if let (Some(id), None) = (facts.session, facts.turn) {
                self.contents.turn_over(id, &content, think_tokens, output_tokens, self.keeps_thinking);
            }
            self.turn_over(&facts, times.first_token_ms, now_ms);
        }
        self.ended = ended;
    }

    /// The next turn of the conversation may come.
    fn turn_over(&mut self, facts: &Facts, first_token_ms: f64, now_ms: f64) {
        if let Some(sessions) = &mut self.closed_loop {
            let next = sessions.ended(facts, first_token_ms, now_ms);
            let let_in = sessions.let_in(now_ms);
            next.iter().chain(&let_in).for_each(|next| self.comes(next));
            return;
        }
        let Some(id) = facts.session else { return };
        if let Some(turns) = self.busy.get_mut(&id) {
            *turns -= 1;
            if *turns == 0 {
                self.busy.remove(&id);
            }
        }
        if let Some(waiting) = self.early.get_mut(&id) {
            let (index, request) = waiting.remove(0);
            if waiting.is_empty() {
                self.early.remove(&id);
            }
            let at_ms = now_ms.max(request.arrival_s * 1e3);
            self.due.push(Reverse(Due { at_ms, index, coming: Coming::Arrives(request) }));
        }
    }

    fn comes(&mut self, next: &Next) {
        let Some(sessions) = &self.closed_loop else { return };
        let request = sessions.request(next);
        self.due.push(Reverse(Due { at_ms: next.at_ms, index: next.index, coming: Coming::Arrives(request) }));
    }

    fn swap(&mut self) {
        let Swap { at_ms, candidates, label } = self.swaps.pop().expect("the caller has seen one");
        for (engine, candidate) in self.engines.iter_mut().zip(candidates) {
            engine.swap(candidate);
        }
        self.recorder.events.push(Event { t_s: at_ms / 1e3, what: format!("swap to {label}") });
    }

    pub(super) fn outcome(mut self) -> Outcome {
        let mut run = self.recorder.run();
        let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
        let (mut digest, mut steps) = (0u64, 0);
        for engine in &mut self.engines {
            steps += engine.steps();
            digest = digest.rotate_left(7) ^ engine.digest();
            *sums.entry("steps").or_default() += engine.steps() as f64;
            let mut count = |decisions, by_policy, stats: SlotStats| {
                *sums.entry(decisions).or_default() += stats.decisions() as f64;
                *sums.entry(by_policy).or_default() += stats.active as f64;
                *sums.entry("faults").or_default() += stats.fault_count() as f64;
            };
            if let Some(stats) = engine.dispatch_stats() {
                count("decisions", "decided_by_policy", stats);
            }
            if let Some(stats) = engine.eviction_stats() {
                count("eviction_decisions", "eviction_by_policy", stats);
            }
            if let Some((stats, status)) = engine.budget_stats() {
                count("budget_decisions", "budget_by_policy", stats);
                *sums.entry("forced_ends").or_default() += status.forced.iter().sum::<u64>() as f64;
                *sums.entry("probes").or_default() += status.probes_done as f64;
            }
        }
        if let Some(front) = &self.front {
            sums.extend(front.metrics());
        }
        run.metrics.extend(sums.into_iter().map(|(key, value)| (key.to_owned(), value)));
        if let Some(sessions) = &self.closed_loop {
            run.metrics.extend(sessions.metrics(&self.recorder, self.config.block_tokens));
        }
        let (times, works) = self.recorder.take_kept();
        let timeline = self.engines.first_mut().and_then(Engine::take_timeline);
        let mut latency: Option<LatencyCounts> = None;
        for counts in self.engines.iter_mut().filter_map(Engine::latency) {
            match &mut latency {
                Some(all) => all.merge(&counts),
                None => latency = Some(counts),
            }
        }
        Outcome { run, times, works, digest, steps, timeline, latency }
    }
}
