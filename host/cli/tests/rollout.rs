//! `meridian rollout`, as a user runs it, as far as it needs no engine.

use std::path::{Path, PathBuf};

use serde_json::Value;
use support::meridian;

use crate::support;

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("rollout-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

/// A roll-out in its second step, whose process has died.
const STATE: &str = r#"{"format": "meridian-rollout/1",
  "settings": {"slot": "dispatch", "steps": [0.1, 0.5, 1.0], "guards": ["output_itl_p99<=1.05x"], "hold_s": 300.0,
    "interval_s": 30.0, "settle_s": 15.0, "false_alarm": 0.01, "seed": 1, "also": ["ttft_mean"]},
  "policy": {"source": "native:srpt", "sha256": "", "options": null},
  "old": {"name": "balanced", "version": "0.1.0", "sha256": "", "source": "native:balanced"},
  "fleet": [], "phase": "step", "number": 1, "paused": null, "intervals": 4, "lines": 24, "step_from": 20, "before": 10,
  "findings": [
    {"metric": "output_itl_p99", "guard": "output_itl_p99<=1.05x", "verdict": "kept", "blocks": 4,
     "measured": {"ratio": 0.91, "low": 0.85, "high": 0.97, "surely": 0.8}},
    {"metric": "ttft_mean", "guard": null, "verdict": "kept", "blocks": 4,
     "measured": {"ratio": 0.8, "low": 0.7, "high": 0.9, "surely": 0.6}}],
  "engines": {"a": {"role": "new", "answers": true, "is_listed": true}, "b": {"role": "old", "answers": true, "is_listed": true},
    "c\u001b": {"role": "new", "is_listed": true, "problem": "does not answer"}},
  "events": [{"at_s": 3723.0, "what": "step 50%: 2 of 3 engines"}],
  "messages": 240, "started_s": 0.0, "at_s": 7200.0}"#;

const PREDICTED: &str = r#"{"format": "meridian-prediction/1", "slot": "dispatch", "recording": "a.arrow", "seed": 1,
  "old": {"name": "balanced", "version": "0.1.0", "sha256": ""}, "new": {"name": "srpt", "version": "0.1.0", "sha256": ""},
  "metrics": {"ttft_mean": {"ratio": 0.75, "low": 0.7, "high": 0.85}}}"#;

fn under_way(folder: &Path) {
    let dir = folder.join("meridian-rollout");
    std::fs::create_dir_all(&dir).expect("can be made");
    std::fs::write(dir.join("state.json"), STATE).expect("can be written");
    std::fs::write(folder.join("predicted.json"), PREDICTED).expect("can be written");
}

#[test]
fn status_shows_guards_engines_and_the_prediction_beside_the_outcome() {
    let folder = folder("status");
    under_way(&folder);
    let done = meridian(&folder, &["rollout", "status", "--predicted", "predicted.json"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    for line in [
        "policy   native:srpt, slot dispatch, in place of balanced 0.1.0",
        "state    step 50% (2 of 3), interval 4 of 10",
        "engines  3: 2 with the new policy, 1 with the old one",
        "lasted   2.0 h, 240 calls to engines",
        "no process leads it: go on with it (resume), or return to the old policy (abort)",
        "left     c\\u{1b}: does not answer",
        "01:02:03  step 50%: 2 of 3 engines",
    ] {
        assert!(done.stdout.contains(line), "{line}: {}", done.stdout);
    }
    let row = |name: &str| {
        let line = done.stdout.lines().find(|line| line.starts_with(name)).expect("a row");
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("output_itl_p99"), "output_itl_p99<=1.05x 0.910 0.850 to 0.970 - kept");
    assert_eq!(row("ttft_mean"), "ttft_mean 0.800 0.700 to 0.900 0.750 (0.700 to 0.850) for information");
    let done = meridian(&folder, &["rollout", "status", "--predicted", "predicted.json", "--json"]);
    let object: Value = serde_json::from_str(&done.stdout).expect("JSON");
    let beside = &object["side_by_side"][0];
    assert_eq!(
        (&object["is_led"], &beside["predicted"]["ratio"], &beside["measured"]["ratio"]),
        (&false.into(), &0.75.into(), &0.8.into())
    );
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let folder = folder("refused");
    let refused = |args: &[&str]| {
        let done = meridian(&folder, args);
        assert_eq!(done.code, 2, "{args:?}: {}{}", done.stdout, done.stderr);
        done.stderr.trim_end().to_owned()
    };
    let start = |more: &[&str]| refused(&[&["rollout", "start", "native:srpt"], more].concat());
    assert_eq!(
        start(&["--to", "50%,10%"]),
        "error: to: \"50%,10%\": expected ascending shares that end with 100%, as in 10%,50%,100%"
    );
    assert!(start(&["--guard", "speed<=1x"]).contains("metric \"speed\": expected LATENCY_STATISTIC"));
    assert!(
        start(&["--hold", "60s", "--interval", "30s"])
            .starts_with("error: interval: \"30s\": expected at most a quarter")
    );
    assert!(start(&["--false-alarm", "2"]).starts_with("error: false-alarm: \"2\": expected a probability"));
    assert!(start(&["--hold", "5"]).contains("5: expected a time, as in 90s, 2m or 1h"));
    assert!(refused(&["rollout", "start", "none.wasm"]).starts_with("error: none.wasm: cannot be read"));
    for command in ["status", "pause", "resume", "abort"] {
        let error = refused(&["rollout", command, "--folder", "none"]);
        assert_eq!(error, "error: none: no roll-out has begun here", "{command}");
    }
    under_way(&folder);
    assert!(start(&[]).starts_with("error: meridian-rollout: a roll-out that is not over"));
    let path = folder.join("meridian-rollout/state.json");
    std::fs::write(&path, STATE.replace("rollout/1", "rollout/2")).expect("can be written");
    let error = refused(&["rollout", "status"]);
    assert!(error.ends_with("format: \"meridian-rollout/2\": expected \"meridian-rollout/1\""), "{error}");
}

#[test]
fn only_a_leader_can_be_paused() {
    let folder = folder("pause");
    under_way(&folder);
    let done = meridian(&folder, &["rollout", "pause"]);
    assert_eq!(done.code, 1);
    assert!(done.stderr.starts_with("error: no process leads the roll-out"), "{}", done.stderr);
}
