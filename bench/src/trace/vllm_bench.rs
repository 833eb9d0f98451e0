//! What `vllm bench serve --save-result --save-detailed` writes: one JSON object with an array a field
//! (`vllm/benchmarks/serve.py`), and one after another with `--append-result`. Requests that failed stand in `input_lens` with an
//! output length of 0.

use std::io::BufRead;

use serde::Deserialize;
use serde_json::Value;

use super::lengths::Builder;
use super::rows::{MAX_SECONDS, MAX_TOKENS, bad, io_error};
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
    /// Seconds that the run took.
    duration: Option<Value>,
}

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let mut input = input.take(MAX_JSON_BYTES + 1);
    let mut runs = serde_json::Deserializer::from_reader(&mut input).into_iter::<Saved>();
    let (mut start_s, mut count) = (0.0, 0);
    while options.limit.is_none_or(|limit| builder.rows() < limit as u64) {
        match runs.next() {
            None => break,
            Some(Ok(saved)) => {
                count += 1;
                start_s = run(name, saved, start_s, options, builder)?;
            }
            Some(Err(e)) => {
                let too_large = TraceError::TooLarge { name: name.to_owned(), limit: MAX_JSON_BYTES };
                drop(runs);
                if input.limit() == 0 {
                    return Err(too_large);
                }
                if e.is_io() {
                    return Err(io_error(name, e.into()));
                }
                let what = e.to_string();
                return Err(bad(name, e.line() as u64, "(all)", Some(&what), "one JSON object of vllm bench serve"));
            }
        }
    }
    if count > 1 {
        builder.note(format!("{count} results: each begins where the one before ends"));
    }
    Ok(())
}

/// The requests of one result, from `start_s` on; when the next begins.
fn run(
    name: &str,
    saved: Saved,
    start_s: f64,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<f64, TraceError> {
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
    let number_of = |value: &Value| value.as_f64().filter(|s| (0.0..=MAX_SECONDS).contains(s));
    let first_s = saved.start_times.iter().flatten().filter_map(number_of).reduce(f64::min).unwrap_or(0.0);
    let left = options.limit.map_or(u64::MAX, |limit| (limit as u64).saturating_sub(builder.rows()));
    let mut last_s = 0.0_f64;
    for index in 0..input_lens.len().min(usize::try_from(left).unwrap_or(usize::MAX)) {
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
        last_s = last_s.max(arrival_s - first_s);
        builder.push_generated(TraceRequest {
            arrival_s: start_s + (arrival_s - first_s),
            prompt_tokens: tokens("input_lens", &input_lens[index])?,
            output_tokens: tokens("output_lens", &output_lens[index])?,
            ..TraceRequest::default()
        });
    }
    let lasted_s = saved.duration.as_ref().and_then(number_of).unwrap_or(0.0);
    Ok((start_s + last_s.max(lasted_s)).min(MAX_SECONDS))
}

/// A rate that can be spread: finite, and not so slow that times leave their bounds.
fn rate(value: Option<&Value>) -> Option<f64> {
    let rate = match value? {
        Value::String(text) => text.parse().ok()?,
        other => other.as_f64()?,
    };
    (1e-3..=1e9).contains(&rate).then_some(rate)
}
