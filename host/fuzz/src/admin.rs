//! The admin interface: any bytes as one connection. Nothing changes without the token, and what is answered is HTTP.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use meridian_admin::{ConnectionLimits, serve_stream};
use meridian_engine::control::{Control, ControlError, FaultEntry, Mode, ProcessStatus, SlotName, SwapReport, Upload};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What changes need.
pub const TOKEN: &str = "a-token-of-24-characters";

/// Notes what it is asked to change, and refuses it.
#[derive(Default)]
struct Noting {
    changes: Mutex<Vec<&'static str>>,
}

impl Noting {
    fn note(&self, change: &'static str, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner).push(change);
        Err(ControlError::NoSuchSlot(slot))
    }
}

impl Control for Noting {
    fn status(&self) -> ProcessStatus {
        ProcessStatus::default()
    }

    fn faults(&self) -> Vec<FaultEntry> {
        Vec::new()
    }

    fn put(&self, slot: SlotName, _: &Upload<'_>, _: Mode) -> Result<SwapReport, ControlError> {
        self.note("put", slot)
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.note("promote", slot)
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.note("rollback", slot)
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.note("release", slot)
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.note("shadow", slot)
    }
}

/// A client that sends these bytes and then waits for an answer.
struct Client {
    sends: Vec<u8>,
    sent: usize,
    received: Arc<Mutex<Vec<u8>>>,
    /// Of who waits for more bytes.
    waiting: Option<Waker>,
    hangs_up: bool,
}

impl AsyncRead for Client {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let left = &self.sends[self.sent..];
        if left.is_empty() && !self.hangs_up {
            self.waiting = Some(context.waker().clone());
            return Poll::Pending;
        }
        let count = left.len().min(buffer.remaining());
        buffer.put_slice(&left[..count]);
        self.sent += count;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Client {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.hangs_up = true;
        if let Some(waker) = self.waiting.take() {
            waker.wake();
        }
        Poll::Ready(Ok(()))
    }
}

thread_local! {
    static TOKIO: tokio::runtime::Runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .max_blocking_threads(1)
        .build()
        .expect("a runtime without I/O");
}

/// What a connection led to.
pub struct Served {
    /// What the engine was asked to change.
    pub changes: Vec<&'static str>,
    /// What the client received.
    pub received: Vec<u8>,
}

/// Serve `data` as one connection. A leading `!` is not sent: the client hangs up at the end of what it sends.
pub fn serve(data: &[u8], patience: Duration) -> Served {
    let (sends, hangs_up) = split(data);
    let control = Arc::new(Noting::default());
    let received = Arc::new(Mutex::new(Vec::new()));
    let client = Client { sends: sends.to_vec(), sent: 0, received: Arc::clone(&received), waiting: None, hangs_up };
    let limits = ConnectionLimits { head: patience, body: patience, response: patience, ..ConnectionLimits::default() };
    let served = serve_stream(client, Arc::clone(&control) as Arc<dyn Control>, Some(TOKEN.into()), limits);
    TOKIO.with(|runtime| runtime.block_on(served));
    let changes = std::mem::take(&mut *control.changes.lock().unwrap_or_else(PoisonError::into_inner));
    let received = std::mem::take(&mut *received.lock().unwrap_or_else(PoisonError::into_inner));
    Served { changes, received }
}

fn split(data: &[u8]) -> (&[u8], bool) {
    data.strip_prefix(b"!").map_or((data, false), |rest| (rest, true))
}

/// Serve `data`, and check what came of it.
pub fn run(data: &[u8]) {
    // Long enough for an answer; a request that has no end waits as long.
    let Served { changes, received } = serve(data, Duration::from_millis(5));
    assert!(changes.len() <= 1, "one connection led to {changes:?}");
    if let Some(change) = changes.first() {
        assert!(may_change(split(data).0, change), "{change} without the token");
    }
    check_answer(&received);
}

/// Whether the request is that change, from this machine and with the token: read apart from the server.
fn may_change(sent: &[u8], change: &str) -> bool {
    let mut headers = [httparse::EMPTY_HEADER; 100];
    let mut request = httparse::Request::new(&mut headers);
    if !request.parse(sent).is_ok_and(|parsed| parsed.is_complete()) {
        return false;
    }
    let values = |name: &str| -> Vec<String> {
        let named = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(name));
        named.map(|header| String::from_utf8_lossy(header.value).into_owned()).collect()
    };
    let authorized = values("authorization").first().is_some_and(|value| {
        let mut words = value.split_ascii_whitespace();
        words.next().is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer")) && words.eq([TOKEN])
    });
    let here = matches!(values("host").as_slice(), [host] if !host.is_empty());
    let path = request.path.unwrap_or_default();
    let asked = match request.method {
        Some("PUT") => change == "put" && path.contains("/v1/policies/"),
        Some("DELETE") => path.contains("/v1/policies/") && change == "shadow",
        Some("POST") => path.contains("/v1/policies/") && path.contains(change),
        _ => false,
    };
    authorized && here && asked
}

/// Nothing, or one response.
fn check_answer(received: &[u8]) {
    let mut rest = received;
    while let Some(after) = rest.strip_prefix(b"HTTP/1.1 100 Continue\r\n\r\n") {
        rest = after;
    }
    if rest.is_empty() {
        return;
    }
    let mut headers = [httparse::EMPTY_HEADER; 32];
    let mut response = httparse::Response::new(&mut headers);
    let parsed = response.parse(rest);
    assert!(parsed.is_ok_and(|parsed| parsed.is_complete()), "no response: {:?}", String::from_utf8_lossy(rest));
    let code = response.code.unwrap_or_default();
    assert!((200..500).contains(&code), "{:?}", String::from_utf8_lossy(rest));
}
