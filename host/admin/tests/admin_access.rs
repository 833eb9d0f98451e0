//! Who may change something, over what, and what is written down about it.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[expect(dead_code, reason = "shared with other tests")]
mod support;

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use meridian_admin::{Admin, discovery};
use meridian_core::config::AdminConfig;
use meridian_engine::control::{ProcessStatus, SlotName};
use serde_json::{Value, json};

use support::{Recorder, Reply, TOKEN, exchange, folder, metrics_at, parse, send, surroundings, write};

const BOB: &str = "another-token-of-bob";

/// An engine with these fields of `[admin]`, on a free port unless they say otherwise.
fn start(folder: &Path, admin: AdminConfig) -> (Admin, Arc<Recorder>) {
    let recorder = Arc::new(Recorder::default());
    let admin = Admin::start_in(&surroundings(folder), recorder.clone(), &admin, &metrics_at(""));
    (admin, recorder)
}

fn on_a_free_port() -> AdminConfig {
    AdminConfig { listen: "127.0.0.1:0".into(), token_file: "token".into(), ..AdminConfig::default() }
}

fn ask(admin: &Admin, line: &str, token: &str, body: &[u8]) -> Reply {
    let head = format!(
        "{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    parse(&send(admin.address().unwrap(), &[head.as_bytes(), body].concat()))
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(!text.contains(TOKEN) && !text.contains(BOB), "the log has a token: {text}");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn every_change_has_a_line_with_its_bearer() {
    let folder = folder("audit");
    write(&folder.join("token"), &format!("alice {TOKEN}\nbob {BOB}\n"), 0o600);
    let config = AdminConfig { audit_log: "audit-{rank}.jsonl".into(), ..on_a_free_port() };
    let (admin, recorder) = start(&folder, config);
    assert_eq!(admin.problems(), [""; 0]);
    let policies = "/v1/policies";
    for (line, token, body, code) in [
        (format!("PUT {policies}/dispatch"), TOKEN, b"component".as_slice(), 200),
        (format!("PUT {policies}/dispatch?mode=shadow"), BOB, b"garbage", 422),
        (format!("POST {policies}/dispatch/rollback"), BOB, b"", 200),
        (format!("POST {policies}/eviction/promote"), BOB, b"", 409),
        (format!("POST {policies}/nothing/promote"), BOB, b"", 404),
        (format!("PUT {policies}/dispatch?mode=x"), BOB, b"x", 400),
        ("PUT /v1/budgets".into(), TOKEN, br#"{"tenant":"batch","end_now":true}"#, 200),
        ("PUT /v1/budgets".into(), TOKEN, b"{", 400),
        ("POST /v1/status".into(), "a-wrong-token-of-mallory", b"", 405),
        (format!("DELETE {policies}/dispatch/shadow"), "a-wrong-token-of-mallory", b"", 401),
        (format!("PUT {policies}/dispatch"), TOKEN, b"panic", 500),
    ] {
        assert_eq!(ask(&admin, &line, token, body).code, code, "{line}");
    }
    assert_eq!(recorder.calls().len(), 4);
    // The private socket says who its client is.
    let socket = admin.socket().unwrap().strip_prefix("unix:").unwrap();
    let head =
        format!("DELETE /v1/policies/dispatch/shadow HTTP/1.1\r\nHost: any\r\nAuthorization: Bearer {TOKEN}\r\n\r\n");
    assert_eq!(parse(&exchange(&mut UnixStream::connect(socket).unwrap(), head.as_bytes())).code, 200);
    // Reading is no change.
    assert_eq!(ask(&admin, "GET /v1/status", TOKEN, b"").code, 200);

    // The recorder is rank 1.
    let found = lines(&folder.join("audit-1.jsonl"));
    let short: Vec<_> = found
        .iter()
        .map(|line| {
            let text = |key: &str| line[key].as_str().unwrap_or("-").to_owned();
            format!("{} {} {} {}", text("who"), text("slot"), text("action"), text("result"))
        })
        .collect();
    assert_eq!(
        short,
        [
            "alice dispatch swap done",
            "bob dispatch shadow refused",
            "bob dispatch rollback done",
            "bob eviction promote refused",
            "bob - POST /v1/policies/nothing/promote refused",
            "bob - PUT /v1/policies/dispatch refused",
            "alice - budgets done",
            "alice - PUT /v1/budgets refused",
            "- - POST /v1/status refused",
            "- - DELETE /v1/policies/dispatch/shadow refused",
            "alice - PUT /v1/policies/dispatch failed",
            "alice dispatch stop-shadow done",
        ]
    );
    assert_eq!(found[0]["before"]["name"], "current");
    assert_eq!(
        (&found[0]["after"]["name"], &found[0]["after"]["sha256"]),
        (&json!("candidate"), &json!("ab".repeat(32)))
    );
    assert!(found[0]["asked"].as_str().unwrap().starts_with("component of 9 bytes, sha256 "), "{}", found[0]);
    assert_eq!(
        (&found[1]["why"], &found[1]["before"]["name"]),
        (&json!("not a component:\nno header"), &json!("current \"one\"\\"))
    );
    assert!(found[1].get("after").is_none());
    assert_eq!(found[6]["asked"], r#"{"tenant":"batch","end_now":true}"#);
    assert!(found[0]["peer"].as_str().unwrap().starts_with("127.0.0.1:"));
    assert_eq!(found[0]["engine"], json!({ "pid": std::process::id(), "dp_rank": 1, "model": "Qwen/Qwen3-8B" }));
    assert!(found[9]["why"].as_str().unwrap().contains("changes need the token"));
    let peer = found[11]["peer"].as_str().unwrap();
    assert!(peer.starts_with("unix:uid=") && peer.ends_with(&format!(",pid={}", std::process::id())), "{peer}");
}

#[test]
fn a_token_does_what_its_role_says() {
    let folder = folder("roles");
    let (reads, changes) = ("a-token-that-reads", "a-token-that-changes");
    write(
        &folder.join("token"),
        &format!("ops {TOKEN} all\nprometheus {reads} read\noncall {changes} change\n"),
        0o600,
    );
    let (admin, recorder) = start(&folder, AdminConfig { audit_log: "audit.jsonl".into(), ..on_a_free_port() });
    assert_eq!(admin.problems(), [""; 0]);
    let budgets = br#"{"tenant":"batch","end_now":true}"#.as_slice();
    for (line, body, codes) in [
        ("GET /v1/status", b"".as_slice(), [200, 200, 200]),
        ("POST /v1/policies/dispatch/rollback", b"", [403, 200, 200]),
        ("DELETE /v1/policies/dispatch/shadow", b"", [403, 200, 200]),
        ("PUT /v1/budgets", budgets, [403, 200, 200]),
        ("POST /v1/policies/dispatch/release", b"", [403, 200, 200]),
        ("PUT /v1/policies/dispatch", b"component", [403, 403, 200]),
        ("PUT /v1/policies/dispatch?mode=shadow", b"component", [403, 403, 200]),
    ] {
        let found = [reads, changes, TOKEN].map(|token| ask(&admin, line, token, body).code);
        assert_eq!(found, codes, "{line}");
    }
    assert_eq!(recorder.calls().len(), 10);
    let refused = |line: &Value| line["result"] == "refused";
    let lines = std::fs::read_to_string(folder.join("audit.jsonl")).unwrap();
    let refusals: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).filter(refused).collect();
    assert_eq!(refusals.len(), 8);
    assert!(
        refusals[0]["who"] == "prometheus"
            && refusals[0]["why"].as_str().unwrap().starts_with("this token may only read")
    );
    assert!(refusals[7]["why"].as_str().unwrap().starts_with("this token may not give the engine another policy"));
}

/// A part of the process that changes a policy by itself.
#[test]
fn the_file_watch_has_lines_too_and_needs_no_listener() {
    let folder = folder("audit-watch");
    let config = AdminConfig { listen: String::new(), audit_log: "audit.jsonl".into(), ..AdminConfig::default() };
    let (admin, recorder) = start(&folder, config);
    let watching = admin.audited(recorder, "file watch");
    watching.promote(SlotName::Dispatch).unwrap();
    let [line] = lines(&folder.join("audit.jsonl")).try_into().unwrap();
    assert_eq!((&line["who"], &line["peer"]), (&json!("file watch"), &json!("this process")));
    assert_eq!(watching.status(), support::status());
}

#[test]
fn nothing_changes_without_the_audit_log_that_is_configured() {
    let folder = folder("audit-unusable");
    write(&folder.join("token"), TOKEN, 0o600);
    write(&folder.join("open"), "", 0o666);
    write(&folder.join("target"), "", 0o600);
    std::os::unix::fs::symlink(folder.join("target"), folder.join("link")).unwrap();
    for (audit_log, why) in [
        ("link", "is a symbolic link, must be a regular file"),
        ("open", "has mode 0666, must be 0600: other users must not write it"),
        ("/dev/full", "must be a regular file"),
        (".", "must be a regular file"),
        ("no/such/folder", "cannot be opened: No such file or directory (os error 2)"),
    ] {
        let config = AdminConfig { audit_log: audit_log.into(), ..on_a_free_port() };
        let (admin, recorder) = start(&folder, config);
        let path = std::path::absolute(folder.join(audit_log)).unwrap();
        assert_eq!(admin.problems(), [format!("admin.audit_log: {}: {why}: nothing can be changed", path.display())]);
        let reply = ask(&admin, "POST /v1/policies/dispatch/rollback", TOKEN, b"");
        assert_eq!(reply.code, 403);
        assert!(reply.error().contains("admin.audit_log could not be used"), "{}", reply.body);
        assert!(recorder.calls().is_empty());
        assert_eq!(ask(&admin, "GET /v1/status", TOKEN, b"").code, 200);
    }
    assert_eq!(std::fs::read_to_string(folder.join("target")).unwrap(), "");
}

/// A disk that fails later must not stop a rollback, and is a problem in the status.
#[test]
fn a_log_that_fails_later_is_a_problem_in_the_status() {
    let folder = folder("audit-later");
    write(&folder.join("token"), TOKEN, 0o600);
    let (admin, recorder) = start(&folder, AdminConfig { audit_log: "audit.jsonl".into(), ..on_a_free_port() });
    let path = folder.join("audit.jsonl");
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("elsewhere", &path).unwrap();
    assert_eq!(ask(&admin, "POST /v1/policies/dispatch/rollback", TOKEN, b"").code, 200);
    assert_eq!(recorder.calls(), ["rollback dispatch"]);
    let problems =
        || serde_json::from_str::<ProcessStatus>(&ask(&admin, "GET /v1/status", "", b"").body).unwrap().problems;
    assert!(problems()[0].contains("is a symbolic link") && !folder.join("elsewhere").exists(), "{:?}", problems());
    std::fs::remove_file(&path).unwrap();
    assert_eq!(ask(&admin, "POST /v1/policies/dispatch/rollback", TOKEN, b"").code, 200);
    assert_eq!((problems(), lines(&path).len()), (Vec::new(), 1));
}

fn tls_file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/tls").join(name)
}

/// With TLS configured and unusable, nothing listens in the clear; beyond loopback, nothing listens without TLS and a
/// token. The private socket is there in each case.
#[test]
fn a_port_is_never_less_than_the_configuration_says() {
    let folder = folder("tls-problems");
    write(&folder.join("token"), TOKEN, 0o600);
    let key = std::fs::read_to_string(tls_file("collector.key")).unwrap();
    write(&folder.join("key"), &key, 0o600);
    write(&folder.join("open-key"), &key, 0o644);
    write(
        &folder.join("other-key"),
        &std::fs::read_to_string(tls_file("../../../fleet/tests/tls/engine.key")).unwrap(),
        0o600,
    );
    let certificate = tls_file("collector.pem").to_str().unwrap().to_owned();
    let loopback = "must be a loopback address such as 127.0.0.1 or [::1]";
    for (listen, token_file, cert, key, why) in [
        ("0.0.0.0:0", "token", "", "", format!("admin.listen: \"0.0.0.0:0\": {loopback} without admin.tls_cert_file")),
        (
            "0.0.0.0:0",
            "",
            certificate.as_str(),
            "key",
            format!("admin.listen: \"0.0.0.0:0\": {loopback} without tokens"),
        ),
        ("0.0.0.0:0", "absent", certificate.as_str(), "key", format!("{loopback} without tokens")),
        (
            "127.0.0.1:0",
            "token",
            "absent",
            "key",
            "absent: cannot be read: No such file or directory (os error 2): admin.listen is off".into(),
        ),
        (
            "127.0.0.1:0",
            "token",
            "token",
            "key",
            "must hold PEM certificates, and holds none: admin.listen is off".into(),
        ),
        (
            "127.0.0.1:0",
            "token",
            certificate.as_str(),
            "token",
            "token: must hold a PEM key: no items found: admin.listen is off".into(),
        ),
        (
            "127.0.0.1:0",
            "token",
            certificate.as_str(),
            "open-key",
            "one of this user: other users must not read it: admin.listen is off".into(),
        ),
        ("127.0.0.1:0", "token", certificate.as_str(), "other-key", "must be the key of the certificate: ".into()),
    ] {
        let config = AdminConfig {
            listen: listen.into(),
            token_file: token_file.into(),
            tls_cert_file: cert.into(),
            tls_key_file: key.into(),
            ..AdminConfig::default()
        };
        let (admin, _recorder) = start(&folder, config);
        assert_eq!(admin.address(), None, "{why}");
        assert!(admin.socket().is_some());
        let problems = admin.problems();
        assert!(problems.iter().any(|problem| problem.contains(&why)), "{why:?} is not in {problems:?}");
        assert!(problems.iter().all(|problem| !problem.contains("PRIVATE")), "{problems:?}");
    }
}

/// Each data-parallel engine of a configuration has files and ports of its own, and says its rank.
#[test]
fn a_rank_has_its_own_files() {
    let folder = folder("rank");
    write(&folder.join("1.token"), TOKEN, 0o600);
    let config = AdminConfig { token_file: "{rank}.token".into(), ..on_a_free_port() };
    let (admin, _recorder) = start(&folder, config);
    assert_eq!(admin.problems(), [""; 0]);
    assert_eq!(ask(&admin, "POST /v1/policies/dispatch/rollback", TOKEN, b"").code, 200);
    let [found] = discovery::list(&[folder.join("run")]).try_into().unwrap();
    assert_eq!((found.dp_rank, found.dp_size), (Some(1), Some(2)));
    assert!(found.token_file.unwrap().ends_with("/1.token"));
}
