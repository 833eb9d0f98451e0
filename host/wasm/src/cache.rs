//! Compiled components on disk, so that an engine process starts in microseconds instead of compiling.
#![expect(unsafe_code, reason = "wasmtime cannot prove that a compiled artifact is its own")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use wasmtime::component::Component;
use wasmtime::{Engine, Result};

const DIGEST_BYTES: usize = 32;

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
        let file = fs::read(path).ok()?;
        let (artifact, digest) = file.split_at_checked(file.len().checked_sub(DIGEST_BYTES)?)?;
        if Sha256::digest(artifact).as_slice() != digest {
            return None;
        }
        // SAFETY: `deserialize` trusts its input to come from `serialize`. The digest rules out truncation and
        // corruption; that nobody else wrote the file follows from `is_private`: the folder belongs to this user and no
        // other may write it. wasmtime itself checks version, target and settings.
        unsafe { Component::deserialize(engine, artifact) }.ok()
    }

    /// Written aside and renamed, so that no other process sees half a file.
    fn store(&self, path: &Path, artifact: &[u8]) -> std::io::Result<()> {
        let aside = path.with_extension(format!("{}.tmp", std::process::id()));
        let mut file = fs::File::create(&aside)?;
        file.write_all(artifact)?;
        file.write_all(&Sha256::digest(artifact))?;
        file.sync_all()?;
        fs::rename(&aside, path)
    }

    /// Makes the folder if need be; false when another user could put a file into it.
    #[cfg(unix)]
    fn is_private(&self) -> bool {
        use std::os::unix::fs::{DirBuilderExt, MetadataExt};
        let _ = fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir);
        // A process's own folder in /proc carries its user id; without /proc nothing is cached.
        let (Ok(folder), Ok(own)) = (fs::symlink_metadata(&self.dir), fs::metadata("/proc/self")) else { return false };
        folder.is_dir() && folder.uid() == own.uid() && folder.mode() & 0o022 == 0
    }

    #[cfg(not(unix))]
    fn is_private(&self) -> bool {
        false
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
