use meridian_policy_sdk::Phase;

/// Longest marker, in tokens. The longest known (Hunyuan-A13B) has seven.
const MAX_MARKER_TOKENS: usize = 64;
/// Most whitespace tokens skipped at the end of a prompt, or before a marker that the model generates.
const MAX_PADDING_TOKENS: usize = 8;

/// How a model marks its thinking: token sequences, resolved from text with the model's own tokenizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Markers {
    starts: Vec<Sequence>,
    ends: Vec<Sequence>,
    padding: Vec<u32>,
}

impl Markers {
    /// Markers that start thinking (any of `starts`) and end it (any of `ends`), and the whitespace tokens that may stand
    /// around them. Empty sequences, and those over 64 tokens, are dropped. Without any start or without any end the
    /// model is single-phase: everything it generates is output.
    #[must_use]
    pub fn new(starts: Vec<Vec<u32>>, ends: Vec<Vec<u32>>, padding: Vec<u32>) -> Self {
        let usable = |sequences: Vec<Vec<u32>>| -> Vec<Sequence> {
            sequences.into_iter().filter(|s| (1..=MAX_MARKER_TOKENS).contains(&s.len())).map(Sequence::new).collect()
        };
        let (starts, ends) = (usable(starts), usable(ends));
        if starts.is_empty() || ends.is_empty() {
            return Self::default();
        }
        Self { starts, ends, padding }
    }

    /// Whether the model thinks at all.
    #[must_use]
    pub fn is_thinking_model(&self) -> bool {
        !self.starts.is_empty()
    }

    fn is_padding(&self, token: u32) -> bool {
        self.padding.contains(&token)
    }

    /// What the end of a templated prompt says. Only the end counts: a marker inside user text is always followed by the
    /// template's own tokens.
    fn opening(&self, prompt: &[u32]) -> Opening {
        if !self.is_thinking_model() {
            return Opening::Output;
        }
        let padding = prompt.iter().rev().take(MAX_PADDING_TOKENS).take_while(|token| self.is_padding(**token)).count();
        for trimmed in [prompt, &prompt[..prompt.len() - padding]] {
            if self.starts.iter().any(|start| trimmed.ends_with(&start.tokens)) {
                return Opening::Think;
            }
            if self.ends.iter().any(|end| trimmed.ends_with(&end.tokens)) {
                return Opening::Output;
            }
        }
        Opening::Undecided
    }
}

/// A token sequence with its failure function (Knuth, Morris and Pratt 1977), so that a match costs O(1) a token.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sequence {
    tokens: Vec<u32>,
    fallback: Vec<u8>,
}

impl Sequence {
    fn new(tokens: Vec<u32>) -> Self {
        let mut fallback = vec![0u8; tokens.len()];
        let mut matched = 0usize;
        for i in 1..tokens.len() {
            while matched > 0 && tokens[i] != tokens[matched] {
                matched = usize::from(fallback[matched - 1]);
            }
            matched += usize::from(tokens[i] == tokens[matched]);
            fallback[i] = u8::try_from(matched).expect("a marker has at most 64 tokens");
        }
        Self { tokens, fallback }
    }

    /// Advance `matched` by `token`; true when the sequence is complete.
    fn advance(&self, matched: &mut u8, token: u32) -> bool {
        let mut at = usize::from(*matched);
        while at > 0 && self.tokens[at] != token {
            at = usize::from(self.fallback[at - 1]);
        }
        at += usize::from(self.tokens[at] == token);
        let complete = at == self.tokens.len();
        *matched = if complete { 0 } else { u8::try_from(at).expect("a marker has at most 64 tokens") };
        complete
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Opening {
    Think,
    Output,
    Undecided,
}

/// Where one request is between the start and the end of its thinking. One way: once the output has begun, no marker
/// moves the request any more.
#[derive(Clone, Debug)]
pub struct PhaseTracker {
    stage: Stage,
    /// How far each marker sought in this stage has matched.
    matched: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing but padding and the beginning of a start marker was generated.
    Opening {
        padding: u8,
    },
    Think,
    Output,
}

impl PhaseTracker {
    /// The tracker of a request with this templated prompt.
    #[must_use]
    pub fn new(markers: &Markers, prompt: &[u32]) -> Self {
        let (stage, sought) = match markers.opening(prompt) {
            Opening::Think => (Stage::Think, markers.ends.len()),
            Opening::Output => (Stage::Output, 0),
            Opening::Undecided => (Stage::Opening { padding: 0 }, markers.starts.len()),
        };
        Self { stage, matched: vec![0; sought] }
    }

    /// Phase of the next token. While it is open whether the model will think, it counts as thinking: no visible answer
    /// has begun.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.stage {
            Stage::Opening { .. } | Stage::Think => Phase::Think,
            Stage::Output => Phase::Output,
        }
    }

    /// Take in one generated token; returns the phase the token belongs to. A marker belongs to thinking.
    pub fn token(&mut self, markers: &Markers, token: u32) -> Phase {
        match self.stage {
            Stage::Output => Phase::Output,
            Stage::Think => {
                if advance_any(&markers.ends, &mut self.matched, token) {
                    self.stage = Stage::Output;
                }
                Phase::Think
            }
            Stage::Opening { padding } => {
                if advance_any(&markers.starts, &mut self.matched, token) {
                    self.stage = Stage::Think;
                    self.matched = vec![0; markers.ends.len()];
                    Phase::Think
                } else if self.matched.iter().any(|matched| *matched > 0) {
                    Phase::Think
                } else if markers.is_padding(token) && usize::from(padding) < MAX_PADDING_TOKENS {
                    self.stage = Stage::Opening { padding: padding + 1 };
                    Phase::Think
                } else {
                    // The model answers without thinking.
                    self.stage = Stage::Output;
                    Phase::Output
                }
            }
        }
    }
}

fn advance_any(sequences: &[Sequence], matched: &mut [u8], token: u32) -> bool {
    let mut complete = false;
    for (sequence, matched) in sequences.iter().zip(matched) {
        complete |= sequence.advance(matched, token);
    }
    complete
}
