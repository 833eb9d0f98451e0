//! One request while it is simulated.

use super::EngineConfig;
use super::content::{Chain, Content};
use super::handoff::Move;
use super::pool::Pool;
use crate::metrics::Reader;

/// Token ids of the simulated model: the only ones that mean something to the phase router.
pub(super) const THINK_START: u32 = 1;
pub(super) const THINK_END: u32 = 2;
pub(super) const ANY_TOKEN: u32 = 3;

/// What the run needs to know of a request beyond its tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Facts {
    /// Position in the trace.
    pub(super) index: usize,
    pub(super) arrival_ms: f64,
    /// Group of requests that metrics are kept of.
    pub(super) batch: u16,
    /// Position of its tenant.
    pub(super) tenant: u32,
    /// Thinking that was planned, without the end marker.
    pub(super) think_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) session: Option<u64>,
    /// Of a request of a closed loop.
    pub(super) turn: Option<SessionTurn>,
}

/// What a recorded session tells of one of its requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct SessionTurn {
    /// Position in its session.
    pub(super) turn: u32,
    pub(super) stopped_for_tool: bool,
    /// Tokens from the first on that earlier requests of the session had in full blocks.
    pub(super) known_tokens: u32,
    /// The same that its next request has.
    pub(super) next_tokens: u32,
    /// From its end to the arrival of the next; infinite for the last.
    pub(super) next_gap_ms: f64,
}

/// When a request reached what its user waits for, milliseconds of simulated time; NaN before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) first_token_ms: f64,
    pub(super) think_end_ms: f64,
    pub(super) first_output_ms: f64,
    pub(super) last_token_ms: f64,
}

#[derive(Debug)]
pub(super) struct Live {
    pub(super) facts: Facts,
    pub(super) content: Content,
    pub(super) chain: Chain,
    pub(super) blocks: Vec<u32>,
    /// Those in which a hybrid model keeps its state.
    pub(super) state: Vec<u32>,
    pub(super) prompt_tokens: u32,
    /// Prompt, thinking and answer so far.
    pub(super) known_tokens: u32,
    /// Of these, those whose KV is computed or being computed.
    pub(super) computed_tokens: u32,
    /// Generated while thinking, the end marker included.
    pub(super) think_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) thinks: bool,
    /// Names its thinking in reports and orders.
    pub(super) think_key: u64,
    /// Most tokens of thinking that something has ordered.
    pub(super) think_limit: u32,
    pub(super) preemptions: u32,
    pub(super) times: Times,
    pub(super) reader: Reader,
    /// Its way between engines.
    pub(super) moves: Move,
}

impl Live {
    pub(super) fn new(facts: Facts, content: Content, prompt_tokens: u32) -> Self {
        Self {
            facts,
            content,
            chain: Chain::default(),
            blocks: Vec::new(),
            state: Vec::new(),
            prompt_tokens,
            known_tokens: prompt_tokens,
            computed_tokens: 0,
            think_tokens: 0,
            output_tokens: 0,
            thinks: facts.think_tokens > 0,
            think_key: 0,
            think_limit: u32::MAX,
            preemptions: 0,
            times: Times {
                first_token_ms: f64::NAN,
                think_end_ms: f64::NAN,
                first_output_ms: f64::NAN,
                last_token_ms: f64::NAN,
            },
            reader: Reader::default(),
            moves: Move::default(),
        }
    }

    /// Its longest cached prefix into `found`, and where the chain of its keys stands after it.
    pub(super) fn find_prefix(&self, pool: &Pool, config: &EngineConfig, found: &mut Vec<u32>) -> Chain {
        let mut chain = Chain::default();
        found.clear();
        if config.prefix_caching {
            // The last token is computed in any case: it gives the first logits.
            while (chain.blocks + 1) * config.block_tokens < self.known_tokens {
                let mut next = chain;
                let key = self.content.next(&mut next, config.block_tokens, self.think_tokens);
                let Some(block) = pool.find(key) else { break };
                found.push(block);
                chain = next;
            }
        }
        chain
    }

    /// The token that the model generates next.
    pub(super) fn next_token(&self) -> u32 {
        if self.thinks && self.think_tokens >= self.facts.think_tokens.min(self.think_limit) {
            THINK_END
        } else {
            ANY_TOKEN
        }
    }

    /// 0 in prefill, 1 thinking, 2 answering.
    pub(super) fn phase(&self) -> usize {
        if self.times.first_token_ms.is_nan() { 0 } else { 1 + usize::from(!self.thinks) }
    }

    pub(super) fn is_over(&self) -> bool {
        !self.thinks && self.output_tokens >= self.facts.output_tokens
    }

    /// Its thinking has ended in this step: whether another engine is to answer.
    pub(super) fn thought(&mut self) {
        let blocks = self.blocks.len() as u32;
        self.moves.leaves = self.moves.offered.take().is_some_and(|(least, most)| (least..=most).contains(&blocks));
    }

    /// Whether it is over for this engine.
    pub(super) fn is_over_here(&self) -> bool {
        self.moves.leaves || self.is_over()
    }
}
