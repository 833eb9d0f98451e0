use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;

use meridian_core::slot::DispatchSlot;
use meridian_core::{
    Decision, EngineFacts, EngineMirror, Fault, Markers, NewRequest, PhaseEvent, Planner, RowId, SchedulerConfig,
    State, Step, StepTime, ThinkPhase, WAITING_WINDOW, columns, native, ordinal,
};

use crate::sync::{Mutex, lock};
use crate::{Error, Grant, QueueStats, RequestId, ScheduledBatch, StepLimits};

/// Queues for an engine without queues: the caller submits requests, takes a batch for each step, and reports generated
/// tokens. The mirror, the dispatch slot and the planner are those of
/// [`MeridianScheduler`](meridian_core::MeridianScheduler); both give the same schedule.
///
/// The default policy is the host's own `balanced`: every decode, the output phase first, and as many prompt tokens beside
/// them as they can bear. Among waiting requests, it takes the one that has waited longest for its cost; before that, it
/// goes by priority, and near deadlines have the highest priority. Candidates of equal keys go in their present order,
/// running ones first. The tenant of a request is a fact for policies.
///
/// No request is lost or duplicated, and the token budget and the number of running requests hold. A request without tokens
/// for longer than `max_defer_ms` (a waiting one: while a seat was free, and when its turn has come) gets some in the next
/// step, as far as that step's budget allows, the longest first. A policy that faults costs only that decision: the default
/// decides the same step.
///
/// `Send + Sync`. One thread schedules at a time. While a policy decides, no lock is held that [`OwnQueues::submit`],
/// [`OwnQueues::generated`] or [`OwnQueues::finish`] would wait for.
///
/// ```
/// use meridian_core::{Markers, NewRequest, SchedulerConfig};
/// use meridian_memory::{OwnQueues, RequestId, StepLimits};
///
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let queues = OwnQueues::new(&SchedulerConfig::default(), markers);
/// for id in 0..3 {
///     queues.submit(RequestId(id), &NewRequest { prompt: &[1, 7], ..NewRequest::default() })?;
/// }
/// let limits = StepLimits { token_budget: 5, max_running: 2, ..StepLimits::default() };
/// let batch = queues.schedule_batch(&limits);
/// assert_eq!(batch.think.iter().map(|grant| (grant.request.0, grant.tokens)).collect::<Vec<_>>(), [(0, 2), (1, 2)]);
/// assert!(queues.finish(RequestId(0)));
/// assert_eq!(queues.stats().waiting, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct OwnQueues {
    requests: Mutex<Requests>,
    /// Locked before the other, never after.
    deciding: Mutex<Deciding>,
    max_defer_ms: f32,
}

/// The requests, and their queues.
struct Requests {
    mirror: EngineMirror,
    rows: HashMap<RequestId, RowId>,
    /// The request of each row, by its position.
    ids: Vec<RequestId>,
    /// These two may hold ended requests while `ended` is set; the next step drops them.
    running: Vec<RowId>,
    waiting: VecDeque<RowId>,
    ended: bool,
}

/// The scheduling thread's data besides the requests, and buffers for one step.
struct Deciding {
    slot: DispatchSlot,
    planner: Planner,
    running: Vec<RowId>,
    waiting: Vec<RowId>,
    candidates: Vec<RowId>,
    caps: Vec<u32>,
    given: Vec<(RowId, u32)>,
    /// What the slot was told of ended requests.
    ended: u64,
}

impl OwnQueues {
    /// Empty queues and the native default policy.
    #[must_use]
    pub fn new(config: &SchedulerConfig, markers: Markers) -> Self {
        let targets = config.targets();
        Self::with_slot(DispatchSlot::new(native::default_policy(targets), targets), markers, config)
    }

    /// The same with another policy.
    #[must_use]
    pub fn with_slot(slot: DispatchSlot, markers: Markers, config: &SchedulerConfig) -> Self {
        let deciding = Deciding {
            slot,
            planner: Planner::owning_queues(),
            running: Vec::new(),
            waiting: Vec::new(),
            candidates: Vec::new(),
            caps: Vec::new(),
            given: Vec::new(),
            ended: 0,
        };
        let requests = Requests {
            mirror: EngineMirror::new(markers),
            rows: HashMap::new(),
            ids: Vec::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            ended: false,
        };
        Self { requests: Mutex::new(requests), deciding: Mutex::new(deciding), max_defer_ms: config.max_defer_ms }
    }

    /// Faults of the policies so far, and the latest. Waits for a running decision.
    #[must_use]
    pub fn faults(&self) -> (u64, Option<Fault>) {
        let slot = &lock(&self.deciding).slot;
        (slot.fault_count(), slot.last_fault())
    }

    /// The learned step time; `None` before enough steps.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        lock(&self.requests).mirror.step_time()
    }

    /// Add a request; it waits behind earlier ones. [`PhaseEvent::EnterThink`] when its prompt leaves it thinking.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] when the id is live, [`Error::Core`] when a time is not one.
    pub fn submit(&self, id: RequestId, request: &NewRequest<'_>) -> Result<Option<PhaseEvent>, Error> {
        let requests = &mut *lock(&self.requests);
        let Entry::Vacant(row) = requests.rows.entry(id) else { return Err(Error::DuplicateRequest { id }) };
        let row_id = *row.insert(requests.mirror.table.insert(request)?);
        if requests.ids.len() <= row_id.index() {
            requests.ids.resize(row_id.index() + 1, id);
        }
        requests.ids[row_id.index()] = id;
        requests.waiting.push_back(row_id);
        Ok(requests.mirror.table[row_id].entered())
    }

    /// Take in a request's generated tokens, in order. Appends to `events` their effects on its thinking. Tokens of a
    /// request that is not live are ignored: a step may end after its request was aborted.
    pub fn generated(&self, id: RequestId, tokens: &[u32], events: &mut Vec<PhaseEvent>) {
        let Requests { mirror, rows, .. } = &mut *lock(&self.requests);
        if let Some(row_id) = rows.get(&id) {
            mirror.table.generated(*row_id, tokens, events);
        }
    }

    /// Set the engine's own count of a request's computed tokens, where it differs from the granted tokens: rejected
    /// speculative tokens, lost KV.
    pub fn set_computed(&self, id: RequestId, computed_tokens: u32) {
        let Requests { mirror, rows, .. } = &mut *lock(&self.requests);
        if let Some(row_id) = rows.get(&id) {
            mirror.table.set_computed(*row_id, computed_tokens);
        }
    }

    /// Report that the request lost its KV blocks: it waits again, before all others. False when it was not running.
    pub fn preempt(&self, id: RequestId) -> bool {
        let requests = &mut *lock(&self.requests);
        let table = &requests.mirror.table;
        let row_id = requests.rows.get(&id).copied();
        let Some(row_id) = row_id.filter(|row_id| table[*row_id].state() == State::Running) else { return false };
        requests.mirror.preempted(row_id);
        requests.running.retain(|running| *running != row_id);
        requests.waiting.push_front(row_id);
        true
    }

    /// Remove an ended request; false when it was not live. Its id may be reused.
    pub fn finish(&self, id: RequestId) -> bool {
        let requests = &mut *lock(&self.requests);
        let Some(row_id) = requests.rows.remove(&id) else { return false };
        let table = &mut requests.mirror.table;
        let removed = table.remove(row_id);
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
        let row_id = requests.rows.get(&id)?;
        requests.mirror.table.get(*row_id).map(|row| row.phase())
    }

    /// Requests in each state.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        let requests = lock(&self.requests);
        let table = &requests.mirror.table;
        let mut stats = QueueStats::default();
        for row in requests.running.iter().filter_map(|row_id| table.get(*row_id)) {
            match row.phase() {
                ThinkPhase::Output => stats.output += 1,
                ThinkPhase::Think => stats.think += 1,
                ThinkPhase::Prefill => stats.prefill += 1,
            }
        }
        stats.waiting = requests.waiting.iter().filter(|row_id| table.get(**row_id).is_some()).count();
        stats
    }

    /// Decide one step, and count the granted tokens as computed. A step lasts until the next call. The next step sees
    /// requests that arrive during the decision; requests that end meanwhile are left out.
    #[must_use]
    pub fn schedule_batch(&self, limits: &StepLimits) -> ScheduledBatch {
        let deciding = &mut *lock(&self.deciding);
        let (facts, step) = lock(&self.requests).begin(limits, deciding);
        let Deciding { slot, candidates, .. } = deciding;
        slot.decide_by(&step, candidates.len(), |inputs, out| {
            let table = &lock(&self.requests).mirror.table;
            columns::fill(inputs, table, candidates, step.now_ms, limits.block_tokens, out);
        });
        let requests = &mut *lock(&self.requests);
        deciding.drop_ended(requests);
        requests.commit(deciding, &facts, self.max_defer_ms)
    }
}

impl Requests {
    /// Fill the step's candidates, and return its facts.
    fn begin(&mut self, limits: &StepLimits, deciding: &mut Deciding) -> (EngineFacts, Step) {
        let table = &self.mirror.table;
        deciding.slot.note_finished(table.ended_since(&mut deciding.ended));
        if std::mem::take(&mut self.ended) {
            self.running.retain(|row_id| table.get(*row_id).is_some());
        }
        let seats = (limits.max_running as usize).saturating_sub(self.running.len());
        deciding.running.clone_from(&self.running);
        deciding.waiting.clear();
        if seats > 0 {
            self.fill_window(&mut deciding.waiting);
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
        let step = self.mirror.begin_step(&facts, &deciding.running, &deciding.waiting);
        deciding.candidates.clone_from(&deciding.running);
        deciding.candidates.extend_from_slice(&deciding.waiting);
        (facts, step)
    }

    /// The first live waiting requests; ended ones before them are dropped.
    fn fill_window(&mut self, window: &mut Vec<RowId>) {
        let table = &self.mirror.table;
        let mut looked_at = 0;
        for row_id in &self.waiting {
            if window.len() == WAITING_WINDOW {
                break;
            }
            looked_at += 1;
            if table.get(*row_id).is_some() {
                window.push(*row_id);
            }
        }
        if looked_at > window.len() {
            self.waiting.drain(..looked_at);
            for row_id in window.iter().rev() {
                self.waiting.push_front(*row_id);
            }
        }
    }

    /// Plan from the decision and grant tokens, while there are tokens, and seats for waiting requests.
    fn commit(&mut self, deciding: &mut Deciding, facts: &EngineFacts, max_defer_ms: f32) -> ScheduledBatch {
        let Deciding { slot, planner, running, waiting, caps, given, .. } = deciding;
        let decision = slot.decision_mut();
        let plan = planner.plan(&self.mirror.table, facts, running, waiting, decision, max_defer_ms);
        let mut batch = ScheduledBatch { token_budget: plan.token_budget, ..ScheduledBatch::default() };
        caps.clear();
        if !plan.token_caps.is_empty() {
            let positions = running.iter().chain(&*waiting).map(|row_id| row_id.index() + 1).max().unwrap_or(0);
            caps.resize(positions, u32::MAX);
            for (row_id, cap) in &plan.token_caps {
                caps[row_id.index()] = *cap;
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
            // Both lists are in the order of their keys; a request that was deferred too long goes before all keys.
            let takes_waiting = match (running_position, waiting_position) {
                (None, None) => break,
                (running, None) => running.is_none(),
                (None, Some(_)) => true,
                (Some(r), Some(w)) => planner.is_overdue(w) || key(running.len() + w) < key(r),
            };
            let row_id = if takes_waiting {
                next_waiting += 1;
                waiting[waiting_position.expect("matched above")]
            } else {
                next_running += 1;
                running[running_position.expect("matched above")]
            };
            let Some(row) = self.mirror.table.get(row_id) else { continue };
            let cap = caps.get(row_id.index()).copied().unwrap_or(u32::MAX);
            let tokens = row.needed_tokens(facts.decode_tokens).min(cap).min(left);
            if tokens == 0 {
                continue;
            }
            left -= tokens;
            let grant = Grant { request: self.ids[row_id.index()], tokens };
            // The present phases: tokens may have arrived during the decision.
            if row.phase() == ThinkPhase::Output { &mut batch.output } else { &mut batch.think }.push(grant);
            given.push((row_id, tokens));
            if takes_waiting {
                seats -= 1;
                self.running.push(row_id);
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

    /// Take the `admitted` requests that now run out of the waiting queue; they are near its front.
    fn leave_waiting(&mut self, admitted: u32) {
        let table = &self.mirror.table;
        let is_running = |row_id: &RowId| table.get(*row_id).is_some_and(|row| row.state() == State::Running);
        let mut left = admitted;
        let mut looked_at = 0;
        while left > 0 && looked_at < self.waiting.len() {
            left -= u32::from(is_running(&self.waiting[looked_at]));
            looked_at += 1;
        }
        let stay: Vec<RowId> = self.waiting.drain(..looked_at).filter(|row_id| !is_running(row_id)).collect();
        for row_id in stay.into_iter().rev() {
            self.waiting.push_front(row_id);
        }
    }
}

impl Deciding {
    /// Leave out the candidates that ended, or were preempted, during the decision.
    fn drop_ended(&mut self, requests: &Requests) {
        let table = &requests.mirror.table;
        let running = self.running.len();
        let stays = |(i, row_id): (usize, &RowId)| {
            table.get(*row_id).is_some_and(|row| (row.state() == State::Running) == (i < running))
        };
        if self.candidates.iter().enumerate().all(stays) {
            return;
        }
        let kept: Vec<bool> = self.candidates.iter().enumerate().map(stays).collect();
        let Decision { keys, token_budget: _, token_caps, victim_keys } = self.slot.decision_mut();
        retain(keys, &kept);
        retain(token_caps, &kept);
        retain(victim_keys, &kept);
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

impl fmt::Debug for OwnQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnQueues").field("max_defer_ms", &self.max_defer_ms).finish_non_exhaustive()
    }
}
