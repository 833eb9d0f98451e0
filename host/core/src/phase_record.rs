//! What the tokens of one request have said.

use std::time::Duration;

use crate::types::{PhaseEvent, ThinkPhase};
use crate::{Markers, PhaseTracker, Standing};

/// The state of one request after its tokens: its phase, its counts and the time of its latest news. Each row of the
/// [`RequestTable`](crate::RequestTable) has one; an engine without rows keeps them itself. Times are milliseconds since
/// any fixed moment.
///
/// ```
/// use meridian_core::{Markers, PhaseEvent, PhaseRecord, ThinkPhase};
///
/// // Token 7 starts thinking, 8 ends it.
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let mut record = PhaseRecord::new(&markers, &[1, 7], u32::MAX, 0);
/// assert_eq!(record.entered(), Some(PhaseEvent::EnterThink));
/// assert_eq!(record.token(&markers, 8, 1), (ThinkPhase::Think, Some(PhaseEvent::ExitThink)));
/// assert_eq!((record.phase(), record.think_tokens()), (ThinkPhase::Output, 1));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PhaseRecord {
    tracker: PhaseTracker,
    think_tokens: u32,
    output_tokens: u32,
    /// Number of thinking tokens that triggers [`PhaseEvent::ForceBudget`]; `u32::MAX` after it was reported.
    force_at: u32,
    last_seen_ms: u64,
}

impl PhaseRecord {
    /// The record of a request with this prompt, or the end of it that determines the opening phase. `max_think_tokens` is
    /// the number of thinking tokens that triggers [`PhaseEvent::ForceBudget`]; `u32::MAX` for never.
    #[must_use]
    pub fn new(markers: &Markers, prompt: &[u32], max_think_tokens: u32, now_ms: u64) -> Self {
        Self {
            tracker: PhaseTracker::new(markers, prompt),
            think_tokens: 0,
            output_tokens: 0,
            force_at: max_think_tokens,
            last_seen_ms: now_ms,
        }
    }

    /// Begin a further turn with `prompt`: the phase restarts, the counts continue, and the limit of thinking applies to
    /// each turn.
    pub fn begin_turn(&mut self, markers: &Markers, prompt: &[u32], max_think_tokens: u32, now_ms: u64) {
        self.tracker = PhaseTracker::new(markers, prompt);
        self.force_at = self.think_tokens.saturating_add(max_think_tokens);
        self.keep_alive(now_ms);
    }

    /// Phase of the next token.
    #[inline]
    #[must_use]
    pub fn phase(&self) -> ThinkPhase {
        self.tracker.phase()
    }

    /// Tokens generated while thinking, markers included.
    #[inline]
    #[must_use]
    pub fn think_tokens(&self) -> u32 {
        self.think_tokens
    }

    /// Tokens generated after thinking.
    #[inline]
    #[must_use]
    pub fn output_tokens(&self) -> u32 {
        self.output_tokens
    }

    /// Whether it has begun to think.
    #[inline]
    pub(crate) fn is_thinking(&self) -> bool {
        self.tracker.is_open()
    }

    /// Where its next token stands.
    #[inline]
    pub(crate) fn standing(&self, markers: &Markers) -> Standing {
        self.tracker.standing(markers)
    }

    /// The event of the prompt, before the first token.
    #[must_use]
    pub fn entered(&self) -> Option<PhaseEvent> {
        (self.phase() == ThinkPhase::Think).then_some(PhaseEvent::EnterThink)
    }

    /// Take in one token; returns its phase, and its event.
    #[inline]
    pub fn token(&mut self, markers: &Markers, token: u32, now_ms: u64) -> (ThinkPhase, Option<PhaseEvent>) {
        self.last_seen_ms = now_ms;
        let (phase, event) = self.tracker.token_phase(markers, token);
        if phase == ThinkPhase::Output {
            self.output_tokens = self.output_tokens.saturating_add(1);
            return (phase, event);
        }
        self.think_tokens = self.think_tokens.saturating_add(1);
        if event.is_none() && self.think_tokens >= self.force_at {
            self.force_at = u32::MAX;
            return (phase, Some(PhaseEvent::ForceBudget));
        }
        (phase, event)
    }

    /// Note that the request is alive, without a token.
    pub fn keep_alive(&mut self, now_ms: u64) {
        self.last_seen_ms = now_ms;
    }

    /// Whether there was no news of it for longer than `age`.
    #[must_use]
    pub fn is_stale(&self, now_ms: u64, age: Duration) -> bool {
        let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
        now_ms.saturating_sub(self.last_seen_ms) > age_ms
    }
}
