//! The front of a handoff: any bytes of either engine, and any bytes of a client. The client gets an answer or an error,
//! and the connection ends.
//!
//! An input is what the engine that thinks says, what the engine that answers says, and what the client sends, with lines
//! of `--` in between. What is missing is said well. What begins with [`RAW`] is sent as it is, other words of an engine
//! are the events of a stream.

use std::os::unix::net::UnixListener as Listener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Duration;

use meridian_core::config::HandoffPolicyName;
use meridian_fleet::{ClientLimits, Endpoint, Handoff, HandoffSettings};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::timeout;

/// Sent as it is, without these bytes.
pub const RAW: &[u8] = b"RAW";

const BETWEEN: &[u8] = b"\n--\n";
const THINKS: &[u8] = br#"data: {"id": "1", "choices": [{"index": 0, "text": "so", "token_ids": [10], "prompt_token_ids": [1, 2]}]}

data: {"id": "1", "choices": [{"index": 0, "text": "</think>", "token_ids": [37], "finish_reason": "stop", "stop_reason": "{\"meridian_handoff\": {\"stop_token\": 37}, \"remote_block_ids\": [[4]]}"}]}
"#;
const ANSWERS: &[u8] = br#"data: {"choices": [{"text": " 42", "token_ids": [12], "finish_reason": "stop"}]}
"#;
const BODY: &str = r#"{"prompt": "p", "max_tokens": 9, "stream": true}"#;
/// An engine that says nothing more has hung up; this is for one that the front does not see.
const PATIENCE: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(8);

static PANICKED: AtomicBool = AtomicBool::new(false);

/// The bytes that the client received.
pub fn serve(data: &[u8]) -> Vec<u8> {
    static HOOK: Once = Once::new();
    // The runtime would keep a panic of a task to itself.
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICKED.store(true, Ordering::Relaxed);
            before(info);
        }));
    });
    let mut parts = split(data).into_iter();
    let thinks = said(parts.next().filter(|part| !part.is_empty()).unwrap_or(THINKS));
    let answers = said(parts.next().filter(|part| !part.is_empty()).unwrap_or(ANSWERS));
    let head =
        format!("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{BODY}", BODY.len());
    let sent = parts.next().map_or(head.into_bytes(), <[u8]>::to_vec);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let received = runtime.block_on(async {
        let (think, answer) = (engine("think", thinks), engine("answer", answers));
        let settings = HandoffSettings {
            think,
            answer: vec![answer],
            think_end: vec!["</think>".into()],
            policy: HandoffPolicyName::Threshold.policy(0),
            patience: PATIENCE,
            limits: ClientLimits { head: PATIENCE, body: PATIENCE, ..ClientLimits::default() },
            traces: None,
            api_key: None,
        };
        let front = Handoff::prepare(settings, crate::assert_one_line).await.expect("one marker");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(front.serve(listener, std::future::pending()));
        let mut client = TcpStream::connect(address).await.expect("it listens");
        let mut received = Vec::new();
        let asked = async {
            // The front may have hung up before the end.
            let _ = client.write_all(&sent).await;
            let _ = client.read_to_end(&mut received).await;
        };
        assert!(timeout(LONG, asked).await.is_ok(), "the front neither answers nor hangs up");
        received
    });
    assert!(!PANICKED.load(Ordering::Relaxed), "a task of the front panicked");
    received
}

/// Say `data` to a front.
pub fn run(data: &[u8]) {
    let received = serve(data);
    let is_http = received.is_empty() || received.starts_with(b"HTTP/1.");
    assert!(is_http, "no HTTP: {:?}", String::from_utf8_lossy(&received));
    let parts = split(data);
    // A client that asks as it should, and an engine that begins as it should.
    if parts.len() < 3 && !parts.first().is_some_and(|part| part.starts_with(RAW)) {
        let text = String::from_utf8_lossy(&received);
        assert!(text.contains("[DONE]") || text.contains("\"error\""), "neither an end nor an error: {text:?}");
    }
}

fn split(data: &[u8]) -> Vec<&[u8]> {
    let (mut parts, mut left) = (Vec::new(), data);
    while let Some(at) = left.windows(BETWEEN.len()).position(|window| window == BETWEEN) {
        parts.push(&left[..at]);
        left = &left[at + BETWEEN.len()..];
    }
    parts.push(left);
    parts
}

/// The response of an engine.
fn said(part: &[u8]) -> Vec<u8> {
    match part.strip_prefix(RAW) {
        Some(raw) => raw.to_vec(),
        None => [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", part].concat(),
    }
}

/// An engine that answers every request so, but for the one about its token.
fn engine(name: &str, says: Vec<u8>) -> Endpoint {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("meridian-fuzz-handoff-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        folder
    });
    let path = folder.join(name);
    let _ = std::fs::remove_file(&path);
    let listener = Listener::bind(&path).expect("a socket");
    listener.set_nonblocking(true).expect("a mode");
    let listener = UnixListener::from_std(listener).expect("a runtime");
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, says.clone()));
        }
    });
    Endpoint::Unix(path)
}

async fn answer(mut stream: UnixStream, says: Vec<u8>) {
    let mut asked = vec![0; 64 << 10];
    let length = stream.read(&mut asked).await.unwrap_or(0);
    let token = b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{\"tokens\": [37]}";
    let says = if asked[..length].starts_with(b"POST /tokenize ") { token } else { &says[..] };
    let _ = stream.write_all(says).await;
}
