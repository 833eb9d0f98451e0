//! `meridian ctl` and `meridian top` against a process that listens.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use meridian_admin::discovery::Process;
use meridian_admin::{Admin, ConnectionLimits, Surroundings};
use meridian_engine::control::{ProcessStatus, SwapReport};
use serde_json::Value;

use command::meridian;
use support::{Recorder, TOKEN, config, folder, metrics_at, status, version, write};

use crate::admin_support as support;
use crate::support as command;

/// A process that is found from `folder`; `listen` as in the configuration.
fn start(folder: &Path, listen: &str, token_file: &str) -> (Admin, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let surroundings = Surroundings {
        base_dir: folder.into(),
        run_dir: Some(folder.join(".cache/meridian/run")),
        limits: ConnectionLimits::default(),
    };
    let admin = Admin::start_in(&surroundings, recorder.clone(), &config(listen, token_file), &metrics_at(""));
    assert_eq!(admin.problems(), [""; 0]);
    (admin, recorder)
}

fn with_token(name: &str) -> std::path::PathBuf {
    let folder = folder(name);
    write(&folder.join("token"), TOKEN, 0o600);
    write(&folder.join("policy.wasm"), "component", 0o644);
    folder
}

#[test]
fn every_command_reaches_the_one_process() {
    let folder = with_token("ctl-commands");
    write(&folder.join("s.minisig"), "untrusted comment: x\nA\nB; c\nD\n", 0o644);
    write(&folder.join("options.json"), r#"{"a": "é"}"#, 0o644);
    let (_admin, recorder) = start(&folder, "127.0.0.1:0", "token");
    for (args, call) in [
        (&["ctl", "swap", "dispatch", "policy.wasm"] as &[_], "put 9 bytes Active admin dispatch"),
        (&["ctl", "swap", "dispatch", "policy.wasm", "--mode", "shadow"], "put 9 bytes Shadow admin dispatch"),
        (
            &["ctl", "swap", "dispatch", "policy.wasm", "--signature", "s.minisig"],
            "put 9 bytes Active admin signed \"untrusted comment: from a header\\nA\\nB; c\\nD\\n\" dispatch",
        ),
        (&["ctl", "shadow", "dispatch", "policy.wasm"], "put 9 bytes Shadow admin dispatch"),
        (&["ctl", "swap", "dispatch", "native:fcfs"], "put native:fcfs Active admin dispatch"),
        (
            &["ctl", "swap", "dispatch", "native:edf", "--config", r#"{"a": 1}"#],
            r#"put native:edf Active admin with {"a":1} dispatch"#,
        ),
        (
            &["ctl", "shadow", "dispatch", "--config", "@options.json"],
            r#"put the active one Shadow admin with {"a":"é"} dispatch"#,
        ),
        (
            &["ctl", "swap", "dispatch", "policy.wasm", "--config", "@options.json"],
            r#"put 9 bytes Active admin with {"a":"é"} dispatch"#,
        ),
        (&["ctl", "stop-shadow", "dispatch"], "stop-shadow dispatch"),
        (&["ctl", "promote", "dispatch"], "promote dispatch"),
        (&["ctl", "rollback", "dispatch"], "rollback dispatch"),
        (&["ctl", "release", "dispatch"], "release dispatch"),
    ] {
        let done = meridian(&folder, args);
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{args:?}");
        assert_eq!(recorder.calls(), [call]);
        let report = "candidate 1.0 abababab decides, before current 1.0 abababab, state starts fresh: another layout; \
                      held for 12.5 us\n";
        assert!(done.stdout.starts_with("dispatch: ") && done.stdout.ends_with(report), "{}", done.stdout);
    }
    // Beside the component it is found by itself.
    write(&folder.join("policy.wasm.minisig"), "untrusted comment: x\nA\nB; c\nD\n", 0o644);
    assert_eq!(meridian(&folder, &["ctl", "shadow", "dispatch", "policy.wasm"]).code, 0);
    assert!(recorder.calls()[0].contains("B; c"));
    for (bad, why) in [("absent.minisig", "no such file"), ("control.minisig", "malformed")] {
        write(&folder.join("control.minisig"), "x\n\u{7}\n", 0o644);
        let done = meridian(&folder, &["ctl", "swap", "dispatch", "policy.wasm", "--signature", bad]);
        assert!(done.code == 1 && done.stderr.contains(why), "{}", done.stderr);
    }
    recorder.has_it.store(true, Ordering::Relaxed);
    let done = meridian(&folder, &["ctl", "swap", "dispatch", "policy.wasm"]);
    assert_eq!(done.stdout, "dispatch: unchanged: the slot has this policy with these options\n");
    recorder.has_it.store(false, Ordering::Relaxed);
    let done = meridian(&folder, &["ctl", "promote", "dispatch", "--json"]);
    assert_eq!(serde_json::from_str::<SwapReport>(&done.stdout).unwrap().active, version("candidate"));
}

#[test]
fn status_and_faults() {
    let folder = with_token("ctl-status");
    let (admin, _recorder) = start(&folder, "127.0.0.1:0", "");
    let done = meridian(&folder, &["ctl", "status"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    for part in [
        "Qwen/Qwen3-8B  meridian 0.1.0  up 62 s",
        "requests     prefill 3, think 20, output 5, waiting 7",
        "thinking     750 tokens a request, the mean of 12 that are over; forced: ",
        "active     current \"one\"\\ 1.0 abababab  from admin",
        "decisions  policy 90, default 7, fallback 3",
        "shadow     candidate 1.0 abababab  correlation 0.500",
        "faults     trap 2, deadline 1; strikes 2",
        "idle plans 11 left nothing to run; the host lifted their caps",
        "quarantine bad 1.0 abababab, tried again in 12 s",
        "refused    not a component",
    ] {
        assert!(done.stdout.contains(part), "{part:?} is not in\n{}", done.stdout);
    }
    for args in [&["ctl", "--json", "status"] as &[_], &["top", "--json"]] {
        let done = meridian(&folder, args);
        assert_eq!(serde_json::from_str::<ProcessStatus>(&done.stdout).unwrap(), status(), "{}", done.stderr);
    }
    let all: Value = serde_json::from_str(&meridian(&folder, &["ctl", "status", "--all", "--json"]).stdout).unwrap();
    assert_eq!(all["processes"][0]["address"], admin.address().unwrap());
    assert_eq!(all["processes"][0]["status"]["waiting"], 7);
    let done = meridian(&folder, &["ctl", "faults"]);
    assert_eq!(done.stdout, "       1.500 s  dispatch  bad 1.0 abababab  trap  4 candidates: unreachable\n");
    let faults: Value = serde_json::from_str(&meridian(&folder, &["ctl", "faults", "--json"]).stdout).unwrap();
    assert_eq!(faults["faults"][0]["kind"], "trap");

    // Without a terminal, one frame as text.
    let done = meridian(&folder, &["top"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(done.stdout.contains("think       20         4  17.5 ms  20.0 ms  ####"), "{}", done.stdout);
    assert!(!done.stdout.contains('\x1b'));
}

#[test]
fn a_unix_socket_and_an_address() {
    let folder = with_token("ctl-unix");
    let short = std::env::temp_dir().join(format!("meridian-ctl-{}", std::process::id()));
    std::fs::create_dir_all(&short).unwrap();
    let listen = format!("unix:{}/admin", short.display());
    let (admin, recorder) = start(&folder, &listen, "token");
    let done = meridian(&folder, &["ctl", "swap", "dispatch", "policy.wasm"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    assert_eq!(recorder.calls(), ["put 9 bytes Active admin dispatch"]);
    // From another home nothing is found; the address and the token can be named.
    let elsewhere = with_token("ctl-elsewhere");
    assert_eq!(meridian(&elsewhere, &["ctl", "status"]).code, 1);
    assert_eq!(meridian(&elsewhere, &["ctl", "--address", &listen, "status"]).code, 0);
    let done = meridian(&elsewhere, &["ctl", "--address", &listen, "promote", "dispatch"]);
    assert!(done.stderr.contains("changes need the token of admin.token_file"), "{}", done.stderr);
    let named = ["ctl", "--address", &listen, "--token-file", "token", "promote", "dispatch"];
    assert_eq!(meridian(&elsewhere, &named).code, 0);
    drop(admin);
    let done = meridian(&elsewhere, &["ctl", "--address", &listen, "status"]);
    assert!(done.code == 1 && done.stderr.contains("cannot connect"), "{}", done.stderr);
    std::fs::remove_dir_all(&short).unwrap();
}

#[test]
fn refusals_are_told() {
    let folder = with_token("ctl-refusals");
    let (admin, recorder) = start(&folder, "127.0.0.1:0", "token");
    let address = admin.address().unwrap();
    write(&folder.join("garbage.wasm"), "garbage", 0o644);
    let large = &format!(r#"{{"a":"{}"}}"#, "x".repeat(8192));
    write(&folder.join("large.wasm"), &"x".repeat((32 << 20) + 1), 0o644);
    assert!(std::process::Command::new("mkfifo").arg(folder.join("pipe.wasm")).status().unwrap().success());
    write(&folder.join("wrong"), "another-token-of-some-length", 0o600);
    write(&folder.join("open"), TOKEN, 0o644);
    for (args, expected) in [
        (&["ctl", "swap", "dispatch", "garbage.wasm"] as &[_], "not a component: no header"),
        (
            &["ctl", "swap", "dispatch", "large.wasm"],
            "large.wasm: is larger than 32 MiB, the most a component may have",
        ),
        (&["ctl", "swap", "dispatch", "absent.wasm"], "absent.wasm: cannot be read: No such file"),
        (&["ctl", "swap", "dispatch", "--config", "[1]"], "--config: must be one JSON object"),
        (&["ctl", "swap", "dispatch", "--config", "@absent"], "--config: absent: cannot be read"),
        (
            &["ctl", "swap", "dispatch", "garbage.wasm", "--config", large],
            "bytes: must be at most 8192 beside a component",
        ),
        (&["ctl", "swap", "dispatch", "native:x", "--signature", "wrong"], "--signature: a native policy needs none"),
        (&["ctl", "swap", "dispatch", "pipe.wasm"], "pipe.wasm: cannot be read: not a regular file"),
        (&["ctl", "promote", "eviction"], "eviction: has no such version"),
        (&["ctl", "release", "budget"], "budget: this engine has no such slot"),
        (&["ctl", "promote", "dispatch", "--token-file", "wrong"], "changes need the token"),
        (&["ctl", "promote", "dispatch", "--token-file", "open"], "open: has mode 0644, must be 0600"),
        (&["ctl", "status", "--pid", "1"], "1: is no engine process with an admin listener"),
        (&["ctl", "status", "--address", "10.0.0.1:80"], "must be a loopback address"),
        (&["ctl", "status", "--address", ""], "must not be empty"),
    ] {
        let done = meridian(&folder, args);
        assert!(done.code == 1 && done.stderr.contains(expected), "{args:?}: {} {}", done.code, done.stderr);
        let done = meridian(&folder, &[args, &["--json"]].concat());
        let value: Value = serde_json::from_str(&done.stdout).unwrap();
        assert!(value["error"].as_str().unwrap().contains(expected), "{value}");
    }
    for args in [
        &["ctl", "promote", "nothing"] as &[_],
        &["ctl", "swap", "dispatch", "policy.wasm", "--mode", "both"],
        &["ctl", "status", "--pid", "1", "--address", address],
        &["top", "--interval", "0"],
        &["ctl"],
        &["ctl", "swap", "dispatch"],
    ] {
        assert_eq!(meridian(&folder, args).code, 2, "{args:?}");
    }
    assert!(recorder.calls().iter().all(|call| !call.ends_with("dispatch")));
}

#[test]
fn one_of_several_must_be_named() {
    let folder = with_token("ctl-several");
    let nobody = meridian(&folder, &["ctl", "status"]);
    assert!(nobody.code == 1 && nobody.stderr.contains("no engine process"), "{}", nobody.stderr);
    assert_eq!(meridian(&folder, &["ctl", "status", "--all"]).code, 0);

    let (admin, _recorder) = start(&folder, "127.0.0.1:0", "token");
    // Another process that runs, and that nobody answers for.
    let pid = std::os::unix::process::parent_id();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let started_ticks = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let other =
        Process { pid, started_ticks, admin: Some(free.to_string()), model: "other/model".into(), ..Process::own() };
    let file = folder.join(format!(".cache/meridian/run/{pid}.json"));
    write(&file, &serde_json::to_string(&other).unwrap(), 0o600);
    let done = meridian(&folder, &["ctl", "promote", "dispatch"]);
    assert_eq!(done.code, 1);
    let own = std::process::id().to_string();
    assert!(
        done.stderr.contains("several engine processes run here, name one, or all of them by --all:"),
        "{}",
        done.stderr
    );
    assert!(done.stderr.contains(&format!("--pid {own}  Qwen/Qwen3-8B  {}", admin.address().unwrap())));
    assert!(done.stderr.contains(&format!("--pid {pid}  other/model  {free}")));
    assert_eq!(meridian(&folder, &["ctl", "--pid", &own, "promote", "dispatch"]).code, 0);
    let done = meridian(&folder, &["ctl", "status", "--all"]);
    assert_eq!(done.code, 1);
    assert!(done.stdout.contains("Qwen/Qwen3-8B") && done.stdout.contains("cannot connect"), "{}", done.stdout);
    let done = meridian(&folder, &["ctl", "status", "--all", "--json"]);
    let all: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((done.code, all["processes"].as_array().unwrap().len()), (1, 2));
}

/// A file that tells nothing is one line; the others are asked all the same.
#[test]
fn a_malformed_discovery_file_is_told_of() {
    let folder = with_token("ctl-malformed");
    let (_admin, _recorder) = start(&folder, "127.0.0.1:0", "token");
    let bad = Process { admin: Some("nowhere".into()), ..Process::own() };
    write(&folder.join(".cache/meridian/run/bad.json"), &serde_json::to_string(&bad).unwrap(), 0o600);
    let done = meridian(&folder, &["ctl", "status", "--all"]);
    assert!(done.stdout.contains("Qwen/Qwen3-8B"), "{}", done.stdout);
    assert!(done.stdout.contains("bad.json: admin: \"nowhere\": must be IP:port"), "{}", done.stdout);
    assert_eq!((done.code, done.stderr.lines().count()), (1, 1), "{}", done.stderr);
    let done = meridian(&folder, &["ctl", "status", "--all", "--json"]);
    let all: Value = serde_json::from_str(&done.stdout).unwrap();
    assert_eq!((done.code, all["processes"][0]["status"]["waiting"].as_u64()), (1, Some(7)));
    assert!(all["processes"][1]["error"].as_str().unwrap().contains("bad.json: admin"));
    let done = meridian(&folder, &["ctl", "promote", "dispatch"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(done.stderr.starts_with("warning: ") && done.stderr.lines().count() == 1, "{}", done.stderr);
}

/// Whoever has the port is asked nothing, and is sent no token.
#[test]
fn a_port_that_another_process_has_is_not_used() {
    let folder = with_token("ctl-taken");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    taken.set_nonblocking(true).unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let recorder = Arc::new(Recorder::default());
    let surroundings = Surroundings {
        base_dir: folder.clone(),
        run_dir: Some(folder.join(".cache/meridian/run")),
        limits: ConnectionLimits::default(),
    };
    let admin = Admin::start_in(&surroundings, recorder.clone(), &config(&address, "token"), &metrics_at(""));
    assert_eq!(admin.problems().len(), 1);
    let done = meridian(&folder, &["ctl", "rollback", "dispatch"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    assert_eq!(recorder.calls(), ["rollback dispatch"]);
    let done = meridian(&folder, &["ctl", "status"]);
    assert!(
        done.stdout.contains(&format!("problem      admin.listen: \"{address}\": another process")),
        "{}",
        done.stdout
    );
    assert!(done.stdout.contains(admin.socket().unwrap()), "{}", done.stdout);
    assert_eq!(taken.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "somebody asked");
}

/// Another service may have the port, and answers with its own JSON.
#[test]
fn an_answer_that_is_no_timeline_is_refused() {
    use std::io::{Read, Write};

    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-timeline");
    std::fs::create_dir_all(&folder).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut asked = Vec::new();
        while !asked.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            asked.extend(byte);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").unwrap();
    });
    let done = meridian(&folder, &["trace", "--address", &address, "--seconds", "0.1", "--out", "t.json"]);
    served.join().unwrap();
    assert_eq!(done.code, 1, "{}", done.stdout);
    assert!(done.stderr.contains("answered no timeline, expected an object with traceEvents"), "{}", done.stderr);
    assert!(!folder.join("t.json").exists());
}
