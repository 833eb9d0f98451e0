//! The existing KV blocks, the requests that attend them, and the order of eviction; the documentation of
//! [`PhaseAwareBlockManager`] has the rules.

mod audit;
mod judge;
mod manager;
mod pool;
mod preempt;
mod record;

pub use manager::PhaseAwareBlockManager;

use meridian_core::{BlockId, BlockTier, ThinkPhase};

use crate::{BlockLocation, Error, RequestId};

/// Allocates and frees KV blocks. The engine's scheduling thread calls it; any thread may.
///
/// ```
/// use meridian_memory::{BeginKv, BlockManager, Error, KvMemory, PhaseAwareBlockManager, RequestId};
///
/// let memory = KvMemory { capacity_bytes: 8 << 20, block_size_bytes: 1 << 20, think_fraction_limit: 1.0 };
/// let manager = PhaseAwareBlockManager::new(&memory).unwrap();
/// manager.begin(RequestId(1), &BeginKv::default()).unwrap();
/// let blocks: &dyn BlockManager = &manager;
/// let allocated = blocks.allocate(RequestId(1), 3).unwrap().blocks;
/// assert!(blocks.block_location(allocated[0]).is_some());
/// assert_eq!(blocks.allocate(RequestId(1), 6), Err(Error::OutOfBlocks { needed: 6, available: 5 }));
/// assert_eq!(blocks.offload_block(allocated[0]), Err(Error::FabricNotConfigured));
/// ```
pub trait BlockManager: Send + Sync {
    /// Give `request` `count` more blocks: free ones, then cached ones in the order of eviction. Never preempts.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::ThinkLimit`], [`Error::UnknownRequest`]; nothing has changed then.
    fn allocate(&self, request: RequestId, count: u32) -> Result<Allocation, Error>;

    /// Evict at least `blocks` blocks, in addition to the free ones, for `request`: the least critical class first,
    /// preempting whole requests when attended blocks must go, but never `request`. Preempted requests are forgotten;
    /// begin them again when they resume.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::UnknownRequest`]; nothing has changed then.
    fn evict_for(&self, request: RequestId, blocks: u32) -> Result<Evicted, Error>;

    /// The place of a block; `None` after its eviction.
    fn block_location(&self, block: BlockId) -> Option<BlockLocation>;

    /// Move an unattended block off the device. Takes as long as the fabric; blocks no other call.
    ///
    /// # Errors
    /// [`Error::FabricNotConfigured`] unless the implementation has a fabric. [`Error::BlockMoving`], at once, while a
    /// transfer moves the block. [`Error::Fabric`] when the fabric failed; [`Error::BlockAttended`] or
    /// [`Error::UnknownBlock`] when a request took the block or it was evicted meanwhile. The block is then unchanged.
    fn offload_block(&self, _block: BlockId) -> Result<BlockLocation, Error> {
        Err(Error::FabricNotConfigured)
    }

    /// Bring a remote block back to the device, as cache; may evict one unattended block, even if it then fails.
    ///
    /// # Errors
    /// [`Error::FabricNotConfigured`] unless the implementation has a fabric. [`Error::Fabric`] when it failed: the
    /// block stays remote, or is gone if the fabric has lost it. [`Error::BlockMoving`], at once, while a transfer moves
    /// the block. [`Error::OutOfBlocks`] when every block is attended.
    fn ingest_block(&self, _block: BlockId) -> Result<Evicted, Error> {
        Err(Error::FabricNotConfigured)
    }
}

/// Moves the bytes of KV blocks off the device and back. Called without a lock, from the thread that moves the block,
/// and may block; after an `Err` or a panic, the books are as before the call.
///
/// ```
/// use meridian_core::BlockId;
/// use meridian_memory::{Fabric, FabricError};
///
/// /// A fabric that is always down.
/// struct Down;
///
/// impl Fabric for Down {
///     fn offload(&self, _block: BlockId, _index: u32) -> Result<u64, FabricError> {
///         Err(FabricError::Failed("down".into()))
///     }
///     fn ingest(&self, _handle: u64, _index: u32) -> Result<(), FabricError> {
///         Err(FabricError::Lost)
///     }
/// }
/// assert!(Down.offload(BlockId(1), 0).is_err());
/// ```
pub trait Fabric: Send + Sync {
    /// Store a copy of device block `index`, which holds `block`; returns a handle. The device block may be overwritten
    /// during the read; the copy is then unused, and [`Fabric::discard`] follows.
    ///
    /// # Errors
    /// Nothing was stored.
    fn offload(&self, block: BlockId, index: u32) -> Result<u64, FabricError>;

    /// Copy the contents of `handle` into device block `index`, which nothing else uses meanwhile.
    ///
    /// # Errors
    /// [`FabricError::Failed`] when a later try may succeed, [`FabricError::Lost`] when none will.
    fn ingest(&self, handle: u64, index: u32) -> Result<(), FabricError>;

    /// Drop a copy that is no longer needed. A fabric whose storage expires by itself may do nothing.
    fn discard(&self, _handle: u64) {}
}

/// The reason why a fabric did not move a block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FabricError {
    /// A later try may succeed; one line for the operator.
    #[error("{0}")]
    Failed(String),
    /// The copy no longer exists.
    #[error("the copy is lost")]
    Lost,
}

/// The memory for KV blocks.
///
/// ```
/// use meridian_memory::KvMemory;
///
/// let memory = KvMemory { capacity_bytes: 1 << 30, block_size_bytes: 2 << 20, think_fraction_limit: 0.75 };
/// assert_eq!((memory.capacity_blocks(), memory.think_limit_blocks()), (512, 384));
/// assert!(KvMemory { think_fraction_limit: 0.0, ..memory }.validate().is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvMemory {
    /// Memory for KV blocks, bytes, at least one block and at most 2^32 - 1 of them.
    pub capacity_bytes: u64,
    /// Size of a block over all layers, bytes, above 0.
    pub block_size_bytes: u64,
    /// Largest share of blocks that requests may attend before they answer, in (0, 1]; a single such request is not
    /// limited.
    pub think_fraction_limit: f64,
}

impl KvMemory {
    /// Check the ranges.
    ///
    /// # Errors
    /// [`Error::Core`] for the first value out of range.
    pub fn validate(&self) -> Result<(), Error> {
        let Self { capacity_bytes, block_size_bytes, think_fraction_limit } = *self;
        let refuse = |field: &str, value, reason: &str| {
            Err(meridian_core::Error::ConfigValidation { field: field.into(), value, reason: reason.into() }.into())
        };
        if block_size_bytes == 0 {
            return refuse("kv_memory.block_size_bytes", block_size_bytes.to_string(), "must be above 0");
        }
        if !(1..=u64::from(u32::MAX)).contains(&(capacity_bytes / block_size_bytes)) {
            let reason = "must hold from 1 to 4294967295 blocks";
            return refuse("kv_memory.capacity_bytes", capacity_bytes.to_string(), reason);
        }
        if !(think_fraction_limit > 0.0 && think_fraction_limit <= 1.0) {
            return refuse("kv_memory.think_fraction_limit", think_fraction_limit.to_string(), "must be in (0, 1]");
        }
        Ok(())
    }

    /// Number of whole blocks that fit.
    #[must_use]
    pub fn capacity_blocks(&self) -> u32 {
        u32::try_from(self.capacity_bytes / self.block_size_bytes.max(1)).unwrap_or(u32::MAX)
    }

    /// Most blocks that several requests may attend before they answer; at least 1.
    #[must_use]
    pub fn think_limit_blocks(&self) -> u32 {
        // The tolerance makes 0.7 of 10 blocks 7, whatever the rounding; `as` saturates.
        ((f64::from(self.capacity_blocks()) * self.think_fraction_limit + 1e-6) as u32).max(1)
    }
}

/// The facts about a request at its first block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BeginKv {
    /// Its phase. Blocks allocated in `Prefill` belong to the prompt, unless `resumed` differs: a request begins in
    /// `Prefill` even when it resumes.
    pub phase: ThinkPhase,
    /// The chain before its preemption, which it computes again; `None` for a new request.
    pub resumed: Option<Sections>,
    /// Whether the chat template leaves reasoning out of the next turn's prompt.
    pub strips_reasoning: bool,
    /// The host's clock, milliseconds; when it is not finite or goes back, the latest valid time holds.
    pub now_ms: f64,
}

/// The sections of the chain of a request that resumes: the first blocks are prompt, the next thinking. Further blocks
/// of a prefill are output.
///
/// ```
/// use meridian_core::{BlockTier, ThinkPhase};
/// use meridian_memory::{BeginKv, BlockManager, KvMemory, PhaseAwareBlockManager, RequestId, Sections};
///
/// let memory = KvMemory { capacity_bytes: 8, block_size_bytes: 1, think_fraction_limit: 1.0 };
/// let manager = PhaseAwareBlockManager::new(&memory).unwrap();
/// // It was preempted while it answered; prompt, thinking and answer are computed again.
/// let resumed = Some(Sections { prompt_blocks: 2, think_blocks: 3 });
/// manager.begin(RequestId(1), &BeginKv { resumed, strips_reasoning: true, ..BeginKv::default() }).unwrap();
/// let blocks = manager.allocate(RequestId(1), 6).unwrap().blocks;
/// manager.set_phase(RequestId(1), ThinkPhase::Output, 40).unwrap();
/// manager.finish(RequestId(1), 100.0).unwrap();
/// assert_eq!(manager.tier(blocks[1]), Some(BlockTier::ThinkActive));
/// assert_eq!(manager.tier(blocks[2]), Some(BlockTier::ThinkComplete));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sections {
    /// Blocks of the prompt, reused ones included.
    pub prompt_blocks: u32,
    /// Blocks of thinking that follow them.
    pub think_blocks: u32,
}

/// The result of [`BlockManager::allocate`], and its cost.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allocation {
    /// The new blocks, in the order of the request's chain.
    pub blocks: Vec<BlockId>,
    /// The cached blocks that made room; an allocation preempts no request.
    pub evicted: Evicted,
}

/// The blocks and requests that made room.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Evicted blocks.
    pub blocks: Vec<BlockId>,
    /// Preempted requests, which are no longer live; begin them again when they resume.
    pub preempted: Vec<RequestId>,
    /// Number of evicted blocks of each class, by [`BlockTier`].
    pub by_tier: [u32; 3],
}

impl Evicted {
    fn push(&mut self, block: BlockId, class: BlockTier) {
        self.blocks.push(block);
        self.by_tier[class as usize] += 1;
    }
}

/// Counts of blocks, at present (first part) and since the start (from `evictions` on).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStats {
    /// Device blocks: `free + cached + attended + reserved`.
    pub capacity: u32,
    /// Device blocks without contents.
    pub free: u32,
    /// Device blocks that no live request attends.
    pub cached: u32,
    /// Cached blocks by [`BlockTier`].
    pub cached_by_tier: [u32; 3],
    /// Blocks that live requests attend; each counts once.
    pub attended: u32,
    /// Attended blocks with a request that does not answer yet.
    pub think_attended: u32,
    /// Device blocks held for a transfer that has not ended.
    pub reserved: u32,
    /// Blocks in the fabric.
    pub remote: u32,
    /// Live requests.
    pub requests: usize,
    /// Blocks evicted, by the class they had.
    pub evictions: [u64; 3],
    /// Requests preempted.
    pub preemptions: u64,
    /// Batches that used the default because the eviction policy failed.
    pub policy_faults: u64,
    /// Remote blocks dropped because of the limit.
    pub remote_evictions: u64,
}

impl KvStats {
    /// Evicted blocks of an answer in progress. Each such eviction is also logged as a warning.
    #[must_use]
    pub fn output_critical_evictions(&self) -> u64 {
        self.evictions[BlockTier::OutputCritical as usize]
    }

    /// Cached blocks evicted that could never have matched again.
    #[must_use]
    pub fn dead_think_blocks_evicted(&self) -> u64 {
        self.evictions[BlockTier::ThinkComplete as usize]
    }
}
