//! A file in Arrow's IPC file format that is complete after every batch: the next batch overwrites the footer, and a
//! new footer follows it, in one write. Batches never move, so a reader that has mapped the file keeps its data.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use arrow_array::RecordBatch;
use arrow_ipc::convert::IpcSchemaEncoder;
use arrow_ipc::writer::{
    DictionaryTracker, EncodedData, IpcDataGenerator, IpcWriteContext, IpcWriteOptions, write_message,
};
use arrow_ipc::{Block, FooterBuilder, MetadataVersion};
use arrow_schema::{ArrowError, SchemaRef};
use flatbuffers::FlatBufferBuilder;

/// Starts and ends a file.
pub(super) const MAGIC: &[u8; 6] = b"ARROW1";
/// The magic and its padding.
pub(super) const PREFIX_BYTES: usize = 8;
/// Begins every message.
pub(super) const CONTINUATION: [u8; 4] = [0xff; 4];
/// Ends the messages: one of no length.
pub(super) const END_OF_STREAM: [u8; 8] = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0];

pub(super) struct IpcFile {
    file: File,
    schema: SchemaRef,
    options: IpcWriteOptions,
    blocks: Vec<Block>,
    /// Where the last batch ends.
    end: u64,
    /// Size including the footer.
    pub(super) bytes: u64,
}

impl IpcFile {
    /// Begin an empty file.
    pub(super) fn begin(file: File, schema: SchemaRef) -> io::Result<Self> {
        // The alignment that the format requires; wider ones pad the many short buffers of a row for nothing.
        let options = IpcWriteOptions::try_new(8, false, MetadataVersion::V5).map_err(io_error)?;
        let mut start = [&MAGIC[..], &[0, 0]].concat();
        let message = IpcDataGenerator {}.schema_to_bytes_with_dictionary_tracker(
            &schema,
            &mut DictionaryTracker::new(true),
            &options,
        );
        write_message(&mut start, message, &options).map_err(io_error)?;
        let mut begun = Self { file, schema, options, blocks: Vec::new(), end: start.len() as u64, bytes: 0 };
        start.extend(begun.footer());
        begun.file.write_all_at(&start, 0)?;
        begun.bytes = start.len() as u64;
        Ok(begun)
    }

    /// Add a batch. After an error, the file is unchanged, as far as the system allows.
    pub(super) fn add(&mut self, batch: &RecordBatch) -> io::Result<()> {
        let mut tracker = DictionaryTracker::new(true);
        let mut context = IpcWriteContext::default();
        let (dictionaries, message): (Vec<EncodedData>, EncodedData) =
            IpcDataGenerator {}.encode(batch, &mut tracker, &self.options, &mut context).map_err(io_error)?;
        debug_assert!(dictionaries.is_empty(), "no column is a dictionary");
        let mut bytes = Vec::with_capacity(message.arrow_data.len() + (64 << 10));
        let (head, body) = write_message(&mut bytes, message, &self.options).map_err(io_error)?;
        self.blocks.push(Block::new(self.end as i64, head as i32, body as i64));
        let end = self.end + (head + body) as u64;
        bytes.extend(self.footer());
        match self.file.write_all_at(&bytes, self.end) {
            Ok(()) => {
                self.bytes = self.end + bytes.len() as u64;
                self.end = end;
                Ok(())
            }
            Err(error) => {
                self.blocks.pop();
                let footer = self.footer();
                // This footer fitted before. A file without it is still readable, see `frames`.
                let _ = self.file.write_all_at(&footer, self.end).and_then(|()| self.file.set_len(self.bytes));
                Err(error)
            }
        }
    }

    /// Sync everything to the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn footer(&self) -> Vec<u8> {
        let mut builder = FlatBufferBuilder::new();
        let dictionaries = builder.create_vector::<Block>(&[]);
        let batches = builder.create_vector(&self.blocks);
        let schema = IpcSchemaEncoder::new().schema_to_fb_offset(&mut builder, &self.schema);
        let mut footer = FooterBuilder::new(&mut builder);
        footer.add_version(MetadataVersion::V5);
        footer.add_schema(schema);
        footer.add_dictionaries(dictionaries);
        footer.add_recordBatches(batches);
        let root = footer.finish();
        builder.finish(root, None);
        let footer = builder.finished_data();
        let length = u32::try_from(footer.len()).unwrap_or(u32::MAX).to_le_bytes();
        [&END_OF_STREAM, footer, &length, MAGIC].concat()
    }
}

fn io_error(error: ArrowError) -> io::Error {
    io::Error::other(error)
}
