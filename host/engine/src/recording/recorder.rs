//! The thread that writes: one per process, for every slot.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use meridian_core::{Budget, Dispatch, Eviction, SlotName};

use super::folder::Folder;
use super::kinds::Recordable;
use super::row::{Recorded, RecordedPolicy};
use super::tap::{Shared, SlotSetup, Tap};
use super::writer::Writer;
use crate::control::RecordingStatus;
use crate::private;

/// Most records that wait for the writer, of all slots; a decision that finds no room is dropped.
const QUEUE: usize = 256;
/// How long [`Recorder::close`] waits for the disk.
const CLOSING: Duration = Duration::from_secs(5);

/// The folder of recordings, and their limits.
#[derive(Clone, Debug, PartialEq)]
pub struct RecorderSettings {
    /// The folder; made with mode 0700, used if it belongs to this user.
    pub dir: PathBuf,
    /// Most bytes of all files of this recorder and of ended recorders; the oldest files are deleted.
    pub max_bytes: u64,
    /// Approximate size of a file, bytes.
    pub file_bytes: u64,
    /// Longest time span of the decisions in a file, milliseconds on the host's clock.
    pub file_age_ms: f64,
    /// Approximate size of a batch, bytes: a killed process may lose this much.
    pub batch_bytes: usize,
    /// Longest time until a batch is written.
    pub batch_age: Duration,
}

impl RecorderSettings {
    /// At most `max_mib` MiB in `dir`: in files of an eighth of that, of at most 32 MiB and 15 minutes.
    #[must_use]
    pub fn new(dir: PathBuf, max_mib: u32) -> Self {
        let max_bytes = u64::from(max_mib) << 20;
        let file_bytes = (max_bytes / 8).min(32 << 20);
        Self {
            dir,
            max_bytes,
            file_bytes,
            file_age_ms: 900_000.0,
            batch_bytes: usize::try_from(file_bytes / 4).unwrap_or(usize::MAX).min(1 << 20),
            batch_age: Duration::from_secs(1),
        }
    }
}

/// The state that the writer publishes.
#[derive(Debug, Default)]
pub struct Progress {
    /// The recorder is closing.
    pub(super) closing: AtomicBool,
    /// The disk failed: every decision counts as dropped.
    pub(super) broken: AtomicBool,
    pub(super) recorded: AtomicU64,
    /// Decisions that the writer lost.
    pub(super) lost: AtomicU64,
    pub(super) bytes: AtomicU64,
    why: Mutex<Option<String>>,
}

impl Progress {
    pub(super) fn fail(&self, why: String) {
        tracing::error!(why, "the recording stops; the engine goes on");
        *self.why.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
        self.broken.store(true, Ordering::Relaxed);
    }
}

/// A record on its way to the writer and back.
pub struct Queued<K: Recordable> {
    pub(super) row: Recorded<K>,
    pub(super) policy: Arc<RecordedPolicy>,
    /// Returns the record for reuse of its memory.
    home: SyncSender<Box<Self>>,
}

impl<K: Recordable> Queued<K> {
    pub(super) fn boxed(home: SyncSender<Box<Self>>, policy: Arc<RecordedPolicy>) -> Box<Self> {
        Box::new(Self { row: Recorded::default(), policy, home })
    }

    /// Return a written record.
    pub(super) fn go_home(self: Box<Self>) {
        let home = self.home.clone();
        // Without room there, or without a slot, the memory is freed.
        let _ = home.try_send(self);
    }
}

/// A message to the writer's thread.
pub enum Item {
    Dispatch(Box<Queued<Dispatch>>),
    Eviction(Box<Queued<Eviction>>),
    Budget(Box<Queued<Budget>>),
    /// Write the buffered records, and answer.
    Flush(SyncSender<()>),
}

/// Records the decisions of slots, see [`SlotControl::record`](meridian_core::slot::SlotControl::record). Dropping it closes it.
pub struct Recorder {
    queue: SyncSender<Item>,
    watch: RecordingWatch,
    running: Option<Running>,
}

struct Running {
    /// A forked child does not have the thread.
    pid: u32,
    thread: JoinHandle<()>,
    /// Closed by the thread when it ends.
    ended: Receiver<()>,
}

impl Recorder {
    /// Make the folder if it does not exist, and start the thread. Call it in the deciding process, after any fork.
    ///
    /// # Errors
    /// The folder and the reason why it cannot be used, in one line.
    pub fn start(settings: RecorderSettings) -> Result<Self, String> {
        let shown = settings.dir.display().to_string();
        // An existing folder keeps its mode: it may be a home folder.
        let is_there = settings.dir.symlink_metadata().is_ok();
        let checked = if is_there { private::check_dir(&settings.dir) } else { private::make_dir(&settings.dir) };
        checked.map_err(|reason| format!("{shown}: {reason}"))?;
        let folder = Folder::new(settings.dir.clone(), run(), settings.max_bytes)
            .map_err(|error| format!("{shown}: cannot be read: {error}"))?;
        let (queue, items) = sync_channel(QUEUE);
        let progress = Arc::new(Progress::default());
        let slots: [Arc<Shared>; 3] = Default::default();
        let watch = RecordingWatch { dir: shown, progress: Arc::clone(&progress), slots: slots.clone() };
        let writer = Writer::new(folder, settings, progress, slots);
        let (ending, ended) = sync_channel::<()>(1);
        let thread = std::thread::Builder::new()
            .name("meridian-record".into())
            .spawn(move || {
                writer.run(&items);
                drop(ending);
            })
            .map_err(|error| format!("no thread for a recording: {error}"))?;
        Ok(Self { queue, watch, running: Some(Running { pid: std::process::id(), thread, ended }) })
    }

    /// The deciding thread's end for a slot of kind `K`, one per process.
    #[must_use]
    pub fn tap<K: Recordable>(&self, setup: SlotSetup) -> Tap<K> {
        let RecordingWatch { progress, slots, .. } = &self.watch;
        Tap::new(self.queue.clone(), Arc::clone(progress), Arc::clone(&slots[index(K::NAME)]), setup)
    }

    /// A handle for status requests, from any thread.
    #[must_use]
    pub fn watch(&self) -> RecordingWatch {
        self.watch.clone()
    }

    /// Wait until all earlier decisions are in a file; for tests and tools. False when that takes longer than some
    /// seconds, or the recording has stopped.
    #[must_use]
    pub fn flush(&self) -> bool {
        let Some(running) = &self.running else { return false };
        let (done, wait) = sync_channel(1);
        // The writer empties a full queue by itself, or has ended.
        let sent = self.queue.send(Item::Flush(done)).is_ok();
        running.thread.thread().unpark();
        sent && wait.recv_timeout(CLOSING).is_ok()
    }

    /// Write the queued records, and end the file and the thread. Returns after some seconds at most, whatever the disk
    /// does.
    pub fn close(self) {
        drop(self);
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        let Some(Running { pid, thread, ended }) = self.running.take() else { return };
        if pid != std::process::id() {
            std::mem::forget((thread, ended));
            return;
        }
        self.watch.progress.closing.store(true, Ordering::Release);
        thread.thread().unpark();
        match ended.recv_timeout(CLOSING) {
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!(dir = self.watch.dir, "a recording is not closed: its disk does not answer");
            }
            // The panic hook has reported a panic of the thread.
            _ => drop(thread.join()),
        }
    }
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Recorder").field("status", &self.watch.status()).finish_non_exhaustive()
    }
}

/// Shows the state of a recording; clones share it.
#[derive(Clone, Debug)]
pub struct RecordingWatch {
    dir: String,
    progress: Arc<Progress>,
    slots: [Arc<Shared>; 3],
}

impl RecordingWatch {
    /// The state of the recording.
    #[must_use]
    pub fn status(&self) -> RecordingStatus {
        let Progress { closing: _, broken: _, recorded, lost, bytes, why } = &*self.progress;
        let dropped: u64 = self.slots.iter().map(|slot| slot.dropped.load(Ordering::Relaxed)).sum();
        RecordingStatus {
            dir: self.dir.clone(),
            recorded: recorded.load(Ordering::Relaxed),
            dropped: dropped + lost.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
            stopped: why.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        Path::new(&self.dir)
    }
}

pub(super) fn index(slot: SlotName) -> usize {
    slot as usize
}

/// The identity of this recorder, also distinct from processes with the same id elsewhere.
fn run() -> String {
    // The only randomness of the standard library: a hasher's keys.
    format!("{}-{:016x}", std::process::id(), RandomState::new().build_hasher().finish())
}
