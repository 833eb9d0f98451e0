//! Qwen-Bailian: chats with seconds, lengths, and blocks of 16 tokens.

use std::collections::HashMap;
use std::io::BufRead;

use super::lengths::Builder;
use super::rows::{Row, json_rows};
use super::{Prefix, ReadOptions, TraceError, TraceRequest, Unit};

/// Tokens of a block, as the traces' own description says.
const BLOCK_TOKENS: u32 = 16;

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let unit = options.unit.unwrap_or(Unit::S);
    let block_tokens = options.block_tokens.unwrap_or(BLOCK_TOKENS);
    // Of each chat: the first of its conversation, and its place in it.
    let mut chats: HashMap<i64, (u64, u32)> = HashMap::new();
    let mut conversations = 0;
    let read = json_rows(name, input, options.limit, |row: &Row<'_>| {
        const ID: &str = "a whole number, or -1 for none";
        let parent = row.parsed::<i64>("parent_chat_id", ID)?.and_then(|parent| chats.get(&parent));
        let place = match parent {
            Some((first, turn)) => (*first, turn.saturating_add(1)),
            None => {
                conversations += 1;
                (conversations - 1, 0)
            }
        };
        if let Some(chat) = row.parsed::<i64>("chat_id", ID)? {
            chats.insert(chat, place);
        }
        let prompt_tokens = row.tokens("input_length", 0)?;
        let prefix = match row.blocks("hash_ids", block_tokens, prompt_tokens)? {
            Prefix::None => Prefix::Session { id: place.0, turn: place.1 },
            blocks => blocks,
        };
        builder.push_generated(TraceRequest {
            arrival_s: row.seconds("timestamp", unit)?,
            prompt_tokens,
            output_tokens: row.tokens("output_length", 0)?,
            prefix,
            ..TraceRequest::default()
        });
        Ok(())
    });
    if chats.len() as u64 > conversations {
        builder
            .note(format!("{} requests in {conversations} conversations, by chat_id and parent_chat_id", chats.len()));
    }
    read
}
