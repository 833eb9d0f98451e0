//! The admin listener over real sockets: what it serves, what it refuses, and what it leaves behind.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use meridian_admin::discovery::{self, Process};
use meridian_admin::{Admin, ConnectionLimits, Surroundings};
use meridian_engine::control::{FaultEntry, LatencyReport, MAX_COMPONENT_BYTES, ProcessStatus, SlotStatus, SwapReport};
use serde_json::Value;

use support::{
    Recorder, TOKEN, config, exchange, fault, folder, metrics_at, parse, patient, send, short, start, start_with,
    status, surroundings, write,
};

#[test]
fn reading_needs_no_token() {
    let process = start("reading");
    let reply = process.get("/healthz");
    assert_eq!((reply.code, reply.body.as_str()), (200, r#"{"ok":true}"#));
    let reply = process.get("/v1/status");
    assert!(reply.head.contains("content-type: application/json"), "{}", reply.head);
    assert_eq!(serde_json::from_str::<ProcessStatus>(&reply.body).unwrap(), status());
    let slots: Value = serde_json::from_str(&process.get("/v1/policies").body).unwrap();
    assert_eq!(serde_json::from_value::<Vec<SlotStatus>>(slots["slots"].clone()).unwrap(), status().slots);
    let faults: Value = serde_json::from_str(&process.get("/v1/faults").body).unwrap();
    assert_eq!(serde_json::from_value::<Vec<FaultEntry>>(faults["faults"].clone()).unwrap(), [fault()]);
    assert!(process.recorder.calls().is_empty());
}

#[test]
fn changes_reach_the_engine() {
    let process = start("changes");
    let reply = process.change("PUT /v1/policies/dispatch", b"component");
    assert_eq!(reply.code, 200, "{}", reply.body);
    let report: SwapReport = serde_json::from_str(&reply.body).unwrap();
    assert_eq!(report.active, support::version("candidate"));
    for line in [
        "PUT /v1/policies/dispatch?mode=active",
        "PUT /v1/policies/dispatch?mode=shadow",
        "POST /v1/policies/dispatch/promote",
        "POST /v1/policies/dispatch/rollback",
        "POST /v1/policies/dispatch/release",
        "DELETE /v1/policies/dispatch/shadow",
    ] {
        assert_eq!(process.change(line, b"").code, 200, "{line}");
    }
    assert_eq!(
        process.recorder.calls(),
        [
            "put 9 bytes Active admin dispatch",
            "put 0 bytes Active admin dispatch",
            "put 0 bytes Shadow admin dispatch",
            "promote dispatch",
            "rollback dispatch",
            "release dispatch",
            "stop-shadow dispatch",
        ]
    );
}

#[test]
fn a_native_policy_and_options_are_described_in_json() {
    let process = start("described");
    let put = |line: &str, headers: &str, body: &str| {
        process.ask(line, &format!("Authorization: Bearer {TOKEN}\r\n{headers}"), body.as_bytes())
    };
    let json = "Content-Type: application/json\r\n";
    for (query, body, call) in [
        ("", r#"{"source":"native:fcfs"}"#, "put native:fcfs Active admin dispatch"),
        ("?mode=shadow", r#"{"source":"native:fcfs"}"#, "put native:fcfs Shadow admin dispatch"),
        ("?mode=active", r#"{"source":"native:edf","mode":"shadow"}"#, "put native:edf Shadow admin dispatch"),
        ("", r#"{"source":"native:edf","config":{"a":1}}"#, r#"put native:edf Active admin with {"a":1} dispatch"#),
        ("", r#"{"config":{"a":[1, 2]}}"#, r#"put the active one Active admin with {"a":[1,2]} dispatch"#),
    ] {
        let reply = put(&format!("PUT /v1/policies/dispatch{query}"), json, body);
        assert_eq!((reply.code, process.recorder.calls()), (200, vec![call.to_owned()]), "{}", reply.body);
    }
    // A component has its options in a header.
    let reply = put("PUT /v1/policies/dispatch", "Meridian-Config: {\"a\": \"\\u00e9\"}\r\n", "component");
    assert_eq!(reply.code, 200, "{}", reply.body);
    assert_eq!(process.recorder.calls(), ["put 9 bytes Active admin with {\"a\":\"é\"} dispatch"]);
    let large = format!(r#"{{"config":{{"a":"{}"}}}}"#, "x".repeat(70_000));
    for (headers, body, code, why) in [
        (json, "{}", 400, "must have \"source\", \"config\" or both"),
        (json, "[", 400, "the body: EOF"),
        (json, r#"{"source":"oci://x/y:1"}"#, 400, "source: \"oci://x/y:1\": must end in @sha256:DIGEST"),
        (json, r#"{"source":"native:x","options":{}}"#, 400, "unknown field `options`, expected one of"),
        (
            json,
            r#"{"source":"/etc/policy.wasm"}"#,
            400,
            "must be native:NAME or oci://HOST/NAME@sha256:DIGEST; a component is sent",
        ),
        (json, r#"{"config":[]}"#, 400, "expected a map"),
        (json, &large, 413, "the body must have at most 64 KiB"),
        ("Meridian-Config: [1]\r\n", "component", 400, "the header meridian-config must be one JSON object"),
    ] {
        let reply = put("PUT /v1/policies/dispatch", headers, body);
        assert_eq!(reply.code, code, "{}", reply.body);
        assert!(reply.error().contains(why), "{}", reply.error());
    }
    assert_eq!(process.ask("PUT /v1/policies/dispatch", json, br#"{"source":"native:fcfs"}"#).code, 401);
    assert!(process.recorder.calls().is_empty());
}

#[test]
fn what_the_engine_refuses_has_its_code() {
    let process = start("refused");
    let reply = process.change("PUT /v1/policies/dispatch", b"garbage");
    assert_eq!((reply.code, reply.error().as_str()), (422, "not a component: no header"));
    let reply = process.change("POST /v1/policies/eviction/promote", b"");
    assert_eq!((reply.code, reply.error().as_str()), (409, "eviction: has no such version"));
    let reply = process.change("POST /v1/policies/budget/release", b"");
    assert_eq!((reply.code, reply.error().as_str()), (404, "budget: this engine has no such slot"));
    assert_eq!(process.change("PUT /v1/policies/dispatch", b"panic").code, 500);
    process.recorder.is_busy.store(true, Ordering::Relaxed);
    let reply = process.change("PUT /v1/policies/dispatch", b"component");
    assert_eq!((reply.code, reply.error().as_str()), (503, "the compiler is busy"));
    assert!(reply.head.contains("\r\nretry-after: 10\r\n"), "{}", reply.head);
    assert_eq!(process.get("/v1/status").code, 200);
    assert_eq!(process.change("POST /v1/policies/dispatch/promote", b"").code, 200);
}

#[test]
fn no_change_without_the_token() {
    let process = start("token");
    for headers in [
        String::new(),
        "Authorization: Bearer\r\n".into(),
        "Authorization: Bearer a-token-of-24-characterS\r\n".into(),
        "Authorization: Bearer a-token\r\n".into(),
        format!("Authorization: Bearer {TOKEN}x\r\n"),
        format!("Authorization: Basic {TOKEN}\r\n"),
        format!("Authorization: {TOKEN}\r\n"),
        format!("Cookie: token={TOKEN}\r\n"),
    ] {
        for line in [
            "PUT /v1/policies/dispatch",
            "PUT /v1/policies/nothing?mode=x",
            "POST /v1/policies/dispatch/promote",
            "POST /v1/policies/dispatch/rollback",
            "POST /v1/policies/dispatch/release",
            "DELETE /v1/policies/dispatch/shadow",
        ] {
            let reply = process.ask(line, &headers, b"");
            assert_eq!(reply.code, 401, "{line} {headers}");
            assert!(reply.head.contains("www-authenticate: bearer"), "{}", reply.head);
            assert!(reply.error().contains("admin.token_file"));
        }
    }
    assert!(process.recorder.calls().is_empty());
}

#[test]
fn what_another_server_passes_on_needs_the_token_for_reading_too() {
    let process = start("forwarded");
    let ask = |line: &str, headers: &str| process.ask(line, &format!("Meridian-Forwarded: 10.0.0.7\r\n{headers}"), b"");
    let lines =
        ["GET /healthz", "GET /metrics", "GET /v1/status", "GET /v1/faults", "POST /v1/policies/dispatch/promote"];
    for line in lines {
        let reply = ask(line, "");
        assert_eq!(reply.code, 401, "{line}");
        assert!(reply.error().starts_with("requests from elsewhere need the token"), "{}", reply.error());
    }
    assert_eq!(ask("GET /v1/status", "Authorization: Bearer 0123456789abcdef0\r\n").code, 401);
    assert!(process.recorder.calls().is_empty());
    for line in lines {
        assert_eq!(ask(line, &format!("Authorization: Bearer {TOKEN}\r\n")).code, 200, "{line}");
    }
}

#[test]
fn nothing_changes_where_no_token_is_configured() {
    let folder = folder("no-token");
    write(&folder.join("open"), TOKEN, 0o644);
    write(&folder.join("short"), "fifteen-letters", 0o600);
    write(&folder.join("blank"), "a token of 24 characters", 0o600);
    write(&folder.join("long"), &"x".repeat(4097), 0o600);
    for (token_file, problem) in [
        ("", ""),
        (
            "open",
            "has mode 0644, must be 0600, or 0640 where root owns it and its group is one of this user: \
             other users must not read it",
        ),
        ("short", "holds 15 characters, must be 16 to 4096"),
        (
            "blank",
            "line 1: must be NAME TOKEN, with `read`, `change` or `all` after them, or the file must hold one token alone",
        ),
        ("long", "holds 4097 characters, must be 16 to 4096"),
        ("absent", "cannot be read: No such file or directory (os error 2)"),
        (".", "cannot be read: not a regular file"),
        ("/dev/null", "cannot be read: not a regular file"),
    ] {
        let recorder = Arc::new(Recorder::default());
        let admin = Admin::start_in(
            &surroundings(&folder),
            recorder.clone(),
            &config("127.0.0.1:0", token_file),
            &metrics_at(""),
        );
        let expected = match token_file {
            "" => Vec::new(),
            _ => {
                let path = std::path::absolute(folder.join(token_file)).unwrap();
                vec![format!("admin.token_file: {}: {problem}: nothing can be changed", path.display())]
            }
        };
        assert_eq!(admin.problems(), expected);
        let request = format!(
            "POST /v1/policies/dispatch/promote HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        );
        let reply = parse(&send(admin.address().unwrap(), request.as_bytes()));
        assert_eq!(reply.code, 403);
        assert!(reply.error().contains("admin.token_file"), "{}", reply.body);
        assert!(recorder.calls().is_empty());
        assert_eq!(discovery::list(&[folder.join("run")])[0].token_file, None);
    }
}

#[test]
fn a_component_has_a_largest_size() {
    let process = start("size");
    let head = |length: &str| {
        format!(
            "PUT /v1/policies/dispatch HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n{length}\r\n"
        )
    };
    // Told by its length alone: no byte of it is sent.
    let length = format!("Content-Length: {}\r\n", MAX_COMPONENT_BYTES + 1);
    assert_eq!(parse(&process.send(head(&length).as_bytes())).code, 413);
    // The largest is received.
    assert_eq!(process.change("PUT /v1/policies/dispatch", &vec![0; MAX_COMPONENT_BYTES]).code, 200);
    assert_eq!(process.recorder.calls(), [format!("put {MAX_COMPONENT_BYTES} bytes Active admin dispatch")]);
    // One that does not tell its length ends where it is too large.
    let mut stream = TcpStream::connect(process.address()).unwrap();
    stream.write_all(head("Transfer-Encoding: chunked\r\n").as_bytes()).unwrap();
    let chunk = [b"100000\r\n".as_slice(), &vec![0; 1 << 20], b"\r\n"].concat();
    for _ in 0..32 {
        stream.write_all(&chunk).unwrap();
    }
    let reply = parse(&exchange(&mut stream, b"1\r\n0\r\n0\r\n\r\n"));
    assert_eq!((reply.code, reply.error().as_str()), (413, "the component must have at most 32 MiB"));
    assert!(process.recorder.calls().is_empty());
}

#[test]
fn a_refusal_comes_before_the_body() {
    let process = start("expect");
    let head = "PUT /v1/policies/dispatch HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n";
    assert_eq!(parse(&process.send(format!("{head}\r\n").as_bytes())).code, 401);
    let mut stream = TcpStream::connect(process.address()).unwrap();
    stream.write_all(format!("{head}Authorization: Bearer {TOKEN}\r\n\r\n").as_bytes()).unwrap();
    let go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    let mut read = vec![0; go_on.len()];
    stream.read_exact(&mut read).unwrap();
    assert_eq!(String::from_utf8(read).unwrap(), go_on);
    assert_eq!(parse(&exchange(&mut stream, b"component")).code, 200);
}

#[test]
fn unknown_paths_slots_modes_and_methods() {
    let process = start("unknown");
    for path in ["/", "/v1", "/v1/policies/dispatch/promote/x", "/v1/policies/dispatch/nothing", "/metrics/"] {
        let reply = process.get(path);
        assert_eq!((reply.code, reply.error().as_str()), (404, "no such path"), "{path}");
    }
    for slot in ["nothing", "Dispatch", "%ff", "dispatch%00", ".."] {
        let reply = process.change(&format!("PUT /v1/policies/{slot}"), b"x");
        assert_eq!(reply.code, 404, "{slot}");
        assert_eq!(reply.error(), "no such slot, expected dispatch, eviction or budget", "{slot}");
    }
    for query in ["mode=", "mode=Active", "mode=active&mode=shadow", "shadow"] {
        let reply = process.change(&format!("PUT /v1/policies/dispatch?{query}"), b"x");
        assert_eq!((reply.code, reply.error().as_str()), (400, "the query must be mode=active or mode=shadow"));
    }
    for (line, allow) in [
        ("DELETE /v1/policies/dispatch", "put"),
        ("GET /v1/policies/dispatch/promote", "post"),
        ("POST /v1/status", "get,head"),
        ("PUT /metrics", "get,head"),
    ] {
        let reply = process.change(line, b"");
        assert_eq!((reply.code, reply.error().as_str()), (405, "no such method for this path"), "{line}");
        assert!(reply.head.contains(&format!("allow: {allow}")), "{}", reply.head);
    }
    assert!(process.recorder.calls().is_empty());
}

#[test]
fn a_request_is_explained_by_its_id() {
    let process = start("why");
    let reply = process.get("/v1/why?request=chat+1%2F%C3%A9");
    assert_eq!((reply.code, reply.json()["latency_ms"].as_f64()), (200, Some(12.5)));
    let reply = process.get("/v1/why?request=other");
    assert_eq!((reply.code, reply.error().as_str()), (404, "other: no such request"));
    for query in ["", "?", "?request=", "?request=%f", "?request=%ff", "?requests=a"] {
        let reply = process.get(&format!("/v1/why{query}"));
        let why = "the query must be request=ID: the engine's id of a request, or a part of it";
        assert_eq!((reply.code, reply.error().as_str()), (400, why), "{query}");
    }
}

#[test]
fn latencies_are_fine_sketches() {
    let process = start("latency");
    let reply = process.get("/v1/latency");
    let report: LatencyReport = serde_json::from_str(&reply.body).unwrap();
    assert_eq!((reply.code, report.run.as_str(), report.uptime_s), (200, "7-1a", 12.5));
    assert_eq!((report.counts.finished, report.counts.ttft.mean_ms()), (3, Some(30.0)));
    let sent = reply.json()["ttft"]["counts"].clone();
    assert_eq!(sent.as_array().map(Vec::len), Some(2), "only buckets with values: {sent}");
    process.recorder.is_busy.store(true, Ordering::Relaxed);
    let reply = process.get("/v1/latency");
    assert_eq!((reply.code, reply.error().as_str()), (404, "this engine observes no latencies"));
}

#[test]
fn a_timeline_is_kept_while_its_client_waits() {
    let process = start("trace");
    let reply = process.get("/v1/trace?seconds=0.01");
    assert_eq!((reply.code, reply.json()["otherData"]["model"].as_str()), (200, Some("Qwen")));
    // The second end is of the guard, which ends the timeline of a client that has hung up.
    assert_eq!(process.recorder.calls(), ["begin timeline", "end timeline", "end timeline"]);
    for query in ["", "?seconds=0", "?seconds=-1", "?seconds=301", "?seconds=NaN", "?seconds=x"] {
        let reply = process.get(&format!("/v1/trace{query}"));
        let why = "the query must be seconds=N, more than 0 and at most 300";
        assert_eq!((reply.code, reply.error().as_str()), (400, why), "{query}");
    }
    assert!(process.recorder.calls().is_empty());
}

#[test]
fn one_timeline_at_a_time_and_none_without_its_client() {
    let process = start("trace-twice");
    let is_told = |call: &str| {
        // What a hang is told by.
        let end = Instant::now() + Duration::from_secs(60);
        while !process.recorder.calls().iter().any(|told| told == call) {
            assert!(Instant::now() < end, "the engine is not told: {call}");
            std::thread::yield_now();
        }
    };
    let mut first = TcpStream::connect(process.address()).unwrap();
    first.write_all(b"GET /v1/trace?seconds=300 HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    is_told("begin timeline");
    let reply = process.get("/v1/trace?seconds=1");
    assert_eq!((reply.code, reply.error().as_str()), (503, "another timeline is under way"));
    drop(first);
    is_told("end timeline");
    assert_eq!(process.get("/v1/trace?seconds=0.01").code, 200);
}

#[test]
fn only_names_of_this_machine_are_answered() {
    let process = start("host");
    let own = process.address().to_owned();
    for host in ["localhost", "localhost:80", "127.0.0.1", "[::1]:9465", &own] {
        let request = format!("GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n");
        assert_eq!(parse(&process.send(request.as_bytes())).code, 200, "{host}");
    }
    for head in [
        "GET /v1/status HTTP/1.1\r\nHost: evil.example",
        "GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1.evil.example:9465",
        "GET /v1/status HTTP/1.1\r\nHost: localhost\r\nHost: evil.example",
        "GET http://evil.example/v1/status HTTP/1.1\r\nHost: localhost",
        "GET /v1/status HTTP/1.1\r\nHost: ",
        "GET /v1/status HTTP/1.1\r\nAccept: */*",
        "GET /v1/status HTTP/1.0",
        "GET /metrics HTTP/1.1\r\nHost: evil.example",
    ] {
        let reply = parse(&process.send(format!("{head}\r\n\r\n").as_bytes()));
        assert_eq!(reply.code, 403, "{head}");
        assert_eq!(reply.error(), "the Host header must be localhost or a loopback address");
    }
}

#[test]
fn garbage_is_refused_and_forgotten() {
    let process = start("garbage");
    let long = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "x".repeat(1 << 20));
    for bytes in [
        b"\0\xff\x16\x03\x01 garbage\r\n\r\n".as_slice(),
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost localhost\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"POST /v1/policies/dispatch/promote HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        long.as_bytes(),
    ] {
        let mut stream = TcpStream::connect(process.address()).unwrap();
        // It may hang up before it has read everything.
        let _ = stream.write_all(bytes);
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        let reply = String::from_utf8(reply).unwrap();
        assert!(reply.is_empty() || reply.starts_with("HTTP/1.1 4"), "{reply}");
    }
    // Two requests at once: the connection ends with the first.
    let twice = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(2);
    assert_eq!(process.send(twice.as_bytes()).matches("HTTP/1.1 200").count(), 1);
    assert_eq!(process.get("/healthz").code, 200);
    assert!(process.recorder.calls().is_empty());
}

#[test]
fn a_slow_client_loses_its_seat() {
    // There is one seat: a client is answered only when the one before has lost it.
    let process = start_with("slow", short());
    let authorization = format!("Authorization: Bearer {TOKEN}\r\n");
    let put =
        format!("PUT /v1/policies/dispatch HTTP/1.1\r\nHost: localhost\r\n{authorization}Content-Length: 9\r\n\r\nhal");
    for bytes in ["", "GET /healthz HT", "GET /healthz HTTP/1.1\r\nHost: loc"] {
        let mut slow = TcpStream::connect(process.address()).unwrap();
        slow.write_all(bytes.as_bytes()).unwrap();
        assert_eq!(process.get("/healthz").code, 200, "{bytes}");
        drop(slow);
    }
    let mut slow = TcpStream::connect(process.address()).unwrap();
    slow.write_all(put.as_bytes()).unwrap();
    assert_eq!(process.get("/healthz").code, 200);
    let reply = parse(&exchange(&mut slow, b""));
    assert_eq!((reply.code, reply.error().as_str()), (408, "the component did not arrive in time"));
    assert_eq!(process.change("POST /v1/policies/dispatch/promote", b"").code, 200);
    assert_eq!(process.recorder.calls(), ["promote dispatch"]);
    // One that asks for much and reads nothing.
    process.recorder.verbose.store(true, Ordering::Relaxed);
    let mut slow = TcpStream::connect(process.address()).unwrap();
    slow.write_all(b"GET /v1/faults HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    // The first byte of its answer says that it has the seat: without it, the next client may be served before.
    slow.read_exact(&mut [0; 1]).unwrap();
    assert_eq!(process.get("/healthz").code, 200);
    let mut read = Vec::new();
    let _ = slow.read_to_end(&mut read);
    assert!(read.len() < 64 << 20, "{} bytes", read.len());
}

#[test]
fn the_latest_engine_of_a_process_is_found() {
    let folder = folder("two");
    let start = || {
        let control = Arc::new(Recorder::default());
        Admin::start_in(&surroundings(&folder), control, &config("127.0.0.1:0", ""), &metrics_at(""))
    };
    let (first, second) = (start(), start());
    drop(first);
    assert_eq!(discovery::list(&[folder.join("run")])[0].admin.as_deref(), second.address());
    drop(second);
    assert!(discovery::list(&[folder.join("run")]).is_empty());
}

/// Another process may listen where the configuration and every script expect this one, and would be sent the token.
#[test]
fn an_admin_port_that_is_taken_is_not_given_up_silently() {
    let folder = folder("taken");
    write(&folder.join("token"), TOKEN, 0o600);
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let recorder = Arc::new(Recorder::default());
    let admin =
        Admin::start_in(&surroundings(&folder), recorder.clone(), &config(&address, "token"), &metrics_at(&address));
    let (own, metrics) = (admin.socket().unwrap(), admin.metrics_address().unwrap());
    // Metrics are read without a token: they move.
    assert!(metrics != address && admin.address().is_none());
    let problems = [
        format!(
            "admin.listen: {address:?}: another process listens there, so send it no token: `meridian ctl` reaches this \
             process at {own}"
        ),
        format!("telemetry.prometheus: {address:?}: is in use, this process listens on {metrics}"),
    ];
    assert_eq!(admin.problems(), problems);
    let found = &discovery::list(&[folder.join("run")])[0];
    assert_eq!((&found.admin, found.socket.as_deref(), found.metrics.as_deref()), (&None, Some(own), Some(metrics)));
    assert!(found.token_file.is_some());
    // The socket is private, does everything, and says what is the matter.
    let path = Path::new(own.strip_prefix("unix:").unwrap());
    assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, 0o600);
    let ask = |line: &str| {
        let request = format!("{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n");
        parse(&exchange(&mut UnixStream::connect(path).unwrap(), request.as_bytes()))
    };
    assert_eq!(ask("POST /v1/policies/dispatch/rollback").code, 200);
    assert_eq!(recorder.calls(), ["rollback dispatch"]);
    let status: ProcessStatus = serde_json::from_str(&ask("GET /v1/status").body).unwrap();
    assert_eq!(status.problems, problems);
    let path = path.to_owned();
    drop(admin);
    assert!(!path.exists());
}

/// Two thousand of them, which send nothing, delay nobody: nothing but a newer connection ends them here.
#[test]
fn idle_connections_make_room() {
    let process = start_with("idle", ConnectionLimits { waiting: 8, ..patient() });
    let idle: Vec<_> = (0..200).map(|_| TcpStream::connect(process.address()).unwrap()).collect();
    for _ in 0..10 {
        assert_eq!(process.change("POST /v1/policies/dispatch/rollback", b"").code, 200);
        assert_eq!(process.get("/healthz").code, 200);
    }
    // The newest are still waited for.
    let mut newest = idle.into_iter().next_back().unwrap();
    drop(process);
    assert!(matches!(newest.read(&mut [0]), Ok(0) | Err(_)));
}

/// Requests that are being served, or wait to be, take nothing from those with the token.
#[test]
fn requests_with_the_token_have_places_of_their_own() {
    let process = start_with("reserve", ConnectionLimits { connections: 1, reserved: 1, waiting: 8, ..patient() });
    process.recorder.verbose.store(true, Ordering::Relaxed);
    let asks_for_much = b"GET /v1/faults HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let readers: Vec<_> = (0..50)
        .map(|_| {
            let mut reader = TcpStream::connect(process.address()).unwrap();
            reader.write_all(asks_for_much).unwrap();
            reader
        })
        .collect();
    // An upload that does not come to its end.
    let mut upload = TcpStream::connect(process.address()).unwrap();
    let head = "PUT /v1/policies/dispatch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n";
    upload.write_all(format!("{head}Authorization: Bearer {TOKEN}\r\n\r\n").as_bytes()).unwrap();
    // The answer to its head says that it has its place.
    upload.read_exact(&mut [0; 25]).unwrap();
    for line in ["POST /v1/policies/dispatch/rollback", "DELETE /v1/policies/dispatch/shadow"] {
        assert_eq!(process.change(line, b"").code, 200, "{line}");
    }
    drop(readers);
    assert_eq!(parse(&exchange(&mut upload, b"component")).code, 200);
}

#[test]
fn what_cannot_listen_is_told_and_stops_nothing() {
    let folder = folder("cannot");
    let recorder = Arc::new(Recorder::default());
    let unix = config("unix:no/such/folder/socket", "");
    let admin = Admin::start_in(&surroundings(&folder), recorder.clone(), &unix, &metrics_at("192.0.2.1:9464"));
    assert_eq!(admin.problems().len(), 2, "{:?}", admin.problems());
    assert!(
        admin.problems()[0].starts_with("admin.listen: \"unix:no/such/folder/socket\": cannot listen: No such file")
    );
    assert!(admin.problems()[1].starts_with("telemetry.prometheus: \"192.0.2.1:9464\": cannot listen: "));
    assert_eq!((admin.address(), admin.metrics_address()), (None, None));
    // Its own socket is there all the same.
    assert_eq!(discovery::list(&[folder.join("run")])[0].socket.as_deref(), admin.socket());
    assert!(admin.socket().is_some());
    drop(admin);
    assert!(discovery::list(&[folder.join("run")]).is_empty());

    // Off is no problem.
    let admin = Admin::start_in(&surroundings(&folder), recorder.clone(), &config("", ""), &metrics_at(""));
    assert_eq!((admin.problems(), admin.address(), admin.socket()), (&[] as &[String], None, None));

    // Without a folder for its file it listens all the same.
    write(&folder.join("file"), "", 0o600);
    let nowhere = Surroundings { run_dir: Some(folder.join("file/run")), ..surroundings(&folder) };
    let admin = Admin::start_in(&nowhere, recorder, &config("127.0.0.1:0", ""), &metrics_at(""));
    assert!(admin.problems()[0].ends_with("`meridian ctl` needs --address"), "{:?}", admin.problems());
    assert!(admin.address().is_some());
}

#[test]
fn dropping_closes_the_ports_and_removes_the_file() {
    let process = start("drop");
    let run = process.folder.join("run");
    let (address, metrics) = (process.address().to_owned(), process.admin.metrics_address().unwrap().to_owned());
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let file = run.join(format!("{}.json", std::process::id()));
    assert_eq!((mode(&run), mode(&file)), (0o700, 0o600));
    assert!(!std::fs::read_to_string(&file).unwrap().contains(TOKEN));
    let token_file = std::path::absolute(process.folder.join("token")).unwrap();
    assert_eq!(
        discovery::list(std::slice::from_ref(&run)),
        [Process {
            admin: Some(address.clone()),
            socket: process.admin.socket().map(str::to_owned),
            metrics: Some(metrics.clone()),
            model: "Qwen/Qwen3-8B".into(),
            dp_rank: Some(1),
            dp_size: Some(2),
            token_file: Some(token_file.to_str().unwrap().into()),
            ..Process::own()
        }]
    );
    // A client that is connected does not hold it up.
    let mut connected = TcpStream::connect(&address).unwrap();
    drop(process.admin);
    assert!(TcpStream::connect(&address).is_err() && TcpStream::connect(&metrics).is_err());
    assert!(matches!(connected.read(&mut [0]), Ok(0) | Err(_)));
    assert!(!file.exists());
    assert!(discovery::list(&[run]).is_empty());
    assert_eq!(Arc::strong_count(&process.recorder), 1, "a thread lives on");
}

#[test]
fn files_of_dead_processes_are_removed() {
    let folder = folder("stale");
    let run = folder.join("run");
    std::fs::create_dir_all(&run).unwrap();
    let put = |name: &str, process: &Process, mode| {
        write(&run.join(name), &serde_json::to_string(process).unwrap(), mode);
    };
    let own = Process::own();
    put("1.json", &own, 0o600);
    put("2.json", &Process { started_ticks: own.started_ticks + 1, ..own.clone() }, 0o600);
    put("3.json", &Process { pid: u32::MAX, ..own.clone() }, 0o600);
    put("4.json", &Process { machine: "another".into(), pid: u32::MAX, ..own.clone() }, 0o600);
    put("5.json", &own, 0o644);
    write(&run.join("6.json"), "{", 0o600);
    put("7.tmp", &own, 0o600);
    put("8.json", &Process { admin: Some("localhost".into()), ..own.clone() }, 0o600);
    // The socket that a dead process left goes with its file; what is none, or lies elsewhere, stays.
    let dead = |name: &str| Process {
        pid: u32::MAX,
        socket: Some(format!("unix:{}", run.join(name).display())),
        ..own.clone()
    };
    for (name, socket) in [("9", "9.sock"), ("10", "file"), ("11", "../elsewhere")] {
        put(&format!("{name}.json"), &dead(socket), 0o600);
    }
    drop(UnixListener::bind(run.join("9.sock")).unwrap());
    drop(UnixListener::bind(folder.join("elsewhere")).unwrap());
    write(&run.join("file"), "mine", 0o600);
    let found = discovery::find(&[run.clone(), folder.join("absent")]);
    assert_eq!(found.processes, [own]);
    let [open, half, bad] = found.malformed.as_slice() else { panic!("{found:?}") };
    assert!(open.contains("5.json: has mode 0644, must be 0600"), "{open}");
    assert!(half.contains("6.json: is no discovery file of an engine: EOF"), "{half}");
    assert!(bad.contains("8.json: admin: \"localhost\": must be IP:port, unix:PATH or empty"), "{bad}");
    assert!(folder.join("elsewhere").exists());
    let mut left: Vec<_> = std::fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["1.json", "4.json", "5.json", "6.json", "7.tmp", "8.json", "file"]);
    // Where others can put files, none is believed; a process that starts makes the folder its own.
    let mode = |mode| std::fs::set_permissions(&run, std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o777);
    assert!(discovery::list(std::slice::from_ref(&run)).is_empty());
    let control = Arc::new(Recorder::default());
    drop(Admin::start_in(&surroundings(&folder), control, &config("127.0.0.1:0", ""), &metrics_at("")));
    assert_eq!(discovery::list(&[run]).len(), 1);
}

#[test]
fn a_unix_socket_is_private_and_replaced_only_when_stale() {
    let folder = folder("unix");
    // The path of a socket is short.
    let short = std::env::temp_dir().join(format!("meridian-admin-{}", std::process::id()));
    std::fs::create_dir_all(&short).unwrap();
    let path = short.join("admin");
    let listen = format!("unix:{}", path.display());
    let start = || {
        Admin::start_in(&surroundings(&folder), Arc::new(Recorder::default()), &config(&listen, ""), &metrics_at(""))
    };
    drop(UnixListener::bind(&path).unwrap());
    let first = start();
    assert_eq!((first.problems(), first.address()), (&[] as &[String], Some(listen.as_str())));
    let metadata = std::fs::metadata(&path).unwrap();
    assert!(metadata.file_type().is_socket());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let get = |path: &Path| {
        let mut stream = UnixStream::connect(path).unwrap();
        parse(&exchange(&mut stream, b"GET /v1/status HTTP/1.1\r\nHost: any\r\n\r\n")).code
    };
    assert_eq!(get(&path), 200);

    // Whose it is it stays; metrics, which need no token, go beside it.
    let second = Admin::start_in(
        &surroundings(&folder),
        Arc::new(Recorder::default()),
        &config(&listen, ""),
        &metrics_at(&listen),
    );
    let beside = short.join(format!("admin.{}", std::process::id()));
    assert_eq!(second.metrics_address(), Some(format!("unix:{}", beside.display()).as_str()));
    assert!(second.address().is_none() && second.problems()[0].contains("another process listens there"));
    let own = second.socket().unwrap().strip_prefix("unix:").unwrap().to_owned();
    assert_eq!((get(&path), get(Path::new(&own))), (200, 200));
    drop(first);
    assert!(!path.exists());
    drop(second);
    assert!(!beside.exists() && !Path::new(&own).exists());

    // A file that is no socket is left alone.
    write(&path, "mine", 0o600);
    drop(start());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "mine");
    std::fs::remove_dir_all(&short).unwrap();
}

/// A Prometheus of another machine names the address of this one, and has no token.
#[test]
fn other_machines_may_read_metrics_and_nothing_else() {
    let folder = folder("scraped");
    let begin = |prometheus: &str| {
        let control = Arc::new(Recorder::default());
        Admin::start_in(&surroundings(&folder), control, &config("", ""), &metrics_at(prometheus))
    };
    let admin = begin("0.0.0.0:0");
    let address = admin.metrics_address().unwrap();
    let port = address.rsplit_once(':').unwrap().1;
    let ask = |line: &str| {
        let request = format!("{line} HTTP/1.1\r\nHost: engine-1.example:{port}\r\nContent-Length: 0\r\n\r\n");
        parse(&send(&format!("127.0.0.1:{port}"), request.as_bytes()))
    };
    let metrics = ask("GET /metrics");
    assert_eq!(metrics.code, 200);
    assert!(metrics.body.contains("meridian_requests"), "{}", metrics.body);
    assert_eq!(ask("GET /healthz").code, 200);
    for line in ["GET /v1/status", "GET /v1/why?request=a", "POST /v1/policies/dispatch/rollback"] {
        assert_eq!(ask(line).code, 404, "{line}");
    }
    assert_eq!(ask("POST /metrics").code, 405);
    // Whoever scrapes knows this port only: another engine must not take a different one.
    let second = begin(address);
    assert_eq!(second.metrics_address(), None);
    let why = "another process listens there, so give each engine of this machine a port of its own: IP:port+{rank}";
    assert_eq!(second.problems(), [format!("telemetry.prometheus: {address:?}: {why}")]);
}

#[test]
fn metrics_are_text_of_prometheus() {
    let process = start("metrics");
    let metrics = process.admin.metrics_address().unwrap();
    let reply = parse(&send(metrics, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"));
    assert_eq!(reply.code, 200);
    assert!(reply.head.contains("content-type: text/plain; version=0.0.4"), "{}", reply.head);
    assert_eq!(reply.body, process.get("/metrics").body);
    // The port of metrics has nothing else.
    for path in ["/v1/status", "/v1/policies"] {
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        assert_eq!(parse(&send(metrics, request.as_bytes())).code, 404);
    }

    let samples = samples(&reply.body);
    let value = |name: &str| *samples.get(name).unwrap_or_else(|| panic!("no {name} in {samples:#?}"));
    let digest = "ab".repeat(32);
    for (name, expected) in [
        (r#"meridian_requests{phase="think"}"#, 20.0),
        (r#"meridian_phase_events_total{event="exit_think"}"#, 8.0),
        ("meridian_waiting_requests", 7.0),
        (r#"meridian_ttft_seconds_bucket{model="Qwen/Qwen3-8B",tenant="team \"a\"",le="0.25"}"#, 1.0),
        (r#"meridian_ttft_seconds_sum{model="Qwen/Qwen3-8B",tenant="team \"a\""}"#, 0.75),
        (r#"meridian_ttfo_seconds_count{model="Qwen/Qwen3-8B",tenant="team \"a\""}"#, 1.0),
        (r#"meridian_ttot_seconds_count{model="Qwen/Qwen3-8B",tenant="team \"a\""}"#, 1.0),
        (r#"meridian_queue_time_seconds_count{model="Qwen/Qwen3-8B",tenant="team \"a\""}"#, 2.0),
        (r#"meridian_request_duration_seconds_sum{model="Qwen/Qwen3-8B",tenant="team \"a\""}"#, 4.0),
        (r#"meridian_itl_seconds_count{model="Qwen/Qwen3-8B",tenant="team \"a\"",phase="think"}"#, 40.0),
        (r#"meridian_think_tokens_bucket{model="Qwen/Qwen3-8B",tenant="team \"a\"",le="512"}"#, 1.0),
        (r#"meridian_step_duration_seconds_count{model="Qwen/Qwen3-8B",kind="decode"}"#, 3.0),
        (r#"meridian_step_duration_seconds_bucket{model="Qwen/Qwen3-8B",kind="mixed",le="5"}"#, 0.0),
        ("meridian_sessions", 6.0),
        (r#"meridian_service_level_requests_total{level="chat",outcome="late"}"#, 5.0),
        (r#"meridian_service_level_requests_total{level="chat",outcome="refused"}"#, 3.0),
        (r#"meridian_service_level_live_requests{level="chat",outcome="in_time"}"#, 7.0),
        (r#"meridian_kv_blocks{state="free"}"#, 100.0),
        ("meridian_kv_moved_blocks_total", 5.0),
        (r#"meridian_kv_blocks{state="kept"}"#, 9.0),
        (r#"meridian_kv_keeps_total{outcome="hit"}"#, 6.0),
        (r#"meridian_kv_keeps_total{outcome="evicted"}"#, 3.0),
        (r#"meridian_kv_keeps_total{outcome="expired"}"#, 4.0),
        ("meridian_kv_resyncs_total", 1.0),
        ("meridian_recorded_decisions_total", 1000.0),
        (r#"meridian_traced_requests_total{outcome="lost"}"#, 4.0),
        (r#"meridian_probes_total{outcome="asked"}"#, 30.0),
        (r#"meridian_preemptions_total{phase="output"}"#, 1.0),
        (r#"meridian_evictions_total{tier="think_active"}"#, 7.0),
        (r#"meridian_offload_evictions_total{tier="think_complete"}"#, 3.0),
        ("meridian_dead_think_blocks_evicted_total", 40.0),
        ("meridian_output_critical_evictions_total", 2.0),
        ("meridian_avoidable_output_preemptions_total", 1.0),
        (r#"meridian_prefix_cache_hit_tokens_total{phase="prefill"}"#, 640.0),
        (r#"meridian_prefix_cache_missed_tokens_total{phase="think"}"#, 64.0),
        ("meridian_recomputed_tokens_total", 96.0),
        ("meridian_forced_ends_total{reason=\"hard_cap\"}", 4.0),
        ("meridian_forced_ends_total{reason=\"eos_guard\"}", 5.0),
        ("meridian_forced_ends_total{reason=\"loop\"}", 6.0),
        ("meridian_missed_forced_tokens_total", 1.0),
        ("meridian_probes_total{outcome=\"done\"}", 20.0),
        ("meridian_probes_total{outcome=\"dropped\"}", 9.0),
        ("meridian_probe_tokens_total", 400.0),
        ("meridian_think_tokens_total", 9000.0),
        ("meridian_thought_requests_total", 12.0),
        (r#"meridian_decisions_total{slot="dispatch",source="policy"}"#, 90.0),
        (r#"meridian_decisions_total{slot="dispatch",source="fallback"}"#, 3.0),
        (r#"meridian_decision_duration_seconds_bucket{slot="dispatch",source="policy",le="0.000001"}"#, 10.0),
        (r#"meridian_decision_duration_seconds_bucket{slot="dispatch",source="policy",le="0.000005"}"#, 60.0),
        (r#"meridian_decision_duration_seconds_bucket{slot="dispatch",source="policy",le="0.005"}"#, 89.0),
        (r#"meridian_decision_duration_seconds_bucket{slot="dispatch",source="policy",le="+Inf"}"#, 90.0),
        (r#"meridian_decision_duration_seconds_count{slot="dispatch",source="fallback"}"#, 3.0),
        (r#"meridian_decision_duration_seconds_sum{slot="dispatch",source="default"}"#, 0.02),
        (r#"meridian_faults_total{slot="dispatch",kind="trap"}"#, 2.0),
        (r#"meridian_strikes{slot="dispatch"}"#, 2.0),
        (r#"meridian_swaps_total{slot="dispatch"}"#, 5.0),
        (r#"meridian_quarantined{slot="dispatch"}"#, 1.0),
        (r#"meridian_quarantined{slot="eviction"}"#, 0.0),
        (r#"meridian_shadow_rank_correlation{slot="dispatch"}"#, 0.5),
        (r#"meridian_shadow_top_overlap{slot="dispatch"}"#, 0.75),
        (r#"meridian_shadow_compared_total{slot="dispatch"}"#, 40.0),
        (r#"meridian_shadow_skipped_total{slot="dispatch"}"#, 2.0),
        (r#"meridian_shadow_faults_total{slot="dispatch"}"#, 1.0),
        (r#"meridian_shadow_differences_total{slot="dispatch"}"#, 3.0),
        (r#"meridian_step_time_seconds{part="fixed"}"#, 0.004),
        ("meridian_uptime_seconds", 61.5),
        (r#"meridian_process_info{version="0.1.0",model="Qwen/Qwen3-8B"}"#, 1.0),
    ] {
        assert_eq!(value(name), expected, "{name}");
    }
    let active = format!(
        r#"meridian_active_version_info{{slot="dispatch",name="current \"one\"\\",version="1.0",sha256="{digest}"}}"#
    );
    assert_eq!(value(&active), 1.0);
    assert!(!samples.keys().any(|name| name.contains("shadow") && name.contains("eviction")));
}

/// Parse the text format: every sample, after checking that its family has HELP and TYPE before it.
fn samples(text: &str) -> std::collections::BTreeMap<String, f64> {
    let mut samples = std::collections::BTreeMap::new();
    let mut family = (String::new(), String::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').unwrap();
            assert!(!help.is_empty());
            family = (name.to_owned(), String::new());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            assert_eq!(name, family.0);
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            family.1 = kind.to_owned();
        } else {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let bare = name.split('{').next().unwrap();
            let suffix = bare.strip_prefix(family.0.as_str()).unwrap();
            let histogram = family.1 == "histogram";
            assert!(
                if histogram { ["_bucket", "_sum", "_count"].contains(&suffix) } else { suffix.is_empty() },
                "{line}"
            );
            assert!(samples.insert(name.to_owned(), value.parse().unwrap()).is_none(), "twice: {line}");
        }
    }
    samples
}
