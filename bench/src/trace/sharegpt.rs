//! Conversations as texts, as in ShareGPT: an array of them, or one a line. Each answer is a request, whose prompt is all that was
//! said before it.

use std::cell::Cell;
use std::fmt;
use std::io::{BufRead, BufReader};
use std::sync::Arc;

use meridian_core::text::printable;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::lengths::Builder;
use super::rows::{MAX_LINE, MAX_TOKENS, RowByRow, bad, io_error, json_rows};
use super::{Prefix, ReadOptions, TraceError, TraceRequest};
use crate::limits::REQUESTS;

/// Counts the tokens of a text.
#[derive(Clone)]
pub struct TokenCount(Arc<Count>);

type Count = dyn Fn(&str) -> Result<usize, String> + Send + Sync;

impl TokenCount {
    /// By this function, which says why it cannot.
    pub fn new(count: impl Fn(&str) -> Result<usize, String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(count))
    }

    /// The one of the options.
    pub(super) fn required<'o>(options: &'o ReadOptions, name: &str) -> Result<&'o Self, TraceError> {
        options.count.as_ref().ok_or_else(|| TraceError::Needs {
            name: name.to_owned(),
            why: "has texts and no counts of tokens",
            expected: "--tokenizer FILE, a tokenizer.json",
        })
    }

    pub(super) fn of(&self, name: &str, text: &str) -> Result<u32, TraceError> {
        let count = (self.0)(text)
            .map_err(|why| TraceError::Text { name: name.to_owned(), why: printable(&why).into_owned() })?;
        Ok(u32::try_from(count).unwrap_or(MAX_TOKENS).min(MAX_TOKENS))
    }
}

impl fmt::Debug for TokenCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenCount")
    }
}

impl PartialEq for TokenCount {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for TokenCount {}

pub(super) fn rows(
    name: &str,
    mut input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let count = TokenCount::required(options, name)?;
    builder.note("no arrivals: one conversation begins a second".to_owned());
    let start = input.fill_buf().map_err(|e| io_error(name, e))?;
    let bom = if start.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
    let is_array = start[bom..].trim_ascii_start().first() == Some(&b'[');
    input.consume(bom);
    let mut number = 0;
    if !is_array {
        return json_rows(name, input, options.limit, |row| {
            number += 1;
            let said = NAMES.iter().find_map(|field| row.json(field));
            conversation(name, number, said, count, builder)
        });
    }
    let left = Cell::new(MAX_LINE);
    let (mut failed, mut stopped) = (None, false);
    let mut json = serde_json::Deserializer::from_reader(BufReader::new(RowByRow { input, left: &left }));
    let limit = options.limit.map_or(u64::MAX, |limit| limit as u64);
    let each = |fields: &Map<String, Value>| {
        left.set(MAX_LINE);
        number += 1;
        let said = NAMES.iter().find_map(|field| fields.get(*field));
        match conversation(name, number, said, count, builder) {
            Ok(()) if number < limit => return Next::Go,
            Ok(()) => stopped = true,
            Err(error) => failed = Some(error),
        }
        Next::Stop
    };
    let read = if limit == 0 { Ok(()) } else { json.deserialize_seq(Elements(each)) };
    match (failed, read) {
        (Some(error), _) => Err(error),
        (None, Ok(())) => Ok(()),
        (None, Err(_)) if stopped => Ok(()),
        (None, Err(error)) if error.is_io() => Err(io_error(name, error.into())),
        (None, Err(error)) => {
            let what = error.to_string();
            Err(bad(name, error.line() as u64, "(all)", Some(&what), "an array of conversations"))
        }
    }
}

/// Fields of a conversation that have what was said.
const NAMES: [&str; 3] = ["conversations", "conversation", "messages"];

enum Next {
    Go,
    Stop,
}

/// Calls a function with each object of an array.
struct Elements<F>(F);

impl<'de, F: FnMut(&Map<String, Value>) -> Next> Visitor<'de> for Elements<F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of conversations")
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut array: A) -> Result<(), A::Error> {
        while let Some(fields) = array.next_element::<Map<String, Value>>()? {
            if let Next::Stop = (self.0)(&fields) {
                return Err(A::Error::custom("stopped"));
            }
        }
        Ok(())
    }
}

/// Adds a request for each answer of a conversation.
fn conversation(
    name: &str,
    number: u64,
    said: Option<&Value>,
    count: &TokenCount,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let Some(Value::Array(said)) = said else {
        return Err(bad(name, number, "conversations", None, "an array of what was said"));
    };
    if builder.rows() >= *REQUESTS.end() as u64 {
        return Err(TraceError::TooMany { name: name.to_owned(), limit: *REQUESTS.end() });
    }
    let (mut before, mut turn) = (0_u32, 0);
    for one in said {
        let of = |names: [&str; 2]| names.iter().find_map(|field| one.get(*field)).and_then(Value::as_str);
        let text = of(["value", "content"]).unwrap_or_default();
        let tokens = count.of(name, text)?;
        let answers =
            matches!(of(["from", "role"]), Some("gpt" | "assistant" | "chatgpt" | "model" | "bot" | "bing" | "bard"));
        if answers {
            builder.push_generated(TraceRequest {
                arrival_s: (number - 1) as f64,
                prompt_tokens: before.min(MAX_TOKENS),
                output_tokens: tokens,
                prefix: Prefix::Session { id: number - 1, turn },
                ..TraceRequest::default()
            });
            turn += 1;
        }
        before = before.saturating_add(tokens);
    }
    Ok(())
}
