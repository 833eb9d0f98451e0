use std::sync::Arc;

use crate::{Error, Pattern};

/// How to end the thinking of a model: the tokens to force, and all sequences that end thinking.
///
/// One per model; cheap to clone.
///
/// ```
/// use meridian_core::Pattern;
/// use meridian_core::budget::Ending;
///
/// // "…I have to answer now.\n</think>\n\n", as the model's tokenizer has it; 8, 9 is the end marker.
/// let ends = vec![Pattern::new(vec![8, 9]).unwrap()];
/// assert!(Ending::new(vec![40, 41, 8, 9, 3], ends.clone()).is_ok());
/// let error = Ending::new(vec![40, 41], ends).unwrap_err();
/// assert_eq!(error.to_string(), "markers: the tokens to force have no end marker: thinking would go on");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending(Arc<Tokens>);

#[derive(Debug, PartialEq, Eq)]
struct Tokens {
    /// Phrase, end marker, tail.
    forced: Vec<u32>,
    /// Position in `forced` after its first complete end marker, where the tail begins.
    tail_at: usize,
    /// At least one.
    ends: Vec<Pattern>,
}

impl Ending {
    /// The ending that forces `forced`: a phrase that turns to the answer, an end marker, and the text between it and
    /// the answer; empty for the first of `ends`. `ends` are all end markers of the model.
    ///
    /// # Errors
    /// [`Error::Markers`] without an end marker, or when `forced` has none.
    pub fn new(forced: Vec<u32>, ends: Vec<Pattern>) -> Result<Self, Error> {
        let refuse = |reason: &str| Error::Markers { reason: reason.into() };
        let first = ends.first().ok_or_else(|| refuse("no end marker to force"))?;
        let forced = if forced.is_empty() { first.tokens().to_vec() } else { forced };
        let is_end = |at: &usize| ends.iter().any(|end| forced[..*at].ends_with(end.tokens()));
        let tail_at = (1..=forced.len())
            .find(is_end)
            .ok_or_else(|| refuse("the tokens to force have no end marker: thinking would go on"))?;
        Ok(Self(Arc::new(Tokens { forced, tail_at, ends })))
    }

    /// The most tokens that a forced end takes.
    pub(super) fn tokens(&self) -> usize {
        let ends = self.0.ends.iter().map(|end| end.tokens().len());
        ends.fold(self.0.forced.len(), usize::max)
    }

    /// End thinking after the tokens `before`: all tokens since thinking began, or at least as many of the last ones as
    /// the longest end marker has.
    #[must_use]
    pub fn after(&self, before: &[u32]) -> ForcedEnding {
        let ends = &self.0.ends;
        let mut matched = vec![0; ends.len()];
        for (end, matched) in ends.iter().zip(&mut matched) {
            // One token less than the marker has: it cannot be complete.
            let tail = &before[before.len().saturating_sub(end.tokens().len() - 1)..];
            tail.iter().for_each(|token| _ = end.advance(matched, *token));
        }
        let is_over = ends.iter().any(|end| before.ends_with(end.tokens()));
        let has_begun = ends.iter().zip(&matched).any(|(end, matched)| end.is_distinctive(*matched));
        ForcedEnding { ending: self.clone(), matched, start: Start::of(is_over, has_begun) }
    }
}

/// The tokens that close one request's thinking.
///
/// Let `before` be the tokens thought before the force began, and `emitted` the tokens since. An end marker is
/// *complete* as soon as `before` followed by `emitted` ends with one. Then [`ForcedEnding::next`] is
///
/// 1. nothing, when an end marker was complete before;
/// 2. while the forced sequence is being emitted in full (`before` does not end with the distinctive beginning of an end
///    marker, and `emitted` is a beginning of the sequence): its next token until its end, but nothing once an end
///    marker is complete earlier than the sequence's own;
/// 3. otherwise, once an end marker is complete, nothing;
/// 4. otherwise the next token of an end marker: of the one with the fewest missing tokens among those with a
///    distinctive beginning; without any, of the first.
///
/// A distinctive beginning has two tokens of the marker, or all but one. A marker may begin with a line break; a line
/// break alone does not show that it was begun.
///
/// The phrase is therefore left out when the model was already ending its thinking. It is given up when another token
/// than the demanded one was emitted (a speculative token, a sampler that was not forced); the tail is forced only
/// after the whole sequence. Whatever was emitted, the number of calls that completes an end marker is at most the
/// length of the longest of the forced sequence and the end markers. The next token depends only on these tokens, so a
/// request that is preempted in the middle and replayed continues where it was.
///
/// ```
/// use meridian_core::Pattern;
/// use meridian_core::budget::Ending;
///
/// let ending = Ending::new(vec![40, 41, 8, 9, 3], vec![Pattern::new(vec![8, 9]).unwrap()]).unwrap();
/// let forced = ending.after(&[5, 6]);
/// let mut emitted = vec![];
/// while let Some(token) = forced.next(&emitted) {
///     emitted.push(token);
/// }
/// assert_eq!(emitted, [40, 41, 8, 9, 3]);
/// assert_eq!(ending.after(&[5, 8]).next(&[]), Some(9), "it was already ending");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForcedEnding {
    ending: Ending,
    /// Tokens of each end marker that were matched before the force began.
    matched: Vec<u16>,
    start: Start,
}

/// The part of an end marker that was complete when the force began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    Nothing,
    Distinctive,
    Complete,
}

impl Start {
    fn of(is_over: bool, has_begun: bool) -> Self {
        if is_over {
            Self::Complete
        } else if has_begun {
            Self::Distinctive
        } else {
            Self::Nothing
        }
    }
}

impl ForcedEnding {
    /// The token to emit after `emitted`, all tokens since the force began; `None` when there is nothing more to force.
    #[must_use]
    pub fn next(&self, emitted: &[u32]) -> Option<u32> {
        let Tokens { forced, tail_at, ends } = &*self.ending.0;
        if self.start == Start::Complete {
            return None;
        }
        let mut matched = self.matched.clone();
        let completes = |token: &u32| {
            // Every marker advances; none is skipped after one is complete.
            ends.iter().zip(&mut matched).fold(false, |any, (end, matched)| end.advance(matched, *token) || any)
        };
        let completed_at = emitted.iter().position(completes).map(|index| index + 1);
        let is_in_full = self.start == Start::Nothing && forced.starts_with(emitted);
        match completed_at {
            Some(at) if is_in_full && at == *tail_at => forced.get(emitted.len()).copied(),
            Some(_) => None,
            None if is_in_full => forced.get(emitted.len()).copied(),
            None => {
                let first = (&ends[0], matched[0]);
                let (end, matched) = ends
                    .iter()
                    .zip(matched)
                    .filter(|(end, matched)| end.is_distinctive(*matched))
                    .min_by_key(|(end, matched)| end.tokens().len() - usize::from(*matched))
                    .unwrap_or(first);
                Some(end.tokens()[usize::from(matched)])
            }
        }
    }
}
