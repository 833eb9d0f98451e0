//! The folder of an experiment, which one controller at a time has. The kernel frees the lock when that process ends, however
//! it ends.
//!
//! `state.json` is replaced whole, so that it is always one state or the next. `policies.json`, `old.wasm` and `new.wasm` are
//! what a later controller needs to load both policies again. `stop` asks the controller to stop.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use meridian_core::file::read_regular;
use meridian_core::text::printable;
use meridian_engine::control::MAX_COMPONENT_BYTES;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::Policies;
use super::state::{EXPERIMENT_FORMAT, State};
use crate::{NamedPolicy, PolicyOrigin};

/// Largest state that is read, bytes: thousands of pairs.
const MAX_BYTES: u64 = 256 << 20;

/// A folder that cannot be used.
#[derive(Debug, Error)]
pub enum StoreError {
    /// A file cannot be read, written or locked.
    #[error("{file}: cannot be {what}")]
    Io {
        /// The file.
        file: String,
        /// `read`, `written` or `locked`.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is not that of an experiment; one line.
    #[error("{file}: {why}", why = printable(why))]
    Malformed {
        /// The file.
        file: String,
        /// The problem and the expectation.
        why: String,
    },
    /// Another controller runs the experiment.
    #[error("{folder}: another process runs this experiment")]
    Busy {
        /// The folder.
        folder: String,
    },
}

/// The folder of an experiment with its lock. Dropping it frees the lock.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    _lock: File,
}

/// Both policies, but for the bytes of components.
#[derive(Serialize, Deserialize)]
struct Kept {
    old: KeptPolicy,
    new: KeptPolicy,
}

#[derive(Serialize, Deserialize)]
struct KeptPolicy {
    /// None of a component, whose bytes have a file of their own.
    named: Option<String>,
    signature: Option<String>,
    options: Option<String>,
}

impl Store {
    /// Take a folder for a controller, and make it if there is none.
    ///
    /// # Errors
    /// [`StoreError::Busy`] when another process has it.
    pub fn take(folder: &Path) -> Result<Self, StoreError> {
        let path = folder.join("lock");
        let failed = |source| StoreError::Io { file: path.display().to_string(), what: "locked", source };
        DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(failed)?;
        let lock = private().create(true).truncate(false).open(&path).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { folder: folder.to_owned(), _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(StoreError::Busy { folder: folder.display().to_string() }),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    /// The state in a folder that a controller may have; `None` without one.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn peek(folder: &Path) -> Result<Option<State>, StoreError> {
        let path = folder.join("state.json");
        let Some(bytes) = read(&path, MAX_BYTES)? else { return Ok(None) };
        let malformed = |why: String| StoreError::Malformed { file: path.display().to_string(), why };
        let state: State = serde_json::from_slice(&bytes)
            .map_err(|error| malformed(format!("expected the state of an experiment: {error}")))?;
        if state.format != EXPERIMENT_FORMAT {
            return Err(malformed(format!("format: {:?}: expected {EXPERIMENT_FORMAT:?}", state.format)));
        }
        state.settings.checked().map_err(|error| malformed(format!("settings: {error}")))?;
        Ok(Some(state))
    }

    /// The state; `None` without one.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn load(&self) -> Result<Option<State>, StoreError> {
        Self::peek(&self.folder)
    }

    /// Replace the state: after a crash, the file has the old or the new one.
    ///
    /// # Errors
    /// The file and the cause.
    pub fn save(&self, state: &State) -> Result<(), StoreError> {
        self.replace_json("state.json", state)
    }

    /// Keep both policies for a later controller.
    ///
    /// # Errors
    /// The file and the cause.
    pub fn save_policies(&self, policies: &Policies) -> Result<(), StoreError> {
        let kept = |policy: &NamedPolicy, file: &str| -> Result<KeptPolicy, StoreError> {
            let options = policy.options.clone();
            Ok(match &policy.source {
                PolicyOrigin::Named(name) => KeptPolicy { named: Some(name.clone()), signature: None, options },
                PolicyOrigin::Component { bytes, signature } => {
                    self.replace(file, bytes)?;
                    KeptPolicy { named: None, signature: signature.clone(), options }
                }
            })
        };
        let kept = Kept { old: kept(&policies.old, "old.wasm")?, new: kept(&policies.new, "new.wasm")? };
        self.replace_json("policies.json", &kept)
    }

    /// Both policies.
    ///
    /// # Errors
    /// The file and the problem.
    pub fn load_policies(&self) -> Result<Policies, StoreError> {
        let path = self.folder.join("policies.json");
        let file = || path.display().to_string();
        let missing =
            |file: String| StoreError::Malformed { file, why: "no such file, expected that of a policy".into() };
        let bytes = read(&path, MAX_BYTES)?.ok_or_else(|| missing(file()))?;
        let kept: Kept = serde_json::from_slice(&bytes).map_err(|error| StoreError::Malformed {
            file: file(),
            why: format!("expected the policies of an experiment: {error}"),
        })?;
        let policy = |kept: KeptPolicy, name: &str| -> Result<NamedPolicy, StoreError> {
            let KeptPolicy { named, signature, options } = kept;
            let source = match named {
                Some(named) => PolicyOrigin::Named(named),
                None => {
                    let path = self.folder.join(name);
                    let bytes = read(&path, MAX_COMPONENT_BYTES as u64)?;
                    let bytes = bytes.ok_or_else(|| missing(path.display().to_string()))?;
                    PolicyOrigin::Component { bytes: bytes.into(), signature }
                }
            };
            Ok(NamedPolicy { source, options })
        };
        Ok(Policies { old: policy(kept.old, "old.wasm")?, new: policy(kept.new, "new.wasm")? })
    }

    /// Ask the controller that has the folder to stop.
    ///
    /// # Errors
    /// The file and the cause.
    pub fn request_stop(folder: &Path) -> Result<(), StoreError> {
        let path = folder.join("stop");
        let written = private().create(true).truncate(true).open(&path);
        written.map(|_| ()).map_err(|source| StoreError::Io {
            file: path.display().to_string(),
            what: "written",
            source,
        })
    }

    /// Whether somebody asked.
    #[must_use]
    pub fn stop_requested(&self) -> bool {
        self.folder.join("stop").exists()
    }

    /// Forget the request.
    pub fn clear_stop(&self) {
        // A file that does not exist is as good.
        let _ = std::fs::remove_file(self.folder.join("stop"));
    }

    fn replace_json(&self, name: &str, value: &impl Serialize) -> Result<(), StoreError> {
        let text = serde_json::to_vec(value).map_err(|error| StoreError::Io {
            file: self.folder.join(name).display().to_string(),
            what: "written",
            source: error.into(),
        })?;
        self.replace(name, &text)
    }

    fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let path = self.folder.join(name);
        let draft = self.folder.join(format!("{name}.new"));
        let write = || -> std::io::Result<()> {
            let mut file = private().create(true).truncate(true).open(&draft)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            std::fs::rename(&draft, &path)?;
            // The name as well.
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(|source| StoreError::Io { file: path.display().to_string(), what: "written", source })
    }
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600).write(true);
    options
}

/// The bytes of a file; `None` without one.
fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>, StoreError> {
    let file = path.display().to_string();
    match read_regular(path, most) {
        Ok(Some(bytes)) => Ok(Some(bytes)),
        Ok(None) => Err(StoreError::Malformed { file, why: format!("is larger than {} MiB", most >> 20) }),
        Err(source) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreError::Io { file, what: "read", source }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Settings, Stage};
    use super::*;
    use meridian_engine::control::Version;

    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("meridian-experiment-{name}-{}", std::process::id()))
    }

    #[test]
    fn a_folder_has_one_controller() {
        let folder = folder("store");
        let store = Store::take(&folder).expect("free");
        assert_eq!(store.load().expect("none yet"), None);
        let error = Store::take(&folder).expect_err("taken").to_string();
        assert_eq!(error, format!("{}: another process runs this experiment", folder.display()));
        let mut state = State::new(Settings::default(), "a", Version::default());
        state.stage = Stage::Ended { why: "stopped".into(), complete: false };
        store.save(&state).expect("can be written");
        assert_eq!(Store::peek(&folder).expect("readable"), Some(state));
        assert!(!store.stop_requested());
        Store::request_stop(&folder).expect("can be written");
        assert!(store.stop_requested());
        store.clear_stop();
        assert!(!store.stop_requested());
        drop(store);
        Store::take(&folder).expect("free again");
        std::fs::remove_dir_all(folder).expect("nobody else is in it");
    }

    #[test]
    fn policies_are_kept_for_a_later_controller() {
        let folder = folder("policies");
        let store = Store::take(&folder).expect("free");
        let old = NamedPolicy { source: PolicyOrigin::Named("native:fcfs".into()), options: None };
        let source =
            PolicyOrigin::Component { bytes: b"bytes".as_slice().into(), signature: Some("four lines".into()) };
        let policies = Policies { old, new: NamedPolicy { source, options: Some("{}".into()) } };
        store.save_policies(&policies).expect("can be written");
        assert_eq!(store.load_policies().expect("readable"), policies);
        std::fs::remove_file(folder.join("new.wasm")).expect("is there");
        let error = store.load_policies().expect_err("without its bytes").to_string();
        assert!(error.ends_with("new.wasm: no such file, expected that of a policy"), "{error}");
        std::fs::remove_dir_all(folder).expect("nobody else is in it");
    }

    #[test]
    fn another_file_is_refused_with_its_field() {
        let folder = folder("malformed");
        std::fs::create_dir_all(&folder).expect("can be made");
        let refused = |text: &str| {
            std::fs::write(folder.join("state.json"), text).expect("can be written");
            Store::peek(&folder).expect_err("refused").to_string()
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
