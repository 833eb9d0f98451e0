//! Mooncake's traces: milliseconds, lengths, and the hash of each prefix block of 512 tokens. AIPerf adds sessions, whose turns
//! follow each other after a delay and hold what was said before, and prompts as texts.

use std::io::BufRead;

use serde_json::Value;

use super::conversations::Conversations;
use super::lengths::Builder;
use super::rows::{MAX_TOKENS, Row, json_rows};
use super::{Prefix, ReadOptions, TokenCount, TraceError, TraceRequest, Unit};

/// Generated tokens of a request that AIPerf lets the model end: those of a request of `vllm bench serve`.
const OUTPUT_TOKENS: u32 = 128;
/// Tokens of a block, as the traces' own description says.
const BLOCK_TOKENS: u32 = 512;

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let unit = options.unit.unwrap_or(Unit::Ms);
    let block_tokens = options.block_tokens.unwrap_or(BLOCK_TOKENS);
    let mut sessions = Conversations::default();
    let (mut untimed, mut delayed, mut grown, mut endless) = (0_usize, 0_usize, 0_usize, 0_usize);
    let read = json_rows(name, input, options.limit, |row: &Row<'_>| {
        let session = row.text("session_id");
        let before = session.as_deref().and_then(|session| sessions.last(session));
        let is_timed = row.text("timestamp").is_some();
        let arrival_s = match before {
            _ if is_timed => row.seconds("timestamp", unit)?,
            Some(before) => {
                delayed += 1;
                let delay_s = if row.text("delay").is_some() { row.seconds("delay", unit)? } else { 0.0 };
                before.arrival_s + delay_s
            }
            None => {
                untimed += 1;
                (untimed - 1) as f64
            }
        };
        let (given, holds_history) = prompt(row, options)?;
        let output_tokens = match row.text("output_length") {
            Some(_) => row.tokens("output_length", 0)?,
            None => {
                endless += 1;
                OUTPUT_TOKENS
            }
        };
        let mut prompt_tokens = given;
        let prefix = match (row.blocks("hash_ids", block_tokens, given)?, session) {
            // With its own time and its blocks, a row stands for itself.
            (blocks @ Prefix::Blocks { .. }, None) => blocks,
            (blocks @ Prefix::Blocks { .. }, Some(_)) if is_timed => blocks,
            (_, None) => Prefix::None,
            (_, Some(session)) => {
                if let Some(before) = before.filter(|_| !holds_history) {
                    grown += 1;
                    let whole = before.history_tokens + u64::from(given);
                    prompt_tokens =
                        u32::try_from(whole).ok().filter(|tokens| *tokens <= MAX_TOKENS).ok_or_else(|| {
                            let expected =
                                format!("at most {MAX_TOKENS} tokens with {} said before", before.history_tokens);
                            row.bad("input_length", expected)
                        })?;
                }
                sessions.next(&session, prompt_tokens, output_tokens, arrival_s).prefix()
            }
        };
        builder.push_generated(TraceRequest {
            arrival_s,
            prompt_tokens,
            output_tokens,
            prefix,
            ..TraceRequest::default()
        });
        Ok(())
    });
    let assumed = format!("have no output_length: each generates {OUTPUT_TOKENS} tokens");
    for (count, text) in [
        (endless, assumed.as_str()),
        (untimed, "have no timestamp: one arrives a second"),
        (
            delayed,
            "have a delay instead of a timestamp: they arrive so long after the turn before, and not before it ends",
        ),
        (grown, "are turns of a session: what was said before is added to their input_length"),
    ] {
        if count > 0 {
            builder.note(format!("{count} requests {text}"));
        }
    }
    read
}

/// The tokens of the prompt, and whether what was said before is among them.
fn prompt(row: &Row<'_>, options: &ReadOptions) -> Result<(u32, bool), TraceError> {
    if row.text("input_length").is_some() {
        return Ok((row.tokens("input_length", 0)?, false));
    }
    let is_delta = row.text("message_mode").is_some_and(|mode| mode == "delta");
    for (field, holds_history) in [("text_input", false), ("messages", !is_delta)] {
        if let Some(texts) = row.json(field).filter(|value| !value.is_null()) {
            let tokens = TokenCount::required(options, row.name)?.of(row.name, &texts_of(texts))?;
            return Ok((tokens, holds_history));
        }
    }
    Err(row.bad("input_length", "a value"))
}

/// All text of a prompt or of messages.
fn texts_of(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(texts_of).collect::<Vec<_>>().join("\n"),
        Value::Object(fields) => fields.get("content").or_else(|| fields.get("text")).map(texts_of).unwrap_or_default(),
        _ => String::new(),
    }
}
