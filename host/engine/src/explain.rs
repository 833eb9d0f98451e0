//! Why a request took as long as it did.

use meridian_core::{Admission, Overtaking, Part, RequestState, RequestTable, State};
use serde::{Deserialize, Serialize};

/// Requests that went before another, in an explanation at most.
pub const MOST_BEFORE: usize = 32;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// The time of one part.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartTime {
    /// The part.
    pub part: Part,
    /// Milliseconds.
    pub ms: f64,
}

/// Where the time of a request went. Times are milliseconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// The engine's id; `#` and its number in a recording.
    pub request: String,
    /// Its number, by which other requests are named too.
    pub number: u32,
    /// `waiting`, `running`, `preempted`, or the engine's reason for its end.
    pub state: String,
    /// Whether it is over.
    pub ended: bool,
    /// Name and version of the dispatch policy now, or at its end.
    pub policy: String,
    /// Arrival on the host's clock.
    pub arrival_ms: f64,
    /// Time since its arrival, until its end or now: the sum of the parts.
    pub latency_ms: f64,
    /// Arrival to first token.
    pub ttft_ms: Option<f64>,
    /// Arrival to first output token.
    pub ttfo_ms: Option<f64>,
    /// Tokens of its prompt, and those of them that the prefix cache had.
    pub prompt_tokens: u32,
    /// See `prompt_tokens`.
    pub cached_tokens: u32,
    /// Tokens of thinking.
    pub think_tokens: u32,
    /// How its thinking ended: `natural`, or the reason for which Meridian ended it; `None` without an end, and where
    /// Meridian does not follow it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub think_end: Option<String>,
    /// Times that it began to think again.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub reopened: u32,
    /// Tokens of output.
    pub output_tokens: u32,
    /// Number of preemptions.
    pub preemptions: u32,
    /// The parts of its latency, without those that are 0, in the order of a request's life.
    pub parts: Vec<PartTime>,
    /// The cause of its wait, if it waits now.
    pub waits_for: Option<Part>,
    /// Steps in which the starvation bound gave it tokens.
    pub rescues: u32,
    /// Steps in which later arrivals were admitted before it.
    pub overtaken: u32,
    /// Of these, the steps in which the service level of the others could still be kept, and its own could not.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub passed_over: u32,
    /// The first of them.
    pub overtakings: Vec<Overtaking>,
    /// Name of its service level, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level: Option<String>,
    /// Time left to keep that level, negative where it cannot be kept; `None` where late requests keep their place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub level_slack_ms: Option<f32>,
    /// Requests that were admitted between its arrival and its own admission; the latest of them are listed.
    pub before_count: u32,
    /// See `before_count`.
    pub before: Vec<Admission>,
    /// The engine's ids of numbers that appear here, as far as they are known.
    pub names: Vec<(u32, String)>,
}

impl Explanation {
    /// The explanation of a live request; the requests before it are missing, see [`Explanation::with_admissions`].
    #[must_use]
    pub fn of(table: &RequestTable, row: &RequestState, id: &str, now_ms: f64) -> Self {
        let parts = table.parts(row);
        let since = |ms: Option<f64>| ms.map(|ms| ms - row.arrival_ms());
        let state = match row.state() {
            State::Waiting => "waiting",
            State::Running => "running",
            State::Preempted => "preempted",
        };
        let account = row.account();
        let (end, reopened, _) = row.think_course();
        Self {
            request: id.to_owned(),
            number: row.number(),
            state: state.into(),
            arrival_ms: row.arrival_ms(),
            latency_ms: (now_ms - row.arrival_ms()).max(0.0),
            ttft_ms: since(row.first_token_ms()),
            ttfo_ms: since(row.first_output_ms()),
            prompt_tokens: row.prompt_tokens(),
            cached_tokens: row.cached_tokens(),
            think_tokens: row.think_tokens(),
            think_end: end.map(|end| end.label().to_owned()),
            reopened,
            output_tokens: row.output_tokens(),
            preemptions: row.preemptions(),
            parts: Part::ALL
                .into_iter()
                .zip(parts)
                .filter(|(_, ms)| *ms != 0.0)
                .map(|(part, ms)| PartTime { part, ms })
                .collect(),
            waits_for: (row.state() != State::Running).then(|| table.cause_of_waiting()),
            rescues: account.rescues(),
            overtaken: account.overtaken(),
            passed_over: account.passed_over(),
            level: table.level_name(row).map(str::to_owned),
            level_slack_ms: Some(table.level_slack_ms(row, now_ms)).filter(|slack_ms| slack_ms.is_finite()),
            overtakings: account.overtakings().to_vec(),
            ..Self::default()
        }
    }

    /// Add the requests that were admitted before it; `admissions` come oldest first.
    #[must_use]
    pub fn with_admissions<'a>(mut self, admissions: impl Iterator<Item = &'a Admission>) -> Self {
        let mut before = Vec::new();
        for admission in admissions.filter(|admission| admission.at_ms >= self.arrival_ms) {
            if admission.number == self.number && !admission.resumed {
                break;
            }
            if admission.number != self.number {
                before.push(*admission);
            }
        }
        self.before_count = u32::try_from(before.len()).unwrap_or(u32::MAX);
        before.drain(..before.len().saturating_sub(MOST_BEFORE));
        self.before = before;
        self
    }

    /// Add the ids of the requests whose numbers appear in it.
    #[must_use]
    pub fn with_names(mut self, name: impl Fn(u32) -> Option<String>) -> Self {
        let numbers = self.before.iter().map(|admission| admission.number);
        let mut numbers: Vec<u32> = numbers.chain(self.overtakings.iter().map(|overtaking| overtaking.by)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        self.names = numbers.into_iter().filter_map(|number| Some((number, name(number)?))).collect();
        self
    }

    /// The time of a part, milliseconds.
    #[must_use]
    pub fn part_ms(&self, part: Part) -> f64 {
        self.parts.iter().filter(|of| of.part == part).map(|of| of.ms).sum()
    }
}
