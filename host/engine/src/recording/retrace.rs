//! The steps of a recorded dispatch slot, carried out again on a mirror: a timeline of them, and where the time of each
//! request went.
//!
//! Times of tokens are those of the row after them. A request is named by its number.

use std::collections::{BTreeMap, HashMap};

use meridian_core::slot::Source;
use meridian_core::{
    Decision, Dispatch, EngineFacts, EngineMirror, Markers, NewRequest, Planner, RowId, State, ThinkPhase as Phase,
};

use super::read::{Recording, RecordingError};
use super::row::{Outcome, Recorded};
use super::traffic::{RowEngine, RowRequest, each_row};
use crate::explain::Explanation;
use crate::timeline::{Timeline, TimelineDecision, TimelineStep};

/// Tokens of the mirror: only these mean something.
const THINK_START: u32 = 1;
const THINK_END: u32 = 2;
const ANY: u32 = 3;

/// Tokens that one request gets between two rows, at most.
const MOST_TOKENS: u32 = 4096;
/// Requests of a recording, at most; a recording of more is refused.
const MOST_REQUESTS: usize = 1 << 20;

/// What recorded steps did.
#[derive(Debug)]
pub struct Retraced {
    /// The steps, requests and decisions.
    pub timeline: Timeline,
    /// The explanation of each wanted request.
    pub explained: Vec<Explanation>,
    /// Requests that the recording knows.
    pub requests: usize,
    /// Decisions that the recording lacks between the first and the last.
    pub missing: u64,
}

/// Carry out the steps of dispatch recordings again, all of one process and in the order of writing. `wanted` are the
/// numbers of the requests to explain.
///
/// # Errors
/// The file, and what it lacks: it is of another slot or another process, or has too many requests.
///
/// ```
/// use meridian_engine::recording::retrace;
///
/// assert!(retrace(&[], &[]).is_err());
/// ```
pub fn retrace(recordings: &[Recording], wanted: &[u32]) -> Result<Retraced, RecordingError> {
    let mut known = HashMap::new();
    let engine = each_row(recordings, &[], |_, row, requests| {
        requests.iter().for_each(|request| survey(&mut known, row.facts.now_ms, request));
        Ok(())
    })?;
    let failed = |why: String| RecordingError { file: recordings[0].file().to_owned(), why };
    if known.len() > MOST_REQUESTS {
        return Err(failed(format!("has {} requests, expected at most {MOST_REQUESTS}", known.len())));
    }
    let mut again = Again::new(known, &engine, wanted);
    each_row(recordings, &[], |recording, row, requests| {
        let policy = &recording.header().policy;
        again.row(row, requests, policy.targets.max_defer_ms, &policy.version.name);
        Ok(())
    })?;
    again.end(engine.missing).ok_or_else(|| failed("has no decision".into()))
}

/// What is known of a request before its steps are carried out.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    arrival_ms: f64,
    prompt_tokens: u32,
    priority: i32,
    thinks: bool,
}

/// The first look at a recording.
fn survey(known: &mut HashMap<u32, Known>, now_ms: f64, request: &RowRequest) {
    let known = known.entry(request.number).or_insert_with(|| Known {
        arrival_ms: now_ms - f64::from(request.wait_ms),
        prompt_tokens: request.prompt_tokens,
        priority: request.priority,
        thinks: false,
    });
    known.thinks |= request.think_tokens > 0;
}

/// The second look: the steps, carried out again.
struct Again {
    mirror: EngineMirror,
    planner: Planner,
    timeline: Option<Timeline>,
    /// Requests to come, by arrival.
    to_come: Vec<(u32, Known)>,
    rows: BTreeMap<u32, RowId>,
    requests: usize,
    seats: u32,
    wanted: Vec<u32>,
    explained: Vec<Explanation>,
    policy: String,
}

impl Again {
    fn new(known: HashMap<u32, Known>, engine: &RowEngine, wanted: &[u32]) -> Self {
        let markers = Markers::new(vec![vec![THINK_START]], vec![vec![THINK_END]], vec![]);
        let mut mirror = EngineMirror::new(markers.expect("two markers of one token are valid"));
        mirror.table.keep_transitions(true);
        let requests = known.len();
        let times = known.into_iter().filter(|(_, known)| known.arrival_ms.is_finite());
        let mut to_come: Vec<(u32, Known)> = times.collect();
        // The next one is the last.
        to_come.sort_by(|(one, a), (other, b)| b.arrival_ms.total_cmp(&a.arrival_ms).then(other.cmp(one)));
        let seats = if engine.seats > 0 { engine.seats.max(engine.most_running) } else { u32::MAX };
        Self {
            mirror,
            planner: Planner::default().with_block_tokens(engine.block_tokens.max(1)),
            timeline: None,
            to_come,
            rows: BTreeMap::new(),
            requests,
            seats,
            wanted: wanted.to_vec(),
            explained: Vec::new(),
            policy: String::new(),
        }
    }

    fn row(&mut self, row: &Recorded<Dispatch>, requests: &[RowRequest], max_defer_ms: f32, policy: &str) {
        let now_ms = row.facts.now_ms;
        if self.timeline.is_some() {
            self.step_is_over(row, requests);
        } else {
            self.timeline = Some(Timeline::new(policy, self.mirror.hold_time(now_ms)));
        }
        policy.clone_into(&mut self.policy);
        let now_ms = self.mirror.hold_time(now_ms);
        self.tokens(requests);
        self.requests_end(row, now_ms);
        self.arrivals(now_ms);
        self.plan(row, requests, max_defer_ms);
    }

    /// What the step before gave each request, as this row knows.
    fn step_is_over(&mut self, row: &Recorded<Dispatch>, requests: &[RowRequest]) {
        let begin_ms = self.mirror.now_ms();
        let mut given = Vec::new();
        for seen in requests {
            let Some(row_id) = self.rows.get(&seen.number).copied() else { continue };
            let Some(request) = self.mirror.table.get(row_id) else { continue };
            let (was_running, before) = (request.state() == State::Running, request.computed_tokens());
            if seen.state == State::Preempted && was_running {
                self.mirror.preempted(row_id);
            } else if seen.state == State::Running {
                let tokens = seen.served_tokens.unwrap_or_else(|| seen.computed_tokens.saturating_sub(before));
                if !was_running {
                    self.mirror.admitted(row_id, seen.cached_tokens);
                }
                if tokens > 0 {
                    given.push((row_id, tokens));
                }
            }
        }
        for number in &row.finished {
            // It had its last token in this step.
            given.extend(self.rows.get(number).map(|row_id| (*row_id, 1)));
        }
        let tokens = self.mirror.scheduled(begin_ms, given.iter().copied());
        self.planner.settle(&mut self.mirror.table, tokens, begin_ms);
        self.note_step(&given);
        for seen in requests {
            if let Some(row_id) = self.rows.get(&seen.number) {
                self.mirror.table.set_computed(*row_id, seen.computed_tokens);
            }
        }
    }

    fn note_step(&mut self, given: &[(RowId, u32)]) {
        let Some(timeline) = &mut self.timeline else { return };
        let mut running = [0; 3];
        for (row_id, tokens) in given {
            let Some(request) = self.mirror.table.get(*row_id) else { continue };
            let phase = if request.first_token_ms().is_none() { Phase::Prefill } else { request.phase() };
            running[phase as usize] += 1;
            if phase == Phase::Prefill {
                timeline.prefill(request.number(), *tokens);
            }
        }
        let (load, cause) = (self.mirror.latest_load(), self.mirror.table.cause_of_waiting());
        if let Some(step) = timeline.open_step() {
            step.running = running;
            step.cause = Some(cause);
            if let Some((load, predicted_ms)) = load {
                (step.decode_tokens, step.prefill_tokens) = (load.decode_tokens, load.prefill_tokens);
                step.predicted_ms = predicted_ms;
            }
        }
    }

    /// The tokens that requests have got since the row before.
    fn tokens(&mut self, requests: &[RowRequest]) {
        let mut events = Vec::new();
        for seen in requests {
            let Some(row_id) = self.rows.get(&seen.number).copied() else { continue };
            let Some(request) = self.mirror.table.get(row_id) else { continue };
            let think = seen.think_tokens.saturating_sub(request.think_tokens());
            let output = seen.output_tokens.saturating_sub(request.output_tokens());
            let [think, output] = [think, output].map(|tokens| tokens.min(MOST_TOKENS));
            let has_ended = seen.phase == Phase::Output;
            for left in (0..think).rev() {
                let token = if left == 0 && has_ended { THINK_END } else { ANY };
                self.mirror.table.generated(row_id, &[token], &mut events);
            }
            for _ in 0..output {
                self.mirror.table.generated(row_id, &[ANY], &mut events);
            }
            events.clear();
        }
    }

    fn requests_end(&mut self, row: &Recorded<Dispatch>, now_ms: f64) {
        for number in &row.finished {
            if let Some(row_id) = self.rows.remove(number) {
                self.explain(row_id, "ended", now_ms);
                self.mirror.table.remove(row_id);
            }
        }
    }

    fn explain(&mut self, row_id: RowId, ended: &str, now_ms: f64) {
        let Some(request) = self.mirror.table.get(row_id).filter(|row| self.wanted.contains(&row.number())) else {
            return;
        };
        let id = format!("#{}", request.number());
        let mut explained = Explanation::of(&self.mirror.table, request, &id, now_ms);
        if !ended.is_empty() {
            (explained.state, explained.ended, explained.waits_for) = (ended.into(), true, None);
        }
        explained.policy.clone_from(&self.policy);
        self.explained.push(explained.with_admissions(self.mirror.table.admissions()));
    }

    fn arrivals(&mut self, now_ms: f64) {
        while let Some((number, known)) = self.to_come.pop_if(|(_, known)| known.arrival_ms <= now_ms) {
            let tail = if known.thinks { THINK_START } else { THINK_END };
            let new = NewRequest {
                prompt: &[tail],
                prompt_tokens: known.prompt_tokens,
                arrival_ms: known.arrival_ms,
                priority: known.priority,
                ..NewRequest::default()
            };
            if let Ok(row_id) = self.mirror.table.insert_as(&new, number) {
                self.rows.insert(number, row_id);
            }
        }
    }

    fn plan(&mut self, row: &Recorded<Dispatch>, requests: &[RowRequest], max_defer_ms: f32) {
        let rows: Vec<RowId> = requests.iter().filter_map(|seen| self.rows.get(&seen.number).copied()).collect();
        let facts = row.facts;
        // A decision for other candidates is none.
        let decides = row.outcome == Outcome::Decided && rows.len() == row.candidates;
        let decision = if decides { row.decision.clone() } else { Decision::default() };
        let (running, waiting) = rows.split_at((facts.running as usize).min(rows.len()));
        let free_seats = if waiting.is_empty() { 0 } else { self.seats.saturating_sub(facts.running).max(1) };
        let engine = EngineFacts {
            now_ms: self.mirror.now_ms(),
            token_budget: facts.token_budget,
            free_blocks: facts.free_blocks,
            total_blocks: facts.total_blocks,
            free_seats,
            waiting: facts.waiting,
            decode_tokens: facts.decode_tokens,
        };
        self.mirror.begin_step(&engine, running, waiting);
        let plan = self.planner.plan(&self.mirror.table, &engine, running, waiting, &decision, max_defer_ms);
        let source = match row.outcome {
            Outcome::Decided => Source::Active,
            Outcome::LeftToDefault => Source::Default,
            Outcome::Faulted(_) | Outcome::NotAsked => Source::Fallback,
        };
        let Some(timeline) = &mut self.timeline else { return };
        timeline.step(TimelineStep {
            begin_ms: engine.now_ms,
            token_budget: plan.token_budget,
            engine_budget: facts.token_budget,
            waiting: facts.waiting,
            free_blocks: facts.free_blocks,
            capped: u32::try_from(plan.token_caps.len()).unwrap_or(u32::MAX),
            source: Some(source),
            ..TimelineStep::default()
        });
        timeline.decision(TimelineDecision {
            slot: meridian_core::SlotName::Dispatch,
            begin_ms: engine.now_ms,
            ms: None,
            policy: self.policy.clone(),
            source,
            candidates: u32::try_from(row.candidates).unwrap_or(u32::MAX),
            fault: if let Outcome::Faulted(kind) = row.outcome { Some(kind) } else { None },
        });
        let lost = self.mirror.table.take_transitions(|transition| timeline.transition(transition));
        timeline.lose(lost);
    }

    fn end(mut self, missing: u64) -> Option<Retraced> {
        let now_ms = self.mirror.now_ms();
        for row_id in self.rows.values().copied().collect::<Vec<_>>() {
            self.explain(row_id, "", now_ms);
        }
        let mut timeline = self.timeline?;
        timeline.end(now_ms);
        Some(Retraced { timeline, explained: self.explained, requests: self.requests, missing })
    }
}
