//! Requests to one of the two engines. A reply that is dropped ends its connection, and vLLM then ends the request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::HandoffError;
use super::lines::Lines;
use crate::{Endpoint, tls};

/// Time for a connection, its encryption included.
const CONNECT: Duration = Duration::from_secs(5);
/// Largest body without streaming, bytes.
const MAX_BYTES: usize = 64 << 20;

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// One of the engines.
pub(crate) struct Upstream {
    endpoint: Endpoint,
    tls: Option<Arc<ClientConfig>>,
}

/// The connection of a reply; it ends with it.
pub(super) struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The head of a response, and its body.
pub(super) struct Reply {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) body: Incoming,
    pub(super) connection: Connection,
}

impl Upstream {
    /// # Errors
    /// One line: the certificates of this system cannot be used.
    pub(super) fn new(endpoint: Endpoint) -> Result<Self, String> {
        let tls = match endpoint {
            Endpoint::Tls { .. } => Some(tls::client(None)?),
            Endpoint::Loopback(_) | Endpoint::Unix(_) => None,
        };
        Ok(Self { endpoint, tls })
    }

    /// # Errors
    /// One line without the address.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Reply, String> {
        let stream = timeout(CONNECT, self.connect()).await.map_err(|_| "cannot connect: no answer".to_owned())??;
        let handshake = http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| format!("cannot send: {error}"))?;
        let connection = Connection(tokio::spawn(async move {
            // An error shows in the reply too.
            let _ = connection.await;
        }));
        let mut request = Request::builder().method(method).uri(path).header(HOST, self.endpoint.host_header());
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request = request.body(Full::new(body)).map_err(|error| format!("cannot ask: {error}"))?;
        let response = sender.send_request(request).await.map_err(|error| format!("hung up: {error}"))?;
        let (head, body) = response.into_parts();
        Ok(Reply { status: head.status, headers: head.headers, body, connection })
    }

    /// Ask with a JSON body.
    pub(super) async fn post(&self, path: &str, headers: &HeaderMap, body: &Value) -> Result<Reply, String> {
        let mut headers = headers.clone();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.send(Method::POST, path, &headers, body.to_string().into()).await
    }

    /// Ask with a JSON body, and read a JSON answer with status 200 within this time.
    pub(super) async fn json(
        &self,
        path: &'static str,
        headers: &HeaderMap,
        body: &Value,
        within: Duration,
    ) -> Result<Value, HandoffError> {
        let asked = async {
            let reply = self.post(path, headers, body).await?;
            Ok::<_, String>((reply.status, reply.whole().await?))
        };
        let failed = |why: String| HandoffError::Think(format!("{path}: {why}"));
        let asked = timeout(within, asked).await;
        let asked = asked.map_err(|_| failed(format!("no answer within {} s", within.as_secs_f64())))?;
        let (status, text) = asked.map_err(HandoffError::Think)?;
        let has_key = headers.contains_key(AUTHORIZATION);
        match status {
            StatusCode::OK => {
                serde_json::from_slice(&text).map_err(|error| failed(format!("the answer is not JSON: {error}")))
            }
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(HandoffError::Key { path, status: status.as_u16(), has_key })
            }
            other => Err(failed(format!("HTTP {}", other.as_u16()))),
        }
    }

    async fn connect(&self) -> Result<Box<dyn Stream>, String> {
        let no = |error: std::io::Error| format!("cannot connect: {error}");
        Ok(match &self.endpoint {
            Endpoint::Loopback(address) => {
                let stream = TcpStream::connect(address).await.map_err(no)?;
                stream.set_nodelay(true).map_err(no)?;
                Box::new(stream)
            }
            Endpoint::Unix(path) => Box::new(UnixStream::connect(path).await.map_err(no)?),
            Endpoint::Tls { host, port } => {
                let tls = self.tls.clone().ok_or("cannot connect: no certificates")?;
                let name = ServerName::try_from(host.clone()).map_err(|error| format!("cannot connect: {error}"))?;
                let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(no)?;
                stream.set_nodelay(true).map_err(no)?;
                let stream = TlsConnector::from(tls).connect(name, stream).await;
                Box::new(stream.map_err(|error| format!("no TLS: {error}"))?)
            }
        })
    }
}

impl Reply {
    /// The whole body.
    pub(super) async fn whole(self) -> Result<Bytes, String> {
        let body = Limited::new(self.body, MAX_BYTES).collect().await;
        Ok(body.map_err(|error| format!("hung up in the middle of the answer: {error}"))?.to_bytes())
    }

    pub(super) fn events(self) -> Events {
        Events { body: self.body, _connection: self.connection, lines: Lines::default(), patience: None }
    }
}

/// Server-sent events of a reply.
pub(super) struct Events {
    body: Incoming,
    _connection: Connection,
    lines: Lines,
    patience: Option<Duration>,
}

impl Events {
    /// Wait no longer than this for each event, whatever else comes meanwhile.
    pub(super) fn within(self, patience: Duration) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// The data of the next event, or None at the end of the body.
    ///
    /// # Errors
    /// The reason for the counters: `broken` or `stalled`.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, &'static str> {
        match self.patience {
            Some(patience) => timeout(patience, self.read()).await.map_err(|_| "stalled")?,
            None => self.read().await,
        }
    }

    async fn read(&mut self) -> Result<Option<Bytes>, &'static str> {
        loop {
            if let Some(event) = self.lines.next()? {
                return Ok(Some(event));
            }
            let Some(frame) = self.body.frame().await else { return Ok(None) };
            if let Some(bytes) = frame.map_err(|_| "broken")?.data_ref() {
                self.lines.push(bytes);
            }
        }
    }
}

/// Headers of a client that an engine gets too: all but those of the connection and of the body's coding.
pub(super) fn passed_on(headers: &HeaderMap) -> HeaderMap {
    const OWN: [&str; 12] = [
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let is_passed = |name: &HeaderName| !OWN.contains(&name.as_str());
    headers.iter().filter(|(name, _)| is_passed(name)).map(|(name, value)| (name.clone(), value.clone())).collect()
}
