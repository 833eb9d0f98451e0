//! The files of a folder: names, and the bound on their bytes.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use meridian_core::SlotName;

/// Recordings of this process and of processes that have ended.
pub(super) struct Folder {
    dir: PathBuf,
    max_bytes: u64,
    /// Finished files, oldest first.
    finished: VecDeque<(PathBuf, u64)>,
    finished_bytes: u64,
}

impl Folder {
    /// Take stock of a folder. Files of other processes that run are theirs.
    pub(super) fn new(dir: PathBuf, max_bytes: u64) -> io::Result<Self> {
        let mut found: Vec<(SystemTime, PathBuf, u64)> = Vec::new();
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            let Some(pid) = entry.file_name().to_str().and_then(pid_of) else { continue };
            let is_running = pid != std::process::id() && Path::new(&format!("/proc/{pid}")).exists();
            let Ok(metadata) = entry.metadata() else { continue };
            if !is_running && metadata.is_file() {
                found.push((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), entry.path(), metadata.len()));
            }
        }
        found.sort();
        let finished: VecDeque<_> = found.into_iter().map(|(_, path, bytes)| (path, bytes)).collect();
        let finished_bytes = finished.iter().map(|(_, bytes)| bytes).sum();
        Ok(Self { dir, max_bytes, finished, finished_bytes })
    }

    /// Make the next file of a slot, counting on from `number`.
    pub(super) fn create(&self, slot: SlotName, number: &mut u32) -> io::Result<(PathBuf, File)> {
        loop {
            *number += 1;
            let path = self.dir.join(format!("{}-{}-{:06}.arrow", slot.label(), std::process::id(), number));
            // Read by nobody else: what is in it tells of requests. A name may be taken by a process of the same number.
            match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                opened => return opened.map(|file| (path, file)),
            }
        }
    }

    /// A file is complete.
    pub(super) fn finished(&mut self, path: PathBuf, bytes: u64) {
        self.finished_bytes += bytes;
        self.finished.push_back((path, bytes));
    }

    /// Delete the oldest finished files until all are within the bound, together with the `open_bytes` of those that are
    /// being written. Returns the bytes that are left.
    pub(super) fn hold(&mut self, open_bytes: u64) -> u64 {
        while self.finished_bytes + open_bytes > self.max_bytes {
            let Some((path, bytes)) = self.finished.pop_front() else { break };
            self.finished_bytes -= bytes;
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

/// The process in a name such as `dispatch-4711-000001.arrow`.
fn pid_of(name: &str) -> Option<u32> {
    let mut parts = name.strip_suffix(".arrow")?.split('-');
    let slot = parts.next()?;
    let pid = parts.next()?.parse().ok()?;
    let number = parts.next()?;
    let is_ours = SlotName::ALL.iter().any(|name| name.label() == slot)
        && number.len() >= 6
        && number.bytes().all(|byte| byte.is_ascii_digit())
        && parts.next().is_none();
    is_ours.then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recordings_are_known_by_their_names() {
        assert_eq!(pid_of("dispatch-4711-000001.arrow"), Some(4711));
        assert_eq!(pid_of("budget-1-1000000.arrow"), Some(1));
        for other in
            ["dispatch-4711-1.arrow", "trace-1-000001.arrow", "dispatch-x-000001.arrow", "dispatch-1-000001.arrow.gz"]
        {
            assert_eq!(pid_of(other), None, "{other}");
        }
    }
}
