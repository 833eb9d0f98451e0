//! The handshake: versions, proofs of the shared key, and what both sides must have in common.

use std::fmt;

use ring::hmac;
use thiserror::Error;

use super::{HEADER_BYTES, MAGIC, Reader, VERSION, WireError, Writer};
use crate::fabric::{FabricKind, Fingerprint};

/// The secret that peers share. It is never sent or shown.
///
/// ```
/// use meridian_memory::fabric::wire::Key;
///
/// assert!(Key::new(b"sixteen bytes or more").is_ok());
/// assert!(Key::new(b"short").is_err());
/// ```
#[derive(Clone)]
pub struct Key(hmac::Key);

/// A key that is too short or too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a key of {bytes} bytes, expected 16 to 1024")]
pub struct KeyError {
    /// Its bytes.
    pub bytes: usize,
}

impl Key {
    /// A key of 16 to 1,024 bytes.
    ///
    /// # Errors
    /// [`KeyError`].
    pub fn new(secret: &[u8]) -> Result<Self, KeyError> {
        if !(16..=1024).contains(&secret.len()) {
            return Err(KeyError { bytes: secret.len() });
        }
        Ok(Self(hmac::Key::new(hmac::HMAC_SHA256, secret)))
    }

    /// The key of peers that share none: proofs of it prove nothing.
    #[must_use]
    pub fn none() -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, &[]))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key")
    }
}

/// A peer's description of itself; both sides must agree in all but the instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// How the contents of blocks travel.
    pub fabric: FabricKind,
    /// Bytes of a block over all layers.
    pub block_bytes: u32,
    /// The model and its weights.
    pub model: Fingerprint,
    /// The order of the bytes of a block.
    pub layout: Fingerprint,
    /// Random, of this process: a process that starts again is another one.
    pub instance: [u8; 16],
}

impl Identity {
    fn write(&self, to: Writer) -> Writer {
        let Self { fabric, block_bytes, model, layout, instance } = self;
        to.u8(*fabric as u8).bytes(&[0; 3]).u32(*block_bytes).bytes(&model.0).bytes(&layout.0).bytes(instance)
    }

    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let kind = from.u8()?;
        let fabric = FabricKind::from_wire(kind).ok_or(WireError::Value {
            field: "fabric",
            value: kind.into(),
            expected: "0 (tcp), 1 (nixl) or 2 (mooncake)",
        })?;
        reserved(from)?;
        Ok(Self {
            fabric,
            block_bytes: from.u32()?,
            model: Fingerprint(from.array()?),
            layout: Fingerprint(from.array()?),
            instance: from.array()?,
        })
    }

    /// Why blocks of `theirs` are of no use here.
    fn refuses(&self, theirs: &Self) -> Option<Refused> {
        let refused = |why, text: String| Some(Refused { why, text });
        if self.fabric != theirs.fabric {
            let text = format!("fabric {}, expected {}", theirs.fabric, self.fabric);
            return refused(Refusal::Fabric, text);
        }
        if self.model != theirs.model {
            return refused(Refusal::Model, format!("model {}, expected {}", theirs.model, self.model));
        }
        if self.block_bytes != theirs.block_bytes {
            let text = format!("blocks of {} bytes, expected {}", theirs.block_bytes, self.block_bytes);
            return refused(Refusal::Layout, text);
        }
        if self.layout != theirs.layout {
            return refused(Refusal::Layout, format!("layout {}, expected {}", theirs.layout, self.layout));
        }
        None
    }
}

fn reserved(from: &mut Reader<'_>) -> Result<(), WireError> {
    let bytes: [u8; 3] = from.array()?;
    let value = u64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]));
    if value == 0 { Ok(()) } else { Err(WireError::Value { field: "reserved bytes", value, expected: "0" }) }
}

/// The first frame, of the peer that connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Lowest and highest version that it speaks.
    pub versions: (u16, u16),
    /// The peer that connects.
    pub identity: Identity,
    /// Fresh random bytes, which make the other side's proof fresh.
    pub nonce: [u8; 32],
}

impl Hello {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (low, high) = self.versions;
        self.identity.write(Writer::new(1).bytes(&MAGIC).u16(low).u16(high)).bytes(&self.nonce).finish(0)
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, WireError> {
        let mut from = Reader::new("HELLO", body);
        if from.array()? != MAGIC {
            return Err(WireError::Magic);
        }
        let versions = (from.u16()?, from.u16()?);
        let hello = Self { versions, identity: Identity::read(&mut from)?, nonce: from.array()? };
        from.finish()?;
        Ok(hello)
    }
}

/// The answer of the peer that listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version of what follows.
    pub version: u16,
    /// The peer that listens.
    pub identity: Identity,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
    /// That it knows the key.
    pub proof: Proof,
}

impl Welcome {
    fn unproven(&self) -> Writer {
        self.identity.write(Writer::new(2).u16(self.version)).bytes(&self.nonce)
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        self.unproven().bytes(&self.proof.0).finish(0)
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, WireError> {
        let mut from = Reader::new("WELCOME", body);
        let welcome = Self {
            version: from.u16()?,
            identity: Identity::read(&mut from)?,
            nonce: from.array()?,
            proof: Proof(from.array()?),
        };
        from.finish()?;
        Ok(welcome)
    }
}

/// HMAC-SHA256 over the side's label and both frames of the handshake, without proofs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof(pub [u8; 32]);

#[derive(Clone, Copy)]
enum Side {
    Listener,
    Dialler,
}

fn transcript(side: Side, hello: &Hello, welcome: &Welcome) -> Vec<u8> {
    let label: &[u8] = match side {
        Side::Listener => b"MRDN listener\n",
        Side::Dialler => b"MRDN dialler\n",
    };
    // Bodies without their lengths: the length of the second counts its proof.
    let (hello, welcome) = (hello.encode(), welcome.unproven().finish(0));
    [label, &hello[HEADER_BYTES..], &welcome[HEADER_BYTES..]].concat()
}

fn prove(key: &Key, side: Side, hello: &Hello, welcome: &Welcome) -> Proof {
    let tag = hmac::sign(&key.0, &transcript(side, hello, welcome));
    Proof(tag.as_ref().try_into().expect("SHA-256 has 32 bytes"))
}

fn is_proven(key: &Key, side: Side, hello: &Hello, welcome: &Welcome, proof: Proof) -> bool {
    // In constant time.
    hmac::verify(&key.0, &transcript(side, hello, welcome), &proof.0).is_ok()
}

/// A peer that does not want the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Why.
    pub why: Refusal,
    /// One line for the operator, at most 200 bytes.
    pub text: String,
}

/// Why a peer does not want a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No version in common.
    Version = 1,
    /// The other side does not know the key.
    Key = 2,
    /// Contents would travel another way.
    Fabric = 3,
    /// Blocks of another model.
    Model = 4,
    /// Blocks of another size or order.
    Layout = 5,
    /// Too many connections.
    Busy = 6,
}

impl Refused {
    pub(super) fn encode(&self) -> Vec<u8> {
        let text = &self.text.as_bytes()[..self.text.floor_char_boundary(200)];
        Writer::new(5).u8(self.why as u8).u8(text.len() as u8).bytes(text).finish(0)
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, WireError> {
        let mut from = Reader::new("REFUSED", body);
        let code = from.u8()?;
        let all = [Refusal::Version, Refusal::Key, Refusal::Fabric, Refusal::Model, Refusal::Layout, Refusal::Busy];
        let why = all.into_iter().find(|why| *why as u8 == code);
        let expected = "1 to 6";
        let why = why.ok_or(WireError::Value { field: "reason", value: code.into(), expected })?;
        let bytes = usize::from(from.u8()?);
        if bytes > 200 {
            return Err(WireError::Value { field: "text", value: bytes as u64, expected: "at most 200 bytes" });
        }
        // An operator sees the text, so it must not control the terminal.
        let text = String::from_utf8_lossy(from.take(bytes)?);
        let text = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        from.finish()?;
        Ok(Self { why, text })
    }
}

/// The first frame of a peer that connects.
#[must_use]
pub fn greet(identity: Identity, nonce: [u8; 32]) -> Hello {
    Hello { versions: (VERSION, VERSION), identity, nonce }
}

/// The listener's answer.
///
/// # Errors
/// [`Refused`] when there is no common version. Everything else waits for the proof.
pub fn welcome(identity: &Identity, key: &Key, hello: &Hello, nonce: [u8; 32]) -> Result<Welcome, Refused> {
    let (low, high) = hello.versions;
    if !(low..=high).contains(&VERSION) {
        let text = format!("versions {low} to {high}, expected {VERSION}");
        return Err(Refused { why: Refusal::Version, text });
    }
    let mut welcome = Welcome { version: VERSION, identity: identity.clone(), nonce, proof: Proof([0; 32]) };
    welcome.proof = prove(key, Side::Listener, hello, &welcome);
    Ok(welcome)
}

/// The dialler's check of the answer; returns its own proof.
///
/// # Errors
/// [`Refused`] when the listener does not know the key, or has other blocks.
pub fn check_welcome(key: &Key, hello: &Hello, welcome: &Welcome) -> Result<Proof, Refused> {
    if welcome.version != VERSION {
        let text = format!("version {}, expected {VERSION}", welcome.version);
        return Err(Refused { why: Refusal::Version, text });
    }
    if !is_proven(key, Side::Listener, hello, welcome, welcome.proof) {
        return Err(Refused { why: Refusal::Key, text: "the peer does not know the shared key".into() });
    }
    match hello.identity.refuses(&welcome.identity) {
        Some(refused) => Err(refused),
        None => Ok(prove(key, Side::Dialler, hello, welcome)),
    }
}

impl Welcome {
    /// The listener's check of the dialler.
    ///
    /// # Errors
    /// [`Refused`] when the dialler does not know the key, or has other blocks.
    pub fn check(&self, key: &Key, hello: &Hello, proof: Proof) -> Result<(), Refused> {
        if !is_proven(key, Side::Dialler, hello, self, proof) {
            return Err(Refused { why: Refusal::Key, text: "the peer does not know the shared key".into() });
        }
        self.identity.refuses(&hello.identity).map_or(Ok(()), Err)
    }
}
