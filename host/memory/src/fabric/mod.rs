//! Moves KV blocks between processes. A leaf: it knows no engine, no request and no policy.
//!
//! A process has one [`Node`]. It registers memory, offers blocks of it, and fetches blocks that a peer offers. Peers
//! speak `MRDN` ([`wire`], specified in ADR 0030) over TCP: who they are, what they offer, and what became of a
//! request. The contents travel over TCP too, or by a [`DataPath`]: NIXL ([`nixl`]) or Mooncake ([`mooncake`]), both
//! loaded at run time.
//!
//! ```
//! use meridian_memory::fabric::{
//!     BlockHash, Fingerprint, Identity, KvFabric, Node, NodeSettings, Offered, Region, SystemClock, Target,
//! };
//! use std::time::Duration;
//!
//! let settings = || NodeSettings::new(Fingerprint::of(b"a model"), Fingerprint::of(b"a layout"), 4096);
//! let (ours, theirs) = (Node::start(settings())?, Node::start(settings())?);
//! let (from, to) = (Region::allocate(8, 4096)?, Region::allocate(8, 4096)?);
//! from.write(3)?.fill(7);
//!
//! let hash = BlockHash([1; 32]);
//! let memory = ours.register(&from)?;
//! let offer = ours.offer(memory, &[Offered { index: 3, hash }])?;
//! let memory = theirs.register(&to)?;
//! // Returns at once; any thread may wait, but not the one that schedules.
//! let transfer = theirs.fetch(ours.address(), offer, &[Target { memory, index: 0, hash, checksum: None }]);
//! transfer.wait(&SystemClock::default(), Duration::from_secs(10))?;
//! assert!(to.read(0)?.iter().all(|byte| *byte == 7));
//! ours.release(offer);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backoff;
mod error;
mod identity;
mod kv_fabric;
mod link;
pub mod mooncake;
pub mod nixl;
mod node;
mod offers;
mod path;
mod region;
mod shelf;
mod stream;
mod transfer;
pub mod wire;

pub use backoff::{Backoff, Clock, SystemClock};
pub use error::KvFabricError;
pub use identity::{BlockHash, FabricKind, Fingerprint, Layout, OfferId};
pub use kv_fabric::{Kept, KvFabric, MemoryId, Offered, Target};
pub use node::{Node, NodeSettings};
pub use path::{DataPath, Part, PathPeer};
pub use region::{ReadLease, Region, RegionError, WriteLease};
pub use transfer::{Signal, Stop, Transfer};
pub use wire::{Identity, Key, Refusal, Refused};
