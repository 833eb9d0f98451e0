//! The audit log: a line of JSON for each change that somebody asked for, refused ones included. It never has a token.
//!
//! Its writer opens the file for each line, so the file may be moved away at any time. Several processes may share it.

use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use chrono::{DateTime, SecondsFormat, Utc};
use meridian_core::{PolicySource, SlotName};
use serde::Serialize;
use sha2::{Digest, Sha256};

use meridian_engine::budgets::LiveBudgets;
use meridian_engine::control::{
    Control, ControlError, FaultEntry, Given, Insight, Mode, ProcessStatus, SwapReport, UNCHANGED, Upload, Version,
};
use meridian_engine::private;

/// Lines a minute for requests without a token: they must not push the others out of the file.
const MAX_UNKNOWN_A_MINUTE: u32 = 30;
/// Most characters of a reason.
const MAX_WHY_CHARACTERS: usize = 512;
/// Longest options that a line repeats, bytes.
const MAX_OPTIONS_BYTES: usize = 1024;
/// Tries to lock the file, a millisecond apart. A line is appended in one piece, so it may do without.
const LOCK_TRIES: u32 = 100;

/// Who asks for a change, and from where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Actor {
    /// The name of the token; `None` without a valid one.
    pub(super) who: Option<Arc<str>>,
    /// `IP:port`, `unix:uid=N,pid=N`, or the part of this process.
    pub(super) peer: Arc<str>,
}

/// The process that a line is about.
#[derive(Clone, Debug, Serialize)]
pub(super) struct AuditedEngine {
    pub(super) pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) dp_rank: Option<u32>,
    pub(super) model: String,
}

/// What happened to a request for a change.
#[derive(Default)]
pub(super) struct Event<'a> {
    pub(super) slot: Option<SlotName>,
    /// `swap`, `rollback`, `budgets`, or the method and the path of a request that was refused before.
    pub(super) action: &'a str,
    /// The policy or the change that was asked for.
    pub(super) asked: Option<String>,
    pub(super) before: Option<&'a Version>,
    pub(super) after: Option<&'a Version>,
    /// `done`, `unchanged`, `refused` or `failed`.
    pub(super) result: &'a str,
    pub(super) why: Option<String>,
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    who: Option<&'a str>,
    peer: &'a str,
    engine: &'a AuditedEngine,
    #[serde(skip_serializing_if = "Option::is_none")]
    slot: Option<SlotName>,
    action: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    asked: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<Named<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<Named<'a>>,
    result: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
    /// Lines before this one that were left out.
    #[serde(skip_serializing_if = "is_zero")]
    left_out: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[derive(Serialize)]
struct Named<'a> {
    name: &'a str,
    version: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    sha256: &'a str,
    source: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    options: Option<&'a str>,
}

impl<'a> Named<'a> {
    fn of(version: &'a Version) -> Self {
        let Version { name, version, sha256, source, options } = version;
        let is_short = !matches!(options.as_str(), "" | "{}") && options.len() <= MAX_OPTIONS_BYTES;
        Self { name, version, sha256, source, options: is_short.then_some(options) }
    }
}

/// The file.
#[derive(Debug)]
pub(super) struct AuditLog {
    path: PathBuf,
    /// The file is renamed before it would be longer, bytes.
    max_bytes: u64,
    engine: AuditedEngine,
    clock: fn() -> SystemTime,
    open: fn(&Path) -> Result<File, String>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Requests without a token: the start of their minute, and their number in it.
    unknown: Option<(SystemTime, u32)>,
    left_out: u64,
    /// Why the latest line could not be written.
    problem: Option<String>,
}

impl AuditLog {
    /// Open the file once, to see whether it can be used.
    ///
    /// # Errors
    /// The problem and the expectation; the text follows the path.
    pub(super) fn open(path: PathBuf, max_mib: u32, engine: AuditedEngine) -> Result<Self, String> {
        open(&path)?;
        // The file, and one older one.
        let max_bytes = u64::from(max_mib) * (1 << 20) / 2;
        Ok(Self { path, max_bytes, engine, clock: SystemTime::now, open, state: Mutex::default() })
    }

    /// Why the latest line is missing from the file, if it is. One line.
    pub(super) fn problem(&self) -> Option<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).problem.clone()
    }

    /// Append a line. A line that cannot be written goes to the engine's log: a full disk must not stop a rollback.
    pub(super) fn record(&self, actor: &Actor, event: &Event<'_>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = (self.clock)();
        if actor.who.is_none() && !state.may_record(now) {
            state.left_out += 1;
            return;
        }
        let Event { slot, action, asked, before, after, result, why } = event;
        let cut = |text: &Option<String>| -> Option<String> {
            text.as_ref().map(|text| text.chars().take(MAX_WHY_CHARACTERS).collect())
        };
        let (asked, why) = (cut(asked), cut(why));
        let action: String = action.chars().take(MAX_WHY_CHARACTERS).collect();
        let line = Line {
            time: DateTime::<Utc>::from(now).to_rfc3339_opts(SecondsFormat::Millis, true),
            who: actor.who.as_deref(),
            peer: &actor.peer,
            engine: &self.engine,
            slot: *slot,
            action: &action,
            asked: asked.as_deref(),
            before: before.map(Named::of),
            after: after.map(Named::of),
            result,
            why: why.as_deref(),
            left_out: state.left_out,
        };
        let written = match serde_json::to_string(&line) {
            Ok(text) => self.append(&format!("{text}\n")).inspect_err(|why| {
                tracing::warn!("admin.audit_log: {}: {why}: {text}", self.path.display());
            }),
            Err(error) => Err(error.to_string()),
        };
        state.problem = written.map(|()| state.left_out = 0).err().map(|why| {
            format!("admin.audit_log: {}: {why}: the engine's log has the missing lines", self.path.display())
        });
    }

    fn append(&self, line: &str) -> Result<(), String> {
        // Another process may move the file away between opening and locking it.
        for _ in 0..3 {
            let file = (self.open)(&self.path)?;
            lock(&file);
            let metadata = file.metadata().map_err(unwritable)?;
            if !metadata.is_file() || is_still(&self.path, &metadata) {
                if metadata.is_file() && metadata.len() > 0 && metadata.len() + line.len() as u64 > self.max_bytes {
                    fs::rename(&self.path, older(&self.path)).map_err(unwritable)?;
                    continue;
                }
                return write_line(&file, metadata.len(), line).map_err(unwritable);
            }
        }
        Err("cannot be written: it is replaced again and again".into())
    }
}

impl State {
    /// Whether one more request without a token may have a line.
    fn may_record(&mut self, now: SystemTime) -> bool {
        let minute = Duration::from_secs(60);
        let (begun, count) = self.unknown.get_or_insert((now, 0));
        // A clock that was set back begins a minute too.
        if now.duration_since(*begun).map_or(true, |passed| passed >= minute) {
            (*begun, *count) = (now, 0);
        }
        *count += 1;
        *count <= MAX_UNKNOWN_A_MINUTE
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unwritable(error: io::Error) -> String {
    format!("cannot be written: {error}")
}

/// `PATH.1`
fn older(path: &Path) -> PathBuf {
    let mut older = path.as_os_str().to_owned();
    older.push(".1");
    older.into()
}

/// Open a regular file of this user for appending, or make it. A link that another user has put there is not followed.
fn open(path: &Path) -> Result<File, String> {
    // Opening a pipe would wait for its reader.
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_symlink() => return Err("is a symbolic link, must be a regular file".into()),
        Ok(metadata) if !metadata.is_file() => return Err("must be a regular file".into()),
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(format!("cannot be opened: {error}")),
    }
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).append(true).create(true).mode(0o600).custom_flags(flags).open(path);
    let file = file.map_err(|error| format!("cannot be opened: {error}"))?;
    let metadata = file.metadata().map_err(|error| format!("cannot be opened: {error}"))?;
    if !metadata.is_file() {
        return Err("must be a regular file".into());
    }
    private::check_owner(&metadata)?;
    if metadata.mode() & 0o022 != 0 {
        return Err(format!("has mode {:04o}, must be 0600: other users must not write it", metadata.mode() & 0o7777));
    }
    Ok(file)
}

fn lock(file: &File) {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            // The lock ends with the file; a file system without locks has none.
            Ok(()) | Err(fs::TryLockError::Error(_)) => return,
        }
    }
}

fn is_still(path: &Path, opened: &fs::Metadata) -> bool {
    fs::symlink_metadata(path).is_ok_and(|now| (now.dev(), now.ino()) == (opened.dev(), opened.ino()))
}

/// Append a line in one piece. The rest of one that a full disk has cut is ended first.
fn write_line(mut file: &File, length: u64, line: &str) -> io::Result<()> {
    let mut last = [b'\n'];
    if length > 0 {
        file.read_exact_at(&mut last, length - 1)?;
    }
    let line = if last == [b'\n'] { line.to_owned() } else { format!("\n{line}") };
    file.write_all(line.as_bytes())
}

/// A [`Control`] whose changes are recorded.
pub(super) struct Audited {
    pub(super) control: Arc<dyn Control>,
    pub(super) log: Option<Arc<AuditLog>>,
    pub(super) actor: Actor,
}

impl Audited {
    fn record(
        &self,
        slot: SlotName,
        action: &str,
        asked: impl FnOnce() -> Option<String>,
        change: impl FnOnce() -> Result<SwapReport, ControlError>,
    ) -> Result<SwapReport, ControlError> {
        let Some(log) = &self.log else { return change() };
        let asked = asked();
        let slots = self.control.status().slots;
        let before = slots.into_iter().find(|of| of.slot == slot).map(|of| of.active);
        let done = change();
        let event = match &done {
            Ok(report) => {
                let result = if report.action == UNCHANGED { UNCHANGED } else { "done" };
                let (before, after) = (Some(&report.previous), Some(&report.active));
                Event { slot: Some(slot), action, asked, before, after, result, why: None }
            }
            Err(error) => {
                let why = Some(error.to_string());
                Event { slot: Some(slot), action, asked, before: before.as_ref(), after: None, result: "refused", why }
            }
        };
        log.record(&self.actor, &event);
        done
    }
}

/// A policy that was asked for, in words.
fn asked_for(upload: &Upload<'_>) -> String {
    let Upload { policy, options, source } = upload;
    let mut text = match policy {
        Given::Component { bytes, signature } => {
            let digest = Sha256::digest(bytes).iter().fold(String::new(), |mut text, byte| {
                // Writing to a string does not fail.
                let _ = write!(text, "{byte:02x}");
                text
            });
            let signed = if signature.is_some() { ", signed" } else { "" };
            format!("component of {} bytes, sha256 {digest}{signed}, from {source}", bytes.len())
        }
        Given::Remote(reference) => (*reference).to_owned(),
        Given::Fetched(_) => format!("a fetched component, from {source}"),
        Given::Native(name) => PolicySource::Native(name).to_string(),
        Given::Active => "the active policy".into(),
    };
    if options.is_some() {
        text.push_str(", with options");
    }
    text
}

impl Control for Audited {
    fn status(&self) -> ProcessStatus {
        self.control.status()
    }

    fn faults(&self) -> Vec<FaultEntry> {
        self.control.faults()
    }

    fn insight(&self) -> Option<&dyn Insight> {
        self.control.insight()
    }

    fn budgets(&self) -> Option<&dyn LiveBudgets> {
        self.control.budgets()
    }

    fn put(&self, slot: SlotName, upload: &Upload<'_>, mode: Mode) -> Result<SwapReport, ControlError> {
        let action = match mode {
            Mode::Active => "swap",
            Mode::Shadow => "shadow",
        };
        self.record(slot, action, || Some(asked_for(upload)), || self.control.put(slot, upload, mode))
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.record(slot, "promote", || None, || self.control.promote(slot))
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.record(slot, "rollback", || None, || self.control.rollback(slot))
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.record(slot, "release", || None, || self.control.release(slot))
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.record(slot, "stop-shadow", || None, || self.control.stop_shadow(slot))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn actor(who: Option<&str>) -> Actor {
        Actor { who: who.map(Arc::from), peer: "10.0.0.9:4711".into() }
    }

    fn log(name: &str, max_bytes: u64) -> AuditLog {
        let folder = std::env::temp_dir().join(format!("meridian-audit-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let engine = AuditedEngine { pid: 7, dp_rank: Some(1), model: "m".into() };
        let clock = || SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_123);
        let path = folder.join("audit.jsonl");
        AuditLog { path, max_bytes, engine, clock, open, state: Mutex::default() }
    }

    fn lines(path: &Path) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(path).expect("the log");
        text.lines().map(|line| serde_json::from_str(line).unwrap_or(serde_json::Value::Null)).collect()
    }

    fn swap<'a>() -> Event<'a> {
        Event { action: "swap", result: "done", ..Event::default() }
    }

    #[test]
    fn a_line_has_time_bearer_place_and_result() {
        let log = log("line", 1 << 20);
        let why = Some("x\n\u{1b}".repeat(400));
        log.record(&actor(Some("alice")), &Event { slot: Some(SlotName::Dispatch), why, ..swap() });
        let [line] = lines(&log.path).try_into().expect("one line");
        assert_eq!(line["time"], "2023-11-14T22:13:20.123Z");
        assert_eq!((&line["who"], &line["peer"]), (&"alice".into(), &"10.0.0.9:4711".into()));
        assert_eq!(line["engine"], serde_json::json!({ "pid": 7, "dp_rank": 1, "model": "m" }));
        assert_eq!((&line["slot"], &line["result"]), (&"dispatch".into(), &"done".into()));
        assert_eq!(line["why"].as_str().map(|why| why.chars().count()), Some(MAX_WHY_CHARACTERS));
        assert_eq!(fs::metadata(&log.path).expect("the log").mode() & 0o777, 0o600);
    }

    #[test]
    fn the_file_is_renamed_before_it_is_too_long() {
        let log = log("rotation", 600);
        for _ in 0..20 {
            log.record(&actor(Some("alice")), &swap());
        }
        let (own, old) = (lines(&log.path), lines(&older(&log.path)));
        assert!(!own.is_empty() && !old.is_empty() && own.len() + old.len() < 20, "{} {}", own.len(), old.len());
        for path in [log.path.clone(), older(&log.path)] {
            assert!(fs::metadata(path).expect("a file").len() <= 600);
        }
        assert_eq!(log.problem(), None);
    }

    /// Somebody without a token cannot push the others out.
    #[test]
    fn requests_without_a_token_have_few_lines() {
        let log = log("flood", 1 << 20);
        for _ in 0..1000 {
            log.record(&actor(None), &Event { action: "PUT /x", result: "refused", ..Event::default() });
        }
        log.record(&actor(Some("alice")), &swap());
        let lines = lines(&log.path);
        assert_eq!(lines.len(), 31);
        assert_eq!(lines[30]["left_out"], 970);
        assert!(lines[..30].iter().all(|line| line.get("left_out").is_none() && line["who"].is_null()));
    }

    /// Every write to this device fails as on a full disk.
    #[test]
    fn a_full_disk_is_a_problem_and_no_panic() {
        let mut log = log("full", 1 << 20);
        log.open = |_| OpenOptions::new().append(true).open("/dev/full").map_err(unwritable);
        log.record(&actor(Some("alice")), &swap());
        let problem = log.problem().expect("a problem");
        assert!(problem.contains("cannot be written: No space left on device"), "{problem}");
        assert!(problem.ends_with("the engine's log has the missing lines"), "{problem}");
        log.open = open;
        log.record(&actor(Some("alice")), &swap());
        assert_eq!((log.problem(), lines(&log.path).len()), (None, 1));
    }

    /// A disk that was full in the middle of a line leaves the start of it.
    #[test]
    fn half_a_line_spoils_no_other() {
        let log = log("half", 1 << 20);
        log.record(&actor(Some("alice")), &swap());
        let mut file = open(&log.path).expect("the log");
        file.write_all(b"{\"time\":\"20").expect("half a line");
        log.record(&actor(Some("bob")), &swap());
        let lines = lines(&log.path);
        assert_eq!((lines.len(), lines[1].is_null(), &lines[2]["who"]), (3, true, &"bob".into()));
    }

    #[test]
    fn only_a_regular_file_of_this_user_is_written() {
        let log = log("kind", 1 << 20);
        let target = log.path.with_extension("target");
        fs::write(&target, "").expect("a file");
        std::os::unix::fs::symlink(&target, &log.path).expect("a link");
        assert_eq!(open(&log.path).map(|_| ()), Err("is a symbolic link, must be a regular file".into()));
        log.record(&actor(Some("alice")), &swap());
        assert!(log.problem().is_some_and(|why| why.contains("is a symbolic link")));
        assert_eq!(fs::read_to_string(&target).expect("the target"), "", "the link was followed");
        fs::remove_file(&log.path).expect("removed");
        fs::create_dir(&log.path).expect("a folder");
        assert_eq!(open(&log.path).map(|_| ()), Err("must be a regular file".into()));
        fs::remove_dir(&log.path).expect("removed");
        fs::write(&log.path, "").expect("a file");
        fs::set_permissions(&log.path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).expect("its mode");
        let why = "has mode 0666, must be 0600: other users must not write it";
        assert_eq!(open(&log.path).map(|_| ()), Err(why.into()));
        let nowhere = log.path.join("no/such/folder");
        assert!(open(&nowhere).is_err_and(|why| why.starts_with("cannot be opened: ")));
    }
}
