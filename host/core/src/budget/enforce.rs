use std::sync::Arc;

use crate::{Error, Markers, Pattern, PhaseTracker, Standing};

use super::answer::Answer;
use super::{AnswerRules, Ending, ForceReason, ForcedEnding};

/// Thinking tokens to remember for detecting the beginning of an end marker: the longest length of a marker.
const REMEMBERED: usize = 64;

/// The rules for every request of a model: how its thinking is recognised, and how to make it end.
///
/// ```
/// use meridian_core::Markers;
/// use meridian_core::budget::EndRules;
///
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let rules = EndRules::new(markers, vec![40, 8, 3])?;
/// assert_eq!(rules.guard_token(), 8);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct EndRules {
    markers: Markers,
    /// With the phrase.
    ending: Ending,
    /// Without it: the model stopped thinking by itself.
    plain: Ending,
    answers: AnswerRules,
}

impl EndRules {
    /// How its thinking is recognised.
    #[must_use]
    pub fn markers(&self) -> &Markers {
        &self.markers
    }

    /// The rules of a model with these markers. `forced` ends its thinking: a phrase, an end marker, and the text
    /// before the answer; empty for the first end marker.
    ///
    /// # Errors
    /// [`Error::Markers`] when the model has no end marker, or `forced` has none.
    pub fn new(markers: Markers, forced: Vec<u32>) -> Result<Self, Error> {
        let ending = Ending::new(forced, markers.ends().to_vec())?;
        let plain = Ending::new(Vec::new(), markers.ends().to_vec())?;
        Ok(Self { markers, ending, plain, answers: AnswerRules::default() })
    }

    /// The same rules with these for the answers.
    #[must_use]
    pub fn with_answers(self, answers: AnswerRules) -> Self {
        Self { answers, ..self }
    }

    /// Number of generated tokens at which the thinking of a request of `max_tokens` tokens has to end for its answer;
    /// see [`AnswerRules::reserve_from`].
    #[must_use]
    pub fn reserve_from(&self, max_tokens: u32) -> u32 {
        self.answers.reserve_from(max_tokens, u32::try_from(self.ending.tokens()).unwrap_or(u32::MAX))
    }

    /// The first token of the first end marker, which replaces an end of sequence inside thinking.
    #[must_use]
    pub fn guard_token(&self) -> u32 {
        self.markers.ends()[0].tokens()[0]
    }

    /// Whether the end marker has more tokens.
    #[must_use]
    pub fn guard_continues(&self) -> bool {
        self.markers.ends()[0].tokens().len() > 1
    }
}

/// The demand on a request's next token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Demand {
    /// Any sampled token.
    #[default]
    Free,
    /// Any sampled token, but an end of sequence becomes [`EndRules::guard_token`].
    Guarded,
    /// This token.
    Force(u32),
    /// Any sampled token of the answer, but none that ends the sequence ([`Ban::Ends`]) or begins thinking.
    Answer(Ban),
}

/// The tokens that an answer must not have yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ban {
    /// Ends of the sequence, and [`Enforcer::openers`]: the answer is too short.
    Ends,
    /// [`Enforcer::openers`]: the thinking has reached its limit.
    Starts,
}

/// What a sampler does with one request's thinking, from the request's row to the enforcer.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerLimits {
    /// Follow the thinking from its first token on; otherwise only from the first order for the request.
    pub is_followed: bool,
    /// Measure the entropy of its tokens.
    pub is_measured: bool,
    /// Think tokens at which the end is forced; the ending comes on top.
    pub max_think_tokens: u32,
    /// Force the end marker alone, without the phrase: a stop of the client would end the request inside it.
    pub is_plain: bool,
    /// Generating any of these ends thinking.
    pub interrupts: Arc<[Pattern]>,
    /// An end of sequence inside the thinking becomes the end marker.
    pub guards_eos: bool,
    /// Generated tokens at which the end is forced, so that the rest of the request's tokens is left for the answer;
    /// `u32::MAX` for none.
    pub reserve_from: u32,
    /// [`AnswerRules::min_tokens`] holds after every end of thinking, not only after a forced one.
    pub guards_answer: bool,
}

impl SamplerLimits {
    /// Of a request whose thinking is followed by nobody until an order for it.
    #[must_use]
    pub fn idle() -> Self {
        Self { is_followed: false, guards_eos: false, ..Self::default() }
    }
}

impl Default for SamplerLimits {
    fn default() -> Self {
        Self {
            is_followed: true,
            is_measured: false,
            max_think_tokens: u32::MAX,
            is_plain: false,
            interrupts: [].into(),
            guards_eos: true,
            reserve_from: u32::MAX,
            guards_answer: false,
        }
    }
}

/// Ends the thinking of one request at the exact token, using only its generated tokens. Before each token is sampled,
/// [`Enforcer::demand`] returns the demand on it.
///
/// A token counts as thought when thinking was open before it; the tokens of a start marker do not count. A limit may
/// change at any time, from a given number of generated tokens on ([`Enforcer::limit_from`]). Set ahead of time, it
/// holds at that exact token, even where several processes sample the same request. An end that is due waits while a tool
/// call inside the thinking is open, and while a mask of the client forbids its first token: another token than the
/// demanded one then arrives, and the next one is demanded again. After [`Enforcer::replay`], the
/// same tokens give the same demands: a request that was preempted in the middle of a forced ending continues where it
/// was.
///
/// ```
/// use meridian_core::Markers;
/// use meridian_core::budget::{Demand, EndRules, Enforcer, ForceReason, SamplerLimits};
///
/// let rules = EndRules::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![])?, vec![40, 8])?;
/// let mut request = Enforcer::new(&rules, &[1, 7], SamplerLimits { max_think_tokens: 2, ..SamplerLimits::default() });
/// for token in [30, 31] {
///     assert_eq!(request.demand(&rules), Demand::Guarded);
///     request.push(&rules, token);
/// }
/// assert_eq!(request.demand(&rules), Demand::Force(40));
/// request.push(&rules, 40);
/// assert_eq!(request.demand(&rules), Demand::Force(8));
/// request.push(&rules, 8);
/// assert_eq!(request.demand(&rules), Demand::Free);
/// assert_eq!(request.forced(), Some((2, ForceReason::HardCap)));
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Enforcer {
    enforcement: Enforcement,
    opening: PhaseTracker,
    tracker: PhaseTracker,
}

impl Enforcer {
    /// A request with this templated prompt, or its end.
    #[must_use]
    pub fn new(rules: &EndRules, prompt: &[u32], limits: SamplerLimits) -> Self {
        let opening = PhaseTracker::new(&rules.markers, prompt);
        Self { enforcement: Enforcement::new(limits), tracker: opening.clone(), opening }
    }

    /// Set `max_think_tokens` as the limit from `tokens` generated tokens on. Earlier thinking counts; a past moment
    /// means now.
    pub fn limit_from(&mut self, tokens: u32, max_think_tokens: u32) {
        self.enforcement.limit_from(tokens, max_think_tokens);
    }

    /// Take in a generated token that stands for an end of sequence: the end marker must be completed.
    pub fn push_guarded(&mut self, rules: &EndRules, token: u32) {
        self.enforcement.guard(self.is_thinking());
        self.push(rules, token);
    }

    /// Restart with these tokens, under the limits that held for each.
    pub fn replay(&mut self, rules: &EndRules, tokens: impl IntoIterator<Item = u32>) {
        self.enforcement.restart();
        self.tracker = self.opening.clone();
        for token in tokens {
            // The start of an ending is decided where a token is sampled.
            self.demand(rules);
            self.push(rules, token);
        }
    }

    /// The demand on the next token.
    pub fn demand(&mut self, rules: &EndRules) -> Demand {
        self.enforcement.demand(rules, self.tracker.standing(&rules.markers))
    }

    /// Whether the request has begun to think: false while it is undecided.
    #[must_use]
    pub fn is_thinking(&self) -> bool {
        self.tracker.is_open()
    }

    /// Whether an ending is being forced.
    #[must_use]
    pub fn is_forcing(&self) -> bool {
        self.enforcement.is_forcing()
    }

    /// Number of generated tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.enforcement.tokens()
    }

    /// Number of tokens generated while thinking was open.
    #[must_use]
    pub fn think_tokens(&self) -> u32 {
        self.enforcement.think_tokens()
    }

    /// Number of generated tokens at the start of the latest forced ending, and its reason.
    #[must_use]
    pub fn forced(&self) -> Option<(u32, ForceReason)> {
        self.enforcement.forced()
    }

    /// The tokens that would begin thinking; see [`Ban`].
    pub fn openers<'a>(&'a self, rules: &'a EndRules) -> impl Iterator<Item = u32> + 'a {
        self.enforcement.run.answer.openers(rules.markers.starts())
    }

    /// Take in a generated token.
    pub fn push(&mut self, rules: &EndRules, token: u32) {
        let was_open = self.tracker.is_open();
        let _ = self.tracker.token(&rules.markers, token);
        self.enforcement.push(rules, token, was_open, self.tracker.is_open());
    }
}

/// The limits of one request's thinking and its forced ending: an [`Enforcer`] that follows no markers. Its caller
/// follows them, and reports whether thinking is open.
///
/// ```
/// use meridian_core::{Markers, Standing};
/// use meridian_core::budget::{Demand, EndRules, Enforcement, SamplerLimits};
///
/// let rules = EndRules::new(Markers::new(vec![vec![7]], vec![vec![8]], vec![])?, vec![])?;
/// let mut request = Enforcement::new(SamplerLimits { max_think_tokens: 1, ..SamplerLimits::default() });
/// request.push(&rules, 30, true, true);
/// assert_eq!(request.demand(&rules, Standing { is_open: true, ..Standing::default() }), Demand::Force(8));
/// request.push(&rules, 8, true, false);
/// assert_eq!(request.demand(&rules, Standing::default()), Demand::Free);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Enforcement {
    limits: SamplerLimits,
    /// Limits that hold from a number of generated tokens on, by that number; among equal numbers, the latest counts.
    later: Vec<(u32, u32)>,
    /// Numbers of the tokens that stand for an end of sequence.
    guarded: Vec<u32>,
    run: Run,
}

/// The state of a request after its tokens.
#[derive(Clone, Debug)]
struct Run {
    tokens: u32,
    think_tokens: u32,
    matched: Vec<u16>,
    is_interrupted: bool,
    /// The latest tokens of the thinking.
    tail: Vec<u32>,
    forcing: Option<Forcing>,
    forced: Option<(u32, ForceReason)>,
    answer: Answer,
}

#[derive(Clone, Debug)]
struct Forcing {
    reason: ForceReason,
    ending: ForcedEnding,
    emitted: Vec<u32>,
}

impl Enforcement {
    /// A request without generated tokens.
    #[must_use]
    pub fn new(limits: SamplerLimits) -> Self {
        let run = Run::new(&limits);
        Self { limits, later: Vec::new(), guarded: Vec::new(), run }
    }

    /// A request that has generated `tokens` tokens already, `think_tokens` of them in its thinking.
    #[must_use]
    pub fn resumed(limits: SamplerLimits, tokens: u32, think_tokens: u32) -> Self {
        let mut resumed = Self::new(limits);
        resumed.run = Run { tokens, think_tokens, ..resumed.run };
        resumed
    }

    /// Set a limit; see [`Enforcer::limit_from`].
    pub fn limit_from(&mut self, tokens: u32, max_think_tokens: u32) {
        let from = tokens.max(self.run.tokens);
        self.later.retain(|(at, _)| *at != from);
        let index = self.later.partition_point(|(at, _)| *at < from);
        self.later.insert(index, (from, max_think_tokens));
    }

    /// Note that the next token stands for an end of sequence. `is_open`: thinking is open before it.
    pub fn guard(&mut self, is_open: bool) {
        if self.run.forcing.is_none() && is_open {
            self.guarded.push(self.run.tokens);
        }
    }

    /// Forget the tokens; the limits stay, with the token numbers from which they hold.
    fn restart(&mut self) {
        self.run = Run::new(&self.limits);
    }

    /// The demand on the next token; `at` is where it stands.
    pub fn demand(&mut self, rules: &EndRules, at: Standing) -> Demand {
        let (max_think_tokens, due) = (self.limit(), self.due());
        let run = &mut self.run;
        if run.forcing.is_none()
            && at.is_open
            && !at.is_in_call
            && let Some(reason) = due
        {
            run.force(if self.limits.is_plain { &rules.plain } else { &rules.ending }, reason);
        }
        let next = run.forcing.as_ref().map(|Forcing { ending, emitted, .. }| ending.next(emitted));
        match next {
            Some(Some(token)) => return Demand::Force(token),
            Some(None) => run.forcing = None,
            None => {}
        }
        if at.is_open {
            // A turn may end with a tool call.
            return if self.limits.guards_eos && !at.has_called { Demand::Guarded } else { Demand::Free };
        }
        match run.answer.is_due(&rules.answers) {
            Some(true) => Demand::Answer(Ban::Ends),
            Some(false) if rules.markers.resumes() && run.think_tokens >= max_think_tokens => {
                Demand::Answer(Ban::Starts)
            }
            _ => Demand::Free,
        }
    }

    /// Whether an end is due that waits, because a tool call is open.
    #[must_use]
    pub fn waits_for_call(&self, at: Standing) -> bool {
        at.is_in_call && self.due().is_some()
    }

    /// The reason why open thinking has to end now.
    fn due(&self) -> Option<ForceReason> {
        let Self { run, limits, .. } = self;
        if run.think_tokens >= self.limit() {
            Some(ForceReason::HardCap)
        } else if run.is_interrupted {
            Some(ForceReason::Pattern)
        } else if run.tokens >= limits.reserve_from {
            Some(ForceReason::Reserve)
        } else {
            None
        }
    }

    /// Whether an ending is being forced.
    #[must_use]
    pub fn is_forcing(&self) -> bool {
        self.run.forcing.is_some()
    }

    /// Number of generated tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.run.tokens
    }

    /// Number of tokens generated while thinking was open.
    #[must_use]
    pub fn think_tokens(&self) -> u32 {
        self.run.think_tokens
    }

    /// The limit in force now.
    #[must_use]
    pub fn limit(&self) -> u32 {
        let passed = self.later.partition_point(|(at, _)| *at <= self.run.tokens);
        passed.checked_sub(1).map_or(self.limits.max_think_tokens, |latest| self.later[latest].1)
    }

    /// Number of generated tokens at the start of the latest forced ending, and its reason.
    #[must_use]
    pub fn forced(&self) -> Option<(u32, ForceReason)> {
        self.run.forced
    }

    /// Take in a generated token. `was_open` and `is_open`: whether thinking was open before and after it.
    pub fn push(&mut self, rules: &EndRules, token: u32, was_open: bool, is_open: bool) {
        let run = &mut self.run;
        if self.guarded.binary_search(&run.tokens).is_ok() && run.forcing.is_none() && was_open {
            run.force(&rules.plain, ForceReason::EosGuard);
        }
        if let Some(Forcing { reason, ending, emitted }) = &mut run.forcing {
            let begins = emitted.is_empty();
            // A token that was not sampled at its first position leaves the end due: a mask forbade it.
            if begins && *reason != ForceReason::EosGuard && ending.next(&[]) != Some(token) {
                run.forcing = None;
            } else {
                if begins {
                    run.forced = Some((run.tokens, *reason));
                }
                emitted.push(token);
            }
        }
        run.tokens = run.tokens.saturating_add(1);
        if !was_open {
            run.answer.push(&rules.answers, rules.markers.starts(), token, run.forcing.is_some());
            return;
        }
        run.think_tokens = run.think_tokens.saturating_add(1);
        if run.tail.len() == 2 * REMEMBERED {
            run.tail.drain(..REMEMBERED);
        }
        run.tail.push(token);
        for (pattern, matched) in self.limits.interrupts.iter().zip(&mut run.matched) {
            run.is_interrupted |= pattern.advance(matched, token);
        }
        if !is_open {
            run.answer.begin(run.forcing.is_some() || self.limits.guards_answer, rules.markers.starts().len());
            // A model that thinks again restarts.
            run.tail.clear();
            run.is_interrupted = false;
        }
    }
}

impl Run {
    fn new(limits: &SamplerLimits) -> Self {
        Self {
            tokens: 0,
            think_tokens: 0,
            matched: vec![0; limits.interrupts.len()],
            is_interrupted: false,
            tail: Vec::new(),
            forcing: None,
            forced: None,
            answer: Answer::default(),
        }
    }

    fn force(&mut self, ending: &Ending, reason: ForceReason) {
        self.forcing = Some(Forcing { reason, ending: ending.after(&self.tail), emitted: Vec::new() });
    }
}
