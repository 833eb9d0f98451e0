//! The engines of this machine, and those of a fleet file.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use meridian_admin::discovery::{self, Found, Process};
use meridian_core::file::read_regular;
use meridian_core::text::printable;
use serde::Deserialize;

use crate::engine::known_by;
use crate::{EngineClient, FleetError, Member};

/// Largest fleet file, bytes.
const MAX_BYTES: u64 = 4 << 20;
/// Most engines in a fleet file.
const MAX_ENGINES: usize = 10_000;
/// Longest name of an engine, bytes.
const MAX_NAME_BYTES: usize = 128;

/// Engines, and unreadable discovery files.
#[derive(Debug, Default)]
pub struct Fleet {
    /// The engines: those of the file in its order, then those of this machine by process id.
    pub engines: Vec<EngineClient>,
    /// Discovery files that cannot be used, a line each.
    pub malformed: Vec<String>,
}

/// The processes of this user on this machine that have an admin listener, by process id.
#[must_use]
pub fn processes() -> Found {
    let mut found = discovery::find(&discovery::run_dirs());
    found.processes.retain(|process| process.admin.is_some() || process.socket.is_some());
    found
}

/// Whether a process listens at this address.
pub(crate) fn listens_at(process: &Process, address: &str) -> bool {
    [&process.admin, &process.socket].into_iter().any(|own| own.as_deref() == Some(address))
}

impl EngineClient {
    /// The engine at this address. If it runs on this machine as this user, its discovery file knows its token.
    ///
    /// # Errors
    /// [`FleetError::Address`].
    pub fn known_at(address: &str) -> Result<Self, FleetError> {
        let engine = Self::at(address)?;
        let known = processes().processes.into_iter().find(|process| listens_at(process, address));
        Ok(match known.and_then(|process| process.token_file) {
            Some(token_file) => engine.with_token_file(token_file),
            None => engine,
        })
    }
}

impl Fleet {
    /// The engines of this user on this machine.
    ///
    /// # Errors
    /// [`FleetError::Address`]; a file with a malformed address is in [`Fleet::malformed`].
    pub fn local() -> Result<Self, FleetError> {
        let Found { processes, malformed } = processes();
        let engines = processes.iter().map(EngineClient::of).collect::<Result<_, _>>()?;
        Ok(Self { engines, malformed })
    }

    /// The engines of a fleet file, and with `local = true` in it also those of this user on this machine.
    ///
    /// ```
    /// use meridian_fleet::{Fleet, Member};
    ///
    /// let folder = std::env::temp_dir().join(format!("meridian-fleet-doc-{}", std::process::id()));
    /// std::fs::create_dir_all(&folder)?;
    /// let path = folder.join("fleet.toml");
    /// let text = "ca_file = 'ca.pem'\n[[engine]]\nname = 'a'\naddress = 'https://10.0.0.7:9465'\ntoken_file = 'a.token'\n";
    /// std::fs::write(&path, text)?;
    /// let fleet = Fleet::from_file(&path)?;
    /// assert_eq!((fleet.engines[0].name(), fleet.engines[0].address()), ("a", "https://10.0.0.7:9465"));
    /// assert_eq!(fleet.engines[0].token_file(), Some(folder.join("a.token").as_path()));
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`FleetError::File`]: another user can write the file, or a field is malformed. One line.
    pub fn from_file(path: &Path) -> Result<Self, FleetError> {
        let unusable = |reason: String| FleetError::File { path: path.to_owned(), reason };
        let Written { local, token_file, ca_file, engine: written } = read(path).map_err(unusable)?;
        let base = path.parent().unwrap_or(Path::new(""));
        let mut fleet = Self::default();
        let (mut names, mut addresses) = (BTreeSet::new(), BTreeSet::new());
        for (index, one) in written.iter().enumerate() {
            let field = |name: &str, why: &str| unusable(format!("engine[{index}].{name}: {why}"));
            let WrittenEngine { name, address, token_file: own_token, ca_file: own_ca } = one;
            let mut engine = EngineClient::at(address).map_err(|error| field("address", &error.to_string()))?;
            if let Some(name) = name {
                let is_plain = (1..=MAX_NAME_BYTES).contains(&name.len()) && printable(name) == name.as_str();
                if !is_plain {
                    return Err(field("name", &format!("{name:?}: must be 1 to 128 bytes of printable text")));
                }
                engine = engine.with_name(name);
            }
            if let Some(token_file) = own_token.as_ref().or(token_file.as_ref()) {
                engine = engine.with_token_file(base.join(token_file));
            }
            if let Some(ca_file) = own_ca.as_ref().or(ca_file.as_ref()) {
                engine = engine.with_ca_file(base.join(ca_file));
            }
            if !names.insert(engine.name().to_owned()) {
                return Err(field("name", &format!("{:?}: another engine has it", engine.name())));
            }
            if !addresses.insert(address.clone()) {
                return Err(field("address", &format!("{address:?}: another engine has it")));
            }
            fleet.engines.push(engine);
        }
        if local {
            let Found { processes, malformed } = processes();
            let is_new = |process: &&Process| !addresses.iter().any(|address| listens_at(process, address));
            for process in processes.iter().filter(is_new) {
                let engine = EngineClient::of(process).map_err(|error| unusable(error.to_string()))?;
                if !names.insert(known_by(process).to_owned()) {
                    return Err(unusable(format!("{:?}: an engine of this machine is also called so", engine.name())));
                }
                fleet.engines.push(engine);
            }
            fleet.malformed = malformed;
        } else if fleet.engines.is_empty() {
            return Err(unusable("engine: must have at least one entry, or local = true".into()));
        }
        Ok(fleet)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    local: bool,
    /// For engines that name none.
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
    #[serde(default)]
    engine: Vec<WrittenEngine>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenEngine {
    name: Option<String>,
    address: String,
    token_file: Option<PathBuf>,
    ca_file: Option<PathBuf>,
}

/// A user who can write this file chooses where the tokens go.
fn read(path: &Path) -> Result<Written, String> {
    let metadata = fs::metadata(path).map_err(|error| format!("cannot be read: {error}"))?;
    if metadata.mode() & 0o022 != 0 {
        let mode = metadata.mode() & 0o7777;
        return Err(format!("has mode {mode:04o}, must be 0644 or less: other users must not write it"));
    }
    let own = fs::metadata("/proc/self").map_err(|error| format!("its owner cannot be compared: {error}"))?.uid();
    if ![0, own].contains(&metadata.uid()) {
        return Err(format!("belongs to user {}, must belong to {own}, who runs this, or to root", metadata.uid()));
    }
    let bytes = read_regular(path, MAX_BYTES).map_err(|error| format!("cannot be read: {error}"))?;
    let bytes = bytes.ok_or("is larger than 4 MiB")?;
    let text = String::from_utf8(bytes).map_err(|_| "must be UTF-8")?;
    let written: Written = toml::from_str(&text).map_err(|error| {
        let line =
            error.span().and_then(|span| text.get(..span.start)).map_or(1, |before| before.matches('\n').count() + 1);
        format!("line {line}: {}", printable(error.message()))
    })?;
    if written.engine.len() > MAX_ENGINES {
        return Err(format!("engine: {} entries, must be at most {MAX_ENGINES}", written.engine.len()));
    }
    Ok(written)
}
