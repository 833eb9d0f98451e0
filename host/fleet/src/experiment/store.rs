//! The state of an experiment in a file, which one controller at a time has.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use meridian_core::file::read_regular;
use thiserror::Error;

use super::state::{EXPERIMENT_FORMAT, State};

/// Largest state that is read, bytes: thousands of pairs.
const MAX_BYTES: u64 = 256 << 20;

/// A state file that cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// It cannot be read or written.
    #[error("{file}: cannot be {what}")]
    Io {
        /// The file.
        file: String,
        /// `read`, `written` or `locked`.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// It is not the state of an experiment; one line.
    #[error("{file}: {why}")]
    Malformed {
        /// The file.
        file: String,
        /// The problem and the expectation.
        why: String,
    },
    /// Another controller runs the experiment.
    #[error("{file}: another process runs this experiment")]
    Busy {
        /// The file.
        file: String,
    },
}

/// A state file with its lock. Dropping it frees the lock, and so does the end of the process.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    _lock: File,
}

impl Store {
    /// Take a state file for a controller; it need not exist yet.
    ///
    /// # Errors
    /// [`StoreError::Busy`] when another process has it.
    pub fn take(path: &Path) -> Result<Self, StoreError> {
        let file = || path.display().to_string();
        let failed = |source| StoreError::Io { file: file(), what: "locked", source };
        // Beside the file, which is replaced by each write.
        let lock = OpenOptions::new().create(true).truncate(false).write(true).open(beside(path, "lock")).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(StoreError::Busy { file: file() }),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// The state, if there is one.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn load(&self) -> Result<Option<State>, StoreError> {
        Self::peek(&self.path)
    }

    /// The state in a file that a controller may have.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn peek(path: &Path) -> Result<Option<State>, StoreError> {
        let file = path.display().to_string();
        let bytes = match read_regular(path, MAX_BYTES) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Err(StoreError::Malformed { file, why: "is larger than 256 MiB".into() }),
            Err(source) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(StoreError::Io { file, what: "read", source }),
        };
        let state: State = serde_json::from_slice(&bytes).map_err(|error| StoreError::Malformed {
            file: file.clone(),
            why: format!("expected the state of an experiment: {error}"),
        })?;
        if state.format != EXPERIMENT_FORMAT {
            let why = format!("format: {:?}: expected {EXPERIMENT_FORMAT:?}", state.format);
            return Err(StoreError::Malformed { file, why });
        }
        match state.settings.checked() {
            Ok(()) => Ok(Some(state)),
            Err(error) => Err(StoreError::Malformed { file, why: format!("settings: {error}") }),
        }
    }

    /// Replace the state: after a crash, the file has the old or the new one.
    ///
    /// # Errors
    /// The file and the cause.
    pub fn save(&self, state: &State) -> Result<(), StoreError> {
        let failed = |source| StoreError::Io { file: self.path.display().to_string(), what: "written", source };
        let text = serde_json::to_vec(state).map_err(|error| failed(error.into()))?;
        let draft = beside(&self.path, "tmp");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&draft)?;
            file.write_all(&text)?;
            file.sync_all()?;
            std::fs::rename(&draft, &self.path)?;
            // The name as well.
            let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
            File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
        };
        write().map_err(failed)
    }

    /// Ask the controller that has the file to stop.
    ///
    /// # Errors
    /// The file and the cause.
    pub fn request_stop(path: &Path) -> Result<(), StoreError> {
        let written = File::create(beside(path, "stop"));
        written.map(|_| ()).map_err(|source| StoreError::Io { file: path.display().to_string(), what: "written", source })
    }

    /// Whether somebody asked.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        beside(&self.path, "stop").exists()
    }

    /// Forget the request.
    pub fn clear_stop(&self) {
        // A file that does not exist is as good.
        let _ = std::fs::remove_file(beside(&self.path, "stop"));
    }
}

/// The file of that suffix beside a state file.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::super::{Settings, Stage};
    use super::*;
    use meridian_runtime::control::Version;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("meridian-experiment-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("can be made");
        folder
    }

    #[test]
    fn a_state_file_has_one_controller() {
        let folder = folder("store");
        let path = folder.join("state.json");
        let store = Store::take(&path).expect("free");
        assert_eq!(store.load().expect("none yet"), None);
        let error = Store::take(&path).expect_err("taken").to_string();
        assert_eq!(error, format!("{}: another process runs this experiment", path.display()));
        let mut state = State::new(Settings::default(), "a", Version::default());
        state.stage = Stage::Ended { why: "stopped".into(), complete: false };
        store.save(&state).expect("can be written");
        assert_eq!(Store::peek(&path).expect("readable"), Some(state));
        assert!(!store.stop_requested());
        Store::request_stop(&path).expect("can be written");
        assert!(store.stop_requested());
        store.clear_stop();
        assert!(!store.stop_requested());
        drop(store);
        Store::take(&path).expect("free again");
        std::fs::remove_dir_all(folder).expect("nobody else is in it");
    }

    #[test]
    fn another_file_is_refused_with_its_field() {
        let folder = folder("malformed");
        let path = folder.join("state.json");
        let refused = |text: &str| {
            std::fs::write(&path, text).expect("can be written");
            Store::peek(&path).expect_err("refused").to_string()
        };
        assert!(refused("{}").contains("expected the state of an experiment: missing field"));
        let mut state = State::new(Settings::default(), "a", Version::default());
        state.settings.pairs = 0;
        let text = serde_json::to_string(&state).expect("plain data");
        assert!(refused(&text).ends_with("settings: pairs: 0: expected 4 to 10000"));
        assert!(refused(&text.replace("experiment/1", "experiment/2")).contains("format:"));
        std::fs::remove_dir_all(folder).expect("nobody else is in it");
    }
}
