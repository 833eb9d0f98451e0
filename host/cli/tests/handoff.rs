//! `meridian handoff` as a process: the key of its engines, and what SIGTERM does to requests that run.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::{fs, thread};

use support::meridian_with;

use crate::support;

const KEY: &str = "sk-7";

/// An engine behind a gateway that wants the key for every path.
struct Engine {
    address: SocketAddr,
    /// The path of each request that has come.
    begun: Receiver<String>,
    /// A message lets a request to `/v1/models` end.
    end: Sender<()>,
}

impl Engine {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let address = listener.local_addr().expect("bound");
        let ((begins, begun), (end, ends)) = (channel(), channel());
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let head: Vec<String> =
                    BufReader::new(&stream).lines().map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
                let path = head[0].split(' ').nth(1).unwrap_or_default().to_owned();
                let has_key = head.iter().any(|line| *line == format!("authorization: Bearer {KEY}"));
                let status = if has_key { "200 OK" } else { "401 Unauthorized" };
                let body = r#"{"tokens":[37]}"#;
                let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{}", body.len(), &body[..5]);
                let _ = begins.send(path.clone());
                if path == "/v1/models" {
                    let _ = ends.recv();
                }
                let _ = stream.write_all(&body.as_bytes()[5..]);
            }
        });
        Self { address, begun, end }
    }

    fn options(&self) -> Vec<String> {
        let url = format!("http://{}", self.address);
        ["handoff", "--listen", "127.0.0.1:0", "--think", &url, "--answer", &url].map(str::to_owned).into()
    }
}

fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("meridian-front-{name}-{}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("can be made");
    folder
}

fn front(folder: &Path, engine: &Engine, more: &[&str]) -> (Child, SocketAddr) {
    let mut front = Command::new(env!("CARGO_BIN_EXE_meridian"))
        .args(engine.options())
        .args(more)
        .current_dir(folder)
        .env("HOME", folder)
        .env("VLLM_API_KEY", KEY)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command was built");
    let mut line = String::new();
    BufReader::new(front.stdout.as_mut().expect("piped")).read_line(&mut line).expect("text");
    let address = line.split([' ', ';']).nth(2).and_then(|address| address.parse().ok());
    (front, address.unwrap_or_else(|| panic!("it does not listen: {line}")))
}

fn get(front: SocketAddr, path: &str, more: &str) -> TcpStream {
    let mut client = TcpStream::connect(front).expect("it listens");
    write!(client, "GET {path} HTTP/1.1\r\nhost: localhost\r\n{more}\r\n").expect("it reads");
    client
}

fn rest(mut client: TcpStream) -> String {
    let mut text = Vec::new();
    let _ = client.read_to_end(&mut text);
    String::from_utf8_lossy(&text).into_owned()
}

fn terminate(front: &Child) {
    let term = Command::new("sh").args(["-c", &format!("kill -TERM {}", front.id())]).status();
    assert!(term.is_ok_and(|status| status.success()));
}

#[test]
fn the_key_comes_from_a_file_or_the_environment() {
    let (folder, engine) = (folder("key"), Engine::new());
    let options = engine.options();
    let without: Vec<&str> = options.iter().map(String::as_str).collect();
    let with = [&without[..], &["--api-key-file", "key"]].concat();
    let write = |content: &str| {
        fs::write(folder.join("key"), content).expect("can be written");
        let private = Command::new("chmod").arg("600").arg(folder.join("key")).status();
        assert!(private.is_ok_and(|status| status.success()));
    };
    let wants = "error: --api-key-file or VLLM_API_KEY: the engine that thinks: /tokenize: HTTP 401";
    let malformed = "must be one key of visible ASCII characters";
    for (file, key, line) in [
        (None, "", format!("{wants} without a key")),
        (None, "sk-8", format!("{wants} to this key")),
        (Some("sk-8\n"), KEY, format!("{wants} to this key")),
        (None, "sk 7", format!("error: VLLM_API_KEY: 4 bytes, {malformed}")),
        (Some(" \n"), KEY, format!("error: --api-key-file: key: 0 bytes, {malformed}")),
    ] {
        file.into_iter().for_each(write);
        let done = meridian_with(&folder, &[("VLLM_API_KEY", key)], if file.is_some() { &with } else { &without });
        let said = (done.code, done.stdout.as_str(), done.stderr.trim_end());
        assert_eq!(said, (2, "", line.as_str()), "{key:?}");
    }
    write("sk-7\n");
    let (mut front, address) = front(&folder, &engine, &["--api-key-file", "key"]);
    let status = |path: &str, more: &str| rest(get(address, path, more))[9..12].to_owned();
    assert_eq!(status("/health", ""), "200", "as vLLM, which guards no such path");
    assert_eq!(status("/health", "authorization: Bearer x\r\n"), "401", "the client's own key goes on");
    assert_eq!(status("/v1/embeddings", ""), "401", "the front lends its key to no client");
    assert_eq!(status("/v1/embeddings", "authorization: Bearer sk-7\r\n"), "200");
    front.kill().expect("it runs");
    front.wait().expect("it ends");
    let _ = fs::remove_dir_all(&folder);
}

#[test]
fn after_sigterm_requests_that_run_go_on_to_their_end() {
    let (folder, engine) = (folder("term"), Engine::new());
    for (more, code, says) in [
        (&[][..], 0, ""),
        (&["--shutdown-timeout", "1ms"], 1, "error: --shutdown-timeout: requests still run after 0.001 s\n"),
        (&["--shutdown-timeout", "0"], 143, ""),
    ] {
        let (mut front, address) = front(&folder, &engine, more);
        let silent = TcpStream::connect(address).expect("it listens");
        let client = get(address, "/v1/models", "authorization: Bearer sk-7\r\n");
        while engine.begun.recv().expect("it runs") != "/v1/models" {}
        terminate(&front);
        while TcpStream::connect(address).is_ok() {
            thread::yield_now();
        }
        assert_eq!(rest(silent), "", "{more:?}: a connection without a request is closed");
        if code > 0 {
            assert!(!rest(client).ends_with("[37]}"), "{more:?}");
            engine.end.send(()).expect("it waits");
        } else {
            engine.end.send(()).expect("it waits");
            assert!(rest(client).ends_with("[37]}"));
        }
        let mut said = String::new();
        front.stderr.take().expect("piped").read_to_string(&mut said).expect("text");
        let status = front.wait().expect("it ends");
        assert_eq!((status.code(), said.as_str()), (Some(code), says), "{more:?}");
    }
    let _ = fs::remove_dir_all(&folder);
}
