//! BurstGPT: seconds, tokens of request and response; newer files name the session.

use std::io::BufRead;

use super::conversations::Conversations;
use super::lengths::Builder;
use super::rows::{Columns, Row, csv_rows};
use super::{Prefix, ReadOptions, TraceError, TraceRequest, Unit};

const COLUMNS: Columns<'static> = &[&["Timestamp"], &["Request tokens"], &["Response tokens"]];

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let unit = options.unit.unwrap_or(Unit::S);
    let mut sessions = Conversations::default();
    let read = csv_rows(name, input, COLUMNS, options.limit, |row: &Row<'_>| {
        let arrival_s = row.seconds("Timestamp", unit)?;
        let (prompt_tokens, output_tokens) = (row.tokens("Request tokens", 0)?, row.tokens("Response tokens", 0)?);
        let prefix = match row.text("Session ID") {
            Some(session) if prompt_tokens > 0 && output_tokens > 0 => {
                sessions.next(&session, prompt_tokens, output_tokens, arrival_s).prefix()
            }
            _ => Prefix::None,
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
    if sessions.len() > 0 {
        builder.note(format!(
            "{} sessions: a request that is long enough has all that its session said before as its prefix",
            sessions.len()
        ));
    }
    read
}
