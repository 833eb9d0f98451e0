//! Rows of CSV files and of JSON lines behind one face, with errors that name the place.

use std::borrow::Cow;
use std::cell::Cell;
use std::io::{self, BufRead, Read};
use std::str::FromStr;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::error::shown;
use super::{Prefix, TraceError, Unit};
use crate::limits::REQUESTS;

/// No model has a context near this; more is a broken file.
pub(crate) const MAX_TOKENS: u32 = 10_000_000;
/// Three centuries, so that absolute Unix times pass and later arithmetic in nanoseconds is safe.
pub(super) const MAX_SECONDS: f64 = 1e10;
/// The longest row. A Mooncake request of a million tokens is 20 kB.
pub(super) const MAX_LINE: u64 = 16 << 20;

/// Each group is one column, by any of its names; the first is the one that messages use.
pub(super) type Columns<'a> = &'a [&'a [&'a str]];

pub(super) struct Row<'a> {
    pub(super) name: &'a str,
    pub(super) line: u64,
    cells: Cells<'a>,
}

enum Cells<'a> {
    Csv { header: &'a csv::StringRecord, record: &'a csv::StringRecord },
    Json(&'a Map<String, Value>),
}

impl Row<'_> {
    /// The cell as text; `None` where the column is absent, empty or null.
    pub(super) fn text(&self, column: &str) -> Option<Cow<'_, str>> {
        let text = match &self.cells {
            Cells::Csv { header, record } => {
                Cow::Borrowed(record.get(header.iter().position(|name| name == column)?)?.trim())
            }
            Cells::Json(object) => match object.get(column)? {
                Value::Null => return None,
                Value::String(text) => Cow::Borrowed(text.trim()),
                other => Cow::Owned(other.to_string()),
            },
        };
        (!text.is_empty()).then_some(text)
    }

    /// The cell as JSON; `None` for CSV and where the field is absent.
    pub(super) fn json(&self, column: &str) -> Option<&Value> {
        match &self.cells {
            Cells::Csv { .. } => None,
            Cells::Json(object) => object.get(column),
        }
    }

    /// The first of the names that has a value here.
    pub(super) fn first<'n>(&self, names: &[&'n str]) -> Option<&'n str> {
        names.iter().copied().find(|name| self.text(name).is_some())
    }

    pub(super) fn bad(&self, column: &str, expected: impl Into<String>) -> TraceError {
        let value = self.text(column);
        bad(self.name, self.line, column, value.as_deref(), expected)
    }

    /// A finite number in `0..=most`.
    pub(super) fn number(&self, column: &str, most: f64) -> Result<f64, TraceError> {
        let Some(text) = self.text(column) else { return Err(self.bad(column, "a value")) };
        match text.parse::<f64>() {
            Ok(number) if (0.0..=most).contains(&number) => Ok(number),
            Ok(number) if number.is_finite() && number > most => {
                Err(self.bad(column, format!("a number of at most {most:e}")))
            }
            _ => Err(self.bad(column, "a finite number, not negative")),
        }
    }

    /// A whole number of tokens in `least..=MAX_TOKENS`.
    pub(super) fn tokens(&self, column: &str, least: u32) -> Result<u32, TraceError> {
        let number = self.number(column, f64::MAX)?;
        if number.fract() != 0.0 || !(f64::from(least)..=f64::from(MAX_TOKENS)).contains(&number) {
            return Err(self.bad(column, format!("a whole number of tokens from {least} to {MAX_TOKENS}")));
        }
        Ok(number as u32)
    }

    /// Seconds, from a number of units.
    pub(super) fn seconds(&self, column: &str, unit: Unit) -> Result<f64, TraceError> {
        Ok(self.number(column, MAX_SECONDS * unit.per_second())? / unit.per_second())
    }

    /// The blocks of a prompt by content: an array of ids, or their list as text.
    pub(super) fn blocks(&self, column: &str, block_tokens: u32, prompt_tokens: u32) -> Result<Prefix, TraceError> {
        const { assert!(MAX_TOKENS < u32::MAX / 2) };
        let id = |text: &str| text.parse::<u64>().ok();
        let ids = match self.json(column) {
            Some(Value::Array(ids)) => ids.iter().map(Value::as_u64).collect::<Option<Arc<[u64]>>>(),
            Some(Value::Null) => return Ok(Prefix::None),
            _ => match self.text(column) {
                None => return Ok(Prefix::None),
                Some(text) => {
                    let list = text.trim_start_matches('[').trim_end_matches(']');
                    list.split([' ', ',', ';']).filter(|one| !one.is_empty()).map(id).collect()
                }
            },
        };
        let ids = ids.ok_or_else(|| self.bad(column, "an array of whole numbers"))?;
        if ids.is_empty() {
            return Ok(Prefix::None);
        }
        let most = prompt_tokens.div_ceil(block_tokens) as usize;
        if ids.len() > most {
            let expected = format!(
                "at most {most} blocks of {block_tokens} tokens, not {}; --trace-block-tokens N sets another size",
                ids.len()
            );
            return Err(self.bad(column, expected));
        }
        Ok(Prefix::Blocks { tokens: block_tokens, ids })
    }

    /// A value of another type, or nothing.
    pub(super) fn parsed<T: FromStr>(&self, column: &str, expected: &str) -> Result<Option<T>, TraceError> {
        match self.text(column) {
            None => Ok(None),
            Some(text) => text.parse().map(Some).map_err(|_| self.bad(column, expected)),
        }
    }
}

pub(super) fn bad(name: &str, line: u64, column: &str, value: Option<&str>, expected: impl Into<String>) -> TraceError {
    TraceError::Bad {
        name: name.to_owned(),
        line,
        column: column.to_owned(),
        value: value.map_or_else(|| "nothing".to_owned(), shown),
        expected: expected.into(),
    }
}

/// The tokens that a JSON number counts, or what was expected instead of it.
pub(super) fn token_count(value: &Value) -> Result<u32, String> {
    let count = value.as_f64().filter(|count| (0.0..=f64::from(MAX_TOKENS)).contains(count) && count.fract() == 0.0);
    count.map(|count| count as u32).ok_or_else(|| format!("a whole number of tokens from 0 to {MAX_TOKENS}"))
}

/// Calls `each` for at most `limit` rows, blank lines left out, of JSON lines or of CSV with these columns.
pub(super) fn each_row(
    name: &str,
    input: impl BufRead,
    is_json: bool,
    required: Columns<'_>,
    limit: Option<usize>,
    each: impl FnMut(&Row<'_>) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    if is_json { json_rows(name, input, limit, each) } else { csv_rows(name, input, required, limit, each) }
}

/// As [`each_row`], for CSV.
pub(super) fn csv_rows(
    name: &str,
    input: impl Read,
    required: Columns<'_>,
    limit: Option<usize>,
    mut each: impl FnMut(&Row<'_>) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let row_left = Cell::new(MAX_LINE);
    let input = RowByRow { input, left: &row_left };
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::Headers).from_reader(input);
    let header = reader.headers().map_err(|e| csv_error(name, e))?.clone();
    if header.is_empty() {
        return Ok(());
    }
    for group in required {
        if !group.iter().any(|column| header.iter().any(|given| given == *column)) {
            let given: Vec<&str> = header.iter().collect();
            let wanted: Vec<&str> = required.iter().map(|group| group[0]).collect();
            return Err(bad(name, 1, group[0], Some(&given.join(",")), format!("a header with {}", wanted.join(","))));
        }
    }
    let mut record = csv::StringRecord::new();
    let mut left = limit.unwrap_or(*REQUESTS.end());
    loop {
        row_left.set(MAX_LINE);
        if left == 0 && limit.is_some() || !reader.read_record(&mut record).map_err(|e| csv_error(name, e))? {
            return Ok(());
        }
        left = one_less(name, left)?;
        let line = record.position().map_or(0, csv::Position::line);
        each(&Row { name, line, cells: Cells::Csv { header: &header, record: &record } })?;
    }
}

fn one_less(name: &str, left: usize) -> Result<usize, TraceError> {
    left.checked_sub(1).ok_or_else(|| TraceError::TooMany { name: name.to_owned(), limit: *REQUESTS.end() })
}

/// Ends a row that has no end: a reader of CSV keeps a row whole.
pub(super) struct RowByRow<'a, R> {
    pub(super) input: R,
    /// Bytes that may be read until it is set again.
    pub(super) left: &'a Cell<u64>,
}

impl<R: Read> Read for RowByRow<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left.get() == 0 {
            return Err(io::Error::other(format!("a row has more than {} MiB", MAX_LINE >> 20)));
        }
        let most = usize::try_from(self.left.get()).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = self.input.read(&mut buffer[..most])?;
        self.left.set(self.left.get() - read as u64);
        Ok(read)
    }
}

/// As [`each_row`], for one JSON object a line.
pub(super) fn json_rows(
    name: &str,
    mut input: impl BufRead,
    limit: Option<usize>,
    mut each: impl FnMut(&Row<'_>) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let mut left = limit.unwrap_or(*REQUESTS.end());
    let mut bytes = Vec::new();
    let mut line = 0;
    while left > 0 || limit.is_none() {
        bytes.clear();
        line += 1;
        let read = input.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes).map_err(|e| io_error(name, e))?;
        if read == 0 {
            return Ok(());
        }
        let object = |value: Option<&str>, why: &str| bad(name, line, "(all)", value, why);
        if read as u64 == MAX_LINE && bytes.last() != Some(&b'\n') {
            return Err(object(None, &format!("a line of less than {} MiB", MAX_LINE >> 20)));
        }
        let Ok(text) = std::str::from_utf8(&bytes) else {
            return Err(object(Some(&String::from_utf8_lossy(&bytes)), "text in UTF-8"));
        };
        let text = text.trim_start_matches('\u{feff}').trim();
        if text.is_empty() {
            continue;
        }
        left = one_less(name, left)?;
        match serde_json::from_str(text) {
            Ok(Value::Object(fields)) => each(&Row { name, line, cells: Cells::Json(&fields) })?,
            _ => return Err(object(Some(text), "one JSON object a line")),
        }
    }
    Ok(())
}

/// The largest object of [`json_objects`], bytes: a session lists the blocks of a long prompt again in each request.
const MAX_OBJECT: usize = 64 << 20;

/// As [`json_rows`], for JSON objects that may have several lines, or be the elements of an array.
pub(super) fn json_objects(
    name: &str,
    mut input: impl BufRead,
    limit: Option<usize>,
    mut each: impl FnMut(&Row<'_>) -> Result<(), TraceError>,
) -> Result<(), TraceError> {
    let mut left = limit.unwrap_or(*REQUESTS.end());
    let (mut bytes, mut depth, mut in_string, mut is_escaped) = (Vec::new(), 0_usize, false, false);
    let (mut line, mut start) = (1_u64, 1_u64);
    let object = |line: u64, value: &[u8], why: &str| {
        let shown = &value[..value.len().min(256)];
        bad(name, line, "(all)", Some(&String::from_utf8_lossy(shown)), why)
    };
    while left > 0 || limit.is_none() {
        let part = input.fill_buf().map_err(|e| io_error(name, e))?;
        if part.is_empty() {
            return if bytes.is_empty() {
                Ok(())
            } else {
                Err(object(start, &bytes, "a JSON object, which has an end"))
            };
        }
        let (mut from, mut taken, mut is_whole) = (0, 0, false);
        while taken < part.len() && !is_whole {
            let byte = part[taken];
            taken += 1;
            line += u64::from(byte == b'\n');
            match byte {
                _ if is_escaped => is_escaped = false,
                b'\\' if in_string => is_escaped = true,
                b'"' if depth > 0 => in_string = !in_string,
                _ if in_string => {}
                b'{' if depth == 0 => (from, start, depth) = (taken - 1, line, 1),
                b'{' | b'[' if depth > 0 => depth += 1,
                b'}' | b']' if depth > 0 => {
                    depth -= 1;
                    is_whole = depth == 0;
                }
                // Between the elements of an array, and a mark of the order of bytes.
                b'[' | b',' | b']' | b'\xef' | b'\xbb' | b'\xbf' => {}
                byte if depth > 0 || byte.is_ascii_whitespace() => {}
                _ => return Err(object(line, &part[taken - 1..], "a JSON object")),
            }
        }
        if depth > 0 || is_whole {
            bytes.extend_from_slice(&part[from..taken]);
        }
        if bytes.len() > MAX_OBJECT {
            return Err(object(start, &bytes, &format!("an object of at most {} MiB", MAX_OBJECT >> 20)));
        }
        if is_whole {
            left = one_less(name, left)?;
            match serde_json::from_slice(&bytes) {
                Ok(Value::Object(fields)) => each(&Row { name, line: start, cells: Cells::Json(&fields) })?,
                _ => return Err(object(start, &bytes, "a JSON object")),
            }
            bytes.clear();
        }
        input.consume(taken);
    }
    Ok(())
}

pub(super) fn io_error(name: &str, source: io::Error) -> TraceError {
    TraceError::Io { name: name.to_owned(), source }
}

fn csv_error(name: &str, error: csv::Error) -> TraceError {
    let at = |pos: &Option<csv::Position>| pos.as_ref().map_or(1, csv::Position::line);
    match error.into_kind() {
        csv::ErrorKind::Io(source) => io_error(name, source),
        csv::ErrorKind::Utf8 { pos, err } => {
            bad(name, at(&pos), "(all)", Some(&format!("field {}", err.field() + 1)), "text in UTF-8")
        }
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => {
            bad(name, at(&pos), "(all)", Some(&format!("{len} fields")), format!("{expected_len} fields"))
        }
        other => io_error(name, io::Error::other(format!("{other:?}"))),
    }
}
