//! The bytes of the protocol: vectors that an independent program wrote, and any bytes.

#![cfg(feature = "fabric")]
use meridian_memory::fabric::wire::{
    Blocks, DataHead, Descriptor, Frame, HEADER_BYTES, Hello, Proof, Status, WireError, check_welcome, greet, welcome,
};
use meridian_memory::fabric::{BlockHash, FabricKind, Fingerprint, Identity, Key, Layout, OfferId, Refusal, Refused};
use proptest::prelude::*;

fn bytes_of(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with('#'))
}

fn identity(first: u8) -> Identity {
    let layout = Layout {
        block_tokens: 16,
        layers: 36,
        kv_heads: 8,
        head_size: 128,
        element: "bfloat16".into(),
        order: "layer, key or value, token, head".into(),
    };
    Identity {
        fabric: FabricKind::Tcp,
        block_bytes: u32::try_from(layout.block_bytes(2)).unwrap(),
        model: Fingerprint::of(b"Qwen/Qwen3-8B@main"),
        layout: layout.fingerprint(),
        instance: std::array::from_fn(|at| first + at as u8),
    }
}

fn nonce(first: u8) -> [u8; 32] {
    std::array::from_fn(|at| first + at as u8 % 16)
}

#[test]
fn frames_are_the_bytes_of_the_vectors() {
    let key = Key::new(b"a key of the test vectors").unwrap();
    let hello = greet(identity(0), nonce(0xA0));
    let answer = welcome(&identity(16), &key, &hello, nonce(0xB0)).unwrap();
    let proof = check_welcome(&key, &hello, &answer).unwrap();
    answer.check(&key, &hello, proof).unwrap();
    let offers = vec![OfferId(77)];
    // XXH3-64 of nothing.
    let checksum = 0x2d06_8005_38d3_94c2;
    let block = Descriptor { hash: BlockHash::of(b"block 1"), checksum, address: 0, bytes: 2_359_296 };
    let frames = [
        ("hello", Frame::Hello(hello)),
        ("welcome", Frame::Welcome(answer)),
        ("proof", Frame::Proof(proof)),
        ("ready", Frame::Ready),
        ("refused", Frame::Refused(Refused { why: Refusal::Layout, text: "other".into() })),
        ("fetch", Frame::Fetch { id: 1, offer: OfferId(9) }),
        ("blocks", Frame::Blocks(Blocks { id: 1, rights: b"abc".to_vec(), blocks: vec![block] })),
        ("data", Frame::Data(DataHead { id: 1, block: 0, offset: 4096, bytes: 8 })),
        ("end", Frame::End { id: 1, status: Status::Done }),
        ("close", Frame::Close { id: 1 }),
        ("keep", Frame::Keep { id: 2, offer: OfferId(9) }),
        ("kept", Frame::Kept { id: 2, status: Status::Done, offers: offers.clone() }),
        ("forget", Frame::Forget { offers }),
    ];
    let vectors: Vec<_> = lines(include_str!("vectors/frames.txt")).map(|line| line.split_once(' ').unwrap()).collect();
    assert_eq!(vectors.len(), frames.len());
    for ((name, frame), (vector, hex)) in frames.iter().zip(vectors) {
        assert_eq!(*name, vector);
        let bytes = bytes_of(hex);
        let (decoded, rest) = Frame::split(&bytes).unwrap().unwrap();
        assert_eq!((&decoded, rest.len()), (frame, 0), "{name}");
        let contents: &[u8] = if *name == "data" { b"contents" } else { b"" };
        assert_eq!([&frame.encode(), contents].concat(), bytes, "{name}");
        for end in 0..bytes.len() {
            assert_eq!(Frame::split(&bytes[..end]), Ok(None), "{name}, {end} bytes");
        }
    }
}

#[test]
fn frames_that_are_not_the_protocols_are_refused() {
    let mut count = 0;
    for line in lines(include_str!("vectors/refused.txt")) {
        let (name, rest) = line.split_once(": ").unwrap();
        let (error, hex) = rest.split_once(" | ").unwrap();
        let refused = Frame::split(&bytes_of(hex)).unwrap_err();
        assert_eq!(refused.to_string(), error, "{name}");
        count += 1;
    }
    assert_eq!(count, 17);
}

#[test]
fn both_sides_prove_the_key_and_neither_can_return_the_others_proof() {
    let (key, other) = (Key::new(b"the key of the two peers").unwrap(), Key::new(b"another key of 16 bytes").unwrap());
    let hello = greet(identity(0), nonce(1));
    let answer = welcome(&identity(16), &key, &hello, nonce(2)).unwrap();
    assert_eq!(check_welcome(&other, &hello, &answer).unwrap_err().why, Refusal::Key);
    let proof = check_welcome(&key, &hello, &answer).unwrap();
    assert_eq!(answer.check(&key, &hello, proof), Ok(()));
    for wrong in [answer.proof, Proof([0; 32])] {
        assert_eq!(answer.check(&key, &hello, wrong).unwrap_err().why, Refusal::Key);
    }
    // A proof of another connection.
    let fresh = welcome(&identity(16), &key, &hello, nonce(3)).unwrap();
    assert_eq!(fresh.check(&key, &hello, proof).unwrap_err().why, Refusal::Key);
    // Somebody in between changes what a peer says about itself.
    let changed = Hello { identity: Identity { model: Fingerprint::of(b"x"), ..identity(0) }, ..hello };
    assert_eq!(check_welcome(&key, &changed, &answer).unwrap_err().why, Refusal::Key);
}

#[test]
fn peers_with_other_blocks_are_refused_with_both_values() {
    let key = Key::none();
    let mine = identity(0);
    let (model, layout) = (Fingerprint::of(b"another model"), Fingerprint::of(b"another layout"));
    for (other, why, text) in [
        (
            Identity { fabric: FabricKind::Nixl, ..mine.clone() },
            Refusal::Fabric,
            "fabric nixl, expected tcp".to_owned(),
        ),
        (Identity { model, ..mine.clone() }, Refusal::Model, format!("model {model}, expected {}", mine.model)),
        (Identity { layout, ..mine.clone() }, Refusal::Layout, format!("layout {layout}, expected {}", mine.layout)),
        (
            Identity { block_bytes: 4096, ..mine.clone() },
            Refusal::Layout,
            "blocks of 4096 bytes, expected 2359296".to_owned(),
        ),
    ] {
        // The dialler refuses what the listener is, and the listener what the dialler is.
        let hello = greet(mine.clone(), nonce(1));
        let answer = welcome(&other, &key, &hello, nonce(2)).unwrap();
        assert_eq!(check_welcome(&key, &hello, &answer), Err(Refused { why, text: text.clone() }));
        let hello = greet(other.clone(), nonce(1));
        let answer = welcome(&mine, &key, &hello, nonce(2)).unwrap();
        let agreeing = Hello { identity: mine.clone(), ..hello.clone() };
        let of_agreeing = check_welcome(&key, &agreeing, &answer).unwrap_err();
        assert_eq!(of_agreeing.why, Refusal::Key, "the proof covers what both said");
        assert_eq!(check_welcome(&key, &hello, &answer).unwrap_err().why, why);
    }
    let hello = Hello { versions: (2, 9), ..greet(mine.clone(), nonce(1)) };
    let refused = welcome(&mine, &key, &hello, nonce(2)).unwrap_err();
    assert_eq!((refused.why, refused.text.as_str()), (Refusal::Version, "versions 2 to 9, expected 1"));
}

#[test]
fn the_text_of_a_refusal_moves_no_cursor() {
    let mut bytes = Frame::Refused(Refused { why: Refusal::Key, text: "ab".into() }).encode();
    let text = bytes.len() - 2;
    bytes[text] = 0x1b;
    let (frame, _) = Frame::split(&bytes).unwrap().unwrap();
    assert_eq!(frame, Frame::Refused(Refused { why: Refusal::Key, text: "?b".into() }));
    let long = Refused { why: Refusal::Key, text: "é".repeat(150) };
    let encoded = Frame::Refused(long).encode();
    let (frame, _) = Frame::split(&encoded).unwrap().unwrap();
    assert_eq!(frame, Frame::Refused(Refused { why: Refusal::Key, text: "é".repeat(100) }));
}

proptest! {
    #[test]
    fn any_bytes_are_a_frame_that_encodes_to_itself_or_are_refused(kind in 0_u8..16, body in prop::collection::vec(any::<u8>(), 0..300)) {
        match Frame::decode(kind, &body) {
            Ok(Frame::Data(head)) => prop_assert_eq!(&head.encode()[HEADER_BYTES..], &body[..DataHead::BYTES]),
            // Its text may have been made printable.
            Ok(Frame::Refused(_)) => {}
            Ok(frame) => prop_assert_eq!(&frame.encode()[HEADER_BYTES..], &body[..]),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn lists_of_any_length_come_back(offers in prop::collection::vec(any::<u64>(), 0..200), cut in 0_usize..100) {
        let frame = Frame::Forget { offers: offers.into_iter().map(OfferId).collect() };
        let bytes = frame.encode();
        let body = &bytes[HEADER_BYTES..];
        prop_assert_eq!(Frame::decode(13, body), Ok(frame));
        if cut > 0 && cut <= body.len() {
            let is_length = matches!(Frame::decode(13, &body[..body.len() - cut]), Err(WireError::Length { .. }));
            prop_assert!(is_length);
        }
    }
}
