//! Fetched components on disk, so that an engine starts while its registry is down.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use meridian_core::file::read_regular;
use meridian_core::signature::CosignSignature;
use serde::{Deserialize, Serialize};

use crate::digest::check;

/// Files that are kept; those that were not used for longest go.
const MAX_FILES: usize = 192;
/// A file that is still being written after so long has lost its writer.
const ABANDONED_AFTER: Duration = Duration::from_secs(600);
/// Largest file with signatures, bytes.
const MAX_SIGNATURES_BYTES: u64 = 2 << 20;

/// A folder whose files are named by the digest of their content. What does not have its name's digest is not there, so
/// it does not matter who else may write the folder.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    dir: PathBuf,
}

/// The signatures of a manifest as they were fetched last; whoever loads a component verifies them.
#[derive(Default, Deserialize, Serialize)]
struct Signatures {
    minisign: Vec<String>,
    /// Payload in base64, and signature.
    cosign: Vec<(String, String)>,
}

impl Store {
    pub(crate) fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// The bytes of this digest.
    pub(crate) fn read(&self, digest: &str, limit: u64) -> Option<Vec<u8>> {
        let path = self.path(digest, "");
        let bytes = read_regular(&path, limit).ok()??;
        check("", &bytes, digest).ok()?;
        // The newest stay when there are too many.
        let _ = File::open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(bytes)
    }

    /// A store that cannot be written costs only the next fetch.
    pub(crate) fn write(&self, digest: &str, bytes: &[u8]) {
        self.put(&self.path(digest, ""), bytes);
    }

    pub(crate) fn read_signatures(&self, manifest_digest: &str) -> (Vec<String>, Vec<CosignSignature>) {
        let read = read_regular(&self.path(manifest_digest, ".signatures"), MAX_SIGNATURES_BYTES);
        let Signatures { minisign, cosign } =
            read.ok().flatten().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let cosign = cosign.into_iter().filter_map(|(payload, signature)| {
            Some(CosignSignature { payload: BASE64_STANDARD.decode(payload).ok()?, signature })
        });
        (minisign, cosign.collect())
    }

    pub(crate) fn write_signatures(&self, manifest_digest: &str, minisign: &[String], cosign: &[CosignSignature]) {
        let cosign = cosign
            .iter()
            .map(|CosignSignature { payload, signature }| (BASE64_STANDARD.encode(payload), signature.clone()))
            .collect();
        let signatures = Signatures { minisign: minisign.to_vec(), cosign };
        let bytes = serde_json::to_vec(&signatures).expect("texts are JSON");
        self.put(&self.path(manifest_digest, ".signatures"), &bytes);
    }

    fn path(&self, digest: &str, end: &str) -> PathBuf {
        self.dir.join(format!("{}{end}", digest.replace(':', "-")))
    }

    fn put(&self, path: &Path, bytes: &[u8]) {
        let written = self.written(path, bytes).and_then(|()| self.tidy());
        if let Err(error) = written {
            tracing::debug!(file = %path.display(), %error, "a fetched component is not kept");
        }
    }

    /// Written aside and renamed, so that no other process or thread sees half a file.
    fn written(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let mut folder = fs::DirBuilder::new();
        let mut options = File::options();
        #[cfg(unix)]
        {
            std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        }
        folder.recursive(true).create(&self.dir)?;
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".{}-{number}.tmp", std::process::id()));
        let aside = PathBuf::from(aside);
        let mut file = options.write(true).create_new(true).open(&aside)?;
        let write = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&aside, path));
        write.inspect_err(|_| drop(fs::remove_file(&aside)))
    }

    /// Remove what writers left behind when they were killed, and the files that were not used for longest.
    fn tidy(&self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let (path, modified) = (entry.path(), entry.metadata()?.modified()?);
            if path.extension().is_some_and(|extension| extension == "tmp") {
                if modified.elapsed().is_ok_and(|age| age > ABANDONED_AFTER) {
                    fs::remove_file(path)?;
                }
            } else {
                files.push((modified, path));
            }
        }
        files.sort();
        let excess = files.len().saturating_sub(MAX_FILES);
        files.drain(..excess).try_for_each(|(_, path)| fs::remove_file(path))
    }
}
