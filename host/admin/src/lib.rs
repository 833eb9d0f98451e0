//! The admin listener of an engine process: [`Control`] over HTTP, metrics, and a file that `meridian ctl` reads to
//! find the process.

mod audit;
mod budgets;
pub mod discovery;
mod listener;
mod metrics;
mod routes;
mod serve;
mod signature;
mod tls;
mod token;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use meridian_core::MeridianConfig;
use meridian_core::config::{AdminConfig, Listen, TelemetryConfig, of_rank};
use meridian_engine::control::Control;
use meridian_engine::{Listeners, private};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use self::audit::{Actor, AuditLog, Audited, AuditedEngine};
use self::discovery::{Entry, Process};
use self::listener::{Listener, WhereTaken};
use self::routes::{Access, Reach, Site};
pub use self::routes::{CONFIG_HEADER, FORWARDED_HEADER, is_for_loopback};
use self::serve::Client;
pub use self::signature::{SIGNATURE_HEADER, signature_header};
use self::tls::Certificate;
use self::token::{Tokens, read_tokens};
pub use self::token::{read_all_tokens, read_token};

/// Time that dropping waits for a running change.
const CLOSING: Duration = Duration::from_secs(2);

/// Limits on a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Requests that each listener serves at a time; more wait.
    pub connections: usize,
    /// Additional places for requests with the token: this many for uploads of a component, and this many for other
    /// changes.
    pub reserved: usize,
    /// Connections that are not served yet; one more closes the oldest.
    pub waiting: usize,
    /// Time from connecting to the end of the request's head.
    pub head: Duration,
    /// Time for the body of a request.
    pub body: Duration,
    /// Time for reading the response.
    pub response: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            connections: 32,
            reserved: 4,
            waiting: 128,
            head: Duration::from_secs(5),
            body: Duration::from_secs(30),
            response: Duration::from_secs(30),
        }
    }
}

/// The surroundings of the listeners besides their configuration.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Folder that relative paths in the configuration start from.
    pub base_dir: PathBuf,
    /// Folder of the discovery file; `None` for no file.
    pub run_dir: Option<PathBuf>,
    /// Limits on a client.
    pub limits: ConnectionLimits,
}

/// The listeners of a process. Dropping them waits for a running change, at most two seconds, because the compiler
/// cannot be interrupted. It then closes the ports and removes the discovery file and the Unix sockets. An unfinished
/// change ends by itself.
///
/// ```
/// use std::sync::Arc;
///
/// use meridian_core::config::{AdminConfig, TelemetryConfig};
/// use meridian_admin::{Admin, Surroundings};
/// # use meridian_engine::control::{Control, ControlError, FaultEntry, Mode, ProcessStatus, SlotName, SwapReport, Upload};
/// # struct Engine;
/// # impl Control for Engine {
/// #     fn status(&self) -> ProcessStatus { ProcessStatus::default() }
/// #     fn faults(&self) -> Vec<FaultEntry> { Vec::new() }
/// #     fn put(&self, slot: SlotName, _: &Upload<'_>, _: Mode) -> Result<SwapReport, ControlError> {
/// #         Err(ControlError::NoSuchSlot(slot))
/// #     }
/// #     fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
/// #     fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
/// #     fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
/// #     fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
/// # }
///
/// let config = AdminConfig { listen: "127.0.0.1:0".into(), ..AdminConfig::default() };
/// let telemetry = TelemetryConfig { prometheus: String::new(), ..TelemetryConfig::default() };
/// let surroundings = Surroundings { base_dir: ".".into(), run_dir: None, limits: Default::default() };
/// let admin = Admin::start_in(&surroundings, Arc::new(Engine), &config, &telemetry);
/// assert!(admin.problems().is_empty());
/// assert!(admin.address().unwrap().starts_with("127.0.0.1:"));
/// ```
#[derive(Debug)]
pub struct Admin {
    problems: Vec<String>,
    address: Option<String>,
    socket: Option<String>,
    metrics_address: Option<String>,
    audit: Option<Arc<AuditLog>>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    /// A forked child drops the listeners of its parent.
    pid: u32,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
    /// Dropped after the thread has ended.
    left_behind: (Option<Entry>, Vec<listener::SocketFile>),
}

impl Admin {
    /// Listen as configured, with the limits and the folder of discovery files of this process. Returns at once and
    /// never fails; see [`problems`](Self::problems). Call it in the scheduling process, after any fork.
    #[must_use]
    pub fn start(control: Arc<dyn Control>, admin: &AdminConfig, telemetry: &TelemetryConfig, base_dir: &Path) -> Self {
        let run_dir = discovery::run_dirs().into_iter().next();
        let surroundings = Surroundings { base_dir: base_dir.to_owned(), run_dir, limits: ConnectionLimits::default() };
        Self::start_in(&surroundings, control, admin, telemetry)
    }

    /// As [`start`](Self::start), in given surroundings.
    #[must_use]
    pub fn start_in(
        surroundings: &Surroundings,
        control: Arc<dyn Control>,
        admin: &AdminConfig,
        telemetry: &TelemetryConfig,
    ) -> Self {
        let mut problems = Vec::new();
        let status = control.status();
        let process =
            Process { model: status.model, dp_rank: status.dp_rank, dp_size: status.dp_size, ..Process::own() };
        // The file watch has lines in the audit log even without a listener.
        let permits = permits(admin, &surroundings.base_dir, &process);
        let audit = permits.access.audit.clone();
        let started = start(surroundings, control, admin, telemetry, process, permits, &mut problems);
        for problem in &problems {
            tracing::warn!("{problem}");
        }
        let Some(Started { running, process }) = started else {
            return Self { problems, address: None, socket: None, metrics_address: None, audit, running: None };
        };
        let Process { admin: address, socket, metrics: metrics_address, .. } = process;
        Self { problems, address, socket, metrics_address, audit, running: Some(running) }
    }

    /// Problems, a line each: the dotted field, the value, and the reason.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// The private socket of this process, `unix:PATH`. `meridian ctl` finds the admin interface there even if another
    /// process has the configured port.
    #[must_use]
    pub fn socket(&self) -> Option<&str> {
        self.socket.as_deref()
    }

    /// The engine for a part of this process that changes its policies: the audit log names it `who`.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use meridian_core::config::{AdminConfig, TelemetryConfig};
    /// # use meridian_admin::{Admin, Surroundings};
    /// # use meridian_engine::control::{Control, ControlError, FaultEntry, Mode, ProcessStatus, SlotName, SwapReport, Upload};
    /// # struct Engine;
    /// # impl Control for Engine {
    /// #     fn status(&self) -> ProcessStatus { ProcessStatus::default() }
    /// #     fn faults(&self) -> Vec<FaultEntry> { Vec::new() }
    /// #     fn put(&self, slot: SlotName, _: &Upload<'_>, _: Mode) -> Result<SwapReport, ControlError> {
    /// #         Err(ControlError::NoSuchSlot(slot))
    /// #     }
    /// #     fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
    /// #     fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
    /// #     fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
    /// #     fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> { Err(ControlError::NoSuchSlot(slot)) }
    /// # }
    /// # let engine: Arc<dyn Control> = Arc::new(Engine);
    /// # let surroundings = Surroundings { base_dir: ".".into(), run_dir: None, limits: Default::default() };
    /// # let (config, telemetry) = (AdminConfig { listen: String::new(), ..Default::default() }, TelemetryConfig {
    /// #     prometheus: String::new(), ..Default::default()
    /// # });
    /// let admin = Admin::start_in(&surroundings, Arc::clone(&engine), &config, &telemetry);
    /// assert!(admin.audited(engine, "file watch").promote(SlotName::Dispatch).is_err());
    /// ```
    #[must_use]
    pub fn audited(&self, control: Arc<dyn Control>, who: &str) -> Arc<dyn Control> {
        let actor = Actor { who: Some(who.into()), peer: "this process".into() };
        Arc::new(Audited { control, log: self.audit.clone(), actor })
    }

    /// The other address of the admin interface, `IP:port`, `https://IP:port` or `unix:PATH`; `None` where another process listens.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// The other address of the metrics, `IP:port` or `unix:PATH`.
    #[must_use]
    pub fn metrics_address(&self) -> Option<&str> {
        self.metrics_address.as_deref()
    }
}

impl Listeners for Admin {
    fn socket(&self) -> Option<&str> {
        Self::socket(self)
    }

    fn audited(&self, control: Arc<dyn Control>, who: &str) -> Arc<dyn Control> {
        Self::audited(self, control, who)
    }
}

/// Start the listeners of an engine, as [`Admin::start`] does: for [`Settings::serve`](meridian_engine::Settings::serve).
///
/// ```
/// use meridian_core::MeridianConfig;
/// use meridian_engine::{Engine, Settings};
///
/// let config = MeridianConfig::from_toml("[admin]\nlisten = ''\n[telemetry]\nprometheus = ''\n")?;
/// let engine = Engine::start(config, Settings { serve: Some(meridian_admin::serve), ..Settings::default() })?;
/// assert!(engine.socket().is_none(), "nothing to listen on");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use]
pub fn serve(control: Arc<dyn Control>, config: &MeridianConfig, base_dir: &Path) -> Box<dyn Listeners> {
    Box::new(Admin::start(control, &config.admin, &config.telemetry, base_dir))
}

impl Drop for Admin {
    fn drop(&mut self) {
        let Some(running) = self.running.take() else { return };
        if running.pid != std::process::id() {
            std::mem::forget(running);
            return;
        }
        let Running { pid: _, stop, thread, left_behind } = running;
        let _ = stop.send(());
        // The panic hook has reported a panic of the thread.
        let _ = thread.join();
        drop(left_behind);
    }
}

/// Serve one connection of the admin interface over any stream, as a connection from this machine. Returns when the
/// connection has ended. Changes run on blocking threads of the tokio runtime that polls it.
pub async fn serve_stream<S>(stream: S, control: Arc<dyn Control>, token: Option<String>, limits: ConnectionLimits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let access = Access { tokens: token.map(Tokens::one), ..Access::default() };
    let site = Arc::new(Site::new(control, access, Vec::new(), limits));
    let client = Client { reach: Reach::Loopback, peer: "a stream".into() };
    serve::connection(stream, client, routes::admin(Arc::clone(&site)), &site, None, limits).await;
}

struct Started {
    running: Running,
    process: Process,
}

/// `None` without any listener.
fn start(
    surroundings: &Surroundings,
    control: Arc<dyn Control>,
    admin: &AdminConfig,
    telemetry: &TelemetryConfig,
    process: Process,
    permits: Permits,
    problems: &mut Vec<String>,
) -> Option<Started> {
    let Permits { access, token_path, problems: mut found } = permits;
    // Engines of one configuration differ by their rank.
    let rank = process.dp_rank.unwrap_or(0);
    let AdminConfig { listen, .. } = admin;
    let TelemetryConfig { prometheus, tenants: _, otlp_endpoint: _, otlp_ca_file: _, service_name: _ } = telemetry;
    let [listen, prometheus] = &[listen, prometheus].map(|text| Listen::of_rank(text, rank));
    let Surroundings { base_dir, run_dir, limits } = surroundings;
    if listen.is_empty() && prometheus.is_empty() {
        problems.append(&mut found);
        return None;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(routes::CALLS)
        .thread_name("meridian-admin")
        .build()
        .map_err(|error| problems.push(format!("admin: cannot start: {error}")))
        .ok()?;

    let private = run_dir.as_deref().filter(|dir| {
        private::make_dir(dir)
            .map_err(|reason| {
                problems.push(format!("admin: {}: {reason}; `meridian ctl` needs --address", dir.display()))
            })
            .is_ok()
    });
    let socket = private.filter(|_| !listen.is_empty()).and_then(|dir| own_socket(&runtime, dir, problems));
    let own = socket.as_ref().map(|socket| socket.address.as_str());
    let tls = if listen.is_empty() { Tls::Off } else { certificate(admin, base_dir, rank, &mut found) };
    let admin_listener = match tls {
        // Not in the clear where the configuration says TLS.
        Tls::Unusable => None,
        Tls::Off => bind(&runtime, &Listens::admin(listen, own, None, &access), base_dir, private, problems),
        Tls::On(certificate) => {
            bind(&runtime, &Listens::admin(listen, own, Some(certificate), &access), base_dir, private, problems)
        }
    };
    let metrics_listener = bind(&runtime, &Listens::metrics(prometheus), base_dir, private, problems);
    problems.append(&mut found);
    if socket.is_none() && admin_listener.is_none() && metrics_listener.is_none() {
        return None;
    }

    let address = |listener: &Option<Listener>| listener.as_ref().map(|listener| listener.address.clone());
    let process = Process {
        admin: address(&admin_listener),
        socket: address(&socket),
        metrics: address(&metrics_listener),
        token_file: token_path.filter(|_| access.tokens.is_some()).and_then(|path| path.to_str().map(str::to_owned)),
        ..process
    };
    let entry = private.and_then(|dir| {
        Entry::write(dir, &process)
            .map_err(|error| problems.push(format!("admin: {}: cannot be written: {error}", dir.display())))
            .ok()
    });
    let site = Arc::new(Site::new(control, access, problems.clone(), *limits));
    let mut left_behind = Vec::new();
    let mut serve = |listener: Option<Listener>, router: axum::Router| {
        let Some(Listener { socket, address: _, file }) = listener else { return };
        left_behind.extend(file);
        runtime.spawn(serve::serve(socket, router, Arc::clone(&site), *limits));
    };
    serve(socket, routes::admin(Arc::clone(&site)));
    serve(admin_listener, routes::admin(Arc::clone(&site)));
    serve(metrics_listener, routes::metrics_only(Arc::clone(&site)));

    let (stop, stopped) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("meridian-admin".into())
        .spawn(move || {
            let _ = runtime.block_on(stopped);
            // Drops the listeners and the connections, and waits for a running call.
            runtime.shutdown_timeout(CLOSING);
        })
        .map_err(|error| problems.push(format!("admin: cannot start a thread: {error}")))
        .ok()?;
    let running = Running { pid: std::process::id(), stop, thread, left_behind: (entry, left_behind) };
    Some(Started { running, process })
}

/// The tokens and the audit log, and the path of the tokens.
struct Permits {
    access: Access,
    token_path: Option<PathBuf>,
    /// A line each.
    problems: Vec<String>,
}

/// Nothing can be changed over a listener where one of the two is configured and cannot be used.
fn permits(admin: &AdminConfig, base_dir: &Path, process: &Process) -> Permits {
    let AdminConfig { listen, token_file, audit_log, audit_log_max_mib, .. } = admin;
    let (mut access, mut problems) = (Access::default(), Vec::new());
    let path_of = |path: &str| absolute(&base_dir.join(of_rank(path, process.dp_rank.unwrap_or(0))));
    // Without a listener, nobody needs a token.
    let token_path = (!token_file.is_empty() && !listen.is_empty()).then(|| path_of(token_file));
    if let Some(path) = &token_path {
        match read_tokens(path) {
            Ok(tokens) => access.tokens = Some(tokens),
            Err(reason) => {
                problems.push(format!("admin.token_file: {}: {reason}: nothing can be changed", path.display()));
                access.without =
                    Some("nothing can be changed: admin.token_file could not be used, the engine's log says why");
            }
        }
    }
    if !audit_log.is_empty() {
        let path = path_of(audit_log);
        let engine = AuditedEngine { pid: process.pid, dp_rank: process.dp_rank, model: process.model.clone() };
        match AuditLog::open(path.clone(), *audit_log_max_mib, engine) {
            Ok(log) => access.audit = Some(Arc::new(log)),
            Err(reason) => {
                problems.push(format!("admin.audit_log: {}: {reason}: nothing can be changed", path.display()));
                access.tokens = None;
                access.without =
                    Some("nothing can be changed: admin.audit_log could not be used, the engine's log says why");
            }
        }
    }
    Permits { access, token_path, problems }
}

/// What the configuration says of TLS.
enum Tls {
    Off,
    On(Arc<Certificate>),
    /// It says yes, and the files cannot be used.
    Unusable,
}

fn certificate(admin: &AdminConfig, base_dir: &Path, rank: u32, problems: &mut Vec<String>) -> Tls {
    let AdminConfig { tls_cert_file, tls_key_file, .. } = admin;
    if tls_cert_file.is_empty() && tls_key_file.is_empty() {
        return Tls::Off;
    }
    let path_of = |path: &str| absolute(&base_dir.join(of_rank(path, rank)));
    match Certificate::read(path_of(tls_cert_file), path_of(tls_key_file)) {
        Ok(certificate) => Tls::On(Arc::new(certificate)),
        Err(why) => {
            problems.push(format!("{why}: admin.listen is off"));
            Tls::Unusable
        }
    }
}

/// A listener of the configuration.
struct Listens<'a> {
    field: &'static str,
    text: &'a str,
    where_taken: WhereTaken,
    /// How to reach the process when another process listens there.
    otherwise: String,
    certificate: Option<Arc<Certificate>>,
    /// What it is for where other machines reach it, or why they may not.
    beyond_loopback: Result<Reach, &'static str>,
}

impl<'a> Listens<'a> {
    /// Clients send the token to this listener.
    fn admin(text: &'a str, own: Option<&str>, certificate: Option<Arc<Certificate>>, access: &Access) -> Self {
        let otherwise = own.map_or_else(
            || "and this process has no other admin interface".to_owned(),
            |own| format!("so send it no token: `meridian ctl` reaches this process at {own}"),
        );
        let beyond_loopback = match (&certificate, &access.tokens) {
            (None, _) => Err("must be a loopback address such as 127.0.0.1 or [::1] without admin.tls_cert_file"),
            (_, None) => Err("must be a loopback address such as 127.0.0.1 or [::1] without tokens"),
            (Some(_), Some(_)) => Ok(Reach::Network),
        };
        Self { field: "admin.listen", text, where_taken: WhereTaken::Fail, otherwise, certificate, beyond_loopback }
    }

    fn metrics(text: &'a str) -> Self {
        Self {
            field: "telemetry.prometheus",
            text,
            where_taken: WhereTaken::Move,
            otherwise: "so give each engine of this machine a port of its own: IP:port+{rank}".into(),
            certificate: None,
            beyond_loopback: Ok(Reach::Scrapers),
        }
    }
}

fn bind(
    runtime: &Runtime,
    listens: &Listens<'_>,
    base_dir: &Path,
    run_dir: Option<&Path>,
    problems: &mut Vec<String>,
) -> Option<Listener> {
    let _context = runtime.enter();
    let Listens { field, text, where_taken, otherwise, certificate, beyond_loopback } = listens;
    let parsed = Listen::parse_any(text).and_then(|listen| match listen {
        Listen::Unix(path) => Ok(Listen::Unix(absolute(&base_dir.join(path)))),
        listen if listen.is_of_this_machine() => Ok(listen),
        listen => beyond_loopback.map(|_| listen),
    });
    let listen = match parsed {
        Ok(listen) => listen,
        Err(reason) => {
            problems.push(format!("{field}: {text:?}: {reason}"));
            return None;
        }
    };
    // Other machines were told this address.
    let where_taken = if listen.is_of_this_machine() { *where_taken } else { WhereTaken::Fail };
    let beyond = beyond_loopback.unwrap_or(Reach::Loopback);
    match Listener::bind(&listen, run_dir, where_taken, certificate.clone(), beyond) {
        Ok(Some(listener)) => {
            if listener.is_elsewhere(&listen) {
                problems.push(format!("{field}: {text:?}: is in use, this process listens on {}", listener.address));
            }
            Some(listener)
        }
        Ok(None) => None,
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            problems.push(format!("{field}: {text:?}: another process listens there, {otherwise}"));
            None
        }
        Err(error) => {
            problems.push(format!("{field}: {text:?}: cannot listen: {error}"));
            None
        }
    }
}

/// The private socket of this process: only this user can enter its folder.
fn own_socket(runtime: &Runtime, dir: &Path, problems: &mut Vec<String>) -> Option<Listener> {
    let _context = runtime.enter();
    let path = absolute(&dir.join(discovery::socket_name()));
    let bound = Listen::parse(&format!("unix:{}", path.display())).map_err(str::to_owned).and_then(|listen| {
        Listener::bind(&listen, Some(dir), WhereTaken::Fail, None, Reach::Loopback).map_err(|error| error.to_string())
    });
    bound
        .map_err(|why| problems.push(format!("admin: {}: no private socket for `meridian ctl`: {why}", path.display())))
        .ok()
        .flatten()
}

/// The absolute path, unless the working directory has been deleted.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
