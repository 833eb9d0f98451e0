//! A process that is asked over real sockets.

#[path = "../../../engine/tests/support/mod.rs"]
mod process;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use meridian_admin::{Admin, ConnectionLimits, Surroundings};
use meridian_core::config::{AdminConfig, TelemetryConfig};

pub use self::process::*;

pub const TOKEN: &str = "a-token-of-24-characters";

pub fn write(path: &Path, text: &str, mode: u32) {
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

pub fn config(listen: &str, token_file: &str) -> AdminConfig {
    AdminConfig { listen: listen.into(), token_file: token_file.into(), ..AdminConfig::default() }
}

pub fn metrics_at(prometheus: &str) -> TelemetryConfig {
    TelemetryConfig { prometheus: prometheus.into(), ..TelemetryConfig::default() }
}

/// A process with a token that listens on a free port, and what it was asked.
pub struct Started {
    pub admin: Admin,
    pub recorder: Arc<Recorder>,
    pub folder: PathBuf,
}

pub fn surroundings(folder: &Path) -> Surroundings {
    Surroundings { base_dir: folder.into(), run_dir: Some(folder.join("run")), limits: ConnectionLimits::default() }
}

pub fn start(name: &str) -> Started {
    start_with(name, ConnectionLimits::default())
}

pub fn start_with(name: &str, limits: ConnectionLimits) -> Started {
    let folder = folder(name);
    write(&folder.join("token"), &format!("{TOKEN}\n"), 0o600);
    let recorder = Arc::new(Recorder::default());
    let surroundings = Surroundings { limits, ..surroundings(&folder) };
    let admin =
        Admin::start_in(&surroundings, recorder.clone(), &config("127.0.0.1:0", "token"), &metrics_at("127.0.0.1:0"));
    assert_eq!(admin.problems(), [""; 0]);
    Started { admin, recorder, folder }
}

/// A response.
#[derive(Debug)]
pub struct Reply {
    pub code: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }

    /// The one line of a refusal.
    pub fn error(&self) -> String {
        let value: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        assert_eq!(value.as_object().unwrap().len(), 1);
        value["error"].as_str().unwrap().to_owned()
    }
}

impl Started {
    pub fn address(&self) -> &str {
        self.admin.address().unwrap()
    }

    /// Send bytes, and read until the other side closes.
    pub fn send(&self, bytes: &[u8]) -> String {
        send(self.address(), bytes)
    }

    pub fn get(&self, path: &str) -> Reply {
        parse(&self.send(format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n").as_bytes()))
    }

    /// A request with headers of its own.
    pub fn ask(&self, line: &str, headers: &str, body: &[u8]) -> Reply {
        let head = format!("{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n{headers}\r\n", body.len());
        parse(&self.send(&[head.as_bytes(), body].concat()))
    }

    /// A request with the token.
    pub fn change(&self, line: &str, body: &[u8]) -> Reply {
        self.ask(line, &format!("Authorization: Bearer {TOKEN}\r\n"), body)
    }
}

pub fn send(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    exchange(&mut stream, bytes)
}

pub fn exchange(stream: &mut (impl Read + Write), bytes: &[u8]) -> String {
    stream.write_all(bytes).unwrap();
    let mut reply = Vec::new();
    // What was read before a reset counts.
    let _ = stream.read_to_end(&mut reply);
    String::from_utf8(reply).unwrap()
}

pub fn parse(reply: &str) -> Reply {
    let (head, body) = reply.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no response: {reply:?}"));
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    Reply { code, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

/// Limits that a test can wait for.
pub fn short() -> ConnectionLimits {
    let soon = Duration::from_millis(100);
    ConnectionLimits {
        connections: 1,
        reserved: 1,
        head: soon,
        body: soon,
        response: soon,
        ..ConnectionLimits::default()
    }
}

/// Limits that nothing but another's place ends: no test lasts as long.
pub fn patient() -> ConnectionLimits {
    let long = Duration::from_secs(3600);
    ConnectionLimits { head: long, body: long, response: long, ..ConnectionLimits::default() }
}
