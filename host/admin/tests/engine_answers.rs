//! Every answer of the admin interface reads back by its own types, whatever the engine was asked before.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(dead_code, reason = "the support is shared")]

mod support;

use std::path::Path;
use std::sync::{Arc, Mutex};

use meridian_admin::Admin;
use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest};
use meridian_engine::budgets::BudgetList;
use meridian_engine::control::{Control, FaultEntry, LatencyReport, ProcessStatus, SlotStatus, SwapReport};
use meridian_engine::explain::Explanation;
use meridian_engine::{Engine, Listeners, Settings, ThinkTokens};
use serde::de::DeserializeOwned;
use support::{Reply, TOKEN, folder, parse, send, surroundings, write};

/// The address of the engine under test.
static ADDRESS: Mutex<Option<String>> = Mutex::new(None);

fn serve(control: Arc<dyn Control>, config: &MeridianConfig, base_dir: &Path) -> Box<dyn Listeners> {
    let admin = Admin::start_in(&surroundings(base_dir), control, &config.admin, &config.telemetry);
    *ADDRESS.lock().unwrap() = admin.address().map(str::to_owned);
    Box::new(admin)
}

fn ask(line: &str, headers: &str, body: &[u8]) -> Reply {
    let address = ADDRESS.lock().unwrap().clone().unwrap();
    let head = format!(
        "{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {}\r\n{headers}\r\n",
        body.len()
    );
    parse(&send(&address, &[head.as_bytes(), body].concat()))
}

/// The part of an answer, as its reader takes it.
fn reads<T: DeserializeOwned>(stage: &str, path: &str, part: &str) -> T {
    let reply = ask(&format!("GET {path}"), "", b"");
    assert_eq!(reply.code, 200, "{stage}: {path}: {}", reply.body);
    let value = reply.json().pointer(part).unwrap().clone();
    serde_json::from_value(value).unwrap_or_else(|error| panic!("{stage}: {path}: {error}: {}", reply.body))
}

fn everything_reads_back(stage: &str) {
    reads::<ProcessStatus>(stage, "/v1/status", "");
    reads::<Vec<SlotStatus>>(stage, "/v1/policies", "/slots");
    for fault in reads::<Vec<FaultEntry>>(stage, "/v1/faults", "/faults") {
        assert!(fault.now_ms.is_finite(), "{stage}: {fault:?}");
    }
    reads::<LatencyReport>(stage, "/v1/latency", "");
    reads_or_refuses::<BudgetList>("/v1/budgets");
    reads_or_refuses::<Explanation>("/v1/why?request=chat");
}

fn reads_or_refuses<T: DeserializeOwned>(path: &str) {
    let reply = ask(&format!("GET {path}"), "", b"");
    match reply.code {
        200 => drop(serde_json::from_str::<T>(&reply.body).unwrap()),
        _ => assert!(!reply.error().is_empty(), "{path}"),
    }
}

/// Changes that are refused, and some that are not.
fn changes() -> Vec<(String, &'static str, &'static [u8])> {
    let mut changes = Vec::new();
    for slot in ["dispatch", "eviction", "budget"] {
        let policy = format!("/v1/policies/{slot}");
        let json = "Content-Type: application/json\r\n";
        changes.push((format!("PUT {policy}"), "", b"\0asm is no component".as_slice()));
        changes.push((format!("PUT {policy}?mode=shadow"), json, br#"{"source": "native:absent"}"#));
        changes.push((format!("PUT {policy}"), json, br#"{"source": "native:fcfs", "config": {"weight": 1e308}}"#));
        changes.push((format!("PUT {policy}"), json, br#"{"source": "oci://localhost:1/a@sha256:0"}"#));
        for action in ["promote", "rollback", "release"] {
            changes.push((format!("POST {policy}/{action}"), "", b""));
        }
        changes.push((format!("DELETE {policy}/shadow"), "", b""));
    }
    let json = "Content-Type: application/json\r\n";
    changes.push(("PUT /v1/budgets".into(), json, br#"{"request": "absent", "end": true}"#));
    changes.push(("PUT /v1/policies/dispatch?mode=shadow".into(), json, br#"{"source": "native:srpt"}"#));
    changes.push(("POST /v1/policies/dispatch/promote".into(), "", b""));
    changes.push(("POST /v1/policies/dispatch/rollback".into(), "", b""));
    changes
}

fn after_every_change(stage: &str) {
    everything_reads_back(stage);
    for (line, headers, body) in changes() {
        let reply = ask(&line, headers, body);
        match reply.code {
            200 => drop(serde_json::from_str::<SwapReport>(&reply.body).unwrap()),
            _ => assert!(!reply.error().is_empty(), "{line}"),
        }
        everything_reads_back(&format!("{stage}, after {line}"));
    }
}

#[test]
fn every_answer_reads_back() {
    let folder = folder("answers");
    write(&folder.join("token"), TOKEN, 0o600);
    let toml = "[telemetry]\nprometheus = '127.0.0.1:0'\n[admin]\nlisten = '127.0.0.1:0'\ntoken_file = 'token'\n\
                [service_levels.chat]\nttfo_ms = 500\n[policy.dispatch]\nsource = 'native:fcfs'\n";
    let config = MeridianConfig::from_toml(toml).unwrap();
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).unwrap();
    let settings = Settings { base_dir: folder, markers, serve: Some(serve), ..Settings::default() };
    let engine = Engine::start(config, settings).unwrap();
    engine.drive().follow_thinking(ThinkTokens { forced: vec![8], ..ThinkTokens::default() }, false).unwrap();
    after_every_change("before the first step");

    let request = NewRequest { prompt: &[1, 7], max_tokens: 100, deadline_ms: f64::INFINITY, ..NewRequest::default() };
    let row = engine.drive().arrived("chat-1", &request, Some(Default::default())).unwrap().row;
    after_every_change("with a request that waits");

    let facts =
        EngineFacts { now_ms: 12.5, token_budget: 64, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
    let mut driver = engine.drive();
    driver.plan(&facts, &[], &[row]);
    driver.admitted(row, 0);
    driver.scheduled(facts.now_ms, &[(row, 2)], 0);
    driver.generated(&[(row, 40)]);
    drop(driver);
    after_every_change("after a step");

    engine.drive().finished("chat-1", "stop");
    after_every_change("behind the last request");
    engine.shutdown();
}
