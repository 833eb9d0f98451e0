//! The project's own format, CSV or JSON lines: `arrival_s`, the tokens of each phase, and optional columns.

use std::io::BufRead;
use std::sync::Arc;

use super::lengths::Builder;
use super::rows::{Columns, MAX_SECONDS, MAX_TOKENS, Row, each_row};
use super::{Prefix, ReadOptions, TraceError, TraceRequest};

const REQUIRED: Columns<'static> = &[&["arrival_s"], &["prompt_tokens"], &["think_tokens"], &["output_tokens"]];

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    is_json: bool,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let mut names = Names::default();
    each_row(name, input, is_json, REQUIRED, options.limit, |row| {
        builder.push(request(row, &mut names)?);
        Ok(())
    })
}

fn request(row: &Row<'_>, names: &mut Names) -> Result<TraceRequest, TraceError> {
    let deadline_ms = match row.text("deadline_ms").as_deref() {
        None | Some("inf") => f64::INFINITY,
        Some(_) => row.number("deadline_ms", MAX_SECONDS * 1e3)?,
    };
    let session = row.parsed::<u64>("session", "a whole number")?;
    let turn = row.parsed::<u32>("turn", "a whole number from 0")?;
    let prompt_tokens = row.tokens("prompt_tokens", 1)?;
    let prefix = match (session, turn) {
        (None, None) => match row.parsed::<u32>("block_tokens", BLOCK)? {
            None => Prefix::None,
            Some(tokens @ 1..=MAX_TOKENS) => row.blocks("blocks", tokens, prompt_tokens)?,
            Some(_) => return Err(row.bad("block_tokens", BLOCK)),
        },
        (Some(id), Some(turn)) => Prefix::Session { id, turn },
        (Some(_), None) => return Err(row.bad("turn", "a value, as session has one")),
        (None, Some(_)) => return Err(row.bad("session", "a value, as turn has one")),
    };
    Ok(TraceRequest {
        arrival_s: row.number("arrival_s", MAX_SECONDS)?,
        prompt_tokens,
        think_tokens: row.tokens("think_tokens", 0)?,
        output_tokens: row.tokens("output_tokens", 1)?,
        tenant: names.get(row.text("tenant").as_deref().unwrap_or_default()),
        priority: row.parsed("priority", "a whole number of 32 bits")?.unwrap_or(0),
        deadline_ms,
        prefix,
    })
}

const BLOCK: &str = "a whole number of tokens from 1 to 10000000";

/// One allocation a name rather than one a row.
#[derive(Default)]
pub(super) struct Names(std::collections::HashSet<Arc<str>>);

impl Names {
    pub(super) fn get(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.0.get(name) {
            return known.clone();
        }
        let name: Arc<str> = name.into();
        self.0.insert(name.clone());
        name
    }
}
