use std::net::SocketAddr;
use std::sync::Arc;

use crate::fabric::{BlockHash, FabricKind, KvFabricError, OfferId, Region, RegionError, Transfer};

/// Moves KV blocks between the memory of this process and that of peers.
///
/// `offer` and `register` take as long as reading the blocks once and as registering memory; nothing else waits for
/// anything. Requests run on threads of the fabric, and a failure is the result of its [`Transfer`].
pub trait KvFabric: Send + Sync {
    /// How the contents travel.
    fn kind(&self) -> FabricKind;

    /// Memory of a kind that the fabric can register.
    ///
    /// # Errors
    /// [`RegionError`].
    fn allocate(&self, blocks: u32, block_bytes: u32) -> Result<Arc<Region>, RegionError> {
        Region::allocate(blocks, block_bytes)
    }

    /// Make memory known. Call it at the start, or from a thread that may wait.
    ///
    /// # Errors
    /// [`KvFabricError::Region`] for blocks of another size, [`KvFabricError::Path`].
    fn register(&self, region: &Arc<Region>) -> Result<MemoryId, KvFabricError>;

    /// Offer blocks to peers, under one number. Their contents must be complete: the checksums are taken now, on this
    /// thread. The blocks cannot be written until the offer is released and its last fetch has ended.
    ///
    /// # Errors
    /// [`KvFabricError::Region`] when a block is being written, [`KvFabricError::Settings`] for too many blocks.
    fn offer(&self, memory: MemoryId, blocks: &[Offered]) -> Result<OfferId, KvFabricError>;

    /// Begin to copy all blocks of a peer's offer, in its order, to these targets. Returns at once.
    fn fetch(&self, peer: SocketAddr, offer: OfferId, targets: &[Target]) -> Transfer<()>;

    /// Withdraw an offer. Fetches of it that run may still end well. An unknown number does nothing.
    fn release(&self, offer: OfferId);

    /// Begin to ask a peer that it fetches an offer of this process and keeps the blocks. Returns at once.
    fn keep(&self, peer: SocketAddr, offer: OfferId) -> Transfer<Kept>;

    /// Ask a peer, as far as it can be reached, to drop blocks that it keeps. Returns at once.
    fn forget(&self, peer: SocketAddr, kept: &[OfferId]);
}

/// Memory that a fabric knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryId(pub(crate) u32);

/// A block to offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Its index in the memory.
    pub index: u32,
    /// The name of its contents.
    pub hash: BlockHash,
}

/// A block to fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The memory to write to.
    pub memory: MemoryId,
    /// The index in it. Nothing else may use the block meanwhile.
    pub index: u32,
    /// The name that its contents must have.
    pub hash: BlockHash,
    /// The checksum that the peer must state, where the caller knows it.
    pub checksum: Option<u64>,
}

/// Blocks that a peer keeps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// The peer's process: another one has not kept it.
    pub instance: [u8; 16],
    /// The peer's offer of each block, in the order of the offer.
    pub offers: Vec<OfferId>,
    /// The checksum of each block.
    pub checksums: Vec<u64>,
}
