//! `meridian policy check --trusted-key`: who must have signed a component, and how it is refused.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Key and signature of the four bytes `test`, of minisign's own documentation.
const KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
const SIGNATURE: &str = "untrusted comment: signature from minisign secret key\n\
    RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n\
    trusted comment: timestamp:1556193335\tfile:test\n\
    y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==\n";

/// The exit code, and what was written to standard error.
fn check(folder: &Path, keys: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_meridian"));
    command.args(["policy", "check", "policy.wasm"]).current_dir(folder);
    for key in keys {
        command.args(["--trusted-key", key]);
    }
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

/// A folder of this test's own, with a file to check.
fn folder(name: &str, content: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("policy.wasm"), content).unwrap();
    folder
}

#[test]
fn a_signature_is_verified_before_the_component_is_looked_at() {
    let folder = folder("signed", "test");
    let not_a_component = "not a component: no WebAssembly header";
    let (code, stderr) = check(&folder, &[]);
    assert!(code == Some(1) && stderr.contains(not_a_component), "{stderr}");
    let (_, stderr) = check(&folder, &[KEY]);
    assert!(stderr.contains("not signed: expected a minisign signature in policy.wasm.minisig"), "{stderr}");
    assert!(stderr.contains("by trusted key E7620F1842B4E81F"), "{stderr}");
    std::fs::write(folder.join("policy.wasm.minisig"), SIGNATURE).unwrap();
    std::fs::write(folder.join("release.pub"), format!("untrusted comment: minisign public key\n{KEY}\n")).unwrap();
    for key in [KEY, "release.pub"] {
        let (_, stderr) = check(&folder, &[key]);
        assert!(stderr.contains(not_a_component), "the signature is good: {stderr}");
    }
    std::fs::write(folder.join("policy.wasm"), "tesT").unwrap();
    let (code, stderr) = check(&folder, &[KEY]);
    let refusal = "bad signature: names trusted key E7620F1842B4E81F, but is not its signature of this component";
    assert!(code == Some(1) && stderr.contains(refusal), "{stderr}");
}

#[test]
fn a_bad_key_is_named_with_its_option() {
    let folder = folder("bad-key", "test");
    let (code, stderr) = check(&folder, &[KEY, "absent.pub"]);
    assert!(code == Some(1) && stderr.contains("--trusted-key[1]: \"absent.pub\": "), "{stderr}");
}

#[test]
fn a_machine_without_address_space_is_named_and_not_the_policy() {
    let component = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/policies/edf.wasm");
    assert!(Path::new(component).is_file(), "{component}: run `make policies` first");
    let script = format!("ulimit -v 2000000; exec {} policy check {component}", env!("CARGO_BIN_EXE_meridian"));
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let expected = "cannot set up WebAssembly: no address space for an instance: ";
    assert!(output.status.code() == Some(1) && stderr.contains(expected), "{stderr}");
    assert!(stderr.contains("see `ulimit -v`") && !stderr.contains("the policy failed"), "{stderr}");
}
