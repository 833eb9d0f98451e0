//! Compiled components on disk, so that an engine process starts in microseconds instead of compiling.
#![expect(unsafe_code, reason = "wasmtime cannot prove that a compiled artifact is its own")]

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use wasmtime::component::Component;
use wasmtime::{Engine, Result};

const DIGEST_BYTES: usize = 32;
/// Compiled components that are kept; the oldest go.
const MAX_ARTIFACTS: usize = 64;
/// A file that is still being written after so long has lost its writer.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);

/// A folder that only its owner may write.
pub(crate) struct Cache {
    dir: PathBuf,
}

impl Cache {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// The compiled form of `bytes`: from the folder when it is there and sound, else compiled and kept. A cache that
    /// cannot be read or written costs only the compilation.
    pub(crate) fn load_or_compile(&self, engine: &Engine, bytes: &[u8]) -> Result<Component> {
        if !self.is_private() {
            return Component::new(engine, bytes);
        }
        let path = self.dir.join(format!("{}.cwasm", self.key(engine, bytes)));
        if let Some(component) = Self::load(engine, &path) {
            return Ok(component);
        }
        let component = Component::new(engine, bytes)?;
        if let Ok(artifact) = component.serialize() {
            let _ = self.store(&path, &artifact);
            let _ = self.tidy();
        }
        Ok(component)
    }

    /// Names the component's content and everything of the engine that the compiled form depends on.
    fn key(&self, engine: &Engine, bytes: &[u8]) -> String {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut compatibility = DefaultHasher::new();
        engine.precompile_compatibility_hash().hash(&mut compatibility);
        format!("{}-{:016x}", hex(&Sha256::digest(bytes)), compatibility.finish())
    }

    fn load(engine: &Engine, path: &Path) -> Option<Component> {
        // Looked at first, because opening a pipe would wait for its other end.
        if !is_private_file(&fs::symlink_metadata(path).ok()?) {
            return None;
        }
        let mut opened = File::open(path).ok()?;
        if !is_private_file(&opened.metadata().ok()?) {
            return None;
        }
        let mut file = Vec::new();
        opened.read_to_end(&mut file).ok()?;
        let (artifact, digest) = file.split_at_checked(file.len().checked_sub(DIGEST_BYTES)?)?;
        if Sha256::digest(artifact).as_slice() != digest {
            return None;
        }
        // SAFETY: `deserialize` trusts its input to come from `serialize`. The digest rules out truncation and
        // corruption; that nobody else wrote the file follows from `is_private` and `is_private_file`: the folder and the
        // very file that was read belong to this user, and no other may write either. wasmtime itself checks version,
        // target and settings.
        unsafe { Component::deserialize(engine, artifact) }.ok()
    }

    /// Written aside and renamed, so that no other process or thread sees half a file.
    fn store(&self, path: &Path, artifact: &[u8]) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let aside = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
        let write = || {
            let mut file = create_private(&aside)?;
            file.write_all(artifact)?;
            file.write_all(&Sha256::digest(artifact))?;
            file.sync_all()?;
            fs::rename(&aside, path)
        };
        write().inspect_err(|error| {
            // Another's, when it was there before.
            if error.kind() != io::ErrorKind::AlreadyExists {
                let _ = fs::remove_file(&aside);
            }
        })
    }

    /// Remove what writers left behind when they were killed, and the oldest of too many components.
    fn tidy(&self) -> io::Result<()> {
        let mut artifacts = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let (path, modified) = (entry.path(), entry.metadata()?.modified()?);
            match path.extension().and_then(|extension| extension.to_str()) {
                Some("cwasm") => artifacts.push((modified, path)),
                Some("tmp") if is_abandoned(modified) => fs::remove_file(path)?,
                _ => {}
            }
        }
        artifacts.sort();
        let excess = artifacts.len().saturating_sub(MAX_ARTIFACTS);
        artifacts.drain(..excess).try_for_each(|(_, path)| fs::remove_file(path))
    }

    /// Makes the folder if need be; false when another user could put a file into it.
    #[cfg(unix)]
    fn is_private(&self) -> bool {
        use std::os::unix::fs::DirBuilderExt;
        let _ = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        fs::symlink_metadata(&self.dir).is_ok_and(|folder| folder.is_dir() && is_own(&folder))
    }

    #[cfg(not(unix))]
    fn is_private(&self) -> bool {
        false
    }
}

fn is_abandoned(modified: SystemTime) -> bool {
    // Of the future: the clock was set back, and the next look will tell.
    modified.elapsed().is_ok_and(|age| age > ABANDONED_AFTER)
}

fn is_private_file(file: &fs::Metadata) -> bool {
    file.is_file() && is_own(file)
}

/// Whether it belongs to this user, and no other may write it.
#[cfg(unix)]
fn is_own(file: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    // A process's own folder in /proc carries its user id; without /proc nothing is cached.
    fs::metadata("/proc/self").is_ok_and(|own| file.uid() == own.uid()) && file.mode() & 0o022 == 0
}

#[cfg(not(unix))]
fn is_own(_: &fs::Metadata) -> bool {
    false
}

/// A new file that only this user may read or write, whatever the umask.
fn create_private(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
