use crate::{Pattern, ThinkPhase};

/// The tokens that close thinking: a phrase that turns to the answer, then the end marker.
///
/// What comes next depends only on the tokens that were emitted since the force began, so a request that is preempted in
/// the middle and replayed goes on where it was. When the model was already writing the end marker, the phrase is left
/// out and the rest of the marker follows. When a token was emitted that was not the one asked for (a speculative token,
/// a sampler that was not forced), the phrase is given up and the marker begins anew, as far as it is not there already.
/// Whatever was emitted, asking `end.len()` times more completes the marker.
///
/// ```
/// use meridian_core::Pattern;
/// use meridian_core::budget::ForcedEnding;
///
/// let end = Pattern::new(vec![8, 9]).unwrap();
/// let ending = ForcedEnding::new(vec![40, 41], end.clone(), &[5, 6]);
/// let mut emitted = vec![];
/// while let Some(token) = ending.next(&emitted) {
///     emitted.push(token);
/// }
/// assert_eq!(emitted, [40, 41, 8, 9]);
/// assert_eq!(ForcedEnding::new(vec![40, 41], end, &[5, 8]).next(&[]), Some(9), "it was already ending");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForcedEnding {
    phrase: Vec<u32>,
    end: Pattern,
    /// Tokens of the end marker that were there before the force began.
    matched: u16,
    /// Whether the whole of it was.
    is_over: bool,
}

impl ForcedEnding {
    /// An ending that begins after the thinking tokens `before` (as many of the last as the end marker is long suffice).
    /// `phrase` may be empty, and does not contain the end marker.
    #[must_use]
    pub fn new(phrase: Vec<u32>, end: Pattern, before: &[u32]) -> Self {
        let tail = &before[before.len().saturating_sub(end.tokens().len())..];
        let mut matched = 0;
        let is_over = tail.iter().any(|token| end.advance(&mut matched, *token));
        Self { phrase, end, matched, is_over }
    }

    /// The token to emit after `emitted`, all tokens since the force began; `None` once the end marker is complete.
    #[must_use]
    pub fn next(&self, emitted: &[u32]) -> Option<u32> {
        let mut matched = self.matched;
        if self.is_over || emitted.iter().any(|token| self.end.advance(&mut matched, *token)) {
            return None;
        }
        let is_in_phrase = self.matched == 0 && emitted.len() < self.phrase.len() && self.phrase.starts_with(emitted);
        Some(if is_in_phrase { self.phrase[emitted.len()] } else { self.end.tokens()[usize::from(matched)] })
    }
}

/// Keeps a request from ending inside its thinking with an empty answer: an end-of-sequence token that was sampled there
/// becomes the end marker, and the answer follows.
///
/// ```
/// use meridian_core::ThinkPhase;
/// use meridian_core::Pattern;
/// use meridian_core::budget::EosGuard;
///
/// let guard = EosGuard::new(vec![2], Pattern::new(vec![8, 9]).unwrap());
/// let ending = guard.check(2, ThinkPhase::Think, &[5, 6]).unwrap();
/// assert_eq!(ending.next(&[]), Some(8), "in place of the end of sequence");
/// assert_eq!(ending.next(&[8]), Some(9));
/// assert!(guard.check(2, ThinkPhase::Output, &[8, 9]).is_none());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EosGuard {
    eos: Vec<u32>,
    end: Pattern,
}

impl EosGuard {
    /// A guard against these end-of-sequence tokens for a model with this end marker.
    #[must_use]
    pub fn new(eos: Vec<u32>, end: Pattern) -> Self {
        Self { eos, end }
    }

    /// What to emit instead of `sampled`, and after it, when a request in `phase` has thought the tokens `before`; `None`
    /// when `sampled` may stand. The ending has no phrase: the model was done thinking.
    #[must_use]
    pub fn check(&self, sampled: u32, phase: ThinkPhase, before: &[u32]) -> Option<ForcedEnding> {
        let is_guarded = phase == ThinkPhase::Think && self.eos.contains(&sampled);
        is_guarded.then(|| ForcedEnding::new(Vec::new(), self.end.clone(), before))
    }
}
