//! Measures how long a rollback over the admin interface takes while somebody is in its way; one JSON object a line.
//!
//!     cargo build --release --workspace --examples
//!     target/release/examples/admin_figures taken|idle|compile
//!
//! Needs 4,096 open files (`ulimit -n 4096`).

#[path = "../../wasm/tests/support/mod.rs"]
mod support;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use meridian_admin::{Admin, ConnectionLimits, Surroundings};
use meridian_core::config::{AdminConfig, TelemetryConfig};
use meridian_core::slot::{Contender, DispatchSlot, EvictionSlot, PolicySlot, StrikeLimits};
use meridian_core::{Eviction, MeridianConfig, native};
use meridian_engine::control::{Control, Given, Mode, ProcessStatus, SlotName, Upload};
use meridian_engine::{ControlledSlot, Controller, Loader, Refusal};
use meridian_wasm::{GuestKind, PolicyLimits, Runtime};

/// Connections that send nothing.
const IDLE: usize = 2_000;
const ROLLBACKS: usize = 500;
const TOKEN: &str = "a-token-of-24-characters";
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    match what.as_str() {
        "taken" => taken(),
        "idle" => idle(),
        "compile" => compile(),
        other => {
            eprintln!("error: {other:?}: expected taken, idle or compile");
            std::process::exit(2);
        }
    }
}

fn print(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

struct FromBytes(Runtime);

impl<K: GuestKind> Loader<K> for FromBytes {
    fn load(&self, upload: &Upload<'_>) -> Result<Contender<K>, Refusal> {
        let targets = MeridianConfig::default().scheduler.targets();
        let Given::Component { bytes, signature: _ } = upload.policy else {
            return Err(String::from("only components are loaded here").into());
        };
        let component = self.0.load(bytes).map_err(|error| error.to_string())?;
        let policy =
            component.policy::<K>(PolicyLimits::UNHURRIED, targets, "{}").map_err(|error| error.to_string())?;
        Ok(Contender::new(Box::new(policy), component.sha256(), upload.source))
    }
}

/// An engine whose dispatch slot has a version to return to, and its listeners.
struct Engine {
    admin: Admin,
    folder: PathBuf,
    controller: Arc<Controller>,
    /// Not asked; their slots live as long.
    _slots: (DispatchSlot, EvictionSlot),
}

impl Engine {
    fn start(listen: &str) -> Self {
        let targets = MeridianConfig::default().scheduler.targets();
        let runtime = Runtime::new(None).expect("wasmtime starts");
        let policy = |name| native::policy(name, targets, "{}").expect("a native policy without options");
        let dispatch: DispatchSlot = PolicySlot::new(policy("fcfs"), targets);
        dispatch.control().swap(Contender::new(policy("noop"), "", "native:noop"));
        let eviction = EvictionSlot::with_version(
            Contender::new(native::default_policy::<Eviction>(targets), "", "native:tiered-lru"),
            targets,
            StrikeLimits::default(),
        );
        let loader = || Box::new(FromBytes(runtime.clone()));
        let controlled = ControlledSlot { control: dispatch.control(), loader: loader() };
        let controller = Controller::new(controlled, Box::new(ProcessStatus::default))
            .with_eviction(ControlledSlot { control: eviction.control(), loader: loader() });
        let controller = Arc::new(controller);
        let folder = std::env::temp_dir().join(format!("meridian-admin-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let token = folder.join("token");
        std::fs::write(&token, TOKEN).expect("a token");
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).expect("a private token");
        let surroundings = Surroundings {
            base_dir: folder.clone(),
            run_dir: Some(folder.join("run")),
            limits: ConnectionLimits::default(),
        };
        let config = AdminConfig { listen: listen.into(), token_file: "token".into(), ..AdminConfig::default() };
        let telemetry = TelemetryConfig { prometheus: String::new(), ..TelemetryConfig::default() };
        let control = Arc::clone(&controller) as Arc<dyn Control>;
        let admin = Admin::start_in(&surroundings, control, &config, &telemetry);
        Self { admin, folder, controller, _slots: (dispatch, eviction) }
    }

    /// Roll back over the port, or the private socket without one; returns how long that took, milliseconds.
    fn rollback(&self) -> f64 {
        let started = Instant::now();
        let head = format!(
            "POST /v1/policies/dispatch/rollback HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        );
        let reply = if let Some(address) = self.admin.address() {
            let stream = TcpStream::connect(address).expect("the port accepts");
            stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
            exchange(stream, &head)
        } else {
            let path = self.admin.socket().and_then(|socket| socket.strip_prefix("unix:")).expect("a private socket");
            exchange(UnixStream::connect(path).expect("the socket accepts"), &head)
        };
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        started.elapsed().as_secs_f64() * 1e3
    }

    /// Of so many rollbacks, and more until `is_over`.
    fn report(&self, under: &str, is_over: impl Fn() -> bool) {
        let mut delays = Vec::new();
        while delays.len() < ROLLBACKS || !is_over() {
            delays.push(self.rollback());
        }
        delays.sort_by(f64::total_cmp);
        print(&format!("{under}: rollbacks"), delays.len() as f64, "rollbacks");
        print(&format!("{under}: delay of a rollback, median"), delays[delays.len() / 2], "ms");
        print(&format!("{under}: delay of a rollback, longest"), delays[delays.len() - 1], "ms");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn exchange(mut stream: impl Read + Write, head: &str) -> String {
    stream.write_all(head.as_bytes()).expect("the head is sent");
    let mut reply = String::new();
    let _ = stream.read_to_string(&mut reply);
    reply
}

/// Another process has the port, and takes what it is sent.
fn taken() {
    let squatter = TcpListener::bind("127.0.0.1:0").expect("a free port");
    squatter.set_nonblocking(true).expect("a mode");
    let engine = Engine::start(&squatter.local_addr().expect("bound").to_string());
    engine.report("the port taken", || true);
    print(
        "the port taken: connections that reached who took it",
        f64::from(u8::from(squatter.accept().is_ok())),
        "connections",
    );
}

/// Somebody keeps so many idle connections, and opens new ones as fast as he can.
fn idle() {
    let engine = Engine::start("127.0.0.1:0");
    let address = engine.admin.address().expect("a port").to_owned();
    let (is_over, opened) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut kept = VecDeque::new();
            while !is_over.load(Ordering::Relaxed) {
                if kept.len() == IDLE {
                    kept.pop_front();
                }
                if let Ok(stream) = TcpStream::connect(&address) {
                    kept.push_back(stream);
                    opened.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        while opened.load(Ordering::Relaxed) < IDLE as u64 {
            std::thread::yield_now();
        }
        engine.report("2,000 idle connections", || true);
        is_over.store(true, Ordering::Relaxed);
    });
    print("2,000 idle connections: opened in all", opened.load(Ordering::Relaxed) as f64, "connections");
}

/// A component of another slot is compiled, for seconds.
fn compile() {
    let engine = Engine::start("127.0.0.1:0");
    // Straight code that no optimisation shortens: each value depends on memory.
    let one = "(i32.store (i32.const 1024) (i32.mul (i32.load (i32.const 1028)) (i32.add (i32.load (i32.const 1032)) \
               (local.get $candidates))))\n";
    let text = format!("{}(call $list (i32.const 4096) (local.get $candidates))", one.repeat(15_000));
    let component = support::filling("eviction-policy", &support::RANK, &text);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let compiling = scope.spawn(|| {
            let started = Instant::now();
            let put =
                engine.controller.put(SlotName::Eviction, &Upload::component(&component, "figures"), Mode::Active);
            let took_s = started.elapsed().as_secs_f64();
            is_over.store(true, Ordering::Relaxed);
            put.map(|_| took_s)
        });
        engine.report("a compile of another slot", || is_over.load(Ordering::Relaxed));
        let took_s = compiling.join().expect("compiling does not panic").expect("the component loads");
        print("a compile of another slot: its time", took_s, "s");
    });
}
