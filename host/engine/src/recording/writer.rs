//! The work of the recording thread.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use meridian_core::{Budget, CONTRACT, Dispatch, Eviction};

use super::append::{Batch, schema};
use super::folder::Folder;
use super::ipc::IpcFile;
use super::kinds::Recordable;
use super::recorder::{Item, Progress, Queued, RecorderSettings, index};
use super::row::{Header, RecordedPolicy};
use super::tap::Shared;

/// Polling interval of the queue. Records do not wake the writer: the system call for that takes longer than all other
/// work of the deciding thread for a record.
const LOOK: Duration = Duration::from_millis(10);

pub(super) struct Writer {
    dispatch: SlotWriter<Dispatch>,
    eviction: SlotWriter<Eviction>,
    budget: SlotWriter<Budget>,
    common: Common,
    /// When the buffered records must be written.
    flush_at: Option<Instant>,
}

/// The state that the slots share.
struct Common {
    folder: Folder,
    settings: RecorderSettings,
    progress: Arc<Progress>,
    /// Bytes of the open files, by slot.
    open: [u64; 3],
}

struct SlotWriter<K: Recordable> {
    shared: Arc<Shared>,
    open: Option<Open>,
    number: u32,
    kind: std::marker::PhantomData<fn() -> K>,
}

/// A file that is being written.
struct Open {
    path: PathBuf,
    file: IpcFile,
    batch: Batch,
    policy: Arc<RecordedPolicy>,
    begun_ms: f64,
    /// Its successor starts with the next state of the policy.
    is_full: bool,
}

impl Writer {
    pub(super) fn new(
        folder: Folder,
        settings: RecorderSettings,
        progress: Arc<Progress>,
        slots: [Arc<Shared>; 3],
    ) -> Self {
        let [dispatch, eviction, budget] = slots;
        let mut common = Common { folder, settings, progress, open: [0; 3] };
        common.make_room(0);
        Self {
            dispatch: SlotWriter::new(dispatch),
            eviction: SlotWriter::new(eviction),
            budget: SlotWriter::new(budget),
            common,
            flush_at: None,
        }
    }

    /// Run until the recorder closes, or the disk fails.
    pub(super) fn run(mut self, items: &Receiver<Item>) {
        let done = self.follow(items).and_then(|()| self.finish());
        if let Err(error) = done {
            let why = format!("{}: {error}", self.common.settings.dir.display());
            // First the flag: later senders count for themselves.
            self.common.progress.fail(why);
            let queued = items.try_iter().filter(|item| !matches!(item, Item::Flush(_))).count();
            self.common.progress.lost.fetch_add((queued + self.buffered()) as u64, Ordering::Relaxed);
        }
    }

    fn follow(&mut self, items: &Receiver<Item>) -> io::Result<()> {
        loop {
            let is_closing = self.common.progress.closing.load(Ordering::Acquire);
            loop {
                match items.try_recv() {
                    Ok(item) => self.take(item)?,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return Ok(()),
                }
            }
            if is_closing {
                return Ok(());
            }
            if self.flush_at.is_some_and(|at| at <= Instant::now()) {
                self.flush()?;
            }
            thread::park_timeout(LOOK);
        }
    }

    fn take(&mut self, item: Item) -> io::Result<()> {
        let Self { dispatch, eviction, budget, common, flush_at } = self;
        let is_buffered = match item {
            Item::Dispatch(record) => dispatch.write(record, common),
            Item::Eviction(record) => eviction.write(record, common),
            Item::Budget(record) => budget.write(record, common),
            Item::Flush(done) => {
                self.flush()?;
                // The caller may have gone.
                let _ = done.try_send(());
                return Ok(());
            }
        }?;
        if is_buffered && flush_at.is_none() {
            *flush_at = Some(Instant::now() + common.settings.batch_age);
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flush_at = None;
        self.dispatch.flush(&mut self.common)?;
        self.eviction.flush(&mut self.common)?;
        self.budget.flush(&mut self.common)
    }

    fn finish(&mut self) -> io::Result<()> {
        self.dispatch.finish(&mut self.common)?;
        self.eviction.finish(&mut self.common)?;
        self.budget.finish(&mut self.common)
    }

    fn buffered(&self) -> usize {
        let rows = |open: &Option<Open>| open.as_ref().map_or(0, |open| open.batch.rows);
        rows(&self.dispatch.open) + rows(&self.eviction.open) + rows(&self.budget.open)
    }
}

impl Common {
    /// Delete old files, so that `bytes` more are within the limit.
    fn make_room(&mut self, bytes: u64) {
        let open: u64 = self.open.iter().sum();
        let kept = self.folder.hold(open + bytes);
        self.progress.bytes.store(kept - bytes, Ordering::Relaxed);
    }
}

impl<K: Recordable> SlotWriter<K> {
    fn new(shared: Arc<Shared>) -> Self {
        Self { shared, open: None, number: 0, kind: std::marker::PhantomData }
    }

    /// Add a record to the batch. Returns whether records are buffered.
    fn write(&mut self, mut record: Box<Queued<K>>, common: &mut Common) -> io::Result<bool> {
        let now_ms = K::now_ms(&record.row.facts);
        let begins = self.open.as_ref().is_none_or(|open| {
            !Arc::ptr_eq(&open.policy, &record.policy) || (open.is_full && record.row.snapshot.is_some())
        });
        if begins {
            let begun = self.finish(common).and_then(|()| self.begin(&record.policy, now_ms, common));
            if begun.is_err() {
                common.progress.lost.fetch_add(1, Ordering::Relaxed);
            }
            begun?;
        }
        let Some(open) = &mut self.open else { return Ok(false) };
        open.batch.append(&mut record.row);
        record.go_home();
        let is_full = open.file.bytes + open.batch.bytes as u64 >= common.settings.file_bytes
            || now_ms - open.begun_ms >= common.settings.file_age_ms;
        if is_full && !open.is_full {
            open.is_full = true;
            self.shared.wants_snapshot.store(true, Ordering::Relaxed);
        }
        if open.batch.bytes >= common.settings.batch_bytes {
            self.flush(common)?;
            return Ok(false);
        }
        Ok(true)
    }

    fn begin(&mut self, policy: &Arc<RecordedPolicy>, now_ms: f64, common: &mut Common) -> io::Result<()> {
        let (path, file) = common.folder.create(K::NAME, &mut self.number)?;
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let header = Header {
            format: Header::FORMAT,
            slot: K::NAME.label().into(),
            run: common.folder.run().to_owned(),
            file: self.number,
            opened_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            meridian: env!("CARGO_PKG_VERSION").into(),
            contract: CONTRACT.into(),
            policy: (**policy).clone(),
        };
        let schema = Arc::new(schema::<K>(&header));
        let batch = Batch::new::<K>(Arc::clone(&schema));
        let file = IpcFile::begin(file, schema)?;
        common.open[index(K::NAME)] = file.bytes;
        common.make_room(0);
        self.open = Some(Open { path, file, batch, policy: Arc::clone(policy), begun_ms: now_ms, is_full: false });
        Ok(())
    }

    fn flush(&mut self, common: &mut Common) -> io::Result<()> {
        let Some(open) = self.open.as_mut().filter(|open| open.batch.rows > 0) else { return Ok(()) };
        common.make_room(open.batch.bytes as u64);
        let rows = open.batch.rows as u64;
        let written = open.batch.take().map_err(io::Error::other).and_then(|batch| open.file.add(&batch));
        if written.is_err() {
            common.progress.lost.fetch_add(rows, Ordering::Relaxed);
        }
        written?;
        common.progress.recorded.fetch_add(rows, Ordering::Relaxed);
        common.open[index(K::NAME)] = open.file.bytes;
        common.make_room(0);
        Ok(())
    }

    /// End the file, and sync it to the disk.
    fn finish(&mut self, common: &mut Common) -> io::Result<()> {
        self.flush(common)?;
        let Some(Open { path, file, .. }) = self.open.take() else { return Ok(()) };
        file.sync()?;
        common.open[index(K::NAME)] = 0;
        common.folder.finished(path, file.bytes);
        common.make_room(0);
        Ok(())
    }
}
