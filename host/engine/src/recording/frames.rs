//! The messages of an Arrow IPC file, found one after the other, so that a file with a missing or torn footer is read
//! up to its last complete batch. Every length is hostile; no length causes an allocation.

use std::ops::Range;

use arrow_ipc::{Message, MessageHeader, MetadataVersion, root_as_message_with_opts};
use flatbuffers::VerifierOptions;

use super::ipc::{CONTINUATION, END_OF_STREAM, MAGIC, PREFIX_BYTES};

/// A message: its flatbuffer, and its body.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) head: Range<usize>,
    pub(super) body: Range<usize>,
}

/// The contents of a file.
#[derive(Debug)]
pub(super) struct Frames {
    pub(super) schema: Frame,
    pub(super) batches: Vec<Frame>,
    /// Why the file ends too early, if it does.
    pub(super) cut: Option<String>,
}

/// Find the messages.
///
/// # Errors
/// It is not an Arrow IPC file, or its schema is incomplete; one line.
pub(super) fn frames(bytes: &[u8]) -> Result<Frames, String> {
    if !bytes.starts_with(MAGIC) {
        return Err("expected an Arrow IPC file, which begins with ARROW1".into());
    }
    let mut at = PREFIX_BYTES;
    let schema = match next(bytes, &mut at)? {
        Some((MessageHeader::Schema, frame)) => frame,
        Some((other, _)) => return Err(format!("its first message is {other:?}, expected a schema")),
        None => return Err("it ends before its schema".into()),
    };
    let mut batches = Vec::new();
    let cut = loop {
        let start = at;
        match next(bytes, &mut at) {
            Ok(Some((MessageHeader::RecordBatch, frame))) => {
                // A batch overwrites the footer of the previous one. If the write was interrupted, the bytes after `at`
                // are neither a message nor the end of the stream, and the end of the batch is not its own.
                let after = bytes.get(at..).unwrap_or_default();
                let known = CONTINUATION.len().min(after.len());
                if after[..known] != CONTINUATION[..known] {
                    break Some(format!("the batch at byte {start} was not written to its end"));
                }
                batches.push(frame);
            }
            Ok(Some((other, _))) => break Some(format!("the message at byte {start} is {other:?}, expected a batch")),
            Ok(None) => break None,
            Err(why) => break Some(why),
        }
    };
    Ok(Frames { schema, batches, cut })
}

/// The message at `at`, which moves behind it; `None` at the end of the stream.
fn next(bytes: &[u8], at: &mut usize) -> Result<Option<(MessageHeader, Frame)>, String> {
    let start = *at;
    let cut = || format!("it is cut off in the message at byte {start}");
    let rest = bytes.get(start..).unwrap_or_default();
    if rest.starts_with(&END_OF_STREAM) {
        return Ok(None);
    }
    let Some((prefix, rest)) = rest.split_at_checked(8) else { return Err(cut()) };
    let Some(length) = prefix.strip_prefix(&CONTINUATION) else {
        return Err(format!("there is no message at byte {start}"));
    };
    let length = length.try_into().map_or(0, u32::from_le_bytes) as usize;
    let Some(head) = rest.get(..length) else { return Err(cut()) };
    let message = message(head).map_err(|why| format!("the message at byte {start} {why}"))?;
    let body =
        usize::try_from(message.bodyLength()).ok().filter(|body| *body <= rest.len() - length).ok_or_else(cut)?;
    let head = start + 8..start + 8 + length;
    let body = head.end..head.end + body;
    *at = body.end;
    Ok(Some((message.header_type(), Frame { head, body })))
}

/// Verify a message's flatbuffer. The verification visits at most 8 times its bytes: tables and strings that are named
/// many times would expand a small file, and a recorder writes each once.
///
/// # Errors
/// The problem, in one line; the text follows a name of the message.
pub(super) fn message(head: &[u8]) -> Result<Message<'_>, String> {
    let options = VerifierOptions { max_apparent_size: head.len().saturating_mul(8), ..VerifierOptions::default() };
    let message = root_as_message_with_opts(&options, head).map_err(|error| {
        // The lines after the first describe the path through the tables.
        format!("does not verify: {}", error.to_string().lines().next().unwrap_or_default())
    })?;
    if message.version() != MetadataVersion::V5 {
        return Err(format!("has metadata {:?}, expected V5", message.version()));
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use arrow_ipc::{Field, KeyValue, KeyValueArgs, MessageBuilder, SchemaBuilder};
    use flatbuffers::FlatBufferBuilder;

    use super::*;

    /// A schema whose metadata is one pair, so many times.
    fn schema(times: usize) -> Vec<u8> {
        let mut builder = FlatBufferBuilder::new();
        let value = builder.create_string(&"x".repeat(4096));
        let pair = KeyValue::create(&mut builder, &KeyValueArgs { key: Some(value), value: Some(value) });
        let pairs = builder.create_vector(&vec![pair; times]);
        let fields = builder.create_vector::<flatbuffers::ForwardsUOffset<Field<'_>>>(&[]);
        let mut schema = SchemaBuilder::new(&mut builder);
        schema.add_fields(fields);
        schema.add_custom_metadata(pairs);
        let schema = schema.finish();
        let mut message = MessageBuilder::new(&mut builder);
        message.add_version(MetadataVersion::V5);
        message.add_header_type(MessageHeader::Schema);
        message.add_header(schema.as_union_value());
        let message = message.finish();
        builder.finish(message, None);
        builder.finished_data().to_vec()
    }

    #[test]
    fn what_is_named_many_times_over_is_refused() {
        assert!(message(&schema(1)).is_ok());
        let shared = schema(1000);
        assert!(shared.len() < 10_000, "{} bytes that would be read as 8 MB", shared.len());
        assert_eq!(message(&shared).err().as_deref(), Some("does not verify: Apparent size too large."));
    }
}
