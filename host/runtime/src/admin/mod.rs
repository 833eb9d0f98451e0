//! The admin listener of an engine process: what [`Control`] offers over HTTP, metrics, and a file by which
//! `meridian ctl` finds the process.

pub mod discovery;
mod listener;
mod metrics;
mod routes;
mod serve;
mod signature;
mod token;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use meridian_core::config::{AdminConfig, Listen, TelemetryConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Runtime;
use tokio::sync::oneshot;

use self::discovery::{Entry, Process};
use self::listener::Listener;
use self::routes::Site;
pub use self::signature::{SIGNATURE_HEADER, signature_header};
use self::token::Token;
pub use self::token::read_token;
use crate::control::Control;
use crate::private;

/// How long dropping waits for a change that is being carried out.
const CLOSING: Duration = Duration::from_secs(2);

/// What a client may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections at a time and listener; more wait to be accepted.
    pub connections: usize,
    /// From connecting to the end of the request's head.
    pub head: Duration,
    /// For the body of a request.
    pub body: Duration,
    /// For reading the response.
    pub response: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 32,
            head: Duration::from_secs(5),
            body: Duration::from_secs(30),
            response: Duration::from_secs(30),
        }
    }
}

/// What the listeners depend on besides their configuration.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// What relative paths in the configuration are relative to.
    pub base_dir: PathBuf,
    /// Folder of the discovery file; `None` for no file.
    pub run_dir: Option<PathBuf>,
    /// What a client may take.
    pub limits: Limits,
}

/// The listeners of a process. Dropping it ends them: it waits for a change that is being carried out, for two seconds at
/// most, because the compiler cannot be interrupted, then closes the ports and removes the discovery file and the Unix
/// sockets. A change that is left ends by itself.
///
/// ```
/// use std::sync::Arc;
///
/// use meridian_core::config::{AdminConfig, TelemetryConfig};
/// use meridian_runtime::admin::{Admin, Surroundings};
/// # use meridian_runtime::control::{Control, ControlError, FaultEntry, Mode, ProcessStatus, SlotName, SwapReport, Upload};
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
    metrics_address: Option<String>,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    /// A forked child drops what its parent serves.
    pid: u32,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
    /// Dropped after the thread has ended.
    left_behind: (Option<Entry>, Vec<listener::SocketFile>),
}

impl Admin {
    /// Listen where the configuration says, with the limits and the folder of discovery files of this process. It returns
    /// at once and never fails; see [`problems`](Self::problems). Call it in the process that schedules, after any fork.
    #[must_use]
    pub fn start(control: Arc<dyn Control>, admin: &AdminConfig, telemetry: &TelemetryConfig, base_dir: &Path) -> Self {
        let run_dir = discovery::run_dirs().into_iter().next();
        let surroundings = Surroundings { base_dir: base_dir.to_owned(), run_dir, limits: Limits::default() };
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
        let started = start(surroundings, control, admin, telemetry, &mut problems);
        for problem in &problems {
            tracing::warn!("{problem}");
        }
        let (running, address, metrics_address) = started.map_or((None, None, None), |started| {
            (Some(started.running), started.admin_address, started.metrics_address)
        });
        Self { problems, address, metrics_address, running }
    }

    /// What could not be done, a line each: the dotted field, the value, what is the matter.
    #[must_use]
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Where the admin interface listens, `IP:port` or `unix:PATH`.
    #[must_use]
    pub fn address(&self) -> Option<&str> {
        self.address.as_deref()
    }

    /// Where metrics are served besides, `IP:port` or `unix:PATH`.
    #[must_use]
    pub fn metrics_address(&self) -> Option<&str> {
        self.metrics_address.as_deref()
    }
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
        // A panic of the thread was reported by the panic hook.
        let _ = thread.join();
        drop(left_behind);
    }
}

/// Serve one connection of the admin interface over any stream, as one that came from this machine. It returns when the
/// connection is over; calls that change something run on blocking threads of the tokio runtime it is polled in.
pub async fn serve_stream<S>(stream: S, control: Arc<dyn Control>, token: Option<String>, limits: Limits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let token_configured = token.is_some();
    let site = Arc::new(Site::new(control, token.map(Token::new), token_configured, limits));
    serve::connection(stream, routes::Reach::Loopback, routes::admin(site), limits).await;
}

struct Started {
    running: Running,
    admin_address: Option<String>,
    metrics_address: Option<String>,
}

/// `None` when nothing listens.
fn start(
    surroundings: &Surroundings,
    control: Arc<dyn Control>,
    admin: &AdminConfig,
    telemetry: &TelemetryConfig,
    problems: &mut Vec<String>,
) -> Option<Started> {
    let AdminConfig { listen, token_file } = admin;
    let TelemetryConfig { prometheus, otlp_endpoint: _, service_name: _ } = telemetry;
    let Surroundings { base_dir, run_dir, limits } = surroundings;
    if listen.is_empty() && prometheus.is_empty() {
        return None;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        // One for reading, one for changing.
        .max_blocking_threads(2)
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
    let admin_listener = bind(&runtime, "admin.listen", listen, base_dir, private, problems);
    let metrics_listener = bind(&runtime, "telemetry.prometheus", prometheus, base_dir, private, problems);
    if admin_listener.is_none() && metrics_listener.is_none() {
        return None;
    }
    let token_path = (!token_file.is_empty()).then(|| absolute(&base_dir.join(token_file)));
    let token = token_path.as_deref().filter(|_| admin_listener.is_some()).and_then(|path| {
        read_token(path)
            .map(Token::new)
            .map_err(|reason| {
                problems.push(format!("admin.token_file: {}: {reason}: nothing can be changed", path.display()))
            })
            .ok()
    });

    let status = control.status();
    let has_token = token.is_some();
    let site = Arc::new(Site::new(control, token, !token_file.is_empty(), *limits));
    let mut left_behind = Vec::new();
    let mut serve = |listener: Option<Listener>, router: axum::Router| {
        let Listener { socket, address, file } = listener?;
        left_behind.extend(file);
        runtime.spawn(serve::serve(socket, router, *limits));
        Some(address)
    };
    let admin_address = serve(admin_listener, routes::admin(Arc::clone(&site)));
    let metrics_address = serve(metrics_listener, routes::metrics_only(site));

    let entry = private.and_then(|dir| {
        let process = Process {
            admin: admin_address.clone(),
            metrics: metrics_address.clone(),
            model: status.model,
            token_file: token_path.filter(|_| has_token).and_then(|path| path.to_str().map(str::to_owned)),
            ..Process::own()
        };
        Entry::write(dir, &process)
            .map_err(|error| problems.push(format!("admin: {}: cannot be written: {error}", dir.display())))
            .ok()
    });
    let (stop, stopped) = oneshot::channel();
    let thread = std::thread::Builder::new()
        .name("meridian-admin".into())
        .spawn(move || {
            let _ = runtime.block_on(stopped);
            // Drops the listeners and the connections, and waits for a call that is running.
            runtime.shutdown_timeout(CLOSING);
        })
        .map_err(|error| problems.push(format!("admin: cannot start a thread: {error}")))
        .ok()?;
    let running = Running { pid: std::process::id(), stop, thread, left_behind: (entry, left_behind) };
    Some(Started { running, admin_address, metrics_address })
}

fn bind(
    runtime: &Runtime,
    field: &str,
    text: &str,
    base_dir: &Path,
    run_dir: Option<&Path>,
    problems: &mut Vec<String>,
) -> Option<Listener> {
    let _context = runtime.enter();
    let listen = match Listen::parse(text) {
        Ok(Listen::Unix(path)) => Listen::Unix(absolute(&base_dir.join(path))),
        Ok(listen) => listen,
        Err(reason) => {
            problems.push(format!("{field}: {text:?}: {reason}"));
            return None;
        }
    };
    match Listener::bind(&listen, run_dir) {
        Ok(Some(listener)) => {
            if listener.is_elsewhere(&listen) {
                problems.push(format!("{field}: {text:?}: is in use, this process listens on {}", listener.address));
            }
            Some(listener)
        }
        Ok(None) => None,
        Err(error) => {
            problems.push(format!("{field}: {text:?}: cannot listen: {error}"));
            None
        }
    }
}

/// The path from the root, unless the working directory is gone.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
