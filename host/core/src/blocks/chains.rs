//! The chains that used the blocks of a pool last: what eviction policies see of requests and sessions that are gone.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap};

use foldhash::fast::FixedState;

use crate::{EvictionCandidate, SessionFacts};

/// A session stays warm for this many times as long as computing its tokens again takes.
pub(crate) const WARM: f64 = 5.0;

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

impl ChainFacts {
    /// For how long its session stays warm, milliseconds.
    fn warm_ms(&self) -> f64 {
        WARM * f64::from(self.token_ms) * f64::from(self.tokens)
    }
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
    /// Those of the blocks that no request attends.
    cached: u32,
    /// Its session may soon go on with them.
    is_warm: bool,
    /// Tells the chain from earlier ones of its number.
    serial: u64,
}

/// Chains with at least one block; there are at most as many as blocks.
#[derive(Debug, Default)]
pub(super) struct Chains {
    chains: Vec<Chain>,
    free: Vec<ChainId>,
    /// Blocks of the chains of each session.
    by_session: HashMap<u32, u32, FixedState>,
    /// When each warm chain is no longer warm, milliseconds, the earliest first; with its serial number.
    cooling: BinaryHeap<Reverse<(u64, u64, ChainId)>>,
    /// Blocks of warm chains that no request attends.
    warm: u32,
    last_serial: u64,
}

impl Chains {
    /// A chain, which has no blocks yet. Follow with [`Chains::join`], and [`Chains::settle`].
    pub(super) fn begin(&mut self, facts: ChainFacts) -> ChainId {
        self.last_serial += 1;
        let serial = self.last_serial;
        let cools_ms = facts.ended_ms.map(|ended_ms| ended_ms + facts.warm_ms());
        // A request without a session of its own may be the only one of its kind.
        let cools_ms =
            cools_ms.filter(|_| facts.session.session > 0 && (facts.session.is_named || facts.session.turn > 1));
        let chain = Chain { facts, is_warm: cools_ms.is_some(), serial, ..Chain::default() };
        let id = match self.free.pop() {
            Some(id) => {
                self.chains[id as usize - 1] = chain;
                id
            }
            None => {
                self.chains.push(chain);
                self.chains.len() as ChainId
            }
        };
        if let Some(cools_ms) = cools_ms {
            self.cooling.push(Reverse((cools_ms as u64, serial, id)));
        }
        // Nobody may ask which are warm, and most of them may be gone.
        if self.cooling.len() > 2 * self.chains.len() {
            let chains = &self.chains;
            self.cooling.retain(|Reverse((_, serial, id))| chains[*id as usize - 1].serial == *serial);
        }
        id
    }

    /// A block with so many hits is of this chain now.
    pub(super) fn join(&mut self, id: ChainId, hits: u32) {
        let Some(chain) = self.of(id) else { return };
        chain.blocks += 1;
        chain.hits = chain.hits.saturating_add(hits);
        let session = chain.facts.session.session;
        if session > 0 {
            *self.by_session.entry(session).or_default() += 1;
        }
    }

    /// A block with so many hits is no longer of this chain.
    pub(super) fn leave(&mut self, id: ChainId, hits: u32) {
        let Some(chain) = self.of(id) else { return };
        chain.blocks -= 1;
        chain.hits = chain.hits.saturating_sub(hits);
        let session = chain.facts.session.session;
        if let Entry::Occupied(mut blocks) = self.by_session.entry(session) {
            *blocks.get_mut() -= 1;
            if *blocks.get() == 0 {
                blocks.remove();
            }
        }
        self.settle(id);
    }

    /// Forget a chain that has no block.
    pub(super) fn settle(&mut self, id: ChainId) {
        if self.of(id).is_some_and(|chain| chain.blocks == 0) {
            self.free.push(id);
        }
    }

    /// Count a block of the chain as cached, or no longer: a request attends it again, or its contents are gone.
    pub(super) fn set_cached(&mut self, id: ChainId, is_cached: bool) {
        let Some(chain) = self.of(id) else { return };
        let is_warm = chain.is_warm;
        let counted = if is_cached { u32::wrapping_add } else { u32::wrapping_sub };
        chain.cached = counted(chain.cached, 1);
        if is_warm {
            self.warm = counted(self.warm, 1);
        }
    }

    /// Blocks that no request attends of sessions that are warm at that time, which does not go back. One that `waits` for a
    /// sub-agent stays warm as long, and then for its time again.
    pub(super) fn warm(&mut self, now_ms: f64, waits: impl Fn(u32) -> bool) -> u32 {
        while let Some(Reverse((cools_ms, serial, id))) = self.cooling.peek().copied()
            && cools_ms as f64 <= now_ms
        {
            self.cooling.pop();
            if let Some(chain) = self.of(id).filter(|chain| chain.serial == serial) {
                let warm_ms = chain.facts.warm_ms();
                if waits(chain.facts.session.session) && warm_ms >= 1.0 {
                    self.cooling.push(Reverse(((now_ms + warm_ms) as u64, serial, id)));
                    continue;
                }
                chain.is_warm = false;
                let cached = chain.cached;
                self.warm -= cached;
            }
        }
        self.warm
    }

    /// Blocks that requests of this session used last.
    pub(super) fn of_session(&self, session: u32) -> u32 {
        self.by_session.get(&session).copied().unwrap_or(0)
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

    /// Check the counts of cached blocks, given the chain of each; for an audit.
    pub(super) fn audit(&self, cached: impl Iterator<Item = ChainId>) -> Result<(), String> {
        let mut counts = vec![0; self.chains.len() + 1];
        cached.for_each(|id| counts[id as usize] += 1);
        let of = |chain: &Chain, counted: u32| if chain.is_warm { counted } else { 0 };
        let pairs = self.chains.iter().zip(&counts[1..]);
        let warm: u32 = pairs.clone().map(|(chain, counted)| of(chain, *counted)).sum();
        match pairs.clone().find(|(chain, counted)| chain.blocks > 0 && chain.cached != **counted) {
            Some((chain, counted)) => Err(format!("{counted} cached blocks of a chain, here {}", chain.cached)),
            None if warm != self.warm => Err(format!("{warm} cached blocks of warm sessions, here {}", self.warm)),
            None => Ok(()),
        }
    }

    /// Number of their blocks; for an audit.
    pub(super) fn blocks(&self) -> usize {
        self.chains.iter().map(|chain| chain.blocks as usize).sum()
    }

    /// Fill in what is known of a block by its chain; `end_tokens` are those of the prefix that it ends.
    pub(super) fn describe(&self, id: ChainId, end_tokens: u32, now_ms: f64, candidate: &mut EvictionCandidate) {
        let Some(Chain { facts, blocks, hits, .. }) = (id as usize).checked_sub(1).and_then(|at| self.chains.get(at))
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
