//! A registry on this machine, and a proxy before it that does what the network and other registries do.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(dead_code, reason = "each user needs some of them")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

/// The user of the registry, and the password.
pub const USER: &str = "ann";
pub const PASSWORD: &str = "geheim";
/// bcrypt of the password.
const HTPASSWD: &str = "ann:$2b$04$EA1a6QzcyzoeF/48XQaBFOaamtupIWhW57bjDSj1ffNAiQ6Cr36lS\n";

/// The program of Debian's docker-registry, which the script fetches once.
fn program() -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/fetch.sh");
    let made = Command::new(&script).arg("registry").stderr(Stdio::inherit()).output().unwrap();
    assert!(made.status.success(), "{} failed", script.display());
    String::from_utf8(made.stdout).unwrap().trim().into()
}

/// Whether a registry wants to know who asks.
#[derive(Clone, Copy, PartialEq)]
pub enum Login {
    Wanted,
    /// For calls in the tests' own process, where a login would have to come from the environment of all tests.
    None,
}

/// A registry, which ends with this value.
pub struct DockerRegistry {
    child: Child,
    pub address: SocketAddr,
}

impl DockerRegistry {
    /// It keeps everything in `folder`.
    pub fn start(folder: &Path, login: Login) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join("htpasswd"), HTPASSWD).unwrap();
        let shown = folder.display();
        let config = format!(
            "version: 0.1\nlog: {{level: info}}\nstorage: {{filesystem: {{rootdirectory: {shown}/data}}}}\n\
             http: {{addr: '127.0.0.1:0'}}\n"
        );
        let auth = match login {
            Login::Wanted => format!("auth: {{htpasswd: {{realm: test, path: {shown}/htpasswd}}}}\n"),
            Login::None => String::new(),
        };
        let config = config + &auth;
        let file = folder.join("config.yml");
        std::fs::write(&file, config).unwrap();
        let mut command = Command::new(program());
        command.arg("serve").arg(&file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.env("OTEL_TRACES_EXPORTER", "none").spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
        let found = log.by_ref().find_map(|line| {
            let (_, behind) = line.ok()?.split_once("listening on ").map(|(a, b)| (a.to_owned(), b.to_owned()))?;
            behind.split(['"', ' ', ',']).next()?.parse().ok()
        });
        thread::spawn(move || log.for_each(drop));
        Self { address: found.expect("the registry listens"), child }
    }
}

impl Drop for DockerRegistry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A docker configuration with this login for each address; returns its folder.
pub fn docker_config(folder: &Path, addresses: &[SocketAddr], user: &str, password: &str) -> PathBuf {
    let folder = folder.join("docker");
    std::fs::create_dir_all(&folder).unwrap();
    let logins: Vec<_> = addresses
        .iter()
        .map(|address| format!(r#""{address}": {{"username": "{user}", "password": "{password}"}}"#))
        .collect();
    std::fs::write(folder.join("config.json"), format!(r#"{{"auths": {{{}}}}}"#, logins.join(", "))).unwrap();
    folder
}

/// What the proxy does with a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// Pass it on.
    None,
    /// Answer with this status, and no body.
    Status(u16),
    /// Answer with a whole response.
    Answer(Vec<u8>),
    /// Pass it on, and change a byte of the answer's body.
    WrongBytes,
    /// Pass it on, and end the connection in the middle of the answer's body.
    Truncated,
    /// End the connection without an answer.
    Reset,
    /// Answer only when [`Proxy::release`] is called, and then pass it on.
    Stall,
    /// Begin an answer that never ends.
    Endless,
}

/// Decides by method and path. Called once for each request.
pub type Plan = Box<dyn FnMut(&str, &str) -> Fault + Send>;

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Seen {
    pub method: String,
    pub path: String,
    /// The whole head.
    pub head: String,
    pub body: Vec<u8>,
}

struct Shared {
    upstream: Mutex<Option<SocketAddr>>,
    plan: Mutex<Plan>,
    seen: Mutex<Vec<Seen>>,
    /// Stalled requests so far, and whether they are released.
    stalled: Mutex<(usize, bool)>,
    changed: Condvar,
}

/// Stands before a registry. Its threads end with the process.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    pub fn before(upstream: Option<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            upstream: Mutex::new(upstream),
            plan: Mutex::new(Box::new(|_, _| Fault::None)),
            seen: Mutex::default(),
            stalled: Mutex::default(),
            changed: Condvar::new(),
        });
        let served = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                let served = Arc::clone(&served);
                thread::spawn(move || serve(&served, client.unwrap()));
            }
        });
        Self { address, shared }
    }

    /// From now on, do this; forgets what was seen.
    pub fn plan(&self, plan: impl FnMut(&str, &str) -> Fault + Send + 'static) {
        *self.shared.plan.lock().unwrap() = Box::new(plan);
        self.shared.seen.lock().unwrap().clear();
        *self.shared.stalled.lock().unwrap() = (0, false);
    }

    /// Do this with the first requests whose path has `part`, and pass on all others.
    pub fn first(&self, part: &'static str, faults: Vec<Fault>) {
        let mut faults = faults.into_iter();
        self.plan(move |_, path| if path.contains(part) { faults.next().unwrap_or(Fault::None) } else { Fault::None });
    }

    /// Do this with every request whose path has `part`.
    pub fn always(&self, part: &'static str, fault: Fault) {
        self.plan(move |_, path| if path.contains(part) { fault.clone() } else { Fault::None });
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Wait until so many requests are stalled.
    pub fn wait_for_stalled(&self, count: usize) {
        let stalled = self.shared.stalled.lock().unwrap();
        drop(self.shared.changed.wait_while(stalled, |(stalled, _)| *stalled < count).unwrap());
    }

    /// Let the stalled requests, and all later ones, pass.
    pub fn release(&self) {
        *self.shared.plan.lock().unwrap() = Box::new(|_, _| Fault::None);
        self.shared.stalled.lock().unwrap().1 = true;
        self.shared.changed.notify_all();
    }

    /// The registry is gone.
    pub fn cut_off(&self) {
        *self.shared.upstream.lock().unwrap() = None;
    }
}

/// One request a connection.
fn serve(shared: &Shared, client: TcpStream) {
    let mut reader = BufReader::new(client.try_clone().unwrap());
    let Some((head, body)) = read_message(&mut reader) else { return };
    let mut words = head.split(' ');
    let (method, path) = (words.next().unwrap().to_owned(), words.next().unwrap_or_default().to_owned());
    shared.seen.lock().unwrap().push(Seen {
        method: method.clone(),
        path: path.clone(),
        head: head.clone(),
        body: body.clone(),
    });
    let fault = (shared.plan.lock().unwrap())(&method, &path);
    let client = &client;
    let passed = || {
        let upstream = (*shared.upstream.lock().unwrap())?;
        let mut registry = TcpStream::connect(upstream).ok()?;
        let (first, rest) = head.split_once("\r\n")?;
        write!(registry, "{first}\r\nConnection: close\r\n{rest}").ok()?;
        registry.write_all(&body).ok()?;
        let mut answer = Vec::new();
        registry.read_to_end(&mut answer).ok()?;
        Some(answer)
    };
    let send = |bytes: &[u8]| {
        let mut client = client;
        let _ = client.write_all(bytes);
    };
    match fault {
        Fault::None => passed().iter().for_each(|answer| send(answer)),
        Fault::Status(status) => {
            send(format!("HTTP/1.1 {status} Fault\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").as_bytes());
        }
        Fault::Answer(answer) => send(&answer),
        Fault::WrongBytes => {
            if let Some(mut answer) = passed() {
                *answer.last_mut().unwrap() ^= 1;
                send(&answer);
            }
        }
        Fault::Truncated => {
            if let Some(answer) = passed() {
                let body = answer.windows(4).position(|end| end == b"\r\n\r\n").unwrap() + 4;
                send(&answer[..body + (answer.len() - body) / 2]);
            }
        }
        Fault::Reset => {}
        Fault::Stall => {
            let mut stalled = shared.stalled.lock().unwrap();
            stalled.0 += 1;
            shared.changed.notify_all();
            drop(shared.changed.wait_while(stalled, |(_, is_released)| !*is_released).unwrap());
            passed().iter().for_each(|answer| send(answer));
        }
        Fault::Endless => {
            let mut client = client;
            let head = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nConnection: close\r\n\r\n";
            let mut sent = client.write_all(head);
            while sent.is_ok() {
                sent = client.write_all(&[b' '; 1 << 16]);
            }
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}

/// Head with its empty line, and body by its length.
fn read_message(reader: &mut impl BufRead) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
    }
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    Some((head, body))
}
