//! Connections: one request each, so that each has an end.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
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
use tokio::sync::{Semaphore, oneshot};

use super::Limits;
use super::listener::Socket;
use super::routes;

/// Bytes of a request's head.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Accept for ever. A client can take no more than `limits`, nor any other connection's share.
pub(super) async fn serve(socket: Socket, router: Router, limits: Limits) {
    let seats = Arc::new(Semaphore::new(limits.connections));
    loop {
        let seat = Arc::clone(&seats).acquire_owned().await.expect("the semaphore is never closed");
        let accepted = match &socket {
            Socket::Tcp(listener) => listener.accept().await.map(|(stream, _)| {
                let served = connection(stream, routes::Reach::Loopback, router.clone(), limits);
                drop(tokio::spawn(async move {
                    served.await;
                    drop(seat);
                }));
            }),
            Socket::Unix(listener) => listener.accept().await.map(|(stream, _)| {
                let served = connection(stream, routes::Reach::Socket, router.clone(), limits);
                drop(tokio::spawn(async move {
                    served.await;
                    drop(seat);
                }));
            }),
        };
        if let Err(error) = accepted {
            // Out of file descriptors, most likely: those that close make room.
            tracing::warn!("admin: cannot accept a connection: {error}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

pub(super) async fn connection<S>(stream: S, reach: routes::Reach, router: Router, limits: Limits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (answered, is_answered) = oneshot::channel::<()>();
    let answered = std::sync::Mutex::new(Some(answered));
    let router = TowerToHyperService::new(router);
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        let router = router.clone();
        let answered = answered.lock().ok().and_then(|mut answered| answered.take());
        async move {
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

async fn answer(reach: routes::Reach, router: TowerToHyperService<Router>, request: Request) -> Response {
    if let Err(refusal) = reach.check(&request) {
        return refusal.into_response();
    }
    match hyper::service::Service::call(&router, request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}
