//! `offload_block` and `ingest_block` of a block manager, with the blocks in the memory of another process.

#![cfg(feature = "fabric")]
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use meridian_core::config::DisaggConfig;
use meridian_core::{BlockId, ThinkPhase};
use meridian_memory::fabric::mooncake::Mooncake;
use meridian_memory::fabric::nixl::Nixl;
use meridian_memory::fabric::{
    Backoff, BlockHash, DataPath, Key, KvFabric, KvFabricError, Node, NodeSettings, SystemClock, Target,
};
use meridian_memory::{
    BeginKv, BlockLocation, BlockManager, DeviceMemory, Error, FabricError, KvMemory, PhaseAwareBlockManager,
    RemoteBlocks, RemoteSettings, RequestId,
};

use support::{Hasty, Peer, settings};

use crate::support;

const BYTES: u32 = 64 << 10;
const BLOCKS: u32 = 8;

/// Memory of an engine. The contents of a block are a function of its seed.
struct Device(Mutex<Vec<Vec<u8>>>);

impl Device {
    fn compute(&self, index: u32, seed: u64) {
        let mut blocks = self.0.lock().unwrap();
        for (place, byte) in blocks[index as usize].iter_mut().enumerate() {
            *byte = (place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed * 7919).to_le_bytes()[5];
        }
    }

    fn holds(&self, index: u32, seed: u64) -> bool {
        let other = Self(Mutex::new(vec![vec![0; BYTES as usize]]));
        other.compute(0, seed);
        let expected = other.0.into_inner().unwrap();
        self.0.lock().unwrap()[index as usize] == expected[0]
    }

    fn wipe(&self) {
        self.0.lock().unwrap().iter_mut().for_each(|block| block.fill(0xEE));
    }
}

impl DeviceMemory for Device {
    fn read(&self, index: u32, to: &mut [u8]) {
        to.copy_from_slice(&self.0.lock().unwrap()[index as usize]);
    }

    fn write(&self, index: u32, from: &[u8]) {
        self.0.lock().unwrap()[index as usize].copy_from_slice(from);
    }
}

/// An engine with a block manager whose blocks go to `peer`.
struct Engine {
    manager: PhaseAwareBlockManager,
    remote: Arc<RemoteBlocks>,
    device: Arc<Device>,
    clock: Arc<Hasty>,
    next: u64,
}

/// The manager owns its fabric; the test also asks it to shut down.
struct Shared(Arc<RemoteBlocks>);

impl meridian_memory::Fabric for Shared {
    fn offload(&self, block: BlockId, index: u32) -> Result<u64, FabricError> {
        self.0.offload(block, index)
    }

    fn ingest(&self, handle: u64, index: u32) -> Result<(), FabricError> {
        self.0.ingest(handle, index)
    }

    fn discard(&self, handle: u64) {
        self.0.discard(handle);
    }
}

impl Engine {
    fn start(peer: std::net::SocketAddr, node: NodeSettings, stall_after: Duration) -> Self {
        let device = Arc::new(Device(Mutex::new(vec![vec![0; BYTES as usize]; BLOCKS as usize])));
        let clock = Arc::new(Hasty::default());
        let settings = RemoteSettings {
            backoff: Backoff { tries: 3, first: Duration::from_millis(10), most: Duration::from_millis(15) },
            stall_after,
            clock: Arc::clone(&clock) as Arc<_>,
            ..RemoteSettings::new(peer)
        };
        let fabric = Arc::new(Node::start(node).unwrap());
        let config = DisaggConfig { offload_threshold_blocks: 2, ..DisaggConfig::default() };
        let memory = Arc::clone(&device) as Arc<dyn DeviceMemory>;
        let remote = Arc::new(RemoteBlocks::new(fabric, memory, BYTES, &config, settings).unwrap());
        let memory = KvMemory {
            capacity_bytes: u64::from(BYTES * BLOCKS),
            block_size_bytes: BYTES.into(),
            think_fraction_limit: 1.0,
        };
        let manager = PhaseAwareBlockManager::new(&memory).unwrap().with_fabric(Shared(Arc::clone(&remote)));
        Self { manager, remote, device, clock, next: 0 }
    }

    /// A request that computes `count` blocks and ends: they are cache. Returns them with their seeds.
    fn cached(&mut self, count: u32) -> Vec<(BlockId, u64)> {
        self.next += 1;
        let request = RequestId(self.next);
        self.manager.begin(request, &BeginKv::default()).unwrap();
        let blocks = self.manager.allocate(request, count).unwrap().blocks;
        let seeded: Vec<_> =
            blocks.iter().enumerate().map(|(at, block)| (*block, self.next * 100 + at as u64)).collect();
        for (block, seed) in &seeded {
            self.device.compute(self.index(*block), *seed);
        }
        self.manager.set_phase(request, ThinkPhase::Output, 0).unwrap();
        self.manager.finish(request, self.next as f64).unwrap();
        seeded
    }

    fn index(&self, block: BlockId) -> u32 {
        match self.manager.block_location(block) {
            Some(BlockLocation::Device { index }) => index,
            other => panic!("{block}: {other:?}"),
        }
    }

    fn is_remote(&self, block: BlockId) -> bool {
        matches!(self.manager.block_location(block), Some(BlockLocation::Remote { .. }))
    }

    /// The block cannot come back: drop it, and let a request compute it again.
    fn compute_again(&mut self, block: BlockId, seed: u64) {
        if self.manager.block_location(block).is_some() {
            self.manager.discard(block).unwrap();
        }
        self.next += 1;
        let request = RequestId(self.next);
        self.manager.begin(request, &BeginKv::default()).unwrap();
        let again = self.manager.allocate(request, 1).unwrap().blocks[0];
        self.device.compute(self.index(again), seed);
        assert!(self.device.holds(self.index(again), seed));
        self.manager.finish(request, self.next as f64).unwrap();
        self.manager.audit().unwrap();
    }
}

/// A whole stay: out, the device is overwritten, back, equal.
fn there_and_back(engine: &mut Engine) {
    for round in 0..3 {
        let blocks = engine.cached(BLOCKS);
        for (block, _) in &blocks {
            assert!(matches!(engine.manager.offload_block(*block), Ok(BlockLocation::Remote { .. })), "round {round}");
        }
        let stats = engine.manager.stats();
        assert_eq!((stats.remote, stats.free, stats.cached), (BLOCKS, BLOCKS, 0));
        engine.device.wipe();
        for (block, seed) in &blocks {
            assert!(engine.manager.ingest_block(*block).unwrap().blocks.is_empty());
            assert!(engine.device.holds(engine.index(*block), *seed), "round {round}: {block}");
        }
        engine.manager.audit().unwrap();
        for (block, _) in blocks {
            engine.manager.discard(block).unwrap();
        }
    }
}

fn failed(result: Result<impl std::fmt::Debug, Error>) -> FabricError {
    match result {
        Err(Error::Fabric { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

const LONG: Duration = Duration::from_secs(1 << 40);

#[test]
fn over_tcp_blocks_come_back_equal() {
    let peer = Peer::of(BYTES, BLOCKS, &[]);
    there_and_back(&mut Engine::start(peer.address, settings(BYTES), LONG));
}

#[test]
fn peers_with_a_key_exchange_blocks() {
    let file = std::env::temp_dir().join(format!("meridian-key-{}", std::process::id()));
    std::fs::write(&file, "a key that both processes read\n").unwrap();
    let peer = Peer::of(BYTES, BLOCKS, &["--key-file", file.to_str().unwrap()]);
    let key = Some(Key::new(b"a key that both processes read").unwrap());
    there_and_back(&mut Engine::start(peer.address, NodeSettings { key, ..settings(BYTES) }, LONG));
    let mut stranger = Engine::start(peer.address, settings(BYTES), LONG);
    let (block, seed) = stranger.cached(1)[0];
    let error = failed(stranger.manager.offload_block(block));
    assert!(error.to_string().ends_with("the peer does not know the shared key"), "{error}");
    assert!(stranger.device.holds(stranger.index(block), seed));
    std::fs::remove_file(file).unwrap();
}

/// A peer that dies: this side loses nothing, and computes the kept blocks again.
fn dies(mut peer: Peer, engine: &mut Engine) {
    let blocks = engine.cached(BLOCKS);
    for (block, _) in &blocks[..4] {
        engine.manager.offload_block(*block).unwrap();
    }
    peer.kill();
    // Not offloaded, and still here.
    for (block, seed) in &blocks[4..] {
        assert!(matches!(failed(engine.manager.offload_block(*block)), FabricError::Failed(_)));
        assert!(engine.device.holds(engine.index(*block), *seed));
    }
    let (first, second) = (Duration::from_millis(10), Duration::from_millis(15));
    assert_eq!(engine.clock.take_gaps(), [first, second].repeat(4), "each was tried three times");
    for (block, seed) in &blocks[..4] {
        assert!(matches!(failed(engine.manager.ingest_block(*block)), FabricError::Failed(_)));
        assert!(engine.is_remote(*block), "the peer may only be out of reach");
        engine.manager.audit().unwrap();
        engine.compute_again(*block, *seed);
    }
}

/// A peer that dies while it sends: the transfer ends, and nothing writes to the targets any more.
fn dies_in_the_middle(more: &[&str], node: impl FnOnce(NodeSettings) -> NodeSettings) {
    const LARGE: u32 = 1 << 20;
    const COUNT: u32 = 192;
    let mut peer = Peer::of(LARGE, 0, &[&["--offer", COUNT.to_string().as_str()][..], more].concat());
    let node = Node::start(node(settings(LARGE))).unwrap();
    let to = node.allocate(COUNT, LARGE).unwrap();
    let memory = node.register(&to).unwrap();
    let target = |index: u32| {
        let hash = BlockHash::of(&index.to_le_bytes());
        Target { memory, index, hash, checksum: None }
    };
    let targets: Vec<Target> = (0..COUNT).map(target).collect();
    let transfer = node.fetch(peer.address, peer.offer.unwrap(), &targets);
    while transfer.moved_bytes() == 0 {
        std::thread::yield_now();
    }
    peer.kill();
    let error = transfer.wait(&SystemClock::default(), Duration::from_secs(60)).unwrap_err();
    assert!(matches!(error, KvFabricError::Ended { .. } | KvFabricError::Path { .. }), "{error:?}");
    assert!((0..COUNT).all(|index| to.write(index).is_ok()));
}

#[test]
fn over_tcp_a_peer_is_killed_in_the_middle() {
    dies_in_the_middle(&[], |settings| settings);
}

#[test]
fn over_tcp_a_peer_is_killed() {
    let peer = Peer::of(BYTES, BLOCKS, &[]);
    let address = peer.address;
    dies(peer, &mut Engine::start(address, settings(BYTES), LONG));
}

#[test]
fn a_peer_that_starts_again_has_lost_the_blocks() {
    let mut peer = Peer::of(BYTES, BLOCKS, &[]);
    let mut engine = Engine::start(peer.address, settings(BYTES), LONG);
    let blocks = engine.cached(3);
    for (block, _) in &blocks {
        engine.manager.offload_block(*block).unwrap();
    }
    let address = peer.address.to_string();
    peer.kill();
    let again = Peer::of(BYTES, BLOCKS, &["--listen", &address]);
    let [(first, seed), (second, other), (third, last)] = blocks[..] else { panic!("three blocks") };
    assert_eq!(failed(engine.manager.ingest_block(first)), FabricError::Lost);
    assert_eq!(engine.manager.block_location(first), None);
    engine.compute_again(first, seed);
    // Offers of the new process have the numbers of the old one's; the hash tells them apart.
    for (fresh, _) in engine.cached(2) {
        engine.manager.offload_block(fresh).unwrap();
    }
    assert_eq!(failed(engine.manager.ingest_block(second)), FabricError::Lost);
    engine.compute_again(second, other);
    // A process with other blocks at the address.
    drop(again);
    let _other = Peer::start(&[
        "--model",
        support::MODEL,
        "--layout",
        "another layout",
        "--block-bytes",
        &BYTES.to_string(),
        "--blocks",
        "8",
        "--listen",
        &address,
    ]);
    assert_eq!(failed(engine.manager.ingest_block(third)), FabricError::Lost);
    engine.compute_again(third, last);
    let (block, seed) = engine.cached(1)[0];
    let error = failed(engine.manager.offload_block(block));
    assert!(error.to_string().contains("refused: layout "), "{error}");
    assert!(engine.device.holds(engine.index(block), seed));
}

#[test]
fn a_peer_without_room_changes_nothing() {
    let peer = Peer::of(BYTES, 0, &[]);
    let mut engine = Engine::start(peer.address, settings(BYTES), LONG);
    let (block, seed) = engine.cached(1)[0];
    assert_eq!(failed(engine.manager.offload_block(block)).to_string(), KvFabricError::Full.to_string());
    assert!(engine.device.holds(engine.index(block), seed));
    engine.manager.audit().unwrap();
}

#[test]
fn a_peer_that_is_full_drops_the_oldest_which_is_computed_again() {
    let peer = Peer::of(BYTES, 2, &[]);
    let mut engine = Engine::start(peer.address, settings(BYTES), LONG);
    let blocks = engine.cached(3);
    for (block, _) in &blocks {
        engine.manager.offload_block(*block).unwrap();
    }
    let (oldest, seed) = blocks[0];
    assert_eq!(failed(engine.manager.ingest_block(oldest)), FabricError::Lost);
    engine.compute_again(oldest, seed);
    for (block, seed) in &blocks[1..] {
        engine.manager.ingest_block(*block).unwrap();
        assert!(engine.device.holds(engine.index(*block), *seed));
    }
}

#[test]
fn a_frozen_peer_stalls_no_longer_than_the_callers_clock_says() {
    let peer = Peer::of(BYTES, BLOCKS, &[]);
    let mut engine = Engine::start(peer.address, settings(BYTES), Duration::from_secs(7200));
    let blocks = engine.cached(2);
    // The clock hurries: without a frozen peer, the transfer may stall as well, and is tried again.
    let kept = engine.manager.offload_block(blocks[0].0).is_ok();
    peer.freeze();
    let error = failed(engine.manager.offload_block(blocks[1].0));
    assert_eq!(error.to_string(), KvFabricError::Stalled.to_string());
    assert!(engine.device.holds(engine.index(blocks[1].0), blocks[1].1));
    assert!(engine.clock.waited() >= Duration::from_secs(3 * 7200), "each of three tries");
    if kept {
        assert!(matches!(failed(engine.manager.ingest_block(blocks[0].0)), FabricError::Failed(_)));
    }
    engine.manager.audit().unwrap();
}

#[test]
fn shutting_down_cancels_what_runs_and_what_comes() {
    let peer = Peer::of(BYTES, BLOCKS, &[]);
    let mut engine = Engine::start(peer.address, settings(BYTES), LONG);
    let blocks = engine.cached(2);
    engine.manager.offload_block(blocks[0].0).unwrap();
    peer.freeze();
    std::thread::scope(|threads| {
        let (manager, remote) = (&engine.manager, &engine.remote);
        let second = blocks[1].0;
        let running = threads.spawn(move || failed(manager.offload_block(second)));
        remote.shut_down();
        assert_eq!(running.join().unwrap().to_string(), KvFabricError::Cancelled.to_string());
        assert_eq!(failed(manager.ingest_block(blocks[0].0)).to_string(), KvFabricError::Cancelled.to_string());
    });
    assert!(engine.device.holds(engine.index(blocks[1].0), blocks[1].1));
    engine.manager.audit().unwrap();
}

#[test]
fn few_blocks_are_not_worth_a_transfer() {
    let peer = Peer::of(BYTES, BLOCKS, &[]);
    let mut engine = Engine::start(peer.address, settings(BYTES), LONG);
    let blocks: Vec<BlockId> = engine.cached(2).into_iter().map(|(block, _)| block).collect();
    assert!(engine.remote.offload_all(&engine.manager, &blocks[..1]).is_empty());
    assert_eq!(engine.manager.stats().remote, 0);
    let moved = engine.remote.offload_all(&engine.manager, &blocks);
    assert!(moved.iter().all(Result::is_ok) && moved.len() == 2, "{moved:?}");
    assert_eq!(engine.manager.stats().remote, 2);
}

/// The library of the wheel, which `scripts/fetch.sh nixl` fetches once; the plugins beside it, and UCX on loopback.
fn nixl() -> (PathBuf, Vec<(&'static str, String)>) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/fetch.sh");
    let found = std::process::Command::new(script).arg("nixl").output().unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    let library = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
    let plugins = library.with_file_name("plugins").to_str().unwrap().to_owned();
    let environment =
        vec![("NIXL_PLUGIN_DIR", plugins), ("UCX_NET_DEVICES", "lo".into()), ("UCX_TLS", "tcp,sysv,posix,cma".into())];
    (library, environment)
}

/// UCX reads its environment when it is loaded, and another test may be reading the environment now: so this test runs
/// itself again, in a process that has it.
fn with_nixl(test: &str, run: impl FnOnce(PathBuf)) {
    let (library, environment) = nixl();
    if std::env::var_os("NIXL_PLUGIN_DIR").is_some() {
        return run(library);
    }
    again(std::process::Command::new(std::env::current_exe().unwrap()).envs(environment), test);
}

/// Run a test of this file, and no other, by a command that is this program.
fn again(program: &mut std::process::Command, test: &str) {
    let (_, module) = module_path!().split_once("::").unwrap();
    let done = program.args(["--exact", &format!("{module}::{test}"), "--nocapture"]).output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && said.contains("1 passed"), "{said}");
}

fn nixl_settings(library: &std::path::Path) -> NodeSettings {
    NodeSettings { path: Some(Nixl::open(library).unwrap() as Arc<dyn DataPath>), ..settings(BYTES) }
}

#[test]
fn over_nixl_blocks_come_back_equal() {
    with_nixl("over_nixl_blocks_come_back_equal", |library| {
        let peer = Peer::of(BYTES, BLOCKS, &["--nixl", library.to_str().unwrap()]);
        there_and_back(&mut Engine::start(peer.address, nixl_settings(&library), LONG));
    });
}

#[test]
fn over_nixl_a_peer_is_killed() {
    with_nixl("over_nixl_a_peer_is_killed", |library| {
        let peer = Peer::of(BYTES, BLOCKS, &["--nixl", library.to_str().unwrap()]);
        let address = peer.address;
        dies(peer, &mut Engine::start(address, nixl_settings(&library), LONG));
    });
}

#[test]
fn a_peer_over_tcp_is_refused_by_one_over_nixl() {
    with_nixl("a_peer_over_tcp_is_refused_by_one_over_nixl", |library| {
        let peer = Peer::of(BYTES, BLOCKS, &[]);
        let mut engine = Engine::start(peer.address, nixl_settings(&library), LONG);
        let (block, seed) = engine.cached(1)[0];
        let error = failed(engine.manager.offload_block(block));
        assert!(error.to_string().ends_with("refused: fabric tcp, expected nixl"), "{error}");
        assert!(engine.device.holds(engine.index(block), seed));
    });
}

/// The command of Mooncake's process, whose package `scripts/fetch.sh mooncake` fetches once.
fn mooncake() -> String {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/fetch.sh");
    let found = std::process::Command::new(script).arg("mooncake").output().unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    String::from_utf8(found.stdout).unwrap().trim().to_owned()
}

/// Mooncake listens on every address: the test runs itself again where there is only loopback.
fn with_mooncake(test: &str, run: impl FnOnce(&str)) {
    let inside = "MERIDIAN_LOOPBACK_ONLY";
    if let Ok(command) = std::env::var(inside) {
        return run(&command);
    }
    let mut alone = std::process::Command::new("unshare");
    alone.args(["--map-root-user", "--net", "sh", "-c", "ip link set lo up && exec \"$@\"", "sh"]);
    again(alone.arg(std::env::current_exe().unwrap()).env(inside, mooncake()), test);
}

fn mooncake_settings(command: &str) -> NodeSettings {
    let words: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    NodeSettings { path: Some(Mooncake::start(&words).unwrap() as Arc<dyn DataPath>), ..settings(BYTES) }
}

#[test]
fn over_mooncake_blocks_come_back_equal() {
    with_mooncake("over_mooncake_blocks_come_back_equal", |command| {
        let peer = Peer::of(BYTES, BLOCKS, &["--mooncake", command]);
        there_and_back(&mut Engine::start(peer.address, mooncake_settings(command), LONG));
    });
}

#[test]
fn over_nixl_a_peer_is_killed_in_the_middle() {
    with_nixl("over_nixl_a_peer_is_killed_in_the_middle", |library| {
        let path = nixl_settings(&library).path;
        dies_in_the_middle(&["--nixl", library.to_str().unwrap()], |settings| NodeSettings { path, ..settings });
    });
}

#[test]
fn over_mooncake_a_peer_is_killed_in_the_middle() {
    with_mooncake("over_mooncake_a_peer_is_killed_in_the_middle", |command| {
        let path = mooncake_settings(command).path;
        dies_in_the_middle(&["--mooncake", command], |settings| NodeSettings { path, ..settings });
    });
}

#[test]
fn over_mooncake_a_peer_is_killed() {
    with_mooncake("over_mooncake_a_peer_is_killed", |command| {
        let peer = Peer::of(BYTES, BLOCKS, &["--mooncake", command]);
        let address = peer.address;
        dies(peer, &mut Engine::start(address, mooncake_settings(command), LONG));
    });
}

#[test]
fn without_its_library_or_package_a_fabric_is_unavailable() {
    let unavailable = |error: KvFabricError| match error {
        KvFabricError::Unavailable { fabric, reason } => format!("{fabric}: {reason}"),
        other => panic!("{other:?}"),
    };
    let nixl = unavailable(Nixl::open("/nowhere/libnixl_capi.so".as_ref()).err().unwrap());
    assert!(nixl.starts_with("nixl: /nowhere/libnixl_capi.so: "), "{nixl}");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python/meridian/mooncake_process.py");
    let command = ["python3", "-S", script].map(str::to_owned);
    let mooncake = unavailable(Mooncake::start(&command).err().unwrap());
    assert_eq!(mooncake, "mooncake: fabric mooncake: mooncake.engine: No module named 'mooncake'");
}
