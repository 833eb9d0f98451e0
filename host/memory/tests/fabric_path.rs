//! Fetches over a data path: the requests that a node makes, and how it takes in what arrives.

#![cfg(feature = "fabric")]
#![expect(unsafe_code, reason = "the path copies by address")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use meridian_memory::fabric::{
    BlockHash, Clock, DataPath, FabricKind, KvFabric, KvFabricError, Node, NodeSettings, Offered, Part, PathPeer,
    Region, Signal, Stop, SystemClock, Target, Transfer,
};

use support::settings;

use crate::support;

/// What a hang is told by; nothing waits as long.
const HANG: Duration = Duration::from_secs(60);

/// Four of them make one request.
const BYTES: u32 = 4 << 20;

type Read = dyn Fn(&[Part], &Stop) -> Result<(), KvFabricError> + Send + Sync;

/// Both nodes are in this process: their memory is read as it is.
struct Here(Box<Read>);

impl DataPath for Here {
    fn kind(&self) -> FabricKind {
        FabricKind::Nixl
    }

    fn register(&self, _: &Arc<Region>) -> Result<(), KvFabricError> {
        Ok(())
    }

    fn rights(&self) -> Result<Vec<u8>, KvFabricError> {
        Ok(b"here".to_vec())
    }

    fn connect(&self, _: &[u8]) -> Result<PathPeer, KvFabricError> {
        Ok(PathPeer("here".into()))
    }

    fn read(&self, _: &PathPeer, parts: &[Part], stop: &Stop, moved: &dyn Fn(u64)) -> Result<(), KvFabricError> {
        (self.0)(parts, stop)?;
        moved(parts.iter().map(|part| u64::from(part.bytes)).sum());
        Ok(())
    }

    fn disconnect(&self, _: &PathPeer) {}
}

fn copy(parts: &[Part]) {
    for part in parts {
        // SAFETY: the node leases the target for writing, and the peer the source for reading, until this returns.
        unsafe { std::ptr::copy_nonoverlapping(part.remote as *const u8, part.local as *mut u8, part.bytes as usize) };
    }
}

/// Waits until so many have begun; `Cancelled` when asked to stop.
fn until(reached: &AtomicU32, count: u32, stop: &Stop) -> Result<(), KvFabricError> {
    while reached.load(Ordering::Acquire) < count {
        if stop.is_asked() {
            return Err(KvFabricError::Cancelled);
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Fetches so many blocks, and tells when the fetch has begun; the result, and whether each block has arrived. All targets must
/// be free at the end.
fn fetch_and(
    blocks: u32,
    read: impl Fn(&[Part], &Stop) -> Result<(), KvFabricError> + Send + Sync + 'static,
    begun: impl FnOnce(&Transfer<()>),
) -> (Result<(), KvFabricError>, Vec<bool>) {
    let path: Arc<dyn DataPath> = Arc::new(Here(Box::new(read)));
    let node = || Node::start(NodeSettings { path: Some(Arc::clone(&path)), ..settings(BYTES) }).unwrap();
    let (ours, theirs) = (node(), node());
    let (from, to) = (Region::allocate(blocks, BYTES).unwrap(), Region::allocate(blocks, BYTES).unwrap());
    let hash = |index: u32| BlockHash::of(&index.to_le_bytes());
    for index in 0..blocks {
        from.write(index).unwrap().fill(index as u8 + 1);
    }
    let offered: Vec<Offered> = (0..blocks).map(|index| Offered { index, hash: hash(index) }).collect();
    let offer = ours.offer(ours.register(&from).unwrap(), &offered).unwrap();
    let memory = theirs.register(&to).unwrap();
    let target = |index| Target { memory, index, hash: hash(index), checksum: None };
    let targets: Vec<Target> = (0..blocks).map(target).collect();
    let transfer = theirs.fetch(ours.address(), offer, &targets);
    begun(&transfer);
    let clock = SystemClock::default();
    let result = transfer.wait(&clock, HANG);
    // A stall would cancel what a failure should have cancelled.
    assert!(clock.now() < HANG, "it hung: {result:?}");
    let has_arrived = |index| to.write(index).unwrap()[..] == from.read(index).unwrap()[..];
    (result, (0..blocks).map(has_arrived).collect())
}

fn fetch(
    blocks: u32,
    read: impl Fn(&[Part], &Stop) -> Result<(), KvFabricError> + Send + Sync + 'static,
) -> (Result<(), KvFabricError>, Vec<bool>) {
    fetch_and(blocks, read, |_| ())
}

#[test]
fn the_next_request_is_on_its_way_while_one_is_read() {
    let (begun, largest) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (now, most) = (Arc::clone(&begun), Arc::clone(&largest));
    let (result, arrived) = fetch(10, move |parts, stop| {
        most.fetch_max(parts.len() as u32, Ordering::AcqRel);
        now.fetch_add(1, Ordering::AcqRel);
        until(&now, 2, stop)?;
        copy(parts);
        Ok(())
    });
    assert_eq!((result, arrived), (Ok(()), vec![true; 10]));
    assert_eq!((begun.load(Ordering::Acquire), largest.load(Ordering::Acquire)), (3, 4));
}

#[test]
fn one_request_is_enough_for_few_blocks() {
    let begun = Arc::new(AtomicU32::new(0));
    let now = Arc::clone(&begun);
    let (result, arrived) = fetch(4, move |parts, _| {
        now.fetch_add(1, Ordering::AcqRel);
        copy(parts);
        Ok(())
    });
    assert_eq!((result, arrived, begun.load(Ordering::Acquire)), (Ok(()), vec![true; 4], 1));
}

#[test]
fn a_block_that_arrives_differently_is_named() {
    for wrong in [0, 3, 4, 9] {
        let (result, _) = fetch(10, move |parts, _| {
            copy(parts);
            for part in parts {
                // SAFETY: as in `copy`; each block is filled with its index and 1.
                unsafe {
                    let last = (part.local as *mut u8).add(part.bytes as usize - 1);
                    *last ^= u8::from(*last == wrong + 1);
                }
            }
            Ok(())
        });
        assert_eq!(result, Err(KvFabricError::Corrupt { position: wrong as usize }));
    }
}

/// Two requests are on their way; the first one ends as `end` says, the second one only when it is told to stop. How many have
/// begun and ended, and the result.
fn first_ends(
    end: impl Fn() -> Result<(), KvFabricError> + Send + Sync + 'static,
) -> (u32, u32, Result<(), KvFabricError>) {
    let (begun, ended) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (now, done) = (Arc::clone(&begun), Arc::clone(&ended));
    let (result, _) = fetch(12, move |_, stop| {
        let is_first = now.fetch_add(1, Ordering::AcqRel) == 0;
        until(&now, if is_first { 2 } else { u32::MAX }, stop).inspect_err(|_| {
            done.fetch_add(1, Ordering::AcqRel);
        })?;
        done.fetch_add(1, Ordering::AcqRel);
        end()
    });
    (begun.load(Ordering::Acquire), ended.load(Ordering::Acquire), result)
}

#[test]
fn a_failure_cancels_the_other_request_and_no_third_begins() {
    let failure = || KvFabricError::Path { fabric: FabricKind::Nixl, reason: "a cable".into() };
    assert_eq!(first_ends(move || Err(failure())), (2, 2, Err(failure())));
    // As a wrong block does: it arrives, and nothing has been copied.
    assert!(matches!(first_ends(|| Ok(())), (2, 2, Err(KvFabricError::Corrupt { .. }))));
}

#[test]
fn a_cancelled_fetch_ends_both_requests() {
    let (begun, ended) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (now, done) = (Arc::clone(&begun), Arc::clone(&ended));
    let both = Arc::new(Signal::default());
    let second = Arc::clone(&both);
    let read = move |_: &[Part], stop: &Stop| {
        if now.fetch_add(1, Ordering::AcqRel) == 1 {
            second.set();
        }
        let waited = until(&now, u32::MAX, stop);
        done.fetch_add(1, Ordering::AcqRel);
        waited
    };
    let (result, _) = fetch_and(12, read, |transfer| {
        both.wait(HANG);
        transfer.cancel();
    });
    assert_eq!(result, Err(KvFabricError::Cancelled));
    assert_eq!((begun.load(Ordering::Acquire), ended.load(Ordering::Acquire)), (2, 2));
}

#[test]
fn memory_of_large_pages_begins_at_one() {
    const LARGE_PAGE: usize = 2 << 20;
    for (blocks, alignment) in [(1, 4096), (LARGE_PAGE as u32 / 4096, LARGE_PAGE), (777, LARGE_PAGE)] {
        let region = Region::allocate(blocks, 4096).unwrap();
        assert_eq!(region.address() as usize % alignment, 0);
        assert!((0..blocks).all(|index| region.read(index).unwrap().iter().all(|byte| *byte == 0)));
    }
}
