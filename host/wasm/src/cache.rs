//! Compiled components on disk, so that an engine process starts in microseconds instead of compiling.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use wasmtime::Engine;
use wasmtime::component::Component;

use crate::artifact::Artifact;

/// Behind each artifact, hexadecimal.
const DIGEST_CHARS: usize = 64;
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

    /// Where the compiled form of `bytes` is kept; nowhere when another user could put a file there.
    pub(crate) fn entry(self: &Arc<Self>, engine: &Engine, bytes: &[u8]) -> Option<Entry> {
        let path = self.dir.join(format!("{}.cwasm", Self::key(engine, bytes)));
        self.is_private().then(|| Entry { cache: Arc::clone(self), path })
    }

    /// Names the component's content and everything that the compiled form depends on. What is found is not surveyed
    /// again, and another version of this crate may have other limits.
    fn key(engine: &Engine, bytes: &[u8]) -> String {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut compatibility = DefaultHasher::new();
        env!("CARGO_PKG_VERSION").hash(&mut compatibility);
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
        let digest = file.split_off(file.len().checked_sub(DIGEST_CHARS)?);
        Artifact::verified(file, std::str::from_utf8(&digest).ok()?)?.component(engine).ok()
    }

    /// Written aside and renamed, so that no other process or thread sees half a file.
    fn store(path: &Path, artifact: &Artifact) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let aside = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
        let write = || {
            let mut file = create_private(&aside)?;
            file.write_all(artifact.bytes())?;
            file.write_all(artifact.sha256().as_bytes())?;
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

/// The place of one compiled component. A cache that cannot be read or written costs only the compilation.
pub(crate) struct Entry {
    cache: Arc<Cache>,
    path: PathBuf,
}

impl Entry {
    /// The component, when it is there and sound.
    pub(crate) fn load(&self, engine: &Engine) -> Option<Component> {
        Cache::load(engine, &self.path)
    }

    pub(crate) fn store(&self, artifact: &Artifact) {
        let _ = Cache::store(&self.path, artifact);
        let _ = self.cache.tidy();
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
