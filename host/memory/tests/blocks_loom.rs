//! Every interleaving of a transfer with what may happen to its block meanwhile. Built with `--cfg loom` (`make test-all`).
#![cfg(loom)]

use loom::sync::{Arc, Mutex};
use loom::thread;
use meridian_core::BlockId;
use meridian_memory::{BeginKv, BlockManager, Error, Fabric, FabricError, KvMemory, PhaseAwareBlockManager, RequestId};

struct Instant;

impl Fabric for Instant {
    fn offload(&self, block: BlockId, _index: u32) -> Result<u64, FabricError> {
        thread::yield_now();
        Ok(block.0)
    }

    fn ingest(&self, _handle: u64, _index: u32) -> Result<(), FabricError> {
        thread::yield_now();
        Ok(())
    }
}

/// A fabric that names a copy by its block.
#[derive(Clone, Default)]
struct Shelf(std::sync::Arc<Mutex<Vec<u64>>>);

impl Fabric for Shelf {
    fn offload(&self, block: BlockId, _index: u32) -> Result<u64, FabricError> {
        self.0.lock().expect("nobody panics").push(block.0);
        Ok(block.0)
    }

    fn ingest(&self, handle: u64, _index: u32) -> Result<(), FabricError> {
        let found = self.0.lock().expect("nobody panics").contains(&handle);
        if found { Ok(()) } else { Err(FabricError::Lost) }
    }

    fn discard(&self, handle: u64) {
        self.0.lock().expect("nobody panics").retain(|stored| *stored != handle);
    }
}

/// Two device blocks, both cached.
fn manager(fabric: impl Fabric + 'static) -> (Arc<PhaseAwareBlockManager>, Vec<BlockId>) {
    let memory = KvMemory { capacity_bytes: 2, block_size_bytes: 1, think_fraction_limit: 1.0 };
    let manager = PhaseAwareBlockManager::new(&memory).expect("the memory is in range").with_fabric(fabric);
    manager.begin(RequestId(0), &BeginKv::default()).expect("it is the first");
    let blocks = manager.allocate(RequestId(0), 2).expect("all is free").blocks;
    assert!(manager.release(RequestId(0)));
    (Arc::new(manager), blocks)
}

#[test]
fn offload_against_allocation_and_reuse() {
    loom::model(|| {
        let (manager, blocks) = manager(Instant);
        let (mover, block) = (manager.clone(), blocks[0]);
        let transfer = thread::spawn(move || mover.offload_block(block).is_ok());
        manager.begin(RequestId(1), &BeginKv::default()).expect("the id is new");
        let is_reused = manager.touch(RequestId(1), &[block]).is_ok();
        let got = manager.allocate(RequestId(1), 1).is_ok();
        manager.audit().expect("the books are exact at any time");
        let is_moved = transfer.join().expect("the transfer does not panic");
        assert!(got && is_reused != is_moved, "reused: {is_reused}, moved: {is_moved}");
        manager.audit().expect("the books are exact");
    });
}

#[test]
fn ingest_against_ingest_and_allocation() {
    loom::model(|| {
        let (manager, blocks) = manager(Instant);
        manager.offload_block(blocks[0]).expect("nobody attends it");
        let (mover, block) = (manager.clone(), blocks[0]);
        let other = thread::spawn(move || mover.ingest_block(block).is_ok());
        let mine = manager.ingest_block(block).is_ok();
        let others = other.join().expect("the transfer does not panic");
        assert!(mine != others, "exactly one brings it back");
        assert_eq!(manager.stats().reserved, 0);
        manager.audit().expect("the books are exact");
    });
}

#[test]
fn offload_against_offload_keeps_the_copy() {
    loom::model(|| {
        let shelf = Shelf::default();
        let (manager, blocks) = manager(shelf.clone());
        let (mover, block) = (manager.clone(), blocks[0]);
        let other = thread::spawn(move || mover.offload_block(block));
        let mine = manager.offload_block(block);
        let others = other.join().expect("the transfer does not panic");
        assert!(mine.is_ok() != others.is_ok(), "exactly one moves it");
        let refused = mine.err().or(others.err());
        let at_once = [Error::BlockMoving { block }, Error::BlockElsewhere { block, expected: "on the device" }];
        assert!(at_once.map(Some).contains(&refused), "{refused:?}");
        assert_eq!(*shelf.0.lock().expect("nobody panics"), [block.0], "the only copy");
        manager.audit().expect("the books are exact");
    });
}

#[test]
fn a_copy_discarded_after_its_return_is_not_the_next_one() {
    loom::model(|| {
        let shelf = Shelf::default();
        let (manager, blocks) = manager(shelf.clone());
        let (mover, block) = (manager.clone(), blocks[0]);
        manager.offload_block(block).expect("nobody attends it");
        let back = thread::spawn(move || mover.ingest_block(block).is_ok());
        let is_remote = manager.offload_block(block).is_ok();
        assert!(back.join().expect("the transfer does not panic"));
        assert_eq!(shelf.0.lock().expect("nobody panics").contains(&block.0), is_remote);
        manager.audit().expect("the books are exact");
    });
}
