//! Two nodes of one process, over TCP.

#![cfg(feature = "fabric")]
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use meridian_memory::fabric::wire::{self, Frame};
use meridian_memory::fabric::{
    Backoff, BlockHash, Clock, FabricKind, Fingerprint, Key, KvFabric, KvFabricError, Node, NodeSettings, OfferId,
    Offered, Refusal, Region, RegionError, SystemClock, Target,
};

use support::{Hasty, settings};

use crate::support;

const BYTES: u32 = 3 << 20; // three parts on the wire
const LONG: Duration = Duration::from_secs(60);

fn hash(index: u32) -> BlockHash {
    BlockHash::of(&index.to_le_bytes())
}

fn fill(region: &std::sync::Arc<Region>, salt: u8) -> Vec<Offered> {
    (0..region.blocks())
        .map(|index| {
            for (place, byte) in region.write(index).unwrap().iter_mut().enumerate() {
                *byte = (place as u8).wrapping_mul(17) ^ (place >> 8) as u8 ^ salt ^ index as u8;
            }
            Offered { index, hash: hash(index) }
        })
        .collect()
}

fn wait<T>(transfer: meridian_memory::fabric::Transfer<T>) -> Result<T, KvFabricError> {
    transfer.wait(&SystemClock::default(), LONG)
}

#[test]
fn blocks_arrive_equal_and_stay_leased_while_they_are_offered() {
    let (ours, theirs) = (Node::start(settings(BYTES)).unwrap(), Node::start(settings(BYTES)).unwrap());
    let (from, to) = (Region::allocate(5, BYTES).unwrap(), Region::allocate(5, BYTES).unwrap());
    let (our_memory, their_memory) = (ours.register(&from).unwrap(), theirs.register(&to).unwrap());
    let offer = ours.offer(our_memory, &fill(&from, 3)).unwrap();
    assert_eq!(from.write(2).err(), Some(RegionError::InUse { index: 2 }), "it is promised to peers");
    // In another order of memory.
    let target = |index: u32| Target { memory: their_memory, index: 4 - index, hash: hash(index), checksum: None };
    let targets: Vec<Target> = (0..5).map(target).collect();
    let transfer = theirs.fetch(ours.address(), offer, &targets);
    wait(transfer).unwrap();
    for index in 0..5 {
        assert_eq!(from.read(index).unwrap()[..], to.read(4 - index).unwrap()[..]);
    }
    ours.release(offer);
    let gone = wait(theirs.fetch(ours.address(), offer, &targets));
    assert_eq!(gone, Err(KvFabricError::UnknownOffer { offer }));
    // The sender drops its lease once it has written the last part, which may be after that part has arrived.
    while from.write(2).is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn a_target_in_use_or_of_another_node_is_refused_at_once() {
    let (ours, theirs) = (Node::start(settings(64)).unwrap(), Node::start(settings(64)).unwrap());
    let to = Region::allocate(1, 64).unwrap();
    let memory = theirs.register(&to).unwrap();
    let target = Target { memory, index: 0, hash: hash(0), checksum: None };
    let lease = to.read(0).unwrap();
    let refused = |node: &Node, target| wait(node.fetch(ours.address(), OfferId(1), &[target]));
    assert_eq!(refused(&theirs, target), Err(RegionError::InUse { index: 0 }.into()));
    drop(lease);
    assert_eq!(
        refused(&theirs, Target { index: 1, ..target }),
        Err(RegionError::NoBlock { index: 1, blocks: 1 }.into())
    );
    assert_eq!(refused(&ours, target), Err(RegionError::NotRegistered.into()));
    let other = Region::allocate(1, 65).unwrap();
    assert_eq!(theirs.register(&other), Err(RegionError::BlockBytes { block_bytes: 65, expected: 64 }.into()));
    assert_eq!(refused(&theirs, target), Err(KvFabricError::UnknownOffer { offer: OfferId(1) }));
}

#[test]
fn blocks_other_than_the_wanted_ones_are_refused_before_a_byte_is_written() {
    let (ours, theirs) = (Node::start(settings(4096)).unwrap(), Node::start(settings(4096)).unwrap());
    let (from, to) = (Region::allocate(2, 4096).unwrap(), Region::allocate(3, 4096).unwrap());
    let (our_memory, memory) = (ours.register(&from).unwrap(), theirs.register(&to).unwrap());
    let offer = ours.offer(our_memory, &fill(&from, 9)).unwrap();
    let target = |index: u32| Target { memory, index, hash: hash(index), checksum: None };
    let different = |targets: &[Target]| match wait(theirs.fetch(ours.address(), offer, targets)) {
        Err(KvFabricError::Different { position, what }) => (position, what),
        other => panic!("{other:?}"),
    };
    assert_eq!(different(&[target(0)]), (1, "the number of blocks"));
    assert_eq!(different(&[target(0), target(1), target(2)]), (2, "the number of blocks"));
    assert_eq!(different(&[target(0), Target { hash: hash(7), ..target(1) }]), (1, "the hash"));
    assert_eq!(different(&[Target { checksum: Some(1), ..target(0) }, target(1)]), (0, "the checksum"));
    assert!(to.read(0).unwrap().iter().all(|byte| *byte == 0));
    assert_eq!(wait(theirs.fetch(ours.address(), offer, &[target(0), target(1)])), Ok(()), "the connection goes on");
}

#[test]
fn a_peer_keeps_blocks_and_drops_the_oldest_when_it_is_full() {
    let ours = Node::start(settings(4096)).unwrap();
    let theirs = Node::start(NodeSettings { shelf_blocks: 3, ..settings(4096) }).unwrap();
    let (from, to) = (Region::allocate(4, 4096).unwrap(), Region::allocate(1, 4096).unwrap());
    let blocks = fill(&from, 1);
    let (memory, back) = (ours.register(&from).unwrap(), ours.register(&to).unwrap());
    let keep = |blocks: &[Offered]| {
        let offer = ours.offer(memory, blocks).unwrap();
        let kept = wait(ours.keep(theirs.address(), offer));
        ours.release(offer);
        kept
    };
    let kept = keep(&blocks[..2]).unwrap();
    assert_eq!((kept.offers.len(), theirs.kept_blocks(), kept.instance), (2, 2, theirs.identity().instance));
    let fetch = |offer, index: u32, checksum| {
        let target = Target { memory: back, index: 0, hash: hash(index), checksum: Some(checksum) };
        wait(ours.fetch(theirs.address(), offer, &[target]))
    };
    assert_eq!(fetch(kept.offers[1], 1, kept.checksums[1]), Ok(()));
    assert_eq!(from.read(1).unwrap()[..], to.read(0).unwrap()[..]);
    let later = keep(&blocks[2..]).unwrap();
    assert_eq!(theirs.kept_blocks(), 3);
    let gone = fetch(kept.offers[0], 0, kept.checksums[0]);
    assert_eq!(gone, Err(KvFabricError::UnknownOffer { offer: kept.offers[0] }), "the oldest went");
    assert_eq!(fetch(later.offers[1], 3, later.checksums[1]), Ok(()));
    ours.forget(theirs.address(), &later.offers);
    // On the same connection, so it is answered after the blocks were forgotten.
    let gone = fetch(later.offers[1], 3, later.checksums[1]);
    assert_eq!(gone, Err(KvFabricError::UnknownOffer { offer: later.offers[1] }));
    assert_eq!(keep(&blocks), Err(KvFabricError::Full), "four blocks never fit");
    let nothing_kept = wait(theirs.keep(ours.address(), OfferId(99)));
    assert_eq!(nothing_kept, Err(KvFabricError::UnknownOffer { offer: OfferId(99) }), "its own offer does not exist");
}

#[test]
fn a_peer_forgets_only_the_blocks_of_their_owner() {
    let theirs = Node::start(NodeSettings { shelf_blocks: 4, ..settings(64) }).unwrap();
    let (owner, other) = (Node::start(settings(64)).unwrap(), Node::start(settings(64)).unwrap());
    let from = Region::allocate(1, 64).unwrap();
    let memory = owner.register(&from).unwrap();
    let offer = owner.offer(memory, &fill(&from, 1)).unwrap();
    let kept = wait(owner.keep(theirs.address(), offer)).unwrap();
    other.forget(theirs.address(), &kept.offers);
    let gone = wait(other.fetch(theirs.address(), OfferId(99), &[]));
    assert_eq!(gone, Err(KvFabricError::UnknownOffer { offer: OfferId(99) }), "it was handled after the other");
    assert_eq!(theirs.kept_blocks(), 1);
}

#[test]
fn a_peer_without_the_key_or_with_other_blocks_is_refused() {
    let key = Some(Key::new(b"a key that peers share").unwrap());
    let ours = Node::start(NodeSettings { key: key.clone(), ..settings(64) }).unwrap();
    let refusal = |settings: NodeSettings| {
        let node = Node::start(settings).unwrap();
        match wait(node.fetch(ours.address(), OfferId(1), &[])) {
            Err(KvFabricError::Refused { refused, .. }) => refused.why,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refusal(settings(64)), Refusal::Key);
    let wrong = Key::new(b"a key that no other peer has").unwrap();
    assert_eq!(refusal(NodeSettings { key: Some(wrong), ..settings(64) }), Refusal::Key);
    let model = Fingerprint::of(b"another model");
    assert_eq!(refusal(NodeSettings { key: key.clone(), model, ..settings(64) }), Refusal::Model);
    assert_eq!(refusal(NodeSettings { key: key.clone(), ..settings(65) }), Refusal::Layout);
    let friend = Node::start(NodeSettings { key, ..settings(64) }).unwrap();
    let gone = wait(friend.fetch(ours.address(), OfferId(1), &[]));
    assert_eq!(gone, Err(KvFabricError::UnknownOffer { offer: OfferId(1) }));
}

#[test]
fn another_address_than_loopback_needs_a_key() {
    let listen: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let error = Node::start(NodeSettings { listen, ..settings(64) }).err().unwrap();
    assert_eq!(error.to_string(), "listen address 0.0.0.0:0: no key is shared, expected a loopback address");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap();
    let error = Node::start(NodeSettings { listen, ..settings(64) }).err().unwrap();
    assert!(error.to_string().starts_with(&format!("listen address {listen}: ")), "{error}");
}

#[test]
fn connections_that_are_no_peers_end_and_harm_none() {
    let ours = Node::start(settings(64)).unwrap();
    let frame = Frame::Fetch { id: 1, offer: OfferId(1) }.encode();
    for bytes in [&b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..], &[0xff; 64], &[0; 64], &frame] {
        let mut stream = TcpStream::connect(ours.address()).unwrap();
        stream.write_all(bytes).unwrap();
        // Reset or closed, without an answer.
        assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0, "{bytes:?}");
    }
    let theirs = Node::start(settings(64)).unwrap();
    let gone = wait(theirs.fetch(ours.address(), OfferId(1), &[]));
    assert_eq!(gone, Err(KvFabricError::UnknownOffer { offer: OfferId(1) }));
}

/// A peer that does as a test says, after a handshake as a listener.
fn scripted(settings: &NodeSettings, script: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let identity = meridian_memory::fabric::Identity {
        fabric: FabricKind::Tcp,
        block_bytes: settings.block_bytes,
        model: settings.model,
        layout: settings.layout,
        instance: [9; 16],
    };
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let Frame::Hello(hello) = read(&mut stream) else { panic!("no HELLO") };
        let welcome = wire::welcome(&identity, &Key::none(), &hello, [1; 32]).unwrap();
        stream.write_all(&Frame::Welcome(welcome.clone()).encode()).unwrap();
        let Frame::Proof(proof) = read(&mut stream) else { panic!("no PROOF") };
        welcome.check(&Key::none(), &hello, proof).unwrap();
        stream.write_all(&Frame::Ready.encode()).unwrap();
        script(stream);
    });
    address
}

fn read(stream: &mut TcpStream) -> Frame {
    let mut header = [0; wire::HEADER_BYTES];
    stream.read_exact(&mut header).unwrap();
    let (kind, bytes) = wire::header(&header, 1 << 20).unwrap();
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body).unwrap();
    Frame::decode(kind, &body).unwrap()
}

fn blocks(id: u64, checksum: u64, bytes: u32) -> Vec<u8> {
    let block = wire::Descriptor { hash: hash(0), checksum, address: 0, bytes };
    Frame::Blocks(wire::Blocks { id, rights: Vec::new(), blocks: vec![block] }).encode()
}

fn data(id: u64, offset: u32, contents: &[u8]) -> Vec<u8> {
    let head = wire::DataHead { id, block: 0, offset, bytes: contents.len() as u32 };
    [&head.encode(), contents].concat()
}

/// Fetch one block of 8 bytes from a peer with this script; the result, and the target afterwards.
fn fetch_from(script: impl FnOnce(TcpStream) + Send + 'static) -> (Result<(), KvFabricError>, bool) {
    let own = settings(8);
    let address = scripted(&own, script);
    let node = Node::start(own).unwrap();
    let to = Region::allocate(1, 8).unwrap();
    let memory = node.register(&to).unwrap();
    let target = Target { memory, index: 0, hash: hash(0), checksum: None };
    let result = wait(node.fetch(address, OfferId(1), &[target]));
    // Nothing writes to it any more.
    let is_free = to.write(0).is_ok();
    (result, is_free)
}

#[test]
fn contents_with_a_wrong_checksum_are_refused() {
    let (result, is_free) = fetch_from(|mut stream| {
        let Frame::Fetch { id, .. } = read(&mut stream) else { panic!("no FETCH") };
        stream.write_all(&[blocks(id, 12345, 8), data(id, 0, b"contents")].concat()).unwrap();
        assert_eq!(read(&mut stream), Frame::Close { id });
    });
    assert_eq!((result, is_free), (Err(KvFabricError::Corrupt { position: 0 }), true));
}

#[test]
fn a_peer_that_breaks_the_protocol_is_cut_off() {
    for broken in [
        (|id| [blocks(id, 1, 8), data(id, 4, b"late")].concat()) as fn(u64) -> Vec<u8>,
        |id| [blocks(id, 1, 8), data(id, 0, b"more than there is")].concat(),
        |id| [blocks(id, 1, 8), blocks(id, 1, 8)].concat(),
        |id| data(id, 0, b"contents"),
        |_| Frame::Ready.encode(),
        |_| vec![255; 64],
    ] {
        let (result, is_free) = fetch_from(move |mut stream| {
            let Frame::Fetch { id, .. } = read(&mut stream) else { panic!("no FETCH") };
            stream.write_all(&broken(id)).unwrap();
            assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0, "the connection is closed");
        });
        assert!(matches!(result, Err(KvFabricError::Ended { .. })), "{result:?}");
        assert!(is_free);
    }
}

#[test]
fn a_peer_that_says_less_than_it_promised_is_noticed() {
    for (what, expected) in [
        (wire::Status::Done, KvFabricError::PeerFailed),
        (wire::Status::Full, KvFabricError::Full),
        (wire::Status::Unknown, KvFabricError::UnknownOffer { offer: OfferId(1) }),
    ] {
        let (result, is_free) = fetch_from(move |mut stream| {
            let Frame::Fetch { id, .. } = read(&mut stream) else { panic!("no FETCH") };
            let end = Frame::End { id, status: what }.encode();
            stream.write_all(&[blocks(id, 1, 8), data(id, 0, b"cont"), end].concat()).unwrap();
            let _ = stream.read(&mut [0; 64]);
        });
        assert_eq!((result, is_free), (Err(expected), true));
    }
    let (result, is_free) = fetch_from(|mut stream| {
        let Frame::Fetch { id, .. } = read(&mut stream) else { panic!("no FETCH") };
        stream.write_all(&[blocks(id, 1, 8), data(id, 0, b"cont")].concat()).unwrap();
    });
    assert!(matches!(result, Err(KvFabricError::Ended { .. })) && is_free, "{result:?}");
}

/// Fetch a block from a peer that never answers, and `end` the transfer somehow.
fn unanswered(end: impl FnOnce(meridian_memory::fabric::Transfer<()>) -> Result<(), KvFabricError>) -> KvFabricError {
    let own = settings(8);
    let (hung_up, hangs_up) = std::sync::mpsc::channel();
    let address = scripted(&own, move |mut stream| {
        let Frame::Fetch { id, .. } = read(&mut stream) else { panic!("no FETCH") };
        // A part of 8 bytes, of which 4 come.
        stream
            .write_all(&[&blocks(id, 1, 8)[..], &data(id, 0, b"contents")[..wire::HEADER_BYTES + 20]].concat())
            .unwrap();
        let _ = hung_up.send(stream.read(&mut [0; 64]));
    });
    let node = Node::start(own).unwrap();
    let to = Region::allocate(1, 8).unwrap();
    let memory = node.register(&to).unwrap();
    let target = Target { memory, index: 0, hash: hash(0), checksum: None };
    let transfer = node.fetch(address, OfferId(1), &[target]);
    // The half of the block is there: the target is in use, whatever the peer does.
    while transfer.moved_bytes() < 4 {
        std::thread::yield_now();
    }
    assert_eq!(to.write(0).err(), Some(RegionError::InUse { index: 0 }));
    let error = end(transfer).unwrap_err();
    assert!(to.write(0).is_ok(), "nothing writes to it any more");
    drop(node);
    hangs_up.recv().unwrap().unwrap();
    error
}

#[test]
fn a_transfer_can_be_cancelled_in_the_middle() {
    assert_eq!(
        unanswered(|transfer| {
            transfer.cancel();
            wait(transfer)
        }),
        KvFabricError::Cancelled
    );
}

#[test]
fn a_transfer_without_progress_ends_by_the_callers_clock() {
    let clock = Hasty::default();
    let stalled = unanswered(|transfer| transfer.wait(&clock, Duration::from_secs(3600)));
    assert_eq!(stalled, KvFabricError::Stalled);
    assert!(clock.now() >= Duration::from_secs(3600));
}

#[test]
fn a_node_that_ends_takes_its_transfers_with_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let node = Node::start(settings(8)).unwrap();
    let transfer = node.fetch(listener.local_addr().unwrap(), OfferId(1), &[]);
    drop(node);
    assert_eq!(wait(transfer), Err(KvFabricError::Cancelled));
}

#[test]
fn an_address_without_a_listener_is_unreachable() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let node = Node::start(settings(8)).unwrap();
    let error = wait(node.fetch(address, OfferId(1), &[])).unwrap_err();
    assert!(matches!(error, KvFabricError::Unreachable { peer, .. } if peer == address), "{error:?}");
    assert!(error.may_pass());
    assert_eq!(Backoff { tries: 1, ..Backoff::default() }.gaps().count(), 0);
}
