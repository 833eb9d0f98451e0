//! The units in which an engine computes its requests: a decode, a state block, a whole prompt.

use super::EngineFacts;
use crate::table::RequestState;

/// The units of one step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Units {
    /// Of a decode.
    decode_tokens: u32,
    /// Of the whole step, at most.
    step_tokens: u32,
    /// A part of a prompt ends with a multiple of this, if the engine says so.
    state_block: Option<u32>,
}

impl Units {
    pub(super) fn new(facts: &EngineFacts, state_block: Option<u32>) -> Self {
        Self { decode_tokens: facts.decode_tokens.max(1), step_tokens: facts.token_budget.max(1), state_block }
    }

    /// The fewest tokens of a request that the engine can compute in a step, never more than a step has.
    pub(super) fn least(self, row: &RequestState) -> u32 {
        let needed = row.needed_tokens(self.decode_tokens);
        let least = match self.state_block {
            _ if row.needs_whole_prefill(self.decode_tokens) => needed,
            Some(block) if needed > self.decode_tokens => needed.min(block - row.computed_tokens() % block),
            _ => self.decode_tokens,
        };
        least.min(self.step_tokens)
    }

    /// The tokens of a request that the engine computes in a step that has `most` for it.
    pub(super) fn within(self, row: &RequestState, most: u32) -> u32 {
        let needed = row.needed_tokens(self.decode_tokens);
        let least = self.least(row);
        let is_whole = row.needs_whole_prefill(self.decode_tokens);
        match self.state_block {
            _ if most >= needed => needed,
            Some(block) if needed > self.decode_tokens && !is_whole => {
                if most < least {
                    0
                } else {
                    most - (most - least) % block
                }
            }
            _ if is_whole && most < least => 0,
            _ => most,
        }
    }

    /// The same for about `tokens`: at least one unit.
    pub(super) fn near(self, row: &RequestState, tokens: u32) -> u32 {
        let half = self.state_block.map_or(0, |block| block / 2);
        self.within(row, tokens.saturating_add(half)).max(self.least(row))
    }
}
