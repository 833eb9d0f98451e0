use std::fmt;

use meridian_core::order::{Epochs, Ranked};
use meridian_core::{
    BlockId, BlockTier, EvictionCandidate, EvictionRanker, EvictionSubject, OwnOrder, Subject, ThinkPhase,
};

use super::judge::Judge;
use super::pool::Pool;
use super::preempt::{self, Preemption};
use super::{Allocation, BeginKv, BlockManager, Evicted, Fabric, FabricError, KvMemory, KvStats};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::{BlockLocation, Error, RequestId};

/// The phase-aware block manager: it evicts dead thinking first, then the cache, then requests that think, and answers
/// in progress last.
///
/// **A block is attended** while a live request uses it. Attention is causal, so the next token of a live request needs
/// all its KV blocks, including its thinking. An attended block therefore never goes alone, but only with every request
/// that attends it (they are preempted and compute it again). Thinking has no value *after* the request when the chat
/// template strips it from the history: no prompt will ever match it again.
///
/// **Tier**: the role of a block for its request (for the most critical one, if several attend it).
///
/// | the request | its prompt blocks | its think blocks | its output blocks |
/// |---|---|---|---|
/// | prefills or thinks | ThinkActive | ThinkActive | |
/// | answers | OutputCritical | ThinkComplete | OutputCritical |
/// | has finished, reasoning is stripped | ThinkActive | ThinkComplete | ThinkComplete if it has thought, else ThinkActive |
/// | has finished, reasoning is kept | ThinkActive | ThinkActive | ThinkActive |
///
/// Section of a block: the phase of its allocation; a touched block belongs to the prompt. For a request that resumes,
/// its place in the chain determines the section ([`BeginKv::resumed`]). A block with the end of the prompt and the
/// first think tokens counts as prompt; a caller that knows better corrects that with
/// [`PhaseAwareBlockManager::demote`].
///
/// **Class**: the order of eviction, ThinkComplete before ThinkActive before OutputCritical. For an unattended block,
/// it is the tier. For an attended block, it is ThinkActive if only prefilling and thinking requests attend it, else
/// OutputCritical. Within a class, unattended blocks go before attended ones, because they cost no preemption.
///
/// **Kept blocks**: a policy may keep cached blocks for a time ([`EvictionRanker::rank`]). They go after the others of their
/// tier until it is over, then by their keys, and the policy is asked again when a request ends. No block is pinned. The
/// manager knows the time of the latest request that began or ended.
///
/// **Limit of thinking** ([`KvMemory::think_fraction_limit`]): requests that do not answer yet may attend only this
/// share, prompts included. It keeps memory for answers, and holds while several such requests hold blocks. A request
/// that prefills or thinks alone is always admitted; otherwise, a long prompt would be refused forever. When several
/// are refused, freeing one lets another continue.
///
/// **Remote blocks** are bounded too ([`PhaseAwareBlockManager::with_remote_limit`]): an offload beyond the limit drops
/// the first remote block in the order of eviction, also in the fabric. At most one transfer at a time moves a block.
///
/// One lock guards the books. The manager calls the eviction policy with the lock held, the fabric without it, and both
/// before any change.
///
/// ```
/// use meridian_core::{BlockTier, ThinkPhase};
/// use meridian_memory::{BeginKv, BlockManager, KvMemory, PhaseAwareBlockManager, RequestId};
///
/// let memory = KvMemory { capacity_bytes: 6, block_size_bytes: 1, think_fraction_limit: 1.0 };
/// let manager = PhaseAwareBlockManager::new(&memory).unwrap();
/// let (first, second) = (RequestId(1), RequestId(2));
/// manager.begin(first, &BeginKv { strips_reasoning: true, ..BeginKv::default() }).unwrap();
/// let prompt = manager.allocate(first, 1).unwrap().blocks;
/// manager.set_phase(first, ThinkPhase::Think, 1).unwrap();
/// let thinking = manager.allocate(first, 3).unwrap().blocks;
/// manager.set_phase(first, ThinkPhase::Output, 40).unwrap();
/// manager.allocate(first, 1).unwrap();
/// manager.finish(first, 100.0).unwrap();
/// assert_eq!(manager.tier(thinking[0]), Some(BlockTier::ThinkComplete));
///
/// // The next turn finds its prompt, and evicts only what can never match again.
/// manager.begin(second, &BeginKv::default()).unwrap();
/// manager.touch(second, &prompt).unwrap();
/// let evicted = manager.allocate(second, 5).unwrap().evicted;
/// assert_eq!((evicted.by_tier, evicted.preempted), ([4, 0, 0], vec![]));
/// manager.audit().unwrap();
/// ```
pub struct PhaseAwareBlockManager {
    books: Mutex<Books>,
    fabric: Option<Box<dyn Fabric>>,
}

struct Books {
    pool: Pool,
    judge: Judge,
    epochs: Epochs,
}

impl Books {
    /// The policy's ranks of the blocks.
    fn ranks(&mut self, blocks: &[EvictionCandidate]) -> Vec<Ranked> {
        let before = self.judge.ranking();
        let ranking = self.judge.rank(&self.pool.memory(Subject::Blocks), blocks);
        let epoch = self.epochs.of(before, self.judge.ranking());
        (0..blocks.len()).map(|i| Ranked::of(epoch, &ranking, i, self.pool.now_ms)).collect()
    }

    /// Ask the policy about blocks that another policy ranked, and about those whose time is over.
    fn rekey(&mut self) {
        let blocks = self.pool.due_for_rekey(self.epochs.least(self.judge.ranking()));
        let ranks = self.ranks(&blocks);
        let block = |candidate: &EvictionCandidate| match candidate.subject {
            EvictionSubject::Block(block) => Some(block),
            EvictionSubject::Request(_) => None,
        };
        self.pool.rank(blocks.iter().filter_map(block).zip(ranks));
    }
}

impl PhaseAwareBlockManager {
    /// A manager of empty memory, with [`OwnOrder`] and no fabric.
    ///
    /// # Errors
    /// [`Error::Core`] when `memory` is out of range.
    pub fn new(memory: &KvMemory) -> Result<Self, Error> {
        let books =
            Books { pool: Pool::new(memory)?, judge: Judge::new(Box::new(OwnOrder)), epochs: Epochs::default() };
        Ok(Self { books: Mutex::new(books), fabric: None })
    }

    /// Let `policy` rank the blocks inside a tier.
    #[must_use]
    pub fn with_policy(self, policy: impl EvictionRanker + 'static) -> Self {
        self.replace_policy(Box::new(policy));
        self
    }

    /// Offload blocks through `fabric`.
    #[must_use]
    pub fn with_fabric(mut self, fabric: impl Fabric + 'static) -> Self {
        self.fabric = Some(Box::new(fabric));
        self
    }

    /// Keep at most this many blocks in the fabric, at least 1; by default 1,048,576. The limit never drops a
    /// block that is on its way back, so there may be as many more as there are such transfers.
    #[must_use]
    pub fn with_remote_limit(self, remote_blocks: u32) -> Self {
        self.books().pool.remote_limit = remote_blocks.max(1);
        self
    }

    /// Set the number of tokens in a block, for [`EvictionCandidate::computed_tokens`]. A block counts as
    /// full, so the value of a request is at most a block too high. Without it, that fact is 0, unknown.
    #[must_use]
    pub fn with_block_tokens(self, block_tokens: u32) -> Self {
        self.books().pool.block_tokens = block_tokens;
        self
    }

    /// Use another eviction policy from now on. Cached blocks keep their keys and go first, until the new policy was
    /// asked about them: about 256 blocks with each request that ends. Keys of two policies are never compared.
    pub fn replace_policy(&self, policy: Box<dyn EvictionRanker>) {
        let old = self.books().judge.replace(policy);
        drop(old); // without the lock: it may be the caller's code
    }

    /// Begin a live request, without blocks.
    ///
    /// # Errors
    /// [`Error::DuplicateRequest`] when it is live.
    pub fn begin(&self, request: RequestId, begin: &BeginKv) -> Result<(), Error> {
        self.books().pool.begin(request, begin)
    }

    /// Set the phase of the request, as [`Progress`](crate::Progress) or [`RequestState`](meridian_core::RequestState) gives
    /// it. Call this after every step that generated tokens for it, before allocating blocks for the next. Phases are
    /// levels, so a repeated or a missing call does no harm. [`PhaseEvent`](meridian_core::PhaseEvent)s are not enough: a
    /// request that answers at once has none, and a request with an undecided opening enters and leaves thinking
    /// without a think token.
    ///
    /// `Output` turns the think blocks of the request into ThinkComplete and the rest into OutputCritical. A phase
    /// before the present one changes nothing: once a request answers, it answers to its end, even if it thinks in
    /// between. Once `think_tokens` is above 0, the request has thought, and the tokens after its prompt will never
    /// match again; its earlier answer belongs to the prompt.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn set_phase(&self, request: RequestId, phase: ThinkPhase, think_tokens: u32) -> Result<(), Error> {
        self.books().pool.set_phase(request, phase, think_tokens)
    }

    /// Prefix reuse: the request attends these blocks too, as part of its prompt; when it resumes
    /// ([`BeginKv::resumed`]), as the next in its chain. Returns how many it did not attend already. The reuse proves
    /// that a block can match, so it removes a mark as dead.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`], [`Error::UnknownBlock`], [`Error::BlockElsewhere`] for a remote block,
    /// [`Error::ThinkLimit`]; nothing has changed then.
    pub fn touch(&self, request: RequestId, blocks: &[BlockId]) -> Result<u32, Error> {
        self.books().pool.touch(request, blocks)
    }

    /// Give a block a lower or equal tier. An unattended block changes its place in the order of eviction at once. An
    /// attended block can only be marked as dead (ThinkComplete), which takes effect when no request attends it.
    ///
    /// # Errors
    /// [`Error::TierRaised`], [`Error::UnknownBlock`].
    pub fn demote(&self, block: BlockId, to: BlockTier) -> Result<(), Error> {
        self.books().pool.demote(block, to)
    }

    /// End a request at `now_ms`. Blocks that no other request attends become cache; the policy decides their order.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn finish(&self, request: RequestId, now_ms: f64) -> Result<(), Error> {
        let books = &mut *self.books();
        books.pool.tell_time(now_ms);
        let leaving = books.pool.leaving(request)?;
        books.rekey();
        let ranks = books.ranks(&leaving);
        books.pool.retire(request, &leaving, &ranks);
        Ok(())
    }

    /// End a request that vanished: [`PhaseAwareBlockManager::finish`] at the latest known time. False when it was not
    /// live.
    pub fn release(&self, request: RequestId) -> bool {
        self.finish(request, f64::NEG_INFINITY).is_ok()
    }

    /// End a request without caching its blocks; returns the dropped blocks. Blocks that others attend stay.
    ///
    /// # Errors
    /// [`Error::UnknownRequest`].
    pub fn free(&self, request: RequestId) -> Result<Vec<BlockId>, Error> {
        let pool = &mut self.books().pool;
        pool.live(request)?;
        Ok(pool.drop_request(request))
    }

    /// Drop an unattended block, wherever it is.
    ///
    /// # Errors
    /// [`Error::UnknownBlock`], [`Error::BlockAttended`].
    pub fn discard(&self, block: BlockId) -> Result<(), Error> {
        let handle = self.books().pool.discard(block)?;
        if let (Some(handle), Some(fabric)) = (handle, &self.fabric) {
            fabric.discard(handle);
        }
        Ok(())
    }

    /// Tier of a block; `None` when it does not exist.
    #[must_use]
    pub fn tier(&self, block: BlockId) -> Option<BlockTier> {
        self.books().pool.block(block).ok().map(super::record::Block::tier)
    }

    /// Whether a live request attends the block; `None` when it does not exist.
    #[must_use]
    pub fn is_attended(&self, block: BlockId) -> Option<bool> {
        self.books().pool.block(block).ok().map(|block| block.readers() > 0)
    }

    /// The counts.
    #[must_use]
    pub fn stats(&self) -> KvStats {
        let books = self.books();
        KvStats { policy_faults: books.judge.faults, ..books.pool.stats() }
    }

    /// Recount everything: linear in the number of blocks, for tests and diagnosis.
    ///
    /// # Errors
    /// The first count that is wrong, in words.
    pub fn audit(&self) -> Result<(), String> {
        super::audit::audit(&self.books().pool)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        lock(&self.books)
    }

    fn fabric(&self) -> Result<&dyn Fabric, Error> {
        self.fabric.as_deref().ok_or(Error::FabricNotConfigured)
    }
}

impl BlockManager for PhaseAwareBlockManager {
    fn allocate(&self, request: RequestId, count: u32) -> Result<Allocation, Error> {
        self.books().pool.allocate(request, count)
    }

    fn evict_for(&self, request: RequestId, blocks: u32) -> Result<Evicted, Error> {
        let evicted = {
            let Books { pool, judge, epochs: _ } = &mut *self.books();
            let own = u32::try_from(pool.live(request)?.members.len()).expect("at most the capacity");
            let available = pool.cached.len() + pool.attended - own;
            if available < blocks {
                return Err(Error::OutOfBlocks { needed: blocks, available });
            }
            let short = blocks.saturating_sub(pool.cached.len());
            let plan = if short > 0 { preempt::plan(pool, judge, request, short) } else { Preemption::default() };
            // Nothing has changed so far, and nothing is called from here on.
            let mut evicted = pool.evict_cached(blocks - short);
            pool.preempt(&plan, &mut evicted);
            evicted
        };
        let output_critical = evicted.by_tier[BlockTier::OutputCritical as usize];
        if output_critical > 0 {
            tracing::warn!(
                blocks = output_critical,
                preempted = ?evicted.preempted,
                request = request.0,
                "evicted KV blocks of answers in progress"
            );
        }
        Ok(evicted)
    }

    fn block_location(&self, block: BlockId) -> Option<BlockLocation> {
        self.books().pool.block(block).ok().map(|block| block.place)
    }

    fn offload_block(&self, block: BlockId) -> Result<BlockLocation, Error> {
        let fabric = self.fabric()?;
        let (index, stamp) = self.books().pool.begin_offload(block)?;
        // Until it is dropped and the unneeded copy is discarded: a later transfer may get the same handle.
        let _transfer = Transfer { manager: self, block };
        let handle = fabric.offload(block, index).map_err(|source| Error::Fabric { block, source })?;
        let moved = {
            let pool = &mut self.books().pool;
            let found = pool.unattended(block).and_then(|found| {
                // It was attended and released again: the copy may be older than the block.
                let is_same = found.stamp == stamp && found.place == BlockLocation::Device { index };
                if is_same { Ok(()) } else { Err(Error::BlockAttended { block }) }
            });
            found.map(|()| {
                let dropped = pool.make_remote_room();
                pool.left_device(block, handle);
                dropped
            })
        };
        match moved {
            Ok(dropped) => {
                dropped.into_iter().for_each(|handle| fabric.discard(handle));
                Ok(BlockLocation::Remote { handle })
            }
            Err(error) => {
                fabric.discard(handle);
                Err(error)
            }
        }
    }

    fn ingest_block(&self, block: BlockId) -> Result<Evicted, Error> {
        let fabric = self.fabric()?;
        let handle = self.books().pool.begin_ingest(block)?;
        let _transfer = Transfer { manager: self, block };
        let (reservation, evicted) = {
            let (index, evicted) = self.books().pool.reserve()?;
            (Reservation { manager: self, index: Some(index) }, evicted)
        };
        let copied = fabric.ingest(handle, reservation.index.expect("reserved above"));
        match copied {
            Ok(()) => reservation.commit(block)?,
            Err(source) => {
                drop(reservation);
                if source == FabricError::Lost {
                    // It is still remote, or gone: only this transfer could have moved it.
                    self.books().pool.forget(block);
                }
                return Err(Error::Fabric { block, source });
            }
        }
        fabric.discard(handle);
        Ok(evicted)
    }
}

/// The mark that a block is moving; removed when the transfer ends, even by a panic.
struct Transfer<'a> {
    manager: &'a PhaseAwareBlockManager,
    block: BlockId,
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.manager.books().pool.end_move(self.block);
    }
}

/// A device block that is held for a transfer; released unless the transfer is committed, even by a panic.
struct Reservation<'a> {
    manager: &'a PhaseAwareBlockManager,
    index: Option<u32>,
}

impl Reservation<'_> {
    /// # Errors
    /// Another thread dropped the block meanwhile.
    fn commit(mut self, block: BlockId) -> Result<(), Error> {
        let pool = &mut self.manager.books().pool;
        pool.block(block)?;
        pool.came_back(block, self.index.take().expect("committed once"));
        Ok(())
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if let Some(index) = self.index.take() {
            self.manager.books().pool.unreserve(index);
        }
    }
}

impl fmt::Debug for PhaseAwareBlockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PhaseAwareBlockManager").field("stats", &self.stats()).finish_non_exhaustive()
    }
}
