//! Components and recordings of another version of the contract are refused. Needs the components of this version: `make policies`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn path(file: &str) -> String {
    let root: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    root.join(file).to_str().unwrap().to_owned()
}

/// Whether the command succeeds, and all that it prints.
fn meridian(args: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_meridian")).args(args).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), format!("{stdout}{stderr}"))
}

fn inspected(component: &str) -> Value {
    let (succeeds, printed) = meridian(&["policy", "inspect", component, "--json"]);
    assert!(succeeds, "{printed}");
    serde_json::from_str(printed.lines().last().unwrap()).unwrap()
}

#[test]
fn a_component_names_its_contract_or_is_refused() {
    let balanced = inspected(&path("target/policies/balanced.wasm"));
    assert_eq!((&balanced["contract"], &balanced["refused"]), (&"1.0.0-rc".into(), &Value::Null));
    let file = path("host/wasm/tests/contract-0.2/balanced.wasm");
    let refused = format!(
        "{file}: exports `meridian:policy/lifecycle@0.2.0`, expected `meridian:policy/lifecycle@1.0.0-rc`: the component was built \
         for another version of the WIT package"
    );
    assert_eq!(inspected(&file)["refused"], refused.as_str());
}

#[test]
fn a_recording_of_another_contract_is_refused() {
    let recording = path("host/wasm/tests/contract-0.2/balanced.arrow");
    let (succeeds, printed) = meridian(&["replay", &recording, "--policy", "native:balanced"]);
    assert!(!succeeds);
    assert!(printed.contains("balanced.arrow: it has contract \"0.2.0\", expected \"1.0.0-rc\""), "{printed}");
}
