//! `meridian replay`: what it prints, and its exit codes.

use std::path::{Path, PathBuf};
use std::process::Command;

use meridian_core::slot::{Contender, DispatchSlot, StrikeLimits};
use meridian_core::{Markers, MeridianConfig, NewRequest, RequestTable, Step, native};
use meridian_engine::recording::{Recorder, RecorderSettings, SlotSetup};
use serde_json::Value;

/// Exit code, stdout, stderr.
fn replay(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_meridian")).arg("replay").args(args).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// A recording of `native:output-first` over ten steps.
fn record(name: &str, source: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("replay-{name}"));
    let _ = std::fs::remove_dir_all(&dir);
    let targets = MeridianConfig::default().scheduler.targets();
    let recorder = Recorder::start(RecorderSettings::new(dir.clone(), 16)).unwrap();
    let policy = native::policy("output-first", targets, "{}").unwrap();
    let mut slot = DispatchSlot::with_version(Contender::new(policy, "", source), targets, StrikeLimits::default());
    slot.control().record(recorder.tap(SlotSetup { targets, deadline_ms: 2.0, memory_mib: 64 }));
    let mut table = RequestTable::new(Markers::default());
    let mut live = Vec::new();
    for id in 0..10u32 {
        let request = NewRequest { prompt_tokens: 9, priority: -(id as i32), ..NewRequest::default() };
        live.push(table.insert(&request).unwrap());
        let step = Step { now_ms: f64::from(id), token_budget: 64, decode_tokens: 1, ..Step::default() };
        slot.decide(&step, &table, &live, 16);
    }
    recorder.close();
    std::fs::read_dir(&dir).unwrap().next().unwrap().unwrap().path()
}

#[test]
fn the_recorded_policy_decides_the_same_and_another_does_not() {
    let file = record("same", "native:output-first");
    let file = file.to_str().unwrap();
    let (code, stdout, stderr) = replay(&[file]);
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    assert!(stdout.contains("identical    10, different 0, not compared 0"), "{stdout}");
    let (code, stdout, _) = replay(&[file, "--policy", "native:fcfs", "--json", "--show", "1", "--limit", "5"]);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &report["ok"], &report["policy"]), (1, &Value::Bool(false), &"native:fcfs".into()));
    assert_eq!((&report["decisions"], &report["differences"].as_array().unwrap().len()), (&5.into(), &1));
}

/// Nothing was compared, so nothing is identical.
#[test]
fn a_recording_without_a_whole_decision_is_no_success() {
    let file = record("cut", "native:output-first");
    let bytes = std::fs::read(&file).unwrap();
    let name = file.to_str().unwrap();
    let (mut refused, mut told) = (0, 0);
    for length in (0..bytes.len()).step_by(64) {
        std::fs::write(&file, &bytes[..length]).unwrap();
        let (code, stdout, stderr) = replay(&[name]);
        if code == 2 {
            assert_eq!((stdout.as_str(), stderr.matches('\n').count()), ("", 1), "{stderr}");
            refused += 1;
            told += usize::from(stderr.contains("no decision that is whole, expected at least one"));
        } else {
            assert!(!stdout.contains("identical    0,"), "{stdout}");
        }
    }
    assert!(refused > 0 && told > 0, "{refused} {told}");
    std::fs::write(&file, &bytes).unwrap();
    let (code, _, stderr) = replay(&[name, "--limit", "0"]);
    assert!(code == 2 && stderr.contains("--limit 0: expected at least 1"), "{stderr}");
}

/// A recording may name any file, so what is there is not parsed unless it is what was recorded.
#[test]
fn what_a_recording_names_is_compared_before_it_is_parsed() {
    let named = Path::new(env!("CARGO_TARGET_TMPDIR")).join("replay-not-a-component.wasm");
    std::fs::write(&named, "not a component").unwrap();
    let file = record("named", named.to_str().unwrap());
    let file = file.to_str().unwrap();
    let (code, stdout, stderr) = replay(&[file]);
    assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
    assert!(stderr.contains("that file has another digest now, a8a79aba"), "{stderr}");
    let (code, _, stderr) = replay(&[file, "--policy", named.to_str().unwrap()]);
    assert!(code == 2 && stderr.contains("not a component: no WebAssembly header"), "{stderr}");
}

#[test]
fn what_cannot_be_used_is_refused_with_code_2() {
    let file = record("refused", "policies/mine.wasm");
    let file = file.to_str().unwrap();
    let refused = |args: &[&str], text: &str| {
        let (code, stdout, stderr) = replay(args);
        assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
        assert!(stderr.contains(text), "{stderr}");
    };
    refused(&[file], "came from \"policies/mine.wasm\": name its component with --policy, which is no file here");
    refused(&[file, "--policy", "native:nothing"], "native:nothing: unknown native policy");
    refused(&[file, "--policy", "native:fcfs", "--config", "[]"], "--config: \"[]\": expected one JSON object");
    refused(&["/nowhere.arrow"], "error: /nowhere.arrow: cannot be read: No such file");
    refused(&[env!("CARGO_BIN_EXE_meridian")], "expected an Arrow IPC file, which begins with ARROW1");
    refused(&[], "required arguments");
    let (code, stdout, _) = replay(&["/nowhere.arrow", "--json"]);
    assert_eq!((code, serde_json::from_str::<Value>(&stdout).unwrap()["ok"].as_bool()), (2, Some(false)));
}
