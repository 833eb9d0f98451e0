//! The direction of dependencies: what ARCHITECTURE.md says, kept by a test.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use meridian_core::{Budget, Dispatch, Eviction, SlotKind};
use serde_json::Value;

/// What each crate may depend on, among ours and those that must stay in one place.
const ALLOWED: &[(&str, &[&str])] = &[
    ("meridian-core", &["meridian-policies", "meridian-policy-sdk"]),
    ("meridian-wasm", &["meridian-core", "meridian-policy-sdk", "wasmtime"]),
    ("meridian-registry", &["meridian-core", "tokio"]),
    ("meridian-engine", &["meridian-core", "meridian-policy-sdk", "meridian-registry", "meridian-wasm"]),
    ("meridian-admin", &["meridian-core", "meridian-engine", "axum", "hyper", "hyper-util", "tokio"]),
    ("meridian-fleet", &["meridian-admin", "meridian-core", "meridian-engine", "hyper", "hyper-util", "tokio"]),
    (
        "meridian-fuzz",
        &[
            "meridian-admin",
            "meridian-bench",
            "meridian-core",
            "meridian-engine",
            "meridian-fleet",
            "meridian-memory",
            "meridian-wasm",
            "tokio",
        ],
    ),
    ("meridian-memory", &["meridian-core", "tokio"]),
    ("meridian-kernels", &[]),
    ("meridian-bench", &["meridian-core", "meridian-engine", "meridian-fleet", "meridian-wasm"]),
    (
        "meridian-cli",
        &[
            "meridian-admin",
            "meridian-core",
            "meridian-engine",
            "meridian-fleet",
            "meridian-registry",
            "meridian-wasm",
            "meridian-bench",
            "tokenizers",
            "ratatui",
            "hyper",
            "hyper-util",
            "tokio",
        ],
    ),
    (
        "meridian-python",
        &["meridian-core", "meridian-kernels", "meridian-engine", "meridian-admin", "meridian-cli", "pyo3"],
    ),
];

/// The crates of the workspace, as cargo sees them.
fn packages() -> Vec<Value> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    metadata["packages"].as_array().unwrap().clone()
}

#[test]
fn no_forbidden_edge() {
    let watched = |name: &str| {
        name.starts_with("meridian-")
            || ["wasmtime", "pyo3", "tokenizers"].contains(&name)
            || ["axum", "hyper", "hyper-util", "tokio", "ratatui", "crossterm"].contains(&name)
    };
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    for package in packages() {
        let name = package["name"].as_str().unwrap();
        let Some(allowed) = allowed.get(name) else { panic!("{name}: a new crate, say here what it may depend on") };
        for dependency in package["dependencies"].as_array().unwrap() {
            let to = dependency["name"].as_str().unwrap();
            let is_dev = dependency["kind"] == "dev";
            assert!(is_dev || !watched(to) || allowed.contains(&to), "forbidden edge {name} -> {to}");
        }
    }
}

/// Where one binary has the tests of a crate, cargo does not look for others.
#[test]
fn every_file_of_tests_is_compiled() {
    let mut merged = 0;
    for package in packages() {
        let tests = Path::new(package["manifest_path"].as_str().unwrap()).with_file_name("tests");
        let Ok(all) = std::fs::read_to_string(tests.join("all.rs")) else { continue };
        let modules = all.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
        let targets = package["targets"].as_array().unwrap().iter().map(|target| target["name"].as_str().unwrap());
        let known: BTreeSet<_> = modules.chain(targets).collect();
        for file in std::fs::read_dir(&tests).unwrap().map(|entry| entry.unwrap().path()) {
            let name = file.file_stem().unwrap().to_str().unwrap();
            let is_rust = file.extension().is_some_and(|extension| extension == "rs");
            assert!(!is_rust || known.contains(name), "{}: name it in all.rs", file.display());
        }
        merged += 1;
    }
    assert_eq!(merged, 6);
}

#[test]
fn every_shipped_policy_is_native_and_a_component() {
    let cargo_toml = concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies/shipped/Cargo.toml");
    let manifest: toml::Table = std::fs::read_to_string(cargo_toml).unwrap().parse().unwrap();
    let examples = manifest["example"].as_array().unwrap().iter();
    let components: BTreeSet<_> = examples.map(|example| example["name"].as_str().unwrap()).collect();
    let natives: BTreeSet<_> = [Dispatch::NATIVES, Eviction::NATIVES, Budget::NATIVES].concat().into_iter().collect();
    assert_eq!(components, natives);
}

/// An engine needs no part of the command. One library carries both, so this holds for the crates below it.
#[test]
fn the_engine_reaches_no_part_of_the_command() {
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    let mut reached = vec!["meridian-admin", "meridian-engine"];
    let mut next = 0;
    while let Some(name) = reached.get(next) {
        let edges = allowed.get(name).copied().unwrap_or_default();
        let new: Vec<_> = edges.iter().copied().filter(|to| !reached.contains(to)).collect();
        reached.extend(new);
        next += 1;
    }
    assert!(reached.contains(&"meridian-engine") && reached.contains(&"wasmtime"), "{reached:?}");
    for part in ["meridian-memory", "meridian-fleet", "meridian-bench", "meridian-cli", "tokenizers", "ratatui"] {
        assert!(!reached.contains(&part), "{part} is in {reached:?}");
    }
}
