//! Engines over HTTP: one that answers, with and without TLS, and others that are slow, lie, or are something else.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[expect(dead_code, reason = "shared with the tests of the listeners")]
#[path = "../../admin/tests/support/mod.rs"]
mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use meridian_admin::Admin;
use meridian_core::config::AdminConfig;
use meridian_engine::budgets::LiveChange;
use meridian_engine::control::{Mode, SlotName};
use meridian_fleet::{BudgetChange, EngineClient, Member, MemberError, NamedPolicy, Patience, PolicyOrigin};
use serde_json::Value;

use support::{Recorder, TOKEN, folder, metrics_at, start, status, surroundings, write};

fn tls_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name)
}

/// An engine whose port is encrypted with this certificate.
fn start_with_tls(folder: &Path, listen: &str, certificate: &str) -> (Admin, Arc<Recorder>) {
    write(&folder.join("token"), TOKEN, 0o600);
    let key = std::fs::read_to_string(tls_file(&format!("{certificate}.key"))).unwrap();
    write(&folder.join("key.pem"), &key, 0o600);
    let config = AdminConfig {
        listen: listen.into(),
        token_file: "token".into(),
        tls_cert_file: tls_file(&format!("{certificate}.pem")).to_str().unwrap().into(),
        tls_key_file: "key.pem".into(),
        ..AdminConfig::default()
    };
    let recorder = Arc::new(Recorder::default());
    let admin = Admin::start_in(&surroundings(folder), recorder.clone(), &config, &metrics_at(""));
    assert_eq!(admin.problems(), [""; 0]);
    (admin, recorder)
}

/// Its address for clients of this machine, whatever it listens on.
fn here(admin: &Admin) -> String {
    let port = admin.address().unwrap().rsplit_once(':').unwrap().1;
    format!("https://127.0.0.1:{port}")
}

fn component() -> NamedPolicy {
    let bytes = Arc::from(b"component".as_slice());
    let signature = Some("untrusted comment: x\nA\nB; c\nD\n".into());
    NamedPolicy { source: PolicyOrigin::Component { bytes, signature }, options: Some(r#"{"a":"é"}"#.into()) }
}

#[test]
fn every_request_reaches_the_engine() {
    let process = start("fleet-requests");
    let engine = EngineClient::at(process.address()).unwrap().with_token_file(process.folder.join("token"));
    let slot = SlotName::Dispatch;
    assert_eq!(engine.status(), Ok(status()));
    assert_eq!(engine.faults().map(|faults| faults.len()), Ok(1));
    assert_eq!(engine.budgets().map(|budgets| budgets.live), Ok(1));
    engine.put(slot, &component(), Mode::Shadow).unwrap();
    let named = |source: &str| NamedPolicy { source: PolicyOrigin::Named(source.into()), options: None };
    engine.put(slot, &named("native:fcfs"), Mode::Active).unwrap();
    engine.configure(slot, r#"{"a": 1}"#, Mode::Active).unwrap();
    engine.promote(slot).unwrap();
    engine.rollback(slot).unwrap();
    engine.release(slot).unwrap();
    engine.stop_shadow(slot).unwrap();
    assert_eq!(
        process.recorder.calls(),
        [
            "put 9 bytes Shadow admin signed \"untrusted comment: from a header\\nA\\nB; c\\nD\\n\" with {\"a\":\"é\"} dispatch",
            "put native:fcfs Active admin dispatch",
            "put the active one Active admin with {\"a\":1} dispatch",
            "promote dispatch",
            "rollback dispatch",
            "release dispatch",
            "stop-shadow dispatch",
        ]
    );
    let refused = |done: Result<_, MemberError>, why: &str| match done {
        Err(MemberError::Refused(line)) if line.starts_with(&format!("{}: {why}", process.address())) => {}
        other => panic!("{other:?}"),
    };
    refused(engine.promote(SlotName::Eviction), "eviction: has no such version");
    refused(engine.release(SlotName::Budget), "budget: this engine has no such slot");
    refused(engine.configure(slot, "[1]", Mode::Active), "options: must be one JSON object: invalid type: sequence");
    assert!(engine.put(slot, &named("oci://x/y:1"), Mode::Active).is_err());
    let large = NamedPolicy { options: Some(format!(r#"{{"a":"{}"}}"#, "x".repeat(9000))), ..component() };
    assert!(
        matches!(engine.put(slot, &large, Mode::Active), Err(MemberError::Refused(why)) if why.contains("at most 8192"))
    );
    process.recorder.calls();
    let change = |request: &str| {
        engine.change_budgets(&LiveChange { request: Some(request.into()), end_now: true, ..LiveChange::default() })
    };
    assert!(matches!(change("chatcmpl-1"), Ok(BudgetChange::Made(report)) if report.changed == 1));
    for elsewhere in ["absent", "over"] {
        assert!(matches!(change(elsewhere), Ok(BudgetChange::NothingHere(why)) if why.contains(elsewhere)));
    }
    assert!(matches!(change("late"), Err(MemberError::Refused(why)) if why.contains("16 changes wait")));
}

/// A panic in the engine, or a proxy's page: the change may have been carried out.
#[test]
fn a_failure_on_the_way_is_no_refusal() {
    let process = start("fleet-failed");
    let engine = EngineClient::at(process.address()).unwrap().with_token_file(process.folder.join("token"));
    let panics = NamedPolicy {
        source: PolicyOrigin::Component { bytes: Arc::from(b"panic".as_slice()), signature: None },
        options: None,
    };
    let done = engine.put(SlotName::Dispatch, &panics, Mode::Active);
    assert!(matches!(&done, Err(MemberError::Unreachable(why)) if why.contains("its log says how")), "{done:?}");
}

#[test]
fn over_tls_with_the_right_certificate() {
    let folder = folder("fleet-tls");
    // Every address of the machine: other machines could ask, so reading needs the token.
    let (admin, recorder) = start_with_tls(&folder, "0.0.0.0:0", "engine");
    assert!(admin.address().unwrap().starts_with("https://0.0.0.0:"));
    let stranger = EngineClient::at(&here(&admin)).unwrap().with_ca_file(tls_file("authority.pem"));
    for path in ["/v1/status", "/metrics", "/v1/faults", "/v1/why?request=x", "/v1/budgets", "/nothing"] {
        let done = stranger.get::<Value>(path);
        let why = "requests from other machines need a token of admin.token_file: Authorization: Bearer TOKEN";
        assert_eq!(done, Err(MemberError::Refused(format!("{}: {why}", here(&admin)))), "{path}");
    }
    // The probe of an orchestrator tells nothing.
    assert_eq!(stranger.get::<Value>("/healthz").unwrap(), serde_json::json!({ "ok": true }));
    assert!(matches!(stranger.rollback(SlotName::Dispatch), Err(MemberError::Refused(_))));
    assert!(recorder.calls().is_empty());
    let engine = stranger.with_token_file(folder.join("token"));
    assert_eq!(engine.status(), Ok(status()));
    engine.put(SlotName::Dispatch, &component(), Mode::Active).unwrap();
    assert_eq!(recorder.calls().len(), 1);
    // A name is as good as an address.
    let port = admin.address().unwrap().rsplit_once(':').unwrap().1;
    let named = EngineClient::at(&format!("https://localhost:{port}")).unwrap().with_ca_file(tls_file("authority.pem"));
    assert_eq!(named.with_token_file(folder.join("token")).status(), Ok(status()));
    // The private socket is not encrypted, and reading needs nothing there.
    assert_eq!(EngineClient::at(admin.socket().unwrap()).unwrap().status(), Ok(status()));
    // Nothing is answered in the clear.
    let reply = support::send(&format!("127.0.0.1:{port}"), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(!reply.contains("ok"), "{reply}");
}

/// The token is sent to none of them.
#[test]
fn over_tls_with_a_wrong_certificate() {
    let folder = folder("fleet-wrong-tls");
    for (certificate, authority, why) in [
        ("engine", Some("other-authority.pem"), "UnknownIssuer"),
        ("engine", None, ""),
        ("expired", Some("authority.pem"), "certificate expired"),
        ("other-name", Some("authority.pem"), "certificate not valid for name"),
        ("engine", Some("absent.pem"), "cannot be read: No such file"),
        ("engine", Some("engine.key"), "must hold PEM certificates, and holds none"),
    ] {
        let (admin, recorder) = start_with_tls(&folder, "127.0.0.1:0", certificate);
        let mut engine = EngineClient::at(&here(&admin)).unwrap().with_token_file(folder.join("token"));
        if let Some(authority) = authority {
            engine = engine.with_ca_file(tls_file(authority));
        }
        for done in [engine.status().map(|_| ()), engine.rollback(SlotName::Dispatch).map(|_| ())] {
            let line = done.unwrap_err().to_string();
            assert!(line.contains(why) && !line.contains(TOKEN), "{certificate} {authority:?}: {line}");
        }
        assert!(recorder.calls().is_empty(), "{certificate} {authority:?}");
    }
}

/// Answers one connection with these bytes, and then waits for the client to hang up. Returns its address and what it
/// received.
fn liar(answer: Vec<u8>) -> (String, Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, received) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = [0; 4096];
            let length = stream.read(&mut head).unwrap_or(0);
            let _ = sender.send(String::from_utf8_lossy(&head[..length]).into_owned());
            let _ = stream.write_all(&answer);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    (address, received)
}

fn impatient(engine: EngineClient) -> EngineClient {
    let soon = Duration::from_millis(200);
    engine.with_patience(Patience { connect: soon, read: soon, change: soon })
}

fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[test]
fn slow_and_lying_servers_end_in_one_line() {
    let of_another_slot = serde_json::json!({
        "slot": "eviction", "action": "rollback", "held_us": 1.0, "state": { "kind": "stateless" },
        "active": { "name": "a", "version": "", "sha256": "", "source": "" },
        "previous": { "name": "b", "version": "", "sha256": "", "source": "" },
    });
    let refusal = serde_json::json!({ "error": format!("a\u{1b}[2J\nb{}", "x".repeat(100_000)) }).to_string();
    let endless = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec(), {
        let chunk = [b"100000\r\n".to_vec(), vec![b'x'; 1 << 20], b"\r\n".to_vec()].concat();
        chunk.repeat(9)
    }]
    .concat();
    let unreachable = |why: &'static str| (true, why);
    let refused = |why: &'static str| (false, why);
    // Only these are not waited for: the others answer when they get to run.
    let slow = "does not answer ";
    for (answer, (may_have_changed, why)) in [
        (Vec::new(), unreachable("does not answer within 0.2 s")),
        (b"HTTP/1.1 200 OK\r\nContent-Le".to_vec(), unreachable("does not answer within 0.2 s")),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{".to_vec(), unreachable("does not answer ")),
        (b"SSH-2.0-x\r\n\r\n".to_vec(), unreachable("the answer is not HTTP")),
        (ok("{}"), unreachable("the answer is not what Meridian gives: missing field")),
        (ok("<html>"), unreachable("the answer is not what Meridian gives")),
        (ok(&of_another_slot.to_string()), unreachable("answered about the slot eviction, expected dispatch")),
        (endless, unreachable("the answer is too large")),
        (
            b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n".to_vec(),
            unreachable("answered 302, and is no engine process of Meridian"),
        ),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 0\r\n\r\n".to_vec(), unreachable("answered 502")),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n".to_vec(), unreachable("answered 503")),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n".to_vec(), refused("answered 404")),
        (
            format!("HTTP/1.1 409 No\r\nContent-Length: {}\r\n\r\n{refusal}", refusal.len()).into_bytes(),
            refused("a\\u{1b}[2J\\u{a}bxxx"),
        ),
    ] {
        let shown = String::from_utf8_lossy(&answer[..answer.len().min(60)]).into_owned();
        let (address, _received) = liar(answer);
        let engine = EngineClient::at(&address).unwrap();
        let engine = if why.starts_with(slow) { impatient(engine) } else { engine };
        let done = engine.rollback(SlotName::Dispatch);
        let (is_unreachable, line) = match done {
            Err(MemberError::Unreachable(line)) => (true, line),
            Err(MemberError::Refused(line)) => (false, line),
            Ok(report) => panic!("{shown:?}: {report:?}"),
        };
        assert!(line.starts_with(&format!("{address}: ")) && line.contains(why), "{shown:?}: {line}");
        assert_eq!(is_unreachable, may_have_changed, "{shown:?}: {line}");
        assert!(line.len() < 3000 && !line.contains('\n'), "{shown:?}: {} bytes", line.len());
    }
    // One that hangs up, and one that is not there.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let line = EngineClient::at(&gone).unwrap().status().unwrap_err().to_string();
    assert!(line.starts_with(&format!("{gone}: cannot connect: Connection refused")), "{line}");
}

/// An answer with texts that no engine of Meridian gives does not flood a terminal.
#[test]
fn answers_with_endless_texts_are_refused() {
    let report = |options: &str, name: &str| {
        serde_json::json!({
            "slot": "dispatch", "action": "rollback", "held_us": 1.0, "state": { "kind": "stateless" }, (name): [name],
            "active": { "name": "a", "version": "", "sha256": "", "source": "", "options": { "table": options } },
            "previous": { "name": "b", "version": "", "sha256": "", "source": "" },
        })
    };
    let asked = |report: Value| {
        let (address, _received) = liar(ok(&report.to_string()));
        impatient(EngineClient::at(&address).unwrap()).rollback(SlotName::Dispatch)
    };
    // Options may be long, also where each byte is escaped.
    let options = "\\\"".repeat(15_000);
    let active = asked(report(&options, "name")).unwrap().active;
    let kept: Value = serde_json::from_str(&active.options).unwrap();
    assert_eq!(kept["table"], options.as_str());
    for wild in [report(&"w".repeat(65_537), "name"), report("", &"\u{1b}é".repeat(50_000))] {
        let line = asked(wild).unwrap_err().to_string();
        assert!(line.contains("the answer is not what Meridian gives: a text of "), "{line}");
        assert!(line.len() < 200, "{} bytes", line.len());
    }
}

/// A change that may compile is waited for, as long as the engine answers others.
#[test]
fn a_change_is_given_up_when_probes_are_not_answered() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sender, probes) = channel();
    std::thread::spawn(move || {
        let mut kept = Vec::new();
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut head = [0; 4096];
            let length = stream.read(&mut head).unwrap_or(0);
            if head[..length].starts_with(b"GET /healthz ") {
                let _ = sender.send(());
                // Three are answered.
                if kept.len() < 4 {
                    stream.write_all(&ok("ok")).unwrap();
                }
            }
            kept.push(stream);
        }
    });
    let (soon, change) = (Duration::from_secs(1), Duration::from_secs(600));
    let patience = Patience { connect: soon, read: soon, change };
    let engine = EngineClient::at(&address).unwrap().with_patience(patience);
    let line = engine.put(SlotName::Dispatch, &component(), Mode::Shadow).unwrap_err();
    let why = format!("{address}: has not answered yet, and a probe does not answer within 0.5 s");
    assert_eq!(line, MemberError::Unreachable(why));
    assert_eq!(probes.try_iter().count(), 4);
}

/// Each byte comes in time, and the answer does not.
#[test]
fn an_answer_that_drips_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.read(&mut [0; 4096]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n");
            while stream.write_all(b" ").is_ok() {
                std::thread::yield_now();
            }
        }
    });
    let line = impatient(EngineClient::at(&address).unwrap()).status().unwrap_err().to_string();
    assert!(line.contains("does not answer ") && line.ends_with(" within 0.2 s"), "{line}");
}

#[test]
fn a_server_without_tls_gets_no_token() {
    let folder = folder("fleet-plain");
    write(&folder.join("token"), TOKEN, 0o600);
    let (address, received) = liar(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n".to_vec());
    let engine = EngineClient::at(&format!("https://{address}")).unwrap().with_ca_file(tls_file("authority.pem"));
    let engine = impatient(engine.with_token_file(folder.join("token")));
    let line = engine.rollback(SlotName::Dispatch).unwrap_err().to_string();
    assert!(line.contains(": no TLS: "), "{line}");
    assert!(!received.recv().unwrap().contains("Bearer"));
    // One that says nothing is not waited for.
    let (address, _received) = liar(Vec::new());
    let engine = EngineClient::at(&format!("https://{address}")).unwrap().with_ca_file(tls_file("authority.pem"));
    let line = impatient(engine).status().unwrap_err().to_string();
    assert!(line.ends_with("no TLS: no answer within 0.2 s"), "{line}");
}

#[test]
fn a_token_file_that_others_can_read_is_not_used() {
    let folder = folder("fleet-open");
    write(&folder.join("open"), TOKEN, 0o644);
    let (address, received) = liar(ok("{}"));
    let engine = EngineClient::at(&address).unwrap().with_name("a0").with_token_file(folder.join("open"));
    let done = impatient(engine).rollback(SlotName::Dispatch);
    let path = folder.join("open");
    let why = format!(
        "a0 ({address}): token_file: {}: has mode 0644, must be 0600, or 0640 where root owns it \
         and its group is one of this user: other users must not read it",
        path.display()
    );
    assert_eq!(done, Err(MemberError::Refused(why)));
    assert!(received.try_recv().is_err(), "it was asked");
}

/// Another process may have the port of an engine that has ended: only a change sends the token in the clear.
#[test]
fn reading_on_this_machine_sends_no_token() {
    let folder = folder("fleet-reading");
    write(&folder.join("token"), &format!("alice {TOKEN}\nbob another-token-of-bob\n"), 0o600);
    let (address, received) = liar(ok("{}"));
    let engine = impatient(EngineClient::at(&address).unwrap().with_token_file(folder.join("token")));
    assert!(engine.status().is_err());
    assert!(!received.recv().unwrap().to_ascii_lowercase().contains("authorization"));
    // The first of several tokens is the client's own.
    assert!(engine.rollback(SlotName::Dispatch).is_err());
    assert!(received.recv().unwrap().contains(&format!("Bearer {TOKEN}\r\n")));
}
