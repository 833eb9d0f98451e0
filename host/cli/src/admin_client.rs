//! Asks engine processes: finds them by their discovery files, and speaks HTTP/1.1 over TCP or a Unix socket.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Frame, SizeHint};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, EXPECT, HOST, HeaderName};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use meridian_core::config::Listen;
use meridian_core::text::printable;
use meridian_runtime::admin::discovery::{self, Found, Process};
use meridian_runtime::control::ProcessStatus;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Notify;
use tokio::time::timeout;

/// Longest wait for a connection and for what is at hand.
const PROMPT: Duration = Duration::from_secs(10);
/// Longest wait for a change: a component is compiled.
const COMPILING: Duration = Duration::from_secs(180);
/// The faults of a process with the batches they happened on.
const MAX_REPLY_BYTES: usize = 256 << 20;

/// The engine process to query or change.
#[derive(Args)]
pub(crate) struct Target {
    /// Choose the engine process with this id
    #[arg(long, global = true, value_name = "N", conflicts_with = "address")]
    pub(crate) pid: Option<u32>,
    /// Choose the engine process that listens on this address: IP:port on loopback, or unix:PATH
    #[arg(long, global = true, value_name = "ADDRESS")]
    pub(crate) address: Option<String>,
}

/// An admin listener.
pub(crate) struct Engine {
    /// The address that identifies the process.
    pub(crate) address: String,
    /// The address for requests: its private socket if it has one, which no other process can have taken.
    listen: Listen,
    /// The file with its token, if known.
    pub(crate) token_file: Option<PathBuf>,
}

/// Engine processes, and unreadable discovery files.
pub(crate) struct Engines {
    pub(crate) engines: Vec<Engine>,
    /// A line each.
    pub(crate) malformed: Vec<String>,
}

impl Target {
    /// The one selected process.
    pub(crate) fn one(&self) -> anyhow::Result<Engine> {
        if let Some(address) = &self.address {
            return Engine::at(address);
        }
        let Found { processes: mut found, malformed } = listening();
        for line in &malformed {
            eprintln!("warning: {}", shown(line));
        }
        if let Some(pid) = self.pid {
            let position = found.iter().position(|process| process.pid == pid);
            let position = position.with_context(|| format!("{pid}: is no engine process with an admin listener"))?;
            return Engine::of(&found[position]);
        }
        match (found.pop(), found.as_slice()) {
            (None, _) => {
                bail!("no engine process with an admin listener runs here as this user; name one by --address")
            }
            (Some(process), []) => Engine::of(&process),
            (Some(last), others) => {
                let rows = others.iter().chain([&last]).map(|process| {
                    format!("\n  --pid {}  {}  {}", process.pid, shown(&process.model), shown(known_by(process)))
                });
                bail!("several engine processes run here, name one:{}", rows.collect::<String>())
            }
        }
    }

    /// Every process, or the selected one.
    pub(crate) fn all(&self) -> anyhow::Result<Engines> {
        if self.pid.is_some() || self.address.is_some() {
            return Ok(Engines { engines: vec![self.one()?], malformed: Vec::new() });
        }
        let Found { processes, malformed } = listening();
        let engines = processes.iter().map(Engine::of).collect::<Result<_, _>>()?;
        Ok(Engines { engines, malformed })
    }
}

fn listening() -> Found {
    let mut found = discovery::find(&discovery::run_dirs());
    found.processes.retain(|process| process.admin.is_some() || process.socket.is_some());
    found
}

fn known_by(process: &Process) -> &str {
    process.admin.as_ref().or(process.socket.as_ref()).map_or("", String::as_str)
}

impl Engine {
    fn at(address: &str) -> anyhow::Result<Self> {
        match Listen::parse(address) {
            Ok(Listen::Off) => bail!("--address: must not be empty"),
            Ok(listen) => {
                // The file of a process that listens there knows of its token.
                let is_there = |process: &Process| {
                    [&process.admin, &process.socket].into_iter().any(|own| own.as_deref() == Some(address))
                };
                let known = listening().processes.into_iter().find(is_there);
                let token_file = known.and_then(|process| process.token_file).map(PathBuf::from);
                Ok(Self { address: address.to_owned(), listen, token_file })
            }
            Err(reason) => bail!("--address: {address:?}: {reason}"),
        }
    }

    fn of(process: &Process) -> anyhow::Result<Self> {
        let asked = process.socket.as_ref().or(process.admin.as_ref()).map_or("", String::as_str);
        let listen = Listen::parse(asked).map_err(|reason| anyhow::anyhow!("{asked:?}: {reason}"))?;
        let token_file = process.token_file.as_ref().map(PathBuf::from);
        Ok(Self { address: known_by(process).to_owned(), listen, token_file })
    }

    pub(crate) fn status(&self) -> anyhow::Result<ProcessStatus> {
        self.get("/v1/status")
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.ask(&Asked { method: Method::GET, path, headers: &[], body: &[] }, None, PROMPT)
    }

    /// The text of an answer that the process gives only after `after`.
    pub(crate) fn text(&self, path: &str, after: Duration) -> anyhow::Result<String> {
        let asked = Asked { method: Method::GET, path, headers: &[], body: &[] };
        let (code, reply) = self.exchange(&asked, None, PROMPT + after).with_context(|| self.address.clone())?;
        if code != StatusCode::OK {
            return Err(self.refusal(code, &reply));
        }
        String::from_utf8(reply.to_vec()).with_context(|| format!("{}: the answer is not text", self.address))
    }

    /// Carry out a change, with the token of a file.
    pub(crate) fn change<T: DeserializeOwned>(
        &self,
        asked: &Asked<'_>,
        token_file: Option<&Path>,
    ) -> anyhow::Result<T> {
        let token = match token_file.or(self.token_file.as_deref()) {
            Some(path) => Some(
                meridian_runtime::admin::read_token(path)
                    .map_err(|reason| anyhow::anyhow!("{}: {reason}", path.display()))?,
            ),
            // The process says what is the matter.
            None => None,
        };
        self.ask(asked, token.as_deref(), COMPILING)
    }

    fn ask<T: DeserializeOwned>(&self, asked: &Asked<'_>, token: Option<&str>, wait: Duration) -> anyhow::Result<T> {
        let (code, reply) = self.exchange(asked, token, wait).with_context(|| self.address.clone())?;
        if code == StatusCode::OK {
            return serde_json::from_slice(&reply)
                .with_context(|| format!("{}: the answer is not what Meridian gives", self.address));
        }
        Err(self.refusal(code, &reply))
    }

    fn refusal(&self, code: StatusCode, reply: &[u8]) -> anyhow::Error {
        #[derive(Deserialize)]
        struct Refusal {
            error: String,
        }
        match serde_json::from_slice(reply) {
            Ok(Refusal { error }) => anyhow::anyhow!("{}: {}", self.address, shown(&error)),
            Err(_) => {
                anyhow::anyhow!("{}: answered {}, and is no engine process of Meridian", self.address, code.as_u16())
            }
        }
    }

    fn host(&self) -> String {
        match &self.listen {
            Listen::Tcp(address) => address.to_string(),
            Listen::Unix(_) | Listen::Off => "localhost".into(),
        }
    }

    /// One request, one response: its code and its body.
    fn exchange(&self, asked: &Asked<'_>, token: Option<&str>, wait: Duration) -> anyhow::Result<(StatusCode, Bytes)> {
        let mut request = Request::builder().method(&asked.method).uri(asked.path).header(HOST, self.host());
        for (name, value) in asked.headers {
            request = request.header(name, value);
        }
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let is_wanted = Arc::new(Notify::new());
        if asked.body.is_empty() {
            is_wanted.notify_one();
        } else {
            // A refusal comes before the body is sent.
            request = request.header(EXPECT, "100-continue");
        }
        let body = OnceWanted::new(Bytes::copy_from_slice(asked.body), Arc::clone(&is_wanted));
        let mut request = request.body(body).context("cannot ask")?;
        hyper::ext::on_informational(&mut request, move |response| {
            if response.status() == StatusCode::CONTINUE {
                is_wanted.notify_one();
            }
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot connect")?;
        runtime.block_on(async {
            match &self.listen {
                Listen::Tcp(address) => {
                    let stream = timeout(PROMPT, TcpStream::connect(address)).await;
                    exchange(stream.context("cannot connect")?.context("cannot connect")?, request, wait).await
                }
                Listen::Unix(path) => {
                    exchange(UnixStream::connect(path).await.context("cannot connect")?, request, wait).await
                }
                Listen::Off => bail!("nothing listens"),
            }
        })
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    request: Request<OnceWanted>,
    wait: Duration,
) -> anyhow::Result<(StatusCode, Bytes)> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.context("cannot send")?;
    let asked = async {
        let response = timeout(wait, sender.send_request(request)).await.context("does not answer")?;
        let response = response.map_err(|error| {
            let why = if error.is_parse() { "the answer is not HTTP" } else { "hung up without an answer" };
            anyhow::Error::from(error).context(why)
        })?;
        let code = response.status();
        let reply = Limited::new(response.into_body(), MAX_REPLY_BYTES).collect();
        let reply = timeout(COMPILING, reply).await.context("does not answer to the end")?.map_err(|error| {
            let is_large = error.is::<LengthLimitError>();
            anyhow::anyhow!(if is_large { "the answer is too large" } else { "hung up in the middle of the answer" })
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

/// What is asked of a process.
pub(crate) struct Asked<'a> {
    pub(crate) method: Method,
    /// With its query.
    pub(crate) path: &'a str,
    pub(crate) headers: &'a [(HeaderName, String)],
    pub(crate) body: &'a [u8],
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
        context: &mut TaskContext<'_>,
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

/// A text of another process, safe for a terminal, in one line.
pub(crate) fn shown(text: &str) -> String {
    printable(text).into_owned()
}
