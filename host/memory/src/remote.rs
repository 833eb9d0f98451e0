//! KV blocks in the memory of a peer, for engines with memory of their own.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use meridian_core::BlockId;
use meridian_core::config::{DisaggConfig, FabricName};

use crate::fabric::mooncake::Mooncake;
use crate::fabric::nixl::Nixl;
use crate::fabric::{
    Backoff, BlockHash, Clock, DataPath, FabricKind, Kept, KvFabric, KvFabricError, MemoryId, Node, NodeSettings,
    OfferId, Offered, Refusal, Region, Signal, Stop, SystemClock, Target, Transfer,
};
use crate::sync::{Mutex, lock};
use crate::{BlockLocation, BlockManager, Error, Fabric, FabricError};

/// The memory of the engine's KV blocks. Called on the thread that moves a block, without a lock.
pub trait DeviceMemory: Send + Sync {
    /// Copy block `index` to `to`. It may be overwritten meanwhile: the copy is then not used.
    fn read(&self, index: u32, to: &mut [u8]);

    /// Copy `from` to block `index`, which nothing else uses.
    fn write(&self, index: u32, from: &[u8]);
}

/// How blocks move.
#[derive(Clone)]
pub struct RemoteSettings {
    /// The peer that keeps the blocks.
    pub peer: SocketAddr,
    /// Most blocks that move at once; each has a buffer.
    pub at_once: u32,
    /// When a failed transfer is tried again.
    pub backoff: Backoff,
    /// A transfer without progress for so long has failed.
    pub stall_after: Duration,
    /// The time of the gaps and of the progress.
    pub clock: Arc<dyn Clock>,
}

impl RemoteSettings {
    /// Eight blocks at once, four tries, 5 seconds without progress, the machine's time.
    #[must_use]
    pub fn new(peer: SocketAddr) -> Self {
        Self {
            peer,
            at_once: 8,
            backoff: Backoff::default(),
            stall_after: Duration::from_secs(5),
            clock: Arc::new(SystemClock::default()),
        }
    }
}

/// Where the libraries of the fabrics are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FabricLibraries {
    /// `libnixl_capi.so`; a name without a folder is looked up as the system does it.
    pub nixl: PathBuf,
    /// The command of Mooncake's process, in an environment that has the packages `meridian` and
    /// `mooncake-transfer-engine`.
    pub mooncake: Vec<String>,
}

impl Default for FabricLibraries {
    fn default() -> Self {
        let mooncake = ["python3", "-m", "meridian.mooncake_process"].map(str::to_owned).to_vec();
        Self { nixl: "libnixl_capi.so".into(), mooncake }
    }
}

/// The node of a configuration; `None` while `disagg.enabled` is false. `settings.path` is replaced by what
/// `disagg.fabric` names; `libraries` says
/// where NIXL and Mooncake are.
///
/// # Errors
/// [`Error::FabricUnusable`] when the fabric is not there, or the node cannot listen.
pub fn start_fabric(
    config: &DisaggConfig,
    settings: NodeSettings,
    libraries: &FabricLibraries,
) -> Result<Option<Node>, Error> {
    let (fabric, path) = match (config.enabled, config.fabric) {
        (false, _) | (true, FabricName::None) => return Ok(None),
        (true, FabricName::Tcp) => (FabricKind::Tcp, None),
        (true, FabricName::Nixl) => {
            let fabric = FabricKind::Nixl;
            let nixl = Nixl::open(&libraries.nixl).map_err(|source| Error::FabricUnusable { fabric, source })?;
            (fabric, Some(nixl as Arc<dyn DataPath>))
        }
        (true, FabricName::Mooncake) => {
            let fabric = FabricKind::Mooncake;
            let mooncake =
                Mooncake::start(&libraries.mooncake).map_err(|source| Error::FabricUnusable { fabric, source })?;
            (fabric, Some(mooncake as Arc<dyn DataPath>))
        }
    };
    let node = Node::start(NodeSettings { path, ..settings });
    node.map(Some).map_err(|source| Error::FabricUnusable { fabric, source })
}

/// Moves blocks of [`PhaseAwareBlockManager`](crate::PhaseAwareBlockManager) to a peer and back, over any
/// [`KvFabric`].
///
/// A block goes through a buffer of its own, so that the engine may write to its memory at any time. The checksum of
/// the contents is taken before they leave and stays here: what comes back is compared with it, whatever the peer says.
/// A copy that cannot come back is lost, never wrong, and the engine computes the block again.
pub struct RemoteBlocks {
    fabric: Arc<dyn KvFabric>,
    device: Arc<dyn DeviceMemory>,
    settings: RemoteSettings,
    /// Fewest blocks that are worth a transfer.
    threshold: u32,
    buffers: Arc<Region>,
    memory: MemoryId,
    free: Mutex<Vec<u32>>,
    copies: Mutex<HashMap<u64, Copied>>,
    last: AtomicU64,
    running: Mutex<HashMap<u64, Arc<Stop>>>,
    ended: Signal,
}

/// A block that the peer keeps.
#[derive(Clone, Copy)]
struct Copied {
    offer: OfferId,
    hash: BlockHash,
    checksum: u64,
}

impl RemoteBlocks {
    /// Blocks of `block_bytes`, as the fabric's node has them.
    ///
    /// # Errors
    /// [`KvFabricError`] when there is no memory for the buffers, or it cannot be registered.
    pub fn new(
        fabric: Arc<dyn KvFabric>,
        device: Arc<dyn DeviceMemory>,
        block_bytes: u32,
        config: &DisaggConfig,
        settings: RemoteSettings,
    ) -> Result<Self, KvFabricError> {
        let buffers = fabric.allocate(settings.at_once, block_bytes)?;
        let memory = fabric.register(&buffers)?;
        Ok(Self {
            fabric,
            device,
            threshold: config.offload_threshold_blocks,
            free: Mutex::new((0..settings.at_once).collect()),
            settings,
            buffers,
            memory,
            copies: Mutex::default(),
            last: AtomicU64::new(0),
            running: Mutex::default(),
            ended: Signal::default(),
        })
    }

    /// Offload these blocks, if they are as many as the configuration asks for. Returns one result a block; none when
    /// they are too few, which moves nothing.
    pub fn offload_all(&self, manager: &dyn BlockManager, blocks: &[BlockId]) -> Vec<Result<BlockLocation, Error>> {
        if blocks.len() < self.threshold as usize {
            return Vec::new();
        }
        blocks.iter().map(|block| manager.offload_block(*block)).collect()
    }

    /// End all transfers; those that come later fail at once. Any thread may call it.
    pub fn shut_down(&self) {
        self.ended.set();
        lock(&self.running).values().for_each(|stop| stop.ask());
    }

    /// Run `begin` until it succeeds, fails for good, or was tried often enough.
    fn tried<T>(&self, begin: impl Fn() -> Transfer<T>) -> Result<T, KvFabricError> {
        let RemoteSettings { backoff, stall_after, clock, .. } = &self.settings;
        let mut gaps = backoff.gaps();
        loop {
            let error = match self.run(begin(), clock.as_ref(), *stall_after) {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            match gaps.next() {
                Some(gap) if error.may_pass() => clock.wait(&self.ended, gap),
                _ => return Err(error),
            }
        }
    }

    fn run<T>(&self, transfer: Transfer<T>, clock: &dyn Clock, stall: Duration) -> Result<T, KvFabricError> {
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        lock(&self.running).insert(number, transfer.canceller());
        // After it can be found: either `shut_down` cancels it, or this does.
        if self.ended.is_set() {
            transfer.cancel();
        }
        let result = transfer.wait(clock, stall);
        lock(&self.running).remove(&number);
        result
    }

    fn buffer(&self) -> Result<Buffer<'_>, FabricError> {
        let index = lock(&self.free).pop();
        let index = index.ok_or_else(|| FabricError::Failed("every buffer is moving another block".into()))?;
        Ok(Buffer { blocks: self, index })
    }
}

impl Fabric for RemoteBlocks {
    fn offload(&self, block: BlockId, index: u32) -> Result<u64, FabricError> {
        let failed = |error: KvFabricError| FabricError::Failed(error.to_string());
        let buffer = self.buffer()?;
        let mut lease = self.buffers.write(buffer.index).map_err(|error| failed(error.into()))?;
        self.device.read(index, &mut lease);
        drop(lease);
        let handle = self.last.fetch_add(1, Ordering::Relaxed);
        // A block that is offloaded again may have other contents.
        let mut name = [0; 16];
        name[..8].copy_from_slice(&block.0.to_le_bytes());
        name[8..].copy_from_slice(&handle.to_le_bytes());
        let hash = BlockHash::of(&name);
        let offer = self.fabric.offer(self.memory, &[Offered { index: buffer.index, hash }]).map_err(failed)?;
        let kept = self.tried(|| self.fabric.keep(self.settings.peer, offer));
        self.fabric.release(offer);
        let Kept { offers, checksums, .. } = kept.map_err(failed)?;
        let (Some(offer), Some(checksum)) = (offers.first(), checksums.first()) else {
            return Err(FabricError::Failed("the peer kept no block".into()));
        };
        lock(&self.copies).insert(handle, Copied { offer: *offer, hash, checksum: *checksum });
        Ok(handle)
    }

    fn ingest(&self, handle: u64, index: u32) -> Result<(), FabricError> {
        let Some(copied) = lock(&self.copies).get(&handle).copied() else { return Err(FabricError::Lost) };
        let buffer = self.buffer()?;
        let Copied { offer, hash, checksum } = copied;
        let target = Target { memory: self.memory, index: buffer.index, hash, checksum: Some(checksum) };
        let fetched = self.tried(|| self.fabric.fetch(self.settings.peer, offer, &[target]));
        let read = fetched.and_then(|()| Ok(self.buffers.read(buffer.index)?));
        match read {
            Ok(contents) => {
                self.device.write(index, &contents);
                Ok(())
            }
            Err(error) if is_lost(&error) => {
                tracing::warn!(%error, "an offloaded KV block is lost; it is computed again");
                lock(&self.copies).remove(&handle);
                Err(FabricError::Lost)
            }
            Err(error) => Err(FabricError::Failed(error.to_string())),
        }
    }

    fn discard(&self, handle: u64) {
        if let Some(copied) = lock(&self.copies).remove(&handle) {
            self.fabric.forget(self.settings.peer, &[copied.offer]);
        }
    }
}

/// Whether no later try can bring the copy back: it is gone, it is wrong, or the peer is now another process.
fn is_lost(error: &KvFabricError) -> bool {
    match error {
        KvFabricError::UnknownOffer { .. } | KvFabricError::Different { .. } | KvFabricError::Corrupt { .. } => true,
        KvFabricError::Refused { refused, .. } => refused.why != Refusal::Busy,
        _ => false,
    }
}

/// A buffer in use.
struct Buffer<'a> {
    blocks: &'a RemoteBlocks,
    index: u32,
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        lock(&self.blocks.free).push(self.index);
    }
}
