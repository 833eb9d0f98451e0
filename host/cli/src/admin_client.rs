//! Asks engine processes: finds them by their discovery files, and speaks HTTP/1.1 over TCP or a Unix socket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use meridian_core::config::Listen;
use meridian_core::text::printable;
use meridian_runtime::admin::discovery::{self, Found, Process};
use meridian_runtime::control::ProcessStatus;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Longest wait for a connection and for what is at hand.
const PROMPT: Duration = Duration::from_secs(10);
/// Longest wait for a change: a component is compiled.
const COMPILING: Duration = Duration::from_secs(180);
const MAX_HEAD_BYTES: usize = 64 << 10;
/// The faults of a process with the batches they happened on.
const MAX_REPLY_BYTES: usize = 256 << 20;

/// Which process is asked.
#[derive(Args)]
pub(crate) struct Target {
    /// The engine process with this id
    #[arg(long, global = true, value_name = "N", conflicts_with = "address")]
    pub(crate) pid: Option<u32>,
    /// The engine process that listens here: IP:port on loopback, or unix:PATH
    #[arg(long, global = true, value_name = "ADDRESS")]
    pub(crate) address: Option<String>,
}

/// An admin listener.
pub(crate) struct Engine {
    /// What the process is known by.
    pub(crate) address: String,
    /// Where it is asked: its private socket where it has one, which nobody else can have taken.
    listen: Listen,
    /// The file whose token it wants, as far as known.
    pub(crate) token_file: Option<PathBuf>,
}

/// Engine processes, and discovery files that tell nothing.
pub(crate) struct Engines {
    pub(crate) engines: Vec<Engine>,
    /// A line each.
    pub(crate) malformed: Vec<String>,
}

impl Target {
    /// The one process that is meant.
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

    /// Every process, or the one that is named.
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
        self.ask(&format!("GET {path} HTTP/1.1"), None, &[], PROMPT)
    }

    /// Carry out a change, with the token of a file.
    pub(crate) fn change<T: DeserializeOwned>(
        &self,
        line: &str,
        body: &[u8],
        token_file: Option<&Path>,
    ) -> anyhow::Result<T> {
        self.put(line, "", body, token_file)
    }

    /// The same with more header lines, each ended.
    pub(crate) fn put<T: DeserializeOwned>(
        &self,
        line: &str,
        headers: &str,
        body: &[u8],
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
        let head = format!("{line} HTTP/1.1\r\n{headers}");
        self.ask(head.trim_end(), token.as_deref(), body, COMPILING)
    }

    fn ask<T: DeserializeOwned>(
        &self,
        line: &str,
        token: Option<&str>,
        body: &[u8],
        wait: Duration,
    ) -> anyhow::Result<T> {
        let mut head = format!("{line}\r\nHost: {}\r\nConnection: close\r\n", self.host());
        if let Some(token) = token {
            head += &format!("Authorization: Bearer {token}\r\n");
        }
        if line.starts_with("PUT") {
            // A refusal comes before the body is sent.
            head += &format!("Content-Length: {}\r\nExpect: 100-continue\r\n", body.len());
        }
        head += "\r\n";
        let (code, reply) = self.exchange(head.as_bytes(), body, wait).with_context(|| self.address.clone())?;
        if code == 200 {
            return serde_json::from_slice(&reply)
                .with_context(|| format!("{}: the answer is not what Meridian gives", self.address));
        }
        #[derive(Deserialize)]
        struct Refusal {
            error: String,
        }
        match serde_json::from_slice(&reply) {
            Ok(Refusal { error }) => bail!("{}: {}", self.address, shown(&error)),
            Err(_) => bail!("{}: answered {code}, and is no engine process of Meridian", self.address),
        }
    }

    fn host(&self) -> String {
        match &self.listen {
            Listen::Tcp(address) => address.to_string(),
            Listen::Unix(_) | Listen::Off => "localhost".into(),
        }
    }

    fn exchange(&self, head: &[u8], body: &[u8], wait: Duration) -> anyhow::Result<(u16, Vec<u8>)> {
        match &self.listen {
            Listen::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, PROMPT).context("cannot connect")?;
                stream.set_read_timeout(Some(wait))?;
                stream.set_write_timeout(Some(wait))?;
                exchange(stream, head, body)
            }
            Listen::Unix(path) => {
                let stream = UnixStream::connect(path).context("cannot connect")?;
                stream.set_read_timeout(Some(wait))?;
                stream.set_write_timeout(Some(wait))?;
                exchange(stream, head, body)
            }
            Listen::Off => bail!("nothing listens"),
        }
    }
}

/// One request, one response: its code and its body.
fn exchange(mut stream: impl Read + Write, head: &[u8], body: &[u8]) -> anyhow::Result<(u16, Vec<u8>)> {
    stream.write_all(head).context("cannot send")?;
    let mut read = Vec::new();
    loop {
        let mut headers = [httparse::EMPTY_HEADER; 32];
        let mut response = httparse::Response::new(&mut headers);
        let parsed = response.parse(&read).context("the answer is not HTTP")?;
        let httparse::Status::Complete(end) = parsed else {
            ensure!(read.len() < MAX_HEAD_BYTES, "the head of the answer is too large");
            ensure!(read_some(&mut stream, &mut read)? > 0, "hung up without an answer");
            continue;
        };
        let code = response.code.unwrap_or_default();
        if code == 100 {
            read.drain(..end);
            stream.write_all(body).context("cannot send the body")?;
            continue;
        }
        let length = response.headers.iter().find(|header| header.name.eq_ignore_ascii_case("content-length"));
        let length = length.and_then(|header| std::str::from_utf8(header.value).ok()?.parse().ok());
        let length: usize = length.context("the answer does not tell its length")?;
        ensure!(length <= MAX_REPLY_BYTES, "the answer is too large");
        read.drain(..end);
        while read.len() < length {
            ensure!(read_some(&mut stream, &mut read)? > 0, "hung up in the middle of the answer");
        }
        read.truncate(length);
        return Ok((code, read));
    }
}

fn read_some(stream: &mut impl Read, read: &mut Vec<u8>) -> anyhow::Result<usize> {
    let mut some = [0; 16 << 10];
    let count = stream.read(&mut some).context("does not answer")?;
    read.extend_from_slice(&some[..count]);
    Ok(count)
}

/// A text of another process, safe for a terminal, in one line.
pub(crate) fn shown(text: &str) -> String {
    printable(text).into_owned()
}
