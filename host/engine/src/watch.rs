//! Automatic reload: a rewritten component becomes active, or the shadow.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use meridian_core::file::read_regular;
use meridian_core::signature::signature_path;
use meridian_wasm::read_signature;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use sha2::{Digest, Sha256};

use crate::control::{
    Control, ControlError, Given, MAX_COMPONENT_BYTES, Mode, SlotName, SwapReport, UNCHANGED, Upload,
};

const MAX_BYTES: u64 = MAX_COMPONENT_BYTES as u64;
/// File times distinguish two changes only if the file system's clock has moved on: 10 ms at most on Linux, a second on
/// some mounted file systems.
const CLOCK_GRAIN: Duration = Duration::from_secs(1);

/// How soon a change is noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Time that a folder must be quiet before its file is read: an editor writes in several steps.
    pub quiet: Duration,
    /// Time after which the file is read although the folder is not quiet: other files may be in it.
    pub patience: Duration,
    /// Interval of polling the file's times, for changes without a notification: the folder was replaced, a link leads
    /// to another folder, the file system is remote.
    pub poll: Duration,
    /// Time that dropping the watch waits for an unfinished look.
    pub close: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            quiet: Duration::from_millis(100),
            patience: Duration::from_secs(1),
            poll: Duration::from_secs(2),
            close: Duration::from_secs(2),
        }
    }
}

/// The file of a slot's policy, and its last known state.
pub struct WatchedFile {
    path: PathBuf,
    slot: SlotName,
    mode: Mode,
    control: Arc<dyn Control>,
    /// SHA-256 of the content that was last loaded or refused, hexadecimal. It outlives the file: a file that returns
    /// unchanged is not loaded again, which would lose the previous version.
    content: String,
    seen: LastRead,
    /// The signature that the content was refused with; with another signature, it may be accepted.
    refused_with: Option<Option<Stamp>>,
}

/// The result of the last read.
#[derive(Clone, Debug, PartialEq)]
enum LastRead {
    /// It was read; `None` when its times cannot show the next change.
    Read(Option<Stamp>),
    /// It could not be read, for this reason, which was logged.
    Unreadable(String),
}

/// Shows most changes without reading the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified_ns: (i64, i64),
    changed_ns: (i64, i64),
}

impl Stamp {
    /// The stamp of the file, if it can show the next change.
    pub(crate) fn settled(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().map(|found| Self::of(&found)).filter(Self::is_settled)
    }

    /// Whether the file has this stamp.
    pub(crate) fn is_of(&self, path: &Path) -> bool {
        std::fs::metadata(path).is_ok_and(|found| Self::of(&found) == *self)
    }

    fn of(found: &Metadata) -> Self {
        Self {
            device: found.dev(),
            inode: found.ino(),
            bytes: found.size(),
            modified_ns: (found.mtime(), found.mtime_nsec()),
            changed_ns: (found.ctime(), found.ctime_nsec()),
        }
    }

    /// Whether a later change will have another time.
    fn is_settled(&self) -> bool {
        let (seconds, nanoseconds) = self.changed_ns;
        let (Ok(seconds), Ok(nanoseconds)) = (u64::try_from(seconds), u32::try_from(nanoseconds)) else { return false };
        let changed = UNIX_EPOCH + Duration::new(seconds, nanoseconds);
        SystemTime::now().duration_since(changed).is_ok_and(|age| age > CLOCK_GRAIN)
    }
}

/// The result of a look at the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Looked {
    /// The content is unchanged, or is unreadable for the same reason.
    Unchanged,
    /// It cannot be read: deleted, a folder, too large. The active policy stays.
    Unreadable(String),
    /// It was read and refused. The active policy stays.
    Refused(String),
    /// It was read, and could not be loaded now. The active policy stays; the next look retries.
    Busy(String),
    /// It is active, or in shadow where the file is a shadow's.
    Swapped(Box<SwapReport>),
}

impl WatchedFile {
    /// Watch `path` for a slot that runs the component of this SHA-256, lower-case hexadecimal. This call reads
    /// nothing: the first look finds a file that has changed since it was loaded.
    pub fn new(path: &Path, slot: SlotName, control: Arc<dyn Control>, running_sha256: &str) -> Self {
        let content = running_sha256.to_owned();
        let (path, mode) = (path.to_owned(), Mode::Active);
        Self { path, slot, mode, control, content, seen: LastRead::Read(None), refused_with: None }
    }

    /// Watch for a policy in another mode: in shadow mode, new content becomes the new shadow.
    #[must_use]
    pub fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// Check whether the content has changed, and put new content into the slot. The code that acts logs the result.
    /// Takes as long as a compilation.
    pub fn look(&mut self) -> Looked {
        let signed = self.signed();
        let signed_anew = self.is_signed_anew(signed);
        if !signed_anew && !self.may_have_changed() {
            return Looked::Unchanged;
        }
        let (stamp, bytes) = match read(&self.path) {
            Ok(found) => found,
            Err(why) => {
                let seen = LastRead::Unreadable(why.clone());
                if self.seen == seen {
                    return Looked::Unchanged;
                }
                tracing::warn!(file = %self.path.display(), why, "the policy's file cannot be read; the active one stays");
                self.seen = seen;
                return Looked::Unreadable(why);
            }
        };
        let sha256: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        self.seen = LastRead::Read(stamp);
        if self.content == sha256 && !signed_anew {
            return Looked::Unchanged;
        }
        // Noted first: a component that makes the host panic is not retried.
        let content = std::mem::replace(&mut self.content, sha256);
        let text = read_signature(&signature_path(&self.path)).ok().flatten();
        let source = self.path.display().to_string();
        let policy = Given::Component { bytes: &bytes, signature: text.as_deref() };
        let put = self.control.put(self.slot, &Upload { policy, options: None, source: &source }, self.mode);
        if let Err(ControlError::Busy(why)) = put {
            // As if the file had not been read.
            (self.content, self.seen) = (content, LastRead::Read(None));
            return Looked::Busy(why);
        }
        self.refused_with = put.is_err().then_some(signed);
        match put {
            // Another caller put it there.
            Ok(report) if report.action == UNCHANGED => Looked::Unchanged,
            Ok(report) => Looked::Swapped(Box::new(report)),
            Err(error) => Looked::Refused(error.to_string()),
        }
    }

    fn signed(&self) -> Option<Stamp> {
        std::fs::metadata(signature_path(&self.path)).ok().map(|found| Stamp::of(&found))
    }

    /// Whether the content was refused with another signature.
    fn is_signed_anew(&self, signed: Option<Stamp>) -> bool {
        self.refused_with.is_some_and(|before| before != signed)
    }

    /// False when the file's times show that its content is unchanged.
    fn may_have_changed(&self) -> bool {
        let LastRead::Read(Some(stamp)) = &self.seen else { return true };
        !stamp.is_of(&self.path)
    }
}

/// A file that a [`FileWatch`] looks at, on the thread of the watch.
pub(crate) trait Watched: Send + 'static {
    /// Its path. The watch follows the folder of this path.
    fn path(&self) -> &Path;
    /// Whether a look may find a change. Takes microseconds.
    fn needs_look(&self) -> bool;
    /// Look, and act on a change.
    fn look(&mut self);
}

impl Watched for WatchedFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn needs_look(&self) -> bool {
        self.is_signed_anew(self.signed()) || self.may_have_changed()
    }

    fn look(&mut self) {
        Self::look(self);
    }
}

/// Stamp, if it can show the next change, and content of a regular file of at most 32 MiB.
fn read(path: &Path) -> Result<(Option<Stamp>, Vec<u8>), String> {
    // Taken before reading, so that a write during the read gives another stamp.
    let stamp = Stamp::settled(path);
    let bytes = read_regular(path, MAX_BYTES).map_err(|error| error.to_string())?;
    Ok((stamp, bytes.ok_or_else(|| format!("more than {MAX_BYTES} bytes, expected at most that"))?))
}

/// Looks at a file when its folder changes, and at intervals. Dropping it stops its threads; a thread that waits for
/// the compiler ends by itself, after [`Pace::close`].
pub struct FileWatch {
    watcher: Option<RecommendedWatcher>,
    thread: Option<JoinHandle<()>>,
    /// Closed by the thread when it ends.
    ended: Receiver<()>,
    close: Duration,
}

impl FileWatch {
    /// Watch the folder of `file`: a file that is replaced by renaming, or through a symbolic link, is another file.
    ///
    /// # Errors
    /// The folder cannot be watched; one line.
    pub fn start(file: WatchedFile) -> Result<Self, String> {
        Self::start_at(file, Pace::default())
    }

    /// As [`start`](Self::start), at another pace.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_at(file: WatchedFile, pace: Pace) -> Result<Self, String> {
        Self::over(file, pace)
    }

    /// Watch any file.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub(crate) fn over(mut file: impl Watched, pace: Pace) -> Result<Self, String> {
        let folder = match file.path().parent() {
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
        let (ending, ended) = channel::<()>();
        let thread = std::thread::Builder::new()
            .name("meridian-watch".into())
            .spawn(move || {
                let _ending = ending;
                // Changes during the setup of the watch.
                look(&mut file);
                while wait_for_change(&changes, &pace, &file) {
                    look(&mut file);
                }
            })
            .map_err(|error| format!("no thread for the file watch: {error}"))?;
        Ok(Self { watcher: Some(watcher), thread: Some(thread), ended, close: pace.close })
    }
}

/// A panic of the host over a component ends this look, not the watch.
fn look(file: &mut impl Watched) {
    if catch_unwind(AssertUnwindSafe(|| file.look())).is_err() {
        let file = file.path().display();
        tracing::error!(%file, "the host panicked over a watched file; nothing changed, and the file is watched on");
    }
}

/// Wait for a change, and then until no further one comes; false when the watch is over.
fn wait_for_change(changes: &Receiver<()>, pace: &Pace, file: &impl Watched) -> bool {
    loop {
        match changes.recv_timeout(pace.poll) {
            Ok(()) => break,
            Err(RecvTimeoutError::Timeout) if file.needs_look() => break,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
    let first = Instant::now();
    loop {
        let patience = pace.patience.saturating_sub(first.elapsed());
        match changes.recv_timeout(pace.quiet.min(patience)) {
            Ok(()) if patience.is_zero() => return true,
            Ok(()) => {}
            Err(RecvTimeoutError::Timeout) => return true,
            Err(RecvTimeoutError::Disconnected) => return false,
        }
    }
}

impl Drop for FileWatch {
    fn drop(&mut self) {
        // Ends the channel and therefore the thread.
        self.watcher.take();
        let Some(thread) = self.thread.take() else { return };
        if self.ended.recv_timeout(self.close) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the file watch is left to end by itself: a component is being compiled");
            return;
        }
        let _ = thread.join();
    }
}
