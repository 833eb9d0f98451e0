//! The requests of dispatch recordings, row by row: the reader below everything that rebuilds the traffic of an engine.
//!
//! A row has what the policy saw when a step began. What the step gave each request stands in the next row.

use meridian_core::{Column, Dispatch, State, ThinkPhase};

use super::kinds::Recordable;
use super::read::{Recording, RecordingError};
use super::row::Recorded;

/// Largest count that a column has exactly.
const MOST_COUNT: f32 = (1_u32 << 24) as f32;

/// A request as a row shows it, before the row's step. A fact whose column the recording lacks is 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowRequest {
    /// The request's number.
    pub number: u32,
    /// Whether it waits, runs or was preempted.
    pub state: State,
    /// Its phase.
    pub phase: ThinkPhase,
    /// Milliseconds since its arrival, finite and at least 0.
    pub wait_ms: f32,
    /// Milliseconds until its deadline; infinite without one.
    pub slack_ms: f32,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens that were found in the prefix cache when it was admitted.
    pub cached_tokens: u32,
    /// Tokens whose KV is computed.
    pub computed_tokens: u32,
    /// Tokens that the step before gave it; `None` where the recording does not say.
    pub served_tokens: Option<u32>,
    /// Tokens of thinking so far.
    pub think_tokens: u32,
    /// Tokens of the answer so far.
    pub output_tokens: u32,
    /// Tokens that it may still generate.
    pub remaining_tokens: u32,
    /// KV blocks that it holds.
    pub kv_blocks: u32,
    /// Its priority; lower is more urgent.
    pub priority: i32,
    /// Number of its tenant.
    pub tenant: u32,
    /// Number of its session, 0 for none.
    pub session: u32,
    /// Position in its session, from 1.
    pub turn: u32,
}

/// What the rows of recordings show of their engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowEngine {
    /// Rows read.
    pub rows: u64,
    /// Decisions that the recordings lack between the first and the last.
    pub missing: u64,
    /// Most running requests of a step.
    pub most_running: u32,
    /// Most running requests of a step that offered no waiting one a seat: the engine's limit. 0 if there was no such step.
    pub seats: u32,
    /// Most tokens that a step could have.
    pub token_budget: u32,
    /// KV blocks of the engine.
    pub total_blocks: u32,
    /// Most tokens in a KV block, as far as requests show it.
    pub block_tokens: u32,
    /// A step offered a request more than one token to decode.
    pub speculates: bool,
}

/// Read dispatch recordings, all of one process and in the order of writing. `each` takes every row with its requests;
/// `needed` are the columns that each recording must have.
///
/// # Errors
/// The file, and what it lacks, or what `each` finds.
///
/// ```
/// use meridian_engine::recording::each_row;
///
/// assert!(each_row(&[], &[], |_, _, _| Ok(())).is_err());
/// ```
pub fn each_row(
    recordings: &[Recording],
    needed: &[Column],
    mut each: impl FnMut(&Recording, &Recorded<Dispatch>, &[RowRequest]) -> Result<(), String>,
) -> Result<RowEngine, RecordingError> {
    let Some(first) = recordings.first() else {
        return Err(RecordingError { file: String::new(), why: "no recording is given".into() });
    };
    let (mut engine, mut last) = (RowEngine::default(), None::<u64>);
    let (mut row, mut requests) = (Recorded::<Dispatch>::default(), Vec::new());
    for recording in recordings {
        let failed = |why: String| RecordingError { file: recording.file().to_owned(), why };
        if recording.header().run != first.header().run {
            return Err(failed(format!("is of another process than {}, expected one process", first.file())));
        }
        let mut rows = recording.rows::<Dispatch>()?;
        let places = Places::new(rows.columns());
        if let Some(lacks) = needed.iter().find(|column| places.0[**column as usize].is_none()) {
            let name = Dispatch::COLUMN_NAMES[*lacks as usize];
            return Err(failed(format!("has no column {name}, expected one that this version recorded")));
        }
        while rows.next_into(&mut row)? {
            requests.clear();
            requests.extend((0..row.candidates).map(|candidate| places.request(&row, candidate)));
            if let Some(last) = last.replace(row.seq) {
                engine.missing += row.seq.saturating_sub(last.saturating_add(1));
            }
            engine.row(&row, &requests);
            each(recording, &row, &requests).map_err(failed)?;
        }
    }
    Ok(engine)
}

impl RowEngine {
    fn row(&mut self, row: &Recorded<Dispatch>, requests: &[RowRequest]) {
        let facts = &row.facts;
        self.rows += 1;
        self.most_running = self.most_running.max(facts.running);
        if facts.waiting > 0 && requests.len() <= facts.running as usize {
            self.seats = self.seats.max(facts.running);
        }
        self.token_budget = self.token_budget.max(facts.token_budget);
        self.total_blocks = self.total_blocks.max(facts.total_blocks);
        self.speculates |= facts.decode_tokens > 1;
        for request in requests.iter().filter(|request| request.kv_blocks > 0) {
            self.block_tokens = self.block_tokens.max(request.computed_tokens.div_ceil(request.kv_blocks));
        }
    }
}

/// Where each column stands in a row's matrix, in the order of [`Recordable::COLUMNS`].
struct Places(Vec<Option<usize>>);

impl Places {
    fn new(columns: impl Iterator<Item = Column>) -> Self {
        let mut places = vec![None; Dispatch::COLUMNS.len()];
        for (place, column) in columns.enumerate() {
            places[column as usize] = Some(place);
        }
        Self(places)
    }

    fn request(&self, row: &Recorded<Dispatch>, candidate: usize) -> RowRequest {
        let of = |column: Column| row.columns.get(self.0[column as usize]? * row.candidates + candidate).copied();
        let finite = |column| of(column).filter(|value| value.is_finite()).unwrap_or(0.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is in range, NaN becomes 0")]
        let whole = |value: f32| value.clamp(0.0, MOST_COUNT) as u32;
        let count = |column| whole(of(column).unwrap_or(0.0));
        let is = |column, value: u32| count(column) == value;
        RowRequest {
            number: count(Column::Request),
            state: [State::Running, State::Preempted]
                .into_iter()
                .find(|state| is(Column::State, *state as u32))
                .unwrap_or(State::Waiting),
            phase: [ThinkPhase::Think, ThinkPhase::Output]
                .into_iter()
                .find(|phase| is(Column::Phase, *phase as u32))
                .unwrap_or(ThinkPhase::Prefill),
            wait_ms: finite(Column::WaitMs).max(0.0),
            slack_ms: of(Column::SlackMs).filter(|slack| !slack.is_nan()).unwrap_or(f32::INFINITY),
            prompt_tokens: count(Column::PromptTokens),
            cached_tokens: count(Column::CachedTokens),
            computed_tokens: count(Column::ComputedTokens),
            served_tokens: of(Column::ServedTokens).map(whole),
            think_tokens: count(Column::ThinkTokens),
            output_tokens: count(Column::OutputTokens),
            remaining_tokens: count(Column::RemainingTokens),
            kv_blocks: count(Column::KvBlocks),
            #[expect(clippy::cast_possible_truncation, reason = "a conversion to integers saturates")]
            priority: finite(Column::Priority) as i32,
            tenant: count(Column::Tenant),
            session: count(Column::Session),
            turn: count(Column::Turn),
        }
    }
}
