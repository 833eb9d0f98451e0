//! The answer after thinking: which tokens must not come yet, and how much room it is left.

use std::collections::HashSet;
use std::sync::Arc;

use crate::Pattern;

/// The rules for the answers of a model. The default has none.
///
/// ```
/// use meridian_core::Markers;
/// use meridian_core::budget::{AnswerRules, EndRules};
///
/// let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![])?;
/// let answers = AnswerRules { reserve_tokens: 20, ..AnswerRules::default() };
/// let rules = EndRules::new(markers, vec![40, 8])?.with_answers(answers);
/// // 100 tokens: 78 of thinking, 2 of the forced ending, and 20 of the answer.
/// assert_eq!(rules.reserve_from(100), 78);
/// # Ok::<(), meridian_core::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct AnswerRules {
    /// Tokens of an answer, [blank](AnswerRules::blank) ones not counted, before which it cannot end and no thinking
    /// can begin. 0: no guard.
    pub min_tokens: u32,
    /// Tokens of a request that its thinking must leave for the answer; see [`AnswerRules::reserve_from`].
    pub reserve_tokens: u32,
    /// Tokens that show nothing: white space, and special tokens.
    pub blank: Arc<HashSet<u32>>,
}

impl AnswerRules {
    /// Number of generated tokens at which the thinking of a request of `max_tokens` tokens has to end, so that a forced
    /// ending of `ending_tokens` and the answer fit; `u32::MAX` for never. The answer gets
    /// [`AnswerRules::reserve_tokens`], but at most a quarter of the tokens beside the ending, and at least one.
    ///
    /// ```
    /// use meridian_core::budget::AnswerRules;
    ///
    /// let rules = AnswerRules { reserve_tokens: 32, ..AnswerRules::default() };
    /// assert_eq!(rules.reserve_from(1000, 8), 960);
    /// assert_eq!(rules.reserve_from(48, 8), 30, "a quarter of 40");
    /// assert_eq!(rules.reserve_from(9, 8), 0, "one token after the ending");
    /// assert_eq!(rules.reserve_from(8, 8), u32::MAX, "no room for an answer");
    /// ```
    #[must_use]
    pub fn reserve_from(&self, max_tokens: u32, ending_tokens: u32) -> u32 {
        match max_tokens.checked_sub(ending_tokens) {
            None | Some(0) => u32::MAX,
            Some(_) if self.reserve_tokens == 0 => u32::MAX,
            Some(room) => room - self.reserve_tokens.min((room / 4).max(1)),
        }
    }
}

/// The answer of one request since the latest end of its thinking.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    is_guarded: bool,
    /// Its tokens that show something.
    shown: u32,
    /// For each start marker the number of its tokens at the end of the answer.
    matched: Vec<u16>,
}

impl Answer {
    /// Thinking is over. `starts`: number of start markers.
    pub(super) fn begin(&mut self, is_guarded: bool, starts: usize) {
        *self = Self { is_guarded, shown: 0, matched: vec![0; starts] };
    }

    /// Take in a token of the answer. `is_forced`: it belongs to the forced ending.
    pub(super) fn push(&mut self, rules: &AnswerRules, starts: &[Pattern], token: u32, is_forced: bool) {
        if !self.is_guarded {
            return;
        }
        self.shown = self.shown.saturating_add(u32::from(!is_forced && !rules.blank.contains(&token)));
        for (start, matched) in starts.iter().zip(&mut self.matched) {
            start.advance(matched, token);
        }
    }

    /// Whether the answer must not end yet; `None` without a guard.
    pub(super) fn is_due(&self, rules: &AnswerRules) -> Option<bool> {
        (self.is_guarded && rules.min_tokens > 0).then_some(self.shown < rules.min_tokens)
    }

    /// The tokens that would begin thinking. A marker of several tokens is stopped at its last but one: an answer may
    /// begin as a marker does.
    pub(super) fn openers<'a>(&'a self, starts: &'a [Pattern]) -> impl Iterator<Item = u32> + 'a {
        starts.iter().zip(&self.matched).filter_map(|(start, matched)| {
            let tokens = start.tokens();
            let at = usize::from(*matched);
            (tokens.len() == 1 || (at > 0 && at + 2 >= tokens.len())).then(|| tokens[at])
        })
    }
}
