use meridian_policy_sdk::eviction::{Memory, Ranking};

use crate::{BlockId, BlockTier, Eviction, Fault, SessionFacts, SlotKind, ThinkPhase};

/// Orders the eviction candidates within one tier. A policy does not choose the tier.
///
/// The block manager calls it from the thread that finishes a request or runs short of memory, with its lock held: it
/// must neither block nor call the manager. It is called in batches: once with the blocks that a finished request
/// leaves, and once with the live requests of the least critical class when one must be preempted. An empty answer
/// selects the default: blocks oldest first, requests as in [`OwnOrder`]. After an `Err` or a wrong number of keys, the
/// batch uses the default, and the fault is counted. After a panic, nothing has changed.
///
/// ```
/// use meridian_core::{EvictionCandidate, EvictionRanker, Fault, Memory};
///
/// /// Keeps what was reused.
/// struct LeastHits;
///
/// impl EvictionRanker for LeastHits {
///     fn keys(&mut self, _memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault> {
///         keys.extend(candidates.iter().map(|candidate| candidate.hits as f32));
///         Ok(())
///     }
/// }
/// # let mut keys = Vec::new();
/// # LeastHits.keys(&Memory::default(), &[], &mut keys).unwrap();
/// ```
pub trait EvictionRanker: Send {
    /// Write one key per candidate into `keys`, which is empty; `memory` describes the pool. Lower keys go first, NaN
    /// last, equal keys by the default.
    ///
    /// # Errors
    /// A fault costs this batch only.
    fn keys(&mut self, memory: &Memory, candidates: &[EvictionCandidate], keys: &mut Vec<f32>) -> Result<(), Fault>;

    /// Write the keys and the times for which blocks are kept into `ranking`. By default, no block is kept.
    ///
    /// # Errors
    /// As [`EvictionRanker::keys`].
    fn rank(&mut self, memory: &Memory, candidates: &[EvictionCandidate], ranking: &mut Ranking) -> Result<(), Fault> {
        self.keys(memory, candidates, &mut ranking.keys)
    }

    /// Number of the ranking of a call's keys. A wrapper of a replaceable policy must return another number after each
    /// replacement: keys of two rankings are never compared.
    fn ranking(&self) -> u64 {
        0
    }
}

/// An eviction candidate, and the facts about it.
///
/// ```
/// use meridian_core::{BlockId, BlockTier, EvictionCandidate, EvictionSubject};
///
/// let candidate = EvictionCandidate {
///     subject: EvictionSubject::Block(BlockId(9)),
///     tier: BlockTier::ThinkComplete,
///     blocks: 1,
///     position: 4,
///     hits: 0,
///     age_ms: 1500.0,
///     computed_tokens: 16,
///     ..EvictionCandidate::default()
/// };
/// assert!(candidate.tier < BlockTier::ThinkActive);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvictionCandidate {
    /// The block or the request.
    pub subject: EvictionSubject,
    /// Its tier; for a request, the tier of its phase.
    pub tier: BlockTier,
    /// Device blocks that it frees: 1 for a block; for a request, those that no other request attends.
    pub blocks: u32,
    /// A block's distance from the head of its request's chain, blocks; 0 for a request.
    pub position: u32,
    /// Number of times that a block was matched again; 0 for a request.
    pub hits: u32,
    /// Milliseconds since a block was allocated, or since a request began.
    pub age_ms: f32,
    /// Tokens whose KV would be computed again: the tokens of a block, or all computed tokens of a request. 0 when
    /// unknown.
    pub computed_tokens: u32,
    /// Tokens of the chain that used a block last; all tokens of a request. 0 when unknown.
    pub chain_tokens: u32,
    /// Blocks of that chain that no other chain has used since; 0 for a request.
    pub chain_blocks: u32,
    /// Number of times that these were matched again, all together; 0 for a request.
    pub chain_hits: u32,
    /// Whether a block ends beyond the prompt of its chain; false for a request.
    pub is_generated: bool,
    /// The session of a request, or of the request that used a block last.
    pub session: SessionFacts,
    /// Milliseconds since that request ended; 0 while it waits to resume, and for a request.
    pub idle_ms: f32,
    /// Its priority; lower is more urgent.
    pub priority: i32,
    /// Milliseconds that computing the candidate's tokens again takes, learned; 0 when unknown.
    pub recompute_ms: f32,
    /// Phase of a request; prefill for a block.
    pub phase: ThinkPhase,
    /// Number of preemptions of a request; 0 for a block.
    pub preemptions: u32,
    /// Tokens that a request was given in the last step; 0 for a block.
    pub served_tokens: u32,
    /// Whether the prompt of a waiting request has matched a block; false for a request.
    pub is_awaited: bool,
    /// Milliseconds left to keep the service level of a request; infinite without one, and for a block.
    pub level_slack_ms: f32,
}

/// A block with nothing known.
impl Default for EvictionCandidate {
    fn default() -> Self {
        Self {
            subject: EvictionSubject::Block(BlockId(0)),
            tier: BlockTier::ThinkActive,
            blocks: 0,
            position: 0,
            hits: 0,
            age_ms: 0.0,
            computed_tokens: 0,
            chain_tokens: 0,
            chain_blocks: 0,
            chain_hits: 0,
            is_generated: false,
            session: SessionFacts::default(),
            idle_ms: 0.0,
            priority: 0,
            recompute_ms: 0.0,
            phase: ThinkPhase::Prefill,
            preemptions: 0,
            served_tokens: 0,
            is_awaited: false,
            level_slack_ms: f32::INFINITY,
        }
    }
}

/// The kind of an [`EvictionCandidate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EvictionSubject {
    /// A cached block that no live request attends.
    Block(BlockId),
    /// A live request that would be preempted, by the number that its owner gives it.
    Request(u64),
}

/// The default. Within a tier, the least recently used block goes first; of one request, its tail goes before its head,
/// so that the rest is still a prefix. Among requests, the one that loses the fewest computed tokens goes first, then
/// the fewest blocks, then the youngest. Without a known block size, computed tokens count as 0.
///
/// It is the rule of the policy `tiered-lru` without a call: it gives no keys, so the manager's own order holds.
///
/// ```
/// use meridian_core::{EvictionRanker, Memory, OwnOrder};
///
/// let mut keys = Vec::new();
/// OwnOrder.keys(&Memory::default(), &[], &mut keys).unwrap();
/// assert!(keys.is_empty(), "no keys: the manager's own order");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct OwnOrder;

impl EvictionRanker for OwnOrder {
    fn keys(&mut self, _: &Memory, _: &[EvictionCandidate], _: &mut Vec<f32>) -> Result<(), Fault> {
        Ok(())
    }
}

/// Ask `policy` about `candidates`: one key per candidate, or none for the default, and times to keep; and whether the
/// policy failed.
pub fn ranked_or_default(
    policy: &mut dyn EvictionRanker,
    memory: &Memory,
    candidates: &[EvictionCandidate],
) -> (Ranking, bool) {
    let mut ranking = Ranking::default();
    if candidates.is_empty() {
        return (ranking, false);
    }
    let answer = policy
        .rank(memory, candidates, &mut ranking)
        .and_then(|()| Eviction::check(memory, &ranking, candidates.len()));
    if answer.is_err() {
        ranking.clear();
    }
    (ranking, answer.is_err())
}
