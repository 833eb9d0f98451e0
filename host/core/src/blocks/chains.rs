//! The chains that used the blocks of a pool last: what eviction policies see of requests and sessions that are gone.

use crate::{EvictionCandidate, SessionFacts};

/// The facts about a request whose chain of blocks is released; [`EngineMirror::chain_ends`](crate::EngineMirror::chain_ends)
/// gives them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ChainFacts {
    /// Its tokens: prompt and generated.
    pub tokens: u32,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// The client's priority; lower is more urgent.
    pub priority: i32,
    /// Learned time of computing one token again, milliseconds; 0 when unknown.
    pub token_ms: f32,
    /// When the request ended, milliseconds; `None` when it was preempted, and resumes.
    pub ended_ms: Option<f64>,
    /// Its session.
    pub session: SessionFacts,
}

/// Number of a chain in [`Chains`]; 0 for none.
pub(super) type ChainId = u32;

#[derive(Debug, Default)]
struct Chain {
    facts: ChainFacts,
    /// Blocks whose last chain it is.
    blocks: u32,
    /// Hits of these.
    hits: u32,
}

/// Chains with at least one block; there are at most as many as blocks.
#[derive(Debug, Default)]
pub(super) struct Chains {
    chains: Vec<Chain>,
    free: Vec<ChainId>,
}

impl Chains {
    /// A chain, which has no blocks yet. Follow with [`Chains::join`], and [`Chains::settle`].
    pub(super) fn begin(&mut self, facts: ChainFacts) -> ChainId {
        let chain = Chain { facts, ..Chain::default() };
        match self.free.pop() {
            Some(id) => {
                self.chains[id as usize - 1] = chain;
                id
            }
            None => {
                self.chains.push(chain);
                self.chains.len() as ChainId
            }
        }
    }

    /// A block with so many hits is of this chain now.
    pub(super) fn join(&mut self, id: ChainId, hits: u32) {
        if let Some(chain) = self.of(id) {
            chain.blocks += 1;
            chain.hits = chain.hits.saturating_add(hits);
        }
    }

    /// A block with so many hits is no longer of this chain.
    pub(super) fn leave(&mut self, id: ChainId, hits: u32) {
        let Some(chain) = self.of(id) else { return };
        chain.blocks -= 1;
        chain.hits = chain.hits.saturating_sub(hits);
        self.settle(id);
    }

    /// Forget a chain that has no block.
    pub(super) fn settle(&mut self, id: ChainId) {
        if self.of(id).is_some_and(|chain| chain.blocks == 0) {
            self.free.push(id);
        }
    }

    /// A block of the chain was matched again.
    pub(super) fn matched(&mut self, id: ChainId) {
        if let Some(chain) = self.of(id) {
            chain.hits = chain.hits.saturating_add(1);
        }
    }

    /// The facts of a chain.
    pub(super) fn facts(&self, id: ChainId) -> Option<&ChainFacts> {
        self.chains.get((id as usize).checked_sub(1)?).map(|chain| &chain.facts)
    }

    /// Number of chains with blocks.
    pub(super) fn len(&self) -> usize {
        self.chains.len() - self.free.len()
    }

    /// Number of their blocks; for an audit.
    pub(super) fn blocks(&self) -> usize {
        self.chains.iter().map(|chain| chain.blocks as usize).sum()
    }

    /// Fill in what is known of a block by its chain; `end_tokens` are those of the prefix that it ends.
    pub(super) fn describe(&self, id: ChainId, end_tokens: u32, now_ms: f64, candidate: &mut EvictionCandidate) {
        let Some(Chain { facts, blocks, hits }) = (id as usize).checked_sub(1).and_then(|at| self.chains.get(at))
        else {
            return;
        };
        let ChainFacts { tokens, prompt_tokens, priority, token_ms, ended_ms, session } = *facts;
        candidate.chain_tokens = tokens;
        candidate.chain_blocks = *blocks;
        candidate.chain_hits = *hits;
        candidate.is_generated = end_tokens > prompt_tokens;
        candidate.session = session;
        candidate.idle_ms = ended_ms.map_or(0.0, |ended_ms| (now_ms - ended_ms).max(0.0) as f32);
        candidate.is_awaited = ended_ms.is_none();
        candidate.priority = priority;
        candidate.recompute_ms = token_ms * candidate.computed_tokens as f32;
    }

    fn of(&mut self, id: ChainId) -> Option<&mut Chain> {
        self.chains.get_mut((id as usize).checked_sub(1)?)
    }
}
