//! Connections, one request each, so that every connection ends.
//!
//! A client that has not sent its whole request takes no place of others: when too many wait, the oldest is closed.
//! Requests take memory for their bodies from one account.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::{Body, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::timeout;

/// Largest body of a request, bytes.
const MAX_REQUEST: usize = 64 << 20;
/// Bytes of all bodies together.
const MAX_REQUESTS: usize = 512 << 20;

/// Limits on the clients of a front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientLimits {
    /// Time for the head of a request.
    pub head: Duration,
    /// Time for its body.
    pub body: Duration,
    /// Most connections that have not sent their whole request: with one more, the oldest is closed.
    pub waiting: usize,
    /// Most connections: with one more, a client waits for a place.
    pub open: usize,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self { head: Duration::from_secs(10), body: Duration::from_secs(30), waiting: 256, open: 4096 }
    }
}

/// The connections of a front.
pub(super) struct Door {
    /// Those that have not sent their whole request, by age.
    waiting: Mutex<BTreeMap<u64, AbortHandle>>,
    /// The id of the next one.
    next: AtomicU64,
    open: Arc<Semaphore>,
    room: Arc<Semaphore>,
    limits: ClientLimits,
}

impl Door {
    pub(super) fn new(limits: ClientLimits) -> Arc<Self> {
        let (open, room) = (Arc::new(Semaphore::new(limits.open)), Arc::new(Semaphore::new(MAX_REQUESTS)));
        Arc::new(Self { waiting: Mutex::default(), next: AtomicU64::new(0), open, room, limits })
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, AbortHandle>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wait until there is a place for one more connection.
    pub(super) async fn place(&self) -> OwnedSemaphorePermit {
        Arc::clone(&self.open).acquire_owned().await.expect("the semaphore is never closed")
    }

    /// Wait until no connection is left.
    pub(super) async fn empty(&self) {
        let all = u32::try_from(self.limits.open).unwrap_or(u32::MAX);
        let _ = self.open.acquire_many(all).await;
    }

    /// Serve a connection beside the others; when too many wait, the oldest is closed.
    pub(super) fn admit<F>(self: &Arc<Self>, place: OwnedSemaphorePermit, connection: impl FnOnce(Pass) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // Ids grow with time, and none is used again; the task cannot remove its own before this lock is released.
        let mut waiting = self.waiting();
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if waiting.len() >= self.limits.waiting
            && let Some((_, oldest)) = waiting.pop_first()
        {
            oldest.abort();
        }
        let pass = Pass { door: Arc::clone(self), id, _place: place };
        waiting.insert(id, tokio::spawn(connection(pass)).abort_handle());
    }
}

/// A connection's way from waiting to its service.
pub(super) struct Pass {
    door: Arc<Door>,
    id: u64,
    _place: OwnedSemaphorePermit,
}

/// The body of a request, and its memory.
pub(super) struct Read {
    pub(super) body: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

impl Pass {
    /// Read the body. From then on, no newer connection closes this one.
    ///
    /// # Errors
    /// The status, and the reason.
    pub(super) async fn read(&self, body: Incoming) -> Result<Read, (StatusCode, &'static str)> {
        let read = timeout(self.door.limits.body, self.collect(body)).await;
        let read = read.map_err(|_| (StatusCode::REQUEST_TIMEOUT, "the body took too long"))??;
        self.door.waiting().remove(&self.id);
        Ok(read)
    }

    async fn collect(&self, mut body: Incoming) -> Result<Read, (StatusCode, &'static str)> {
        let too_large = (StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 64 MiB");
        if body.size_hint().lower() > MAX_REQUEST as u64 {
            return Err(too_large);
        }
        let (mut bytes, mut room) = (BytesMut::new(), None::<OwnedSemaphorePermit>);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| (StatusCode::BAD_REQUEST, "the body broke off"))?;
            let Some(data) = frame.data_ref() else { continue };
            if bytes.len() + data.len() > MAX_REQUEST {
                return Err(too_large);
            }
            let more = u32::try_from(data.len()).map_err(|_| too_large)?;
            let more = Arc::clone(&self.door.room).try_acquire_many_owned(more);
            let more = more.map_err(|_| (StatusCode::SERVICE_UNAVAILABLE, "too many large requests at a time"))?;
            match &mut room {
                Some(room) => room.merge(more),
                None => room = Some(more),
            }
            bytes.extend_from_slice(data);
        }
        Ok(Read { body: bytes.freeze(), _room: room })
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.door.waiting().remove(&self.id);
    }
}
