//! A file for each engine process, which `meridian ctl` reads to find it.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use meridian_core::config::Listen;
use serde::{Deserialize, Serialize};

use meridian_engine::private;

/// Largest file that is read, bytes.
const MAX_BYTES: usize = 64 << 10;

/// An engine process, as its file describes it. It holds the path of the token, never the token.
///
/// ```
/// use meridian_admin::discovery::Process;
///
/// let own = Process::own();
/// assert_eq!(own.pid, std::process::id());
/// assert!(own.is_alive());
/// assert!(!Process { started_ticks: own.started_ticks + 1, ..own }.is_alive());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Start of the process, clock ticks after the boot of the machine: another process with the same id has another
    /// value.
    pub started_ticks: u64,
    /// Host name and PID namespace, in which the process id is valid.
    pub machine: String,
    /// Address of the admin interface, `IP:port`, `https://IP:port` or `unix:PATH`, as configured.
    pub admin: Option<String>,
    /// Its private socket, `unix:PATH`: no other process can have taken it.
    #[serde(default)]
    pub socket: Option<String>,
    /// Address of the metrics, if separate.
    pub metrics: Option<String>,
    /// The served model, as the engine names it.
    pub model: String,
    /// Its data-parallel rank, where the engine says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_rank: Option<u32>,
    /// The number of data-parallel ranks, where the engine knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dp_size: Option<u32>,
    /// Version of Meridian.
    pub version: String,
    /// File with the token that changes need; `None` when no change is possible.
    pub token_file: Option<String>,
}

impl Process {
    /// This process, without addresses and model.
    #[must_use]
    pub fn own() -> Self {
        let pid = std::process::id();
        Self {
            pid,
            started_ticks: started_ticks(pid).unwrap_or(0),
            machine: machine(),
            admin: None,
            socket: None,
            metrics: None,
            model: String::new(),
            dp_rank: None,
            dp_size: None,
            version: env!("CARGO_PKG_VERSION").into(),
            token_file: None,
        }
    }

    /// Whether it still runs on this machine.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        started_ticks(self.pid) == Some(self.started_ticks)
    }
}

/// Folders that may hold files; a process writes to the first: `$XDG_RUNTIME_DIR/meridian` if `$XDG_RUNTIME_DIR`
/// exists, then `~/.cache/meridian/run`.
#[must_use]
pub fn run_dirs() -> Vec<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let runtime = folder("XDG_RUNTIME_DIR").filter(|path| path.is_dir()).map(|path| path.join("meridian"));
    let home = folder("HOME").map(|home| home.join(".cache/meridian/run"));
    [runtime, home].into_iter().flatten().collect()
}

/// The contents of the files of some folders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The processes of this machine that run, by process id.
    pub processes: Vec<Process>,
    /// Unreadable files, a line each.
    pub malformed: Vec<String>,
}

/// The processes of this machine that run, by process id; see [`find`].
#[must_use]
pub fn list(run_dirs: &[PathBuf]) -> Vec<Process> {
    find(run_dirs).processes
}

/// Read the files of every folder. Files of ended processes are removed with their sockets; folders of other users are
/// ignored.
#[must_use]
pub fn find(run_dirs: &[PathBuf]) -> Found {
    let here = machine();
    let mut found = Found::default();
    for dir in run_dirs.iter().filter(|dir| private::check_dir(dir).is_ok()) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match read(&path) {
                Ok(process) if process.machine != here => {}
                Ok(process) if process.is_alive() => found.processes.push(process),
                Ok(process) => {
                    let _ = fs::remove_file(&path);
                    process.remove_socket(dir);
                }
                // The process ended meanwhile.
                Err(_) if !path.exists() => {}
                Err(why) => found.malformed.push(format!("{}: {why}", path.display())),
            }
        }
    }
    found.processes.sort_by_key(|process| process.pid);
    found.malformed.sort();
    found
}

fn read(path: &Path) -> Result<Process, String> {
    let text = private::read(path, MAX_BYTES)?;
    let process: Process =
        serde_json::from_slice(&text).map_err(|error| format!("is no discovery file of an engine: {error}"))?;
    let addresses = [("admin", &process.admin), ("socket", &process.socket)];
    for (field, address) in addresses.iter().filter_map(|(field, address)| Some((field, address.as_ref()?))) {
        let parsed = match address.strip_prefix("https://") {
            Some(address) => Listen::parse_any(address),
            None => Listen::parse(address),
        };
        parsed.map_err(|reason| format!("{field}: {address:?}: {reason}"))?;
    }
    Ok(process)
}

impl Process {
    /// Remove the private socket of an ended process; nothing outside of `dir`.
    fn remove_socket(&self, dir: &Path) {
        let path = self.socket.as_ref().and_then(|socket| socket.strip_prefix("unix:")).map(Path::new);
        let Some(name) = path.and_then(Path::file_name) else { return };
        let path = dir.join(name);
        if fs::symlink_metadata(&path).is_ok_and(|found| found.file_type().is_socket()) {
            let _ = fs::remove_file(path);
        }
    }
}

/// The name of a private socket that no other engine has, in this process or on a machine or container with the same
/// home folder and process ids.
pub(super) fn socket_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let Process { pid, started_ticks, .. } = Process::own();
    format!("{pid}-{started_ticks}-{}.sock", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// The file of this process. Dropping it removes the file, unless another engine in this process has written its own
/// since.
#[derive(Debug)]
pub(super) struct Entry {
    path: PathBuf,
    text: String,
}

impl Entry {
    /// Written to a temporary file and renamed, so that no process reads half of it.
    pub(super) fn write(dir: &Path, process: &Process) -> io::Result<Self> {
        let path = dir.join(format!("{}.json", process.pid));
        let text = serde_json::to_string(process)?;
        let aside = path.with_extension("tmp");
        let _ = fs::remove_file(&aside);
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&aside)?;
        let written = file.write_all(text.as_bytes()).and_then(|()| fs::rename(&aside, &path));
        if written.is_err() {
            let _ = fs::remove_file(&aside);
        }
        written.map(|()| Self { path, text })
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if fs::read_to_string(&self.path).is_ok_and(|text| text == self.text) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Field 22 of /proc/PID/stat; field 2, the name, may hold blanks and parentheses. `None` for an ended process, even
/// before its parent has collected the exit code.
fn started_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(") ")?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") { None } else { fields.nth(18)?.parse().ok() }
}

/// Machines and containers may share a home folder.
fn machine() -> String {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", host.trim(), namespace.display())
}
