//! Azure LLM inference traces, 2023 (`2023-11-16 18:15:46.6805900`) and 2024 (`2024-05-10 00:00:00.009930+00:00`).

use std::io::BufRead;

use super::lengths::Builder;
use super::rows::{Columns, Row, csv_rows};
use super::time::nanoseconds;
use super::{ReadOptions, TraceError, TraceRequest};

const COLUMNS: Columns<'static> = &[&["TIMESTAMP"], &["ContextTokens"], &["GeneratedTokens"]];

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let mut start_ns = None;
    csv_rows(name, input, COLUMNS, options.limit, |row: &Row<'_>| {
        let at_ns = row
            .text("TIMESTAMP")
            .and_then(|text| nanoseconds(&text))
            .ok_or_else(|| row.bad("TIMESTAMP", "a time as in 2023-11-16 18:15:46.680590 or with +00:00 after it"))?;
        // Whole nanoseconds, then floating point: seconds since 1970 in one number would keep no microseconds.
        let since_ns = at_ns - *start_ns.get_or_insert(at_ns);
        builder.push_generated(TraceRequest {
            arrival_s: since_ns as f64 / 1e9,
            prompt_tokens: row.tokens("ContextTokens", 0)?,
            output_tokens: row.tokens("GeneratedTokens", 0)?,
            ..TraceRequest::default()
        });
        Ok(())
    })
}
