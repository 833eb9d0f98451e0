//! `meridian policy new`, `test`, `inspect` and `bench`, as an author types them. The languages other than Rust are built
//! and run in vLLM by python/tests/vllm/test_languages.py. Needs the components: `make policies`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn meridian(args: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_meridian")).args(args).current_dir(folder).output().unwrap()
}

/// A folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", stderr(output)))
}

#[test]
fn a_new_folder_has_code_cases_and_contract() {
    let folder = folder("new");
    for (lang, source) in [("rust", "src/lib.rs"), ("c", "policy.c"), ("python", "policy.py"), ("js", "policy.js")] {
        let name = format!("mine-{lang}");
        let made = meridian(&["policy", "new", &name, "--lang", lang, "--slot", "budget"], &folder);
        assert!(made.status.success(), "{}", stderr(&made));
        for file in [source, "cases/budget.toml", "wit/budget.wit", "policy.toml", "README.md"] {
            assert!(folder.join(&name).join(file).is_file(), "{lang}: {file}");
        }
        let again = meridian(&["policy", "new", &name, "--lang", lang], &folder);
        assert_eq!(again.status.code(), Some(1));
        assert!(stderr(&again).contains("exists already, expected a new folder"), "{}", stderr(&again));
    }
    for name in ["Mine", "../mine", "mine-", "", "9mine"] {
        let refused = meridian(&["policy", "new", name, "--lang", "c"], &folder);
        assert!(!refused.status.success() && stderr(&refused).contains("expected a letter"), "{}", stderr(&refused));
    }
}

#[test]
fn a_folder_without_a_policy_is_refused() {
    let folder = folder("empty-policy");
    std::fs::write(folder.join("policy.toml"), "name = \"a\"\nlanguage = \"c\"\nslots = [\"dispatch\"]\n").unwrap();
    let refused = meridian(&["policy", "build"], &folder);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("wit: missing, expected the WIT package"), "{}", stderr(&refused));
    let refused = meridian(&["policy", "test", "absent.wasm"], &folder);
    assert!(stderr(&refused).contains("absent.wasm: cannot read"), "{}", stderr(&refused));
}

#[test]
fn a_test_names_what_failed_and_ends_with_1() {
    let root = root();
    let srpt = ["target/policies/srpt.wasm", "--cases", "policies/shipped/cases/srpt", "--deadline-ms", "1000"];
    let passed = meridian(&[&["--json", "policy", "test"], &srpt[..], &["--same-as", "native:srpt"]].concat(), &root);
    assert!(passed.status.success(), "{}", stderr(&passed));
    let tested = json(&passed);
    assert_eq!(tested["ok"], true);
    let slot = &tested["slots"][0];
    assert!(slot["cases"].as_array().unwrap().len() > 5 && slot["properties"].as_array().unwrap().len() == 7, "{slot}");

    // Another policy's cases, and another policy's answers.
    let edf = ["policy", "test", "native:edf", "--cases", "policies/shipped/cases/srpt", "--same-as", "native:srpt"];
    let failed = meridian(&edf, &root);
    let shown = String::from_utf8(failed.stdout.clone()).unwrap();
    assert_eq!(failed.status.code(), Some(1));
    assert!(shown.contains("FAILED  dispatch: attained.toml: fewest generated tokens first"), "{shown}");
    assert!(shown.contains("FAILED  dispatch: the same answers as native:srpt"), "{shown}");

    let fcfs = ["policy", "test", "native:fcfs", "--order-independent", "--deadline-ms", "0.00001"];
    let late = String::from_utf8(meridian(&fcfs, &root).stdout).unwrap();
    assert!(late.contains("FAILED  dispatch: 4096 candidates within the deadline"), "{late}");
}

#[test]
fn inspect_says_what_a_component_is_even_when_it_is_refused() {
    let root = root();
    let inspected = json(&meridian(&["--json", "policy", "inspect", "target/policies/noop.wasm"], &root));
    assert_eq!(inspected["imports"].as_array().unwrap().len(), 0);
    assert_eq!(inspected["exports"].as_array().unwrap().len(), 4);
    assert_eq!(inspected["slots"].as_array().unwrap().len(), 3);
    assert_eq!((inspected["name"].as_str(), inspected["refused"].is_null()), (Some("noop"), true));

    let folder = folder("inspect");
    let component = "(component (import \"wasi:clocks/wall-clock@0.2.0\" (instance)))";
    std::fs::write(folder.join("clock.wasm"), wat::parse_str(component).unwrap()).unwrap();
    std::fs::write(folder.join("text.wasm"), "no component").unwrap();
    let refused = json(&meridian(&["--json", "policy", "inspect", "clock.wasm"], &folder));
    assert_eq!(refused["imports"][0], "wasi:clocks/wall-clock@0.2.0");
    assert!(refused["refused"].as_str().unwrap().contains("a policy component may import nothing"), "{refused}");
    let text = meridian(&["policy", "inspect", "text.wasm"], &folder);
    assert_eq!(text.status.code(), Some(1));
    assert!(stderr(&text).contains("text.wasm: not a WebAssembly component"), "{}", stderr(&text));
}

#[test]
fn bench_times_a_policy_beside_the_default() {
    let timed = meridian(&["--json", "policy", "bench", "native:srpt", "--candidates", "64"], &root());
    assert!(timed.status.success(), "{}", stderr(&timed));
    assert_eq!(json(&timed)["rows"][0]["candidates"], 64);
}
