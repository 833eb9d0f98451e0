//! `meridian ctl budget` against a process that listens.

use std::sync::Arc;

use meridian_admin::{Admin, ConnectionLimits, Surroundings};

use command::meridian;
use support::{Recorder, TOKEN, config, folder, metrics_at, write};

use crate::admin_support as support;
use crate::support as command;

#[test]
fn changes_reach_the_process_and_fail_where_none_was_made() {
    let folder = folder("ctl-budget");
    write(&folder.join("token"), TOKEN, 0o600);
    let recorder = Arc::new(Recorder::default());
    let surroundings = Surroundings {
        base_dir: folder.clone(),
        run_dir: Some(folder.join(".cache/meridian/run")),
        limits: ConnectionLimits::default(),
    };
    let _admin = Admin::start_in(&surroundings, recorder.clone(), &config("127.0.0.1:0", "token"), &metrics_at(""));
    for (args, call) in [
        (&["chatcmpl-1", "--max-think-tokens", "9"] as &[_], r#"{"request":"chatcmpl-1","max_think_tokens":9}"#),
        (&["--tenant", "batch", "--end-now"], r#"{"tenant":"batch","end_now":true}"#),
        (&["--all", "--reset", "--rpdi-threshold", "3.5"], r#"{"all":true,"reset":true,"rpdi_threshold":3.5}"#),
    ] {
        let done = meridian(&folder, &[&["ctl", "budget"], args].concat());
        assert_eq!((done.code, done.stderr.as_str()), (0, ""), "{args:?}");
        assert!(done.stdout.starts_with("1 requests changed; unchanged: 2 that answer already"), "{}", done.stdout);
        assert!(done.stdout.contains(r"chatcmpl-\u{1b}1  think  40 of 512 think tokens  tenant batch"));
        assert_eq!(recorder.calls(), [call]);
    }
    let done = meridian(&folder, &["ctl", "budget", "--all", "--end-now", "--json"]);
    let report: serde_json::Value = serde_json::from_str(&done.stdout).expect("JSON");
    assert_eq!((done.code, &report["changed"]), (0, &serde_json::json!(1)));
    let done = meridian(&folder, &["ctl", "budget"]);
    assert!(done.code == 0 && done.stdout.starts_with("1 live requests\n"), "{}", done.stdout);
    recorder.calls();
    for (args, code, why) in [
        (&["absent", "--reset"] as &[_], 1, "absent: no live request has this id"),
        (&["over", "--end-now"], 1, "over: 1 answer already"),
        (&["x"], 1, "change: nothing: must be a threshold, end_now or reset"),
        (&["x", "--ema-alpha", "2"], 1, "ema_alpha: 2: must be in (0, 1]"),
        (&["--max-think-tokens", "5"], 2, "required arguments"),
        (&["x", "--all", "--reset"], 2, "cannot be used with"),
        (&["x", "--max-think-tokens", "-1"], 2, "unexpected argument"),
    ] {
        let done = meridian(&folder, &[&["ctl", "budget"], args].concat());
        assert!(done.code == code && done.stderr.contains(why), "{args:?}: {} {}", done.code, done.stderr);
    }
}
