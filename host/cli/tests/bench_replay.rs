//! `meridian bench replay`, `calibrate` and `generate`, as a user runs them.

mod support;

use std::path::PathBuf;

use serde_json::Value;
use support::{Done, meridian};

fn folder() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("replay");
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

fn bench(args: &[&str]) -> Done {
    meridian(&folder(), &[&["bench"], args].concat())
}

fn json(done: &Done) -> Value {
    assert_eq!(done.code, 0, "{}{}", done.stdout, done.stderr);
    serde_json::from_str(&done.stdout).expect("one JSON object")
}

/// The one line that says what was wrong.
fn refused(args: &[&str]) -> String {
    let done = bench(args);
    assert_eq!(done.code, 2, "{args:?}: {}{}", done.stdout, done.stderr);
    done.stderr
}

#[test]
fn a_replay_shows_its_policies_side_by_side_and_keeps_them() {
    let args = ["replay", "--requests", "150", "--policy", "output-first", "--rate", "2,4x", "--seeds", "1,2"];
    let results = json(&bench(&[&args[..], &["--save", "a.json", "--html", "a.html", "--json"]].concat()));
    let runs = results["runs"].as_array().expect("runs");
    // Two rates, two seeds, two policies.
    assert_eq!(runs.len(), 8);
    assert_eq!((runs[0]["policy"].as_str(), runs[1]["policy"].as_str()), (Some("fcfs"), Some("output-first")));
    assert!(runs.iter().all(|run| run["metrics"]["requests"] == 150.0));
    assert!((runs[4]["rate"].as_f64().expect("a rate") - 4.2).abs() < 1e-9, "four times 1.05 a second");
    assert_eq!(json(&bench(&["compare", "a.json", "a.json", "--json"]))["b"]["policy"], Value::Null);
    let page = std::fs::read_to_string(folder().join("a.html")).expect("was written");
    assert!(page.contains("<svg") && page.ends_with("</html>\n"));
    let table = bench(&args).stdout;
    assert!(table.contains("output ITL p99") && table.contains("output-first") && !table.contains(".cache"), "{table}");
}

#[test]
fn the_same_command_gives_the_same_results() {
    let args = ["replay", "--requests", "80", "--policy", "pascal", "--seeds", "5", "--json"];
    assert_eq!(json(&bench(&args))["runs"], json(&bench(&args))["runs"]);
}

#[test]
fn policies_of_one_name_are_told_apart() {
    let args =
        ["replay", "--requests", "60", "--policy", "fcfs", "--policy", "native:fcfs", "--inject", "trap:0.5", "--json"];
    let results = json(&bench(&args));
    let names: Vec<_> = results["runs"].as_array().expect("runs").iter().map(|run| run["policy"].clone()).collect();
    assert_eq!(names, ["fcfs", "fcfs #2", "fcfs #3"]);
}

#[test]
fn a_generated_trace_can_be_replayed() {
    json(&bench(&["generate", "--workload", "plain-chat", "--requests", "60", "--out", "t.csv", "--json"]));
    let of = |input: &[&str]| {
        json(&bench(&[&["replay", "--rate", "5", "--json"], input].concat()))["runs"][0]["metrics"].clone()
    };
    let (trace, workload) = (of(&["--trace", "t.csv"]), of(&["--workload", "plain-chat", "--requests", "60"]));
    assert_eq!((&trace["requests"], &trace["mean_tokens"]), (&workload["requests"], &workload["mean_tokens"]));
}

#[test]
fn swaps_faults_deadlines_engines_and_budgets_are_options() {
    let args = [
        "replay",
        "--requests",
        "120",
        "--rate",
        "4",
        "--policy",
        "edf",
        "--policy",
        "pascal{\"tpot_ms\": 40}",
        "--swap",
        "5=output-first",
        "--inject",
        "trap:0.2",
        "--deadline-ms",
        "20000",
        "--engines",
        "2",
        "--router",
        "least-loaded",
        "--budget",
        "eat-rpdi",
        "--eviction",
        "least-computed-first",
        "--max-tokens",
        "exact",
        "--json",
    ];
    let results = json(&bench(&args));
    assert_eq!(results["engine"]["engines"], 2);
    let runs = results["runs"].as_array().expect("runs");
    assert_eq!(runs[2]["policy"], "pascal{\"tpot_ms\": 40}");
    assert!(runs[1]["metrics"]["faults"].as_f64().expect("a count") > 0.0);
    let events = |run: usize| runs[run]["events"].as_array().expect("events").clone();
    assert!(events(0).is_empty());
    assert!(events(1).iter().any(|event| event["what"] == "swap to output-first" && event["t_s"] == 5.0));
    assert!(
        events(1).iter().any(|event| event["what"].as_str().is_some_and(|what| what.contains("edf in quarantine")))
    );
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    std::fs::write(folder().join("bad.csv"), "arrival_s,prompt_tokens,think_tokens,output_tokens\n0,10,x,5\n")
        .expect("can be written");
    std::fs::write(folder().join("bad.toml"), "max_num_seqs = 1\nkv_blocks = 1\n").expect("can be written");
    std::fs::write(folder().join("bad.json"), "{}").expect("can be written");
    for (args, says) in [
        (&["replay", "--trace", "bad.csv"][..], "think_tokens"),
        (&["replay", "--trace", "none.csv"], "none.csv"),
        (&["replay", "--engine", "7b-tpu"], "7b-tpu: unknown preset, expected one of 7b-h100"),
        (&["replay", "--engine", "bad.toml"], "bad.toml"),
        (&["replay", "--requests", "0"], "--requests 0: expected at least 1"),
        (&["replay", "--rate=-1"], "requests a second from 1e-6"),
        (&["replay", "--swap", "now=fcfs"], "expected SECONDS=POLICY"),
        (&["replay", "--inject", "boom:0.1"], "a kind of trap"),
        (&["replay", "--inject", "trap:2"], "a share from 0 to 1"),
        (&["replay", "--workload", "nothing"], "reasoning-chat"),
        (&["replay", "--policy", "pascal{"], "one JSON object"),
        (&["replay", "--clip-tokens", "9"], "--trace"),
        (&["replay", "--slo-tpot-ms", "0"], "--slo-tpot-ms 0: expected a number above 0"),
        (&["replay", "--think", "maybe", "--trace", "bad.csv"], "expected none or bimodal"),
        (&["calibrate", "bad.json"], "bad.json"),
        (&["calibrate"], "required"),
    ] {
        let said = refused(args);
        assert!(said.contains(says), "{args:?}: {said}");
    }
}

#[test]
fn a_policy_that_does_not_load_is_named() {
    for (policy, says) in
        [("outptu-first", "outptu-first"), ("none.wasm", "none.wasm"), ("pascal{\"tpot\": 1}", "tpot")]
    {
        let done = bench(&["replay", "--requests", "5", "--policy", policy]);
        assert_eq!(done.code, 1);
        assert!(done.stderr.contains(says), "{policy}: {}", done.stderr);
    }
}
