//! `meridian.toml` on disk: where it is searched for, and checks before it is parsed.

use std::ffi::OsString;
use std::path::{Path, PathBuf, absolute};

use meridian_core::config::Parsed;
use meridian_core::file::read_regular;
use meridian_core::{Error, MeridianConfig};
use thiserror::Error as ThisError;

/// Largest file that is read, bytes.
pub const MAX_BYTES: u64 = 1 << 20;

/// A configuration file that cannot be used. The message is one line and begins with the path.
#[derive(Debug, ThisError)]
pub enum ConfigFileError {
    /// The file cannot be read.
    #[error("{}: cannot be read: {cause}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The cause.
        cause: std::io::Error,
    },
    /// The contents are not text of an allowed size.
    #[error("{}: {reason}", path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// The contents and the expectation.
        reason: &'static str,
    },
    /// The text is not a valid configuration.
    #[error("{}: {cause}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The field, the value and what was expected.
        cause: Error,
    },
}

/// A configuration and its file.
#[derive(Debug)]
pub struct ConfigFile {
    /// The file; `None` when there is no file and the defaults hold.
    pub path: Option<PathBuf>,
    /// Folder that relative paths in the file start from: that of the path as given, whatever a link leads to.
    pub base_dir: PathBuf,
    /// The effective configuration, and the origin of each value.
    pub parsed: Parsed,
}

/// The inputs of the search besides the file system.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    /// `$MERIDIAN_CONFIG`; empty counts as not set.
    pub named: Option<OsString>,
    /// The user's home folder.
    pub home: Option<PathBuf>,
    /// The working directory; empty for the process's own.
    pub working_dir: PathBuf,
}

impl Surroundings {
    /// The surroundings of this process, as of now.
    #[must_use]
    pub fn of_process() -> Self {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        Self { named: set("MERIDIAN_CONFIG"), home: set("HOME").map(PathBuf::from), working_dir: PathBuf::new() }
    }

    /// The file to read: `explicit`, `$MERIDIAN_CONFIG`, `./meridian.toml`, `~/.config/meridian/meridian.toml`. The
    /// first two need not exist; reading them then fails.
    #[must_use]
    pub fn find(&self, explicit: Option<&Path>) -> Option<PathBuf> {
        if let Some(path) = explicit.or_else(|| self.named.as_ref().map(Path::new)) {
            return Some(self.working_dir.join(path));
        }
        let in_home = self.home.as_ref().map(|home| home.join(".config/meridian/meridian.toml"));
        [Some(self.working_dir.join("meridian.toml")), in_home].into_iter().flatten().find(|path| path.is_file())
    }

    /// Find, read and parse the configuration; without a file, return the defaults.
    ///
    /// # Errors
    /// The file cannot be read, is larger than [`MAX_BYTES`], is not UTF-8 or is not valid.
    pub fn load(&self, explicit: Option<&Path>) -> Result<ConfigFile, ConfigFileError> {
        let Some(path) = self.find(explicit) else {
            let parsed = MeridianConfig::parse("").expect("the defaults are valid");
            return Ok(ConfigFile { path: None, base_dir: PathBuf::from("."), parsed });
        };
        let parsed = read(&path)?;
        // A link is not followed: a mounted ConfigMap replaces the folder behind its links.
        let full = absolute(&path).map_err(|cause| ConfigFileError::Unreadable { path: path.clone(), cause })?;
        let base_dir = full.parent().unwrap_or(Path::new("/")).to_owned();
        Ok(ConfigFile { path: Some(path), base_dir, parsed })
    }
}

/// As [`Surroundings::load`], in the surroundings of this process.
///
/// # Errors
/// As [`Surroundings::load`].
pub fn load(explicit: Option<&Path>) -> Result<ConfigFile, ConfigFileError> {
    Surroundings::of_process().load(explicit)
}

/// Read and parse this file.
pub(crate) fn read(path: &Path) -> Result<Parsed, ConfigFileError> {
    let text = read_text(path)?;
    MeridianConfig::parse(&text).map_err(|cause| ConfigFileError::Invalid { path: path.to_owned(), cause })
}

fn read_text(path: &Path) -> Result<String, ConfigFileError> {
    let unreadable = |cause| ConfigFileError::Unreadable { path: path.to_owned(), cause };
    let unfit = |reason| ConfigFileError::Unfit { path: path.to_owned(), reason };
    if path.is_dir() {
        return Err(unfit("is a folder, expected a TOML file"));
    }
    let Some(bytes) = read_regular(path, MAX_BYTES).map_err(unreadable)? else {
        return Err(unfit("is larger than 1 MiB, expected a TOML file of at most that"));
    };
    String::from_utf8(bytes).map_err(|_| unfit("is not UTF-8 text, expected a TOML file"))
}
