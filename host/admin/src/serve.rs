//! Connections: one request each, so that every connection ends.
//!
//! Every user of the machine can connect to a loopback port, from any loopback address, so limits per peer are useless.
//! A connection takes no place of others until its request is known. If too many connections have sent no request, the
//! oldest is closed. Changes with the token have their own places.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::ConnectionLimits;
use super::audit::Actor;
use super::listener::Socket;
use super::routes::{AuditedRequest, FORWARDED_HEADER, Reach, Rights, Site};

/// Bytes of a request's head.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Accept forever. A client can take at most `limits`, and no other connection's share.
pub(super) async fn serve(socket: Socket, router: Router, site: Arc<Site>, limits: ConnectionLimits) {
    let door = Arc::new(Door::new(&limits));
    loop {
        let accepted = match &socket {
            Socket::Tcp { listener, reach } => listener.accept().await.map(|(stream, peer)| {
                let client = Client { reach: *reach, peer: peer.to_string().into() };
                door.admit(|pass| connection(stream, client, router.clone(), &site, Some(pass), limits));
            }),
            Socket::Tls { listener, certificate, reach } => listener.accept().await.map(|(stream, peer)| {
                let client = Client { reach: *reach, peer: peer.to_string().into() };
                let (acceptor, router, site) = (certificate.acceptor(), router.clone(), Arc::clone(&site));
                door.admit(|pass| async move {
                    // A client that does not finish loses its pass with this task.
                    if let Ok(Ok(stream)) = tokio::time::timeout(limits.head, acceptor.accept(stream)).await {
                        connection(stream, client, router, &site, Some(pass), limits).await;
                    }
                });
            }),
            Socket::Unix(listener) => listener.accept().await.map(|(stream, _)| {
                let peer = stream.peer_cred().map(|peer| {
                    let pid = peer.pid().map_or_else(String::new, |pid| format!(",pid={pid}"));
                    format!("unix:uid={}{pid}", peer.uid())
                });
                let client = Client { reach: Reach::Socket, peer: peer.unwrap_or_else(|_| "unix".into()).into() };
                door.admit(|pass| connection(stream, client, router.clone(), &site, Some(pass), limits));
            }),
        };
        match accepted {
            // Connections accepted earlier read their data first, so that a crowd does not close them unread.
            Ok(()) => tokio::task::yield_now().await,
            Err(error) => {
                // Most likely out of file descriptors: closing connections make room.
                tracing::warn!("admin: cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// The connections of a listener.
struct Door {
    /// The connections that are not served yet, by age.
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

    /// Serve a connection beside the others; when too many wait, the oldest is closed.
    fn admit<F>(self: &Arc<Self>, connection: impl FnOnce(Pass) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        // Ids grow with time; the task cannot run before this lock is released.
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

/// A connection's way from waiting to its service.
pub(super) struct Pass {
    door: Arc<Door>,
    id: u64,
    /// Held until the connection is over.
    seat: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Pass {
    /// Wait for a place among requests with the same rights. Until then, a newer connection may close this one.
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

/// The other side of a connection.
pub(super) struct Client {
    pub(super) reach: Reach,
    pub(super) peer: Arc<str>,
}

/// Serve one request. Without a `pass`, there is always a place.
pub(super) fn connection<S>(
    stream: S,
    client: Client,
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
        let (pass, site) = (&pass, &site);
        let service = service_fn(|mut request: hyper::Request<hyper::body::Incoming>| {
            let (router, rights) = (router.clone(), site.rights(&request));
            let answered = answered.lock().ok().and_then(|mut answered| answered.take());
            let who = site.bearer(request.headers()).map(|token| Arc::from(token.name.as_str()));
            let actor = Actor { who, peer: peer_of(&client.peer, request.headers()) };
            request.extensions_mut().insert(actor.clone());
            let asked =
                AuditedRequest { actor, method: request.method().clone(), path: request.uri().path().to_owned() };
            // One that may not ask at all takes no place.
            let refused = client.reach.check(site, &request).err();
            async move {
                let response = match refused {
                    Some(refusal) => refusal.into_response(),
                    None => {
                        if let Some(pass) = pass {
                            pass.take_seat(rights).await;
                        }
                        answer(router, request.map(Body::new)).await
                    }
                };
                // Nothing can be changed where other machines scrape metrics; they must not fill the log.
                if !matches!(client.reach, Reach::Scrapers) {
                    site.record_refusal(&asked, &response);
                }
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
            // Errors of the client are ignored.
            _ = &mut connection => {}
            () = async { let _ = is_answered.await; tokio::time::sleep(limits.response).await } => {}
        }
    }
}

/// Where a request comes from: the peer, and the client that it says it passes a request on for.
fn peer_of(peer: &Arc<str>, headers: &HeaderMap) -> Arc<str> {
    let forwarded = headers.get(FORWARDED_HEADER).and_then(|value| value.to_str().ok());
    forwarded
        .map_or_else(|| Arc::clone(peer), |client| format!("{peer} for {}", client.get(..64).unwrap_or(client)).into())
}

async fn answer(router: TowerToHyperService<Router>, request: Request) -> Response {
    match hyper::service::Service::call(&router, request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
