/// Tokens that must repeat before a repetition counts.
const GRAM: usize = 24;
/// Tokens to remember: a power of two.
const REMEMBERED: usize = 1024;
/// Longest period, so that the tokens one period before a gram are remembered.
const MAX_PERIOD: usize = REMEMBERED - GRAM;
/// Buckets of grams: a power of two.
const BUCKETS: usize = 1024;
/// Base of the rolling hash: any odd number with bits all over.
const BASE: u64 = 0x9e37_79b9_7f4a_7c15;

/// Repeated tokens at the end of a stream.
///
/// ```
/// use meridian_core::budget::Repeated;
///
/// // The same 300 tokens, five times: the first time repeats nothing.
/// let repeated = Repeated { tokens: 1200, period: 300 };
/// assert!(repeated.is_loop());
/// assert!(!Repeated { tokens: 1199, ..repeated }.is_loop());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repeated {
    /// How many of the latest tokens, in a row, equal the token `period` tokens before them; 0 below 24.
    pub tokens: u32,
    /// That distance, tokens: from 1 to 1,000, and 0 without a repetition.
    pub period: u32,
}

impl Repeated {
    /// Repeated tokens of a loop, at least. In source code and tables, exact repetitions of up to 677 tokens were
    /// found.
    pub const LOOP_TOKENS: u32 = 1024;
    /// Repetitions of a loop's unit after its first occurrence, at least. A model that checks its result often derives
    /// it again in the same words, up to three times.
    pub const LOOP_REPEATS: u32 = 4;

    /// Whether this is certainly a loop: at least [`Repeated::LOOP_TOKENS`] repeated tokens, and at least
    /// [`Repeated::LOOP_REPEATS`] periods of them.
    #[must_use]
    pub fn is_loop(self) -> bool {
        let Self { tokens, period } = self;
        tokens >= Self::LOOP_TOKENS && tokens >= Self::LOOP_REPEATS * period
    }
}

/// Finds exact repetitions at the end of a stream of tokens, at a cost of O(1) a token on average and in bounded memory
/// (10 KiB). Tokens chosen so that their hashes collide cost up to some 24,000 comparisons each, and change no result.
///
/// A repetition begins when the latest 24 tokens have occurred before, at most 1,000 tokens ago: the distance to the
/// latest occurrence is its period. It goes on while each token equals the token one period before, whatever else
/// occurred in between, and its length is that of the longest end of the stream with this period (as far as 1,024 tokens
/// show, where it begins).
///
/// A unit that repeats back to back is found, at the latest, when 24 tokens have come again that occur only once in the
/// unit: any 24 tokens, if the unit is not longer. A unit with a number that changes is no repetition.
///
/// Hashes of 24 tokens (Rabin and Karp 1987) name the places to compare; a comparison of the tokens decides.
///
/// ```
/// use meridian_core::budget::{Repeated, Repetition};
///
/// let mut repetition = Repetition::default();
/// (0..100).for_each(|token| repetition.push(token));
/// assert_eq!(repetition.found(), Repeated::default());
/// (0..90).for_each(|token| repetition.push(40 + token % 30));
/// assert_eq!(repetition.found(), Repeated { tokens: 60, period: 30 });
/// ```
#[derive(Clone, Debug, Default)]
pub struct Repetition {
    /// The latest tokens, in a ring once it is full.
    tokens: Vec<u32>,
    /// Of the gram that ends at each of them: the distance to the previous one in its bucket, 0 without one in reach.
    before: Vec<u16>,
    /// By bucket: the number of tokens at the end of its latest gram, 0 without one.
    latest: Vec<u32>,
    /// Number of tokens.
    taken: u32,
    /// Hash of the latest gram.
    hash: u64,
    found: Repeated,
}

impl Repetition {
    /// Take in the next token.
    pub fn push(&mut self, token: u32) {
        let leaves = if self.taken as usize >= GRAM { u64::from(self.back(GRAM - 1)) + 1 } else { 0 };
        self.hash = self.hash.wrapping_mul(BASE).wrapping_add(u64::from(token) + 1);
        self.hash = self.hash.wrapping_sub(leaves.wrapping_mul(const { BASE.wrapping_pow(GRAM as u32) }));
        let slot = self.taken as usize % REMEMBERED;
        if slot == self.tokens.len() {
            self.tokens.push(token);
            self.before.push(0);
        }
        self.tokens[slot] = token;
        self.taken = self.taken.saturating_add(1);
        let Repeated { tokens, period } = self.found;
        if period > 0 && token == self.back(period as usize) {
            self.found.tokens = tokens.saturating_add(1);
        } else {
            self.found = self.find().unwrap_or_default();
        }
        self.note(slot);
    }

    /// The repetition at the end of the tokens so far.
    #[must_use]
    pub fn found(&self) -> Repeated {
        self.found
    }

    /// Bytes of memory on the heap.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let Self { tokens, before, latest, taken: _, hash: _, found: _ } = self;
        4 * tokens.capacity() + 2 * before.capacity() + 4 * latest.capacity()
    }

    /// The token that `distance` others follow.
    fn back(&self, distance: usize) -> u32 {
        self.tokens[(self.taken as usize - 1 - distance) % REMEMBERED]
    }

    fn bucket(&self) -> usize {
        // The high bits depend on every token.
        (self.hash.wrapping_mul(BASE) >> (u64::BITS - const { BUCKETS.ilog2() })) as usize
    }

    /// The latest earlier occurrence of the latest gram, and how much repeats since.
    fn find(&self) -> Option<Repeated> {
        let mut at = *self.latest.get(self.bucket())?;
        while at > 0 {
            let period = (self.taken - at) as usize;
            if period > MAX_PERIOD {
                return None;
            }
            let remembered = self.tokens.len() - period;
            let tokens = (0..remembered).take_while(|i| self.back(*i) == self.back(i + period)).count();
            if tokens >= GRAM {
                return Some(Repeated { tokens: tokens as u32, period: period as u32 });
            }
            let before = self.before[(at as usize - 1) % REMEMBERED];
            at = if before == 0 { 0 } else { at - u32::from(before) };
        }
        None
    }

    /// Note that a gram ends at the latest token, in this slot.
    fn note(&mut self, slot: usize) {
        if (self.taken as usize) < GRAM {
            return;
        }
        if self.latest.is_empty() {
            self.latest = vec![0; BUCKETS];
        }
        let bucket = self.bucket();
        let latest = &mut self.latest[bucket];
        let distance = self.taken - *latest;
        let is_in_reach = *latest > 0 && distance as usize <= MAX_PERIOD;
        // Within 1,000, if in reach.
        self.before[slot] = if is_in_reach { distance as u16 } else { 0 };
        *latest = self.taken;
    }
}
