use std::net::SocketAddr;

use thiserror::Error;

use crate::fabric::wire::{Refusal, Refused, WireError};
use crate::fabric::{FabricKind, OfferId, RegionError};

/// The reason why blocks did not move. The memory of both sides is as before, except the contents of target blocks.
///
/// ```
/// use meridian_memory::fabric::KvFabricError;
///
/// assert!(KvFabricError::Stalled.may_pass());
/// assert!(!KvFabricError::Cancelled.may_pass());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum KvFabricError {
    /// The fabric does not exist on this machine.
    #[error("fabric {fabric}: {reason}")]
    Unavailable {
        /// The fabric.
        fabric: FabricKind,
        /// One line for the operator.
        reason: String,
    },
    /// A setting that cannot be used.
    #[error("{0}")]
    Settings(String),
    /// The peer cannot be reached, or does not answer the handshake.
    #[error("peer {peer}: {reason}")]
    Unreachable {
        /// Its address.
        peer: SocketAddr,
        /// One line for the operator.
        reason: String,
    },
    /// One of the two peers does not want the connection.
    #[error("peer {peer}: refused: {}", refused.text)]
    Refused {
        /// Its address.
        peer: SocketAddr,
        /// Why.
        refused: Refused,
    },
    /// The connection ended in the middle.
    #[error("peer {peer}: the connection ended")]
    Ended {
        /// Its address.
        peer: SocketAddr,
    },
    /// The peer broke the protocol; the connection is closed.
    #[error("peer {peer}: {source}")]
    Protocol {
        /// Its address.
        peer: SocketAddr,
        /// How.
        source: WireError,
    },
    /// Nothing moved for as long as the caller was ready to wait.
    #[error("no bytes arrived for the time that was allowed")]
    Stalled,
    /// The caller cancelled it.
    #[error("cancelled")]
    Cancelled,
    /// The peer has no such offer, or no longer.
    #[error("offer {} does not exist", offer.0)]
    UnknownOffer {
        /// The offer.
        offer: OfferId,
    },
    /// The peer has no room.
    #[error("the peer has no room for more blocks")]
    Full,
    /// The peer could not fetch the offer.
    #[error("the peer could not fetch the blocks")]
    PeerFailed,
    /// The peer offers other blocks than expected.
    #[error("block {position} of the offer: {what} differs from what was expected")]
    Different {
        /// Its position in the offer.
        position: usize,
        /// What differs: the number of blocks, the hash, the length, the checksum of the descriptor.
        what: &'static str,
    },
    /// The contents do not have their checksum.
    #[error("block {position} of the offer: the contents do not have their checksum")]
    Corrupt {
        /// Its position in the offer.
        position: usize,
    },
    /// Memory that is not registered, or not free.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The library below reported an error.
    #[error("fabric {fabric}: {reason}")]
    Path {
        /// The fabric.
        fabric: FabricKind,
        /// One line for the operator.
        reason: String,
    },
}

impl KvFabricError {
    /// Whether the same request may succeed later.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Ended { .. }
            | Self::Stalled
            | Self::Full
            | Self::PeerFailed
            | Self::Corrupt { .. }
            | Self::Path { .. } => true,
            Self::Refused { refused, .. } => refused.why == Refusal::Busy,
            Self::Unavailable { .. }
            | Self::Settings(_)
            | Self::Protocol { .. }
            | Self::Cancelled
            | Self::UnknownOffer { .. }
            | Self::Different { .. }
            | Self::Region(_) => false,
        }
    }
}
