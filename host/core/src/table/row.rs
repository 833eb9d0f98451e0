//! One request in the mirror: the facts at its arrival, and its row.

use meridian_policy_sdk::{Phase, State};

use crate::account::{Account, Part};
use crate::budget::{ThinkEnd, ThinkRecord};
use crate::forecast::Course;
use crate::sessions::Turn;
use crate::types::PhaseEvent;
use crate::{PhaseRecord, RowId};

/// The facts about a request at its arrival.
#[derive(Clone, Copy, Debug)]
pub struct NewRequest<'a> {
    /// Token ids of the templated prompt, or of its last turn, which determines the opening phase.
    pub prompt: &'a [u32],
    /// Length of the whole prompt; 0 when `prompt` is complete.
    pub prompt_tokens: u32,
    /// Tokens of the prompt whose KV is already computed.
    pub cached_tokens: u32,
    /// Most tokens the request may generate.
    pub max_tokens: u32,
    /// Number of thinking tokens that triggers [`PhaseEvent::ForceBudget`].
    pub max_think_tokens: u32,
    /// Arrival on the host's clock, milliseconds.
    pub arrival_ms: f64,
    /// Deadline on the host's clock, milliseconds; infinite for none.
    pub deadline_ms: f64,
    /// Lower is more urgent.
    pub priority: i32,
    /// Name of the tenant; empty for none. A name of more than 128 characters counts as none.
    pub tenant: &'a str,
    /// Name of the session, which the client gives to all turns of a conversation; the same limits.
    pub session: &'a str,
    /// The engine must compute its prompt in one step: it must not be split into chunks.
    pub whole_prompt: bool,
    /// Name of the model or LoRA adapter, for the service level.
    pub model: &'a str,
    /// The service level that the client asks for; empty for none.
    pub service_level: &'a str,
}

impl Default for NewRequest<'_> {
    fn default() -> Self {
        Self {
            prompt: &[],
            prompt_tokens: 0,
            cached_tokens: 0,
            max_tokens: u32::MAX,
            max_think_tokens: u32::MAX,
            arrival_ms: 0.0,
            deadline_ms: f64::INFINITY,
            priority: 0,
            tenant: "",
            session: "",
            whole_prompt: false,
            model: "",
            service_level: "",
        }
    }
}

/// The mirror of one request. Times are milliseconds on the host's clock, counts are tokens.
///
/// ```
/// use meridian_core::{NewRequest, RequestTable};
///
/// let mut table = RequestTable::default();
/// let row = table.insert(&NewRequest { prompt_tokens: 100, ..NewRequest::default() })?;
/// table.scheduled(row, 64, 0.0);
/// assert_eq!((table[row].computed_tokens(), table[row].needed_tokens(1)), (64, 36));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RequestState {
    pub(super) row_id: RowId,
    pub(crate) number: u32,
    pub(crate) session: Turn,
    /// Its place in a session that the host found, where its client names none.
    pub(super) found: Turn,
    /// Its session knows that it has ended.
    pub(super) has_left: bool,
    pub(crate) state: State,
    pub(super) prefilled: bool,
    pub(crate) phases: PhaseRecord,
    pub(crate) arrival_ms: f64,
    pub(crate) deadline_ms: f64,
    pub(crate) last_progress_ms: f64,
    /// The last step that gave it tokens, and how many.
    pub(super) served: (u64, u32),
    /// Time since which a policy has deferred this waiting request; `None` when it has not.
    pub(crate) deferred_since_ms: Option<f64>,
    /// Number of admissions after which no request may overtake this one.
    pub(super) turn: u64,
    pub(crate) prompt_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) computed_tokens: u32,
    pub(crate) max_tokens: u32,
    /// As it was before the last step in which it waited.
    pub(super) resident_tokens: u32,
    pub(crate) preemptions: u32,
    pub(crate) priority: i32,
    pub(crate) tenant: u32,
    /// Number of its service level; 0 for none.
    pub(crate) level: u8,
    /// The host has ended it because that level cannot be kept.
    pub(crate) is_refused: bool,
    /// Where it stands in what it generates.
    pub(super) course: Course,
    pub(super) whole_prompt: bool,
    /// Tokens before the first token of thinking; `u32::MAX` before thinking.
    pub(super) think_from: u32,
    /// Tokens that were computed at its preemption, until its next admission.
    pub(super) lost_tokens: u32,
    pub(super) milestones: Milestones,
    /// Time of its latest token; NaN before.
    pub(super) last_token_ms: f64,
    /// The part that its running time belongs to; a copy of its account's.
    pub(super) computes: Part,
    /// The series of its latencies.
    pub(crate) series: u16,
    /// The parts of its latency.
    pub(super) account: Box<Account>,
    /// The record of its thinking, where Meridian can end it.
    pub(crate) thinking: Option<Box<ThinkRecord>>,
}

/// Measurements of a request's thinking, in the units of the columns; NaN without a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Signals {
    /// EAT: moving average of the entropy after a forced end of thinking, bits.
    pub eat_bits: f32,
    /// Moving variance of the same, bits squared.
    pub eat_variance_bits2: f32,
    /// Reasoning path deviation index.
    pub rpdi: f32,
}

impl Default for Signals {
    fn default() -> Self {
        Self { eat_bits: f32::NAN, eat_variance_bits2: f32::NAN, rpdi: f32::NAN }
    }
}

/// Times of a request's milestones, milliseconds after its arrival; NaN before. Half the size of times on the clock, in
/// a row that every step reads, and exact to a millisecond for four hours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Milestones {
    pub(super) first_token_ms: f32,
    pub(super) end_of_thinking_ms: f32,
    pub(super) first_output_ms: f32,
    /// Time since which it holds KV blocks.
    pub(super) admitted_ms: f32,
}

impl Milestones {
    pub(super) const NONE: Self = Self {
        first_token_ms: f32::NAN,
        end_of_thinking_ms: f32::NAN,
        first_output_ms: f32::NAN,
        admitted_ms: f32::NAN,
    };
}

impl RequestState {
    /// Its row.
    #[must_use]
    pub fn row_id(&self) -> RowId {
        self.row_id
    }

    /// The effect of the prompt on its thinking: [`PhaseEvent::EnterThink`] when it leaves the request thinking. Call
    /// it before the first token.
    #[must_use]
    pub fn entered(&self) -> Option<PhaseEvent> {
        self.phases.entered()
    }

    /// Phase of the request. A preemption does not change it.
    #[inline]
    #[must_use]
    pub fn phase(&self) -> Phase {
        if self.prefilled { self.phases.phase() } else { Phase::Prefill }
    }

    /// The state of the request.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Tokens generated while thinking.
    #[must_use]
    pub fn think_tokens(&self) -> u32 {
        self.phases.think_tokens()
    }

    /// Tokens generated after thinking.
    #[must_use]
    pub fn output_tokens(&self) -> u32 {
        self.phases.output_tokens()
    }

    /// Tokens whose KV is computed.
    #[must_use]
    pub fn computed_tokens(&self) -> u32 {
        self.computed_tokens
    }

    /// Number of preemptions of the request.
    #[must_use]
    pub fn preemptions(&self) -> u32 {
        self.preemptions
    }

    /// Tokens of its prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// Its number in the columns of policies, from 1.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Tokens of its prompt whose KV was found in the prefix cache.
    #[must_use]
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    /// Position of its first token of thinking, from the start of the prompt; `None` before it has thought. If the
    /// template strips reasoning, the next prompt differs from this request from there on.
    #[must_use]
    pub fn think_from(&self) -> Option<u32> {
        (self.think_from != u32::MAX).then_some(self.think_from)
    }

    /// Time since which it holds KV blocks; `None` before its admission.
    #[must_use]
    pub fn admitted_ms(&self) -> Option<f64> {
        self.since_arrival(self.milestones.admitted_ms)
    }

    /// How its thinking ended, how often it began again, and the number of tokens at which a forced end waited for a mask
    /// of the client or for a tool call; no end where Meridian does not follow it.
    #[must_use]
    pub fn think_course(&self) -> (Option<ThinkEnd>, u32, u32) {
        let is_open = self.phases.is_thinking();
        self.thinking.as_ref().map_or((None, 0, 0), |thinking| thinking.course(is_open))
    }

    /// The measurements of its thinking so far.
    #[must_use]
    pub fn signals(&self) -> Signals {
        self.thinking.as_ref().map_or_else(Signals::default, |thinking| thinking.signals())
    }

    /// Where its time went, until it last did something else; [`RequestTable::parts`](crate::RequestTable::parts) has the time
    /// since then too.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Its priority; lower is more urgent.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Number of its tenant; 0 for none.
    #[must_use]
    pub fn tenant(&self) -> u32 {
        self.tenant
    }

    /// Number of its session; 0 for none.
    #[must_use]
    pub fn session(&self) -> u32 {
        self.session.session
    }

    /// Time of its arrival.
    #[must_use]
    pub fn arrival_ms(&self) -> f64 {
        self.arrival_ms
    }

    /// Time of its first token of any kind; TTFT is the difference from its arrival. As exact as the calls of
    /// [`RequestTable::set_clock`](crate::RequestTable::set_clock).
    #[must_use]
    pub fn first_token_ms(&self) -> Option<f64> {
        self.since_arrival(self.milestones.first_token_ms)
    }

    /// End of its thinking; also `None` when it has not thought.
    #[must_use]
    pub fn end_of_thinking_ms(&self) -> Option<f64> {
        self.since_arrival(self.milestones.end_of_thinking_ms)
    }

    /// Time of its first token of output; TTFO is the difference from its arrival.
    #[must_use]
    pub fn first_output_ms(&self) -> Option<f64> {
        self.since_arrival(self.milestones.first_output_ms)
    }

    /// Time of its latest token; NaN before.
    pub(crate) fn last_token_ms(&self) -> f64 {
        self.last_token_ms
    }

    /// Milliseconds since its first token of output, at least 0; NaN before it.
    pub(crate) fn output_ms(&self, now_ms: f64) -> f32 {
        let ms = now_ms - self.arrival_ms - f64::from(self.milestones.first_output_ms);
        // Not `max`, which would turn NaN into 0.
        if ms < 0.0 { 0.0 } else { ms as f32 }
    }

    pub(super) fn since_arrival(&self, ms: f32) -> Option<f64> {
        (!ms.is_nan()).then(|| self.arrival_ms + f64::from(ms))
    }

    /// Note tokens at `clock_ms`; the first token of output has no earlier time.
    pub(super) fn note(&mut self, clock_ms: f64) {
        let since_arrival = (clock_ms - self.arrival_ms) as f32;
        let reached = |milestone: &mut f32| {
            if milestone.is_nan() {
                *milestone = since_arrival;
            }
        };
        reached(&mut self.milestones.first_token_ms);
        if self.think_tokens() > 0 && self.phases.phase() == Phase::Output {
            reached(&mut self.milestones.end_of_thinking_ms);
        }
        if self.output_tokens() > 0 {
            reached(&mut self.milestones.first_output_ms);
        }
    }

    /// Tokens that it had computed at its preemption, until its next admission.
    pub(crate) fn lost_tokens(&self) -> u32 {
        self.lost_tokens
    }

    /// Numbers of prompt, thinking and output tokens among its tokens from `from` to `to`, from the start of the
    /// prompt.
    pub(crate) fn by_phase(&self, from: u32, to: u32) -> [u32; 3] {
        let within = |start: u32, end: u32| end.min(to).saturating_sub(start.max(from));
        let think_from = self.think_from.max(self.prompt_tokens);
        let think_to = think_from.saturating_add(self.think_tokens());
        let think = within(think_from, think_to);
        let prompt = within(0, self.prompt_tokens);
        [prompt, think, to.saturating_sub(from) - prompt - think]
    }

    /// Tokens that the request would take in a step with enough room, at least 1.
    #[inline]
    #[must_use]
    pub fn needed_tokens(&self, decode_tokens: u32) -> u32 {
        self.known_tokens().saturating_sub(self.computed_tokens).max(decode_tokens.max(1))
    }

    /// Whether it needs a prefill that must not be split.
    #[inline]
    pub(crate) fn needs_whole_prefill(&self, decode_tokens: u32) -> bool {
        self.whole_prompt && self.needed_tokens(0) > decode_tokens.max(1)
    }

    /// Tokens of its prompt that its session has left in the prefix cache, while it waits for its first admission.
    #[inline]
    pub(crate) fn resident_tokens(&self) -> u32 {
        if self.state == State::Waiting { self.resident_tokens } else { 0 }
    }

    /// Its place in the session that its client names, or else in the one that the host found.
    pub(super) fn own_turn(&self) -> Turn {
        if self.session.session == 0 { self.found } else { self.session }
    }

    /// Its tokens so far: prompt, thinking and output.
    #[inline]
    pub(crate) fn known_tokens(&self) -> u32 {
        self.prompt_tokens.saturating_add(self.think_tokens()).saturating_add(self.output_tokens())
    }
}
