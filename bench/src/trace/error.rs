use std::io;

use thiserror::Error;

/// Why a trace cannot be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{name}: cannot be read")]
    Io {
        /// Name of the file, without its folder.
        name: String,
        /// What the system says.
        source: io::Error,
    },
    /// More of the file would have to be read than a trace may have.
    #[error("{name}: has more than {} MiB to read, expected at most that; --requests N reads the first N rows only", .limit >> 20)]
    TooLarge {
        /// Name of the file, without its folder.
        name: String,
        /// Most bytes.
        limit: u64,
    },
    /// More rows than a run may have requests.
    #[error("{name}: has more than {limit} rows, expected at most that; --requests N reads the first N rows only")]
    TooMany {
        /// Name of the file, without its folder.
        name: String,
        /// Most rows.
        limit: usize,
    },
    /// A row, a header or a field is not what the format asks for.
    #[error("{name}:{line}: column {column}: got {value}, expected {expected}")]
    Bad {
        /// Name of the file, without its folder.
        name: String,
        /// Line in the file, from 1; for `vllm-bench` the position in the array, from 1.
        line: u64,
        /// Which column; `(all)` for the row as a whole.
        column: String,
        /// What stands there, quoted and shortened.
        value: String,
        /// What should.
        expected: String,
    },
    /// No format is called that, or none fits the first line.
    #[error("{what}: unknown format, expected one of {known}")]
    UnknownFormat {
        /// The name that was given, or the file whose first line fits none.
        what: String,
        /// Names of all formats.
        known: String,
    },
    /// A file of another kind.
    #[error("{name}: unknown format: it is {kind} (formats: {known})")]
    Other {
        /// Name of the file, without its folder.
        name: String,
        /// Of which kind it is, and what to give instead.
        kind: &'static str,
        /// Names of all formats.
        known: String,
    },
    /// An option is missing without which the format cannot be read.
    #[error("{name}: {why}, expected {expected}")]
    Needs {
        /// Name of the file, without its folder.
        name: String,
        /// What the file lacks.
        why: &'static str,
        /// The option.
        expected: &'static str,
    },
    /// A text of which the tokens cannot be counted.
    #[error("{name}: the tokens of a text cannot be counted: {why}")]
    Text {
        /// Name of the file, without its folder.
        name: String,
        /// Why.
        why: String,
    },
    /// Its first and its last arrival are too far apart.
    #[error("{name}: arrivals span {span_s:.3e} s, expected at most {most_s:e} s")]
    TooLong {
        /// Name of the file, without its folder.
        name: String,
        /// Between the first and the last arrival, seconds.
        span_s: f64,
        /// Most seconds.
        most_s: f64,
    },
    /// Not one request.
    #[error("{name}: no requests, expected at least one row{}", left_out(*.skipped))]
    Empty {
        /// Name of the file, without its folder.
        name: String,
        /// Rows without prompt or generated tokens.
        skipped: usize,
    },
}

/// Why a workload cannot be generated.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum WorkloadError {
    /// The text is not TOML of a workload.
    #[error("workload: {0}")]
    Toml(String),
    /// A value is out of range.
    #[error("workload field {field}: got {value}, expected {expected}")]
    Field {
        /// Dotted name, as in the TOML file.
        field: String,
        /// What stands there.
        value: String,
        /// What should.
        expected: &'static str,
    },
    /// No preset is called that.
    #[error("workload {name:?}: unknown, expected one of {known}")]
    UnknownName {
        /// The name that was given.
        name: String,
        /// Names of all presets.
        known: String,
    },
}

fn left_out(rows: usize) -> String {
    if rows > 0 { format!(" ({rows} left out: no tokens)") } else { String::new() }
}

/// A value as errors show it: quoted, control characters escaped, at most 60 characters.
pub(super) fn shown(value: &str) -> String {
    let mut chars = value.chars();
    let head: String = chars.by_ref().take(60).collect();
    if chars.next().is_some() { format!("{head:?}...") } else { format!("{head:?}") }
}
