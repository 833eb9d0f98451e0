//! A compiled component as bytes, and the one place where such bytes become code.
#![expect(unsafe_code, reason = "wasmtime cannot prove that a compiled artifact is its own")]

#[cfg(target_os = "linux")]
use std::{io::Write, os::fd::AsRawFd};

use sha2::{Digest, Sha256};
use wasmtime::component::Component;
use wasmtime::{Engine, Result};

use crate::cache::hex;

/// What wasmtime wrote when it compiled a component: in this process, in one that this process started to do so, or in
/// an earlier one that left it in the cache.
pub(crate) struct Artifact {
    bytes: Vec<u8>,
    /// Lower-case hexadecimal.
    sha256: String,
}

impl Artifact {
    /// What `serialize` returned.
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        let sha256 = hex(&Sha256::digest(&bytes));
        Self { bytes, sha256 }
    }

    /// Bytes that came back from where only this program's compiler writes; `None` when they are not those that it wrote.
    pub(crate) fn verified(bytes: Vec<u8>, sha256: &str) -> Option<Self> {
        let artifact = Self::new(bytes);
        (artifact.sha256 == sha256).then_some(artifact)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn sha256(&self) -> &str {
        &self.sha256
    }

    /// # Errors
    /// Another version of wasmtime made it, or one with other settings or for another processor.
    pub(crate) fn component(&self, engine: &Engine) -> Result<Component> {
        #[cfg(target_os = "linux")]
        if let Some(component) = self.mapped(engine) {
            return Ok(component);
        }
        // SAFETY: `deserialize` trusts its input to come from `serialize`. An artifact is made in three places.
        // `Runtime::compile` compiles itself. `Children::compile` reads a pipe whose other end only
        // the process has that it started, from a program that the host's own code names; the compiler in it is the one
        // that would otherwise run here, and a component that subverts it gains no more than it would here. `Cache::load`
        // reads a file that belongs to this user, in a folder that does, and no other user may write either. In the
        // last two, the digest rules out truncation and corruption. wasmtime itself checks version, target and settings.
        unsafe { Component::deserialize(engine, &self.bytes) }
    }

    /// The same from a file in memory, which is then the image of each new instance's memory. wasmtime would copy bytes into
    /// an image at the first instance, and seal it, which Linux refuses while other work of the machine holds its pages.
    #[cfg(target_os = "linux")]
    fn mapped(&self, engine: &Engine) -> Option<Component> {
        let mut file = memfd::MemfdOptions::new().create("meridian-artifact").ok()?.into_file();
        file.write_all(&self.bytes).ok()?;
        // SAFETY: as above. The file has no name, so only this process writes it, and it does not from here on.
        unsafe { Component::deserialize_file(engine, format!("/proc/self/fd/{}", file.as_raw_fd())) }.ok()
    }
}
