//! The folder of a roll-out. The process that holds the lock leads the roll-out; the kernel releases the lock when that process
//! ends, in whatever way.
//!
//! `state.json` is replaced whole, so that it is always one state or the next. Measurements are appended to
//! `intervals.jsonl`, before the state that counts them: lines that no state counts, or half of one, are dropped.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use meridian_core::file::{open_regular, read_regular_text};
use meridian_core::text::printable;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::judge::Interval;
use super::state::{FORMAT, RolloutState};

/// Largest state file, bytes: ten thousand engines.
const MOST_STATE_BYTES: u64 = 64 << 20;
/// Longest line of measurements, bytes.
const MOST_LINE_BYTES: u64 = 256 << 20;

/// The reason why the folder of a roll-out cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// Another process leads the roll-out.
    #[error("{path}: another process leads this roll-out", path = .0.display())]
    Led(PathBuf),
    /// There is none.
    #[error("{path}: no roll-out has begun here", path = .0.display())]
    None(PathBuf),
    /// A roll-out in this folder is not over.
    #[error("{path}: a roll-out that is not over: go on with it (resume) or return to the old policy (abort)", path = .0.display())]
    NotOver(PathBuf),
    /// A file is not what a roll-out writes.
    #[error("{path}: {why}", path = path.display(), why = printable(why))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, as the parser says it.
        why: String,
    },
    /// A file cannot be read or written.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        error: std::io::Error,
    },
}

/// What the operator wants of a roll-out that another process leads.
///
/// ```
/// use meridian_fleet::rollout::Wish;
///
/// assert_eq!(serde_json::to_string(&Wish::Pause).unwrap(), "\"pause\"");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// Begin no further step.
    Pause,
    /// Go on.
    Resume,
    /// Return to the old policy.
    Abort,
}

/// The folder of a roll-out, and the lock on it.
pub struct Store {
    dir: PathBuf,
    _lock: File,
    intervals: Option<File>,
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> StoreError {
    let path = path.to_owned();
    |error| StoreError::File { path, error }
}

impl Store {
    /// Take the lock of a folder, and make the folder if there is none.
    ///
    /// # Errors
    /// [`StoreError::Led`], [`StoreError::File`].
    pub fn lock(dir: &Path) -> Result<Self, StoreError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(io(dir))?;
        let path = dir.join("lock");
        let lock = private().create(true).truncate(false).write(true).open(&path).map_err(io(&path))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { dir: dir.to_owned(), _lock: lock, intervals: None }),
            Err(TryLockError::WouldBlock) => Err(StoreError::Led(dir.to_owned())),
            Err(TryLockError::Error(error)) => Err(StoreError::File { path, error }),
        }
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Make room for a new roll-out: the files of one that is over go to a folder beside them.
    ///
    /// # Errors
    /// [`StoreError::NotOver`], [`StoreError::File`].
    pub fn clear(&mut self) -> Result<(), StoreError> {
        let state = match read(&self.dir) {
            Ok(state) => state,
            Err(StoreError::None(_)) => return self.begin_lines(),
            Err(error) => return Err(error),
        };
        if state.outcome().is_none() {
            return Err(StoreError::NotOver(self.dir.clone()));
        }
        let old = self.dir.join(format!("ended-{:.0}", state.started_s));
        fs::create_dir_all(&old).map_err(io(&old))?;
        // The state last: until then, the roll-out is the old one.
        for name in ["intervals.jsonl", "policy.wasm", "wish", "state.json"] {
            let path = self.dir.join(name);
            match fs::rename(&path, old.join(name)) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(StoreError::File { path, error }),
            }
        }
        self.begin_lines()
    }

    /// Of a start that was killed before it wrote a state, there may be lines and a wish.
    fn begin_lines(&mut self) -> Result<(), StoreError> {
        self.intervals = None;
        for name in ["intervals.jsonl", "wish"] {
            let path = self.dir.join(name);
            match fs::remove_file(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(StoreError::File { path, error }),
            }
        }
        Ok(())
    }

    /// Keep the component for a later controller.
    ///
    /// # Errors
    /// [`StoreError::File`].
    pub fn keep_component(&self, bytes: &[u8]) -> Result<(), StoreError> {
        replace(&self.dir, "policy.wasm", bytes)
    }

    /// The component.
    ///
    /// # Errors
    /// [`StoreError::File`].
    pub fn component(&self) -> Result<Vec<u8>, StoreError> {
        let path = self.dir.join("policy.wasm");
        let file = File::open(&path).map_err(io(&path))?;
        let mut bytes = Vec::new();
        let most = meridian_engine::control::MAX_COMPONENT_BYTES as u64;
        file.take(most).read_to_end(&mut bytes).map_err(io(&path))?;
        Ok(bytes)
    }

    /// Replace the state.
    ///
    /// # Errors
    /// [`StoreError::File`]: the state before is still there.
    pub fn save(&self, state: &RolloutState) -> Result<(), StoreError> {
        let path = self.dir.join("state.json");
        let text = serde_json::to_vec(state).map_err(|error| StoreError::Malformed { path, why: error.to_string() })?;
        replace(&self.dir, "state.json", &text)
    }

    /// The state, and the intervals that it counts.
    ///
    /// # Errors
    /// [`StoreError::None`], [`StoreError::Malformed`], [`StoreError::File`].
    pub(super) fn load(&mut self) -> Result<(RolloutState, Vec<Interval>), StoreError> {
        let state = read(&self.dir)?;
        let path = self.dir.join("intervals.jsonl");
        let mut file = private().create(true).truncate(false).read(true).write(true).open(&path).map_err(io(&path))?;
        let mut intervals = Vec::new();
        let mut end = 0;
        {
            let mut reader = BufReader::new(&mut file);
            let mut line = Vec::new();
            while (intervals.len() as u64) < state.lines {
                line.clear();
                let read = (&mut reader).take(MOST_LINE_BYTES).read_until(b'\n', &mut line).map_err(io(&path))?;
                let number = intervals.len() + 1;
                let malformed =
                    |why: String| StoreError::Malformed { path: path.clone(), why: format!("line {number}: {why}") };
                if line.last() != Some(&b'\n') {
                    return Err(malformed(format!("the file ends here, and {} lines were expected", state.lines)));
                }
                intervals.push(serde_json::from_slice(&line).map_err(|error| malformed(error.to_string()))?);
                end += read as u64;
            }
        }
        file.set_len(end).map_err(io(&path))?;
        file.seek(std::io::SeekFrom::End(0)).map_err(io(&path))?;
        self.intervals = Some(file);
        Ok((state, intervals))
    }

    /// Append an interval. It counts once a state says so.
    ///
    /// # Errors
    /// [`StoreError::File`].
    pub(super) fn append(&mut self, interval: &Interval) -> Result<(), StoreError> {
        let path = self.dir.join("intervals.jsonl");
        let mut line = serde_json::to_vec(interval)
            .map_err(|error| StoreError::Malformed { path: path.clone(), why: error.to_string() })?;
        line.push(b'\n');
        if self.intervals.is_none() {
            self.intervals = Some(private().create(true).append(true).open(&path).map_err(io(&path))?);
        }
        let Some(file) = &mut self.intervals else { return Ok(()) };
        file.write_all(&line).and_then(|()| file.sync_data()).map_err(io(&path))
    }

    /// What the operator wants, once.
    ///
    /// # Errors
    /// [`StoreError::File`].
    pub fn take_wish(&self) -> Result<Option<Wish>, StoreError> {
        let path = self.dir.join("wish");
        let text = match read_regular_text(&path, MOST_STATE_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(StoreError::File { path, error }),
        };
        fs::remove_file(&path).map_err(io(&path))?;
        // Anything else is nobody's wish.
        Ok(serde_json::from_str(&text).ok())
    }
}

/// Tell the process that leads the roll-out of this folder.
///
/// # Errors
/// [`StoreError::None`], [`StoreError::File`].
pub fn wish(dir: &Path, wish: Wish) -> Result<(), StoreError> {
    read(dir)?;
    let text = format!(
        "\"{}\"",
        match wish {
            Wish::Pause => "pause",
            Wish::Resume => "resume",
            Wish::Abort => "abort",
        }
    );
    replace(dir, "wish", text.as_bytes())
}

/// The state of the roll-out of this folder, whoever leads it.
///
/// # Errors
/// [`StoreError::None`], [`StoreError::Malformed`], [`StoreError::File`].
pub fn read(dir: &Path) -> Result<RolloutState, StoreError> {
    let path = dir.join("state.json");
    let file = match open_regular(&path) {
        Ok((file, _)) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Err(StoreError::None(dir.to_owned())),
        Err(error) => return Err(StoreError::File { path, error }),
    };
    let mut text = Vec::new();
    file.take(MOST_STATE_BYTES).read_to_end(&mut text).map_err(io(&path))?;
    let malformed = |why: String| StoreError::Malformed { path: path.clone(), why };
    let state: RolloutState = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
    if state.format != FORMAT {
        return Err(malformed(format!("format: {:?}: expected {FORMAT:?}", state.format)));
    }
    state.settings.validate().map_err(|error| malformed(format!("settings: {error}")))?;
    if state.before > state.lines || state.step_from > state.lines {
        return Err(malformed(format!("before: {}: expected at most {} lines", state.before, state.lines)));
    }
    Ok(state)
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Replace a file whole, so that it survives a loss of power at any time.
fn replace(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
    // A process of its own: a wish comes from another one than the state.
    let new = dir.join(format!("{name}.{}.new", std::process::id()));
    let path = dir.join(name);
    let mut file = private().create(true).truncate(true).write(true).open(&new).map_err(io(&new))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(io(&new))?;
    fs::rename(&new, &path).map_err(io(&path))?;
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io(dir))
}
