//! The frames.

use super::hello::{Hello, Proof, Refused, Welcome};
use super::{HEADER_BYTES, MAX_BLOCKS, MAX_CHUNK_BYTES, MAX_RIGHTS_BYTES, Reader, WireError, Writer};
use crate::fabric::{BlockHash, OfferId};

/// A frame, without the contents of a `DATA` frame.
///
/// ```
/// use meridian_memory::fabric::OfferId;
/// use meridian_memory::fabric::wire::{self, Frame};
///
/// let frame = Frame::Fetch { id: 1, offer: OfferId(9) };
/// let bytes = frame.encode();
/// let (kind, body) = (bytes[4], &bytes[wire::HEADER_BYTES..]);
/// assert_eq!(Frame::decode(kind, body), Ok(frame));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The dialler's first frame.
    Hello(Hello),
    /// The listener's answer.
    Welcome(Welcome),
    /// The dialler's proof.
    Proof(Proof),
    /// The listener's consent: requests may follow, from both sides.
    Ready,
    /// The end of the connection, before any request.
    Refused(Refused),
    /// Asks for the blocks of an offer.
    Fetch {
        /// The asking side's number of this request.
        id: u64,
        /// The offer.
        offer: OfferId,
    },
    /// Describes the blocks of a fetch.
    Blocks(Blocks),
    /// A part of a block; its contents follow.
    Data(DataHead),
    /// The end of a fetch: all of it was sent, or none will be.
    End {
        /// The request.
        id: u64,
        /// Whether all of it was sent.
        status: Status,
    },
    /// The fetching side reads no more, so that the blocks may be used again.
    Close {
        /// The request.
        id: u64,
    },
    /// Asks the peer to fetch an offer and to keep the blocks.
    Keep {
        /// The asking side's number of this request.
        id: u64,
        /// The offer.
        offer: OfferId,
    },
    /// The answer: an offer of the peer for each block.
    Kept {
        /// The request.
        id: u64,
        /// Whether the blocks are kept.
        status: Status,
        /// One a block, in order; none unless the status is `Done`.
        offers: Vec<OfferId>,
    },
    /// Kept blocks that are not needed any more.
    Forget {
        /// Their offers.
        offers: Vec<OfferId>,
    },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// As asked.
    Done = 0,
    /// There is no such offer, or no longer.
    Unknown = 1,
    /// The fetching side closed it.
    Closed = 2,
    /// There is no room.
    Full = 3,
    /// The contents did not match their checksums, or the fetch failed otherwise.
    Failed = 4,
}

impl Status {
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        let code = from.u8()?;
        let all = [Self::Done, Self::Unknown, Self::Closed, Self::Full, Self::Failed];
        let status = all.into_iter().find(|status| *status as u8 == code);
        status.ok_or(WireError::Value { field: "status", value: code.into(), expected: "0 to 4" })
    }
}

/// The blocks of a fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// The request.
    pub id: u64,
    /// The data path's description of the sender's memory; empty over TCP.
    pub rights: Vec<u8>,
    /// The blocks, in the order of the offer.
    pub blocks: Vec<Descriptor>,
}

/// One block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The engine's hash of the tokens up to the end of the block.
    pub hash: BlockHash,
    /// XXH3-64 of the contents, at the time of the offer.
    pub checksum: u64,
    /// Its place in the memory of the sender; 0 over TCP.
    pub address: u64,
    /// Its bytes.
    pub bytes: u32,
}

impl Descriptor {
    const BYTES: usize = 32 + 8 + 8 + 4;
}

/// The head of a part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataHead {
    /// The request.
    pub id: u64,
    /// The block's position in the offer.
    pub block: u32,
    /// Where the part begins in the block, bytes.
    pub offset: u32,
    /// Its bytes, which follow.
    pub bytes: u32,
}

impl DataHead {
    /// The kind of the frame.
    pub const KIND: u8 = 8;
    /// Bytes of the body before the contents.
    pub const BYTES: usize = 16;

    /// The head of a body of `body_bytes`, which begins with `head`.
    ///
    /// # Errors
    /// [`WireError::Length`] when there are no contents, or more than [`MAX_CHUNK_BYTES`].
    pub fn decode(body_bytes: usize, head: &[u8; Self::BYTES]) -> Result<Self, WireError> {
        let wrong = WireError::Length { frame: "DATA", bytes: body_bytes, expected: "17 to 1048592" };
        let bytes = body_bytes.checked_sub(Self::BYTES).filter(|bytes| (1..=MAX_CHUNK_BYTES).contains(bytes));
        let bytes = u32::try_from(bytes.ok_or(wrong)?).expect("at most a chunk");
        let mut from = Reader::new("DATA", head);
        Ok(Self { id: from.u64()?, block: from.u32()?, offset: from.u32()?, bytes })
    }

    /// The header and the head; the contents follow.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let Self { id, block, offset, bytes } = *self;
        Writer::new(Self::KIND).u64(id).u32(block).u32(offset).finish(bytes as usize)
    }
}

impl Frame {
    /// Its name in the specification.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "HELLO",
            Self::Welcome(_) => "WELCOME",
            Self::Proof(_) => "PROOF",
            Self::Ready => "READY",
            Self::Refused(_) => "REFUSED",
            Self::Fetch { .. } => "FETCH",
            Self::Blocks(_) => "BLOCKS",
            Self::Data(_) => "DATA",
            Self::End { .. } => "END",
            Self::Close { .. } => "CLOSE",
            Self::Keep { .. } => "KEEP",
            Self::Kept { .. } => "KEPT",
            Self::Forget { .. } => "FORGET",
        }
    }

    /// Its bytes; of a `DATA` frame, those before the contents.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello(hello) => hello.encode(),
            Self::Welcome(welcome) => welcome.encode(),
            Self::Proof(proof) => Writer::new(3).bytes(&proof.0).finish(0),
            Self::Ready => Writer::new(4).finish(0),
            Self::Refused(refused) => refused.encode(),
            Self::Fetch { id, offer } => Writer::new(6).u64(*id).u64(offer.0).finish(0),
            Self::Blocks(Blocks { id, rights, blocks }) => {
                let head = Writer::new(7).u64(*id).u32(rights.len() as u32).bytes(rights).u32(blocks.len() as u32);
                let each = |to: Writer, block: &Descriptor| {
                    let Descriptor { hash, checksum, address, bytes } = block;
                    to.bytes(&hash.0).u64(*checksum).u64(*address).u32(*bytes)
                };
                blocks.iter().fold(head, each).finish(0)
            }
            Self::Data(head) => head.encode(),
            Self::End { id, status } => Writer::new(9).u64(*id).u8(*status as u8).finish(0),
            Self::Close { id } => Writer::new(10).u64(*id).finish(0),
            Self::Keep { id, offer } => Writer::new(11).u64(*id).u64(offer.0).finish(0),
            Self::Kept { id, status, offers } => {
                write_offers(Writer::new(12).u64(*id).u8(*status as u8), offers).finish(0)
            }
            Self::Forget { offers } => write_offers(Writer::new(13), offers).finish(0),
        }
    }

    /// The frame of this kind and body. A `DATA` frame is decoded by [`DataHead::decode`] as it arrives; here its
    /// contents are dropped.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, WireError> {
        let ids = |name| -> Result<(u64, OfferId), WireError> {
            let mut from = Reader::new(name, body);
            let ids = (from.u64()?, OfferId(from.u64()?));
            from.finish()?;
            Ok(ids)
        };
        Ok(match kind {
            1 => Self::Hello(Hello::decode(body)?),
            2 => Self::Welcome(Welcome::decode(body)?),
            3 => {
                let mut from = Reader::new("PROOF", body);
                let proof = Proof(from.array()?);
                from.finish()?;
                Self::Proof(proof)
            }
            4 => Reader::new("READY", body).finish().map(|()| Self::Ready)?,
            5 => Self::Refused(Refused::decode(body)?),
            6 => ids("FETCH").map(|(id, offer)| Self::Fetch { id, offer })?,
            7 => Self::Blocks(blocks(body)?),
            DataHead::KIND => {
                let wrong = WireError::Length { frame: "DATA", bytes: body.len(), expected: "17 to 1048592" };
                let head = body.first_chunk().ok_or(wrong)?;
                Self::Data(DataHead::decode(body.len(), head)?)
            }
            9 => {
                let mut from = Reader::new("END", body);
                let (id, status) = (from.u64()?, Status::read(&mut from)?);
                from.finish()?;
                Self::End { id, status }
            }
            10 => {
                let mut from = Reader::new("CLOSE", body);
                let id = from.u64()?;
                from.finish()?;
                Self::Close { id }
            }
            11 => ids("KEEP").map(|(id, offer)| Self::Keep { id, offer })?,
            12 => {
                let mut from = Reader::new("KEPT", body);
                let (id, status) = (from.u64()?, Status::read(&mut from)?);
                let offers = read_offers(&mut from)?;
                from.finish()?;
                if status != Status::Done && !offers.is_empty() {
                    let value = offers.len() as u64;
                    return Err(WireError::Value { field: "offers", value, expected: "0 unless the blocks are kept" });
                }
                Self::Kept { id, status, offers }
            }
            13 => {
                let mut from = Reader::new("FORGET", body);
                let offers = read_offers(&mut from)?;
                from.finish()?;
                Self::Forget { offers }
            }
            kind => return Err(WireError::Kind(kind)),
        })
    }

    /// The frame at the head of `bytes`, and what follows it; `None` when it is not all there.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn split(bytes: &[u8]) -> Result<Option<(Self, &[u8])>, WireError> {
        let Some((head, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let (kind, body_bytes) = super::header(head, super::MAX_FRAME_BYTES + DataHead::BYTES)?;
        let Some((body, rest)) = rest.split_at_checked(body_bytes) else { return Ok(None) };
        Ok(Some((Self::decode(kind, body)?, rest)))
    }
}

fn blocks(body: &[u8]) -> Result<Blocks, WireError> {
    let mut from = Reader::new("BLOCKS", body);
    let id = from.u64()?;
    let rights = from.count("rights", 1, MAX_RIGHTS_BYTES)?;
    let rights = from.take(rights)?.to_vec();
    let count = from.count("blocks", Descriptor::BYTES, MAX_BLOCKS)?;
    let mut blocks = Vec::with_capacity(count);
    for _ in 0..count {
        let (hash, checksum) = (BlockHash(from.array()?), from.u64()?);
        blocks.push(Descriptor { hash, checksum, address: from.u64()?, bytes: from.u32()? });
    }
    from.finish()?;
    Ok(Blocks { id, rights, blocks })
}

fn write_offers(to: Writer, offers: &[OfferId]) -> Writer {
    offers.iter().fold(to.u32(offers.len() as u32), |to, offer| to.u64(offer.0))
}

fn read_offers(from: &mut Reader<'_>) -> Result<Vec<OfferId>, WireError> {
    let count = from.count("offers", 8, MAX_BLOCKS)?;
    let mut offers = Vec::with_capacity(count);
    for _ in 0..count {
        offers.push(OfferId(from.u64()?));
    }
    Ok(offers)
}
