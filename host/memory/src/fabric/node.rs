//! One process among its peers.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};

use crate::fabric::link::{Flow, Link, Mine, Room, Sink, Wanted};
use crate::fabric::offers::{Offers, checksum};
use crate::fabric::shelf::Shelf;
use crate::fabric::stream::{Broken, Inbox, send};
use crate::fabric::transfer::{Progress, locked};
use crate::fabric::wire::{
    self, Frame, Identity, Key, MAX_HANDSHAKE_BYTES, MAX_RIGHTS_BYTES, Refusal, Refused, Status, WireError,
};
use crate::fabric::{
    DataPath, FabricKind, Fingerprint, Kept, KvFabric, KvFabricError, MemoryId, OfferId, Offered, Part, Region,
    RegionError, Stop, Target, Transfer,
};

/// Most bytes that a data path reads by one request: they are verified while the next ones are read, and a transfer can end
/// in between.
const READ_BYTES: usize = 16 << 20;

/// The settings of a node.
#[derive(Clone)]
pub struct NodeSettings {
    /// The model and its weights.
    pub model: Fingerprint,
    /// The order of the bytes of a block.
    pub layout: Fingerprint,
    /// Bytes of a block over all layers.
    pub block_bytes: u32,
    /// The address to listen on; port 0 for any. Another address than loopback needs a key.
    pub listen: SocketAddr,
    /// The secret that all peers share; `None` on loopback only.
    pub key: Option<Key>,
    /// The way of the contents; `None` for the connection itself.
    pub path: Option<Arc<dyn DataPath>>,
    /// Blocks of peers that this process keeps in memory of its own.
    pub shelf_blocks: u32,
    /// Longest time for a connection and its handshake.
    pub handshake: Duration,
    /// Most connections from peers.
    pub max_links: usize,
}

impl NodeSettings {
    /// TCP on loopback, any port, no key, nothing kept for peers.
    #[must_use]
    pub fn new(model: Fingerprint, layout: Fingerprint, block_bytes: u32) -> Self {
        Self {
            model,
            layout,
            block_bytes,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            key: None,
            path: None,
            shelf_blocks: 0,
            handshake: Duration::from_secs(5),
            max_links: 64,
        }
    }

    /// How the contents of blocks travel.
    #[must_use]
    pub fn kind(&self) -> FabricKind {
        self.path.as_ref().map_or(FabricKind::Tcp, |path| path.kind())
    }
}

type Dialled = Arc<tokio::sync::Mutex<Option<Arc<Link>>>>;

pub(crate) struct Inner {
    pub(crate) identity: Identity,
    key: Key,
    pub(crate) path: Option<Arc<dyn DataPath>>,
    pub(crate) offers: Offers,
    pub(crate) shelf: Option<Shelf>,
    regions: Mutex<Vec<Arc<Region>>>,
    /// Connections that this side made. The lock of a peer is held while it is dialled.
    dialled: Mutex<HashMap<SocketAddr, Dialled>>,
    accepted: Mutex<Vec<Arc<Link>>>,
    seats: Arc<Semaphore>,
    handshake: Duration,
    random: SystemRandom,
}

/// A process that exchanges KV blocks with peers. It has one thread, and some more while a data path reads. Dropping it
/// ends all requests and connections.
pub struct Node {
    inner: Arc<Inner>,
    address: SocketAddr,
    handle: Handle,
    stop: Arc<Stop>,
    thread: Option<JoinHandle<()>>,
}

impl Node {
    /// Bind, and begin to listen.
    ///
    /// # Errors
    /// [`KvFabricError::Settings`] for an address that cannot be used, [`KvFabricError::Region`] when there is no memory
    /// for the blocks of peers, [`KvFabricError::Path`] when it cannot be registered.
    pub fn start(settings: NodeSettings) -> Result<Self, KvFabricError> {
        let NodeSettings { model, layout, block_bytes, listen, key, path, shelf_blocks, handshake, max_links } =
            settings;
        let wrong = |text: String| KvFabricError::Settings(text);
        if !listen.ip().is_loopback() && key.is_none() {
            return Err(wrong(format!("listen address {listen}: no key is shared, expected a loopback address")));
        }
        if block_bytes == 0 {
            return Err(wrong("blocks of 0 bytes, expected at least 1".into()));
        }
        let fabric = path.as_ref().map_or(FabricKind::Tcp, |path| path.kind());
        let random = SystemRandom::new();
        let instance = fresh(&random)?;
        let identity = Identity { fabric, block_bytes, model, layout, instance };
        let shelf = match shelf_blocks {
            0 => None,
            blocks => Some(Shelf::new(allocate(path.as_deref(), blocks, block_bytes)?)),
        };
        if let (Some(path), Some(shelf)) = (&path, &shelf) {
            path.register(&shelf.region)?;
        }
        let unusable = |error: std::io::Error| wrong(format!("listen address {listen}: {error}"));
        let listener = std::net::TcpListener::bind(listen).map_err(unusable)?;
        let address = listener.local_addr().map_err(unusable)?;
        listener.set_nonblocking(true).map_err(unusable)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
        let runtime = runtime.map_err(|error| wrong(format!("no event loop: {error}")))?;
        let inner = Arc::new(Inner {
            identity,
            key: key.unwrap_or_else(Key::none),
            path,
            offers: Offers::default(),
            shelf,
            regions: Mutex::default(),
            dialled: Mutex::default(),
            accepted: Mutex::default(),
            seats: Arc::new(Semaphore::new(max_links)),
            handshake,
            random,
        });
        let (handle, stop) = (runtime.handle().clone(), Arc::new(Stop::default()));
        let (serving, stopping) = (Arc::clone(&inner), Arc::clone(&stop));
        let run = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = stopping.asked() => {}
                    () = serving.listen(listener) => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("meridian-fabric".into()).spawn(run);
        let thread = thread.map_err(|error| wrong(format!("no thread: {error}")))?;
        Ok(Self { inner, address, handle, stop, thread: Some(thread) })
    }

    /// The address for peers.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// This process, to peers.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.inner.identity
    }

    /// Blocks of peers that this process keeps.
    #[must_use]
    pub fn kept_blocks(&self) -> usize {
        self.inner.shelf.as_ref().map_or(0, Shelf::kept)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.ask();
        if let Some(thread) = self.thread.take() {
            // It panics only by a defect, which the panic has reported.
            let _ = thread.join();
        }
    }
}

impl KvFabric for Node {
    fn kind(&self) -> FabricKind {
        self.inner.identity.fabric
    }

    fn allocate(&self, blocks: u32, block_bytes: u32) -> Result<Arc<Region>, RegionError> {
        allocate(self.inner.path.as_deref(), blocks, block_bytes)
    }

    fn register(&self, region: &Arc<Region>) -> Result<MemoryId, KvFabricError> {
        let (block_bytes, expected) = (region.block_bytes(), self.inner.identity.block_bytes);
        if block_bytes != expected {
            return Err(RegionError::BlockBytes { block_bytes, expected }.into());
        }
        if let Some(path) = &self.inner.path {
            path.register(region)?;
        }
        let mut regions = locked(&self.inner.regions);
        regions.push(Arc::clone(region));
        Ok(MemoryId(u32::try_from(regions.len() - 1).expect("fewer regions")))
    }

    fn offer(&self, memory: MemoryId, blocks: &[Offered]) -> Result<OfferId, KvFabricError> {
        let region = self.inner.region(memory)?;
        self.inner.offers.add(&region, blocks, self.inner.path.is_some())
    }

    fn fetch(&self, peer: SocketAddr, offer: OfferId, targets: &[Target]) -> Transfer<()> {
        let progress = Progress::new();
        let transfer = Transfer::of(&progress);
        let ticket = Ticket(Arc::clone(&progress));
        let mut wanted = Vec::with_capacity(targets.len());
        let mut leases = Vec::with_capacity(targets.len());
        for Target { memory, index, hash, checksum } in targets {
            match self.inner.region(*memory).and_then(|region| Ok(region.write(*index)?)) {
                Ok(lease) => leases.push(lease),
                Err(error) => {
                    drop(leases);
                    progress.end(Err(error));
                    return transfer;
                }
            }
            wanted.push(Wanted { hash: *hash, checksum: *checksum });
        }
        let inner = Arc::clone(&self.inner);
        self.handle.spawn(async move {
            // Declared first, so dropped last: the leases end before the transfer does.
            let ticket = ticket;
            let room = Room::Given { wanted, leases };
            let fetched = fetch(&inner, peer, offer, room, Flow::of(&ticket.0)).await;
            ticket.0.end(fetched.map(drop));
        });
        transfer
    }

    fn release(&self, offer: OfferId) {
        self.inner.offers.remove(offer);
    }

    fn keep(&self, peer: SocketAddr, offer: OfferId) -> Transfer<Kept> {
        let progress = Progress::new();
        let transfer = Transfer::of(&progress);
        let (ticket, inner) = (Ticket(Arc::clone(&progress)), Arc::clone(&self.inner));
        self.handle.spawn(async move {
            let kept = keep(&inner, peer, offer, &Flow::of(&ticket.0)).await;
            ticket.0.end(kept);
        });
        transfer
    }

    fn forget(&self, peer: SocketAddr, kept: &[OfferId]) {
        let (inner, offers) = (Arc::clone(&self.inner), kept.to_vec());
        self.handle.spawn(async move {
            if let Ok(link) = inner.link(peer).await {
                link.send(&Frame::Forget { offers });
            }
        });
    }
}

fn allocate(path: Option<&dyn DataPath>, blocks: u32, block_bytes: u32) -> Result<Arc<Region>, RegionError> {
    path.map_or_else(|| Region::allocate(blocks, block_bytes), |path| path.allocate(blocks, block_bytes))
}

/// Ends a request even when its task is dropped.
struct Ticket<T>(Arc<Progress<T>>);

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        self.0.end(Err(KvFabricError::Cancelled));
    }
}

impl Flow {
    fn of<T: Send + 'static>(progress: &Arc<Progress<T>>) -> Self {
        let moved = Arc::clone(progress);
        Self {
            cancel: Arc::clone(&progress.cancel),
            abort: Arc::clone(&progress.abort),
            moved: Arc::new(move |bytes| moved.moved(bytes)),
        }
    }

    /// For a task of the node, which nothing cancels.
    fn free() -> Self {
        Self { cancel: Arc::default(), abort: Arc::default(), moved: Arc::new(|_| ()) }
    }

    /// Do it, unless the caller stops it first.
    async fn unless_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T, KvFabricError> {
        tokio::select! {
            done = work => Ok(done),
            () = self.cancel.asked() => Err(KvFabricError::Cancelled),
            () = self.abort.asked() => Err(KvFabricError::Stalled),
        }
    }
}

fn fresh<const N: usize>(random: &SystemRandom) -> Result<[u8; N], KvFabricError> {
    let mut bytes = [0; N];
    random.fill(&mut bytes).map_err(|_| KvFabricError::Settings("the system has no random numbers".into()))?;
    Ok(bytes)
}

/// Fetch an offer of a peer into `room`, verified.
async fn fetch(
    inner: &Arc<Inner>,
    peer: SocketAddr,
    offer: OfferId,
    room: Room,
    flow: Flow,
) -> Result<Box<Sink>, KvFabricError> {
    let link = flow.unless_stopped(inner.link(peer)).await??;
    pull(inner, &link, offer, room, flow).await
}

async fn pull(
    inner: &Arc<Inner>,
    link: &Arc<Link>,
    offer: OfferId,
    room: Room,
    flow: Flow,
) -> Result<Box<Sink>, KvFabricError> {
    let peer = link.peer;
    let (sink, mut pulled) = Sink::new(room, flow.clone());
    let id = link.ask(Mine::Fetch(sink), |id| Frame::Fetch { id, offer });
    let ended = |_| Err(KvFabricError::Ended { peer });
    let pulled = tokio::select! {
        pulled = &mut pulled => pulled.unwrap_or_else(ended),
        () = flow.cancel.asked() => {
            if link.take(id).is_some() {
                link.send(&Frame::Close { id });
                return Err(KvFabricError::Cancelled);
            }
            pulled.await.unwrap_or_else(ended)
        }
        () = flow.abort.asked() => {
            link.end.ask();
            let _ = pulled.await;
            return Err(KvFabricError::Stalled);
        }
    };
    let sink = match pulled {
        Err(KvFabricError::UnknownOffer { .. }) => return Err(KvFabricError::UnknownOffer { offer }),
        pulled => pulled?,
    };
    let Some(path) = inner.path.clone() else { return Ok(sink) };
    let stop = AskOnDrop(Arc::new(Stop::default()));
    let read = {
        let (inner, link, stop, moved) =
            (Arc::clone(inner), Arc::clone(link), Arc::clone(&stop.0), Arc::clone(&flow.moved));
        tokio::task::spawn_blocking(move || read(&inner, &link, path.as_ref(), sink, &stop, &*moved))
    };
    tokio::pin!(read);
    let read = tokio::select! {
        read = &mut read => read,
        () = flow.cancel.asked() => { stop.0.ask(); read.await }
        () = flow.abort.asked() => { stop.0.ask(); read.await }
        () = link.end.asked() => { stop.0.ask(); read.await }
    };
    link.send(&Frame::Close { id });
    let read = read.unwrap_or_else(|_| {
        Err(KvFabricError::Path { fabric: inner.identity.fabric, reason: "the data path panicked".into() })
    });
    match read {
        Err(KvFabricError::Cancelled) if flow.abort.is_asked() => Err(KvFabricError::Stalled),
        Err(KvFabricError::Cancelled) if !flow.cancel.is_asked() => Err(KvFabricError::Ended { peer }),
        read => read,
    }
}

/// Read over a data path, and verify. Two threads take turns: while one verifies what has arrived, the request of the other
/// is on its way. A failure of one cancels the other.
fn read(
    inner: &Inner,
    link: &Link,
    path: &dyn DataPath,
    sink: Box<Sink>,
    stop: &Stop,
    moved: &(dyn Fn(u64) + Sync),
) -> Result<Box<Sink>, KvFabricError> {
    let path_peer = link.path_peer(inner, &sink.rights)?;
    let part = |(block, local): (&wire::Descriptor, u64)| Part { remote: block.address, local, bytes: block.bytes };
    let parts: Vec<Part> = sink.blocks.iter().zip(sink.room.addresses()).map(part).collect();
    let at_once = (READ_BYTES / inner.identity.block_bytes as usize).max(1);
    let chunks = Mutex::new(parts.chunks(at_once).enumerate());
    let next = || locked(&chunks).next();
    let read_one = |chunk: usize, parts: &[Part]| {
        if stop.is_asked() {
            return Err(KvFabricError::Cancelled);
        }
        path.read(&path_peer, parts, stop, moved)?;
        let first = chunk * at_once;
        let is_wrong = |position: &usize| checksum(sink.contents(*position)) != sink.blocks[*position].checksum;
        let wrong = (first..first + parts.len()).find(is_wrong);
        wrong.map_or(Ok(()), |position| Err(KvFabricError::Corrupt { position }))
    };
    let take_turns = || {
        while let Some((chunk, parts)) = next() {
            read_one(chunk, parts).inspect_err(|_| stop.ask())?;
        }
        Ok(())
    };
    let results = std::thread::scope(|threads| {
        // One chunk needs no second thread.
        let other = (parts.len() > at_once).then(|| threads.spawn(take_turns));
        let own = take_turns();
        let other = other.map_or(Ok(Ok(())), |thread| thread.join());
        [own, other.unwrap_or_else(|panic| std::panic::resume_unwind(panic))]
    });
    let failures = results.into_iter().filter_map(Result::err);
    failures.min_by_key(|failure| *failure == KvFabricError::Cancelled).map_or(Ok(sink), Err)
}

struct AskOnDrop(Arc<Stop>);

impl Drop for AskOnDrop {
    fn drop(&mut self) {
        self.0.ask();
    }
}

/// Ask the peer to keep an offer of this process.
async fn keep(inner: &Arc<Inner>, peer: SocketAddr, offer: OfferId, flow: &Flow) -> Result<Kept, KvFabricError> {
    let offered = inner.offers.get(offer).ok_or(KvFabricError::UnknownOffer { offer })?;
    let link = flow.unless_stopped(inner.link(peer)).await??;
    let (answer, mut answered) = oneshot::channel();
    let id = link.ask(Mine::Keep(answer), |id| Frame::Keep { id, offer });
    let answered = tokio::select! {
        answered = &mut answered => answered,
        () = flow.cancel.asked() => {
            link.take(id);
            return Err(KvFabricError::Cancelled);
        }
        () = flow.abort.asked() => {
            link.end.ask();
            return Err(KvFabricError::Stalled);
        }
    };
    match answered {
        Err(_) => Err(KvFabricError::Ended { peer }),
        Ok((Status::Done, offers)) if offers.len() == offered.descriptors.len() => {
            let checksums = offered.descriptors.iter().map(|block| block.checksum).collect();
            Ok(Kept { instance: link.instance, offers, checksums })
        }
        Ok((Status::Done, offers)) => {
            Err(KvFabricError::Different { position: offers.len(), what: "the number of blocks" })
        }
        Ok((Status::Full, _)) => Err(KvFabricError::Full),
        Ok((Status::Unknown | Status::Closed | Status::Failed, _)) => Err(KvFabricError::PeerFailed),
    }
}

impl Inner {
    fn region(&self, memory: MemoryId) -> Result<Arc<Region>, KvFabricError> {
        let regions = locked(&self.regions);
        Ok(regions.get(memory.0 as usize).cloned().ok_or(RegionError::NotRegistered)?)
    }

    /// The connection to a peer, made if there is none.
    async fn link(self: &Arc<Self>, peer: SocketAddr) -> Result<Arc<Link>, KvFabricError> {
        let known = Arc::clone(locked(&self.dialled).entry(peer).or_default());
        let mut known = known.lock().await;
        if let Some(link) = known.as_ref().filter(|link| !link.end.is_asked()) {
            return Ok(Arc::clone(link));
        }
        let unreachable = |reason: String| KvFabricError::Unreachable { peer, reason };
        let dialled = tokio::time::timeout(self.handshake, self.dial(peer)).await;
        let link = dialled.map_err(|_| unreachable("no answer in time".into()))??;
        *known = Some(Arc::clone(&link));
        Ok(link)
    }

    async fn dial(self: &Arc<Self>, peer: SocketAddr) -> Result<Arc<Link>, KvFabricError> {
        let unreachable = |error: std::io::Error| KvFabricError::Unreachable { peer, reason: error.to_string() };
        let stream = Arc::new(TcpStream::connect(peer).await.map_err(unreachable)?);
        stream.set_nodelay(true).map_err(unreachable)?;
        let mut inbox = Inbox::new(Arc::clone(&stream));
        let broken = |broken| match broken {
            Broken::Ended => KvFabricError::Ended { peer },
            Broken::Wire(source) => KvFabricError::Protocol { peer, source },
        };
        let shaken = async {
            let hello = wire::greet(self.identity.clone(), self.nonce()?);
            send(&stream, &Frame::Hello(hello.clone()).encode()).await?;
            let welcome = match handshake_frame(&mut inbox).await? {
                Frame::Welcome(welcome) => welcome,
                Frame::Refused(refused) => return Ok(Err(refused)),
                frame => return Err(WireError::Unexpected(frame.name()).into()),
            };
            let proof = match wire::check_welcome(&self.key, &hello, &welcome) {
                Ok(proof) => proof,
                Err(refused) => return Ok(Err(refused)),
            };
            send(&stream, &Frame::Proof(proof).encode()).await?;
            match handshake_frame(&mut inbox).await? {
                Frame::Ready => Ok(Ok(welcome.identity.instance)),
                Frame::Refused(refused) => Ok(Err(refused)),
                frame => Err(WireError::Unexpected(frame.name()).into()),
            }
        };
        let shaken: Result<Result<[u8; 16], Refused>, Broken> = shaken.await;
        let instance = shaken.map_err(broken)?.map_err(|refused| KvFabricError::Refused { peer, refused })?;
        Ok(Link::start(self, peer, instance, inbox, stream))
    }

    async fn listen(self: &Arc<Self>, listener: std::net::TcpListener) {
        let listener = match TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "KV peers cannot connect"),
        };
        loop {
            match listener.accept().await {
                Ok((stream, peer)) => {
                    let inner = Arc::clone(self);
                    tokio::spawn(async move { inner.accept(Arc::new(stream), peer).await });
                }
                Err(error) => {
                    // Such as too many open files: others may end meanwhile.
                    tracing::warn!(%error, "a KV peer could not connect");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn accept(self: &Arc<Self>, stream: Arc<TcpStream>, peer: SocketAddr) {
        let refuse = async |refused: Refused| {
            tracing::warn!(%peer, reason = refused.text, "refused a KV peer");
            let _ = send(&stream, &Frame::Refused(refused).encode()).await;
        };
        let Ok(seat) = Arc::clone(&self.seats).try_acquire_owned() else {
            return refuse(Refused { why: Refusal::Busy, text: "too many connections".into() }).await;
        };
        let mut inbox = Inbox::new(Arc::clone(&stream));
        let shaken = async {
            stream.set_nodelay(true)?;
            let hello = match handshake_frame(&mut inbox).await? {
                Frame::Hello(hello) => hello,
                frame => return Err(Broken::from(WireError::Unexpected(frame.name()))),
            };
            let welcome = match wire::welcome(&self.identity, &self.key, &hello, self.nonce()?) {
                Ok(welcome) => welcome,
                Err(refused) => return Ok(Err(refused)),
            };
            send(&stream, &Frame::Welcome(welcome.clone()).encode()).await?;
            let proof = match handshake_frame(&mut inbox).await? {
                Frame::Proof(proof) => proof,
                frame => return Err(WireError::Unexpected(frame.name()).into()),
            };
            if let Err(refused) = welcome.check(&self.key, &hello, proof) {
                return Ok(Err(refused));
            }
            send(&stream, &Frame::Ready.encode()).await?;
            Ok(Ok(hello.identity.instance))
        };
        match tokio::time::timeout(self.handshake, shaken).await {
            Ok(Ok(Ok(instance))) => {
                let link = Link::start(self, peer, instance, inbox, Arc::clone(&stream));
                locked(&self.accepted).push(Arc::clone(&link));
                link.end.asked().await;
            }
            Ok(Ok(Err(refused))) => refuse(refused).await,
            Ok(Err(Broken::Wire(error))) => tracing::warn!(%peer, %error, "a connection that is no KV peer"),
            Ok(Err(Broken::Ended)) | Err(_) => tracing::debug!(%peer, "a KV peer left during the handshake"),
        }
        drop(seat);
    }

    /// A connection has ended.
    pub(crate) fn ended(&self, link: &Arc<Link>) {
        locked(&self.accepted).retain(|known| !Arc::ptr_eq(known, link));
    }

    fn nonce(&self) -> Result<[u8; 32], Broken> {
        // Without fresh numbers a proof of the key could be replayed.
        fresh(&self.random).map_err(|_| Broken::Ended)
    }

    /// The peer asks to keep an offer of its own.
    pub(crate) fn keep_for_peer(self: &Arc<Self>, link: &Arc<Link>, id: u64, offer: OfferId) {
        let (inner, link) = (Arc::clone(self), Arc::clone(link));
        tokio::spawn(async move {
            let kept = match &inner.shelf {
                None => Err(KvFabricError::Full),
                Some(shelf) => match pull(&inner, &link, offer, Room::Shelf(Vec::new()), Flow::free()).await {
                    Ok(sink) => {
                        let (slots, blocks) = sink.into_slots();
                        shelf.put(slots, &blocks, link.instance, inner.path.is_some(), &inner.offers)
                    }
                    Err(error) => Err(error),
                },
            };
            let (status, offers) = match kept {
                Ok(offers) => (Status::Done, offers),
                Err(KvFabricError::Full) => (Status::Full, Vec::new()),
                Err(KvFabricError::UnknownOffer { .. }) => (Status::Unknown, Vec::new()),
                Err(error) => {
                    tracing::warn!(peer = %link.peer, %error, "KV blocks of a peer are not kept");
                    (Status::Failed, Vec::new())
                }
            };
            link.send(&Frame::Kept { id, status, offers });
        });
    }
}

async fn handshake_frame(inbox: &mut Inbox) -> Result<Frame, Broken> {
    let (kind, bytes) = inbox.header(MAX_HANDSHAKE_BYTES).await?;
    let body = inbox.body(bytes).await?;
    Ok(Frame::decode(kind, &body)?)
}

const _: () = assert!(MAX_RIGHTS_BYTES < wire::MAX_FRAME_BYTES);
