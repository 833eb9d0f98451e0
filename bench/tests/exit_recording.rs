//! Recorded thoughts from files: what is read, and what is refused in one line that names the file.

use std::path::PathBuf;

use meridian_bench::exit::{ExitRecording, ThoughtPoint};
use serde_json::{Value, json};

fn file(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).expect("it can be written");
    path
}

/// A recording of two thoughts, with something else in its place.
fn recording(change: impl FnOnce(&mut Value)) -> String {
    let row = json!({
        "truth": 3, "end_tokens": 30, "end_right": true, "points": [[20, 0.1, 3, null, 0.9], [10, 4.0, null, 1.2]],
    });
    let mut document =
        json!({"split": "tune", "recording": {"wall_s": 1.5, "trajectories": [row, row]}, "faults": {"trap": 2}});
    change(&mut document);
    document.to_string()
}

fn refused(name: &str, text: &str) -> String {
    let error = format!("{:#}", ExitRecording::read(&file(name, text)).expect_err("not a recording"));
    assert!(!error.contains('\n') && error.contains(name), "{error}");
    error
}

#[test]
fn rows_are_put_in_order() {
    let found = ExitRecording::read(&file("exit-good.json", &recording(|_| ()))).expect("a recording");
    assert_eq!((found.thoughts.len(), found.faults["trap"]), (2, 2));
    let points = found.thoughts[0].points();
    let first = ThoughtPoint { think_tokens: 10, bits: Some(4.0), answer: None, rpdi: Some(1.2), confidence: None };
    assert_eq!((points[0], points[1].think_tokens, points[1].answer), (first, 20, Some(3)));
    assert_eq!(points[1].confidence, Some(0.9));
    assert!(found.thoughts[0].end_right());
}

#[test]
fn rows_of_another_kind_are_refused() {
    for (at, (field, value, says)) in [
        ("truth", json!(-1), "invalid value: integer `-1`"),
        ("truth", json!(4e9 as u64 + 1_000_000_000), "invalid value: integer `5000000000`"),
        ("end_tokens", json!(1.5), "invalid type: floating point"),
        ("end_tokens", json!(4_000_000_000_u32), "expected 0 to"),
        ("end_right", json!("yes"), "expected a boolean"),
        ("points", json!([[1, 2.0, 3]]), "invalid length 3"),
        ("points", json!([[1, 2.0, 3, null, 0.5, 6]]), "trailing characters"),
        ("points", json!([[1, "high", 3, null]]), "expected f64"),
        ("points", json!([[null, 2.0, 3, null]]), "expected u32"),
        ("points", Value::Null, "expected a sequence"),
    ]
    .into_iter()
    .enumerate()
    {
        let text = recording(|document| document["recording"]["trajectories"][1][field] = value);
        let error = refused(&format!("exit-row-{at}.json"), &text);
        assert!(error.contains(says), "{field}: {error}");
    }
}

#[test]
fn what_is_no_recording_is_refused() {
    let good = recording(|_| ());
    for (at, (text, says)) in [
        (String::new(), "EOF while parsing"),
        ("[]".to_owned(), "expected"),
        ("{}".to_owned(), "missing field `recording`"),
        (recording(|document| document["recording"]["trajectories"] = json!([])), "0: expected 1 to 100000"),
        (good.replace("4.0", "NaN"), "expected value"),
        (good.replace("4.0", "1e999"), "number out of range"),
        (good.replace("\"truth\":3", "\"truth\":3,\"truth\":4"), "duplicate field `truth`"),
        (good[..good.len() / 2].to_owned(), "EOF while parsing"),
        ("[".repeat(100_000), "expected"),
    ]
    .into_iter()
    .enumerate()
    {
        let error = refused(&format!("exit-file-{at}.json"), &text);
        assert!(error.contains(says), "{at}: {error}");
    }
}

#[test]
fn what_is_too_large_is_refused() {
    let points = vec![json!([1, 0.5, 3, null]); (1 << 16) + 1];
    let text = recording(|document| document["recording"]["trajectories"][1]["points"] = json!(points));
    assert!(refused("exit-points.json", &text).contains("points: 65537: expected 0 to 65536"));
    let path = file("exit-huge.json", "");
    std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(1 << 40)).expect("a sparse file");
    let error = format!("{:#}", ExitRecording::read(&path).expect_err("too large"));
    assert!(error.contains("is larger than 256 MiB") && !error.contains('\n'), "{error}");
    std::fs::remove_file(&path).expect("it is ours");
    let error = format!("{:#}", ExitRecording::read(&path).expect_err("not there"));
    assert!(error.contains("cannot be read"), "{error}");
}
