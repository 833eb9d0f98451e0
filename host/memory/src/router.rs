use std::fmt;
use std::time::{Duration, Instant};

use meridian_core::{Markers, PhaseEvent, PhaseRecord, ThinkPhase};

use crate::sync::ConcurrentMap;
use crate::{Error, RequestId};

/// Follows the phase of every live request from its generated tokens. `Send + Sync`: any number of threads may feed it;
/// each call takes one shard's lock for a few nanoseconds.
///
/// The tokens of one request must come in order, from whichever thread. A caller that may report some tokens twice
/// gives their positions ([`PhaseRouter::process_token_at`]).
///
/// ```
/// use meridian_core::{Markers, PhaseEvent, ThinkPhase};
/// use meridian_memory::{PhaseRouter, RequestId, RoutedRequest};
///
/// // Token 7 starts thinking, 8 ends it; the template opens thinking in the prompt.
/// let router = PhaseRouter::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![])?);
/// let (a, b) = (RequestId(1), RequestId(2));
/// assert_eq!(router.register(a, &RoutedRequest { prompt: &[1, 7], ..Default::default() })?, Some(PhaseEvent::EnterThink));
/// router.register(b, &RoutedRequest { prompt: &[2, 7], max_think_tokens: 2, ..Default::default() })?;
///
/// let mut events = Vec::new();
/// router.process_batch(&[(a, 40), (b, 50), (b, 51), (a, 8), (a, 41)], &mut events);
/// assert_eq!(events, [(b, PhaseEvent::ForceBudget), (a, PhaseEvent::ExitThink)]);
/// assert_eq!(router.phase(a), Some(ThinkPhase::Output));
/// assert_eq!(router.progress(a).map(|p| (p.think_tokens, p.output_tokens)), Some((2, 1)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PhaseRouter {
    markers: Markers,
    requests: ConcurrentMap<RequestId, Tracked>,
    clock: Clock,
}

/// Milliseconds since any fixed moment.
type Clock = Box<dyn Fn() -> u64 + Send + Sync>;

/// The router's data for a new request.
#[derive(Clone, Copy, Debug)]
pub struct RoutedRequest<'a> {
    /// Token ids of the templated prompt, or of its last turn, which determines the opening phase.
    pub prompt: &'a [u32],
    /// Number of thinking tokens that triggers [`PhaseEvent::ForceBudget`]; `u32::MAX` for never.
    pub max_think_tokens: u32,
}

impl Default for RoutedRequest<'_> {
    fn default() -> Self {
        Self { prompt: &[], max_think_tokens: u32::MAX }
    }
}

/// The progress of a request. Counts are tokens of all its turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Its phase; prefill until the turn's first token.
    pub phase: ThinkPhase,
    /// Tokens generated while thinking, markers included.
    pub think_tokens: u32,
    /// Tokens generated after thinking.
    pub output_tokens: u32,
}

/// Padded to its own cache lines, two because processors fetch them in pairs: threads that feed different requests must
/// not slow each other down.
#[derive(Debug)]
#[repr(align(128))]
struct Tracked {
    record: PhaseRecord,
    /// Whether the turn has had its first token.
    generating: bool,
    /// Position of the next token among those generated for the request.
    next_position: u32,
    max_think_tokens: u32,
}

impl Tracked {
    fn new(markers: &Markers, request: &RoutedRequest<'_>, now_ms: u64) -> Self {
        Self {
            record: PhaseRecord::new(markers, request.prompt, request.max_think_tokens, now_ms),
            generating: false,
            next_position: 0,
            max_think_tokens: request.max_think_tokens,
        }
    }

    #[inline]
    fn token(&mut self, markers: &Markers, token: u32, now_ms: u64) -> Option<PhaseEvent> {
        self.generating = true;
        self.next_position = self.next_position.saturating_add(1);
        self.record.token(markers, token, now_ms).1
    }

    fn token_at(&mut self, markers: &Markers, position: u32, token: u32, now_ms: u64) -> Option<PhaseEvent> {
        if position < self.next_position {
            self.record.keep_alive(now_ms);
            return None;
        }
        self.next_position = position;
        self.token(markers, token, now_ms)
    }
}

impl PhaseRouter {
    /// A router for a model with these markers.
    #[must_use]
    pub fn new(markers: Markers) -> Self {
        let start = Instant::now();
        Self::with_clock(markers, move || u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// A router that reads its time, in milliseconds since any fixed moment, from `clock`.
    #[must_use]
    pub fn with_clock(markers: Markers, clock: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self { markers, requests: ConcurrentMap::new(), clock: Box::new(clock) }
    }

    /// Add a request; [`PhaseEvent::EnterThink`] when its prompt leaves it thinking.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] when the id is live.
    pub fn register(&self, id: RequestId, request: &RoutedRequest<'_>) -> Result<Option<PhaseEvent>, Error> {
        let tracked = Tracked::new(&self.markers, request, (self.clock)());
        let event = tracked.record.entered();
        if self.requests.insert_new(id, tracked) { Ok(event) } else { Err(Error::DuplicateRequest { id }) }
    }

    /// Begin a further turn of a live request with `prompt` (the end of the templated history): a tool's answer, the
    /// user's next message. The phase restarts, the counts continue, and the thinking limit applies to each turn.
    /// Returns the event of the change of phase.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn begin_turn(&self, id: RequestId, prompt: &[u32]) -> Result<Option<PhaseEvent>, Error> {
        let now_ms = (self.clock)();
        let turn = |tracked: &mut Tracked| {
            let Tracked { record, max_think_tokens, .. } = tracked;
            let was_thinking = record.phase() == ThinkPhase::Think;
            record.begin_turn(&self.markers, prompt, *max_think_tokens, now_ms);
            let thinks = record.phase() == ThinkPhase::Think;
            tracked.generating = false;
            match (was_thinking, thinks) {
                (false, true) => Some(PhaseEvent::EnterThink),
                (true, false) => Some(PhaseEvent::ExitThink),
                (true, true) | (false, false) => None,
            }
        };
        self.requests.update(&id, turn).ok_or(Error::UnknownRequest { id })
    }

    /// Take in one generated token, in O(1). A token of an unknown request is ignored.
    pub fn process_token(&self, id: RequestId, token: u32) -> Option<PhaseEvent> {
        let now_ms = (self.clock)();
        self.requests.update(&id, |tracked| tracked.token(&self.markers, token, now_ms)).flatten()
    }

    /// Take in the token at `position` among the request's generated tokens, from 0. A repeated token is ignored:
    /// an engine that replays a request after a preemption may report its tokens again.
    pub fn process_token_at(&self, id: RequestId, position: u32, token: u32) -> Option<PhaseEvent> {
        let now_ms = (self.clock)();
        self.requests.update(&id, |tracked| tracked.token_at(&self.markers, position, token, now_ms)).flatten()
    }

    /// Take in the tokens of a whole step, several per request if the engine speculates. Appends to `events`, in the
    /// order of the tokens; returns how many tokens belonged to no live request.
    pub fn process_batch(&self, tokens: &[(RequestId, u32)], events: &mut Vec<(RequestId, PhaseEvent)>) -> usize {
        let now_ms = (self.clock)();
        let mut found = Vec::new();
        let unknown = self.requests.update_all(
            tokens,
            |(id, _)| id,
            |position, tracked| {
                if let Some(event) = tracked.token(&self.markers, tokens[position].1, now_ms) {
                    found.push((position, event));
                }
            },
        );
        append(found, |position| tokens[position].0, events);
        unknown
    }

    /// Take in a batch of tokens with their positions, as in [`PhaseRouter::process_token_at`]: (request, position,
    /// token). Returns the number of tokens of unknown requests.
    pub fn process_batch_at(
        &self,
        tokens: &[(RequestId, u32, u32)],
        events: &mut Vec<(RequestId, PhaseEvent)>,
    ) -> usize {
        let now_ms = (self.clock)();
        let mut found = Vec::new();
        let unknown = self.requests.update_all(
            tokens,
            |(id, ..)| id,
            |at, tracked| {
                let (_, position, token) = tokens[at];
                if let Some(event) = tracked.token_at(&self.markers, position, token, now_ms) {
                    found.push((at, event));
                }
            },
        );
        append(found, |at| tokens[at].0, events);
        unknown
    }

    /// Note that the request is alive without a token: it waits, or computes a long prompt. False when it is not live.
    pub fn keep_alive(&self, id: RequestId) -> bool {
        let now_ms = (self.clock)();
        self.requests.update(&id, |tracked| tracked.record.keep_alive(now_ms)).is_some()
    }

    /// Phase of a live request; prefill until its first token.
    #[must_use]
    pub fn phase(&self, id: RequestId) -> Option<ThinkPhase> {
        self.progress(id).map(|progress| progress.phase)
    }

    /// The progress of a live request.
    #[must_use]
    pub fn progress(&self, id: RequestId) -> Option<Progress> {
        self.requests.read(&id, |tracked| Progress {
            phase: if tracked.generating { tracked.record.phase() } else { ThinkPhase::Prefill },
            think_tokens: tracked.record.think_tokens(),
            output_tokens: tracked.record.output_tokens(),
        })
    }

    /// Remove an ended request; false when it was not live. Its id may be registered again.
    pub fn remove(&self, id: RequestId) -> bool {
        self.requests.remove(&id)
    }

    /// Remove the requests without any news ([`PhaseRouter::keep_alive`] included) for longer than `age`: their caller
    /// died. Returns how many.
    pub fn reap_stale_older_than(&self, age: Duration) -> usize {
        let now_ms = (self.clock)();
        self.requests.retain(|tracked| !tracked.record.is_stale(now_ms, age))
    }

    /// Number of live requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether no request is live.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Events in the order of their tokens.
fn append(
    mut found: Vec<(usize, PhaseEvent)>,
    id: impl Fn(usize) -> RequestId,
    events: &mut Vec<(RequestId, PhaseEvent)>,
) {
    found.sort_unstable_by_key(|(at, _)| *at);
    events.extend(found.into_iter().map(|(at, event)| (id(at), event)));
}

impl fmt::Debug for PhaseRouter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { markers, requests: _, clock: _ } = self;
        f.debug_struct("PhaseRouter").field("markers", markers).field("requests", &self.len()).finish_non_exhaustive()
    }
}
