//! `meridian experiment` and `meridian bench predict`, as a user runs them, as far as they need no engine.

use std::path::{Path, PathBuf};
use std::sync::RwLock;

use meridian_core::latency::LatencyCounts;
use meridian_engine::control::Version;
use meridian_fleet::experiment::{PairRecord, Policies, Settings, Side, Stage, State, Store};
use meridian_fleet::stats::Sample;
use meridian_fleet::{NamedPolicy, PolicyOrigin};
use serde_json::Value;
use support::Done;

use crate::support;

/// A child has this process's files, and with them their locks, between its fork and its start: whoever holds a store writes,
/// whoever starts a child reads.
static FORKS: RwLock<()> = RwLock::new(());

fn meridian(folder: &Path, args: &[&str]) -> Done {
    let _forks = FORKS.read();
    support::meridian(folder, args)
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("experiment-{name}"));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

/// An experiment whose new policy has gaps of `ratio` times those of the old one.
fn experiment(folder: &Path, ratio: f64, stage: Stage) -> State {
    let version = |name: &str| Version { name: name.into(), version: "1.0".into(), ..Version::default() };
    let mut state = State::new(Settings { pairs: 8, ..Settings::default() }, "127.0.0.1:9464", version("calm"));
    state.new = Some(version("eager"));
    let sample = |gap_ms: f64, number: u32| {
        let gaps = (0..500).map(|i| gap_ms * (1.0 + f64::from((i + 3 * number) % 10) / 100.0));
        Some(Sample { counts: LatencyCounts { output_itl: gaps.collect(), ..LatencyCounts::default() }, seconds: 90.0 })
    };
    for number in 0..8 {
        let (old, new) = (sample(20.0, number), sample(20.0 * ratio, 2 * number));
        state.pairs.push(PairRecord { first: Side::Old, old, new, void: None });
    }
    state.stage = stage;
    let _alone = FORKS.write();
    let store = Store::take(&folder.join("meridian-experiment")).expect("free");
    let policy = |name: &str| NamedPolicy { source: PolicyOrigin::Named(name.into()), options: None };
    store.save_policies(&Policies { old: policy("native:fcfs"), new: policy("native:srpt") }).expect("can be written");
    store.save(&state).expect("can be written");
    state
}

fn complete() -> Stage {
    Stage::Ended { why: "every pair was measured".into(), complete: true }
}

fn json(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|_| panic!("{}{}", done.stdout, done.stderr))
}

const PREDICTED: &str = r#"{"format": "meridian-prediction/1", "slot": "dispatch", "recording": "a.arrow", "seed": 1,
  "old": {"name": "calm", "version": "1.0", "sha256": ""}, "new": {"name": "eager", "version": "1.0", "sha256": ""},
  "metrics": {"output_itl_mean": {"ratio": 0.75, "low": 0.7, "high": 0.85}}}"#;

#[test]
fn a_report_has_the_verdict_and_the_prediction_beside_it() {
    let folder = folder("report");
    experiment(&folder, 0.8, complete());
    std::fs::write(folder.join("predicted.json"), PREDICTED).expect("can be written");
    let done = meridian(&folder, &["experiment", "report", "--predicted", "predicted.json"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{}", done.stdout);
    let line = done.stdout.lines().find(|line| line.starts_with("output_itl_mean")).expect("the metric");
    assert!(line.contains("0.750 (0.700 to 0.850)") && line.ends_with("better"), "{line}");
    assert!(
        done.stdout.contains("8 of 8 measured, 0 do not count; 25 % of the time is cut off as warm-up"),
        "{}",
        done.stdout
    );
    assert!(done.stdout.contains("ended: every pair was measured; the old policy decides"), "{}", done.stdout);
    let done = meridian(&folder, &["experiment", "report", "--json"]);
    let finding = &json(&done)["report"]["findings"][0];
    assert_eq!((&finding["metric"], &finding["verdict"]), (&"output_itl_mean".into(), &"better".into()));
}

#[test]
fn a_worse_policy_and_an_interim_verdict_have_exit_code_1() {
    let folder = folder("worse");
    experiment(&folder, 1.2, complete());
    let done = meridian(&folder, &["experiment", "report"]);
    assert_eq!(done.code, 1, "{}", done.stdout);
    assert!(done.stdout.contains("worse"), "{}", done.stdout);
    let folder = self::folder("interim");
    experiment(&folder, 0.8, Stage::Running);
    let done = meridian(&folder, &["experiment", "report"]);
    assert_eq!(done.code, 1, "{}", done.stdout);
    assert!(done.stdout.contains("The verdicts are interim"), "{}", done.stdout);
    let done = meridian(&folder, &["experiment", "status"]);
    assert_eq!(done.code, 0);
    assert!(done.stdout.contains("nobody leads it: go on with it (resume)"), "{}", done.stdout);
}

#[test]
fn a_stop_ends_what_nobody_leads() {
    let folder = folder("stop");
    experiment(&folder, 0.8, Stage::Running);
    let done = meridian(&folder, &["experiment", "stop", "--json"]);
    assert_eq!((done.code, &json(&done)["why"]), (0, &"stopped".into()), "{}", done.stderr);
    // The old policy decided when the controller died: no engine was needed.
    let _alone = FORKS.write();
    let store = Store::take(&folder.join("meridian-experiment")).expect("free");
    let state = store.load().expect("readable").expect("is there");
    assert_eq!(state.stage, Stage::Ended { why: "stopped".into(), complete: false });
}

#[test]
fn bad_input_is_refused_in_one_line() {
    let folder = folder("refused");
    let refused = |args: &[&str]| {
        let done = meridian(&folder, args);
        assert_eq!(done.code, 2, "{args:?}: {}{}", done.stdout, done.stderr);
        done.stderr.trim_end().to_owned()
    };
    let start = |more: &[&str]| refused(&[&["experiment", "start", "native:srpt"], more].concat());
    assert_eq!(start(&["--pairs", "2"]), "error: pairs: 2: expected 4 to 10000");
    assert!(start(&["--interval", "20s"]).starts_with("error: warm-up: 30 s: expected at least 0, and less than"));
    assert!(start(&["--interval", "20"]).contains("20: expected a time, as in 90s, 2m or 1h"));
    assert!(start(&["--metric", "speed"]).contains("\"speed\": expected LATENCY_STATISTIC"));
    assert!(start(&["--detect", "5"]).contains("5: expected a percentage, as in 5%"));
    assert!(start(&[]).contains("no engine process with an admin listener runs here"));
    assert_eq!(
        refused(&["experiment", "start", "none.wasm"]).split(": ").take(3).collect::<Vec<_>>(),
        ["error", "none.wasm", "cannot be read"]
    );
    for command in ["status", "report", "stop", "resume"] {
        let error = refused(&["experiment", command, "--folder", "none"]);
        assert!(error.starts_with("error: --folder none: no "), "{command}: {error}");
    }
    experiment(&folder, 0.8, Stage::Running);
    let error = refused(&["experiment", "start", "native:srpt"]);
    assert!(error.ends_with("has an experiment that is not over: go on with it (resume) or end it (stop)"), "{error}");
    std::fs::write(folder.join("p.json"), PREDICTED.replace("0.7,", "0.8,")).expect("can be written");
    let error = refused(&["experiment", "report", "--predicted", "p.json"]);
    assert_eq!(
        error,
        "error: p.json: metrics.output_itl_mean: 0.75 from 0.8 to 0.85: expected 0 < low <= ratio <= high"
    );
}

#[test]
fn a_prediction_needs_a_recording() {
    let folder = folder("predict");
    let refused = |args: &[&str]| {
        let done = meridian(&folder, &[&["bench", "predict"], args].concat());
        assert_eq!(done.code, 2, "{args:?}: {}{}", done.stdout, done.stderr);
        done.stderr.trim_end().to_owned()
    };
    assert!(refused(&["none.arrow", "--policy", "srpt"]).starts_with("error: none.arrow: cannot be read"));
    std::fs::create_dir_all(folder.join("empty")).expect("can be made");
    assert_eq!(
        refused(&["empty", "--policy", "srpt"]),
        "error: empty: no recording of the dispatch slot, which has the requests"
    );
    assert_eq!(
        refused(&["empty", "--policy", "srpt", "--replicates", "2"]),
        "error: --replicates 2: expected 8 to 1000"
    );
    std::fs::write(folder.join("x.arrow"), "PAR1").expect("can be written");
    assert!(refused(&["x.arrow", "--policy", "srpt"]).contains("expected an Arrow IPC file"));
}
