use std::collections::VecDeque;
use std::fmt;

use meridian_policy_sdk::{Column, Decision, State, Step};

use crate::rank::ordinal;
use crate::sync::{Mutex, lock};
use crate::types::{PhaseEvent, RequestId, ThinkPhase};
use crate::{
    Asked, Batch, EngineFacts, EngineMirror, Error, Fault, GuardedPolicy, Markers, NewRequest, Planner, Policy, RowId,
    SchedulerConfig, StepTime, columns, native,
};

/// Waiting requests that a policy sees in one step; the others keep their place behind them.
pub const WAITING_WINDOW: usize = 4096;

/// A step scheduler for an engine that leaves its queues to it: requests come in, each step takes a batch out, generated
/// tokens come back.
///
/// Who goes first, how many tokens the step carries and how many each request takes is a [`Policy`]'s to say, by
/// default the host's own `output-first`: the output queue first, thinking fills the rest, steps held to the TPOT budget
/// of their phase, thinking-only steps up to `think_batch_multiplier` times larger; inside a queue by priority, near
/// deadlines as the highest priority, then the least recently served. Candidates of equal keys go in their present order,
/// running ones first. The tenant of a request is a fact for policies.
///
/// The scheduler itself sees to it that no request is lost or doubled, that the token budget and the number of running
/// requests hold, and that a request which was without tokens for longer than `max_defer_ms` (a waiting one: while a seat
/// was free) is given some in the next step, as far as that step's budget goes, the longest first. A policy that faults
/// costs that decision only: the default decides the same step.
///
/// `Send + Sync`. One thread schedules at a time; while a policy decides, no lock is held that
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
    /// Taken before the other two, never after.
    decider: Mutex<Decider>,
    faults: Mutex<Faults>,
    max_defer_ms: f32,
}

#[derive(Default)]
struct Faults {
    count: u64,
    last: Option<Fault>,
}

/// What bounds one step.
///
/// ```
/// let limits = meridian_core::StepLimits { now_ms: 12.5, token_budget: 8192, ..Default::default() };
/// assert_eq!((limits.max_running, limits.decode_tokens), (256, 1));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// Milliseconds on the caller's clock, the one of [`NewRequest::arrival_ms`].
    pub now_ms: f64,
    /// Most tokens in the step, at least 1.
    pub token_budget: u32,
    /// Most requests that run at the same time.
    pub max_running: u32,
    /// KV blocks that are free, for policies; admission is by seats, so an engine short of blocks preempts.
    pub free_blocks: u32,
    /// KV blocks in all.
    pub total_blocks: u32,
    /// Tokens that one decoding request takes in a step: 1, more when it speculates.
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
///
/// ```
/// use meridian_core::{Grant, RequestId};
///
/// assert_eq!(Grant { request: RequestId(1), tokens: 4 }.tokens, 4);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The request.
    pub request: RequestId,
    /// How many, at least 1.
    pub tokens: u32,
}

/// One step's work, most urgent first. Every request stands in at most one queue, once.
///
/// ```
/// use meridian_core::{Grant, RequestId, ScheduledBatch};
///
/// let think = vec![Grant { request: RequestId(1), tokens: 4 }];
/// assert_eq!(ScheduledBatch { think, ..ScheduledBatch::default() }.tokens(), 4);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduledBatch {
    /// Requests that answer: somebody watches.
    pub output: Vec<Grant>,
    /// Requests that think or are in prefill: throughput work.
    pub think: Vec<Grant>,
    /// What the step was limited to, at most the caller's own budget.
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
/// use meridian_core::{Markers, MeridianScheduler, NewRequest, QueueStats, RequestId, SchedulerConfig};
///
/// let scheduler = MeridianScheduler::new(&SchedulerConfig::default(), Markers::default());
/// scheduler.submit(RequestId(1), &NewRequest::default())?;
/// assert_eq!(scheduler.queues(), QueueStats { waiting: 1, ..QueueStats::default() });
/// # Ok::<(), meridian_core::Error>(())
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

#[derive(Default)]
struct Requests {
    mirror: EngineMirror,
    /// These two may hold requests that are over, when `ended` says so; they are dropped when a step begins.
    running: Vec<RowId>,
    waiting: VecDeque<RowId>,
    ended: bool,
}

struct Decider {
    seat: GuardedPolicy,
    default: Box<dyn Policy>,
    planner: Planner,
    running: Vec<RowId>,
    waiting: Vec<RowId>,
    candidates: Vec<RowId>,
    columns: Vec<f32>,
    decision: Decision,
    caps: Vec<u32>,
    given: Vec<(RowId, u32)>,
}

impl MeridianScheduler {
    /// A scheduler with the native default policy.
    #[must_use]
    pub fn new(config: &SchedulerConfig, markers: Markers) -> Self {
        Self::with_policy(config, markers, native::default_policy(config.targets()))
    }

    /// A scheduler with another policy; the default decides the steps in which that one faults or has no answer.
    #[must_use]
    pub fn with_policy(config: &SchedulerConfig, markers: Markers, policy: Box<dyn Policy>) -> Self {
        let decider = Decider {
            seat: GuardedPolicy::new(policy),
            default: native::default_policy(config.targets()),
            planner: Planner::owning_queues(),
            running: Vec::new(),
            waiting: Vec::new(),
            candidates: Vec::new(),
            columns: Vec::new(),
            decision: Decision::default(),
            caps: Vec::new(),
            given: Vec::new(),
        };
        let requests = Requests { mirror: EngineMirror::new(markers), ..Requests::default() };
        Self {
            requests: Mutex::new(requests),
            decider: Mutex::new(decider),
            faults: Mutex::default(),
            max_defer_ms: config.max_defer_ms,
        }
    }

    /// A request arrived; it waits behind those that came before. [`PhaseEvent::EnterThink`] when its prompt leaves it
    /// thinking.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] when the id is live, [`Error::NotATime`].
    pub fn submit(&self, id: RequestId, request: &NewRequest<'_>) -> Result<Option<PhaseEvent>, Error> {
        let requests = &mut *lock(&self.requests);
        let slot = requests.mirror.table.insert(id, request)?;
        requests.waiting.push_back(slot);
        Ok(requests.mirror.table[slot].entered())
    }

    /// Tokens were generated for a request, in order. Appends to `events` what they did to its thinking. Tokens of a
    /// request that is not live are passed over: a step may end after its request was aborted.
    pub fn generated(&self, id: RequestId, tokens: &[u32], events: &mut Vec<PhaseEvent>) {
        let table = &mut lock(&self.requests).mirror.table;
        if let Some(slot) = table.find(id) {
            table.generated(slot, tokens, events);
        }
    }

    /// The engine's own count of a request's computed tokens, where it is not what was granted: rejected speculative
    /// tokens, lost KV.
    pub fn set_computed(&self, id: RequestId, computed_tokens: u32) {
        let table = &mut lock(&self.requests).mirror.table;
        if let Some(slot) = table.find(id) {
            table.set_computed(slot, computed_tokens);
        }
    }

    /// The request lost its KV blocks: it waits again, before all others. False when it was not running.
    pub fn preempt(&self, id: RequestId) -> bool {
        let requests = &mut *lock(&self.requests);
        let table = &requests.mirror.table;
        let Some(slot) = table.find(id).filter(|slot| table[*slot].state() == State::Running) else { return false };
        requests.mirror.preempted(slot);
        requests.running.retain(|running| *running != slot);
        requests.waiting.push_front(slot);
        true
    }

    /// The request is over; false when it was not live. Its id may be used again.
    pub fn finish(&self, id: RequestId) -> bool {
        let requests = &mut *lock(&self.requests);
        let table = &mut requests.mirror.table;
        let Some(slot) = table.find(id) else { return false };
        let removed = table.remove(slot);
        requests.ended = true;
        if table.is_empty() {
            requests.mirror.idle();
        }
        removed
    }

    /// Phase of a live request.
    #[must_use]
    pub fn phase(&self, id: RequestId) -> Option<ThinkPhase> {
        let requests = lock(&self.requests);
        let slot = requests.mirror.table.find(id)?;
        requests.mirror.table.get(slot).map(|row| row.phase())
    }

    /// Requests in each state.
    #[must_use]
    pub fn queues(&self) -> QueueStats {
        let requests = lock(&self.requests);
        let table = &requests.mirror.table;
        let mut stats = QueueStats::default();
        for row in requests.running.iter().filter_map(|slot| table.get(*slot)) {
            match row.phase() {
                ThinkPhase::Output => stats.output += 1,
                ThinkPhase::Think => stats.think += 1,
                ThinkPhase::Prefill => stats.prefill += 1,
            }
        }
        stats.waiting = requests.waiting.iter().filter(|slot| table.get(**slot).is_some()).count();
        stats
    }

    /// The step time learned from the calls of [`MeridianScheduler::schedule_batch`]; `None` until enough were seen.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        lock(&self.requests).mirror.step_time()
    }

    /// Faults of the policy so far, and the latest.
    #[must_use]
    pub fn faults(&self) -> (u64, Option<Fault>) {
        let faults = lock(&self.faults);
        (faults.count, faults.last.clone())
    }

    /// Decide one step, and take the granted tokens as computed. A step lasts until the next call. Requests that arrive
    /// while the policy decides are seen by the next step; those that end meanwhile are left out.
    #[must_use]
    pub fn schedule_batch(&self, limits: &StepLimits) -> ScheduledBatch {
        let decider = &mut *lock(&self.decider);
        let (facts, step) = lock(&self.requests).begin(limits, decider);
        let Decider { seat, columns, candidates, decision, .. } = decider;
        let asked = seat.ask(&Batch { facts: &step, candidates: candidates.len(), columns }, decision);
        if let Asked::Faulted(faults) = &asked {
            let seen = &mut *lock(&self.faults);
            seen.count += faults.len() as u64;
            seen.last = faults.last().cloned().or(seen.last.take());
        }
        if asked != Asked::Decided {
            let inputs = decider.default.inputs();
            lock(&self.requests).fill(inputs, &decider.candidates, limits, &mut decider.columns);
            decider.decide_by_default(&step);
        }
        let requests = &mut *lock(&self.requests);
        decider.drop_ended(requests);
        requests.commit(decider, &facts, self.max_defer_ms)
    }
}

impl Requests {
    /// Fill the decider's candidates and the columns of its policy, and state the step's facts.
    fn begin(&mut self, limits: &StepLimits, decider: &mut Decider) -> (EngineFacts, Step) {
        let table = &self.mirror.table;
        if std::mem::take(&mut self.ended) {
            self.running.retain(|slot| table.get(*slot).is_some());
        }
        let seats = (limits.max_running as usize).saturating_sub(self.running.len());
        decider.running.clone_from(&self.running);
        decider.waiting.clear();
        if seats > 0 {
            self.fill_window(&mut decider.waiting);
        }
        let waiting = self.mirror.table.len() - self.running.len();
        let facts = EngineFacts {
            now_ms: self.mirror.hold_time(limits.now_ms),
            token_budget: limits.token_budget.max(1),
            free_blocks: limits.free_blocks,
            total_blocks: limits.total_blocks,
            free_seats: u32::try_from(seats).unwrap_or(u32::MAX),
            waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
            decode_tokens: limits.decode_tokens.max(1),
        };
        let step = self.mirror.begin_step(&facts, &decider.running, &decider.waiting);
        decider.candidates.clone_from(&decider.running);
        decider.candidates.extend_from_slice(&decider.waiting);
        self.fill(decider.seat.policy().inputs(), &decider.candidates, limits, &mut decider.columns);
        (facts, step)
    }

    fn fill(&self, inputs: &[Column], candidates: &[RowId], limits: &StepLimits, out: &mut Vec<f32>) {
        columns::fill(inputs, &self.mirror.table, candidates, self.mirror.now_ms(), limits.block_tokens, out);
    }

    /// The first waiting requests that are live; those before them that ended are dropped.
    fn fill_window(&mut self, window: &mut Vec<RowId>) {
        let table = &self.mirror.table;
        let mut looked_at = 0;
        for slot in &self.waiting {
            if window.len() == WAITING_WINDOW {
                break;
            }
            looked_at += 1;
            if table.get(*slot).is_some() {
                window.push(*slot);
            }
        }
        if looked_at > window.len() {
            self.waiting.drain(..looked_at);
            for slot in window.iter().rev() {
                self.waiting.push_front(*slot);
            }
        }
    }

    /// Plan from the decision and give the tokens out, while there are tokens, and seats for those that wait.
    fn commit(&mut self, decider: &mut Decider, facts: &EngineFacts, max_defer_ms: f32) -> ScheduledBatch {
        let Decider { planner, running, waiting, decision, caps, given, .. } = decider;
        let plan = planner.plan(&self.mirror.table, facts, running, waiting, decision, max_defer_ms);
        let mut batch = ScheduledBatch { token_budget: plan.token_budget, ..ScheduledBatch::default() };
        caps.clear();
        if !plan.token_caps.is_empty() {
            let positions = running.iter().chain(&*waiting).map(|slot| slot.index() + 1).max().unwrap_or(0);
            caps.resize(positions, u32::MAX);
            for (slot, cap) in &plan.token_caps {
                caps[slot.index()] = *cap;
            }
        }
        let in_order = |order: &[u32], i: usize| order.get(i).map_or(i, |from| *from as usize);
        let key = |i: usize| decision.keys.get(i).map_or(0, |key| ordinal(*key));
        let (mut left, mut seats) = (plan.token_budget, facts.free_seats);
        let (mut next_running, mut next_waiting) = (0, 0);
        let (running_order, waiting_order) = (plan.running_order.clone(), plan.waiting_order.clone());
        given.clear();
        while left > 0 {
            let running_position = (next_running < running.len()).then(|| in_order(&running_order, next_running));
            let waiting_position =
                (next_waiting < waiting.len() && seats > 0).then(|| in_order(&waiting_order, next_waiting));
            // Both lists are in the order of their keys; a request that was put off too long goes before all keys.
            let takes_waiting = match (running_position, waiting_position) {
                (None, None) => break,
                (running, None) => running.is_none(),
                (None, Some(_)) => true,
                (Some(r), Some(w)) => planner.is_overdue(w) || key(running.len() + w) < key(r),
            };
            let slot = if takes_waiting {
                next_waiting += 1;
                waiting[waiting_position.expect("matched above")]
            } else {
                next_running += 1;
                running[running_position.expect("matched above")]
            };
            let Some(row) = self.mirror.table.get(slot) else { continue };
            let cap = caps.get(slot.index()).copied().unwrap_or(u32::MAX);
            let tokens = row.needed_tokens(facts.decode_tokens).min(cap).min(left);
            if tokens == 0 {
                continue;
            }
            left -= tokens;
            let grant = Grant { request: row.id(), tokens };
            // Phases as they are now: tokens may have come in while the policy decided.
            if row.phase() == ThinkPhase::Output { &mut batch.output } else { &mut batch.think }.push(grant);
            given.push((slot, tokens));
            if takes_waiting {
                seats -= 1;
                self.running.push(slot);
            }
        }
        let scheduled_tokens = self.mirror.scheduled(facts.now_ms, given.iter().copied());
        planner.settle(&mut self.mirror.table, scheduled_tokens, facts.now_ms);
        self.leave_waiting(facts.free_seats - seats);
        if given.is_empty() {
            self.mirror.idle();
        }
        batch
    }

    /// Take the `admitted` requests that run now out of the waiting queue; they are near its front.
    fn leave_waiting(&mut self, admitted: u32) {
        let table = &self.mirror.table;
        let is_running = |slot: &RowId| table.get(*slot).is_some_and(|row| row.state() == State::Running);
        let mut left = admitted;
        let mut looked_at = 0;
        while left > 0 && looked_at < self.waiting.len() {
            left -= u32::from(is_running(&self.waiting[looked_at]));
            looked_at += 1;
        }
        let stay: Vec<RowId> = self.waiting.drain(..looked_at).filter(|slot| !is_running(slot)).collect();
        for slot in stay.into_iter().rev() {
            self.waiting.push_front(slot);
        }
    }
}

impl Decider {
    fn decide_by_default(&mut self, step: &Step) {
        let Self { default, columns, candidates, decision, .. } = self;
        decision.clear();
        let batch = Batch { facts: step, candidates: candidates.len(), columns };
        if default.decide(&batch, decision).is_err() {
            // The native default cannot fault; if it ever did, arrival order is a decision too.
            decision.clear();
        }
    }

    /// Leave out the candidates that ended, or were preempted, while the policy decided.
    fn drop_ended(&mut self, requests: &Requests) {
        let table = &requests.mirror.table;
        let running = self.running.len();
        let stays = |(i, slot): (usize, &RowId)| {
            table.get(*slot).is_some_and(|row| (row.state() == State::Running) == (i < running))
        };
        if self.candidates.iter().enumerate().all(stays) {
            return;
        }
        let kept: Vec<bool> = self.candidates.iter().enumerate().map(stays).collect();
        let Decision { keys, token_budget: _, token_caps } = &mut self.decision;
        retain(keys, &kept);
        retain(token_caps, &kept);
        let (kept_running, kept_waiting) = kept.split_at(running);
        retain(&mut self.running, kept_running);
        retain(&mut self.waiting, kept_waiting);
    }
}

/// Keep the elements whose `kept` is true; an empty list, which means "none given", stays empty.
fn retain<T>(list: &mut Vec<T>, kept: &[bool]) {
    let mut kept = kept.iter();
    list.retain(|_| *kept.next().unwrap_or(&false));
}

impl fmt::Debug for MeridianScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MeridianScheduler").field("queues", &self.queues()).finish_non_exhaustive()
    }
}
