//! What cannot be compared says why, in one line.

use std::path::PathBuf;

use meridian_bench::compare::{Options, compare};
use meridian_bench::read::read;
use meridian_bench::results::Results;
use support::Made;

use crate::support;

fn problem(a: &Results, b: &Results, options: &Options) -> String {
    let error = compare(a, b, options).expect_err("not comparable").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

fn policies(a: &str, b: &str) -> Options {
    Options { policy_a: Some(a.into()), policy_b: Some(b.into()), ..Options::default() }
}

#[test]
fn results_that_do_not_go_together() {
    let a = Made::default().results();
    let mut b = a.clone();
    b.trace.requests = 7;
    assert_eq!(
        problem(&a, &b, &Options::default()),
        "different traces: the number of requests is 2000 in A and 7 in B"
    );
    b = a.clone();
    b.runs[0].batches.pop();
    assert!(
        problem(&a, &b, &Options::default()).starts_with("different traces: the number of batches of \"native:fcfs\"")
    );
    b = a.clone();
    b.schema = 9;
    assert_eq!(problem(&a, &b, &Options::default()), "schema of B: 9: expected 1");
    let b = Made { rates: &[5.0], ..Made::default() }.results();
    assert_eq!(problem(&a, &b, &Options::default()), "no common runs: no policy, rate and seed of A is in B");
    let error = problem(&a, &a, &policies("native:fcfs", "nope"));
    assert!(error.starts_with("B has no run of policy \"nope\": expected one of native:fcfs, "), "{error}");
    let error = problem(&a, &a, &Options { min_change: f64::NAN, ..Options::default() });
    assert_eq!(error, "min_change NaN: expected a share, 0 or more");
}

#[test]
fn two_policies_of_one_file() {
    let results = Made::default().results();
    let found = compare(&results, &results, &policies("native:fcfs", "output-first.wasm")).expect("comparable");
    assert_eq!(found.groups.len(), 1);
    assert!(found.better > 0);
}

#[test]
fn other_engines_and_missing_partners_are_noted() {
    let a = Made { seeds: &[1, 2], ..Made::default() }.results();
    let mut b = a.clone();
    b.engine.kv_blocks = 1;
    b.runs.retain(|run| run.seed == 1);
    let found = compare(&a, &b, &Options::default()).expect("comparable");
    assert_eq!(found.notes.len(), 2, "{:?}", found.notes);
}

fn read_text(name: &str, text: &str) -> Result<Results, String> {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&file, text).expect("the folder of tests can be written");
    read(&file).map_err(|error| error.to_string().replace(&file.display().to_string(), "FILE"))
}

#[test]
fn files_name_the_field() {
    let results = Made { policies: &["p", "q"], batches: 2, ..Made::default() }.results();
    let good = serde_json::to_value(&results).expect("results are JSON");
    let wrong = |change: fn(&mut serde_json::Value)| {
        let mut value = good.clone();
        change(&mut value);
        read_text("wrong.json", &value.to_string()).expect_err("wrong")
    };
    assert_eq!(read_text("good.json", &good.to_string()).map(|read| read.runs.len()), Ok(2));
    let error = wrong(|value| value["runs"][1]["rate"] = "fast".into());
    assert_eq!(error, "FILE: runs[1].rate: invalid type: string \"fast\", expected f64");
    let error = wrong(|value| drop(value["runs"][1].as_object_mut().map(|run| run.remove("batches"))));
    assert_eq!(error, "FILE: runs[1]: missing field `batches`");
    let error = wrong(|value| drop(value.as_object_mut().map(|all| all.remove("engine"))));
    assert_eq!(error, "FILE: engine: missing");
    let error = wrong(|value| value["schema"] = 2.into());
    assert_eq!(error, "FILE: schema 2: expected 1; make the results again with this version");
    let error = read_text("other.json", "{}").expect_err("wrong");
    assert_eq!(error, "FILE: schema: missing: not results of a replay");
    let error = read_text("text.json", "hello").expect_err("wrong");
    assert!(error.starts_with("FILE: JSON: expected value"), "{error}");
    let error = read(&PathBuf::from("no/such/file.json")).expect_err("wrong").to_string();
    assert!(error.starts_with("no/such/file.json: cannot be read"), "{error}");
}
