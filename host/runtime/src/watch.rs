//! A component that is rewritten becomes active by itself.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use meridian_core::signature::{MAX_SIGNATURE_BYTES, signature_path};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use sha2::{Digest, Sha256};

use crate::control::{Control, ControlError, MAX_COMPONENT_BYTES, Mode, SlotName, SwapReport, Upload};

/// How long a folder has to be quiet before its file is read: an editor writes in several steps.
const QUIET: Duration = Duration::from_millis(100);
const MAX_BYTES: u64 = MAX_COMPONENT_BYTES as u64;

/// The file of a slot's policy, and what was last seen of it.
pub struct WatchedFile {
    path: PathBuf,
    slot: SlotName,
    control: Arc<dyn Control>,
    seen: Seen,
}

/// What is known of the file's content.
#[derive(Clone, Debug, PartialEq)]
enum Seen {
    /// This content. It is `settled` when the slot has it; one that was refused may do with another signature.
    Content { stamp: Stamp, sha256: [u8; 32], signature: Option<Stamp>, settled: bool },
    /// It could not be read; why was said.
    Unreadable(String),
}

/// Tells most changes without reading the file.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_ns: (i64, i64),
    changed_ns: (i64, i64),
}

impl Stamp {
    fn of(found: &Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.size(),
            modified_ns: (found.mtime(), found.mtime_nsec()),
            changed_ns: (found.ctime(), found.ctime_nsec()),
        }
    }
}

/// What a look at the file led to.
#[derive(Clone, Debug, PartialEq)]
pub enum Looked {
    /// The content is what it was, or is as unreadable as it was.
    Unchanged,
    /// It cannot be read: deleted, a folder, too large. The active policy stays.
    Unreadable(String),
    /// It was read and refused. The active policy stays.
    Refused(String),
    /// It is active.
    Swapped(Box<SwapReport>),
}

impl WatchedFile {
    /// Watch `path`, whose present content is what the slot runs.
    pub fn new(path: &Path, slot: SlotName, control: Arc<dyn Control>) -> Self {
        let seen = match read(path) {
            Ok((stamp, bytes)) => {
                let sha256 = Sha256::digest(&bytes).into();
                Seen::Content { stamp, sha256, signature: None, settled: true }
            }
            Err(why) => Seen::Unreadable(why),
        };
        Self { path: path.to_owned(), slot, control, seen }
    }

    /// Look whether the content has changed, and put what is new into the slot; what comes of it is logged where it
    /// happens. Takes as long as compiling takes.
    pub fn look(&mut self) -> Looked {
        let stamp_of = |path: &Path| std::fs::metadata(path).ok().map(|found| Stamp::of(&found));
        let beside = signature_path(&self.path);
        let (known, signed) = (stamp_of(&self.path), stamp_of(&beside));
        let as_before = |settled: bool, signature: Option<Stamp>| settled || signature == signed;
        if matches!(&self.seen, Seen::Content { stamp, signature, settled, .. }
            if Some(*stamp) == known && as_before(*settled, *signature))
        {
            return Looked::Unchanged;
        }
        let (stamp, bytes) = match read(&self.path) {
            Ok(found) => found,
            Err(why) => {
                if self.seen == Seen::Unreadable(why.clone()) {
                    return Looked::Unchanged;
                }
                tracing::warn!(file = %self.path.display(), why, "the policy's file cannot be read; the active one stays");
                self.seen = Seen::Unreadable(why.clone());
                return Looked::Unreadable(why);
            }
        };
        let sha256: [u8; 32] = Sha256::digest(&bytes).into();
        if let Seen::Content { stamp: old, sha256: same, signature, settled } = &mut self.seen
            && *same == sha256
            && as_before(*settled, *signature)
        {
            *old = stamp;
            return Looked::Unchanged;
        }
        let text = read_signature(&beside);
        let source = self.path.display().to_string();
        let upload = Upload { component: &bytes, signature: text.as_deref(), source: &source };
        let put = self.control.put(self.slot, &upload, Mode::Active);
        self.seen = Seen::Content { stamp, sha256, signature: signed, settled: put.is_ok() };
        match put {
            Ok(report) => Looked::Swapped(Box::new(report)),
            Err(ControlError::Refused(why)) => Looked::Refused(why),
            Err(other) => Looked::Refused(other.to_string()),
        }
    }
}

/// The signature beside the file; `None` when there is none that can be read. One byte too many shows that it is too large.
fn read_signature(path: &Path) -> Option<String> {
    // Opening a pipe would wait for its other end.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MAX_SIGNATURE_BYTES as u64 + 1).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Stamp and content of a regular file of at most 32 MiB.
fn read(path: &Path) -> Result<(Stamp, Vec<u8>), String> {
    // Opening a pipe would wait for its other end.
    let found = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !found.is_file() {
        return Err("not a regular file".into());
    }
    if found.size() > MAX_BYTES {
        return Err(format!("{} bytes, expected at most {MAX_BYTES}", found.size()));
    }
    let file = File::open(path).map_err(|error| error.to_string())?;
    let found = file.metadata().map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("more than {MAX_BYTES} bytes"));
    }
    Ok((Stamp::of(&found), bytes))
}

/// Looks at a file whenever something changes in its folder. Dropping it stops its threads.
pub struct FileWatch {
    watcher: Option<RecommendedWatcher>,
    thread: Option<JoinHandle<()>>,
}

impl FileWatch {
    /// Watch the folder of `file`: a file that is replaced by renaming, or through a symbolic link, is another file.
    ///
    /// # Errors
    /// The folder cannot be watched; one line.
    pub fn start(mut file: WatchedFile) -> Result<Self, String> {
        let folder = match file.path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let (changed, changes) = channel();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Reading the file is an event too.
            if !event.is_ok_and(|event| event.kind.is_access()) {
                let _ = changed.send(());
            }
        })
        .map_err(|error| format!("cannot watch files: {error}"))?;
        watcher
            .watch(&folder, RecursiveMode::NonRecursive)
            .map_err(|error| format!("{}: cannot be watched: {error}", folder.display()))?;
        let thread = std::thread::Builder::new()
            .name("meridian-watch".into())
            .spawn(move || {
                // What changed while the watch was set up.
                file.look();
                while wait_for_quiet(&changes) {
                    file.look();
                }
            })
            .map_err(|error| format!("no thread for the file watch: {error}"))?;
        Ok(Self { watcher: Some(watcher), thread: Some(thread) })
    }
}

/// Wait for a change and then until no further one comes; false when the watch is over.
fn wait_for_quiet(changes: &Receiver<()>) -> bool {
    if changes.recv().is_err() {
        return false;
    }
    loop {
        match changes.recv_timeout(QUIET) {
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        // Ends the channel, and with it the thread.
        self.watcher.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
