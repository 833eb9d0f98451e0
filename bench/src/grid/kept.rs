//! Rows of a grid as they are done: a run that was interrupted goes on where it was.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::Context;
use meridian_core::file::read_regular_text;
use serde::{Deserialize, Serialize};

use super::{Axes, Cell, Row};
use crate::replay::{Input, Options};
use crate::sim::EngineConfig;

/// A file with a row and its cells a line.
#[derive(Default)]
pub struct Kept {
    path: Option<PathBuf>,
    rows: BTreeMap<u64, (Row, Vec<Cell>)>,
    writes: Mutex<()>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    key: u64,
    row: Row,
    cells: Vec<Cell>,
}

/// Largest file that is read, bytes.
const MAX_BYTES: u64 = 1 << 30;

impl Kept {
    /// The rows that a file has; it need not be there. A line that is cut short, as the last of a run that was killed, is
    /// left out.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = match read_regular_text(path, MAX_BYTES) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("{}: cannot be read", path.display()))?,
        };
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
        let rows = lines.map(|Line { key, row, cells }| (key, (row, cells))).collect();
        Ok(Self { path: Some(path.to_owned()), rows, writes: Mutex::new(()) })
    }

    /// How many rows it had when it was read.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether it had none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    pub(super) fn find(&self, key: u64) -> Option<(Row, Vec<Cell>)> {
        self.rows.get(&key).cloned()
    }

    pub(super) fn keep(&self, key: u64, (row, cells): &(Row, Vec<Cell>)) -> anyhow::Result<()> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut line = serde_json::to_string(&Line { key, row: row.clone(), cells: cells.clone() })?;
        line.push('\n');
        let _one_at_a_time = self.writes.lock().expect("no thread panics");
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).with_context(|| format!("{}", path.display()))
    }
}

/// What a row depends on.
pub(super) fn key(
    engine: &(String, EngineConfig),
    (traffic, input): &(String, Input),
    axes: &Axes,
    options: &Options,
) -> u64 {
    let Options { slo, policies, seeds, eviction, budget, max_tokens, config, .. } = options;
    let mut hasher = DefaultHasher::new();
    env!("CARGO_PKG_VERSION").hash(&mut hasher);
    let settings = (engine, traffic, &axes.loads, &axes.bursts, slo, policies, seeds, eviction, budget, max_tokens);
    format!("{settings:?} {config:?} {input:?}").hash(&mut hasher);
    hasher.finish()
}
