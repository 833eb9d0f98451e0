//! Connections: one request each, so that each has an end.
//!
//! Everybody on the machine can connect to a port of loopback, under any address of it, so a limit for each peer would
//! limit nobody. A connection takes no place of others until its request is known: of those that have sent none, the
//! oldest is closed when there are too many. Requests that change something, with the token, have places of their own.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::ConnectionLimits;
use super::listener::Socket;
use super::routes::{Reach, Rights, Site};

/// Bytes of a request's head.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Accept for ever. A client can take no more than `limits`, nor any other connection's share.
pub(super) async fn serve(socket: Socket, router: Router, site: Arc<Site>, limits: ConnectionLimits) {
    let door = Arc::new(Door::new(&limits));
    loop {
        let accepted = match &socket {
            Socket::Tcp(listener) => listener.accept().await.map(|(stream, _)| {
                door.admit(|pass| connection(stream, Reach::Loopback, router.clone(), &site, Some(pass), limits));
            }),
            Socket::Unix(listener) => listener.accept().await.map(|(stream, _)| {
                door.admit(|pass| connection(stream, Reach::Socket, router.clone(), &site, Some(pass), limits));
            }),
        };
        match accepted {
            // Those that were accepted before read what has come, so that a crowd does not close them unread.
            Ok(()) => tokio::task::yield_now().await,
            Err(error) => {
                // Out of file descriptors, most likely: those that close make room.
                tracing::warn!("admin: cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// The connections of a listener.
struct Door {
    /// By their age: those that are not being served yet.
    waiting: Mutex<BTreeMap<u64, AbortHandle>>,
    most_waiting: usize,
    reading: Arc<Semaphore>,
    uploading: Arc<Semaphore>,
    changing: Arc<Semaphore>,
}

impl Door {
    fn new(limits: &ConnectionLimits) -> Self {
        let ConnectionLimits { connections, reserved, waiting, head: _, body: _, response: _ } = *limits;
        let [uploading, changing] = [(); 2].map(|()| Arc::new(Semaphore::new(reserved)));
        let reading = Arc::new(Semaphore::new(connections));
        Self { waiting: Mutex::default(), most_waiting: waiting, reading, uploading, changing }
    }

    fn waiting(&self) -> MutexGuard<'_, BTreeMap<u64, AbortHandle>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serve a connection beside the others; the oldest of those that wait goes when there are too many.
    fn admit<F>(self: &Arc<Self>, connection: impl FnOnce(Pass) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // Ids grow with time; the task cannot run before this one lets it.
        let mut waiting = self.waiting();
        let id = waiting.last_key_value().map_or(0, |(id, _)| id + 1);
        if waiting.len() >= self.most_waiting
            && let Some((_, oldest)) = waiting.pop_first()
        {
            oldest.abort();
        }
        let pass = Pass { door: Arc::clone(self), id, seat: Mutex::new(None) };
        waiting.insert(id, tokio::spawn(connection(pass)).abort_handle());
    }
}

/// A connection's way from waiting to being served.
pub(super) struct Pass {
    door: Arc<Door>,
    id: u64,
    /// Held until the connection is over.
    seat: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Pass {
    /// Wait for a place among requests with the same rights. Until then the connection may be closed for a newer one.
    async fn take_seat(&self, rights: Rights) {
        let seats = match rights {
            Rights::Read => &self.door.reading,
            Rights::Upload => &self.door.uploading,
            Rights::Change => &self.door.changing,
        };
        let seat = Arc::clone(seats).acquire_owned().await.expect("the semaphore is never closed");
        *self.seat.lock().unwrap_or_else(PoisonError::into_inner) = Some(seat);
        self.door.waiting().remove(&self.id);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        self.door.waiting().remove(&self.id);
    }
}

/// Serve one request. Without a `pass` there is always a place.
pub(super) fn connection<S>(
    stream: S,
    reach: Reach,
    router: Router,
    site: &Arc<Site>,
    pass: Option<Pass>,
    limits: ConnectionLimits,
) -> impl Future<Output = ()> + Send + use<S>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let site = Arc::clone(site);
    async move {
        let (answered, is_answered) = oneshot::channel::<()>();
        let answered = Mutex::new(Some(answered));
        let router = TowerToHyperService::new(router);
        let pass = &pass;
        let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
            let (router, rights) = (router.clone(), site.rights(&request));
            let answered = answered.lock().ok().and_then(|mut answered| answered.take());
            async move {
                if let Some(pass) = pass {
                    pass.take_seat(rights).await;
                }
                let response = answer(reach, router, request.map(Body::new)).await;
                // The time for reading the response starts.
                drop(answered);
                Ok::<_, Infallible>(response)
            }
        });
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(limits.head)
                .keep_alive(false)
                .max_buf_size(MAX_HEAD_BYTES)
                .serve_connection(TokioIo::new(stream), service)
        );
        tokio::select! {
            // What a client does wrong is its own affair.
            _ = &mut connection => {}
            () = async { let _ = is_answered.await; tokio::time::sleep(limits.response).await } => {}
        }
    }
}

async fn answer(reach: Reach, router: TowerToHyperService<Router>, request: Request) -> Response {
    if let Err(refusal) = reach.check(&request) {
        return refusal.into_response();
    }
    match hyper::service::Service::call(&router, request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
