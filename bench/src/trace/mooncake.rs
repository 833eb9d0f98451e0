//! Mooncake's traces: milliseconds, lengths, and the hash of each prefix block of 512 tokens.

use std::io::BufRead;
use std::sync::Arc;

use serde_json::Value;

use super::lengths::Builder;
use super::rows::{MAX_SECONDS, MAX_TOKENS, Row, json_rows};
use super::{Prefix, ReadOptions, TraceError, TraceRequest};

/// Tokens of a block, as the traces' own description says.
const BLOCK_TOKENS: u32 = 512;

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    json_rows(name, input, options.limit, |row: &Row<'_>| {
        let prompt_tokens = row.tokens("input_length", 0)?;
        builder.push_generated(TraceRequest {
            arrival_s: row.number("timestamp", MAX_SECONDS * 1e3)? / 1e3,
            prompt_tokens,
            output_tokens: row.tokens("output_length", 0)?,
            prefix: blocks(row, prompt_tokens)?,
            ..TraceRequest::default()
        });
        Ok(())
    })
}

fn blocks(row: &Row<'_>, prompt_tokens: u32) -> Result<Prefix, TraceError> {
    const { assert!(MAX_TOKENS < u32::MAX - BLOCK_TOKENS) };
    let ids = match row.json("hash_ids") {
        None | Some(Value::Null) => return Ok(Prefix::None),
        Some(Value::Array(ids)) => ids.iter().map(Value::as_u64).collect::<Option<Arc<[u64]>>>(),
        Some(_) => None,
    };
    let ids = ids.ok_or_else(|| row.bad("hash_ids", "an array of whole numbers"))?;
    if ids.is_empty() {
        return Ok(Prefix::None);
    }
    let most = prompt_tokens.div_ceil(BLOCK_TOKENS) as usize;
    if ids.len() > most {
        let expected = format!("at most {most} blocks of {BLOCK_TOKENS} tokens, not {}", ids.len());
        return Err(row.bad("hash_ids", expected));
    }
    Ok(Prefix::Blocks { tokens: BLOCK_TOKENS, ids })
}
