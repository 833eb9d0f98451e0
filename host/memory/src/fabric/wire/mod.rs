//! The `MRDN` protocol between two peers, as bytes; ADR 0030 specifies it. Nothing here does I/O.
//!
//! A frame is its length (4 bytes, of what follows), its kind (1 byte) and its body. Integers are little-endian. Whatever
//! a peer sends is hostile: a decoder checks every length against the bytes that are there before it allocates.

mod body;
mod hello;

pub use body::{Blocks, DataHead, Descriptor, Frame, Status};
pub use hello::{Hello, Identity, Key, KeyError, Proof, Refusal, Refused, Welcome, check_welcome, greet, welcome};

use thiserror::Error;

/// The first bytes of a connection, in [`Hello`].
pub const MAGIC: [u8; 4] = *b"MRDN";
/// The version that this build speaks; it speaks no other.
pub const VERSION: u16 = 1;
/// Bytes before the body: length and kind.
pub const HEADER_BYTES: usize = 5;
/// Most bytes of a frame of the handshake, whose sender is not known yet.
pub const MAX_HANDSHAKE_BYTES: usize = 512;
/// Most bytes of any other frame, without the contents of a `DATA` frame.
pub const MAX_FRAME_BYTES: usize = 1 << 20;
/// Most bytes of KV in one `DATA` frame.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;
/// Most blocks in one offer.
pub const MAX_BLOCKS: usize = 16_384;
/// Most bytes that a data path may tell about the memory of an offer.
pub const MAX_RIGHTS_BYTES: usize = 64 << 10;

/// A frame that is not one of the protocol.
///
/// ```
/// use meridian_memory::fabric::wire::{Frame, WireError};
///
/// assert_eq!(Frame::decode(99, &[]), Err(WireError::Kind(99)));
/// assert_eq!(WireError::Kind(99).to_string(), "frame of kind 99, expected 1 to 13");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WireError {
    /// The connection does not begin with [`MAGIC`].
    #[error("the connection does not begin with \"MRDN\"")]
    Magic,
    /// There is no such kind, or it is not expected at this point.
    #[error("frame of kind {0}, expected 1 to 13")]
    Kind(u8),
    /// A frame that is not expected at this point.
    #[error("{0} frame at a point where none may come")]
    Unexpected(&'static str),
    /// A frame that is too long or too short.
    #[error("{frame}: {bytes} bytes, expected {expected}")]
    Length {
        /// The frame or the part of it.
        frame: &'static str,
        /// Its bytes.
        bytes: usize,
        /// What was expected.
        expected: &'static str,
    },
    /// A number that has no meaning there.
    #[error("{field}: {value}, expected {expected}")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What was expected.
        expected: &'static str,
    },
}

/// The length of the frame (of kind and body) in a header, and its kind.
///
/// ```
/// use meridian_memory::fabric::wire::{self, WireError};
///
/// assert_eq!(wire::header(&[1, 0, 0, 0, 4], 64), Ok((4, 0)));
/// assert!(matches!(wire::header(&[255, 255, 255, 255, 4], 64), Err(WireError::Length { .. })));
/// ```
///
/// # Errors
/// [`WireError::Length`] when the body is longer than `most_bytes`, or there is not even a kind.
pub fn header(header: &[u8; HEADER_BYTES], most_bytes: usize) -> Result<(u8, usize), WireError> {
    let [a, b, c, d, kind] = *header;
    let bytes = u32::from_le_bytes([a, b, c, d]) as usize;
    match bytes.checked_sub(1) {
        Some(body) if body <= most_bytes => Ok((kind, body)),
        _ => Err(WireError::Length { frame: "frame", bytes, expected: "1 to the limit of its place" }),
    }
}

/// A writer of one frame.
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn new(kind: u8) -> Self {
        Self(vec![0, 0, 0, 0, kind])
    }

    pub(crate) fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u8(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    pub(crate) fn u16(self, value: u16) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    pub(crate) fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// The frame, if `follow` bytes come after what was written.
    pub(crate) fn finish(mut self, follow: usize) -> Vec<u8> {
        let bytes = u32::try_from(self.0.len() - 4 + follow).expect("frames are far shorter");
        self.0[..4].copy_from_slice(&bytes.to_le_bytes());
        self.0
    }
}

/// A reader of one body.
pub(crate) struct Reader<'a> {
    left: &'a [u8],
    frame: &'static str,
    bytes: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(frame: &'static str, body: &'a [u8]) -> Self {
        Self { left: body, frame, bytes: body.len() }
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let (now, left) = self.left.split_at_checked(count).ok_or_else(|| self.wrong("more"))?;
        self.left = left;
        Ok(now)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        self.take(N).map(|bytes| bytes.try_into().expect("taken so long"))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A number of items of `each` bytes that follow, at most `most` of them, all there.
    pub(crate) fn count(&mut self, field: &'static str, each: usize, most: usize) -> Result<usize, WireError> {
        let count = self.u32()? as usize;
        if count > most {
            return Err(WireError::Value { field, value: count as u64, expected: "at most the limit of the protocol" });
        }
        if count * each > self.left.len() { Err(self.wrong("as many items as it names")) } else { Ok(count) }
    }

    pub(crate) fn finish(self) -> Result<(), WireError> {
        if self.left.is_empty() { Ok(()) } else { Err(self.wrong("fewer")) }
    }

    fn wrong(&self, expected: &'static str) -> WireError {
        WireError::Length { frame: self.frame, bytes: self.bytes, expected }
    }
}
