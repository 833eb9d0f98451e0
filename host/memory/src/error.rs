//! Errors, by what the caller can do about them.

use meridian_core::{BlockId, BlockTier};
use thiserror::Error;

#[cfg(feature = "fabric")]
use crate::fabric::{FabricKind, KvFabricError};
use crate::{FabricError, RequestId};

/// An error in the input of a caller, or of the memory.
///
/// ```
/// use meridian_memory::{BlockManager, Error, KvMemory, PhaseAwareBlockManager, RequestId};
///
/// let memory = KvMemory { capacity_bytes: 8, block_size_bytes: 1, think_fraction_limit: 1.0 };
/// let manager = PhaseAwareBlockManager::new(&memory)?;
/// assert_eq!(manager.allocate(RequestId(1), 1), Err(Error::UnknownRequest { id: RequestId(1) }));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A value out of its range, or a time that is not one.
    #[error(transparent)]
    Core(#[from] meridian_core::Error),
    /// A request id that is live.
    #[error("request {id} is already there")]
    DuplicateRequest {
        /// The id.
        id: RequestId,
    },
    /// A request id that is not live.
    #[error("request {id} is not known")]
    UnknownRequest {
        /// The id.
        id: RequestId,
    },
    /// A KV block that does not exist, or no longer exists.
    #[error("KV block {block} does not exist")]
    UnknownBlock {
        /// The block.
        block: BlockId,
    },
    /// There are not enough KV blocks. Nothing has changed; free some, or preempt.
    #[error("{needed} KV blocks are needed, {available} can be had")]
    OutOfBlocks {
        /// Requested blocks.
        needed: u32,
        /// Blocks that the same call could have taken.
        available: u32,
    },
    /// More than one request has used up the share of KV memory that thinking may hold. Nothing has changed.
    #[error("{needed} more KV blocks for thinking on top of {attended} pass the limit of {limit}")]
    ThinkLimit {
        /// Requested blocks.
        needed: u32,
        /// Blocks that requests which do not answer yet attend.
        attended: u32,
        /// Most blocks they may attend.
        limit: u32,
    },
    /// A block that a live request attends, where the call needs an unattended one.
    #[error("KV block {block} is attended by a live request")]
    BlockAttended {
        /// The block.
        block: BlockId,
    },
    /// A block that is not where the call needs it: on the device, or remote.
    #[error("KV block {block} is not {expected}")]
    BlockElsewhere {
        /// The block.
        block: BlockId,
        /// The place that the call needs: `on the device`.
        expected: &'static str,
    },
    /// A block whose transfer has not ended. Nothing has changed; it can be moved again afterwards.
    #[error("KV block {block} is being moved")]
    BlockMoving {
        /// The block.
        block: BlockId,
    },
    /// A block cannot get a more critical tier than it has, and an attended block no tier but `ThinkComplete`.
    #[error("KV block {block} cannot be demoted from {from} to {to}")]
    TierRaised {
        /// The block.
        block: BlockId,
        /// The tier it has.
        from: BlockTier,
        /// The requested tier.
        to: BlockTier,
    },
    /// There is no fabric to move KV blocks off the device.
    #[error("no KV fabric is configured")]
    FabricNotConfigured,
    /// The fabric did not move a block.
    #[error("KV block {block} was not moved")]
    Fabric {
        /// The block.
        block: BlockId,
        /// The error of the fabric.
        source: FabricError,
    },
    /// The configured fabric cannot be used.
    #[cfg(feature = "fabric")]
    #[error("disagg.fabric: {}: {source}", fabric.label())]
    FabricUnusable {
        /// The fabric.
        fabric: FabricKind,
        /// Why.
        source: KvFabricError,
    },
}
