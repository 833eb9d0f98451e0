//! Requests as ServeGen generates them: seconds, input tokens, generated tokens, and the reasoning as tokens or as a
//! share.

use std::io::BufRead;

use super::lengths::Builder;
use super::meridian::Names;
use super::rows::{Row, each_row};
use super::{ReadOptions, TraceError, TraceRequest, Unit};

pub(super) const ARRIVAL: &[&str] = &["timestamp", "arrival_time", "arrival_s"];
pub(super) const PROMPT: &[&str] = &["input_tokens", "prompt_tokens", "input_length", "prompt_len"];
const GENERATED: &[&str] = &["output_tokens", "output_length", "output_len"];
const THINK: &[&str] = &["reason_tokens", "reasoning_tokens", "think_tokens"];
const ANSWER: &[&str] = &["answer_tokens"];
const SHARE: &[&str] = &["reason_ratio"];
const TENANT: &[&str] = &["client_id", "client", "tenant"];

pub(super) fn rows(
    name: &str,
    input: impl BufRead,
    is_json: bool,
    options: &ReadOptions,
    builder: &mut Builder,
) -> Result<(), TraceError> {
    let mut names = Names::default();
    let unit = options.unit.unwrap_or(Unit::S);
    let generated = [GENERATED, ANSWER].concat();
    each_row(name, input, is_json, &[ARRIVAL, PROMPT, &generated], options.limit, |row| {
        add(row, unit, &mut names, builder)
    })
}

fn add(row: &Row<'_>, unit: Unit, names: &mut Names, builder: &mut Builder) -> Result<(), TraceError> {
    // Where no name has a value, the error speaks of the first.
    let pick = |columns: &[&'static str]| row.first(columns).unwrap_or(columns[0]);
    let mut request = TraceRequest {
        arrival_s: row.seconds(pick(ARRIVAL), unit)?,
        prompt_tokens: row.tokens(pick(PROMPT), 0)?,
        tenant: names.get(row.first(TENANT).and_then(|column| row.text(column)).as_deref().unwrap_or_default()),
        ..TraceRequest::default()
    };
    let think = row.first(THINK).map(|column| row.tokens(column, 0)).transpose()?;
    if let Some(column) = row.first(ANSWER) {
        let answer = row.tokens(column, 0)?;
        // Without a column for the reasoning, the generated tokens that are not the answer are it.
        request.think_tokens = match (think, row.first(GENERATED)) {
            (Some(think), _) => think,
            (None, None) => 0,
            (None, Some(all)) => row
                .tokens(all, 0)?
                .checked_sub(answer)
                .ok_or_else(|| row.bad(column, format!("at most the value of {all}")))?,
        };
        request.output_tokens = answer;
    } else {
        let generated = row.tokens(pick(GENERATED), 0)?;
        let think = match (think, row.first(SHARE)) {
            (Some(think), _) if think > generated => {
                return Err(row.bad(pick(THINK), format!("at most the value of {}", pick(GENERATED))));
            }
            (Some(think), _) => think,
            (None, Some(column)) => (f64::from(generated) * row.number(column, 1.0)?).round() as u32,
            (None, None) => {
                request.output_tokens = generated;
                builder.push_generated(request);
                return Ok(());
            }
        };
        request.think_tokens = think;
        request.output_tokens = generated - think;
    }
    if request.prompt_tokens == 0 || request.think_tokens + request.output_tokens == 0 {
        builder.skip();
    } else {
        // A request that was cut off while thinking has no answer; the engine still needs one token.
        request.output_tokens = request.output_tokens.max(1);
        builder.push(request);
    }
    Ok(())
}
