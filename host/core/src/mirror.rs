use std::cmp::Reverse;

use meridian_policy_sdk::eviction::{Memory, Ranking};
use meridian_policy_sdk::{Phase, State, Step};

use crate::blocks::ranked_or_default;
use crate::levels::Speed;
use crate::plan::memory::Losses;
use crate::rank::ordinal;
use crate::table::RequestState;
use crate::{
    BlockTier, ChainFacts, EngineFacts, EvictionCandidate, EvictionRanker, EvictionSubject, Markers, RequestTable,
    RowId, StepLoad, StepTime, StepTimeModel, Stop,
};

/// The host's knowledge of one engine: its requests, and its step times. For each step, call
/// [`EngineMirror::begin_step`], let the engine schedule, then call [`EngineMirror::scheduled`].
///
/// ```
/// use meridian_core::{EngineFacts, EngineMirror, Markers, NewRequest};
///
/// let mut mirror = EngineMirror::new(Markers::default());
/// let row_id = mirror.table.insert(&NewRequest { prompt_tokens: 64, ..NewRequest::default() }).unwrap();
/// let facts = EngineFacts { now_ms: 5.0, token_budget: 2048, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
/// assert_eq!(mirror.begin_step(&facts, &[], &[row_id]).waiting, 1);
/// assert_eq!(mirror.scheduled(5.0, [(row_id, 64)]), 64);
/// assert_eq!(mirror.begin_step(&facts, &[row_id], &[]).running_output, 1);
/// ```
#[derive(Debug, Default)]
pub struct EngineMirror {
    /// The requests.
    pub table: RequestTable,
    step_time: StepTimeModel,
    /// Steps whose end has not been seen, oldest first: one with synchronous scheduling, two when scheduling runs
    /// ahead.
    in_flight: Vec<InFlight>,
    steps_ahead: usize,
    /// Steps so far.
    steps: u64,
    last_plan_ms: Option<f64>,
    preemptions: [u64; 3],
    /// Requests that the latest plan preempts for waiting ones, and the number of waiting requests.
    preempted_for_waiting: Vec<RowId>,
    behind: usize,
    /// Tokens that the engine takes in a step at most.
    step_tokens: u32,
    kv: KvCounts,
    now_ms: Option<f64>,
}

/// A step whose end has not been seen.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    load: StepLoad,
    predicted_ms: Option<f32>,
}

/// Tokens found in and missed by the prefix cache, and the cost of preemptions, since the start.
///
/// ```
/// use meridian_core::{EngineMirror, Markers, NewRequest};
///
/// let mut mirror = EngineMirror::new(Markers::default());
/// let row_id = mirror.table.insert(&NewRequest { prompt_tokens: 64, ..NewRequest::default() }).unwrap();
/// mirror.admitted(row_id, 32);
/// mirror.scheduled(0.0, [(row_id, 32)]);
/// mirror.preempted(row_id);
/// mirror.admitted(row_id, 0);
/// let counts = mirror.kv_counts();
/// assert_eq!((counts.hit_tokens[0], counts.missed_tokens[0], counts.recomputed_tokens), (32, 96, 64));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvCounts {
    /// Tokens of admitted requests that were found, by kind: prompt, thinking, output. Only a request that was
    /// preempted is admitted with more than a prompt.
    pub hit_tokens: [u64; 3],
    /// The same for tokens that were not found.
    pub missed_tokens: [u64; 3],
    /// Tokens that a preempted request had computed and that were not found at its next admission.
    pub recomputed_tokens: u64,
    /// Preemptions of a request that answered, while another that did not answer had KV blocks.
    pub avoidable_output_preemptions: u64,
}

impl EngineMirror {
    /// The mirror of an engine without requests.
    #[must_use]
    pub fn new(markers: Markers) -> Self {
        Self { table: RequestTable::new(markers), ..Self::default() }
    }

    /// Set how many steps the engine schedules before the result of one is known: 0 for synchronous scheduling, 1 for
    /// asynchronous. Step times are attributed accordingly.
    pub fn set_steps_ahead(&mut self, steps: usize) {
        self.steps_ahead = steps;
    }

    /// The learned step time.
    #[must_use]
    pub fn step_time(&self) -> Option<StepTime> {
        self.step_time.learned()
    }

    /// Preemptions of requests in prefill, think and output.
    #[must_use]
    pub fn preemptions(&self) -> [u64; 3] {
        self.preemptions
    }

    /// Take a time from the caller, milliseconds, and return the valid time. A time that is not finite, or that
    /// precedes the last one, becomes the last one. After a wrong time, a deferred request would never become overdue.
    pub fn hold_time(&mut self, now_ms: f64) -> f64 {
        let last_ms = self.now_ms.unwrap_or(0.0);
        let held_ms = if now_ms.is_finite() && (self.now_ms.is_none() || now_ms > last_ms) { now_ms } else { last_ms };
        self.now_ms = Some(held_ms);
        self.table.set_clock(held_ms);
        held_ms
    }

    /// The latest valid time, 0 before any.
    #[must_use]
    pub fn now_ms(&self) -> f64 {
        self.now_ms.unwrap_or(0.0)
    }

    /// Live requests in prefill, think and output.
    #[must_use]
    pub fn phases(&self) -> [u64; 3] {
        let mut by_phase = [0; 3];
        for row in self.table.iter() {
            by_phase[row.phase() as usize] += 1;
        }
        by_phase
    }

    /// Sessions with a live request.
    #[must_use]
    pub fn live_sessions(&self) -> u64 {
        let mut sessions: Vec<u32> =
            self.table.iter().map(RequestState::session).filter(|number| *number > 0).collect();
        sessions.sort_unstable();
        sessions.dedup();
        sessions.len() as u64
    }

    /// Begin a step: learn from the step that ended, and return the facts for policies. `facts.now_ms` must come from
    /// [`EngineMirror::hold_time`].
    pub fn begin_step(&mut self, facts: &EngineFacts, running: &[RowId], waiting: &[RowId]) -> Step {
        self.measure(facts.now_ms);
        self.step_tokens = facts.token_budget;
        let prefill_token_ms = self.step_time.learned().map_or(0.0, |fit| f64::from(fit.prefill_token_ms));
        self.table.begin_step(facts.now_ms, prefill_token_ms);
        let EngineFacts {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            free_seats: _,
            waiting: all_waiting,
            decode_tokens,
        } = *facts;
        let mut by_phase = [0u32; 3];
        let mut context_tokens = 0u64;
        for row in running.iter().filter_map(|row_id| self.table.get(*row_id)) {
            by_phase[row.phase() as usize] += 1;
            context_tokens += if row.phase() == Phase::Prefill { 0 } else { u64::from(row.computed_tokens()) };
        }
        let step_time = self.step_time.learned().unwrap_or_default();
        let StepTime { decode_token_ms, prefill_token_ms, .. } = step_time;
        let fixed_ms = step_time.before_tokens_ms(context_tokens);
        let decodes = (by_phase[Phase::Think as usize] + by_phase[Phase::Output as usize]).max(1);
        let decode_step_ms = fixed_ms + decode_token_ms * decodes.saturating_mul(decode_tokens) as f32;
        self.table.forecast_at(Speed { prefill_token_ms, decode_step_ms }, now_ms);
        Step {
            now_ms,
            token_budget,
            free_blocks,
            total_blocks,
            running: length(running.len()),
            running_think: by_phase[Phase::Think as usize],
            running_output: by_phase[Phase::Output as usize],
            waiting: all_waiting.max(length(waiting.len())),
            decode_tokens,
            fixed_ms,
            decode_token_ms,
            prefill_token_ms,
            decode_context_tokens: context_tokens,
        }
    }

    /// Report the step that began at `now_ms`: `given` tokens for each request. Returns their sum.
    pub fn scheduled(&mut self, now_ms: f64, given: impl IntoIterator<Item = (RowId, u32)>) -> u32 {
        let mut step = StepLoad::default();
        let mut given = given.into_iter().peekable();
        if given.peek().is_some() {
            self.table.next_step();
        }
        for (row_id, tokens) in given {
            let Some(row) = self.table.get(row_id) else { continue };
            if row.phase() != Phase::Prefill && row.needed_tokens(0) <= 1 {
                step.decode_tokens = step.decode_tokens.saturating_add(tokens);
                step.context_tokens += u64::from(row.computed_tokens());
            } else {
                step.prefill_tokens = step.prefill_tokens.saturating_add(tokens);
            }
            self.table.scheduled(row_id, tokens, now_ms);
        }
        let predicted_ms = self.step_time.learned().map(|fit| fit.of(&step));
        self.steps += 1;
        self.in_flight.push(InFlight { load: step, predicted_ms });
        step.decode_tokens.saturating_add(step.prefill_tokens)
    }

    /// Report additional prompt tokens of the latest step that belong to no request; they share its time.
    pub fn scheduled_besides(&mut self, tokens: u32) {
        if tokens == 0 {
            return;
        }
        self.table.ledger.probes(tokens);
        if let Some(step) = self.in_flight.last_mut() {
            step.load.prefill_tokens = step.load.prefill_tokens.saturating_add(tokens);
            step.predicted_ms = self.step_time.learned().map(|fit| fit.of(&step.load));
        }
    }

    /// Report that the request was admitted with this many of its tokens found in the prefix cache.
    pub fn admitted(&mut self, row_id: RowId, cached_tokens: u32) {
        if let Some(row) = self.table.get(row_id) {
            let all = row.known_tokens();
            let found = cached_tokens.min(all);
            for (total, tokens) in self.kv.hit_tokens.iter_mut().zip(row.by_phase(0, found)) {
                *total += u64::from(tokens);
            }
            for (total, tokens) in self.kv.missed_tokens.iter_mut().zip(row.by_phase(found, all)) {
                *total += u64::from(tokens);
            }
            self.kv.recomputed_tokens += u64::from(row.lost_tokens().saturating_sub(found));
            self.table.admitted(row_id, cached_tokens);
        }
    }

    /// Report that the request lost its KV blocks before this mirror existed, or with all others: no policy chose it.
    pub fn lost_blocks(&mut self, row_id: RowId) {
        self.table.preempted(row_id);
    }

    /// Note the requests that the plan of this step preempts, and how many requests wait before them.
    pub(crate) fn will_preempt(&mut self, rows: &[RowId], waiting: usize) {
        self.preempted_for_waiting.clear();
        self.preempted_for_waiting.extend_from_slice(rows);
        self.behind = waiting;
    }

    /// Report a preemption. Returns whether the request answers, although one that does not answer could have gone, and would
    /// not have lost much more.
    pub fn preempted(&mut self, row_id: RowId) -> bool {
        let Some(row) = self.table.get(row_id) else { return false };
        self.preemptions[row.phase() as usize] += 1;
        let others = if self.preempted_for_waiting.contains(&row_id) { self.behind } else { 0 };
        let avoidable = row.phase() == Phase::Output && {
            let runs = |row: &&RequestState| row.state() == State::Running && row.computed_tokens() > 0;
            let losses = self.losses(self.table.iter().filter(runs));
            self.table
                .iter()
                .filter(runs)
                .any(|other| other.phase() != Phase::Output && losses.kept(other) < losses.kept(row))
        };
        self.table.preempted_behind(row_id, others);
        self.kv.avoidable_output_preemptions += u64::from(avoidable);
        avoidable
    }

    fn losses<'a>(&self, rows: impl Iterator<Item = &'a RequestState>) -> Losses {
        Losses::new(rows.map(RequestState::computed_tokens), self.step_tokens)
    }

    /// Report that the chain of a request's blocks is about to be released because the request stops, and get the facts for
    /// [`CachedBlocks::chain_ends`](crate::CachedBlocks::chain_ends). With [`Stop::Turn`] or [`Stop::Tool`] its session
    /// pauses from now; removing the request follows.
    pub fn chain_ends(&mut self, row_id: RowId, stop: Stop) -> ChainFacts {
        let now_ms = self.now_ms();
        let session = self.table.stops(row_id, stop, now_ms);
        let Some(row) = self.table.get(row_id) else { return ChainFacts::default() };
        ChainFacts {
            tokens: row.known_tokens(),
            prompt_tokens: row.prompt_tokens,
            priority: row.priority,
            token_ms: self.token_ms(),
            ended_ms: (stop != Stop::Preempted).then_some(now_ms),
            session,
        }
    }

    /// Report that the whole prompt of an earlier request of `session` begins the prompt of this one, as
    /// [`CachedBlocks::continued`](crate::CachedBlocks::continued) has found. Does nothing where the client names a session.
    pub fn continues(&mut self, row_id: RowId, session: u32) {
        self.table.continues(row_id, session);
    }

    /// Learned time of a prefill token, milliseconds; 0 before enough steps.
    fn token_ms(&self) -> f32 {
        self.step_time.learned().map_or(0.0, |learned| learned.prefill_token_ms)
    }

    /// The counts of the cache, see [`KvCounts`].
    #[must_use]
    pub fn kv_counts(&self) -> KvCounts {
        self.kv
    }

    /// The index of the request in `running` that gives up its KV blocks. A request whose tokens would take more than a step to
    /// compute again, and are many times those of the others, goes after all of them, and so does one that was preempted
    /// often. Of the rest, requests that do not answer go before requests that do, in each group first those whose service
    /// level cannot be kept any more, then in the order of the policy: by default, the fewest computed tokens first, then the
    /// youngest. `blocks` counts the blocks that only this request attends. `None` when nothing runs.
    pub fn victim(
        &self,
        policy: &mut dyn EvictionRanker,
        memory: &Memory,
        running: &[RowId],
        blocks: &[u32],
    ) -> Option<usize> {
        let mut rows: Vec<(usize, &RequestState)> =
            running.iter().enumerate().filter_map(|(i, row_id)| Some((i, self.table.get(*row_id)?))).collect();
        let losses = self.losses(rows.iter().map(|(_, row)| *row));
        // One that frees nothing goes after all others.
        let kept = |(i, row): &(usize, &RequestState)| (blocks.get(*i) == Some(&0), losses.kept(row));
        let first = rows.iter().map(kept).min()?;
        rows.retain(|row| kept(row) == first);
        let tier = if rows[0].1.phase() == Phase::Output { BlockTier::OutputCritical } else { BlockTier::ThinkActive };
        let token_ms = self.token_ms();
        // Oldest first, so that a policy receives the same candidates in the same order in every run.
        rows.sort_by(|(_, a), (_, b)| a.arrival_ms.total_cmp(&b.arrival_ms));
        let candidates: Vec<_> = rows
            .iter()
            .map(|(i, row)| EvictionCandidate {
                subject: EvictionSubject::Request(row.number.into()),
                tier,
                blocks: blocks.get(*i).copied().unwrap_or(0),
                age_ms: row.admitted_ms().map_or(0.0, |since_ms| (memory.now_ms - since_ms).max(0.0) as f32),
                computed_tokens: row.computed_tokens(),
                chain_tokens: row.known_tokens(),
                session: self.table.session_facts(row),
                priority: row.priority,
                recompute_ms: row.computed_tokens() as f32 * token_ms,
                phase: row.phase(),
                preemptions: row.preemptions(),
                served_tokens: self.table.served_tokens(row),
                level_slack_ms: self.table.level_slack_ms(row, memory.now_ms),
                ..EvictionCandidate::default()
            })
            .collect();
        let (Ranking { keys, .. }, _) = ranked_or_default(policy, memory, &candidates);
        let rank = |position: usize, row: &RequestState| {
            let in_time = self.table.level_slack_ms(row, memory.now_ms) >= 0.0;
            (in_time, ordinal(keys.get(position).copied().unwrap_or(0.0)), row.computed_tokens(), Reverse(position))
        };
        rows.iter().enumerate().min_by_key(|(position, (_, row))| rank(*position, row)).map(|(_, (i, _))| *i)
    }

    /// Report that the engine is idle: the time until the next step belongs to no step.
    pub fn idle(&mut self) {
        self.in_flight.clear();
        self.last_plan_ms = None;
        self.table.ledger.idle();
    }

    /// A step takes from its plan to the next plan. With steps scheduled ahead, the next plan waits for an earlier
    /// step; the time is attributed to that step's batch.
    fn measure(&mut self, now_ms: f64) {
        if let Some(last_ms) = self.last_plan_ms.replace(now_ms)
            && self.in_flight.len() > self.steps_ahead
        {
            let InFlight { load, .. } = self.in_flight.remove(0);
            let ms = now_ms - last_ms;
            self.step_time.observe(&load, ms);
            if let Some(latencies) = self.table.latencies_mut() {
                latencies.step(&load, ms);
            }
        }
    }

    /// Steps so far: the number of the latest one.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The load of the latest step, and the time that the learned model predicts for it, milliseconds.
    #[must_use]
    pub fn latest_load(&self) -> Option<(StepLoad, Option<f32>)> {
        self.in_flight.last().map(|step| (step.load, step.predicted_ms))
    }
}

fn length(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NewRequest;

    /// Whether a request whose turn was put behind so many others is overdue after so many admissions of others.
    fn is_overdue_after(others: usize, admissions: u64) -> bool {
        let mut mirror = EngineMirror::default();
        let new = NewRequest::default();
        let row = mirror.table.insert(&new).expect("finite times");
        mirror.admitted(row, 0);
        mirror.will_preempt(&[row], others);
        mirror.preempted(row);
        mirror.table.defer(row, 0.0);
        for _ in 0..admissions {
            let other = mirror.table.insert(&new).expect("finite times");
            mirror.hold_time(100.0);
            mirror.admitted(other, 0);
        }
        mirror.table.overdue_ms(&mirror.table[row], 100.0, 50.0, false).is_some()
    }

    #[test]
    fn who_gives_way_has_its_turn_behind_all_that_waited() {
        assert!(!is_overdue_after(0, 3) && is_overdue_after(0, 4));
        assert!(!is_overdue_after(10, 43) && is_overdue_after(10, 44));
    }
}
