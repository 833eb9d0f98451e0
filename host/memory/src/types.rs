//! The names of requests, and the places of blocks.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The caller's number of a request. An engine with text ids counts its requests and keeps the map; a number may be
/// reused after its request is removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub u64);

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

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
