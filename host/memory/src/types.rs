//! The places of blocks.

use serde::{Deserialize, Serialize};

/// The place of a KV block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockLocation {
    /// In the accelerator's memory.
    Device {
        /// Number of the block on the device.
        index: u32,
    },
    /// In the storage of the fabric.
    Remote {
        /// The fabric's name of the block.
        handle: u64,
    },
}
