/// A sequence of tokens to find in a stream, at a cost of O(1) per token (Knuth, Morris and Pratt 1977).
///
/// ```
/// use meridian_core::Pattern;
///
/// let pattern = Pattern::new(vec![1, 1, 2]).unwrap();
/// let mut matched = 0;
/// assert!(![1, 1, 1].into_iter().any(|token| pattern.advance(&mut matched, token)));
/// assert!(pattern.advance(&mut matched, 2));
/// assert_eq!(Pattern::new(vec![]), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    tokens: Vec<u32>,
    /// Length of the longest proper prefix that is also a suffix, for each prefix.
    fallback: Vec<u16>,
}

impl Pattern {
    /// The pattern of 1 to 65,535 tokens; `None` for any other number.
    #[must_use]
    pub fn new(tokens: Vec<u32>) -> Option<Self> {
        if tokens.is_empty() || tokens.len() > usize::from(u16::MAX) {
            return None;
        }
        let mut pattern = Self { fallback: Vec::with_capacity(tokens.len()), tokens };
        pattern.fallback.push(0);
        let mut matched = 0u16;
        for i in 1..pattern.tokens.len() {
            // Never completes, because it is one token behind.
            pattern.advance(&mut matched, pattern.tokens[i]);
            pattern.fallback.push(matched);
        }
        Some(pattern)
    }

    /// Its tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether so many matched tokens show that the pattern is being written, and not only a token that is common
    /// elsewhere: two of them, or all but one.
    #[inline]
    #[must_use]
    pub fn is_distinctive(&self, matched: u16) -> bool {
        matched >= 2 || (matched == 1 && self.tokens.len() == 2)
    }

    /// Take in one token of the stream. `matched` is the number of tokens of the pattern at the end of the stream: 0 at
    /// the start, and 0 again after a match. Returns true when the pattern is complete.
    ///
    /// # Panics
    /// When `matched` does not come from this method.
    #[inline]
    pub fn advance(&self, matched: &mut u16, token: u32) -> bool {
        let mut at = usize::from(*matched);
        while at > 0 && self.tokens[at] != token {
            at = usize::from(self.fallback[at - 1]);
        }
        at += usize::from(self.tokens[at] == token);
        let is_complete = at == self.tokens.len();
        // At most the length, which fits.
        *matched = if is_complete { 0 } else { at as u16 };
        is_complete
    }
}
