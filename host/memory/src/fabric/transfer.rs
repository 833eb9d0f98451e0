//! A request that runs.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::fabric::{Clock, KvFabricError};

/// Between two looks at the clock.
const LOOK: Duration = Duration::from_millis(100);

/// Set once; wakes the threads that wait for it.
#[derive(Debug, Default)]
pub struct Signal {
    is_set: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    /// Set it.
    pub fn set(&self) {
        *locked(&self.is_set) = true;
        self.changed.notify_all();
    }

    /// Whether it is set.
    #[must_use]
    pub fn is_set(&self) -> bool {
        *locked(&self.is_set)
    }

    /// Wait until it is set, at most for `most` of the machine's time.
    pub fn wait(&self, most: Duration) {
        let waited = self.changed.wait_timeout_while(locked(&self.is_set), most, |is_set| !*is_set);
        drop(waited);
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Tells those who do the work to stop.
///
/// ```
/// let stop = meridian_memory::fabric::Stop::default();
/// assert!(!stop.is_asked());
/// stop.ask();
/// assert!(stop.is_asked());
/// ```
#[derive(Debug, Default)]
pub struct Stop {
    is_asked: AtomicBool,
    asked: Notify,
}

impl Stop {
    /// Ask for it.
    pub fn ask(&self) {
        self.is_asked.store(true, Ordering::Release);
        self.asked.notify_waiters();
    }

    /// Whether it was asked for.
    #[must_use]
    pub fn is_asked(&self) -> bool {
        self.is_asked.load(Ordering::Acquire)
    }

    pub(crate) async fn asked(&self) {
        let mut asked = std::pin::pin!(self.asked.notified());
        // It counts from here on, so that no question between the look and the wait is missed.
        asked.as_mut().enable();
        if !self.is_asked() {
            asked.await;
        }
    }
}

pub(crate) struct Progress<T> {
    result: Mutex<Option<Result<T, KvFabricError>>>,
    ended: Signal,
    moved: AtomicU64,
    /// The request should end soon, as it likes.
    pub(crate) cancel: Arc<Stop>,
    /// The request should end now, with its connection.
    pub(crate) abort: Arc<Stop>,
}

impl<T> Progress<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            result: Mutex::new(None),
            ended: Signal::default(),
            moved: AtomicU64::new(0),
            cancel: Arc::default(),
            abort: Arc::default(),
        })
    }

    pub(crate) fn moved(&self, bytes: u64) {
        self.moved.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn end(&self, result: Result<T, KvFabricError>) {
        locked(&self.result).get_or_insert(result);
        self.ended.set();
    }
}

/// A request that runs. Dropping it cancels the request.
pub struct Transfer<T> {
    progress: Arc<Progress<T>>,
}

impl<T> Transfer<T> {
    pub(crate) fn of(progress: &Arc<Progress<T>>) -> Self {
        Self { progress: Arc::clone(progress) }
    }

    /// A request that has ended, for other implementations and tests.
    #[must_use]
    pub fn ended(result: Result<T, KvFabricError>) -> Self {
        let progress = Progress::new();
        progress.end(result);
        Self { progress }
    }

    /// Whether it has ended; never waits.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.progress.ended.is_set()
    }

    /// Bytes of KV that have arrived.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.progress.moved.load(Ordering::Relaxed)
    }

    /// Cancel it. It ends with [`KvFabricError::Cancelled`] once nothing writes to its targets, unless it has ended
    /// before.
    pub fn cancel(&self) {
        self.progress.cancel.ask();
    }

    /// The switch that cancels it, for another thread than the one that waits.
    #[must_use]
    pub fn canceller(&self) -> Arc<Stop> {
        Arc::clone(&self.progress.cancel)
    }

    /// Wait for its end, as long as it moves: it is ended with [`KvFabricError::Stalled`], and its connection closed,
    /// when no byte has arrived for `stall_after`. Not for a thread that schedules.
    ///
    /// # Errors
    /// [`KvFabricError`].
    pub fn wait(self, clock: &dyn Clock, stall_after: Duration) -> Result<T, KvFabricError> {
        let progress = &self.progress;
        let (mut moved, mut since) = (self.moved_bytes(), clock.now());
        while !self.has_ended() {
            clock.wait(&progress.ended, LOOK.min(stall_after));
            let (now, has) = (clock.now(), self.moved_bytes());
            if has != moved {
                (moved, since) = (has, now);
            } else if now.saturating_sub(since) >= stall_after && !self.has_ended() {
                progress.abort.ask();
                // The targets are free only when the worker has let them go, which no peer can delay now.
                while !self.has_ended() {
                    progress.ended.wait(LOOK);
                }
                break;
            }
        }
        locked(&progress.result).take().expect("it has ended")
    }
}

impl<T> Drop for Transfer<T> {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl<T> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({} bytes, ended: {})", self.moved_bytes(), self.has_ended())
    }
}
