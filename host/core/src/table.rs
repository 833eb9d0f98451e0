//! The mirror of the engine's requests: one row per request, and its updates.

mod accounts;
mod levels;
mod row;
mod sessions;
mod tokens;

use std::collections::{HashSet, VecDeque};
use std::ops::Index;
use std::time::Duration;

use meridian_policy_sdk::State;

pub use self::levels::LevelCounts;
use self::levels::LevelEnds;
use self::row::Milestones;
pub use self::row::{NewRequest, RequestState, Signals};
pub(crate) use self::sessions::SessionMemory;
use crate::account::{Account, Admission, Doing, Ledger, Part, Rule};
use crate::clients::{Clients, Ended, next_number};
use crate::forecast::{Course, Forecast};
use crate::latency::Latencies;
use crate::levels::{Levels, Speed};
use crate::sessions::{Sessions, Stop, Turn};
use crate::{Error, Markers, PhaseRecord};

/// The place of a request in a [`RequestTable`]. Positions are reused after the request is removed, ids are not.
///
/// ```
/// use meridian_core::{NewRequest, RequestTable};
///
/// let mut table = RequestTable::default();
/// let first = table.insert(&NewRequest::default())?;
/// table.remove(first);
/// let second = table.insert(&NewRequest::default())?;
/// assert_eq!(first.index(), second.index());
/// assert!(table.get(first).is_none() && table.get(second).is_some());
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RowId {
    index: u32,
    generation: u32,
}

impl RowId {
    /// Position in the table.
    #[inline]
    #[must_use]
    pub fn index(self) -> usize {
        self.index as usize
    }

    /// Bits of [`RowId::bits`] that are used.
    pub(crate) const BITS: u32 = 56;
    const INDEX_BITS: u32 = 24;

    /// The same number for the samplers, in [`RowId::BITS`] bits: a table never has 2^24 rows, because requests have
    /// numbers of 24 bits.
    pub(crate) fn bits(self) -> u64 {
        u64::from(self.generation) << Self::INDEX_BITS | u64::from(self.index)
    }

    /// The number that has these [`RowId::bits`].
    pub(crate) fn from_bits(bits: u64) -> Self {
        let index = bits & ((1 << Self::INDEX_BITS) - 1);
        Self { index: index as u32, generation: (bits >> Self::INDEX_BITS) as u32 }
    }
}

/// The mirror of the engine's requests, fed by deltas.
///
/// ```
/// use meridian_core::{Markers, NewRequest, PhaseEvent, RequestTable, ThinkPhase};
///
/// // Token 7 starts thinking, 8 ends it. The prompt ends with the start marker, as chat templates of R1 do.
/// let mut table = RequestTable::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![]).unwrap());
/// let request = NewRequest { prompt: &[1, 2, 7], max_tokens: 100, ..NewRequest::default() };
/// let row = table.insert(&request).unwrap();
/// table.scheduled(row, 3, 0.0);
/// let mut events = Vec::new();
/// table.generated(row, &[40], &mut events);
/// assert_eq!((table[row].phase(), events.len()), (ThinkPhase::Think, 0));
/// table.generated(row, &[41, 8], &mut events);
/// assert_eq!(events, [PhaseEvent::ExitThink]);
/// assert_eq!(table[row].phase(), ThinkPhase::Output);
/// assert_eq!((table[row].think_tokens(), table[row].output_tokens()), (3, 0));
/// ```
#[derive(Debug, Default)]
pub struct RequestTable {
    markers: Markers,
    rows: Vec<Row>,
    free: Vec<u32>,
    clients: Clients,
    sessions: Sessions,
    /// Number of the request that arrived last.
    last_number: u32,
    live_numbers: HashSet<u32>,
    ended: Ended,
    /// Number of the last step that gave tokens.
    step: u64,
    clock_ms: f64,
    /// The same, whole milliseconds.
    clock_whole_ms: u64,
    /// Live requests whose prompt must not be split.
    whole_prompts: usize,
    /// Live requests in the running state.
    running: usize,
    /// Admissions so far, including those after a preemption.
    admissions: u64,
    last_admission_ms: f64,
    pub(crate) ledger: Ledger,
    levels: Levels,
    level_ends: Vec<LevelEnds>,
    /// Tokens that each level was given lately, from number 0 for none; empty where no level has a least share.
    given: Vec<f64>,
    given_ms: f64,
    /// Requests that were not admitted and end when their level cannot be kept any more.
    refusable: VecDeque<RowId>,
    forecast: Forecast,
    speed: Speed,
    /// What sessions have, where the policies of this step ask.
    memory: Option<SessionMemory>,
    /// The most urgent priority of the waiting requests that were preempted, set with `memory`.
    resumes: Option<i32>,
    /// The longest that a request was last held for warm sessions, milliseconds.
    held_ms: f64,
    /// When the next request that was held for too long is admitted, milliseconds.
    next_turn_ms: f64,
    /// Observes the requests, if anybody asks.
    latencies: Option<Box<Latencies>>,
}

#[derive(Debug, Default)]
struct Row {
    /// Incremented at each removal, so that an old id finds nothing.
    generation: u32,
    state: Option<RequestState>,
}

/// A waiting request may be overtaken until this many times as many requests were admitted as stood before it.
const TURNS: u64 = 4;

impl RequestTable {
    /// An empty table for a model with these markers.
    #[must_use]
    pub fn new(markers: Markers) -> Self {
        Self { markers, ..Self::default() }
    }

    /// Number of live requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    /// Whether no request is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The request in `row_id`, if it is live.
    #[inline]
    #[must_use]
    pub fn get(&self, row_id: RowId) -> Option<&RequestState> {
        self.rows.get(row_id.index()).filter(|row| row.generation == row_id.generation)?.state.as_ref()
    }

    /// The number of a tenant that has appeared, by its name.
    #[must_use]
    pub fn tenant(&self, name: &str) -> Option<u32> {
        self.clients.number(name)
    }

    /// The name of the tenant with this number; empty for none.
    #[must_use]
    pub fn tenant_name(&self, tenant: u32) -> &str {
        self.clients.name(tenant)
    }

    /// Add a request that has arrived.
    ///
    /// # Errors
    /// [`Error::NotATime`] when the arrival is not finite or the deadline is NaN.
    pub fn insert(&mut self, request: &NewRequest<'_>) -> Result<RowId, Error> {
        self.insert_with(request, None)
    }

    /// As [`insert`](Self::insert), for a request that had this number in another table.
    ///
    /// # Errors
    /// As [`insert`](Self::insert); [`Error::DuplicateRequest`] when a live request has the number.
    pub fn insert_as(&mut self, request: &NewRequest<'_>, number: u32) -> Result<RowId, Error> {
        if self.live_numbers.contains(&number) {
            return Err(Error::DuplicateRequest { id: number.to_string() });
        }
        self.insert_with(request, Some(number))
    }

    fn insert_with(&mut self, request: &NewRequest<'_>, number: Option<u32>) -> Result<RowId, Error> {
        if !request.arrival_ms.is_finite() {
            return Err(Error::NotATime { what: "arrival_ms", value: request.arrival_ms.to_string() });
        }
        if request.deadline_ms.is_nan() {
            return Err(Error::NotATime { what: "deadline_ms", value: "NaN".into() });
        }
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX).max(request.prompt_tokens).max(1);
        let cached_tokens = request.cached_tokens.min(prompt_tokens - 1);
        let now_ms = self.clock_whole_ms.max(request.arrival_ms as u64);
        let turn = self.turn_after(self.len() - self.running);
        let tenant = self.clients.tenant(request.tenant);
        let series = self.latencies.as_mut().map_or(0, |latencies| latencies.series(tenant, request.tenant));
        let index = self.free.pop().unwrap_or_else(|| {
            self.rows.push(Row::default());
            u32::try_from(self.rows.len() - 1).expect("fewer than 2^32 live requests")
        });
        let row_id = RowId { index, generation: self.rows[index as usize].generation };
        let state = RequestState {
            row_id,
            number: number
                .inspect(|number| _ = self.live_numbers.insert(*number))
                .unwrap_or_else(|| self.next_number()),
            session: self.sessions.arrived(request.tenant, request.session, request.arrival_ms),
            found: Turn::default(),
            has_left: false,
            state: State::Waiting,
            prefilled: false,
            phases: PhaseRecord::new(&self.markers, request.prompt, request.max_think_tokens, now_ms),
            arrival_ms: request.arrival_ms,
            deadline_ms: request.deadline_ms,
            last_progress_ms: request.arrival_ms,
            served: (0, 0),
            deferred_since_ms: None,
            turn,
            prompt_tokens,
            cached_tokens,
            computed_tokens: cached_tokens,
            max_tokens: request.max_tokens,
            resident_tokens: 0,
            preemptions: 0,
            priority: request.priority,
            tenant,
            level: self.levels.of(request),
            is_refused: false,
            course: Course::NEW,
            whole_prompt: request.whole_prompt,
            think_from: u32::MAX,
            lost_tokens: 0,
            milestones: Milestones::NONE,
            last_token_ms: f64::NAN,
            computes: Part::Prefill,
            series,
            account: Box::new(Account::new(request.arrival_ms)),
            thinking: None,
        };
        self.whole_prompts += usize::from(request.whole_prompt);
        self.may_refuse(row_id, state.level);
        self.ledger.note(state.number, request.arrival_ms, Doing::Arriving);
        self.rows[index as usize].state = Some(state);
        self.ledger.arrived(row_id);
        Ok(row_id)
    }

    /// Numbers of the requests that were removed since this cursor, which moves to the end. After very many, only the last.
    pub fn ended_since(&self, cursor: &mut u64) -> &[u32] {
        self.ended.since(cursor)
    }

    /// Whether a live request has a prompt that must not be split.
    pub(crate) fn has_whole_prompts(&self) -> bool {
        self.whole_prompts > 0
    }

    /// Every live request.
    pub fn iter(&self) -> impl Iterator<Item = &RequestState> {
        self.rows.iter().filter_map(|row| row.state.as_ref())
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut RequestState> {
        self.rows.iter_mut().filter_map(|row| row.state.as_mut())
    }

    /// Remove a request; false when it was not live.
    pub fn remove(&mut self, row_id: RowId) -> bool {
        let Some(row) = self.rows.get_mut(row_id.index()).filter(|row| row.generation == row_id.generation) else {
            return false;
        };
        let Some(state) = row.state.take() else { return false };
        if let Some(latencies) = &mut self.latencies {
            latencies.ended(&state, self.clock_ms);
        }
        self.ledger.note(state.number, self.clock_ms, Doing::Ended);
        self.running -= usize::from(state.state == State::Running);
        row.generation = row.generation.wrapping_add(1);
        self.whole_prompts -= usize::from(state.whole_prompt);
        self.live_numbers.remove(&state.number);
        self.ended.push(state.number);
        self.free.push(row_id.index);
        if !state.has_left {
            self.sessions.ended(state.own_turn().session, Stop::Turn, self.clock_ms);
        }
        self.forecast.ended(state.tenant, state.course);
        self.count_level(&state);
        true
    }

    /// Requests that `is_there` does not know and that had no news for longer than `age`. For known requests, this call
    /// counts as news.
    pub fn stale(&mut self, age: Duration, is_there: impl Fn(RowId) -> bool) -> Vec<RowId> {
        let now_ms = self.clock_whole_ms;
        let mut stale = Vec::new();
        for (index, Row { generation, state }) in (0..).zip(&mut self.rows) {
            let Some(state) = state else { continue };
            let row_id = RowId { index, generation: *generation };
            if is_there(row_id) {
                state.phases.keep_alive(now_ms);
            } else if state.phases.is_stale(now_ms, age) {
                stale.push(row_id);
            }
        }
        stale
    }

    /// Report `tokens` tokens for the request in the step that began at `now_ms`, after the tokens whose KV it had.
    #[inline]
    pub fn scheduled(&mut self, row_id: RowId, tokens: u32, now_ms: f64) {
        let step = self.step;
        let Some(row) = self.row_mut(row_id) else { return };
        let was_running = std::mem::replace(&mut row.state, State::Running) == State::Running;
        row.computed_tokens = row.computed_tokens.saturating_add(tokens);
        row.prefilled |= row.computed_tokens >= row.prompt_tokens;
        row.last_progress_ms = now_ms;
        let (last, _) = std::mem::replace(&mut row.served, (step, tokens));
        row.deferred_since_ms = None;
        let level = usize::from(row.level);
        if let Some(given) = self.given.get_mut(level) {
            *given += f64::from(tokens);
        }
        if !was_running {
            self.count_admission(row_id, now_ms);
        } else if last + 1 < step {
            self.stalled(row_id, last, step);
        }
    }

    /// Tokens that a request was given in the last step that gave any.
    #[must_use]
    pub fn served_tokens(&self, row: &RequestState) -> u32 {
        let (step, tokens) = row.served;
        if step == self.step { tokens } else { 0 }
    }

    /// A step is about to give tokens.
    pub(crate) fn next_step(&mut self) {
        self.step += 1;
        self.ledger.step_gives(self.step);
    }

    /// Report that the request was admitted with this many tokens found in the prefix cache.
    pub fn admitted(&mut self, row_id: RowId, cached_tokens: u32) {
        let clock_ms = self.clock_ms;
        let Some(row) = self.row_mut(row_id) else { return };
        let was_running = std::mem::replace(&mut row.state, State::Running) == State::Running;
        row.cached_tokens = cached_tokens.min(row.prompt_tokens);
        row.computed_tokens = cached_tokens;
        row.lost_tokens = 0;
        row.milestones.admitted_ms = (clock_ms - row.arrival_ms).max(0.0) as f32;
        if !was_running {
            self.count_admission(row_id, clock_ms);
        }
    }

    fn count_admission(&mut self, row_id: RowId, now_ms: f64) {
        self.running += 1;
        self.admissions += 1;
        self.last_admission_ms = now_ms;
        let Self { rows, ledger, latencies, step, .. } = self;
        let Some(row) = rows.get_mut(row_id.index()).and_then(|row| row.state.as_mut()) else { return };
        let resumed = row.preemptions > 0;
        // As if the latest step had served it: its wait is over.
        row.served.0 = row.served.0.max(*step);
        row.computes = if resumed { Part::Recompute } else { Part::Prefill };
        ledger.turn(&mut row.account, row.number, now_ms, Doing::Running(row.computes));
        let (number, arrival_ms, prompt_tokens) = (row.number, row.arrival_ms, row.prompt_tokens);
        ledger.admitted(Admission { number, at_ms: now_ms, arrival_ms, prompt_tokens, resumed, rule: Rule::Arrival });
        if let Some(latencies) = latencies.as_mut().filter(|_| !resumed) {
            latencies.queued(row.series, now_ms - arrival_ms);
        }
    }

    /// The turn of a request behind `others` requests.
    fn turn_after(&self, others: usize) -> u64 {
        self.admissions + TURNS * (others as u64 + 1)
    }

    /// For how long a waiting request that a policy has deferred has had to run, milliseconds, and whether it is held for the
    /// sake of warm sessions; `None` where it need not. With a service level it must when just its own time is left of the
    /// longest wait of that level. One that the policy holds for the sake of warm sessions (`left_out`) must after
    /// `session_wait_ms`, in turn. Else it must after `max_defer_ms`, when as many others were admitted as its place in the
    /// queue allows, or none was admitted for as long.
    pub(crate) fn overdue_ms(
        &self,
        row: &RequestState,
        now_ms: f64,
        max_defer_ms: f32,
        left_out: bool,
    ) -> Option<(f64, bool)> {
        let since_ms = row.deferred_since_ms?;
        let late_ms = |since_ms: f64| now_ms - since_ms - f64::from(max_defer_ms);
        let mut is_held = false;
        let overdue_ms = match self.past_longest_wait_ms(row, now_ms) {
            Some(past_ms) => past_ms,
            None if left_out && let Some(holds_ms) = self.holds_ms(row) => {
                is_held = true;
                self.held_too_long_ms(row, holds_ms, since_ms, now_ms)
            }
            None if self.admissions >= row.turn || late_ms(self.last_admission_ms) > 0.0 => late_ms(since_ms),
            None => return None,
        };
        (overdue_ms > 0.0).then_some((overdue_ms, is_held))
    }

    /// Set the engine's own count of computed tokens, where it differs from the sum in [`RequestTable::scheduled`]:
    /// rejected speculative tokens, lost KV transfers.
    pub fn set_computed(&mut self, row_id: RowId, computed_tokens: u32) {
        let Some(row) = self.row_mut(row_id) else { return };
        row.computed_tokens = computed_tokens;
        row.prefilled |= computed_tokens >= row.prompt_tokens;
    }

    /// Report that the request lost its KV blocks and waits again.
    pub fn preempted(&mut self, row_id: RowId) {
        // It is before all others.
        self.preempted_behind(row_id, 0);
    }

    /// The same for a request that waits behind `others` requests.
    pub(crate) fn preempted_behind(&mut self, row_id: RowId, others: usize) {
        let turn = self.turn_after(others);
        let Some(row) = self.row_mut(row_id) else { return };
        let was_running = std::mem::replace(&mut row.state, State::Preempted) == State::Running;
        if was_running {
            self.account_wait(row_id);
        }
        let Some(row) = self.row_mut(row_id) else { return };
        row.turn = turn;
        row.lost_tokens = row.computed_tokens;
        row.computed_tokens = 0;
        row.preemptions += 1;
        self.running -= usize::from(was_running);
    }

    /// Time of the reports, milliseconds on the host's clock.
    #[must_use]
    pub fn clock_ms(&self) -> f64 {
        self.clock_ms
    }

    /// Set the time of the next reports of generated tokens.
    pub fn set_clock(&mut self, now_ms: f64) {
        self.clock_ms = now_ms;
        self.clock_whole_ms = now_ms as u64;
    }

    pub(crate) fn defer(&mut self, row_id: RowId, now_ms: f64) {
        if let Some(row) = self.row_mut(row_id) {
            row.deferred_since_ms.get_or_insert(now_ms);
        }
    }

    pub(crate) fn row_mut(&mut self, row_id: RowId) -> Option<&mut RequestState> {
        live(&mut self.rows, row_id)
    }

    /// The number of the next request. None is given to two live requests.
    fn next_number(&mut self) -> u32 {
        loop {
            self.last_number = next_number(self.last_number);
            if self.live_numbers.insert(self.last_number) {
                return self.last_number;
            }
        }
    }
}

fn live(rows: &mut [Row], row_id: RowId) -> Option<&mut RequestState> {
    rows.get_mut(row_id.index()).filter(|row| row.generation == row_id.generation)?.state.as_mut()
}

impl Index<RowId> for RequestTable {
    type Output = RequestState;

    /// # Panics
    /// When the request is not live.
    fn index(&self, row_id: RowId) -> &RequestState {
        self.get(row_id).expect("the row holds a live request")
    }
}
