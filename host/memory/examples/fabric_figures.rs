//! What moving KV blocks between two processes costs, beside what moves bytes without them: memory and raw sockets. One
//! JSON line a figure and round.
//!
//!     fabric_figures tcp [--rounds N] [--blocks N] [--block-bytes N]
//!     fabric_figures kills ...
//!
//! `raw-serve` is the other side of the raw sockets.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use meridian_memory::fabric::{
    BlockHash, Fingerprint, KvFabric, MemoryId, Node, NodeSettings, OfferId, Region, SystemClock, Target,
};

/// As iperf writes.
const PIECE_BYTES: usize = 128 << 10;
const STALL: Duration = Duration::from_secs(30);

type Any = Box<dyn std::error::Error>;

struct Options {
    rounds: u32,
    blocks: u32,
    block_bytes: u32,
}

fn main() -> Result<(), Any> {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().ok_or("expected tcp, kills or raw-serve")?;
    let mut options = Options { rounds: 5, blocks: 128, block_bytes: 2 << 20 };
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("{name}: no value"))?;
        match name.as_str() {
            "--rounds" => options.rounds = value.parse()?,
            "--blocks" => options.blocks = value.parse()?,
            "--block-bytes" => options.block_bytes = value.parse()?,
            _ => return Err(format!("{name}: no such option").into()),
        }
    }
    match what.as_str() {
        "raw-serve" => raw_serve(&options),
        "tcp" => tcp(&options),
        "kills" => kills(&options),
        _ => Err(format!("{what}: expected tcp, kills or raw-serve").into()),
    }
}

fn line(name: &str, round: u32, bytes: u64, took: Duration, is_equal: bool) {
    let rate = bytes as f64 / took.as_secs_f64() / 1e9;
    println!("{{\"name\":\"{name}\",\"round\":{round},\"gb_s\":{rate:.4},\"bytes\":{bytes},\"equal\":{is_equal}}}");
}

/// As `kv-peer --offer` fills it.
fn is_pattern(contents: &[u8], index: u32) -> bool {
    contents.iter().enumerate().all(|(place, byte)| *byte == (place as u32).wrapping_mul(31).wrapping_add(index) as u8)
}

fn hash(index: u32) -> BlockHash {
    BlockHash::of(&index.to_le_bytes())
}

/// A child that says in one line where it is.
struct Other {
    child: Child,
    words: Vec<String>,
}

impl Other {
    fn start(mut command: Command) -> Result<Self, Any> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() { Err("the other process did not start".into()) } else { Ok(Self { child, words }) }
    }

    fn peer(options: &Options, more: &[String]) -> Result<Self, Any> {
        let program =
            std::env::current_exe()?.parent().and_then(|folder| folder.parent()).ok_or("no folder")?.join("kv-peer");
        let mut command = Command::new(program);
        command.args(["--model", "m", "--layout", "l", "--block-bytes", &options.block_bytes.to_string()]).args(more);
        Self::start(command)
    }

    fn address(&self) -> Result<SocketAddr, Any> {
        Ok(self.words[0].parse()?)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Raw sockets: sends its memory, or one piece again and again, as often as it is asked.
fn raw_serve(options: &Options) -> Result<(), Any> {
    let region = Region::allocate(options.blocks, options.block_bytes)?;
    for index in 0..options.blocks {
        region.write(index)?.fill(index as u8 + 1);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    std::io::stdout().flush()?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let blocks = (0..options.blocks).map(|index| region.read(index)).collect::<Result<Vec<_>, _>>()?;
    let mut ask = [0];
    while stream.read_exact(&mut ask).is_ok() {
        for block in &blocks {
            if ask[0] == b'm' {
                stream.write_all(block)?;
            } else {
                for _ in 0..block.len() / PIECE_BYTES {
                    stream.write_all(&blocks[0][..PIECE_BYTES])?;
                }
            }
        }
    }
    Ok(())
}

struct Raw {
    stream: TcpStream,
    _serving: Other,
}

impl Raw {
    fn start(options: &Options) -> Result<Self, Any> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["raw-serve", "--blocks", &options.blocks.to_string()]);
        command.args(["--block-bytes", &options.block_bytes.to_string()]);
        let serving = Other::start(command)?;
        let stream = TcpStream::connect(serving.address()?)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, _serving: serving })
    }

    /// From the other process's memory to this region.
    fn memory(&mut self, to: &Arc<Region>) -> Result<Duration, Any> {
        let begun = Instant::now();
        self.stream.write_all(b"m")?;
        for index in 0..to.blocks() {
            self.stream.read_exact(&mut to.write(index)?)?;
        }
        Ok(begun.elapsed())
    }

    /// One piece that stays in the cache on both sides, as iperf does it.
    fn pieces(&mut self, bytes: usize, piece: &mut [u8]) -> Result<Duration, Any> {
        let begun = Instant::now();
        self.stream.write_all(b"p")?;
        for _ in 0..bytes / PIECE_BYTES {
            self.stream.read_exact(piece)?;
        }
        Ok(begun.elapsed())
    }
}

fn memcpy(from: &Arc<Region>, to: &Arc<Region>) -> Result<Duration, Any> {
    let begun = Instant::now();
    for index in 0..to.blocks() {
        to.write(index)?.copy_from_slice(&from.read(index)?[..]);
    }
    Ok(begun.elapsed())
}

fn settings(options: &Options) -> NodeSettings {
    NodeSettings::new(Fingerprint::of(b"m"), Fingerprint::of(b"l"), options.block_bytes)
}

/// Fetch all blocks of the peer's offer; the time, and whether all of them are as they were filled.
fn fetch(
    node: &Node,
    memory: MemoryId,
    to: &Arc<Region>,
    peer: SocketAddr,
    offer: OfferId,
) -> Result<(Duration, bool), Any> {
    for index in 0..to.blocks() {
        let mut block = to.write(index)?;
        block[0] ^= 0xff;
        let end = block.len() - 1;
        block[end] ^= 0xff;
    }
    let target = |index| Target { memory, index, hash: hash(index), checksum: None };
    let targets: Vec<Target> = (0..to.blocks()).map(target).collect();
    let begun = Instant::now();
    node.fetch(peer, offer, &targets).wait(&SystemClock::default(), STALL)?;
    let took = begun.elapsed();
    let is_equal = (0..to.blocks()).all(|index| to.read(index).is_ok_and(|block| is_pattern(&block, index)));
    Ok((took, is_equal))
}

fn tcp(options: &Options) -> Result<(), Any> {
    let bytes = u64::from(options.blocks) * u64::from(options.block_bytes);
    let (from, to) = (
        Region::allocate(options.blocks, options.block_bytes)?,
        Region::allocate(options.blocks, options.block_bytes)?,
    );
    for index in 0..options.blocks {
        from.write(index)?.fill(1);
    }
    let mut raw = Raw::start(options)?;
    let peer = Other::peer(options, &["--offer".into(), options.blocks.to_string()])?;
    let (address, offer) = (peer.address()?, OfferId(peer.words[1].parse()?));
    let node = Node::start(settings(options))?;
    let memory = node.register(&to)?;
    let mut piece = vec![0; PIECE_BYTES];
    // The first round touches all memory and opens the connections.
    for round in 0..=options.rounds {
        let copied = memcpy(&from, &to)?;
        let raw_memory = raw.memory(&to)?;
        let raw_pieces = raw.pieces(bytes as usize, &mut piece)?;
        let (fetched, is_equal) = fetch(&node, memory, &to, address, offer)?;
        if round > 0 {
            line("memcpy", round, bytes, copied, true);
            line("raw sockets, memory to memory", round, bytes, raw_memory, true);
            line("raw sockets, one piece", round, bytes, raw_pieces, true);
            line("tcp", round, bytes, fetched, is_equal);
        }
    }
    Ok(())
}

/// A peer that is killed at some moment of a transfer, as often as there are rounds. A transfer that failed is asked of
/// another peer. One line: how many were cut short, and how many did not end well at last.
fn kills(options: &Options) -> Result<(), Any> {
    let offer = ["--offer".to_owned(), options.blocks.to_string()];
    let node = Node::start(settings(options))?;
    let to = node.allocate(options.blocks, options.block_bytes)?;
    let memory = node.register(&to)?;
    let (mut cut, mut lost, mut held, mut state) = (0, 0, 0, 1_u64);
    let mut spare = Other::peer(options, &offer)?;
    let whole = fetch(&node, memory, &to, spare.address()?, OfferId(spare.words[1].parse()?))?.0;
    for _ in 0..options.rounds {
        let mut peer = std::mem::replace(&mut spare, Other::peer(options, &offer)?);
        let target = |index| Target { memory, index, hash: hash(index), checksum: None };
        let targets: Vec<Target> = (0..to.blocks()).map(target).collect();
        let transfer = node.fetch(peer.address()?, OfferId(peer.words[1].parse()?), &targets);
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Some moment of one and a half transfers.
        std::thread::sleep(whole.mul_f64((state >> 40) as f64 / (1 << 24) as f64 * 1.5));
        peer.child.kill()?;
        peer.child.wait()?;
        let is_cut = transfer.wait(&SystemClock::default(), STALL).is_err();
        held += u32::from((0..to.blocks()).any(|index| to.write(index).is_err()));
        if is_cut {
            cut += 1;
            let (_, is_equal) = fetch(&node, memory, &to, spare.address()?, OfferId(spare.words[1].parse()?))?;
            lost += u32::from(!is_equal);
        } else {
            lost +=
                u32::from(!(0..to.blocks()).all(|index| to.read(index).is_ok_and(|block| is_pattern(&block, index))));
        }
    }
    println!("{{\"name\":\"kills\",\"transfers\":{},\"cut\":{cut},\"lost\":{lost},\"held\":{held}}}", options.rounds);
    Ok(())
}
