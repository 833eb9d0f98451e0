//! `meridian ctl ... --all` over the engines of a fleet file.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use meridian_admin::{Admin, ConnectionLimits, Surroundings};
use meridian_core::config::AdminConfig;
use meridian_engine::control::{
    Control, ControlError, FaultEntry, Given, Mode, ProcessStatus, SlotName, SlotStatus, StateHandover, SwapReport,
    UNCHANGED, Upload, Version,
};
use serde_json::Value;

use command::meridian;
use support::{TOKEN, config, folder, metrics_at, status, version, write};

use crate::admin_support as support;
use crate::support as command;

/// An engine of this rank whose dispatch slot has a version.
struct Ranked {
    rank: u32,
    active: Mutex<Version>,
    /// It accepts no other policy.
    refuses: bool,
}

impl Ranked {
    fn act(&self, slot: SlotName, to: &str, action: &str) -> Result<SwapReport, ControlError> {
        if self.refuses {
            return Err(ControlError::Refused("too complex: loops: 33, expected at most 32".into()));
        }
        let mut active = self.active.lock().unwrap();
        let previous = active.clone();
        let action = if previous.name == to { UNCHANGED } else { action };
        *active = version(to);
        let (active, action) = (active.clone(), action.to_owned());
        Ok(SwapReport { slot, action, active, previous, state: StateHandover::Stateless, held_us: 1.0 })
    }
}

impl Control for Ranked {
    fn status(&self) -> ProcessStatus {
        let slot: SlotStatus = status().slots.into_iter().next().unwrap();
        let slot = SlotStatus { active: self.active.lock().unwrap().clone(), ..slot };
        ProcessStatus {
            pid: 1000 + self.rank,
            dp_rank: Some(self.rank),
            dp_size: Some(3),
            slots: vec![slot],
            model: "m\u{1b}".into(),
            ..ProcessStatus::default()
        }
    }

    fn faults(&self) -> Vec<FaultEntry> {
        Vec::new()
    }

    fn put(&self, slot: SlotName, upload: &Upload<'_>, _: Mode) -> Result<SwapReport, ControlError> {
        let Given::Native(name) = upload.policy else { return Err(ControlError::NoSuchSlot(slot)) };
        self.act(slot, name, "swap")
    }

    fn promote(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.act(slot, "promoted", "promote")
    }

    fn rollback(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.act(slot, "before", "rollback")
    }

    fn release(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        self.act(slot, "released", "release")
    }

    fn stop_shadow(&self, slot: SlotName) -> Result<SwapReport, ControlError> {
        Err(ControlError::Nothing { slot, what: "has no shadow" })
    }
}

/// Engines of these ranks; those that refuse are named. They end with what is returned.
fn start(folder: &Path, refuse: &[u32], ranks: std::ops::Range<u32>) -> Vec<Admin> {
    write(&folder.join("token"), TOKEN, 0o600);
    let start = |rank| {
        let engine = Ranked { rank, active: Mutex::new(version("old")), refuses: refuse.contains(&rank) };
        // Not to be found but by the fleet file.
        let surroundings = Surroundings {
            base_dir: folder.into(),
            run_dir: Some(folder.join(format!("run-{rank}"))),
            limits: ConnectionLimits::default(),
        };
        Admin::start_in(&surroundings, Arc::new(engine), &config("127.0.0.1:0", "token"), &metrics_at(""))
    };
    let admins: Vec<_> = ranks.map(start).collect();
    let mut file = "token_file = 'token'\n".to_owned();
    for (index, admin) in admins.iter().enumerate() {
        let _ = write!(file, "[[engine]]\nname = 'e{index}'\naddress = '{}'\n", admin.address().unwrap());
    }
    write(&folder.join("fleet.toml"), &file, 0o644);
    admins
}

const FLEET: [&str; 3] = ["ctl", "--fleet", "fleet.toml"];

#[test]
fn every_engine_has_a_row_and_the_version_that_decides() {
    let folder = folder("all-changes");
    let _admins = start(&folder, &[], 0..3);
    for (args, result, decides) in [
        (&["swap", "dispatch", "native:fcfs"] as &[_], "changed", "fcfs"),
        (&["swap", "dispatch", "native:fcfs"], "unchanged", "fcfs"),
        (&["shadow", "dispatch", "native:mlfq"], "changed", "mlfq"),
        (&["promote", "dispatch"], "changed", "promoted"),
        (&["rollback", "dispatch"], "changed", "before"),
        (&["release", "dispatch"], "changed", "released"),
    ] {
        let done = meridian(&folder, &[&FLEET, args, &["--all"]].concat());
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{args:?} {}", done.stdout);
        let lines: Vec<_> = done.stdout.lines().collect();
        assert_eq!(lines[0].split_whitespace().collect::<Vec<_>>(), ["engine", "pid", "rank", "result", "decides"]);
        for rank in 0..3 {
            let cells: Vec<_> = lines[rank + 1].split("  ").filter(|cell| !cell.is_empty()).map(str::trim).collect();
            let (pid, of, decides) =
                (format!("{}", 1000 + rank), format!("{rank} of 3"), format!("{decides} 1.0 abababab"));
            assert_eq!(cells, [format!("e{rank}").as_str(), &pid, &of, result, &decides], "{}", done.stdout);
        }
        assert_eq!(lines.len(), 4, "{}", done.stdout);
    }
    // Nobody had a shadow.
    let done = meridian(&folder, &[&FLEET[..], &["stop-shadow", "dispatch", "--all"]].concat());
    assert!(done.stdout.contains("refused") && done.stdout.contains("dispatch: has no shadow"), "{}", done.stdout);
    assert!(done.code == 1 && done.stderr.contains("3 of 3 engines did not do as asked"), "{}", done.stderr);
    assert!(!done.stderr.contains("repeat"), "a second rollback goes further back: {}", done.stderr);
}

/// One refuses and one is not there: the others have changed, and the rows say so.
#[test]
fn partial_failure_is_said() {
    let folder = folder("all-partial");
    let mut admins = start(&folder, &[1], 0..3);
    let gone = admins.pop().unwrap().address().unwrap().to_owned();
    let swap = [&FLEET[..], &["swap", "dispatch", "native:fcfs", "--all"]].concat();
    let done = meridian(&folder, &swap);
    assert_eq!(done.code, 1, "{}", done.stdout);
    let lines: Vec<_> = done.stdout.lines().collect();
    assert!(
        lines[1].starts_with("e0") && lines[1].contains("changed") && lines[1].contains("fcfs 1.0"),
        "{}",
        lines[1]
    );
    assert!(lines[2].contains("refused") && lines[2].contains("old 1.0 abababab"), "{}", lines[2]);
    assert!(lines[2].ends_with("too complex: loops: 33, expected at most 32"), "{}", lines[2]);
    assert!(lines[3].contains("unknown") && lines[3].contains("not known"), "{}", lines[3]);
    assert!(lines[3].contains(&format!("e2 ({gone}): cannot connect: Connection refused")), "{}", lines[3]);
    assert_eq!(
        lines[4],
        "dispatch: engines differ: fcfs 1.0 abababab on 1; old 1.0 abababab on 1; an unknown version on 1"
    );
    assert_eq!(
        done.stderr,
        "error: 2 of 3 engines did not do as asked, see their rows; repeat the command: the others stay unchanged\n"
    );
    let done = meridian(&folder, &[&swap[..], &["--json"]].concat());
    let object: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((done.code, done.stderr.as_str(), &object["ok"]), (1, "", &Value::Bool(false)));
    let engines = object["engines"].as_array().unwrap();
    let results: Vec<_> = engines.iter().map(|engine| engine["result"].as_str().unwrap()).collect();
    assert_eq!(results, ["unchanged", "refused", "unknown"]);
    assert_eq!((&engines[1]["dp_rank"], &engines[1]["active"]["name"]), (&1.into(), &"old".into()));
    assert!(engines[0]["report"].is_object() && engines[2]["error"].is_string() && engines[2]["active"].is_null());
    assert_eq!(object["versions"].as_array().unwrap().len(), 3);

    let done = meridian(&folder, &[&FLEET[..], &["status", "--all"]].concat());
    let lines: Vec<_> = done.stdout.lines().collect();
    assert!(lines[1].contains("1000  0 of 3  m\\u{1b}") && lines[1].contains("dispatch fcfs 1.0"), "{}", lines[1]);
    assert!(
        lines[1].contains("dispatch shadow candidate") && lines[1].contains("dispatch quarantine bad"),
        "{}",
        lines[1]
    );
    assert!(lines[3].contains("cannot connect"), "{}", lines[3]);
    assert!(done.code == 1 && done.stderr.contains("1 of 3 engine processes did not answer"), "{}", done.stderr);
    let done = meridian(&folder, &[&FLEET[..], &["faults", "--all"]].concat());
    assert!(done.stdout.starts_with("e0: no faults\ne1: no faults\ne2 ("), "{}", done.stdout);
    assert_eq!(done.code, 1);
}

#[test]
fn one_engine_of_the_file_is_chosen_by_name() {
    let folder = folder("all-one");
    let _admins = start(&folder, &[], 0..2);
    let done = meridian(&folder, &[&FLEET[..], &["--engine", "e1", "swap", "dispatch", "native:fcfs"]].concat());
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    let done = meridian(&folder, &[&FLEET[..], &["status", "--all", "--json"]].concat());
    let object: Value = serde_json::from_str(&done.stdout).unwrap();
    let names: Vec<_> = (0..2).map(|n| &object["processes"][n]["status"]["slots"][0]["active"]["name"]).collect();
    assert_eq!(names, ["old", "fcfs"]);
    for (args, code, why) in [
        (
            &["ctl", "--fleet", "fleet.toml", "promote", "dispatch"] as &[_],
            1,
            "has 2 engines, name one by --engine, or all of them by --all",
        ),
        (
            &["ctl", "--fleet", "fleet.toml", "--engine", "x", "status"],
            1,
            "--engine: \"x\": the fleet file has no such engine",
        ),
        (&["ctl", "--engine", "e1", "status"], 1, "--engine: needs the fleet file"),
        (
            &["ctl", "--fleet", "absent.toml", "status", "--all"],
            1,
            "--fleet: absent.toml: cannot be read: No such file",
        ),
        (&["ctl", "--fleet", "fleet.toml", "--pid", "1", "status"], 2, "cannot be used with"),
        (
            &["ctl", "promote", "dispatch", "--all"],
            1,
            "no engine process with an admin listener runs here as this user",
        ),
    ] {
        let done = meridian(&folder, args);
        assert!(done.code == code && done.stderr.contains(why), "{args:?}: {} {}", done.code, done.stderr);
    }
}

/// A request lives in one engine. These follow no thinking at all.
#[test]
fn budgets_of_every_engine() {
    let folder = folder("all-budgets");
    write(&folder.join("token"), TOKEN, 0o600);
    let recorder = Arc::new(support::Recorder::default());
    let surroundings = Surroundings {
        base_dir: folder.clone(),
        run_dir: Some(folder.join("run-r")),
        limits: ConnectionLimits::default(),
    };
    let with = Admin::start_in(&surroundings, recorder.clone(), &config("127.0.0.1:0", "token"), &metrics_at(""));
    let without = start(&folder, &[], 0..1);
    let engine = |admin: &Admin| format!("[[engine]]\naddress = '{}'\n", admin.address().unwrap());
    let file = format!("token_file = 'token'\n{}{}", engine(&with), engine(&without[0]));
    write(&folder.join("fleet.toml"), &file, 0o644);
    let budget = |args: &[&str]| meridian(&folder, &[&FLEET[..], &["budget", "--all-engines"], args].concat());
    let done = budget(&["chatcmpl-1", "--end-now"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{}", done.stdout);
    assert!(done.stdout.contains("changed") && done.stdout.contains("nothing here"), "{}", done.stdout);
    assert_eq!(recorder.calls(), [r#"{"request":"chatcmpl-1","end_now":true}"#]);
    let done = budget(&["absent", "--end-now"]);
    assert!(done.code == 1 && done.stderr.contains("no engine has such a request that thinks"), "{}", done.stderr);
    // Too many changes wait: this one is a failure.
    let done = budget(&["late", "--end-now"]);
    assert!(done.code == 1 && done.stderr.contains("1 of 2 engines did not do as asked"), "{}", done.stderr);
    let done = budget(&["chatcmpl-1", "--end-now", "--json"]);
    let object: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((&object["ok"], &object["engines"][1]["result"]), (&Value::Bool(true), &"nothing here".into()));
    let done = budget(&[]);
    assert!(done.code == 1 && done.stdout.contains(": 1 live requests\n"), "{}", done.stdout);
}

/// Over TLS, with the files on the command line.
#[test]
fn an_engine_beyond_loopback() {
    let folder = folder("all-tls");
    let tls = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fleet/tests/tls");
    write(&folder.join("token"), TOKEN, 0o600);
    write(&folder.join("key.pem"), &std::fs::read_to_string(tls.join("engine.key")).unwrap(), 0o600);
    let admin = AdminConfig {
        listen: "0.0.0.0:0".into(),
        token_file: "token".into(),
        tls_cert_file: tls.join("engine.pem").to_str().unwrap().into(),
        tls_key_file: "key.pem".into(),
        ..AdminConfig::default()
    };
    let engine = Ranked { rank: 0, active: Mutex::new(version("old")), refuses: false };
    let surroundings = Surroundings { base_dir: folder.clone(), run_dir: None, limits: ConnectionLimits::default() };
    let admin = Admin::start_in(&surroundings, Arc::new(engine), &admin, &metrics_at(""));
    let address = admin.address().unwrap().replace("0.0.0.0", "127.0.0.1");
    let authority = tls.join("authority.pem");
    let authority = authority.to_str().unwrap();
    let ctl = |args: &[&str]| meridian(&folder, &[&["ctl", "--address", &address], args].concat());
    let done = ctl(&["--ca-file", authority, "--token-file", "token", "swap", "dispatch", "native:fcfs"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    for (args, why) in [
        (&["--ca-file", authority, "status"] as &[_], "requests from other machines need a token"),
        (&["--token-file", "token", "status"], "certificate"),
        (&["--ca-file", "token", "status"], "ca_file: token: must hold PEM certificates, and holds none"),
    ] {
        let done = ctl(args);
        assert!(done.code == 1 && done.stderr.contains(why), "{args:?}: {}", done.stderr);
        assert!(!done.stderr.contains(TOKEN));
    }
    let done =
        meridian(&folder, &["top", "--address", &address, "--ca-file", authority, "--token-file", "token", "--json"]);
    assert_eq!(serde_json::from_str::<ProcessStatus>(&done.stdout).unwrap().dp_size, Some(3), "{}", done.stderr);
}
