//! What the KV blocks of a request hold, as far as others can hold the same: a key for each full block, equal when the tokens
//! of it and of all blocks before it are equal. vLLM hashes tokens (vllm/v1/core/kv_cache_utils.py: `hash_block_tokens`); here
//! a run of tokens that belong together has an id.

use std::collections::HashMap;
use std::rc::Rc;

use foldhash::fast::FixedState;

use crate::trace::{Prefix, TraceRequest};

/// Tokens that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    id: u64,
    tokens: u32,
}

/// The tokens of one request.
#[derive(Clone, Debug)]
pub(super) struct Content {
    uid: u64,
    prompt: Rc<[Segment]>,
}

/// Where the chain of a request's keys stands.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Chain {
    key: u64,
    pub(super) blocks: u32,
    segment: u32,
    used: u32,
}

const THINK: u64 = 1;
const ANSWER: u64 = 2;
const RANGES: u64 = 4;

impl Content {
    /// Go on to the next block. `think_tokens` are those generated so far, the end marker included.
    pub(super) fn next(&self, chain: &mut Chain, block_tokens: u32, think_tokens: u32) -> u64 {
        let mut key = chain.key;
        let mut left = block_tokens;
        while left > 0 {
            let position = chain.segment as usize;
            let (segment, length) = match self.prompt.get(position) {
                Some(segment) => (segment.id, segment.tokens),
                None if position == self.prompt.len() => (mix(self.uid, THINK), think_tokens),
                None => (mix(self.uid, ANSWER), u32::MAX),
            };
            let piece = left.min(length.saturating_sub(chain.used));
            if piece > 0 {
                key = mix(mix(key, segment), u64::from(chain.used) << 32 | u64::from(piece));
            }
            left -= piece;
            chain.used += piece;
            if left > 0 {
                (chain.segment, chain.used) = (chain.segment + 1, 0);
            }
        }
        chain.key = key;
        chain.blocks += 1;
        key
    }
}

/// The conversations that requests are turns of, and the blocks that they share.
#[derive(Debug, Default)]
pub(super) struct Contents {
    sessions: HashMap<u64, Vec<Segment>, FixedState>,
    next_uid: u64,
}

impl Contents {
    /// The content of a request. A turn's prompt is what its conversation has said so far, cut or filled up to its length.
    pub(super) fn of(&mut self, request: &TraceRequest) -> Content {
        self.next_uid += 1;
        let uid = mix(0x4d65_7269_6469_616e, self.next_uid);
        let own = mix(uid, 0);
        let mut left = request.prompt_tokens;
        let mut prompt = Vec::new();
        let mut push = |id: u64, tokens: u32| {
            let tokens = tokens.min(left);
            left -= tokens;
            if tokens > 0 {
                prompt.push(Segment { id, tokens });
            }
        };
        match &request.prefix {
            Prefix::None => {}
            Prefix::Blocks { tokens, ids } => ids.iter().for_each(|id| push(mix(*id, 3), *tokens)),
            Prefix::Ranges { session, tokens, ranges } => {
                let owner = mix(*session, RANGES);
                let ids = ranges.iter().flat_map(|[first, last]| *first..=*last);
                ids.for_each(|id| push(mix(owner, u64::from(id)), *tokens));
            }
            Prefix::Session { id, .. } => {
                for segment in self.sessions.get(id).into_iter().flatten() {
                    push(segment.id, segment.tokens);
                }
            }
        }
        push(own, u32::MAX);
        Content { uid, prompt: prompt.into() }
    }

    /// The turn is over: the next one's prompt holds its prompt and its answer, and its thinking when that is kept.
    pub(super) fn turn_over(&mut self, session: u64, content: &Content, think: u32, answer: u32, keeps_thinking: bool) {
        let history = self.sessions.entry(session).or_default();
        history.clear();
        history.extend_from_slice(&content.prompt);
        if keeps_thinking {
            history.push(Segment { id: mix(content.uid, THINK), tokens: think });
        }
        history.push(Segment { id: mix(content.uid, ANSWER), tokens: answer });
    }
}

/// Finaliser of MurmurHash3 over a combination of two words.
pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a.rotate_left(25) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(content: &Content, blocks: usize, think: u32) -> Vec<u64> {
        let mut chain = Chain::default();
        (0..blocks).map(|_| content.next(&mut chain, 16, think)).collect()
    }

    fn turn(prompt_tokens: u32, turn: u32) -> TraceRequest {
        TraceRequest { prompt_tokens, prefix: Prefix::Session { id: 7, turn }, ..TraceRequest::default() }
    }

    #[test]
    fn a_turn_finds_the_prompt_and_the_answer_of_the_one_before() {
        for keeps in [false, true] {
            let mut contents = Contents::default();
            let first = contents.of(&turn(64, 0));
            contents.turn_over(7, &first, 32, 48, keeps);
            let second = contents.of(&turn(200, 1));
            let (before, after) = (keys(&first, 9, 32), keys(&second, 9, 0));
            let same = before.iter().zip(&after).take_while(|(a, b)| a == b).count();
            // Four blocks of prompt; the thinking parts them unless the history has it.
            assert_eq!(same, if keeps { 9 } else { 4 });
        }
    }

    #[test]
    fn without_thinking_the_answer_is_found() {
        let mut contents = Contents::default();
        let first = contents.of(&turn(64, 0));
        contents.turn_over(7, &first, 0, 48, false);
        let second = contents.of(&turn(200, 1));
        assert_eq!(keys(&first, 7, 0), keys(&second, 7, 0));
        assert_ne!(keys(&first, 8, 0)[7], keys(&second, 8, 0)[7]);
    }

    #[test]
    fn requests_without_a_prefix_share_nothing() {
        let mut contents = Contents::default();
        let request = TraceRequest { prompt_tokens: 64, ..TraceRequest::default() };
        assert_ne!(keys(&contents.of(&request), 1, 0), keys(&contents.of(&request), 1, 0));
    }

    #[test]
    fn blocks_with_equal_ids_are_equal_up_to_the_first_that_differs() {
        let mut contents = Contents::default();
        let request = |ids: &[u64]| TraceRequest {
            prompt_tokens: 1536,
            prefix: Prefix::Blocks { tokens: 512, ids: ids.into() },
            ..TraceRequest::default()
        };
        let (a, b) = (contents.of(&request(&[1, 2, 3])), contents.of(&request(&[1, 4, 3])));
        let (a, b) = (keys(&a, 96, 0), keys(&b, 96, 0));
        assert_eq!(a.iter().zip(&b).filter(|(a, b)| a == b).count(), 32);
    }
}
