//! Components and recordings of the version of the contract before: they decide, and are replayed, as then.
//! Needs the components of this version: `make policies`.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// A policy of each slot.
const POLICIES: [(&str, &str); 3] = [("dispatch", "balanced"), ("eviction", "prefix-value"), ("budget", "patience")];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn before(file: &str) -> String {
    root().join("host/wasm/tests/contract-0.2").join(file).to_str().unwrap().to_owned()
}

fn now(policy: &str) -> String {
    root().join(format!("target/policies/{policy}.wasm")).to_str().unwrap().to_owned()
}

/// Runs the command, which must succeed, and returns its JSON.
fn meridian(args: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_meridian")).args(args).arg("--json").output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{args:?}: {stdout}{stderr}");
    serde_json::from_str(stdout.lines().last().unwrap()).unwrap()
}

#[test]
fn components_of_the_version_before_load() {
    for (slot, policy) in POLICIES {
        let inspected = meridian(&["policy", "inspect", &before(&format!("{policy}.wasm"))]);
        assert_eq!((&inspected["contract"], &inspected["slots"][0]["slot"]), (&"0.2.0".into(), &slot.into()));
        assert_eq!(inspected["refused"], Value::Null);
        assert_eq!(meridian(&["policy", "inspect", &now(policy)])["contract"], "0.3.0");
    }
}

#[test]
fn recordings_of_the_version_before_are_replayed_without_a_difference() {
    for (_, policy) in POLICIES {
        for component in [before(&format!("{policy}.wasm")), now(policy), format!("native:{policy}")] {
            let recording = before(&format!("{policy}.arrow"));
            let replayed = meridian(&["replay", &recording, "--policy", &component]);
            assert_eq!((&replayed["decisions"], &replayed["identical"]), (&60.into(), &60.into()), "{component}");
        }
    }
}

#[test]
fn components_of_the_version_before_decide_as_those_of_this_one() {
    for (_, policy) in POLICIES {
        let file = before(&format!("{policy}.wasm"));
        let args = ["policy", "test", &file, "--same-as", &now(policy), "--batches", "300", "--deadline-ms", "1000"];
        let tested = meridian(&args);
        let properties = tested["slots"][0]["properties"].as_array().unwrap();
        let same = properties.iter().find(|found| found["name"].as_str().unwrap().starts_with("the same answers as"));
        assert_eq!(same.unwrap()["failure"], Value::Null);
    }
}
