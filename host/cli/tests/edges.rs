//! The direction of dependencies: what docs/src/architecture.md says, kept by a test.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;

/// What each crate may depend on, among ours and those that must stay in one place. `(policies)` is every shipped policy.
const ALLOWED: &[(&str, &[&str])] = &[
    ("meridian-core", &["meridian-policy-sdk", "(policies)"]),
    ("meridian-wasm", &["meridian-core", "meridian-policy-sdk", "wasmtime"]),
    ("meridian-runtime", &["meridian-core", "meridian-policy-sdk", "axum", "hyper", "hyper-util", "tokio"]),
    ("meridian-registry", &["meridian-core", "tokio"]),
    ("meridian-fabric", &["tokio"]),
    (
        "meridian-engine",
        &["meridian-core", "meridian-fabric", "meridian-registry", "meridian-runtime", "meridian-wasm"],
    ),
    ("meridian-fleet", &["meridian-core", "meridian-runtime", "hyper", "hyper-util", "tokio"]),
    (
        "meridian-fuzz",
        &["meridian-core", "meridian-engine", "meridian-fabric", "meridian-runtime", "meridian-wasm", "tokio"],
    ),
    ("meridian-kernels", &[]),
    (
        "meridian-bench",
        &[
            "meridian-core",
            "meridian-engine",
            "meridian-fleet",
            "meridian-kernels",
            "meridian-runtime",
            "meridian-wasm",
        ],
    ),
    (
        "meridian-cli",
        &[
            "meridian-core",
            "meridian-engine",
            "meridian-fleet",
            "meridian-registry",
            "meridian-runtime",
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
        &["meridian-core", "meridian-kernels", "meridian-runtime", "meridian-engine", "meridian-cli", "pyo3"],
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
    let policies = policies();
    let is_policy = |name: &str| policies.iter().any(|policy| policy == name);
    let watched = |name: &str| {
        name.starts_with("meridian-")
            || is_policy(name)
            || ["wasmtime", "pyo3", "tokenizers"].contains(&name)
            || ["axum", "hyper", "hyper-util", "tokio", "ratatui", "crossterm"].contains(&name)
    };
    let mut core_has = 0;
    let allowed: BTreeMap<_, _> = ALLOWED.iter().copied().collect();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let Some(allowed) = allowed.get(name) else { panic!("{name}: a new crate, say here what it may depend on") };
        for dependency in package["dependencies"].as_array().unwrap() {
            let to = dependency["name"].as_str().unwrap();
            let is_dev = dependency["kind"] == "dev";
            let is_allowed = allowed.contains(&to) || is_policy(to) && allowed.contains(&"(policies)");
            assert!(is_dev || !watched(to) || is_allowed, "forbidden edge {name} -> {to}");
            core_has += usize::from(name == "meridian-core" && !is_dev && is_policy(to));
        }
    }
    assert_eq!(core_has, policies.len(), "a policy in policies/ that is not native");
}

/// The folders of `policies/` with a policy in them.
fn policies() -> Vec<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../policies");
    let names = std::fs::read_dir(folder).expect("policies/").map(|entry| entry.expect("an entry"));
    let policies = names.filter(|entry| entry.path().join("Cargo.toml").is_file());
    policies.map(|entry| entry.file_name().into_string().expect("UTF-8")).filter(|name| name != "sdk").collect()
}
