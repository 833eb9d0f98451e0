//! Sessions of GitHub Copilot's agents: a session a line, with turns of calls of a model and of tools.

use std::io::BufRead;
use std::sync::Arc;

use serde_json::Value;

use super::agentic::MIN_BLOCK_TOKENS;
use super::rows::{MAX_SECONDS, Row, bad, json_rows, token_count};
use super::sessions::{MAX_BLOCK, merged};
use super::time::nanoseconds;
use super::{Format, ReadOptions, Session, SessionRequest, Trace, TraceError};
use crate::limits::REQUESTS;

/// The trace counts cached tokens and names no blocks: these are of vLLM's own size.
const BLOCK_TOKENS: u32 = 16;

/// Reads sessions; [`ReadOptions::limit`] is a number of sessions here.
pub(super) fn read(name: &str, input: impl BufRead, options: &ReadOptions) -> Result<Trace, TraceError> {
    let mut sessions = Vec::new();
    let mut counted = Counted::default();
    json_rows(name, input, options.limit, |row: &Row<'_>| {
        let calls = calls(row, &mut counted)?;
        if counted.requests > *REQUESTS.end() {
            return Err(TraceError::TooMany { name: name.to_owned(), limit: *REQUESTS.end() });
        }
        if !calls.is_empty() {
            let id = row.text("session_id").unwrap_or_else(|| (sessions.len() + 1).to_string().into());
            let block_tokens = options.block_tokens.unwrap_or(BLOCK_TOKENS).max(MIN_BLOCK_TOKENS);
            let mut session = session(row, &id, calls, block_tokens)?;
            if let Some(most) = options.clip_tokens {
                counted.clipped += session.clip(most.max(2));
            }
            sessions.push(session);
        }
        Ok(())
    })?;
    if sessions.is_empty() {
        return Err(TraceError::Empty { name: name.to_owned(), skipped: counted.failed });
    }
    let Counted { requests, failed, silent, clipped } = counted;
    let mut notes = Vec::new();
    let mut note = |count: usize, text: &str| {
        if count > 0 {
            notes.push(format!("{count} of {} calls {text}", requests + failed));
        }
    };
    note(failed, "left out: they failed, or have no prompt");
    note(silent, "have no generated tokens: they generate one");
    note(clipped, "clipped");
    notes.push(
        "cached tokens count as the beginning of the session's call before; those of its first call are not".into(),
    );
    Ok(Trace { name: name.to_owned(), format: Format::Copilot, requests: Vec::new(), sessions, notes })
}

#[derive(Default)]
struct Counted {
    requests: usize,
    failed: usize,
    /// Calls without tokens of an answer, which get one.
    silent: usize,
    clipped: usize,
}

/// A call of the model.
struct Call {
    start_ns: Option<i64>,
    took_s: f64,
    prompt_tokens: u32,
    cached_tokens: u32,
    output_tokens: u32,
    calls_tools: bool,
}

/// The calls of a session, by time.
fn calls(row: &Row<'_>, counted: &mut Counted) -> Result<Vec<Call>, TraceError> {
    let Some(Value::Array(turns)) = row.json("turns") else { return Err(row.bad("turns", "an array of turns")) };
    let mut calls = Vec::new();
    for (turn_at, turn) in turns.iter().enumerate() {
        let list = |name: &str| turn.get(name).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let asks_for_tools = |message: Option<&Value>| {
            message.is_some_and(|message| {
                list("tool_batches").iter().any(|batch| {
                    batch.get("request_id") == Some(message)
                        && batch.get("function_calls").and_then(Value::as_array).is_some_and(|list| !list.is_empty())
                })
            })
        };
        for (call_at, call) in list("llm_calls").iter().enumerate() {
            let wrong = |field: &str, value: &Value, expected: String| {
                let column = format!("turns[{turn_at}].llm_calls[{call_at}].{field}");
                bad(row.name, row.line, &column, Some(&value.to_string()), expected)
            };
            let tokens = |field: &str| match call.get("tokens").and_then(|tokens| tokens.get(field)) {
                None | Some(Value::Null) => Ok(0),
                Some(value) => {
                    token_count(value).map_err(|expected| wrong(&format!("tokens.{field}"), value, expected))
                }
            };
            let (prompt_tokens, cached_tokens, generated) =
                (tokens("prompt")?, tokens("cached")?, tokens("completion")?);
            let succeeded = call.get("result").is_none_or(|result| result.as_str() == Some("Success"));
            if prompt_tokens == 0 || generated == 0 && !succeeded {
                counted.failed += 1;
                continue;
            }
            counted.requests += 1;
            counted.silent += usize::from(generated == 0);
            let took_s = match call.get("duration_ms") {
                None | Some(Value::Null) => 0.0,
                Some(value) => match value.as_f64() {
                    Some(ms) if (0.0..=MAX_SECONDS * 1e3).contains(&ms) => ms / 1e3,
                    _ => return Err(wrong("duration_ms", value, "milliseconds from 0 to 1e13".to_owned())),
                },
            };
            let start_ns = match call.get("timestamp") {
                None | Some(Value::Null) => None,
                Some(value) => Some(
                    value
                        .as_str()
                        .and_then(nanoseconds)
                        .ok_or_else(|| wrong("timestamp", value, "a time as in 2026-06-01T00:00:01Z".to_owned()))?,
                ),
            };
            calls.push(Call {
                start_ns,
                took_s,
                prompt_tokens,
                cached_tokens,
                output_tokens: generated.max(1),
                calls_tools: asks_for_tools(call.get("message_id")),
            });
        }
    }
    calls.sort_by_key(|call| call.start_ns);
    Ok(calls)
}

fn session(row: &Row<'_>, id: &str, calls: Vec<Call>, block_tokens: u32) -> Result<Session, TraceError> {
    let mut requests: Vec<SessionRequest> = Vec::with_capacity(calls.len());
    let mut next_block = 0_u32;
    let mut ended_ns: Option<i64> = None;
    for call in calls {
        let full = call.prompt_tokens / block_tokens;
        let mut shared = (call.cached_tokens / block_tokens).min(full);
        let mut ranges = Vec::new();
        for [first, last] in
            requests.last().map(|before| Arc::clone(&before.blocks)).iter().flat_map(|list| list.iter())
        {
            let count = shared.min(last - first + 1);
            if count > 0 {
                ranges.push([*first, first + count - 1]);
            }
            shared -= count;
        }
        let own = full - ranges.iter().map(|[first, last]| last - first + 1).sum::<u32>();
        if own > 0 {
            let last = next_block.checked_add(own - 1).filter(|last| *last <= MAX_BLOCK).ok_or_else(|| {
                row.bad("session_id", format!("at most {MAX_BLOCK} blocks of {block_tokens} tokens in a session"))
            })?;
            ranges.push([next_block, last]);
            next_block = last + 1;
        }
        let gap_s = match (ended_ns, call.start_ns) {
            (Some(ended), Some(start)) => (start.saturating_sub(ended).max(0) as f64 / 1e9).min(MAX_SECONDS),
            _ => 0.0,
        };
        let took_ns = (call.took_s * 1e9) as i64;
        ended_ns = call.start_ns.or(ended_ns).map(|start| start.saturating_add(took_ns));
        requests.push(SessionRequest {
            gap_s,
            prompt_tokens: call.prompt_tokens,
            output_tokens: call.output_tokens,
            stopped_for_tool: call.calls_tools,
            blocks: merged(ranges),
            ..SessionRequest::default()
        });
    }
    Ok(Session::new(Arc::from(id), block_tokens, requests))
}
