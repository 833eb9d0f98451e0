//! Measures what engines that hang or lie do to the commands over a fleet; one JSON object a line.
//!
//!     cargo build --release --workspace --bins --examples
//!     target/release/examples/engines_figures rollback|lying
//!
//! Starts `rollout_engine` and `meridian` of the same build.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use meridian_fleet::rollout::{Phase, RolloutState, read};
use meridian_fleet::{EngineClient, Fleet, Member, each};
use serde_json::{Value, json};

const ENGINES: usize = 3;
const RUNS: usize = 50;
const OLD: &str = "native:balanced";
const NEW: &str = "native:noop";
/// Longest time of a command, and what ends one that takes longer.
const LIMIT_S: f64 = 10.0;
const GIVEN_UP: Duration = Duration::from_secs(60);
/// Commands at a time.
const AT_A_TIME: usize = 4;

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("rollback") => rollback(),
        Some("lying") => lying(),
        other => {
            eprintln!("error: {:?}: expected rollback or lying", other.unwrap_or_default());
            std::process::exit(2);
        }
    }
}

fn print(name: &str, value: f64, unit: &str, bound: Option<f64>) {
    println!("{}", json!({ "name": name, "value": value, "unit": unit, "bound": bound }));
}

/// A program of this build.
fn built(name: &str) -> Command {
    let examples = std::env::current_exe().expect("a path").parent().expect("a folder").to_owned();
    Command::new(if name == "meridian" { examples.with_file_name(name) } else { examples.join(name) })
}

fn pause() {
    thread::sleep(Duration::from_millis(5));
}

/// Engine processes, and their folder.
struct Engines {
    folder: PathBuf,
    addresses: Vec<String>,
    children: Vec<Child>,
}

impl Engines {
    fn start(count: usize) -> Self {
        let folder = std::env::temp_dir().join(format!("meridian-engines-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let mut engines = Self { folder, addresses: Vec::new(), children: Vec::new() };
        engines.private("token", "a-token-of-24-characters\n");
        for _ in 0..count {
            let address = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port");
            let mut command = built("rollout_engine");
            command.arg(address.port().to_string()).arg(engines.folder.join("token"));
            command.env("XDG_RUNTIME_DIR", &engines.folder).stdout(Stdio::null()).stderr(Stdio::null());
            engines.children.push(command.spawn().expect("rollout_engine was built"));
            engines.addresses.push(address.to_string());
        }
        engines.clients().iter().for_each(|engine| {
            while engine.status().is_err() {
                pause()
            }
        });
        engines
    }

    fn private(&self, name: &str, text: &str) -> PathBuf {
        let path = self.folder.join(name);
        std::fs::write(&path, text).expect("a file");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("a private file");
        path
    }

    /// The fleet file of these addresses.
    fn fleet(&self, name: &str, addresses: &[String]) -> PathBuf {
        let rows =
            addresses.iter().enumerate().map(|(i, at)| format!("[[engine]]\nname = \"e{i}\"\naddress = \"{at}\"\n"));
        self.private(name, &format!("token_file = \"token\"\n{}", rows.collect::<String>()))
    }

    fn clients(&self) -> Vec<EngineClient> {
        let fleet = Fleet::from_file(&self.fleet("own.toml", &self.addresses)).expect("a fleet file");
        fleet.engines
    }

    /// SIGSTOP or SIGCONT.
    fn signal(&self, engine: usize, signal: &str) {
        let kill = format!("kill -{signal} {}", self.children[engine].id());
        let done = Command::new("sh").args(["-c", &kill]).status();
        assert!(done.is_ok_and(|status| status.success()), "{kill}");
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn decides(engine: &EngineClient) -> String {
    engine.status().ok().and_then(|status| Some(status.slots.first()?.active.source.clone())).unwrap_or_default()
}

fn command(words: &[&str], fleet: &Path, folder: &Path) -> Child {
    let mut command = built("meridian");
    command.args(words).arg("--fleet").arg(fleet).env("XDG_RUNTIME_DIR", folder).env("HOME", folder);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("meridian was built")
}

/// From the command to abort until no engine that runs has the new policy, while one is stopped.
fn rollback() {
    let engines = Engines::start(ENGINES);
    let (clients, fleet) = (engines.clients(), engines.fleet("fleet.toml", &engines.addresses));
    let (mut times, mut returned, mut clean) = (Vec::new(), Vec::new(), 0);
    for run in 0..RUNS {
        let dir = engines.folder.join(format!("rollout-{run}"));
        let folder = dir.to_str().expect("text").to_owned();
        let start =
            ["rollout", "start", NEW, "--to", "100%", "--hold", "2s", "--interval", "250ms", "--settle", "100ms"];
        let words = [&start[..], &["--guard", "output_itl_p50<=9x", "--folder", &folder]].concat();
        let mut leader = command(&words, &fleet, &engines.folder);
        let is_step = |state: RolloutState| matches!(state.phase, Phase::Step { .. }) && state.intervals > 0;
        while !read(&dir).is_ok_and(is_step) {
            pause();
        }
        let stopped = run % ENGINES;
        engines.signal(stopped, "STOP");
        let begun = Instant::now();
        let mut abort = command(&["rollout", "abort", "--folder", &folder], &fleet, &engines.folder);
        let others = || clients.iter().enumerate().filter(|(i, _)| *i != stopped).map(|(_, engine)| engine);
        while others().any(|engine| decides(engine) != OLD) {
            pause();
        }
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        if run % 5 == 0 {
            let _ = abort.wait();
            returned.push(begun.elapsed().as_secs_f64());
        }
        engines.signal(stopped, "CONT");
        let _ = abort.wait();
        let _ = leader.wait();
        let is_whole = read(&dir).is_ok_and(|state| state.outcome().is_some() && state.left_behind().next().is_none());
        clean += usize::from(is_whole && clients.iter().all(|engine| decides(engine) == OLD));
    }
    times.sort_by(f64::total_cmp);
    returned.sort_by(f64::total_cmp);
    let p99 = times[(RUNS * 99).div_ceil(100) - 1];
    print("one of three engines stopped: rollbacks of the others", RUNS as f64, "runs", None);
    print("one of three engines stopped: rollback of the others, median", times[RUNS / 2], "ms", None);
    print("one of three engines stopped: rollback of the others, p99", p99, "ms", Some(1000.0));
    print("one of three engines stopped: abort returns, longest", returned[returned.len() - 1], "s", Some(LIMIT_S));
    print(
        "one of three engines stopped: runs in which it did not go back after it went on",
        (RUNS - clean) as f64,
        "runs",
        Some(0.0),
    );
}

/// How an engine lies.
#[derive(Clone, Copy, Debug)]
enum Lie {
    SaysNothing,
    HangsUp,
    HalfAHead,
    DripsItsHead,
    DripsItsBody,
    NoHttp,
    Html,
    WrongJson,
    OtherJson,
    DeepJson,
    ErrorAsAnswer,
    NotFound,
    Redirects,
    EndlessBody,
    ShortBody,
    ContinuesForEver,
    HugeNumbers,
    WildTexts,
    NoSlots,
    HangsAfterItsStatus,
}

const LIES: [Lie; 20] = [
    Lie::SaysNothing,
    Lie::HangsUp,
    Lie::HalfAHead,
    Lie::DripsItsHead,
    Lie::DripsItsBody,
    Lie::NoHttp,
    Lie::Html,
    Lie::WrongJson,
    Lie::OtherJson,
    Lie::DeepJson,
    Lie::ErrorAsAnswer,
    Lie::NotFound,
    Lie::Redirects,
    Lie::EndlessBody,
    Lie::ShortBody,
    Lie::ContinuesForEver,
    Lie::HugeNumbers,
    Lie::WildTexts,
    Lie::NoSlots,
    Lie::HangsAfterItsStatus,
];

const COMMANDS: [&[&str]; 6] = [
    &["ctl", "status", "--all"],
    &["ctl", "swap", "dispatch", NEW, "--all"],
    &["top", "--engine", "e1"],
    &["why", "a", "--engine", "e1"],
    &["experiment", "start", NEW, "--engine", "e1", "--folder"],
    &["rollout", "start", NEW, "--folder"],
];

/// Every number of a status as large as it can be, or every text as wild.
fn exaggerated(value: &mut Value, lie: Lie) {
    match value {
        Value::Number(number) if matches!(lie, Lie::HugeNumbers) => {
            *value = if number.is_f64() { json!(-1e308) } else { json!(u32::MAX) };
        }
        Value::String(text)
            if matches!(lie, Lie::WildTexts) && !["dispatch", "eviction", "budget"].contains(&text.as_str()) =>
        {
            *value = json!(format!("\u{1b}[2J\n\u{202e}{}", "w".repeat(100_000)));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| exaggerated(item, lie)),
        Value::Object(fields) => fields.values_mut().for_each(|item| exaggerated(item, lie)),
        _ => {}
    }
}

fn drip(stream: &mut TcpStream, text: &[u8]) {
    for byte in text.iter().cycle() {
        if stream.write_all(&[*byte]).is_err() {
            return;
        }
        thread::sleep(Duration::from_millis(100));
    }
}

fn lie(mut stream: TcpStream, lie: Lie, status: &Value) {
    let mut head = [0; 8192];
    let length = stream.read(&mut head).unwrap_or(0);
    let ok = |body: &str| format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let of_status = |change: &dyn Fn(&mut Value)| {
        let mut status = status.clone();
        change(&mut status);
        ok(&status.to_string())
    };
    let text = match lie {
        Lie::HangsUp => return,
        Lie::SaysNothing => String::new(),
        Lie::HalfAHead => "HTTP/1.1 200 OK\r\nContent-Le".into(),
        Lie::DripsItsHead => return drip(&mut stream, b"HTTP/1.1 200 OK\r\nX: y\r\n"),
        Lie::DripsItsBody => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n");
            return drip(&mut stream, b" ");
        }
        Lie::NoHttp => "SSH-2.0-engine\r\n\r\n".into(),
        Lie::Html => ok("<html>It works!</html>"),
        Lie::WrongJson => ok("{\"pid\": 1, "),
        Lie::OtherJson => ok("[[], {}, null]"),
        Lie::DeepJson => ok(&"[".repeat(1 << 20)),
        Lie::ErrorAsAnswer => ok("{\"error\": \"the engine is on fire\"}"),
        Lie::NotFound => "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".into(),
        Lie::Redirects => "HTTP/1.1 302 Found\r\nLocation: /v1/status\r\nContent-Length: 0\r\n\r\n".into(),
        Lie::EndlessBody => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
            let chunk = [b"100000\r\n".to_vec(), vec![b' '; 1 << 20], b"\r\n".to_vec()].concat();
            while stream.write_all(&chunk).is_ok() {}
            return;
        }
        Lie::ShortBody => {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n{");
            return;
        }
        Lie::ContinuesForEver => {
            while stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").is_ok() {
                thread::sleep(Duration::from_millis(10));
            }
            return;
        }
        Lie::HugeNumbers | Lie::WildTexts => of_status(&|status: &mut Value| exaggerated(status, lie)),
        Lie::NoSlots => of_status(&|status: &mut Value| status["slots"] = json!([])),
        Lie::HangsAfterItsStatus if head[..length].starts_with(b"GET /v1/status ") => of_status(&|_: &mut Value| ()),
        Lie::HangsAfterItsStatus => String::new(),
    };
    let _ = stream.write_all(text.as_bytes());
    // Until the client hangs up.
    let _ = stream.read_to_end(&mut Vec::new());
}

/// The address of a liar.
fn liar(kind: Lie, status: &Arc<Value>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let (address, status) = (listener.local_addr().expect("bound").to_string(), Arc::clone(status));
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let status = Arc::clone(&status);
            thread::spawn(move || lie(stream, kind, &status));
        }
    });
    address
}

/// What a command came to.
struct Ended {
    seconds: f64,
    /// It panicked, was ended by a signal, or fails in more than a line.
    problem: Option<String>,
}

fn run(words: &[&str], fleet: &Path, folder: &Path) -> Ended {
    let begun = Instant::now();
    let mut child = command(words, fleet, folder);
    let mut pipes = (child.stdout.take().expect("piped"), child.stderr.take().expect("piped"));
    let (mut out, mut said) = (Vec::new(), Vec::new());
    let (seconds, status) = thread::scope(|scope| {
        scope.spawn(|| pipes.0.read_to_end(&mut out));
        scope.spawn(|| pipes.1.read_to_end(&mut said));
        while begun.elapsed() < GIVEN_UP && matches!(child.try_wait(), Ok(None)) {
            pause();
        }
        let seconds = begun.elapsed().as_secs_f64();
        let _ = child.kill();
        (seconds, child.wait().expect("it has ended"))
    });
    let said = String::from_utf8_lossy(&said);
    let is_whole = match status.code() {
        Some(0) => !out.is_empty(),
        // A roll-out names each engine, another command has one line, after its rows or alone.
        Some(1 | 2) => (1..=ENGINES).contains(&said.lines().count()),
        _ => false,
    };
    let is_good = is_whole && !said.contains("panicked");
    Ended { seconds, problem: (!is_good).then(|| format!("{words:?}: {status:?}: {said}")) }
}

/// Each command over two engines and one that lies, in each of its ways.
fn lying() {
    let engines = Engines::start(ENGINES - 1);
    let status = Arc::new(engines.clients()[0].get::<Value>("/v1/status").expect("a status"));
    let asks: Vec<(usize, Lie, usize)> = LIES
        .iter()
        .enumerate()
        .flat_map(|(number, kind)| (0..COMMANDS.len()).map(move |command| (number, *kind, command)))
        .collect();
    let ended = each(&asks, AT_A_TIME, |(number, kind, which)| {
        let name = format!("{number}-{which}");
        let addresses = [engines.addresses[0].clone(), liar(*kind, &status), engines.addresses[1].clone()];
        let fleet = engines.fleet(&format!("{name}.toml"), &addresses);
        let dir = engines.folder.join(&name);
        let mut words = COMMANDS[*which].to_vec();
        if words.last() == Some(&"--folder") {
            words.push(dir.to_str().expect("text"));
        }
        let ended = run(&words, &fleet, &engines.folder);
        if ended.problem.is_some() || ended.seconds > LIMIT_S {
            eprintln!("{kind:?}: {:.1} s: {}", ended.seconds, ended.problem.as_deref().unwrap_or("too long"));
        }
        ended
    });
    let longest = ended.iter().map(|ended| ended.seconds).fold(0.0, f64::max);
    let bad = ended.iter().filter(|ended| ended.problem.is_some()).count();
    print("20 kinds of lying engines, 6 commands: commands", ended.len() as f64, "commands", None);
    print("20 kinds of lying engines, 6 commands: longest", longest, "s", Some(LIMIT_S));
    print(
        "20 kinds of lying engines, 6 commands: neither a line nor a whole answer",
        bad as f64,
        "commands",
        Some(0.0),
    );
}
