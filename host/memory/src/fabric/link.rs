//! One connection to a peer, after the handshake. Both sides may ask on it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use twox_hash::xxhash3_64;

use crate::fabric::node::Inner;
use crate::fabric::offers::Offer;
use crate::fabric::shelf::Slot;
use crate::fabric::stream::{Broken, Inbox, send};
use crate::fabric::transfer::locked;
use crate::fabric::wire::{Blocks, DataHead, Descriptor, Frame, MAX_CHUNK_BYTES, MAX_FRAME_BYTES, Status, WireError};
use crate::fabric::{BlockHash, KvFabricError, OfferId, PathPeer, Stop, WriteLease};

/// Most answers that wait for the peer to read. A peer that asks more and does not read is cut off.
const MAX_ANSWERS: usize = 256;
/// Most fetches of the peer that run at once.
const MAX_FETCHES: usize = 64;
/// Contents are hashed in pieces that are still in the cache.
const PIECE_BYTES: usize = 256 << 10;

pub(crate) struct Link {
    pub(crate) peer: SocketAddr,
    /// The peer's process.
    pub(crate) instance: [u8; 16],
    /// Asked for when the connection has ended, or is to end.
    pub(crate) end: Stop,
    answers: mpsc::Sender<Out>,
    contents: mpsc::Sender<Out>,
    mine: Mutex<HashMap<u64, Mine>>,
    theirs: Mutex<HashMap<u64, Theirs>>,
    last: AtomicU64,
    /// The peer's rights, and the peer as the data path names it.
    path_peer: Mutex<Option<(Vec<u8>, PathPeer)>>,
}

enum Out {
    Frame(Vec<u8>),
    Part { head: DataHead, offer: Arc<Offer> },
}

/// A request of this side.
pub(crate) enum Mine {
    Fetch(Box<Sink>),
    Keep(oneshot::Sender<(Status, Vec<OfferId>)>),
}

/// A fetch of the other side.
struct Theirs {
    stop: Arc<Stop>,
    /// Until it says that it has read them.
    _offer: Arc<Offer>,
}

/// Where the blocks of a fetch go.
pub(crate) enum Room {
    Given { wanted: Vec<Wanted>, leases: Vec<WriteLease> },
    Shelf(Vec<Slot>),
}

/// The requirements of a block.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) hash: BlockHash,
    pub(crate) checksum: Option<u64>,
}

impl Room {
    fn lease(&mut self, position: usize) -> &mut WriteLease {
        match self {
            Self::Given { leases, .. } => &mut leases[position],
            Self::Shelf(slots) => slots[position].lease_mut(),
        }
    }

    /// Addresses of the blocks, for a data path.
    pub(crate) fn addresses(&self) -> Vec<u64> {
        match self {
            Self::Given { leases, .. } => leases.iter().map(WriteLease::address).collect(),
            Self::Shelf(slots) => slots.iter().map(|slot| slot.lease().address()).collect(),
        }
    }
}

/// The flags of the request that waits for a fetch.
#[derive(Clone)]
pub(crate) struct Flow {
    pub(crate) cancel: Arc<Stop>,
    pub(crate) abort: Arc<Stop>,
    pub(crate) moved: Arc<dyn Fn(u64) + Send + Sync>,
}

/// A fetch that receives. Its leases are dropped before its result arrives.
pub(crate) struct Sink {
    pub(crate) room: Room,
    pub(crate) blocks: Vec<Descriptor>,
    pub(crate) rights: Vec<u8>,
    is_described: bool,
    position: usize,
    offset: u32,
    /// Bytes of the part that arrives, which have not arrived yet.
    left: u32,
    hasher: xxhash3_64::Hasher,
    flow: Flow,
    result: oneshot::Sender<Result<Box<Sink>, KvFabricError>>,
}

pub(crate) type Pulled = oneshot::Receiver<Result<Box<Sink>, KvFabricError>>;

impl Sink {
    pub(crate) fn new(room: Room, flow: Flow) -> (Box<Self>, Pulled) {
        let (result, pulled) = oneshot::channel();
        let sink = Self {
            room,
            blocks: Vec::new(),
            rights: Vec::new(),
            is_described: false,
            position: 0,
            offset: 0,
            left: 0,
            hasher: xxhash3_64::Hasher::default(),
            flow,
            result,
        };
        (Box::new(sink), pulled)
    }

    /// The contents of a block, as they are now.
    pub(crate) fn contents(&self, position: usize) -> &[u8] {
        match &self.room {
            Room::Given { leases, .. } => &leases[position],
            Room::Shelf(slots) => slots[position].lease(),
        }
    }

    /// The filled slots and their descriptors.
    pub(crate) fn into_slots(self) -> (Vec<Slot>, Vec<Descriptor>) {
        match self.room {
            Room::Shelf(slots) => (slots, self.blocks),
            Room::Given { .. } => (Vec::new(), Vec::new()),
        }
    }

    fn done(mut self: Box<Self>) {
        let (unused, _) = oneshot::channel();
        let result = std::mem::replace(&mut self.result, unused);
        // The request may be gone; the leases are then dropped here.
        let _ = result.send(Ok(self));
    }

    fn fail(self: Box<Self>, error: KvFabricError) {
        let Self { room, result, .. } = *self;
        drop(room);
        let _ = result.send(Err(error));
    }

    /// Compare what the peer offers with what is wanted, before any byte is written.
    fn describe(&mut self, inner: &Inner, blocks: Blocks) -> Result<(), KvFabricError> {
        let different = |position, what| Err(KvFabricError::Different { position, what });
        let block_bytes = inner.identity.block_bytes;
        if let Some(position) = blocks.blocks.iter().position(|block| block.bytes != block_bytes) {
            return different(position, "the length");
        }
        match &mut self.room {
            Room::Given { wanted, .. } => {
                if blocks.blocks.len() != wanted.len() {
                    return different(blocks.blocks.len().min(wanted.len()), "the number of blocks");
                }
                for (position, (block, wanted)) in blocks.blocks.iter().zip(wanted).enumerate() {
                    if block.hash != wanted.hash {
                        return different(position, "the hash");
                    }
                    if wanted.checksum.is_some_and(|checksum| checksum != block.checksum) {
                        return different(position, "the checksum");
                    }
                }
            }
            Room::Shelf(slots) => {
                let shelf = inner.shelf.as_ref().ok_or(KvFabricError::Full)?;
                if blocks.blocks.is_empty() {
                    return different(0, "the number of blocks");
                }
                *slots = shelf.take(blocks.blocks.len(), &inner.offers).ok_or(KvFabricError::Full)?;
            }
        }
        self.blocks = blocks.blocks;
        self.rights = blocks.rights;
        self.is_described = true;
        Ok(())
    }

    /// Whether every block is there.
    fn is_full(&self) -> bool {
        self.is_described && self.position == self.blocks.len()
    }

    /// Take in the contents that follow `head`.
    async fn receive(&mut self, head: DataHead, inbox: &mut Inbox) -> Result<Result<(), KvFabricError>, Broken> {
        let DataHead { id: _, block, offset, bytes } = head;
        let Some(whole) = self.blocks.get(self.position).map(|block| block.bytes) else {
            return Err(WireError::Unexpected("DATA").into());
        };
        let is_next = block as usize == self.position && offset == self.offset && bytes <= whole - self.offset;
        if !is_next {
            let value = u64::from(block) << 32 | u64::from(offset);
            return Err(WireError::Value { field: "part", value, expected: "the next part of the next block" }.into());
        }
        let (mut at, end) = (offset as usize, (offset + bytes) as usize);
        self.left = bytes;
        while at < end {
            let target = &mut self.room.lease(self.position)[at..end.min(at + PIECE_BYTES)];
            let count = inbox.some(target).await?;
            std::hash::Hasher::write(&mut self.hasher, &target[..count]);
            at += count;
            self.left -= count as u32;
            (self.flow.moved)(count as u64);
        }
        self.offset += bytes;
        if self.offset < whole {
            return Ok(Ok(()));
        }
        let position = self.position;
        let has = std::hash::Hasher::finish(&std::mem::take(&mut self.hasher));
        (self.position, self.offset) = (position + 1, 0);
        let is_same = has == self.blocks[position].checksum;
        Ok(if is_same { Ok(()) } else { Err(KvFabricError::Corrupt { position }) })
    }
}

impl Link {
    /// Start the two tasks of a connection whose peer is known.
    pub(crate) fn start(
        inner: &Arc<Inner>,
        peer: SocketAddr,
        instance: [u8; 16],
        inbox: Inbox,
        stream: Arc<TcpStream>,
    ) -> Arc<Self> {
        let (answers, mut queued_answers) = mpsc::channel(MAX_ANSWERS);
        let (contents, mut queued_contents) = mpsc::channel(2);
        let link = Arc::new(Self {
            peer,
            instance,
            end: Stop::default(),
            answers,
            contents,
            mine: Mutex::default(),
            theirs: Mutex::default(),
            last: AtomicU64::new(0),
            path_peer: Mutex::default(),
        });
        let writing = Arc::clone(&link);
        tokio::spawn(async move {
            let written = async {
                loop {
                    let out = tokio::select! {
                        biased;
                        Some(out) = queued_answers.recv() => out,
                        Some(out) = queued_contents.recv() => out,
                        else => return Ok(()),
                    };
                    match out {
                        Out::Frame(bytes) => send(&stream, &bytes).await?,
                        Out::Part { head, offer } => {
                            send(&stream, &head.encode()).await?;
                            let (start, bytes) = (head.offset as usize, head.bytes as usize);
                            send(&stream, &offer.leases[head.block as usize][start..start + bytes]).await?;
                        }
                    }
                }
            };
            let written: Result<Result<(), std::io::Error>, ()> = tokio::select! {
                written = written => Ok(written),
                () = writing.end.asked() => Err(()),
            };
            drop(written);
            writing.end.ask();
        });
        let (reading, inner) = (Arc::clone(&link), Arc::clone(inner));
        tokio::spawn(async move {
            let served = tokio::select! {
                served = reading.serve(&inner, inbox) => served,
                () = reading.end.asked() => Err(Broken::Ended),
            };
            if let Err(Broken::Wire(error)) = served {
                tracing::warn!(peer = %reading.peer, %error, "KV peer broke the protocol; the connection is closed");
            }
            reading.end.ask();
            inner.ended(&reading);
            // Leases of both sides end here.
            locked(&reading.mine).clear();
            let theirs: Vec<Theirs> = locked(&reading.theirs).drain().map(|(_, theirs)| theirs).collect();
            theirs.iter().for_each(|fetch| fetch.stop.ask());
            let path_peer = locked(&reading.path_peer).take();
            if let (Some(path), Some((_, peer))) = (&inner.path, path_peer) {
                path.disconnect(&peer);
            }
        });
        link
    }

    /// Ask, and get a number for the answer.
    pub(crate) fn ask(&self, mine: Mine, frame: impl FnOnce(u64) -> Frame) -> u64 {
        let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        locked(&self.mine).insert(id, mine);
        if self.end.is_asked() {
            // The reader may have cleared the requests before this one came.
            locked(&self.mine).remove(&id);
        }
        self.send(&frame(id));
        id
    }

    /// Take back a request; `None` when it has been answered, or is being answered.
    pub(crate) fn take(&self, id: u64) -> Option<Mine> {
        locked(&self.mine).remove(&id)
    }

    pub(crate) fn send(&self, frame: &Frame) {
        if self.answers.try_send(Out::Frame(frame.encode())).is_err() {
            // The peer does not read, or is gone.
            self.end.ask();
        }
    }

    /// The peer, as the data path names it.
    pub(crate) fn path_peer(&self, inner: &Inner, rights: &[u8]) -> Result<PathPeer, KvFabricError> {
        let mut known = locked(&self.path_peer);
        if let Some((_, peer)) = known.as_ref().filter(|(known, _)| known == rights) {
            return Ok(peer.clone());
        }
        let path = inner.path.as_ref().expect("only asked with a data path");
        let peer = path.connect(rights)?;
        *known = Some((rights.to_vec(), peer.clone()));
        Ok(peer)
    }

    async fn serve(self: &Arc<Self>, inner: &Arc<Inner>, mut inbox: Inbox) -> Result<(), Broken> {
        loop {
            let (kind, bytes) = inbox.header(MAX_FRAME_BYTES.max(MAX_CHUNK_BYTES + DataHead::BYTES)).await?;
            if kind == DataHead::KIND {
                let mut head = [0; DataHead::BYTES];
                if bytes < DataHead::BYTES {
                    DataHead::decode(bytes, &head)?;
                }
                inbox.exact(&mut head).await?;
                self.data(DataHead::decode(bytes, &head)?, &mut inbox).await?;
                continue;
            }
            let body = inbox.body(bytes).await?;
            match Frame::decode(kind, &body)? {
                Frame::Fetch { id, offer } => self.fetch(inner, id, offer)?,
                Frame::Close { id } => {
                    let closed = locked(&self.theirs).remove(&id);
                    closed.iter().for_each(|fetch| fetch.stop.ask());
                }
                Frame::Blocks(blocks) => self.described(inner, blocks)?,
                Frame::End { id, status } => self.ended(id, status),
                Frame::Keep { id, offer } => inner.keep_for_peer(self, id, offer),
                Frame::Kept { id, status, offers } => {
                    if let Some(Mine::Keep(answer)) = self.take(id) {
                        let _ = answer.send((status, offers));
                    }
                }
                Frame::Forget { offers } => {
                    if let Some(shelf) = &inner.shelf {
                        shelf.forget(&offers, self.instance, &inner.offers);
                    }
                }
                frame @ (Frame::Hello(_)
                | Frame::Welcome(_)
                | Frame::Proof(_)
                | Frame::Ready
                | Frame::Refused(_)
                | Frame::Data(_)) => return Err(WireError::Unexpected(frame.name()).into()),
            }
        }
    }

    /// The peer fetches.
    fn fetch(self: &Arc<Self>, inner: &Arc<Inner>, id: u64, offer: OfferId) -> Result<(), Broken> {
        let Some(offer) = inner.offers.get(offer) else {
            self.send(&Frame::End { id, status: Status::Unknown });
            return Ok(());
        };
        let stop = Arc::new(Stop::default());
        {
            let mut theirs = locked(&self.theirs);
            if theirs.contains_key(&id) {
                let value = id;
                return Err(WireError::Value { field: "fetch", value, expected: "a number that no fetch has" }.into());
            }
            if theirs.len() >= MAX_FETCHES {
                self.send(&Frame::End { id, status: Status::Full });
                return Ok(());
            }
            theirs.insert(id, Theirs { stop: Arc::clone(&stop), _offer: Arc::clone(&offer) });
        }
        let rights = match &inner.path {
            None => Vec::new(),
            Some(path) => match path.rights() {
                Ok(rights) => rights,
                Err(error) => {
                    tracing::warn!(%error, "KV memory cannot be offered");
                    locked(&self.theirs).remove(&id);
                    self.send(&Frame::End { id, status: Status::Failed });
                    return Ok(());
                }
            },
        };
        self.send(&Frame::Blocks(Blocks { id, rights, blocks: offer.descriptors.clone() }));
        if inner.path.is_none() {
            let link = Arc::clone(self);
            tokio::spawn(async move {
                let status = tokio::select! {
                    sent = link.pump(id, &offer) => if sent { Status::Done } else { Status::Closed },
                    () = stop.asked() => Status::Closed,
                };
                locked(&link.theirs).remove(&id);
                let _ = link.contents.send(Out::Frame(Frame::End { id, status }.encode())).await;
            });
        }
        Ok(())
    }

    /// Send the contents of an offer; false when the connection has ended.
    async fn pump(&self, id: u64, offer: &Arc<Offer>) -> bool {
        for (block, lease) in offer.leases.iter().enumerate() {
            for offset in (0..lease.len()).step_by(MAX_CHUNK_BYTES) {
                let bytes = (lease.len() - offset).min(MAX_CHUNK_BYTES) as u32;
                let head = DataHead { id, block: block as u32, offset: offset as u32, bytes };
                if self.contents.send(Out::Part { head, offer: Arc::clone(offer) }).await.is_err() {
                    return false;
                }
            }
        }
        true
    }

    /// The peer describes what this side fetches.
    fn described(&self, inner: &Inner, blocks: Blocks) -> Result<(), Broken> {
        let id = blocks.id;
        let Some(Mine::Fetch(mut sink)) = self.take(id) else { return Ok(()) };
        if sink.is_described {
            return Err(WireError::Unexpected("BLOCKS").into());
        }
        match sink.describe(inner, blocks) {
            Err(error) => {
                self.send(&Frame::Close { id });
                sink.fail(error);
            }
            Ok(()) if inner.path.is_some() || sink.is_full() => sink.done(),
            Ok(()) => self.put_back(id, sink),
        }
        Ok(())
    }

    async fn data(&self, head: DataHead, inbox: &mut Inbox) -> Result<(), Broken> {
        // Contents of a request that was cancelled or has failed may still be on their way.
        let Some(mine) = self.take(head.id) else { return Ok(inbox.discard(head.bytes as usize).await?) };
        let Mine::Fetch(mut sink) = mine else { return Err(WireError::Unexpected("DATA").into()) };
        let cancel = Arc::clone(&sink.flow.cancel);
        let received = tokio::select! {
            biased;
            received = sink.receive(head, inbox) => received?,
            // A peer that stops in the middle of a part does not hold the targets.
            () = cancel.asked() => {
                let left = sink.left;
                self.send(&Frame::Close { id: head.id });
                sink.fail(KvFabricError::Cancelled);
                return Ok(inbox.discard(left as usize).await?);
            }
        };
        match received {
            Err(error) => {
                self.send(&Frame::Close { id: head.id });
                sink.fail(error);
            }
            Ok(()) if sink.is_full() => sink.done(),
            Ok(()) => self.put_back(head.id, sink),
        }
        Ok(())
    }

    fn put_back(&self, id: u64, sink: Box<Sink>) {
        let flow = sink.flow.clone();
        locked(&self.mine).insert(id, Mine::Fetch(sink));
        // The request looks into the map when it is cancelled; one of the two finds it.
        if flow.cancel.is_asked()
            && let Some(Mine::Fetch(sink)) = self.take(id)
        {
            self.send(&Frame::Close { id });
            sink.fail(KvFabricError::Cancelled);
        }
    }

    fn ended(&self, id: u64, status: Status) {
        let Some(mine) = self.take(id) else { return };
        match mine {
            Mine::Fetch(sink) => sink.fail(match status {
                Status::Unknown => KvFabricError::UnknownOffer { offer: OfferId(0) },
                Status::Full => KvFabricError::Full,
                // All was said to be sent, but it was not.
                Status::Done | Status::Closed | Status::Failed => KvFabricError::PeerFailed,
            }),
            Mine::Keep(answer) => {
                let _ = answer.send((Status::Failed, Vec::new()));
            }
        }
    }
}
