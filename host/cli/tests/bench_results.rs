//! `meridian bench compare` and `report`: exit codes and files.

use std::ffi::OsString;
use std::path::PathBuf;

use meridian_bench::results::{Results, Run, SCHEMA};

fn results(name: &str, ttfo_ms: f64) -> PathBuf {
    let batch = |at: usize| [("ttfo_p99_ms".to_owned(), ttfo_ms * (1.0 + 0.01 * (at % 3) as f64))].into();
    let run = Run {
        policy: "native:fcfs".into(),
        rate: 4.0,
        metrics: [("ttfo_p99_ms".to_owned(), ttfo_ms)].into(),
        batches: (0..12).map(batch).collect(),
        ..Run::default()
    };
    let results = Results { schema: SCHEMA, baseline: run.policy.clone(), runs: vec![run], ..Results::default() };
    let file = folder().join(name);
    std::fs::write(&file, serde_json::to_string(&results).expect("results are JSON")).expect("can be written");
    file
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

fn meridian(args: &[OsString]) -> u8 {
    let command = ["meridian", "bench"].map(OsString::from);
    meridian_cli::run(command.into_iter().chain(args.iter().cloned()))
}

#[test]
fn the_exit_code_says_whether_anything_is_worse() {
    let (slow, fast) = (results("slow.json", 130.0), results("fast.json", 100.0));
    let compared = |a: &PathBuf, b: &PathBuf| meridian(&["compare".into(), a.into(), b.into()]);
    assert_eq!(compared(&fast, &fast), 0);
    assert_eq!(compared(&slow, &fast), 0);
    assert_eq!(compared(&fast, &slow), 1);
    assert_eq!(compared(&fast, &folder().join("not-there.json")), 2);
    let lenient = ["compare".into(), fast.into(), slow.into(), "--min-change".into(), "0.5".into(), "--json".into()];
    assert_eq!(meridian(&lenient), 0);
}

#[test]
fn a_report_is_one_file() {
    let (file, page) = (results("report.json", 100.0), folder().join("report.html"));
    assert_eq!(meridian(&["report".into(), file.into(), "--out".into(), page.clone().into()]), 0);
    assert!(std::fs::read_to_string(page).expect("was written").ends_with("</html>\n"));
    assert_eq!(meridian(&["report".into(), folder().into()]), 2);
}
