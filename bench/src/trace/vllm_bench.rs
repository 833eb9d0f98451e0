//! What `vllm bench serve --save-result --save-detailed` writes: one JSON object with an array a field
//! (`vllm/benchmarks/serve.py`). Requests that failed stand in `input_lens` with an output length of 0.

use std::io::BufRead;

use serde::Deserialize;
use serde_json::Value;

use super::lengths::Builder;
use super::rows::{MAX_SECONDS, MAX_TOKENS, bad};
use super::{ReadOptions, TraceError, TraceRequest};

/// Largest file, bytes: its arrays are read as a whole.
const MAX_JSON_BYTES: u64 = 128 << 20;

#[derive(Deserialize)]
struct Saved {
    input_lens: Option<Vec<Value>>,
    output_lens: Option<Vec<Value>>,
    /// Seconds of a clock without a meaning of its own.
    start_times: Option<Vec<Value>>,
    /// Requests per second; the text `inf` when all were sent at once.
    request_rate: Option<Value>,
}

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let mut input = input.take(MAX_JSON_BYTES + 1);
    let parsed = serde_json::from_reader(&mut input);
    if input.limit() == 0 {
        return Err(TraceError::TooLarge { name: name.to_owned(), limit: MAX_JSON_BYTES });
    }
    let saved: Saved = parsed.map_err(|e| {
        let what = e.to_string();
        bad(name, e.line() as u64, "(all)", Some(&what), "one JSON object of vllm bench serve")
    })?;
    let column = |column: &str, values: Option<Vec<Value>>| {
        values.ok_or_else(|| bad(name, 1, column, None, "an array: save the result with --save-detailed"))
    };
    let input_lens = column("input_lens", saved.input_lens)?;
    let output_lens = column("output_lens", saved.output_lens)?;
    for (column, len) in [
        ("output_lens", output_lens.len()),
        ("start_times", saved.start_times.as_ref().map_or(input_lens.len(), Vec::len)),
    ] {
        if len != input_lens.len() {
            let expected = format!("{} values, as input_lens has", input_lens.len());
            return Err(bad(name, 1, column, Some(&format!("{len} values")), expected));
        }
    }
    let rate = rate(saved.request_rate.as_ref());
    if saved.start_times.is_none() {
        builder.note(match rate {
            Some(rate) => format!("no start_times: arrivals spread evenly at request_rate {rate} per second"),
            None => "no start_times and no finite request_rate: all requests arrive at once".to_owned(),
        });
    }
    for index in 0..input_lens.len().min(options.limit.unwrap_or(usize::MAX)) {
        let line = index as u64 + 1;
        let number = |column: &str, value: &Value, most: f64, expected: String| {
            let number = value.as_f64().filter(|number| (0.0..=most).contains(number));
            number.ok_or_else(|| bad(name, line, column, Some(&value.to_string()), expected))
        };
        let tokens = |column: &str, value: &Value| {
            let expected = format!("a whole number of tokens from 0 to {MAX_TOKENS}");
            let number = number(column, value, f64::from(MAX_TOKENS), expected.clone())?;
            if number.fract() != 0.0 {
                return Err(bad(name, line, column, Some(&value.to_string()), expected));
            }
            Ok(number as u32)
        };
        let arrival_s = match (&saved.start_times, rate) {
            (Some(times), _) => number(
                "start_times",
                &times[index],
                MAX_SECONDS,
                "a finite number of seconds, not negative".to_owned(),
            )?,
            (None, Some(rate)) => index as f64 / rate,
            (None, None) => 0.0,
        };
        builder.push_generated(TraceRequest {
            arrival_s,
            prompt_tokens: tokens("input_lens", &input_lens[index])?,
            output_tokens: tokens("output_lens", &output_lens[index])?,
            ..TraceRequest::default()
        });
    }
    Ok(())
}

/// A rate that can be spread: finite, and not so slow that times leave their bounds.
fn rate(value: Option<&Value>) -> Option<f64> {
    let rate = match value? {
        Value::String(text) => text.parse().ok()?,
        other => other.as_f64()?,
    };
    (1e-3..=1e9).contains(&rate).then_some(rate)
}
