//! Fetches by a data path: what a node asks of it, and what it does with what has arrived.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "the path copies by address")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use meridian_fabric::{
    BlockHash, DataPath, FabricKind, KvFabric, KvFabricError, Node, NodeSettings, Offered, Part, PathPeer, Region,
    Stop, SystemClock, Target,
};

use support::settings;

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

/// Waits for its turn; `Cancelled` when the test is about to fail.
fn until(reached: &AtomicU32, count: u32, stop: &Stop) -> Result<(), KvFabricError> {
    while reached.load(Ordering::Acquire) < count {
        if stop.is_asked() {
            return Err(KvFabricError::Cancelled);
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Fetches so many blocks; the result, and whether each has arrived. All targets must be free at the end.
fn fetch(
    blocks: u32,
    read: impl Fn(&[Part], &Stop) -> Result<(), KvFabricError> + Send + Sync + 'static,
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
    let result = transfer.wait(&SystemClock::default(), Duration::from_secs(60));
    let has_arrived = |index| to.write(index).unwrap()[..] == from.read(index).unwrap()[..];
    (result, (0..blocks).map(has_arrived).collect())
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

#[test]
fn after_a_failure_what_runs_ends_first_and_nothing_else_begins() {
    let (begun, ended) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (now, done) = (Arc::clone(&begun), Arc::clone(&ended));
    let failure = || KvFabricError::Path { fabric: FabricKind::Nixl, reason: "a cable".into() };
    let (result, arrived) = fetch(40, move |parts, stop| {
        if now.fetch_add(1, Ordering::AcqRel) == 0 {
            until(&now, 2, stop)?;
            done.fetch_add(1, Ordering::AcqRel);
            return Err(failure());
        }
        until(&done, 1, stop)?;
        // The transfer would end here, if it did not wait for this.
        for _ in 0..1000 {
            std::thread::yield_now();
        }
        copy(parts);
        done.fetch_add(1, Ordering::AcqRel);
        Ok(())
    });
    assert_eq!(result, Err(failure()));
    let (begun, ended) = (begun.load(Ordering::Acquire), ended.load(Ordering::Acquire));
    assert_eq!(arrived.iter().filter(|arrived| **arrived).count() as u32, (ended - 1) * 4);
    // Ten requests would read all. The other thread may begin one more until the failure is known.
    assert!(begun == ended && begun < 10, "{begun} begun, {ended} ended");
}
