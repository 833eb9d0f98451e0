//! What a file holds when it is unpacked, and the beginning of it by which its format is told.

use std::io::{self, BufRead, BufReader, Chain, Cursor, Read, Take};

use flate2::bufread::MultiGzDecoder;
use ruzstd::decoding::StreamingDecoder;

/// How much of a file is looked at to tell its format.
const HEAD_BYTES: usize = 64 << 10;
/// Most that is read of a file once it is unpacked, bytes: days of a large service.
pub(super) const MAX_TRACE_BYTES: u64 = 1 << 30;

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];

/// The beginning that was looked at, and the rest.
type Whole<'a> = Chain<Cursor<Vec<u8>>, Box<dyn BufRead + 'a>>;

/// A trace's bytes from the first on, unpacked. One byte more than [`MAX_TRACE_BYTES`] shows that it is too large.
pub(super) struct Source<'a> {
    pub(super) input: Take<Whole<'a>>,
    pub(super) head: Vec<u8>,
}

impl<'a> Source<'a> {
    /// The first bytes say whether a file is packed, not its name.
    pub(super) fn open(mut input: impl BufRead + 'a) -> io::Result<Self> {
        let start = head(&mut input, ZSTD.len())?;
        let is_gzip = start.starts_with(GZIP);
        let is_zstd = start.starts_with(ZSTD);
        let whole = Cursor::new(start).chain(input);
        let mut plain: Box<dyn BufRead + 'a> = if is_gzip {
            Box::new(BufReader::with_capacity(HEAD_BYTES, Named { input: MultiGzDecoder::new(whole), kind: "gzip" }))
        } else if is_zstd {
            Box::new(BufReader::with_capacity(HEAD_BYTES, Named { input: Frames::new(whole), kind: "zstd" }))
        } else {
            Box::new(whole)
        };
        let head = head(&mut plain, HEAD_BYTES)?;
        Ok(Self { input: Cursor::new(head.clone()).chain(plain).take(MAX_TRACE_BYTES + 1), head })
    }

    /// Whether more was there than may be read.
    pub(super) fn is_too_large(&self) -> bool {
        self.input.limit() == 0
    }
}

fn head(input: &mut impl Read, bytes: usize) -> io::Result<Vec<u8>> {
    let mut head = Vec::with_capacity(bytes);
    input.take(bytes as u64).read_to_end(&mut head)?;
    Ok(head)
}

/// Says of which kind the data is that cannot be unpacked.
struct Named<R> {
    input: R,
    kind: &'static str,
}

impl<R: Read> Read for Named<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.input.read(buffer).map_err(|error| {
            let why = match error.kind() {
                io::ErrorKind::UnexpectedEof => "it is cut short".to_owned(),
                _ => error.to_string(),
            };
            io::Error::new(error.kind(), format!("as {} data: {why}", self.kind))
        })
    }
}

/// The frames of zstd data, one after another.
struct Frames<R: BufRead> {
    state: State<R>,
}

enum State<R: BufRead> {
    Between(R),
    Within(Box<StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>),
    Failed,
}

impl<R: BufRead> Frames<R> {
    fn new(input: R) -> Self {
        Self { state: State::Between(input) }
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            match std::mem::replace(&mut self.state, State::Failed) {
                State::Between(mut input) => {
                    if input.fill_buf()?.is_empty() {
                        self.state = State::Between(input);
                        return Ok(0);
                    }
                    self.state = State::Within(Box::new(StreamingDecoder::new(input).map_err(io::Error::other)?));
                }
                State::Within(mut decoder) => {
                    let read = decoder.read(buffer)?;
                    if read > 0 || buffer.is_empty() {
                        self.state = State::Within(decoder);
                        return Ok(read);
                    }
                    self.state = State::Between(decoder.into_inner());
                }
                State::Failed => return Ok(0),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn unpacked(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        Source::open(bytes)?.input.read_to_end(&mut out)?;
        Ok(out)
    }

    fn gzip(text: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(text).expect("a vector takes all bytes");
        encoder.finish().expect("a vector takes all bytes")
    }

    fn zstd(text: &[u8]) -> Vec<u8> {
        ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest)
    }

    #[test]
    fn packed_bytes_are_told_by_their_beginning() {
        let text = "a line\n".repeat(40_000).into_bytes();
        assert_eq!(unpacked(&text).expect("plain"), text);
        for pack in [gzip, zstd] {
            assert_eq!(unpacked(&pack(&text)).expect("packed"), text);
            let twice = [pack(&text), pack(&text)].concat();
            assert_eq!(unpacked(&twice).expect("two members").len(), 2 * text.len());
        }
        assert_eq!(unpacked(b"").expect("nothing"), b"");
        assert_eq!(unpacked(b"\x1f").expect("one byte"), b"\x1f");
    }

    #[test]
    fn a_cut_is_an_error() {
        let text: Vec<u8> = (0..200_000_u32).flat_map(|at| (at.wrapping_mul(0x9e37_79b9) >> 7).to_le_bytes()).collect();
        for (pack, kind) in [(gzip as fn(&[u8]) -> Vec<u8>, "gzip"), (zstd, "zstd")] {
            let packed = pack(&text);
            for cut in [5, packed.len() / 2, packed.len() - 1] {
                let error = unpacked(&packed[..cut]).expect_err("cut short").to_string();
                assert!(error.starts_with(&format!("as {kind} data: ")), "{cut}: {error}");
            }
        }
    }

    #[test]
    fn what_is_unpacked_is_bounded() {
        let mut source = Source {
            input: Cursor::new(Vec::new())
                .chain(Box::new(BufReader::new(io::repeat(b' '))) as Box<dyn BufRead>)
                .take(1000),
            head: Vec::new(),
        };
        io::copy(&mut source.input, &mut io::sink()).expect("reads");
        assert!(source.is_too_large());
    }
}
