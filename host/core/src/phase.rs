use meridian_policy_sdk::Phase;

use crate::{Error, Pattern, PhaseEvent};

/// Longest marker, in tokens. The longest known (Hunyuan-A13B) has seven.
const MAX_MARKER_TOKENS: usize = 64;
/// Most alternatives of one marker. The most known (Granite) is two.
const MAX_ALTERNATIVES: usize = 8;
/// Most whitespace tokens skipped at the end of a prompt, or before a marker that the model generates.
const MAX_PADDING_TOKENS: usize = 8;

/// How a model marks its thinking and its tool calls: token sequences, resolved from text with the model's own
/// tokenizer.
///
/// ```
/// use meridian_core::{Markers, PhaseEvent, PhaseTracker, ThinkPhase};
///
/// // Granite says "Here is my thought process:" or "Here's my thought process:"; token 3 is a line break.
/// let markers = Markers::new(vec![vec![10, 11, 12], vec![10, 13]], vec![vec![14, 15]], vec![3]).unwrap();
/// let mut tracker = PhaseTracker::new(&markers, &[1, 2]);
/// for token in [3, 10, 13, 40, 14] {
///     assert_eq!(tracker.token(&markers, token), None);
/// }
/// assert_eq!(tracker.token(&markers, 15), Some(PhaseEvent::ExitThink));
/// assert_eq!(tracker.phase(), ThinkPhase::Output);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Markers {
    starts: Vec<Pattern>,
    ends: Vec<Pattern>,
    padding: Vec<u32>,
    resumes: bool,
    /// Tokens of which the last one in a prompt begins its last turn, sorted.
    boundaries: Vec<u32>,
    calls: Vec<Call>,
    calls_end_thinking: bool,
}

/// A tool call: its beginning, and its end, if that has a marker.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Call {
    begin: Pattern,
    end: Option<Pattern>,
}

impl Default for Markers {
    /// No markers: the model does not think.
    fn default() -> Self {
        Self {
            starts: Vec::new(),
            ends: Vec::new(),
            padding: Vec::new(),
            resumes: true,
            boundaries: Vec::new(),
            calls: Vec::new(),
            calls_end_thinking: false,
        }
    }
}

impl Markers {
    /// Markers that start thinking (any of `starts`) and end it (any of `ends`), and the whitespace tokens that may
    /// surround them. Without markers, the model is single-phase: everything that it generates is output.
    ///
    /// # Errors
    /// [`Error::Markers`] when only one of the two is given, a sequence is empty or longer than 64 tokens, or there are
    /// more than 8 alternatives.
    pub fn new(starts: Vec<Vec<u32>>, ends: Vec<Vec<u32>>, padding: Vec<u32>) -> Result<Self, Error> {
        if starts.is_empty() != ends.is_empty() {
            let (given, missing) = if starts.is_empty() { ("end", "start") } else { ("start", "end") };
            return Err(Error::Markers { reason: format!("a marker to {given} thinking and none to {missing} it") });
        }
        let [starts, ends] = [starts, ends].map(|sequences| {
            if sequences.len() > MAX_ALTERNATIVES {
                let reason = format!("{} alternatives, expected at most {MAX_ALTERNATIVES}", sequences.len());
                return Err(Error::Markers { reason });
            }
            if let Some(wrong) = sequences.iter().find(|s| !(1..=MAX_MARKER_TOKENS).contains(&s.len())) {
                let reason = format!("a marker of {} tokens, expected 1 to {MAX_MARKER_TOKENS}", wrong.len());
                return Err(Error::Markers { reason });
            }
            Ok(sequences.into_iter().filter_map(Pattern::new).collect())
        });
        Ok(Self { starts: starts?, ends: ends?, padding, ..Self::default() })
    }

    /// Set whether the model may think again within one turn, after a thought has ended. Without this call, it may.
    #[must_use]
    pub fn with_resuming(self, resumes: bool) -> Self {
        Self { resumes, ..self }
    }

    /// Let the last turn of a prompt begin at the last of these tokens. A marker before it, such as one in the user's
    /// text, does not count; without boundaries, every marker in a prompt counts.
    ///
    /// ```
    /// use meridian_core::{Markers, PhaseTracker};
    ///
    /// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?.with_boundaries(vec![5]);
    /// assert!(!PhaseTracker::new(&markers, &[1, 7, 2, 5, 3]).is_open(), "the user wrote the marker");
    /// assert!(PhaseTracker::new(&markers, &[1, 2, 5, 7, 3]).is_open());
    /// # Ok::<(), meridian_core::Error>(())
    /// ```
    #[must_use]
    pub fn with_boundaries(self, mut boundaries: Vec<u32>) -> Self {
        boundaries.sort_unstable();
        Self { boundaries, ..self }
    }

    /// Add the markers of tool calls: the tokens that begin a call, and those that end it, empty if it has no end
    /// marker. A call inside the thinking ends it with `end_thinking`; otherwise it belongs to the thinking.
    ///
    /// # Errors
    /// [`Error::Markers`] as in [`Markers::new`]; also for more than 8 pairs.
    pub fn with_calls(self, calls: Vec<(Vec<u32>, Vec<u32>)>, end_thinking: bool) -> Result<Self, Error> {
        if calls.len() > MAX_ALTERNATIVES {
            let reason = format!("{} tool calls, expected at most {MAX_ALTERNATIVES}", calls.len());
            return Err(Error::Markers { reason });
        }
        let call = |(begin, end): (Vec<u32>, Vec<u32>)| {
            if let Some(wrong) = [&begin, &end].into_iter().find(|tokens| tokens.len() > MAX_MARKER_TOKENS) {
                let reason =
                    format!("a tool call's marker of {} tokens, expected 1 to {MAX_MARKER_TOKENS}", wrong.len());
                return Err(Error::Markers { reason });
            }
            let empty = || Error::Markers { reason: "a tool call's marker of 0 tokens, expected 1 to 64".into() };
            Ok(Call { begin: Pattern::new(begin).ok_or_else(empty)?, end: Pattern::new(end) })
        };
        Ok(Self {
            calls: calls.into_iter().map(call).collect::<Result<_, _>>()?,
            calls_end_thinking: end_thinking,
            ..self
        })
    }

    /// Whether the model thinks at all.
    #[must_use]
    pub fn is_thinking_model(&self) -> bool {
        !self.starts.is_empty()
    }

    /// The sequences that start thinking; none for a model without markers.
    #[must_use]
    pub fn starts(&self) -> &[Pattern] {
        &self.starts
    }

    /// Whether the model may think again after it has begun to answer.
    #[must_use]
    pub fn resumes(&self) -> bool {
        self.resumes
    }

    /// The sequences that end thinking; none for a model without markers.
    #[must_use]
    pub fn ends(&self) -> &[Pattern] {
        &self.ends
    }

    /// Whether the last turn of a prompt may begin with this token.
    #[must_use]
    pub fn is_boundary(&self, token: u32) -> bool {
        self.boundaries.binary_search(&token).is_ok()
    }

    fn is_padding(&self, token: u32) -> bool {
        self.padding.contains(&token)
    }

    /// The last turn of a templated prompt.
    fn last_turn<'a>(&self, prompt: &'a [u32]) -> &'a [u32] {
        let begin = prompt.iter().rposition(|token| self.is_boundary(*token));
        &prompt[begin.unwrap_or(0)..]
    }
}

/// The position of one request between the start and the end of its thinking, in one turn: the last turn of its prompt,
/// and the tokens generated since. It opens at a start marker anywhere in the turn, and again after an end, unless the
/// model [thinks once](Markers::with_resuming). Whether it is open depends on the tokens alone, not on where the prompt
/// ends.
///
/// ```
/// use meridian_core::{Markers, PhaseEvent, PhaseTracker, ThinkPhase};
///
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let mut tracker = PhaseTracker::new(&markers, &[1, 2, 7]);
/// assert_eq!(tracker.phase(), ThinkPhase::Think);
/// assert_eq!(tracker.token(&markers, 8), Some(PhaseEvent::ExitThink));
/// assert_eq!(tracker.token(&markers, 7), Some(PhaseEvent::EnterThink));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PhaseTracker {
    stage: Stage,
    /// A thought has ended in this turn.
    has_thought: bool,
    /// The present thought has begun a tool call.
    has_called: bool,
    /// Number of matched tokens of each marker of thinking sought in this stage.
    matched: [u16; MAX_ALTERNATIVES],
    /// Number of matched tokens of each marker of tool calls.
    calls: [u16; MAX_ALTERNATIVES],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The model has generated only padding, of so many tokens, and the beginning of a start marker.
    Opening(u8),
    Think,
    /// In the tool call that begins as this one does, inside the thinking.
    Call(u8),
    Output,
}

/// Where a request's next token stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Thinking is open.
    pub is_open: bool,
    /// A tool call inside the thinking is open, or its marker has begun: no other token may be forced here.
    pub is_in_call: bool,
    /// The present thought has begun a tool call.
    pub has_called: bool,
}

impl PhaseTracker {
    /// The tracker of a request with this templated prompt, or its last turn.
    #[must_use]
    pub fn new(markers: &Markers, prompt: &[u32]) -> Self {
        let mut tracker = Self::before(markers);
        if markers.is_thinking_model() {
            for token in markers.last_turn(prompt) {
                tracker.advance(markers, *token);
            }
            if !tracker.is_open() && !tracker.has_thought {
                // A template may close the thinking that it did not open; otherwise the model may still begin to think.
                let turn = markers.last_turn(prompt);
                let is_closed = |end: &Pattern| turn.windows(end.tokens().len()).any(|tokens| tokens == end.tokens());
                tracker.has_thought = markers.ends.iter().any(is_closed);
                tracker.stage = if tracker.has_thought { Stage::Output } else { Stage::Opening(0) };
            }
        }
        tracker
    }

    /// Before the first token of a turn.
    fn before(markers: &Markers) -> Self {
        let stage = if markers.is_thinking_model() { Stage::Opening(0) } else { Stage::Output };
        let none = [0; MAX_ALTERNATIVES];
        Self { stage, has_thought: false, has_called: false, matched: none, calls: none }
    }

    /// Phase of the next token, [`Phase::Think`] or [`Phase::Output`]. While it is undecided whether the model will
    /// think, the phase is thinking: no visible answer has begun.
    #[inline]
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.stage {
            Stage::Opening(_) | Stage::Think | Stage::Call(_) => Phase::Think,
            Stage::Output => Phase::Output,
        }
    }

    /// Take in one generated token, in O(1). The token belongs to the phase before it. The exception is the token that
    /// shows that the model answers without thinking: it is output, see [`PhaseTracker::token_phase`].
    #[inline]
    pub fn token(&mut self, markers: &Markers, token: u32) -> Option<PhaseEvent> {
        let before = self.phase();
        self.advance(markers, token);
        match (before, self.phase()) {
            (Phase::Output, Phase::Think) => Some(PhaseEvent::EnterThink),
            (Phase::Think, Phase::Output) => Some(PhaseEvent::ExitThink),
            _ => None,
        }
    }

    #[inline]
    fn advance(&mut self, markers: &Markers, token: u32) {
        match self.stage {
            Stage::Output if self.has_thought && !markers.resumes => {}
            Stage::Output => _ = self.seek(&markers.starts, token, Stage::Think),
            Stage::Opening(padding) => {
                if self.seek(&markers.starts, token, Stage::Think) || self.matched.iter().any(|tokens| *tokens > 0) {
                    return;
                }
                let is_padding = markers.is_padding(token) && usize::from(padding) < MAX_PADDING_TOKENS;
                self.stage = if is_padding { Stage::Opening(padding + 1) } else { Stage::Output };
            }
            Stage::Think | Stage::Call(_) => {
                if !self.seek(&markers.ends, token, Stage::Output) && !markers.calls.is_empty() {
                    self.call(markers, token);
                }
            }
        }
    }

    /// Where the next token stands.
    #[inline]
    #[must_use]
    pub fn standing(&self, markers: &Markers) -> Standing {
        let is_in_call = match self.stage {
            Stage::Call(_) => true,
            Stage::Think => {
                let mut begun = markers.calls.iter().zip(&self.calls);
                begun.any(|(call, matched)| call.begin.is_distinctive(*matched))
            }
            Stage::Opening(_) | Stage::Output => false,
        };
        Standing { is_open: self.is_open(), is_in_call, has_called: self.has_called }
    }

    /// Whether the request has begun to think: false while it is undecided whether the model will think.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Think | Stage::Call(_))
    }

    /// [`PhaseTracker::token`], and the phase of the token: start and end markers belong to thinking.
    #[inline]
    pub fn token_phase(&mut self, markers: &Markers, token: u32) -> (Phase, Option<PhaseEvent>) {
        let undecided = matches!(self.stage, Stage::Opening(_));
        let before = self.phase();
        let event = self.token(markers, token);
        match event {
            Some(PhaseEvent::ExitThink) if undecided => (Phase::Output, event),
            Some(PhaseEvent::EnterThink) => (Phase::Think, event),
            _ => (before, event),
        }
    }

    /// Advance the markers of tool calls by a token inside the thinking.
    fn call(&mut self, markers: &Markers, token: u32) {
        if let Stage::Call(open) = self.stage {
            let begin = &markers.calls[usize::from(open)].begin;
            let mut is_over = false;
            for (call, matched) in markers.calls.iter().zip(&mut self.calls) {
                if let Some(end) = call.end.as_ref().filter(|_| call.begin == *begin) {
                    is_over |= end.advance(matched, token);
                }
            }
            if is_over {
                self.stage = Stage::Think;
                self.calls = [0; MAX_ALTERNATIVES];
            }
            return;
        }
        let mut begun = None;
        for (number, (call, matched)) in (0..).zip(markers.calls.iter().zip(&mut self.calls)) {
            if call.begin.advance(matched, token) {
                begun = begun.or(Some(number));
            }
        }
        let Some(begun) = begun else { return };
        self.has_called = true;
        self.calls = [0; MAX_ALTERNATIVES];
        if markers.calls_end_thinking { self.enter(Stage::Output) } else { self.stage = Stage::Call(begun) }
    }

    /// Advance the sought markers by `token`. When one is complete, go to `next` and return true.
    #[inline]
    fn seek(&mut self, sequences: &[Pattern], token: u32, next: Stage) -> bool {
        let mut complete = false;
        for (sequence, matched) in sequences.iter().zip(&mut self.matched) {
            complete |= sequence.advance(matched, token);
        }
        if complete {
            self.enter(next);
        }
        complete
    }

    fn enter(&mut self, stage: Stage) {
        self.has_thought |= stage == Stage::Output;
        self.has_called &= stage != Stage::Think;
        self.stage = stage;
        self.matched = [0; MAX_ALTERNATIVES];
        self.calls = [0; MAX_ALTERNATIVES];
    }
}
