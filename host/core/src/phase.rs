use meridian_policy_sdk::Phase;

use crate::{Error, Pattern, PhaseEvent};

/// Longest marker, in tokens. The longest known (Hunyuan-A13B) has seven.
const MAX_MARKER_TOKENS: usize = 64;
/// Most alternatives of one marker. The most known (Granite) is two.
const MAX_ALTERNATIVES: usize = 8;
/// Most whitespace tokens skipped at the end of a prompt, or before a marker that the model generates.
const MAX_PADDING_TOKENS: usize = 8;

/// How a model marks its thinking: token sequences, resolved from text with the model's own tokenizer.
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
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Markers {
    starts: Vec<Pattern>,
    ends: Vec<Pattern>,
    padding: Vec<u32>,
    resumes: bool,
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
        Ok(Self { starts: starts?, ends: ends?, padding, resumes: false })
    }

    /// The same markers for a model that may think again after it has begun to answer, within one turn.
    #[must_use]
    pub fn with_resuming(self, resumes: bool) -> Self {
        Self { resumes, ..self }
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

    fn is_padding(&self, token: u32) -> bool {
        self.padding.contains(&token)
    }

    /// The phase at the end of a templated prompt. Only the end counts: the template's own tokens always follow a
    /// marker inside user text.
    fn opening(&self, prompt: &[u32]) -> Opening {
        if !self.is_thinking_model() {
            return Opening::Output;
        }
        let padding = prompt.iter().rev().take(MAX_PADDING_TOKENS).take_while(|token| self.is_padding(**token)).count();
        for trimmed in [prompt, &prompt[..prompt.len() - padding]] {
            if self.starts.iter().any(|start| trimmed.ends_with(start.tokens())) {
                return Opening::Think;
            }
            if self.ends.iter().any(|end| trimmed.ends_with(end.tokens())) {
                return Opening::Output;
            }
        }
        Opening::Undecided
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opening {
    Think,
    Output,
    Undecided,
}

/// The position of one request between the start and the end of its thinking. It moves only forward within a turn,
/// unless the model may [resume](Markers::with_resuming): once the output has begun, no marker moves the request any
/// more.
///
/// ```
/// use meridian_core::{Markers, PhaseEvent, PhaseTracker, ThinkPhase};
///
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let mut tracker = PhaseTracker::new(&markers, &[1, 2, 7]);
/// assert_eq!(tracker.phase(), ThinkPhase::Think);
/// assert_eq!(tracker.token(&markers, 8), Some(PhaseEvent::ExitThink));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PhaseTracker {
    stage: Stage,
    /// Number of matched tokens of each marker sought in this stage.
    matched: [u16; MAX_ALTERNATIVES],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The model has generated only padding and the beginning of a start marker.
    Opening {
        /// Number of padding tokens, if there was nothing else.
        padding: Option<u8>,
    },
    Think,
    Output,
}

impl PhaseTracker {
    /// The tracker of a request with this templated prompt.
    #[must_use]
    pub fn new(markers: &Markers, prompt: &[u32]) -> Self {
        let stage = match markers.opening(prompt) {
            Opening::Think => Stage::Think,
            Opening::Output => Stage::Output,
            Opening::Undecided => Stage::Opening { padding: Some(0) },
        };
        Self { stage, matched: [0; MAX_ALTERNATIVES] }
    }

    /// Phase of the next token, [`Phase::Think`] or [`Phase::Output`]. While it is undecided whether the model will
    /// think, the phase is thinking: no visible answer has begun.
    #[inline]
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.stage {
            Stage::Opening { .. } | Stage::Think => Phase::Think,
            Stage::Output => Phase::Output,
        }
    }

    /// Take in one generated token, in O(1). The token belongs to the phase before it. The exception is the token that
    /// shows that the model answers without thinking: it is output, see [`PhaseTracker::token_phase`].
    #[inline]
    pub fn token(&mut self, markers: &Markers, token: u32) -> Option<PhaseEvent> {
        match self.stage {
            Stage::Output if !markers.resumes => None,
            Stage::Output => self.seek(&markers.starts, token, Stage::Think).then_some(PhaseEvent::EnterThink),
            Stage::Think => self.seek(&markers.ends, token, Stage::Output).then_some(PhaseEvent::ExitThink),
            Stage::Opening { padding } => self.opening_token(markers, token, padding),
        }
    }

    /// Whether the request has begun to think: false while it is undecided whether the model will think.
    #[inline]
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.stage == Stage::Think
    }

    /// [`PhaseTracker::token`], and the phase of the token: start and end markers belong to thinking.
    #[inline]
    pub fn token_phase(&mut self, markers: &Markers, token: u32) -> (Phase, Option<PhaseEvent>) {
        let undecided = matches!(self.stage, Stage::Opening { .. });
        let before = self.phase();
        let event = self.token(markers, token);
        match event {
            Some(PhaseEvent::ExitThink) if undecided => (Phase::Output, event),
            Some(PhaseEvent::EnterThink) => (Phase::Think, event),
            _ => (before, event),
        }
    }

    /// In the opening, a start marker begins at the first token that is not padding, or never: after any other token,
    /// the answer has begun.
    fn opening_token(&mut self, markers: &Markers, token: u32, padding: Option<u8>) -> Option<PhaseEvent> {
        let mut begun = false;
        for (sequence, matched) in markers.starts.iter().zip(&mut self.matched) {
            let tokens = sequence.tokens();
            let at = usize::from(*matched);
            *matched = if at > 0 && tokens[at] == token {
                *matched + 1
            } else {
                u16::from(padding.is_some() && tokens[0] == token)
            };
            if usize::from(*matched) == tokens.len() {
                self.stage = Stage::Think;
                self.matched = [0; MAX_ALTERNATIVES];
                return None;
            }
            begun |= *matched > 0;
        }
        match padding {
            Some(count) if markers.is_padding(token) && usize::from(count) < MAX_PADDING_TOKENS => {
                self.stage = Stage::Opening { padding: Some(count + 1) };
                None
            }
            _ if begun => {
                self.stage = Stage::Opening { padding: None };
                None
            }
            _ => {
                // The model answers without thinking.
                self.stage = Stage::Output;
                Some(PhaseEvent::ExitThink)
            }
        }
    }

    /// Advance the sought markers by `token`. When one is complete, go to `next` and return true.
    #[inline]
    fn seek(&mut self, sequences: &[Pattern], token: u32, next: Stage) -> bool {
        let mut complete = false;
        for (sequence, matched) in sequences.iter().zip(&mut self.matched) {
            complete |= sequence.advance(matched, token);
        }
        if complete {
            self.stage = next;
            self.matched = [0; MAX_ALTERNATIVES];
        }
        complete
    }
}
