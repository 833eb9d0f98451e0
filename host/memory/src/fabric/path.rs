//! Ways of the contents other than the connection of the protocol.

use std::sync::Arc;

use crate::fabric::{FabricKind, KvFabricError, Region, RegionError, Stop};

/// Reads the memory of peers by address. The protocol names the blocks, and verifies their contents.
pub trait DataPath: Send + Sync {
    /// Which one it is.
    fn kind(&self) -> FabricKind;

    /// Memory of a kind that it can register.
    ///
    /// # Errors
    /// [`RegionError`].
    fn allocate(&self, blocks: u32, block_bytes: u32) -> Result<Arc<Region>, RegionError> {
        Region::allocate(blocks, block_bytes)
    }

    /// Make memory readable by peers, and known here.
    ///
    /// # Errors
    /// [`KvFabricError::Path`].
    fn register(&self, region: &Arc<Region>) -> Result<(), KvFabricError>;

    /// The description that a peer needs to read the registered memory, at most [`wire::MAX_RIGHTS_BYTES`](crate::fabric::wire::MAX_RIGHTS_BYTES).
    ///
    /// # Errors
    /// [`KvFabricError::Path`].
    fn rights(&self) -> Result<Vec<u8>, KvFabricError>;

    /// Take in a peer's description of its memory: hostile bytes.
    ///
    /// # Errors
    /// [`KvFabricError::Path`].
    fn connect(&self, rights: &[u8]) -> Result<PathPeer, KvFabricError>;

    /// Copy these parts. Called on a thread that may wait; ends early when asked to, and returns only when nothing
    /// writes to the targets any more. A fetch calls it from two threads at once, for different parts; an implementation may
    /// make one wait for the other.
    ///
    /// # Errors
    /// [`KvFabricError::Path`], [`KvFabricError::Cancelled`].
    fn read(&self, peer: &PathPeer, parts: &[Part], stop: &Stop, moved: &dyn Fn(u64)) -> Result<(), KvFabricError>;

    /// The peer is gone.
    fn disconnect(&self, peer: &PathPeer);
}

/// A peer, as its data path names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PathPeer(pub String);

/// One block to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// In the memory of the peer.
    pub remote: u64,
    /// In the memory of this process; leased for writing.
    pub local: u64,
    /// Bytes.
    pub bytes: u32,
}
