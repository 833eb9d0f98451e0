//! The body of a record batch, read without trust in its contents.

use std::sync::Arc;

use arrow_ipc::{Buffer, Endianness, FieldNode, MessageHeader, Precision, RecordBatch, Type};
use arrow_schema::{DataType, Field as ArrowField};

use super::append::HEADER_KEY;
use super::frames::{Frame, message};
use super::kinds::Field;
use super::tap::MAX_CANDIDATES;

/// Names and types of the fields that a schema message describes, with the header in its metadata.
pub(super) struct Described {
    pub(super) fields: Vec<(String, Option<DataType>)>,
    pub(super) header: Option<String>,
}

/// Read a schema message.
///
/// # Errors
/// The problem, in one line.
pub(super) fn described(bytes: &[u8], frame: &Frame) -> Result<Described, String> {
    let message = message(&bytes[frame.head.clone()]).map_err(|why| format!("its schema {why}"))?;
    let schema = message.header_as_schema().ok_or("it has no schema")?;
    if schema.endianness() != Endianness::Little {
        return Err("it is big-endian, expected little-endian".into());
    }
    let fields = schema.fields().into_iter().flatten();
    let mut pairs = schema.custom_metadata().into_iter().flatten();
    let header = pairs.find(|pair| pair.key() == Some(HEADER_KEY));
    Ok(Described {
        fields: fields.map(|field| (field.name().unwrap_or_default().to_owned(), data_type(field, 0))).collect(),
        header: header.map(|pair| pair.value().unwrap_or_default().to_owned()),
    })
}

/// The type of a field, if recordings have it.
fn data_type(field: arrow_ipc::Field<'_>, depth: u32) -> Option<DataType> {
    if field.dictionary().is_some() {
        return None;
    }
    match field.type_type() {
        Type::Int => {
            let int = field.type_as_int()?;
            match (int.bitWidth(), int.is_signed()) {
                (8, false) => Some(DataType::UInt8),
                (32, false) => Some(DataType::UInt32),
                (64, false) => Some(DataType::UInt64),
                _ => None,
            }
        }
        Type::FloatingPoint => match field.type_as_floating_point()?.precision() {
            Precision::SINGLE => Some(DataType::Float32),
            Precision::DOUBLE => Some(DataType::Float64),
            _ => None,
        },
        Type::Bool => Some(DataType::Boolean),
        Type::Utf8 => Some(DataType::Utf8),
        Type::Binary => Some(DataType::Binary),
        Type::List if depth == 0 => {
            let children = field.children()?;
            let item = (children.len() == 1).then(|| data_type(children.get(0), 1))??;
            Some(DataType::List(Arc::new(ArrowField::new_list_field(item, true))))
        }
        _ => None,
    }
}

/// A batch whose buffers are known to lie in its body.
pub(super) struct Decoded<'a> {
    pub(super) rows: usize,
    columns: Vec<Column<'a>>,
}

/// A column's buffers, cut to its rows.
struct Column<'a> {
    /// Bits that show which rows have a value; `None` when all have one.
    valid: Option<&'a [u8]>,
    /// Whether some rows have no value.
    nulls: bool,
    /// For values with their own lengths: the start of each.
    offsets: &'a [u8],
    values: &'a [u8],
}

/// Takes a batch's nodes and buffers in order.
struct Parts<'a> {
    batch: RecordBatch<'a>,
    body: &'a [u8],
    node: usize,
    buffer: usize,
}

impl<'a> Parts<'a> {
    /// Length and null count of the next array.
    fn node(&mut self) -> Result<(usize, bool), String> {
        let nodes = self.batch.nodes().ok_or("has no arrays")?;
        if self.node >= nodes.len() {
            return Err("has too few arrays".into());
        }
        let node: &FieldNode = nodes.get(self.node);
        self.node += 1;
        let length = usize::try_from(node.length()).map_err(|_| "has an array of negative length")?;
        Ok((length, node.null_count() != 0))
    }

    fn buffer(&mut self) -> Result<&'a [u8], String> {
        let buffers = self.batch.buffers().ok_or("has no buffers")?;
        if self.buffer >= buffers.len() {
            return Err("has too few buffers".into());
        }
        let buffer: &Buffer = buffers.get(self.buffer);
        self.buffer += 1;
        let range = usize::try_from(buffer.offset()).ok().zip(usize::try_from(buffer.length()).ok());
        let found = range.and_then(|(start, length)| self.body.get(start..start.checked_add(length)?));
        found.ok_or_else(|| "has a buffer outside of its body".into())
    }

    /// The next buffer, which must hold `count` values of `width` bytes.
    fn values(&mut self, count: usize, width: usize) -> Result<&'a [u8], String> {
        let buffer = self.buffer()?;
        let needed = count.checked_mul(width).filter(|needed| *needed <= buffer.len());
        needed.map(|needed| &buffer[..needed]).ok_or_else(|| "has a buffer that is too short".into())
    }

    /// The validity bits of an array.
    fn valid(&mut self, count: usize) -> Result<Option<&'a [u8]>, String> {
        let bits = self.buffer()?;
        match bits.len() {
            0 => Ok(None),
            length if length >= count.div_ceil(8) => Ok(Some(bits)),
            _ => Err("has a validity buffer that is too short".into()),
        }
    }

    fn column(&mut self, data_type: &DataType, rows: usize) -> Result<Column<'a>, String> {
        let (length, nulls) = self.node()?;
        if length != rows {
            return Err(format!("has an array of {length} values in {rows} rows"));
        }
        let valid = self.valid(rows)?;
        let offset_count = if rows == 0 { 0 } else { rows + 1 };
        let mut column = Column { valid, nulls, offsets: &[], values: &[] };
        match data_type {
            DataType::Boolean => column.values = self.values(rows.div_ceil(8), 1)?,
            DataType::Utf8 | DataType::Binary => {
                column.offsets = self.values(offset_count, 4)?;
                column.values = self.buffer()?;
            }
            DataType::List(item) => {
                column.offsets = self.values(offset_count, 4)?;
                let (items, nulls) = self.node()?;
                if nulls {
                    return Err("has a list with nulls".into());
                }
                self.valid(items)?;
                column.values = self.values(items, width(item.data_type()))?;
            }
            other => column.values = self.values(rows, width(other))?,
        }
        Ok(column)
    }
}

fn width(data_type: &DataType) -> usize {
    data_type.primitive_width().unwrap_or(1)
}

impl<'a> Decoded<'a> {
    /// Split a batch into columns of the given types.
    pub(super) fn new(bytes: &'a [u8], frame: &Frame, types: &[DataType]) -> Result<Self, String> {
        let message = message(&bytes[frame.head.clone()])?;
        if message.header_type() != MessageHeader::RecordBatch {
            return Err("is no batch".into());
        }
        let batch = message.header_as_record_batch().ok_or("is no batch")?;
        if batch.compression().is_some() {
            return Err("is compressed, expected it as it was recorded".into());
        }
        let rows = usize::try_from(batch.length()).map_err(|_| "has a negative number of rows")?;
        let mut parts = Parts { batch, body: &bytes[frame.body.clone()], node: 0, buffer: 0 };
        let columns = types.iter().map(|data_type| parts.column(data_type, rows)).collect::<Result<_, _>>()?;
        Ok(Self { rows, columns })
    }

    /// Set `field` to the value of `row` in `column`.
    pub(super) fn read(&self, column: usize, row: usize, field: Field<'_>) -> Result<(), String> {
        let Some(column) = self.columns.get(column).filter(|_| row < self.rows) else {
            return Err("there is no such value".into());
        };
        let is_null = column.nulls && column.valid.is_some_and(|valid| !bit(valid, row));
        let required = if is_null { Err("null, expected a value".to_owned()) } else { Ok(()) };
        match field {
            Field::U64(value) => *value = required.map(|()| u64::from_le_bytes(fixed(column.values, row)))?,
            Field::U32(value) => *value = required.map(|()| u32::from_le_bytes(fixed(column.values, row)))?,
            Field::F32(value) => *value = required.map(|()| f32::from_le_bytes(fixed(column.values, row)))?,
            Field::F64(value) => *value = required.map(|()| f64::from_le_bytes(fixed(column.values, row)))?,
            Field::Flag(value) => *value = required.map(|()| bit(column.values, row))?,
            Field::OptionalU32(value) => {
                *value = (!is_null).then(|| u32::from_le_bytes(fixed(column.values, row)));
            }
            Field::Choice(index, names) => {
                required?;
                *index = choice(column.bytes(row, 1)?, names)?;
            }
            Field::OptionalChoice(index, names) => {
                *index = if is_null { None } else { Some(choice(column.bytes(row, 1)?, names)?) };
            }
            Field::OptionalBytes(value) => {
                *value = if is_null { None } else { Some(column.bytes(row, 1)?.to_vec()) };
            }
            Field::U8s(values) => {
                required?;
                values.clear();
                values.extend_from_slice(column.list(row, 1)?);
            }
            Field::U32s(values) => {
                required?;
                values.clear();
                values.extend(chunks(column.list(row, 4)?).map(u32::from_le_bytes));
            }
            Field::F32s(values) => {
                required?;
                values.clear();
                values.extend(chunks(column.list(row, 4)?).map(f32::from_le_bytes));
            }
            Field::F64s(values) => {
                required?;
                values.clear();
                values.extend(chunks(column.list(row, 8)?).map(f64::from_le_bytes));
            }
            Field::Column { columns, index: _, candidates } => {
                required?;
                let values = column.list(row, 4)?;
                if values.len() / 4 != candidates {
                    return Err(format!("{} values, expected {candidates}, one a candidate", values.len() / 4));
                }
                columns.extend(chunks(values).map(f32::from_le_bytes));
            }
        }
        Ok(())
    }
}

impl<'a> Column<'a> {
    /// The bytes of a row whose values have their own lengths.
    fn bytes(&self, row: usize, width: usize) -> Result<&'a [u8], String> {
        let [start, end] = [row, row + 1].map(|row| i32::from_le_bytes(fixed(self.offsets, row)));
        let range = usize::try_from(start).ok().zip(usize::try_from(end).ok());
        let found = range.and_then(|(start, end)| self.values.get(start.checked_mul(width)?..end.checked_mul(width)?));
        found.ok_or_else(|| format!("begins at {start} and ends at {end}, which its buffer does not hold"))
    }

    /// The bytes of a row's list, which has at most one value per candidate.
    fn list(&self, row: usize, width: usize) -> Result<&'a [u8], String> {
        let values = self.bytes(row, width)?;
        let count = values.len() / width;
        if count > MAX_CANDIDATES {
            return Err(format!("{count} values, expected at most {MAX_CANDIDATES}"));
        }
        Ok(values)
    }
}

/// The value at `index` of a buffer whose size was checked before.
fn fixed<const WIDTH: usize>(values: &[u8], index: usize) -> [u8; WIDTH] {
    let bytes = values.get(index * WIDTH..).and_then(|rest| rest.first_chunk());
    bytes.copied().unwrap_or([0; WIDTH])
}

fn chunks<const WIDTH: usize>(values: &[u8]) -> impl Iterator<Item = [u8; WIDTH]> {
    values.chunks_exact(WIDTH).map(|chunk| fixed(chunk, 0))
}

fn bit(bits: &[u8], index: usize) -> bool {
    bits.get(index / 8).is_some_and(|byte| byte >> (index % 8) & 1 == 1)
}

fn choice(text: &[u8], names: &[&str]) -> Result<u8, String> {
    let index = names.iter().position(|name| name.as_bytes() == text);
    index.and_then(|index| u8::try_from(index).ok()).ok_or_else(|| {
        let shown: String = String::from_utf8_lossy(text).chars().take(32).collect();
        format!("{shown:?}: expected one of {}", names.join(", "))
    })
}
