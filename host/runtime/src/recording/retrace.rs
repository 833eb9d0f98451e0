//! The steps of a recorded dispatch slot, carried out again on a mirror: a timeline of them, and where the time of each
//! request went.
//!
//! A recording has what the policy saw at the begin of each step. What a step gave each request stands in the next row.
//! Times of tokens are those of the row after them. A request is named by its number.

use std::collections::{BTreeMap, HashMap};

use meridian_core::{
    Column, Decision, Dispatch, EngineFacts, EngineMirror, Markers, NewRequest, Planner, RequestId, RowId, Source,
    State, Step, ThinkPhase as Phase,
};

use super::read::{Recording, RecordingError};
use super::row::{Outcome, Recorded};
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
/// use meridian_runtime::recording::retrace;
///
/// assert!(retrace(&[], &[]).is_err());
/// ```
pub fn retrace(recordings: &[Recording], wanted: &[u32]) -> Result<Retraced, RecordingError> {
    let Some(first) = recordings.first() else {
        return Err(RecordingError { file: String::new(), why: "no recording is given".into() });
    };
    if let Some(other) = recordings.iter().find(|recording| recording.header().run != first.header().run) {
        let why = format!("it is of another process than {}", first.file());
        return Err(RecordingError { file: other.file().to_owned(), why });
    }
    let mut survey = Survey::default();
    each_row(recordings, |_, row, columns| survey.row(row, columns))?;
    let failed = |why: String| RecordingError { file: first.file().to_owned(), why };
    if survey.requests.len() > MOST_REQUESTS {
        return Err(failed(format!("has {} requests, expected at most {MOST_REQUESTS}", survey.requests.len())));
    }
    let mut again = Again::new(survey, wanted);
    each_row(recordings, |recording, row, columns| {
        let policy = &recording.header().policy;
        again.row(row, columns, policy.targets.max_defer_ms, &policy.version.name);
    })?;
    again.end().ok_or_else(|| failed("has no decision".into()))
}

/// Where the columns stand in a row's matrix.
struct Columns(HashMap<Column, usize>);

impl Columns {
    fn of(&self, row: &Recorded<Dispatch>, column: Column, candidate: usize) -> Option<f32> {
        row.columns.get(self.0.get(&column)? * row.candidates + candidate).copied()
    }

    fn count(&self, row: &Recorded<Dispatch>, column: Column, candidate: usize) -> u32 {
        whole(self.of(row, column, candidate).unwrap_or(0.0))
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a conversion to integers saturates")]
fn whole(value: f32) -> u32 {
    value as u32
}

fn each_row(
    recordings: &[Recording],
    mut each: impl FnMut(&Recording, &Recorded<Dispatch>, &Columns),
) -> Result<(), RecordingError> {
    for recording in recordings {
        let mut rows = recording.rows::<Dispatch>()?;
        let columns = Columns(rows.columns().zip(0..).collect());
        let mut row = Recorded::<Dispatch>::default();
        while rows.next_into(&mut row)? {
            each(recording, &row, &columns);
        }
    }
    Ok(())
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
#[derive(Default)]
struct Survey {
    requests: HashMap<u32, Known>,
    /// Most running requests of a step that offered no waiting one a seat, and of any step.
    seats: u32,
    most_running: u32,
    block_tokens: u32,
}

impl Survey {
    fn row(&mut self, row: &Recorded<Dispatch>, columns: &Columns) {
        let Step { now_ms, running, waiting, .. } = row.facts;
        self.most_running = self.most_running.max(running);
        if waiting > 0 && row.candidates <= running as usize {
            self.seats = self.seats.max(running);
        }
        for i in 0..row.candidates {
            let number = columns.count(row, Column::Request, i);
            let thinks = columns.count(row, Column::ThinkTokens, i) > 0;
            let known = self.requests.entry(number).or_insert_with(|| Known {
                arrival_ms: now_ms - f64::from(columns.of(row, Column::WaitMs, i).unwrap_or(0.0)),
                prompt_tokens: columns.count(row, Column::PromptTokens, i),
                #[expect(clippy::cast_possible_truncation, reason = "a conversion to integers saturates")]
                priority: columns.of(row, Column::Priority, i).unwrap_or(0.0) as i32,
                thinks: false,
            });
            known.thinks |= thinks;
            let blocks = columns.count(row, Column::KvBlocks, i);
            if blocks > 0 {
                let computed = columns.count(row, Column::ComputedTokens, i);
                self.block_tokens = self.block_tokens.max(computed.div_ceil(blocks));
            }
        }
    }
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
    /// Number of the last decision.
    last: Option<u64>,
    missing: u64,
    policy: String,
}

impl Again {
    fn new(survey: Survey, wanted: &[u32]) -> Self {
        let markers = Markers::new(vec![vec![THINK_START]], vec![vec![THINK_END]], vec![]);
        let mut mirror = EngineMirror::new(markers.expect("two markers of one token are valid"));
        mirror.table.keep_transitions(true);
        let requests = survey.requests.len();
        let times = survey.requests.into_iter().filter(|(_, known)| known.arrival_ms.is_finite());
        let mut to_come: Vec<(u32, Known)> = times.collect();
        // The next one is the last.
        to_come.sort_by(|(one, a), (other, b)| b.arrival_ms.total_cmp(&a.arrival_ms).then(other.cmp(one)));
        let seats = if survey.seats > 0 { survey.seats.max(survey.most_running) } else { u32::MAX };
        Self {
            mirror,
            planner: Planner::default().with_block_tokens(survey.block_tokens.max(1)),
            timeline: None,
            to_come,
            rows: BTreeMap::new(),
            requests,
            seats,
            wanted: wanted.to_vec(),
            explained: Vec::new(),
            last: None,
            missing: 0,
            policy: String::new(),
        }
    }

    fn row(&mut self, row: &Recorded<Dispatch>, columns: &Columns, max_defer_ms: f32, policy: &str) {
        let now_ms = row.facts.now_ms;
        if let Some(last) = self.last.replace(row.seq) {
            self.missing += row.seq.saturating_sub(last + 1);
            self.step_is_over(row, columns);
        } else {
            self.timeline = Some(Timeline::new(policy, self.mirror.hold_time(now_ms)));
        }
        policy.clone_into(&mut self.policy);
        let now_ms = self.mirror.hold_time(now_ms);
        self.tokens(row, columns);
        self.requests_end(row, now_ms);
        self.arrivals(now_ms);
        self.plan(row, columns, max_defer_ms);
    }

    /// What the step before gave each request, as this row knows.
    fn step_is_over(&mut self, row: &Recorded<Dispatch>, columns: &Columns) {
        let begin_ms = self.mirror.now_ms();
        let mut given = Vec::new();
        for i in 0..row.candidates {
            let Some(row_id) = self.rows.get(&columns.count(row, Column::Request, i)).copied() else { continue };
            let Some(request) = self.mirror.table.get(row_id) else { continue };
            let was_running = request.state() == State::Running;
            let computed = columns.count(row, Column::ComputedTokens, i);
            let before = request.computed_tokens();
            let state = columns.count(row, Column::State, i);
            if state == State::Preempted as u32 && was_running {
                self.mirror.preempted(row_id);
            } else if state == State::Running as u32 {
                let tokens = columns.of(row, Column::ServedTokens, i).map_or(computed.saturating_sub(before), whole);
                if !was_running {
                    self.mirror.admitted(row_id, columns.count(row, Column::CachedTokens, i));
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
        for i in 0..row.candidates {
            if let Some(row_id) = self.rows.get(&columns.count(row, Column::Request, i)) {
                self.mirror.table.set_computed(*row_id, columns.count(row, Column::ComputedTokens, i));
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
    fn tokens(&mut self, row: &Recorded<Dispatch>, columns: &Columns) {
        let mut events = Vec::new();
        for i in 0..row.candidates {
            let Some(row_id) = self.rows.get(&columns.count(row, Column::Request, i)).copied() else { continue };
            let Some(request) = self.mirror.table.get(row_id) else { continue };
            let think = columns.count(row, Column::ThinkTokens, i).saturating_sub(request.think_tokens());
            let output = columns.count(row, Column::OutputTokens, i).saturating_sub(request.output_tokens());
            let [think, output] = [think, output].map(|tokens| tokens.min(MOST_TOKENS));
            let has_ended = columns.count(row, Column::Phase, i) == Phase::Output as u32;
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
            if let Ok(row_id) = self.mirror.table.insert_as(RequestId(number.into()), &new, number) {
                self.rows.insert(number, row_id);
            }
        }
    }

    fn plan(&mut self, row: &Recorded<Dispatch>, columns: &Columns, max_defer_ms: f32) {
        let rows: Vec<RowId> = (0..row.candidates)
            .filter_map(|i| self.rows.get(&columns.count(row, Column::Request, i)).copied())
            .collect();
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

    fn end(mut self) -> Option<Retraced> {
        let now_ms = self.mirror.now_ms();
        for row_id in self.rows.values().copied().collect::<Vec<_>>() {
            self.explain(row_id, "", now_ms);
        }
        let mut timeline = self.timeline?;
        timeline.end(now_ms);
        Some(Retraced { timeline, explained: self.explained, requests: self.requests, missing: self.missing })
    }
}
