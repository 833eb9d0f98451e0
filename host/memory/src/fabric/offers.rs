//! What this process offers.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use twox_hash::XxHash3_64;

use crate::fabric::transfer::locked;
use crate::fabric::wire::{Descriptor, MAX_BLOCKS};
use crate::fabric::{KvFabricError, OfferId, Offered, ReadLease, Region};

/// The blocks of an offer, leased for as long as it exists or a fetch of it runs.
#[derive(Debug)]
pub(crate) struct Offer {
    pub(crate) descriptors: Vec<Descriptor>,
    pub(crate) leases: Vec<ReadLease>,
}

#[derive(Debug, Default)]
pub(crate) struct Offers {
    open: Mutex<HashMap<OfferId, Arc<Offer>>>,
    last: AtomicU64,
}

/// XXH3-64 with seed 0.
pub(crate) fn checksum(contents: &[u8]) -> u64 {
    XxHash3_64::oneshot(contents)
}

impl Offers {
    pub(crate) fn add(
        &self,
        region: &Arc<Region>,
        blocks: &[Offered],
        by_address: bool,
    ) -> Result<OfferId, KvFabricError> {
        if !(1..=MAX_BLOCKS).contains(&blocks.len()) {
            let text = format!("an offer of {} blocks, expected 1 to {MAX_BLOCKS}", blocks.len());
            return Err(KvFabricError::Settings(text));
        }
        let leases = blocks.iter().map(|block| region.read(block.index)).collect::<Result<Vec<_>, _>>()?;
        let describe = |(lease, block): (&ReadLease, &Offered)| Descriptor {
            hash: block.hash,
            checksum: checksum(lease),
            address: if by_address { lease.address() } else { 0 },
            bytes: region.block_bytes(),
        };
        let descriptors = leases.iter().zip(blocks).map(describe).collect();
        Ok(self.open(Offer { descriptors, leases }))
    }

    pub(crate) fn open(&self, offer: Offer) -> OfferId {
        let id = OfferId(self.last.fetch_add(1, Ordering::Relaxed) + 1);
        locked(&self.open).insert(id, Arc::new(offer));
        id
    }

    pub(crate) fn get(&self, offer: OfferId) -> Option<Arc<Offer>> {
        locked(&self.open).get(&offer).cloned()
    }

    /// The leases end here, unless a fetch holds them.
    pub(crate) fn remove(&self, offer: OfferId) -> bool {
        let removed = locked(&self.open).remove(&offer);
        removed.is_some()
    }
}
