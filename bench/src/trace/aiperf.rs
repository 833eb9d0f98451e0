//! AIPerf's `profile_export.jsonl`: a record a request, with its metadata, its metrics and its error.

use std::io::BufRead;

use serde_json::Value;

use super::conversations::Conversations;
use super::lengths::Builder;
use super::rows::{Row, bad, json_rows, token_count};
use super::{Prefix, ReadOptions, TraceError, TraceRequest};

/// Three centuries after 1970: later differences fit.
const MAX_NS: u64 = 10_000_000_000_000_000_000;

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let mut start_ns = None;
    let mut sessions = Conversations::default();
    let mut warmup = 0_usize;
    let read = json_rows(name, input, options.limit, |row: &Row<'_>| {
        let metadata = |field: &str| row.json("metadata").and_then(|metadata| metadata.get(field));
        if metadata("benchmark_phase").and_then(Value::as_str) == Some("warmup") {
            warmup += 1;
            return Ok(());
        }
        let at_ns = metadata("request_start_ns").or_else(|| metadata("timestamp_ns"));
        let at_ns = at_ns.and_then(Value::as_u64).filter(|ns| *ns <= MAX_NS).ok_or_else(|| {
            let value = at_ns.map(Value::to_string);
            bad(row.name, row.line, "metadata.request_start_ns", value.as_deref(), "nanoseconds, a whole number")
        })?;
        let start_ns = *start_ns.get_or_insert(at_ns);
        let generated = tokens(row, "output_sequence_length")?;
        let think_tokens = tokens(row, "reasoning_token_count")?.unwrap_or(0);
        let prompt = tokens(row, "input_sequence_length")?;
        let failed = row.json("error").is_some_and(|error| !error.is_null())
            || metadata("was_cancelled").and_then(Value::as_bool) == Some(true);
        let (Some(prompt_tokens), Some(generated), false) = (prompt, generated, failed) else {
            builder.skip();
            return Ok(());
        };
        let arrival_s = (i128::from(at_ns) - i128::from(start_ns)) as f64 / 1e9;
        let session = metadata("x_correlation_id").or_else(|| metadata("conversation_id")).and_then(Value::as_str);
        let prefix = match session {
            Some(session) => sessions.next(session, prompt_tokens, generated, arrival_s).prefix(),
            None => Prefix::None,
        };
        let mut request =
            TraceRequest { arrival_s, prompt_tokens, output_tokens: generated, prefix, ..TraceRequest::default() };
        if think_tokens == 0 {
            builder.push_generated(request);
        } else if prompt_tokens == 0 {
            builder.skip();
        } else {
            // A request that was cut off while thinking has no answer; the engine still needs one token.
            request.think_tokens = think_tokens;
            request.output_tokens = generated.saturating_sub(think_tokens).max(1);
            builder.push(request);
        }
        Ok(())
    });
    if warmup > 0 {
        builder.note(format!("{warmup} rows of the warm-up left out"));
    }
    read
}

/// The tokens that a metric counts.
fn tokens(row: &Row<'_>, metric: &str) -> Result<Option<u32>, TraceError> {
    let Some(value) = row.json("metrics").and_then(|metrics| metrics.get(metric)) else { return Ok(None) };
    let value = value.get("value").unwrap_or(value);
    let wrong = |expected| bad(row.name, row.line, &format!("metrics.{metric}"), Some(&value.to_string()), expected);
    token_count(value).map(Some).map_err(wrong)
}
