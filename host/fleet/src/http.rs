//! One request over HTTP/1.1 to an engine, within limits: the other side may be slow, lie, or be something else.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Frame, SizeHint};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, EXPECT, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::TlsConnector;

use crate::Endpoint;

/// A request to an engine.
#[derive(Clone)]
pub(crate) struct Ask {
    pub(crate) method: Method,
    /// With its query.
    pub(crate) path: String,
    pub(crate) headers: Vec<(HeaderName, String)>,
    /// Shared by the requests to all engines of a fleet.
    pub(crate) body: Bytes,
}

impl Ask {
    pub(crate) fn of(method: Method, path: impl Into<String>) -> Self {
        Self { method, path: path.into(), headers: Vec::new(), body: Bytes::new() }
    }
}

/// Limits on the other side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Within {
    /// Time for a connection, its encryption included.
    pub(crate) connect: Duration,
    /// Time for everything: the connection, the head of the answer, and its last byte.
    pub(crate) answer: Duration,
    /// Size of the answer's body.
    pub(crate) bytes: usize,
    /// Time between two probes that the other side must answer beside it, and for the answer to one: an answer may take
    /// long, and one that hangs is not waited for.
    pub(crate) probes: Option<Duration>,
}

/// One request, one response: its code and its body.
///
/// # Errors
/// One line without the address.
pub(crate) fn exchange(
    endpoint: &Endpoint,
    tls: Option<Arc<ClientConfig>>,
    ask: &Ask,
    token: Option<&str>,
    within: Within,
) -> Result<(StatusCode, Bytes), String> {
    let request = request(endpoint, ask, token)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("cannot connect: {error}"))?;
    let answer = runtime.block_on(async {
        tokio::select! {
            answer = over(endpoint, tls.clone(), request, within) => answer,
            why = silence(endpoint, tls.clone(), within.probes.unwrap_or_default()), if within.probes.is_some() => Err(why),
        }
    });
    // The system may still look up a name, and nothing ends that.
    runtime.shutdown_background();
    answer
}

/// Ends when the other side does not answer a probe, with one line.
async fn silence(endpoint: &Endpoint, tls: Option<Arc<ClientConfig>>, every: Duration) -> String {
    let within = Within { connect: every, answer: every, bytes: 64 << 10, probes: None };
    loop {
        sleep(every).await;
        let answer = match request(endpoint, &Ask::of(Method::GET, "/healthz"), None) {
            Ok(probe) => over(endpoint, tls.clone(), probe, within).await,
            Err(why) => Err(why),
        };
        if let Err(why) = answer {
            return format!("has not answered yet, and a probe {why}");
        }
    }
}

fn request(endpoint: &Endpoint, ask: &Ask, token: Option<&str>) -> Result<Request<OnceWanted>, String> {
    let mut request = Request::builder().method(&ask.method).uri(&ask.path).header(HOST, endpoint.host_header());
    for (name, value) in &ask.headers {
        request = request.header(name, value);
    }
    if let Some(token) = token {
        let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_| "cannot ask: the token")?;
        value.set_sensitive(true);
        request = request.header(AUTHORIZATION, value);
    }
    let is_wanted = Arc::new(Notify::new());
    if ask.body.is_empty() {
        is_wanted.notify_one();
    } else {
        // A refusal comes before the body is sent.
        request = request.header(EXPECT, "100-continue");
    }
    let body = OnceWanted::new(ask.body.clone(), Arc::clone(&is_wanted));
    let mut request = request.body(body).map_err(|error| format!("cannot ask: {error}"))?;
    hyper::ext::on_informational(&mut request, move |response| {
        if response.status() == StatusCode::CONTINUE {
            is_wanted.notify_one();
        }
    });
    Ok(request)
}

async fn over(
    endpoint: &Endpoint,
    tls: Option<Arc<ClientConfig>>,
    request: Request<OnceWanted>,
    within: Within,
) -> Result<(StatusCode, Bytes), String> {
    let until = Instant::now() + within.answer;
    match endpoint {
        Endpoint::Loopback(address) => {
            let stream = soon(within, "cannot connect", TcpStream::connect(address)).await?;
            converse(stream, request, within, until).await
        }
        Endpoint::Unix(path) => {
            let stream = soon(within, "cannot connect", UnixStream::connect(path)).await?;
            converse(stream, request, within, until).await
        }
        Endpoint::Tls { host, port } => {
            let tls = tls.ok_or("cannot connect: no certificates")?;
            let name = ServerName::try_from(host.clone()).map_err(|error| format!("cannot connect: {error}"))?;
            let stream = soon(within, "cannot connect", TcpStream::connect((host.as_str(), *port))).await?;
            let stream = soon(within, "no TLS", TlsConnector::from(tls).connect(name, stream)).await?;
            converse(stream, request, within, until).await
        }
    }
}

async fn soon<T>(within: Within, what: &str, work: impl Future<Output = io::Result<T>>) -> Result<T, String> {
    let limit = within.connect.min(within.answer);
    match timeout(limit, work).await {
        Ok(done) => done.map_err(|error| format!("{what}: {error}")),
        Err(_) => Err(format!("{what}: no answer within {} s", limit.as_secs_f64())),
    }
}

async fn converse(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    request: Request<OnceWanted>,
    within: Within,
    until: Instant,
) -> Result<(StatusCode, Bytes), String> {
    let handshake = http1::handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|error| format!("cannot send: {error}"))?;
    let seconds = within.answer.as_secs_f64();
    let asked = async {
        let response = timeout_at(until, sender.send_request(request)).await;
        let response = response.map_err(|_| format!("does not answer within {seconds} s"))?.map_err(|error| {
            let why = if error.is_parse() { "the answer is not HTTP" } else { "hung up without an answer" };
            format!("{why}: {error}")
        })?;
        let code = response.status();
        let reply = Limited::new(response.into_body(), within.bytes).collect();
        let reply = timeout_at(until, reply).await;
        let reply = reply.map_err(|_| format!("does not answer to the end within {seconds} s"))?.map_err(|error| {
            let is_large = error.is::<LengthLimitError>();
            if is_large { "the answer is too large" } else { "hung up in the middle of the answer" }
        })?;
        Ok((code, reply.to_bytes()))
    };
    tokio::pin!(asked, connection);
    tokio::select! {
        answer = &mut asked => answer,
        // It has ended, for good or not: what was asked says which.
        _ = &mut connection => asked.await,
    }
}

/// A body that waits until the other side has said that it wants it.
struct OnceWanted {
    bytes: Option<Bytes>,
    is_wanted: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl OnceWanted {
    fn new(bytes: Bytes, is_wanted: Arc<Notify>) -> Self {
        let bytes = Some(bytes).filter(|bytes| !bytes.is_empty());
        Self { bytes, is_wanted: Box::pin(async move { is_wanted.notified().await }) }
    }
}

impl Body for OnceWanted {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.bytes.is_some() && self.is_wanted.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        Poll::Ready(self.bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}
