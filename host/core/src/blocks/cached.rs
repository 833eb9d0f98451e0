//! The order of eviction for an engine with its own block pool. One long file: each operation keeps the same three
//! structures (entries, order, chains) in step.

use std::collections::VecDeque;

use meridian_policy_sdk::eviction::{Memory, Subject};

use super::chains::{ChainFacts, ChainId, Chains};
use super::order::{Epochs, EvictionOrder, Place, REKEYED_AT_ONCE, Rank, Ranked, RankingId, UNKNOWN};
use super::policy::ranked_or_default;
use crate::{BlockId, BlockTier, EvictionCandidate, EvictionRanker, EvictionSubject};

/// Mirrors the free blocks of an engine's own pool: which blocks a prompt may still match, and the order in which they
/// are evicted. The engine allocates and frees; it reports its actions and asks which blocks to evict first.
///
/// The engine's queue hands out empty blocks before cached ones, and cached ones in the order in which they were freed.
/// While the policy gives equal keys, the mirror has the same order; otherwise, [`CachedBlocks::choose`] returns the
/// blocks to hand out instead. After a change of the policy, blocks that the previous policy ranked go first, until
/// [`CachedBlocks::rekey`] has asked the new policy about them. Blocks have the engine's own numbers, from 0. Reports
/// about unknown blocks are ignored.
///
/// A policy may keep blocks for a time: they go after the others of their tier. When the time is over they go by their keys,
/// and [`CachedBlocks::rekey`] asks about them again. Everything that is reported about a block costs O(log n) of the cached
/// blocks, the end of its time included.
///
/// ```
/// use meridian_core::{CachedBlocks, LeavingBlock, OwnOrder};
///
/// let mut cached = CachedBlocks::new(4, 32);
/// cached.resync([0, 1, 2, 3].map(|block| (block, None)));
/// cached.taken(&[0, 1, 2], 1.0);
/// // The request thought from its second block on, and its thinking will not be in the next prompt.
/// cached.mark_dead(&[1]);
/// let leaving = [(2, None), (1, Some(64)), (0, Some(32))].map(|(block, tokens)| LeavingBlock { block, tokens });
/// let order = cached.leaving(&mut OwnOrder, &leaving, 2.0);
/// assert_eq!((order.dead, order.freed), (vec![1], vec![2, 1, 0]));
/// assert_eq!((cached.empty(), cached.len()), (3, 1));
/// assert!(cached.choose(2).is_empty(), "empty ones will do");
/// ```
#[derive(Debug)]
pub struct CachedBlocks {
    blocks: Vec<Entry>,
    order: EvictionOrder<u32>,
    /// Blocks whose time is over, for the policy to be asked again; each is in it once.
    expired: VecDeque<u32>,
    chains: Chains,
    epochs: Epochs,
    /// No cached block has an earlier epoch than this one.
    settled: u32,
    /// Dead blocks stay until their place is needed, and go before all others.
    keeps_dead: bool,
    empty: u32,
    block_tokens: u32,
    next_stamp: u64,
    now_ms: f64,
    stats: CachedStats,
    candidates: Vec<EvictionCandidate>,
}

/// A block that loses its last reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeavingBlock {
    /// The engine's number.
    pub block: u32,
    /// Tokens of the prefix that ends with this block; `None` when no prompt can find it.
    pub tokens: Option<u32>,
}

/// The result for blocks that lose their last reader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leaving {
    /// Blocks to take out of the prefix cache: no prompt will match them.
    pub dead: Vec<u32>,
    /// All blocks in the order in which to free them; the engine hands out the first one first.
    pub freed: Vec<u32>,
}

/// Counters of cached blocks since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedStats {
    /// Blocks that could be matched until they were handed out or dropped as dead, by [`BlockTier`].
    pub evictions: [u64; 3],
    /// Blocks that were moved to the front of the engine's queue; some may have been there already.
    pub moved: u64,
    /// Times that the mirror was refilled because it did not agree with the engine.
    pub resyncs: u64,
    /// What became of blocks that a policy kept for a time.
    pub keeps: KeepStats,
}

/// Number of blocks that a policy kept for a time, by outcome. A block whose contents the engine drops, or that the
/// policy ranks again, counts in none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeepStats {
    /// A request used it again.
    pub hits: u64,
    /// It was handed out before its time was over.
    pub evicted: u64,
    /// Its time was over.
    pub expired: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    state: State,
    /// Number of prompts that matched it.
    hits: u32,
    /// Distance from the head of its request's chain, blocks, at its release.
    position: u32,
    born_ms: f64,
    /// No later prompt will match it.
    dead: bool,
    /// A second request matched it while the first attended it: it can match, whatever its own request reports.
    shared: bool,
    /// It is in `expired`.
    has_expired: bool,
    /// The prompt of a waiting request has matched it.
    is_awaited: bool,
    /// It was kept for a time when the prompt came.
    was_kept: bool,
    /// The chain that used it last.
    chain: ChainId,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// A request attends it.
    #[default]
    Attended,
    /// Free, without contents to match.
    Empty,
    /// Free, with contents to match.
    Cached { tier: BlockTier, ranked: Ranked, stamp: u64 },
}

impl CachedBlocks {
    /// A mirror of a pool of `blocks` blocks of `block_tokens` tokens each, all attended; call [`CachedBlocks::resync`]
    /// next.
    #[must_use]
    pub fn new(blocks: u32, block_tokens: u32) -> Self {
        Self {
            blocks: vec![Entry::default(); blocks as usize],
            order: EvictionOrder::default(),
            expired: VecDeque::new(),
            chains: Chains::default(),
            epochs: Epochs::default(),
            settled: UNKNOWN,
            keeps_dead: false,
            empty: 0,
            block_tokens: block_tokens.max(1),
            next_stamp: 0,
            now_ms: 0.0,
            stats: CachedStats::default(),
            candidates: Vec::new(),
        }
    }

    /// Use it for a store that evicts only on demand: dead blocks are not returned for dropping, but go first.
    #[must_use]
    pub fn keeping_dead(mut self) -> Self {
        self.keeps_dead = true;
        self
    }

    /// Number of cached blocks.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.order.len()
    }

    /// Whether no block is cached.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of free blocks without contents.
    #[must_use]
    pub fn empty(&self) -> u32 {
        self.empty
    }

    /// Number of cached blocks that a policy keeps for a time.
    #[must_use]
    pub fn kept(&self) -> u32 {
        self.order.kept()
    }

    /// Number of free blocks, cached or empty.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.empty + self.len()
    }

    /// The counters.
    #[must_use]
    pub fn stats(&self) -> CachedStats {
        self.stats
    }

    /// The cached blocks in the order of eviction.
    pub fn order(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter().map(|place| place.block)
    }

    /// Refill the mirror from the engine's queue of free blocks, its front first: the number, and the tokens as in
    /// [`LeavingBlock::tokens`]. Every other block counts as attended. Cached blocks get equal keys.
    pub fn resync(&mut self, queue: impl IntoIterator<Item = (u32, Option<u32>)>) {
        // The engine may have used the blocks for others meanwhile.
        self.chains = Chains::default();
        for entry in &mut self.blocks {
            (entry.state, entry.chain) = (State::Attended, 0);
        }
        self.order.clear();
        self.empty = 0;
        self.stats.resyncs += 1;
        let ranked = Ranked { rank: Rank::of(self.epochs.latest(), &[], 0), ..Ranked::default() };
        for (block, tokens) in queue {
            match tokens {
                Some(tokens) => {
                    self.set_position(block, tokens);
                    self.cache(block, BlockTier::ThinkActive, ranked);
                }
                None => self.put_empty(block),
            }
        }
    }

    /// The cached blocks to evict when the engine hands out `count` blocks, if its queue alone would choose others; put
    /// them at its front.
    pub fn choose(&mut self, count: u32) -> Vec<u32> {
        let wanted = count.saturating_sub(self.empty) as usize;
        if wanted > 0 {
            self.expire();
        }
        if wanted == 0 || self.is_in_order() {
            return Vec::new();
        }
        let chosen: Vec<u32> = self.order().take(wanted).collect();
        self.stats.moved += chosen.len() as u64;
        chosen
    }

    /// Whether the engine's queue is in order by itself, because all cached blocks have one key.
    #[must_use]
    pub fn is_in_order(&self) -> bool {
        self.order.is_by_stamp()
    }

    /// Report that the engine handed out these blocks: their contents are gone.
    pub fn taken(&mut self, blocks: &[u32], now_ms: f64) {
        self.tell_time(now_ms);
        self.expire();
        for block in blocks {
            if let Some(Entry { state: State::Cached { tier, ranked, .. }, .. }) = self.blocks.get(*block as usize) {
                self.stats.evictions[*tier as usize] += 1;
                self.stats.keeps.evicted += u64::from(ranked.rank.is_kept);
            }
            let born_ms = self.now_ms;
            self.leave_chain(*block);
            if let Some(entry) = self.attend(*block) {
                *entry = Entry { born_ms, has_expired: entry.has_expired, ..Entry::default() };
            }
        }
    }

    /// Report that a request attends these blocks; free ones are no longer free.
    pub fn touched(&mut self, blocks: &[u32]) {
        for block in blocks {
            if let Some(entry @ Entry { state: State::Cached { ranked, .. }, .. }) = self.blocks.get(*block as usize) {
                self.stats.keeps.hits += u64::from(ranked.rank.is_kept && (entry.was_kept || !entry.is_awaited));
            }
            if let Some(entry) = self.attend(*block) {
                entry.is_awaited = false;
            }
        }
    }

    /// Report that the prompt of a request that has arrived matches these blocks, its longest cached prefix, while it waits to
    /// be admitted. The policy is asked about those that are cached. [`CachedBlocks::touched`] ends the wait.
    pub fn awaited(&mut self, policy: &mut dyn EvictionRanker, blocks: &[u32], now_ms: f64) {
        self.tell_time(now_ms);
        let mut places = Vec::with_capacity(blocks.len());
        for block in blocks {
            let Some(entry) = self.blocks.get_mut(*block as usize) else { continue };
            match entry.state {
                State::Empty => continue,
                State::Attended => {}
                State::Cached { tier, ranked, stamp } => {
                    if !entry.is_awaited {
                        entry.was_kept = ranked.rank.is_kept;
                    }
                    places.push(Place::new(tier, ranked, stamp, *block));
                }
            }
            entry.is_awaited = true;
        }
        self.ask_again(policy, &places);
    }

    /// Report that the request that waited for these blocks will not come for them: it was aborted. The policy is asked about
    /// them before one of the next steps.
    pub fn not_awaited(&mut self, blocks: &[u32]) {
        for block in blocks {
            let Some(entry) = self.blocks.get_mut(*block as usize) else { continue };
            let was_awaited = std::mem::take(&mut entry.is_awaited);
            let State::Cached { tier, ranked, stamp } = entry.state else { continue };
            if !was_awaited {
                continue;
            }
            if !std::mem::replace(&mut entry.has_expired, true) {
                self.expired.push_back(*block);
            }
            self.put(*block, tier, ranked.not_kept(), stamp);
        }
    }

    /// Report that a prompt matched these blocks.
    pub fn matched(&mut self, blocks: &[u32]) {
        for block in blocks {
            if let Some(entry) = self.blocks.get_mut(*block as usize) {
                entry.hits = entry.hits.saturating_add(1);
                entry.dead = false;
                self.chains.matched(entry.chain);
            }
        }
    }

    /// Report that a request stops, before its blocks leave: `blocks` are those of its chain, head first, shared ones too. It
    /// is the chain that used them last, until another is reported.
    pub fn chain_ends(&mut self, blocks: &[u32], facts: &ChainFacts) {
        let chain = self.chains.begin(*facts);
        for block in blocks {
            self.leave_chain(*block);
            if let Some(entry) = self.blocks.get_mut(*block as usize) {
                entry.chain = chain;
                if matches!(entry.state, State::Cached { .. }) {
                    self.chains.set_cached(chain, true);
                }
                self.chains.join(chain, entry.hits);
            }
        }
        self.chains.settle(chain);
    }

    /// The session whose next turn a prompt is that matched `blocks`, its longest cached prefix: they hold the whole prompt of
    /// the request that used the last of them last, as far as whole blocks do. `None` when that is not so.
    #[must_use]
    pub fn continued(&self, blocks: &[u32]) -> Option<u32> {
        let chain = self.blocks.get(*blocks.last()? as usize)?.chain;
        let facts = self.chains.facts(chain)?;
        let matched = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        let is_whole = matched >= (facts.prompt_tokens / self.block_tokens).max(1);
        (is_whole && facts.session.session > 0 && facts.ended_ms.is_some()).then_some(facts.session.session)
    }

    /// Blocks that the requests of this session used last, cached or in use.
    #[must_use]
    pub fn of_session(&self, session: u32) -> u32 {
        self.chains.of_session(session)
    }

    /// Cached blocks of warm sessions: of requests that have ended for less than five times as long as computing their tokens
    /// again takes, or whose session `waits` for a sub-agent.
    pub fn warm(&mut self, now_ms: f64, waits: impl Fn(u32) -> bool) -> u32 {
        self.tell_time(now_ms);
        self.chains.warm(self.now_ms, waits)
    }

    /// Number of chains that some block remembers; at most as many as blocks.
    #[must_use]
    pub fn chains(&self) -> usize {
        self.chains.len()
    }

    /// Report that a prompt matched these blocks while another request attended them: they can match, whatever that
    /// request reports.
    pub fn shared(&mut self, blocks: &[u32]) {
        for block in blocks {
            if let Some(entry) = self.blocks.get_mut(*block as usize) {
                entry.shared = true;
                entry.dead = false;
            }
        }
    }

    /// Mark blocks that no later prompt will match: they go when they lose their last reader. Blocks that a second
    /// request has matched are ignored.
    pub fn mark_dead(&mut self, blocks: &[u32]) {
        for block in blocks {
            let Some(entry) = self.blocks.get_mut(*block as usize) else { continue };
            entry.dead = !entry.shared;
            if let (State::Cached { ranked, stamp, .. }, true, true) = (entry.state, entry.dead, self.keeps_dead) {
                self.put(*block, BlockTier::ThinkComplete, ranked, stamp);
            }
        }
    }

    /// Report that these blocks lose their last reader, in the order in which the engine would free them. The policy
    /// orders those that stay cached.
    pub fn leaving(&mut self, policy: &mut dyn EvictionRanker, leaving: &[LeavingBlock], now_ms: f64) -> Leaving {
        self.tell_time(now_ms);
        let mut out = Leaving::default();
        let mut kept = Vec::with_capacity(leaving.len());
        for LeavingBlock { block, tokens } in leaving {
            let Some(entry) = self.blocks.get(*block as usize) else { continue };
            let dropped = entry.dead && !self.keeps_dead;
            match tokens {
                Some(_) if dropped => out.dead.push(*block),
                Some(tokens) => kept.push((*block, *tokens)),
                None => {}
            }
            if tokens.is_none() || dropped {
                out.freed.push(*block);
                self.put_empty(*block);
            }
        }
        self.stats.evictions[BlockTier::ThinkComplete as usize] += out.dead.len() as u64;
        self.candidates.clear();
        for (block, tokens) in &kept {
            self.set_position(*block, *tokens);
            let tier =
                if self.blocks[*block as usize].dead { BlockTier::ThinkComplete } else { BlockTier::ThinkActive };
            self.candidates.push(self.candidate(*block, tier));
        }
        let ranks = self.ask(policy);
        let mut order: Vec<_> =
            self.candidates.iter().zip(ranks).enumerate().map(|(i, (c, r))| (c.tier, r.rank, i, r)).collect();
        order.sort_unstable();
        for (tier, _, i, ranked) in order {
            self.cache(kept[i].0, tier, ranked);
            out.freed.push(kept[i].0);
        }
        out
    }

    /// Ask the policy about cached blocks that another policy ranked, and about those whose time is over: at most 256 at once,
    /// so that it delays no step, and starting with those that would go last. Call it before each step. Returns how many
    /// blocks have its keys now.
    pub fn rekey(&mut self, policy: &mut dyn EvictionRanker, now_ms: f64) -> usize {
        self.tell_time(now_ms);
        self.expire();
        let places = self.due_for_rekey(RankingId::of(policy));
        self.ask_again(policy, &places);
        places.len()
    }

    /// Give cached blocks the ranks that the policy has for them now.
    fn ask_again(&mut self, policy: &mut dyn EvictionRanker, places: &[Place<u32>]) {
        if places.is_empty() {
            return;
        }
        self.candidates.clear();
        for Place { tier, block, .. } in places {
            self.candidates.push(self.candidate(*block, *tier));
        }
        let ranks = self.ask(policy);
        for (Place { tier, stamp, block, .. }, ranked) in places.iter().zip(ranks) {
            self.put(*block, *tier, ranked, *stamp);
        }
    }

    /// The blocks that [`CachedBlocks::rekey`] asks about.
    fn due_for_rekey(&mut self, ranking: RankingId) -> Vec<Place<u32>> {
        let epoch = self.epochs.least(ranking);
        let mut places = Vec::new();
        if self.settled < epoch {
            places.extend(self.order.ranked_before(epoch).take(REKEYED_AT_ONCE).copied());
            if places.is_empty() {
                self.settled = epoch;
            }
        }
        while places.len() < REKEYED_AT_ONCE
            && let Some(block) = self.expired.pop_front()
        {
            let Some(entry) = self.blocks.get_mut(block as usize) else { continue };
            entry.has_expired = false;
            // Used or kept again since, or of an earlier epoch: that is asked about above.
            if let State::Cached { tier, ranked, stamp } = entry.state
                && !ranked.rank.is_kept
                && ranked.rank.epoch >= epoch
            {
                places.push(Place::new(tier, ranked, stamp, block));
            }
        }
        places
    }

    /// Blocks whose time is over go by their keys.
    fn expire(&mut self) {
        while let Some(block) = self.order.over(self.now_ms)
            && let State::Cached { tier, ranked, stamp } = self.blocks[block as usize].state
        {
            self.stats.keeps.expired += 1;
            self.put(block, tier, ranked.not_kept(), stamp);
            let entry = &mut self.blocks[block as usize];
            if !std::mem::replace(&mut entry.has_expired, true) {
                self.expired.push_back(block);
            }
        }
    }

    /// The policy's ranks of the candidates.
    fn ask(&mut self, policy: &mut dyn EvictionRanker) -> Vec<Ranked> {
        let before = RankingId::of(policy);
        let (ranking, _) = ranked_or_default(policy, &self.memory(Subject::Blocks), &self.candidates);
        let epoch = self.epochs.of(before, RankingId::of(policy));
        (0..self.candidates.len()).map(|i| Ranked::of(epoch, &ranking, i, self.now_ms)).collect()
    }

    fn candidate(&self, block: u32, tier: BlockTier) -> EvictionCandidate {
        let Entry { hits, position, born_ms, chain, is_awaited, .. } = self.blocks[block as usize];
        let mut candidate = EvictionCandidate {
            subject: EvictionSubject::Block(BlockId(u64::from(block))),
            tier,
            blocks: 1,
            position,
            hits,
            age_ms: (self.now_ms - born_ms) as f32,
            computed_tokens: self.block_tokens,
            ..EvictionCandidate::default()
        };
        let end_tokens = position.saturating_add(1).saturating_mul(self.block_tokens);
        self.chains.describe(chain, end_tokens, self.now_ms, &mut candidate);
        candidate.is_awaited |= is_awaited;
        candidate
    }

    fn leave_chain(&mut self, block: u32) {
        if let Some(entry) = self.blocks.get_mut(block as usize) {
            let chain = std::mem::take(&mut entry.chain);
            if matches!(entry.state, State::Cached { .. }) {
                self.chains.set_cached(chain, false);
            }
            self.chains.leave(chain, entry.hits);
        }
    }

    fn set_position(&mut self, block: u32, tokens: u32) {
        if let Some(entry) = self.blocks.get_mut(block as usize) {
            entry.position = tokens.div_ceil(self.block_tokens).saturating_sub(1);
        }
    }

    /// Treat cached blocks as used at `stamps` instead of at their release. Stamps are the caller's own count; a caller
    /// that sets one must set all.
    pub fn stamp(&mut self, blocks: &[u32], stamps: &[u64]) {
        for (block, stamp) in blocks.iter().zip(stamps) {
            if let Some(Entry { state: State::Cached { tier, ranked, .. }, .. }) =
                self.blocks.get(*block as usize).copied()
            {
                self.put(*block, tier, ranked, *stamp);
            }
        }
    }

    /// Report that the engine dropped the contents of these blocks from its cache; attended blocks stay attended.
    pub fn emptied(&mut self, blocks: &[u32]) {
        for block in blocks {
            if self.is_cached(*block) {
                self.put_empty(*block);
            }
        }
    }

    /// The facts about the pool for policies.
    #[must_use]
    pub fn memory(&self, subject: Subject) -> Memory {
        Memory {
            now_ms: self.now_ms,
            subject,
            free_blocks: self.empty,
            cached_blocks: self.len(),
            total_blocks: u32::try_from(self.blocks.len()).unwrap_or(u32::MAX),
        }
    }

    /// Check that the mirror agrees with the engine's queue of free blocks, given as in [`CachedBlocks::resync`]; for
    /// tests and diagnosis. Linear in the number of blocks.
    ///
    /// # Errors
    /// The first block that differs, in words.
    pub fn audit(&self, queue: impl IntoIterator<Item = (u32, Option<u32>)>) -> Result<(), String> {
        let mut free = 0;
        for (block, tokens) in queue {
            free += 1;
            let state = self.blocks.get(block as usize).map(|entry| entry.state);
            let agrees = match state {
                Some(State::Cached { .. }) => tokens.is_some(),
                Some(State::Empty) => tokens.is_none(),
                Some(State::Attended) | None => false,
            };
            if !agrees {
                return Err(format!("block {block} is free with {tokens:?} tokens, here it is {state:?}"));
            }
        }
        let counted = self.blocks.iter().filter(|entry| entry.state != State::Attended).count();
        if free != counted || counted != self.free() as usize {
            return Err(format!("{free} blocks are free, here {counted}, counted as {}", self.free()));
        }
        self.order.audit()?;
        let of_chains = self.blocks.iter().filter(|entry| entry.chain > 0).count();
        let mut chains: Vec<ChainId> = self.blocks.iter().map(|entry| entry.chain).filter(|chain| *chain > 0).collect();
        chains.sort_unstable();
        chains.dedup();
        if chains.len() != self.chains.len() || of_chains != self.chains.blocks() {
            return Err(format!("{} chains of {of_chains} blocks, here {}", chains.len(), self.chains.len()));
        }
        let cached = self.blocks.iter().filter(|entry| matches!(entry.state, State::Cached { .. }));
        self.chains.audit(cached.map(|entry| entry.chain))
    }

    /// Time never goes back.
    fn tell_time(&mut self, now_ms: f64) {
        if now_ms > self.now_ms && now_ms.is_finite() {
            self.now_ms = now_ms;
        }
    }

    fn is_cached(&self, block: u32) -> bool {
        self.blocks.get(block as usize).is_some_and(|entry| matches!(entry.state, State::Cached { .. }))
    }

    fn cache(&mut self, block: u32, tier: BlockTier, ranked: Ranked) {
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        self.put(block, tier, ranked, stamp);
    }

    fn put(&mut self, block: u32, tier: BlockTier, ranked: Ranked, stamp: u64) {
        if let Some(entry) = self.attend(block) {
            entry.state = State::Cached { tier, ranked, stamp };
            let chain = entry.chain;
            self.chains.set_cached(chain, true);
            self.settled = self.settled.min(ranked.rank.epoch);
            self.order.insert(Place::new(tier, ranked, stamp, block));
        }
    }

    fn put_empty(&mut self, block: u32) {
        self.leave_chain(block);
        if let Some(entry) = self.attend(block) {
            *entry = Entry { state: State::Empty, has_expired: entry.has_expired, ..Entry::default() };
            self.empty += 1;
        }
    }

    /// Mark a block as attended; `None` when there is no such block.
    fn attend(&mut self, block: u32) -> Option<&mut Entry> {
        let entry = self.blocks.get_mut(block as usize)?;
        match std::mem::take(&mut entry.state) {
            State::Attended => {}
            State::Empty => self.empty -= 1,
            State::Cached { tier, ranked, stamp } => {
                self.chains.set_cached(entry.chain, false);
                _ = self.order.remove(&Place::new(tier, ranked, stamp, block));
            }
        }
        Some(entry)
    }
}
