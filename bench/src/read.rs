//! Results from files, with errors that name the file and the field.

use std::path::{Path, PathBuf};

use anyhow::Context;
use meridian_core::file::read_regular;
use meridian_core::text::printable;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::results::{EngineFacts, MadeBy, Results, Run, SCHEMA, TraceFacts};

/// Largest file of results that is read, bytes; a run takes tens of kB.
pub const MAX_RESULTS_BYTES: u64 = 64 << 20;

/// Largest TOML file that is read, bytes.
pub const MAX_TOML_BYTES: u64 = 1 << 20;

/// The text of a file.
///
/// # Errors
/// It is no regular file, too large, not UTF-8 or cannot be read.
pub fn read_text(path: &Path, limit: u64) -> anyhow::Result<String> {
    let shown = || path.display();
    let read = read_regular(path, limit).with_context(|| format!("{}: cannot be read", shown()))?;
    let bytes = read.with_context(|| format!("{}: is larger than {} MiB, expected less", shown(), limit >> 20))?;
    String::from_utf8(bytes).ok().with_context(|| format!("{}: is not UTF-8 text", shown()))
}

/// Why a file gives no results.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be read.
    #[error("{file}: cannot be read")]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is larger than [`MAX_RESULTS_BYTES`].
    #[error("{file}: is larger than {} MiB, expected the results of `meridian bench replay --save`", MAX_RESULTS_BYTES >> 20)]
    TooLarge {
        /// The file.
        file: PathBuf,
    },
    /// The file is not JSON, or a field is not what the format says.
    #[error("{file}: {field}: {problem}", field = printable(field), problem = printable(problem))]
    Field {
        /// The file.
        file: PathBuf,
        /// Dotted path of the field, such as `runs[3].batches`; `JSON` when the file is not JSON.
        field: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file has another version of the format.
    #[error("{file}: schema {found}: expected {SCHEMA}; make the results again with this version")]
    Schema {
        /// The file.
        file: PathBuf,
        /// Its version.
        found: u32,
    },
}

#[derive(Deserialize)]
struct Head {
    schema: Option<u32>,
}

/// Read the results that a file holds.
///
/// # Errors
///
/// [`ReadError`], one line each.
pub fn read(file: &Path) -> Result<Results, ReadError> {
    let read = read_regular(file, MAX_RESULTS_BYTES).map_err(|source| ReadError::Io { file: file.into(), source })?;
    let text = read.ok_or_else(|| ReadError::TooLarge { file: file.into() })?;
    let bad = |(field, problem): (String, String)| ReadError::Field { file: file.into(), field, problem };
    // Another version may have other fields: its number goes first.
    match serde_json::from_slice::<Head>(&text) {
        Ok(Head { schema: Some(SCHEMA) }) => {}
        Ok(Head { schema: Some(found) }) => return Err(ReadError::Schema { file: file.into(), found }),
        Ok(Head { schema: None }) => return Err(bad(("schema".into(), "missing: not results of a replay".into()))),
        Err(error) if error.is_data() => return Err(bad(("schema".into(), error.to_string()))),
        Err(error) => return Err(bad(("JSON".into(), error.to_string()))),
    }
    serde_json::from_slice(&text).map_err(|error| {
        let found = serde_json::from_slice::<Value>(&text).ok().and_then(|value| wrong_field(&value));
        bad(found.unwrap_or_else(|| ("JSON".into(), error.to_string())))
    })
}

/// Path and problem of the first field that is not what [`Results`] expects.
fn wrong_field(value: &Value) -> Option<(String, String)> {
    let of = |key: &str| value.get(key).unwrap_or(&Value::Null);
    check::<MadeBy>("made_by", of("made_by"))
        .or_else(|| check::<TraceFacts>("trace", of("trace")))
        .or_else(|| check::<EngineFacts>("engine", of("engine")))
        .or_else(|| check::<String>("baseline", of("baseline")))
        .or_else(|| check::<Vec<Value>>("runs", of("runs")))
        .or_else(|| of("runs").as_array()?.iter().enumerate().find_map(|(at, run)| wrong_in_run(at, run)))
}

fn wrong_in_run(at: usize, run: &Value) -> Option<(String, String)> {
    let whole = check::<Run>(&format!("runs[{at}]"), run)?;
    // A missing field is named by the error itself; for a wrong value, take a good run and put in the fields one by one.
    let field = run.as_object()?.iter().find_map(|(key, value)| {
        let mut probe = serde_json::to_value(Run::default()).ok()?;
        probe.as_object_mut()?.insert(key.clone(), value.clone());
        check::<Run>(&format!("runs[{at}].{key}"), &probe)
    });
    Some(field.unwrap_or(whole))
}

fn check<T: DeserializeOwned>(path: &str, value: &Value) -> Option<(String, String)> {
    let problem = match value {
        Value::Null => "missing".to_owned(),
        value => T::deserialize(value).err()?.to_string(),
    };
    Some((path.to_owned(), problem))
}
