//! Conversion of rows to Arrow arrays.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::builder::{
    BinaryBuilder, BooleanBuilder, Float32Builder, Float64Builder, ListBuilder, StringBuilder, UInt8Builder,
    UInt32Builder, UInt64Builder,
};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{ArrowError, DataType, Field as ArrowField, Schema, SchemaRef};

use super::kinds::{Field, Recordable, visit};
use super::row::{Header, Recorded};

/// The key of a file's [`Header`] in its schema.
pub(super) const HEADER_KEY: &str = "meridian";

/// The type of a field, the same for reading.
pub(super) fn data_type(field: &Field<'_>) -> DataType {
    let list = |item| DataType::List(Arc::new(ArrowField::new_list_field(item, true)));
    match field {
        Field::U64(_) => DataType::UInt64,
        Field::U32(_) | Field::OptionalU32(_) => DataType::UInt32,
        Field::F32(_) => DataType::Float32,
        Field::F64(_) => DataType::Float64,
        Field::Flag(_) => DataType::Boolean,
        Field::Choice(..) | Field::OptionalChoice(..) => DataType::Utf8,
        Field::OptionalBytes(_) => DataType::Binary,
        Field::U8s(_) => list(DataType::UInt8),
        Field::U32s(_) => list(DataType::UInt32),
        Field::F32s(_) | Field::Column { .. } => list(DataType::Float32),
        Field::F64s(_) => list(DataType::Float64),
    }
}

fn is_optional(field: &Field<'_>) -> bool {
    matches!(field, Field::OptionalU32(_) | Field::OptionalChoice(..) | Field::OptionalBytes(_))
}

/// The schema of a slot's files.
pub(super) fn schema<K: Recordable>(header: &Header) -> Schema {
    let mut fields = Vec::new();
    let visited = visit(&mut Recorded::<K>::default(), &mut |name, field| {
        fields.push(ArrowField::new(name, data_type(&field), is_optional(&field)));
        Ok(())
    });
    debug_assert!(visited.is_ok(), "describing a row fails nowhere");
    let header = serde_json::to_string(header).unwrap_or_default();
    Schema::new(fields).with_metadata(HashMap::from([(HEADER_KEY.to_owned(), header)]))
}

/// The rows of one record batch.
pub(super) struct Batch {
    schema: SchemaRef,
    columns: Vec<Column>,
    /// Number of rows so far.
    pub(super) rows: usize,
    /// Their approximate size in bytes.
    pub(super) bytes: usize,
}

enum Column {
    U64(UInt64Builder),
    U32(UInt32Builder),
    F32(Float32Builder),
    F64(Float64Builder),
    Flag(BooleanBuilder),
    Text(StringBuilder),
    Bytes(BinaryBuilder),
    U8s(ListBuilder<UInt8Builder>),
    U32s(ListBuilder<UInt32Builder>),
    F32s(ListBuilder<Float32Builder>),
    F64s(ListBuilder<Float64Builder>),
}

impl Batch {
    pub(super) fn new<K: Recordable>(schema: SchemaRef) -> Self {
        let mut columns = Vec::with_capacity(schema.fields().len());
        let visited = visit(&mut Recorded::<K>::default(), &mut |_, field| {
            columns.push(match field {
                Field::U64(_) => Column::U64(UInt64Builder::new()),
                Field::U32(_) | Field::OptionalU32(_) => Column::U32(UInt32Builder::new()),
                Field::F32(_) => Column::F32(Float32Builder::new()),
                Field::F64(_) => Column::F64(Float64Builder::new()),
                Field::Flag(_) => Column::Flag(BooleanBuilder::new()),
                Field::Choice(..) | Field::OptionalChoice(..) => Column::Text(StringBuilder::new()),
                Field::OptionalBytes(_) => Column::Bytes(BinaryBuilder::new()),
                Field::U8s(_) => Column::U8s(ListBuilder::new(UInt8Builder::new())),
                Field::U32s(_) => Column::U32s(ListBuilder::new(UInt32Builder::new())),
                Field::F32s(_) | Field::Column { .. } => Column::F32s(ListBuilder::new(Float32Builder::new())),
                Field::F64s(_) => Column::F64s(ListBuilder::new(Float64Builder::new())),
            });
            Ok(())
        });
        debug_assert!(visited.is_ok(), "describing a row fails nowhere");
        Self { schema, columns, rows: 0, bytes: 0 }
    }

    /// Append a row whose matrix has every column.
    pub(super) fn append<K: Recordable>(&mut self, row: &mut Recorded<K>) {
        self.bytes += 256 + 4 * row.columns.len() + 12 * row.candidates + row.snapshot.as_ref().map_or(0, Vec::len);
        self.rows += 1;
        let mut columns = self.columns.iter_mut();
        let appended = visit(row, &mut |name, field| {
            match (columns.next(), field) {
                (Some(Column::U64(to)), Field::U64(value)) => to.append_value(*value),
                (Some(Column::U32(to)), Field::U32(value)) => to.append_value(*value),
                (Some(Column::U32(to)), Field::OptionalU32(value)) => to.append_option(*value),
                (Some(Column::F32(to)), Field::F32(value)) => to.append_value(*value),
                (Some(Column::F64(to)), Field::F64(value)) => to.append_value(*value),
                (Some(Column::Flag(to)), Field::Flag(value)) => to.append_value(*value),
                (Some(Column::Text(to)), Field::Choice(index, names)) => to.append_value(names[usize::from(*index)]),
                (Some(Column::Text(to)), Field::OptionalChoice(index, names)) => {
                    to.append_option(index.map(|index| names[usize::from(index)]));
                }
                (Some(Column::Bytes(to)), Field::OptionalBytes(value)) => to.append_option(value.as_deref()),
                (Some(Column::U8s(to)), Field::U8s(values)) => {
                    to.values().append_slice(values);
                    to.append(true);
                }
                (Some(Column::U32s(to)), Field::U32s(values)) => {
                    to.values().append_slice(values);
                    to.append(true);
                }
                (Some(Column::F32s(to)), Field::F32s(values)) => {
                    to.values().append_slice(values);
                    to.append(true);
                }
                (Some(Column::F64s(to)), Field::F64s(values)) => {
                    to.values().append_slice(values);
                    to.append(true);
                }
                (Some(Column::F32s(to)), Field::Column { columns, index, candidates }) => {
                    to.values().append_slice(&columns[index * candidates..(index + 1) * candidates]);
                    to.append(true);
                }
                _ => return Err(format!("{name}: the batch was made for other fields")),
            }
            Ok(())
        });
        debug_assert!(appended.is_ok(), "a batch is appended to by rows of the kind it was made for");
    }

    /// The rows as Arrow arrays; this empties the batch.
    pub(super) fn take(&mut self) -> Result<RecordBatch, ArrowError> {
        self.rows = 0;
        self.bytes = 0;
        let arrays = self.columns.iter_mut().map(Column::finish).collect();
        RecordBatch::try_new(Arc::clone(&self.schema), arrays)
    }
}

impl Column {
    fn finish(&mut self) -> ArrayRef {
        match self {
            Self::U64(builder) => Arc::new(builder.finish()),
            Self::U32(builder) => Arc::new(builder.finish()),
            Self::F32(builder) => Arc::new(builder.finish()),
            Self::F64(builder) => Arc::new(builder.finish()),
            Self::Flag(builder) => Arc::new(builder.finish()),
            Self::Text(builder) => Arc::new(builder.finish()),
            Self::Bytes(builder) => Arc::new(builder.finish()),
            Self::U8s(builder) => Arc::new(builder.finish()),
            Self::U32s(builder) => Arc::new(builder.finish()),
            Self::F32s(builder) => Arc::new(builder.finish()),
            Self::F64s(builder) => Arc::new(builder.finish()),
        }
    }
}
