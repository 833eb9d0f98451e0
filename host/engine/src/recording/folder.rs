//! The files of a folder: their names, and the limit on their total size.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use meridian_core::SlotName;

/// Recordings of this recorder and of ended recorders.
///
/// A writer locks its file. Process ids would not identify an engine in another container, which counts its own ids. On
/// a file system without locks, a recorder deletes only its own files.
pub(super) struct Folder {
    dir: PathBuf,
    /// Distinguishes this recorder's files from all others.
    run: String,
    max_bytes: u64,
    /// Finished files, oldest first.
    finished: VecDeque<(PathBuf, u64)>,
    finished_bytes: u64,
}

impl Folder {
    /// Read the state of a folder. Files that are being written belong to their writers.
    pub(super) fn new(dir: PathBuf, run: String, max_bytes: u64) -> io::Result<Self> {
        let mut found: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let Ok(metadata) = entry.metadata() else { continue };
            if entry.file_name().to_str().is_some_and(is_recording) && metadata.is_file() && !is_locked(&entry.path()) {
                found.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), entry.path(), metadata.len()));
            }
        }
        found.sort();
        let finished: VecDeque<_> = found.into_iter().map(|(_, path, bytes)| (path, bytes)).collect();
        let finished_bytes = finished.iter().map(|(_, bytes)| bytes).sum();
        Ok(Self { dir, run, max_bytes, finished, finished_bytes })
    }

    /// The identity of this recorder.
    pub(super) fn run(&self) -> &str {
        &self.run
    }

    /// Create the next file of a slot, counting on from `number`. It stays locked until it is dropped.
    pub(super) fn create(&self, slot: SlotName, number: &mut u32) -> io::Result<(PathBuf, File)> {
        loop {
            *number += 1;
            let path = self.dir.join(format!("{}-{}-{:06}.arrow", slot.label(), self.run, number));
            // Only the owner may read it: its contents describe requests.
            match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(file) => {
                    // Without locks, no process can find that it is not locked.
                    let _ = file.try_lock();
                    return Ok((path, file));
                }
            }
        }
    }

    fn is_own(&self, path: &Path) -> bool {
        path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.contains(&self.run))
    }

    /// Note a complete file.
    pub(super) fn finished(&mut self, path: PathBuf, bytes: u64) {
        self.finished_bytes += bytes;
        self.finished.push_back((path, bytes));
    }

    /// Delete the oldest finished files until all files, including `open_bytes` of open files, are within the limit.
    /// Returns the remaining bytes.
    pub(super) fn hold(&mut self, open_bytes: u64) -> u64 {
        while self.finished_bytes + open_bytes > self.max_bytes {
            let Some((path, bytes)) = self.finished.pop_front() else { break };
            self.finished_bytes -= bytes;
            if !self.is_own(&path) && is_locked(&path) {
                // It was found between its creation and its lock.
                continue;
            }
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "an old recording cannot be deleted");
                }
                _ => {}
            }
        }
        self.finished_bytes + open_bytes
    }
}

/// Whether a file is being written, or that is unknown.
fn is_locked(path: &Path) -> bool {
    OpenOptions::new().write(true).open(path).and_then(|file| Ok(file.try_lock()?)).is_err()
}

/// Whether this is a name such as `dispatch-4711-0123456789abcdef-000001.arrow`.
fn is_recording(name: &str) -> bool {
    let Some(parts) = name.strip_suffix(".arrow") else { return false };
    let parts: Vec<&str> = parts.split('-').collect();
    let [slot, pid, random, number] = parts[..] else { return false };
    SlotName::ALL.iter().any(|name| name.label() == slot)
        && pid.parse::<u32>().is_ok()
        && random.len() == 16
        && random.bytes().all(|byte| byte.is_ascii_hexdigit())
        && number.len() >= 6
        && number.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recordings_are_known_by_their_names() {
        for name in ["dispatch-4711-0123456789abcdef-000001.arrow", "budget-1-0123456789abcdef-1000000.arrow"] {
            assert!(is_recording(name), "{name}");
        }
        for other in [
            "dispatch-4711-000001.arrow",
            "dispatch-4711-0123456789abcdef-1.arrow",
            "dispatch-4711-0123456789abcde-000001.arrow",
            "dispatch-4711-0123456789abcdeg-000001.arrow",
            "trace-1-0123456789abcdef-000001.arrow",
            "dispatch-x-0123456789abcdef-000001.arrow",
            "dispatch-1-0123456789abcdef-000001.arrow.gz",
        ] {
            assert!(!is_recording(other), "{other}");
        }
    }
}
