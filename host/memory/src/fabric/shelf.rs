//! The blocks that this process keeps for peers.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use crate::fabric::offers::{Offer, Offers};
use crate::fabric::transfer::locked;
use crate::fabric::wire::Descriptor;
use crate::fabric::{KvFabricError, OfferId, Region, WriteLease};

/// Memory for blocks of peers. When it is full, the block that came first goes: its owner finds that the offer is gone,
/// and computes it again.
#[derive(Debug)]
pub(crate) struct Shelf {
    pub(crate) region: Arc<Region>,
    books: Arc<Mutex<Books>>,
}

#[derive(Debug, Default)]
struct Books {
    free: Vec<u32>,
    kept: HashMap<OfferId, Place>,
    /// In the order of arrival; some are gone.
    order: VecDeque<OfferId>,
}

#[derive(Debug)]
struct Place {
    index: u32,
    owner: [u8; 16],
}

/// A block that is being filled; free again when it is dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    index: u32,
    /// Until it is dropped or put.
    lease: Option<WriteLease>,
    books: Arc<Mutex<Books>>,
}

impl Slot {
    pub(crate) fn lease(&self) -> &WriteLease {
        self.lease.as_ref().expect("the slot is being filled")
    }

    pub(crate) fn lease_mut(&mut self) -> &mut WriteLease {
        self.lease.as_mut().expect("the slot is being filled")
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if self.lease.take().is_some() {
            locked(&self.books).free.push(self.index);
        }
    }
}

impl Shelf {
    pub(crate) fn new(region: Arc<Region>) -> Self {
        let free = (0..region.blocks()).rev().collect();
        Self { region, books: Arc::new(Mutex::new(Books { free, ..Books::default() })) }
    }

    /// Room for `count` blocks; `None` when there is not so much, even without all that it keeps.
    pub(crate) fn take(&self, count: usize, offers: &Offers) -> Option<Vec<Slot>> {
        let (mut slots, mut busy) = (Vec::new(), Vec::new());
        let mut guard = locked(&self.books);
        let books = &mut *guard;
        while slots.len() < count {
            if let Some(index) = books.free.pop() {
                // A fetch may still read a block that was dropped.
                match self.region.write(index) {
                    Ok(lease) => slots.push(Slot { index, lease: Some(lease), books: Arc::clone(&self.books) }),
                    Err(_) => busy.push(index),
                }
                continue;
            }
            let Some(oldest) = books.order.pop_front() else { break };
            if let Some(place) = books.kept.remove(&oldest) {
                offers.remove(oldest);
                books.free.push(place.index);
            }
        }
        books.free.append(&mut busy);
        // Slots that are dropped lock the books.
        drop(guard);
        (slots.len() == count).then_some(slots)
    }

    /// Offer filled slots, one block each.
    pub(crate) fn put(
        &self,
        slots: Vec<Slot>,
        blocks: &[Descriptor],
        owner: [u8; 16],
        by_address: bool,
        offers: &Offers,
    ) -> Result<Vec<OfferId>, KvFabricError> {
        let mut opened = Vec::with_capacity(slots.len());
        for (mut slot, block) in slots.into_iter().zip(blocks) {
            let index = slot.index;
            drop(slot.lease.take());
            let lease = self.region.read(index)?;
            let address = if by_address { lease.address() } else { 0 };
            let descriptor = Descriptor { address, ..*block };
            let offer = offers.open(Offer { descriptors: vec![descriptor], leases: vec![lease] });
            opened.push((offer, index));
        }
        let books = &mut *locked(&self.books);
        for (offer, index) in &opened {
            books.kept.insert(*offer, Place { index: *index, owner });
            books.order.push_back(*offer);
        }
        let Books { kept, order, .. } = books;
        if order.len() > 2 * kept.len() + 64 {
            order.retain(|offer| kept.contains_key(offer));
        }
        Ok(opened.into_iter().map(|(offer, _)| offer).collect())
    }

    /// Drop blocks that `owner` does not need any more; those of others stay.
    pub(crate) fn forget(&self, forgotten: &[OfferId], owner: [u8; 16], offers: &Offers) {
        let books = &mut *locked(&self.books);
        for offer in forgotten {
            if books.kept.get(offer).is_some_and(|place| place.owner == owner) {
                let place = books.kept.remove(offer).expect("found above");
                offers.remove(*offer);
                books.free.push(place.index);
            }
        }
    }

    pub(crate) fn kept(&self) -> usize {
        locked(&self.books).kept.len()
    }
}
