//! The direction of dependencies: what docs/src/architecture.md says, kept by a test.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

/// What each crate may depend on, among ours and those that must stay in one place.
const ALLOWED: &[(&str, &[&str])] = &[
    ("meridian-core", &["meridian-policy-sdk", "output-first", "fcfs", "noop"]),
    ("meridian-wasm", &["meridian-core", "wasmtime"]),
    ("meridian-runtime", &["meridian-core", "axum", "hyper", "hyper-util", "tokio"]),
    ("meridian-fuzz", &["meridian-core", "meridian-runtime", "meridian-wasm", "tokio"]),
    ("meridian-kernels", &[]),
    ("meridian-bench", &["meridian-core", "meridian-kernels", "meridian-runtime", "meridian-wasm"]),
    (
        "meridian-cli",
        &["meridian-core", "meridian-runtime", "meridian-wasm", "meridian-bench", "tokenizers", "ratatui"],
    ),
    (
        "meridian-python",
        &["meridian-core", "meridian-kernels", "meridian-runtime", "meridian-wasm", "meridian-cli", "pyo3"],
    ),
];

#[test]
fn no_forbidden_edge() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let watched = |name: &str| {
        name.starts_with("meridian-")
            || ["wasmtime", "pyo3", "tokenizers", "output-first", "fcfs", "noop"].contains(&name)
            || ["axum", "hyper", "hyper-util", "tokio", "ratatui", "crossterm"].contains(&name)
    };
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let Some(allowed) = allowed.get(name) else { panic!("{name}: a new crate, say here what it may depend on") };
        for dependency in package["dependencies"].as_array().unwrap() {
            let to = dependency["name"].as_str().unwrap();
            let is_dev = dependency["kind"] == "dev";
            assert!(is_dev || !watched(to) || allowed.contains(&to), "forbidden edge {name} -> {to}");
        }
    }
}
