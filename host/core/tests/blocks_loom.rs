//! Every interleaving of a transfer with what may happen to its block meanwhile. Built with `--cfg loom` (`make test`).
#![cfg(loom)]

use loom::sync::Arc;
use loom::thread;
use meridian_core::{BeginKv, BlockId, BlockManager, Fabric, FabricError, KvMemory, PhaseAwareBlockManager, RequestId};

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

/// Two device blocks, both cached.
fn manager() -> (Arc<PhaseAwareBlockManager>, Vec<BlockId>) {
    let memory = KvMemory { capacity_bytes: 2, block_size_bytes: 1, think_fraction_limit: 1.0 };
    let manager = PhaseAwareBlockManager::new(&memory).expect("the memory is in range").with_fabric(Instant);
    manager.begin(RequestId(0), &BeginKv::default()).expect("it is the first");
    let blocks = manager.allocate(RequestId(0), 2).expect("all is free").blocks;
    assert!(manager.release(RequestId(0)));
    (Arc::new(manager), blocks)
}

#[test]
fn offload_against_allocation_and_reuse() {
    loom::model(|| {
        let (manager, blocks) = manager();
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
        let (manager, blocks) = manager();
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
