//! The wire of the KV fabric: any bytes as frames, and any bytes from a peer with the key to a node.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use meridian_memory::fabric::wire::{self, Frame, HEADER_BYTES, Status};
use meridian_memory::fabric::{
    BlockHash, FabricKind, Fingerprint, Identity, Key, KvFabric, Node, NodeSettings, Offered, Region, RegionError,
};

/// An input that begins with this is sent to a node, after a handshake.
pub const LIVE: &[u8] = b"LIVE";

const BLOCK_BYTES: u32 = 4096;
const SHELF_BLOCKS: u32 = 4;

/// Decode `data` as a stream, or send it to a node.
pub fn run(data: &[u8]) {
    match data.strip_prefix(LIVE) {
        Some(data) => live(data),
        None => frames(data),
    }
}

/// Every frame encodes to the bytes that it was decoded from; other bytes have an error of one line.
fn frames(data: &[u8]) {
    let mut left = data;
    loop {
        match Frame::split(left) {
            Ok(None) => return,
            Err(error) => return crate::assert_one_line(&error.to_string()),
            Ok(Some((frame, rest))) => {
                let bytes = &left[..left.len() - rest.len()];
                assert!(bytes.len() >= HEADER_BYTES && rest.len() < left.len());
                match &frame {
                    Frame::Data(head) => assert_eq!(head.encode()[..], bytes[..bytes.len() - head.bytes as usize]),
                    Frame::Refused(refused) => {
                        assert!(!refused.text.chars().any(char::is_control), "{refused:?}");
                    }
                    frame => assert_eq!(frame.encode(), bytes),
                }
                handshake(frame);
                left = rest;
            }
        }
    }
}

fn identity() -> Identity {
    Identity {
        fabric: FabricKind::Tcp,
        block_bytes: BLOCK_BYTES,
        model: Fingerprint([1; 32]),
        layout: Fingerprint([2; 32]),
        instance: [3; 16],
    }
}

/// No input gets past a handshake without the key.
fn handshake(frame: Frame) {
    static KEY: OnceLock<Key> = OnceLock::new();
    let key = KEY.get_or_init(|| Key::new(b"a key that no input has").expect("long enough"));
    match frame {
        Frame::Hello(hello) => match wire::welcome(&identity(), key, &hello, [4; 32]) {
            Ok(welcome) => {
                assert!(welcome.check(key, &hello, welcome.proof).is_err(), "its own proof came back");
                let proof = wire::check_welcome(&Key::none(), &hello, &welcome);
                assert!(proof.is_err(), "a proof of another key was accepted");
            }
            Err(refused) => crate::assert_one_line(&refused.text),
        },
        Frame::Welcome(welcome) => {
            let hello = wire::greet(identity(), [5; 32]);
            let refused = wire::check_welcome(key, &hello, &welcome).expect_err("the input knows no key");
            crate::assert_one_line(&refused.text);
        }
        _ => {}
    }
}

/// A node with an offer (number 1) and room for four blocks of peers.
struct Live {
    node: Node,
    offered: Arc<Region>,
}

fn node() -> &'static Live {
    static LIVE: OnceLock<Live> = OnceLock::new();
    LIVE.get_or_init(|| {
        let Identity { model, layout, block_bytes, .. } = identity();
        let settings = NodeSettings { shelf_blocks: SHELF_BLOCKS, ..NodeSettings::new(model, layout, block_bytes) };
        let node = Node::start(settings).expect("a node on loopback");
        let offered = Region::allocate(2, block_bytes).expect("two blocks");
        let memory = node.register(&offered).expect("memory of the node's blocks");
        let block = |index| Offered { index, hash: BlockHash([index as u8; 32]) };
        node.offer(memory, &[block(0), block(1)]).expect("an offer");
        Live { node, offered }
    })
}

/// Say `data` to the node as a peer, and read its answers until it hangs up.
fn live(data: &[u8]) {
    let Live { node, offered } = node();
    let mut stream = TcpStream::connect(node.address()).expect("the node listens");
    stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a time that is not 0");
    let hello = wire::greet(Identity { instance: [6; 16], ..identity() }, [7; 32]);
    stream.write_all(&Frame::Hello(hello.clone()).encode()).expect("the node reads");
    let Frame::Welcome(welcome) = read(&mut stream) else { panic!("no WELCOME") };
    let proof = wire::check_welcome(&Key::none(), &hello, &welcome).expect("the same blocks and no key");
    stream.write_all(&Frame::Proof(proof).encode()).expect("the node reads");
    assert_eq!(read(&mut stream), Frame::Ready);
    // The node may have hung up before the end.
    let mut sending = stream.try_clone().expect("the socket can be shared");
    let bytes = data.to_vec();
    let sent = std::thread::spawn(move || {
        let _ = sending.write_all(&bytes);
        let _ = sending.shutdown(Shutdown::Write);
    });
    let mut answers = Vec::new();
    let ended = stream.read_to_end(&mut answers);
    assert!(
        !ended.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock),
        "the node neither answers nor hangs up"
    );
    sent.join().expect("it only writes");
    let mut left = &answers[..];
    while let Ok(Some((frame, rest))) = Frame::split(left) {
        if let Frame::Kept { status: Status::Done, offers, .. } = &frame {
            assert!(offers.len() <= SHELF_BLOCKS as usize);
        }
        left = rest;
    }
    assert!(node.kept_blocks() <= SHELF_BLOCKS as usize);
    assert_eq!(offered.write(0).err(), Some(RegionError::InUse { index: 0 }), "the offer is still leased");
}

fn read(stream: &mut TcpStream) -> Frame {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).expect("the node answers");
    let (kind, bytes) = wire::header(&header, wire::MAX_HANDSHAKE_BYTES).expect("a frame of the handshake");
    let mut body = vec![0; bytes];
    stream.read_exact(&mut body).expect("the node answers");
    Frame::decode(kind, &body).expect("a frame")
}
