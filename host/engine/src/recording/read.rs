//! Reading recordings from any source: the contents of a file are checked before use.

use std::path::Path;

use arrow_schema::DataType;
use meridian_core::file::read_regular;
use meridian_core::text::printable;
use meridian_core::{CONTRACT, SlotKind, SlotName};
use thiserror::Error;

use super::append::data_type;
use super::decode::{Decoded, described};
use super::frames::{Frames, frames};
use super::kinds::{Recordable, visit};
use super::row::{Header, Recorded};

/// Largest file that is read, bytes: eight times what a recorder writes.
pub const MAX_RECORDING_BYTES: u64 = 256 << 20;

/// A file that is not a recording, or not a usable one.
///
/// ```
/// use meridian_engine::recording::Recording;
///
/// let error = Recording::read("x.arrow", b"PAR1".to_vec()).unwrap_err();
/// assert_eq!(error.to_string(), "x.arrow: expected an Arrow IPC file, which begins with ARROW1");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}: {why}", why = printable(why))]
pub struct RecordingError {
    /// The file, as the caller named it.
    pub file: String,
    /// The problem and the expectation, in one line.
    pub why: String,
}

/// A file of recorded decisions of one slot and one policy.
#[derive(Debug)]
pub struct Recording {
    file: String,
    bytes: Vec<u8>,
    frames: Frames,
    header: Header,
    slot: SlotName,
    fields: Vec<(String, Option<DataType>)>,
}

impl Recording {
    /// Read the file at `path`.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn open(path: &Path) -> Result<Self, RecordingError> {
        let file = path.display().to_string();
        let failed = |why: String| RecordingError { file: file.clone(), why };
        let read = read_regular(path, MAX_RECORDING_BYTES);
        let Some(bytes) = read.map_err(|error| failed(format!("cannot be read: {error}")))? else {
            return Err(failed(format!("must be at most {MAX_RECORDING_BYTES} bytes")));
        };
        Self::read(&file, bytes)
    }

    /// Read a file's bytes; `file` is its name in errors. [`rows`](Self::rows) checks batches as it reads them.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn read(file: &str, bytes: Vec<u8>) -> Result<Self, RecordingError> {
        let failed = |why: String| RecordingError { file: file.to_owned(), why };
        let frames = frames(&bytes).map_err(failed)?;
        let described = described(&bytes, &frames.schema).map_err(failed)?;
        let header = described.header.ok_or_else(|| {
            failed("expected the metadata of a recording in its schema: it was written by something else".into())
        })?;
        let version: Format = serde_json::from_str(&header)
            .map_err(|error| failed(format!("its metadata is not that of a recording: {error}")))?;
        if version.format != Header::FORMAT {
            let why = format!("it has format {}, expected {}", version.format, Header::FORMAT);
            return Err(failed(why));
        }
        let header: Header = serde_json::from_str(&header)
            .map_err(|error| failed(format!("its metadata is not that of a recording: {error}")))?;
        let slot = SlotName::ALL
            .into_iter()
            .find(|slot| slot.label() == header.slot)
            .ok_or_else(|| failed(format!("it is of slot {:?}, expected dispatch, eviction or budget", header.slot)))?;
        Ok(Self { file: file.to_owned(), bytes, frames, header, slot, fields: described.fields })
    }

    /// The file, as the caller named it.
    #[must_use]
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The slot whose decisions it holds.
    #[must_use]
    pub fn slot(&self) -> SlotName {
        self.slot
    }

    /// Its header.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The missing part of a file that ends too early. The rows before it are read all the same.
    #[must_use]
    pub fn cut(&self) -> Option<&str> {
        self.frames.cut.as_deref()
    }

    /// Size of the file, bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Its rows, in the order of the decisions. After an error, there are no more.
    ///
    /// # Errors
    /// It belongs to another slot, or lacks columns of a recording of `K`.
    pub fn rows<K: Recordable>(&self) -> Result<Rows<'_, K>, RecordingError> {
        let failed = |why: String| RecordingError { file: self.file.clone(), why };
        if self.slot != K::NAME {
            let (found, expected) = (self.slot.label(), K::NAME.label());
            return Err(failed(format!("it is of slot {found}, expected {expected}")));
        }
        let contract = &self.header.contract;
        if contract != CONTRACT {
            return Err(failed(format!("it has contract {contract:?}, expected {CONTRACT:?}")));
        }
        let mut fields = self.fields.iter().peekable();
        let mut layout = Layout { types: Vec::new(), place: Vec::new(), columns: Vec::new() };
        visit(&mut Recorded::<K>::default(), &mut |name, field| {
            let expected = data_type(&field);
            let input = K::COLUMN_NAMES.iter().position(|input| *input == name);
            match fields.next_if(|(found, _)| found == name) {
                Some((_, Some(found))) if *found == expected => {
                    layout.place.push(Some(layout.types.len()));
                    layout.types.push(expected);
                    layout.columns.extend(input);
                }
                Some((_, found)) => {
                    let found = found.as_ref().map_or("another type".into(), ToString::to_string);
                    return Err(format!("column {name} is {found}, expected {expected}"));
                }
                // The recording is older than the column; a policy that reads it is refused.
                None if input.is_some() => layout.place.push(None),
                None => return Err(format!("column {name} is missing or out of its order")),
            }
            Ok(())
        })
        .map_err(failed)?;
        if let Some((name, _)) = fields.next() {
            return Err(failed(format!("column {name:?} is not one of a recording of slot {}", K::NAME.label())));
        }
        Ok(Rows {
            recording: self,
            layout,
            batch: 0,
            decoded: None,
            row: 0,
            last: None,
            is_over: false,
            kind: Default::default(),
        })
    }

    /// Approximate number of rows that [`rows`](Self::rows) gives, from the file's own claims.
    #[must_use]
    pub fn row_count(&self) -> u64 {
        let rows = |frame: &super::frames::Frame| {
            let message = super::frames::message(&self.bytes[frame.head.clone()]).ok();
            let batch = message.as_ref().and_then(arrow_ipc::Message::header_as_record_batch);
            batch.and_then(|batch| u64::try_from(batch.length()).ok()).unwrap_or(0)
        };
        // A row takes at least 8 bytes, whatever the file claims.
        self.frames.batches.iter().map(rows).fold(0, u64::saturating_add).min(self.bytes.len() as u64 / 8)
    }
}

#[derive(serde::Deserialize)]
struct Format {
    format: u32,
}

/// The places of a row's fields in a file.
struct Layout {
    types: Vec<DataType>,
    /// The column in the file of each field.
    place: Vec<Option<usize>>,
    /// The input columns that the file has.
    columns: Vec<usize>,
}

/// Iterates over the rows of a [`Recording`].
pub struct Rows<'a, K: Recordable> {
    recording: &'a Recording,
    layout: Layout,
    /// The next batch.
    batch: usize,
    decoded: Option<Decoded<'a>>,
    /// The next row of the decoded batch.
    row: usize,
    last: Option<u64>,
    is_over: bool,
    kind: std::marker::PhantomData<fn() -> K>,
}

impl<K: Recordable> Rows<'_, K> {
    /// The columns of each row's matrix, in its order.
    pub fn columns(&self) -> impl Iterator<Item = K::Column> {
        self.layout.columns.iter().map(|index| K::COLUMNS[*index])
    }

    /// Read the next row into `row` and reuse its memory; false at the end.
    ///
    /// # Errors
    /// The file, the row or batch, and the problem.
    pub fn next_into(&mut self, row: &mut Recorded<K>) -> Result<bool, RecordingError> {
        if self.is_over {
            return Ok(false);
        }
        let read = self.advance(row);
        self.is_over = !matches!(read, Ok(true));
        read.map_err(|why| RecordingError { file: self.recording.file.clone(), why })
    }

    fn advance(&mut self, row: &mut Recorded<K>) -> Result<bool, String> {
        let Recording { bytes, frames, .. } = self.recording;
        while self.decoded.as_ref().is_none_or(|decoded| self.row >= decoded.rows) {
            let Some(frame) = frames.batches.get(self.batch) else { return Ok(false) };
            let decoded = Decoded::new(bytes, frame, &self.layout.types);
            self.decoded = Some(decoded.map_err(|why| format!("batch {} {why}", self.batch))?);
            self.batch += 1;
            self.row = 0;
        }
        let Some(decoded) = &self.decoded else { return Ok(false) };
        let (at, mut places) = (self.row, self.layout.place.iter());
        self.row += 1;
        row.columns.clear();
        // What the file lacks is not that of a file before it.
        K::clear(&mut row.decision);
        let place = || format!("row {at} of batch {}", self.batch - 1);
        visit(row, &mut |name, field| match places.next() {
            Some(Some(column)) => decoded.read(*column, at, field).map_err(|why| format!("{name}: {why}")),
            _ => Ok(()),
        })
        .map_err(|why| format!("{}: {why}", place()))?;
        if self.last.is_some_and(|last| row.seq <= last) {
            return Err(format!("{}: seq: {}: expected more than the one before", place(), row.seq));
        }
        self.last = Some(row.seq);
        K::check(&row.facts, &row.decision, row.candidates)
            .map_err(|fault| format!("{}: {}", place(), fault.detail))?;
        Ok(true)
    }
}

impl<K: Recordable> Iterator for Rows<'_, K> {
    type Item = Result<Recorded<K>, RecordingError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut row = Recorded::default();
        match self.next_into(&mut row) {
            Ok(true) => Some(Ok(row)),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

impl<K: SlotKind + Recordable> std::fmt::Debug for Rows<'_, K> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Rows({}, batch {}, row {})", self.recording.file, self.batch, self.row)
    }
}
