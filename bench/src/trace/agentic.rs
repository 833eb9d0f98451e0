//! Sessions of coding agents, one a line, as lists of requests with their prefix blocks as ranges.

use std::io::BufRead;
use std::sync::Arc;

use serde_json::Value;

use super::error::shown;
use super::rows::{MAX_SECONDS, MAX_TOKENS, Row, json_rows};
use super::sessions::{MAX_BLOCK, ThinkingDrawn, merged};
use super::{Format, ReadOptions, Session, SessionRequest, Trace, TraceError};
use crate::limits::REQUESTS;

/// Fewest tokens of a block: fewer would make lists of blocks longer than the text that has them.
pub(super) const MIN_BLOCK_TOKENS: u32 = 8;
const MAX_BLOCK_TOKENS: u32 = 1 << 20;

/// Reads sessions; [`ReadOptions::limit`] is a number of sessions here.
pub(super) fn read(name: &str, input: impl BufRead, options: &ReadOptions) -> Result<Trace, TraceError> {
    let mut sessions = Vec::new();
    let mut counted = Counted::default();
    let mut thinking = ThinkingDrawn::new(options.think);
    json_rows(name, input, options.limit, |row: &Row<'_>| {
        let mut session = session(row, &mut thinking, &mut counted)?;
        if counted.requests > *REQUESTS.end() {
            return Err(TraceError::TooMany { name: name.to_owned(), limit: *REQUESTS.end() });
        }
        if let Some(most) = options.clip_tokens {
            counted.clipped += session.clip(most.max(2));
        }
        sessions.push(session);
        Ok(())
    })?;
    if sessions.is_empty() {
        return Err(TraceError::Empty { name: name.to_owned(), skipped: 0 });
    }
    let notes = counted.notes(options);
    Ok(Trace { name: name.to_owned(), format: Format::Agentic, requests: Vec::new(), sessions, notes })
}

#[derive(Default)]
struct Counted {
    requests: usize,
    /// Requests without tokens of an answer, which get one.
    silent: usize,
    /// Requests whose gap is not recorded.
    without_gap: usize,
    /// Requests that say why they stopped, as nothing.
    without_stop: usize,
    thinking: usize,
    clipped: usize,
}

impl Counted {
    fn notes(&self, options: &ReadOptions) -> Vec<String> {
        let of = self.requests;
        let mut notes = Vec::new();
        let mut note = |count: usize, text: &str| {
            if count > 0 {
                notes.push(format!("{count} of {of} requests {text}"));
            }
        };
        note(self.silent, "have no generated tokens: they generate one");
        note(
            self.without_gap,
            "have no recorded gap: it is the time from the end of the request before to their start",
        );
        note(self.without_stop, "do not say why they stopped: they count as ended turns");
        if options.think == super::ThinkSplit::None {
            note(
                self.thinking,
                "have thinking of unknown length: all of it counts as answer (--think bimodal splits it)",
            );
        } else {
            note(self.thinking, "have thinking of unknown length: its share is drawn");
        }
        if let Some(most) = options.clip_tokens {
            note(self.clipped, &format!("clipped to {most} tokens"));
        }
        notes
    }
}

fn session(row: &Row<'_>, thinking: &mut ThinkingDrawn, counted: &mut Counted) -> Result<Session, TraceError> {
    let block_tokens = row.tokens("block_size", MIN_BLOCK_TOKENS)?;
    if block_tokens > MAX_BLOCK_TOKENS {
        return Err(row.bad("block_size", format!("{MIN_BLOCK_TOKENS} to {MAX_BLOCK_TOKENS} tokens")));
    }
    let id = row.text("id").ok_or_else(|| row.bad("id", "the name of the session"))?;
    let Some(Value::Array(given)) = row.json("requests") else {
        return Err(row.bad("requests", "an array of requests"));
    };
    if given.is_empty() {
        return Err(row.bad("requests", "at least one request"));
    }
    let mut requests = Vec::with_capacity(given.len());
    let mut ended_s = 0.0;
    for (at, one) in given.iter().enumerate() {
        let bad = |place: usize, value: &Value, expected: &str| TraceError::Bad {
            name: row.name.to_owned(),
            line: row.line,
            column: format!("requests[{at}]{}", if place < FIELDS { format!("[{place}]") } else { String::new() }),
            value: shown(&value.to_string()),
            expected: expected.to_owned(),
        };
        let fields = one.as_array().map_or(&[][..], Vec::as_slice);
        let [t_s, input, output, api_s, gap_s, stop, thinks, blocks] = fields else {
            return Err(bad(FIELDS, one, EXPECTED));
        };
        let seconds = |value: &Value, place: usize| match value {
            Value::Null => Ok(None),
            value => match value.as_f64() {
                Some(s) if (0.0..=MAX_SECONDS).contains(&s) => Ok(Some(s)),
                _ => Err(bad(place, value, "seconds from 0 to 1e10, or null")),
            },
        };
        let tokens = |value: &Value, place: usize| match value.as_u64() {
            Some(count) if count <= u64::from(MAX_TOKENS) => Ok(count as u32),
            _ => Err(bad(place, value, "a whole number of tokens from 0 to 10000000")),
        };
        let start_s = seconds(t_s, 0)?.unwrap_or(ended_s);
        let prompt_tokens = tokens(input, 1)?.max(1);
        let generated = tokens(output, 2)?;
        let api_s = seconds(api_s, 3)?;
        let recorded_s = seconds(gap_s, 4)?;
        let stop = stop.as_str().ok_or_else(|| bad(5, stop, "a stop reason, such as \"tool_use\", or \"\""))?;
        let thinks = matches!(thinks, Value::Bool(true)) || thinks.as_u64().is_some_and(|flag| flag != 0);
        let listed = ranges(blocks).ok_or_else(|| bad(7, blocks, "ids of blocks, or [first, last] ranges of them"))?;
        let count: u64 = listed.iter().map(|[first, last]| u64::from(last - first) + 1).sum();
        if count * u64::from(block_tokens) > u64::from(prompt_tokens) {
            return Err(bad(7, blocks, &format!("at most {} blocks, as the prompt has", prompt_tokens / block_tokens)));
        }
        counted.requests += 1;
        counted.silent += usize::from(generated == 0);
        counted.without_stop += usize::from(stop.is_empty());
        counted.thinking += usize::from(thinks);
        counted.without_gap += usize::from(at > 0 && recorded_s.is_none());
        let gap_s = if at == 0 { 0.0 } else { recorded_s.unwrap_or_else(|| (start_s - ended_s).max(0.0)) };
        ended_s = start_s + api_s.unwrap_or(0.0);
        let (think_tokens, output_tokens) = thinking.split(generated.max(1), thinks);
        requests.push(SessionRequest {
            gap_s,
            prompt_tokens,
            think_tokens,
            output_tokens,
            stopped_for_tool: stop == "tool_use",
            blocks: listed,
            ..SessionRequest::default()
        });
    }
    Ok(Session::new(Arc::from(id.as_ref()), block_tokens, requests))
}

/// Fields of a request.
const FIELDS: usize = 8;
const EXPECTED: &str = "[t_s, input tokens, output tokens, api_s, gap_s, stop, thinking, blocks]";

fn ranges(blocks: &Value) -> Option<Arc<[[u32; 2]]>> {
    let id = |value: &Value| value.as_u64().filter(|id| *id <= u64::from(MAX_BLOCK)).map(|id| id as u32);
    let range = |value: &Value| match value {
        Value::Array(ends) => match ends.as_slice() {
            [first, last] => Some([id(first)?, id(last)?]).filter(|[first, last]| first <= last),
            _ => None,
        },
        one => id(one).map(|one| [one, one]),
    };
    let ranges: Option<Vec<_>> = blocks.as_array()?.iter().map(range).collect();
    Some(merged(ranges?))
}
