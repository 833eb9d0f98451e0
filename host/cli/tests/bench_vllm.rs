//! `meridian bench vllm`, with a script in the place of Python: what is asked of an engine, and what becomes of its answer. Real
//! engines are driven by the tests in python/tests/vllm.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::{Done, meridian, meridian_with};

use crate::support;

/// A run of so many requests as `python -m meridian.vllm.bench` writes it, with something else in its place.
fn document(requests: usize, change: impl FnOnce(&mut Value)) -> String {
    let row = |index: usize| {
        json!({
            "arrival_s": 0.1 * index as f64, "prompt_tokens": 100, "cached_tokens": 20, "think_tokens": 2, "output_tokens": 3,
            "delivered_tokens": 6, "deadline_ms": null, "think_forced_ok": true, "ttft_ms": 50.0, "think_end_ms": 70.0,
            "ttfo_ms": 80.0, "e2e_ms": 120.0, "itl_think_ms": [10.0, 10.0], "itl_output_ms": [10.0, 20.0, 20.0],
        })
    };
    let mut document = json!({
        "scheduler": "native:pascal",
        "engine": {
            "num_gpu_blocks": 160, "block_size": 32, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "realtime": true,
            "settings": [["policy.dispatch.source", "\"native:pascal\""], ["policy.dispatch.config", "{ tpot_ms = 40 }"]],
        },
        "machine": {"vllm": "0.32.0", "cpu": "a processor", "cores": 2},
        "steps": {
            "ms": [10.0, 20.0], "requests": [1, 1], "tokens": [100, 1], "context_tokens": [0, 100], "attention_pairs": [5050, 0],
            "arrivals": [1, 0], "arrivals_ms": [0.1, 0.0], "schedule_us": [90.0, 110.0], "running": [1, 1],
        },
        "counts": {"preemptions": {"think": 1}, "output_preempted_while_think_held": 0, "recomputed_tokens": 7},
        "rows": (0..requests).map(row).collect::<Vec<_>>(),
        "meridian": {
            "decisions": 2, "decided_by_policy": 2, "decided_by_fallback": 0, "faults": {}, "deciding_ms": 0.1, "own_ns": [5e4],
        },
    });
    change(&mut document);
    document.to_string()
}

/// A script that answers as Python would, with `run` for each run: `$1` is the job, `$2` what is to be written.
fn python(folder: &Path, run: &str) -> PathBuf {
    let path = folder.join("python");
    let script =
        format!("#!/bin/sh\nshift\ncase $1 in *.model) echo {}; exit ;; esac\nshift\n{run}\n", folder.display());
    fs::write(&path, script).expect("the script can be written");
    let mut permissions = fs::metadata(&path).expect("it is there").permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    fs::set_permissions(&path, permissions).expect("it is ours");
    path
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("can be made");
    folder
}

fn bench(python: &Path, args: &[&str]) -> Done {
    let python = python.display().to_string();
    let home = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    meridian_with(&home, &[("MERIDIAN_PYTHON", &python)], &[&["bench", "vllm"], args].concat())
}

#[test]
fn runs_become_results_that_compare_and_report_read() {
    let folder = folder("vllm-results");
    fs::write(folder.join("answer.json"), document(3, |_| ())).expect("it can be written");
    let python = python(&folder, &format!("cp {}/answer.json \"$2\"", folder.display()));
    let (out, save, html) = (folder.join("out"), folder.join("results.json"), folder.join("report.html"));
    let [out_text, save_text, html_text] = [&out, &save, &html].map(|path| path.display().to_string());
    let args = ["--scenario", "kv-tight", "--seeds", "1,2", "--policy", "pascal{\"tpot_ms\": 40}", "--out", &out_text];
    let done = bench(&python, &[&args[..], &["--save", &save_text, "--html", &html_text]].concat());
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(done.stdout.contains("vLLM 0.32.0") && done.stdout.contains("TTFO p50"), "{}", done.stdout);
    let results: Value = serde_json::from_slice(&fs::read(&save).expect("it was saved")).expect("JSON");
    let runs = results["runs"].as_array().expect("runs");
    let policies: Vec<_> = runs.iter().map(|run| run["policy"].as_str().expect("a name")).collect();
    assert_eq!(policies, ["stock", "pascal{\"tpot_ms\": 40}"].repeat(2));
    assert_eq!(
        (&runs[1]["metrics"]["decisions"], &runs[1]["metrics"]["recomputed_tokens"]),
        (&json!(2.0), &json!(7.0))
    );
    assert!((runs[1]["metrics"]["hit_rate"].as_f64().expect("a share") - 0.2).abs() < 1e-9);
    // What was asked: stock has no configuration, the other its policy's options.
    let job = |label: &str| -> Value {
        let path = out.join(format!("kv-tight-1-{label}.job.json"));
        serde_json::from_slice(&fs::read(&path).unwrap_or_else(|_| panic!("{}", path.display()))).expect("JSON")
    };
    assert!(job("stock")["meridian_toml"].is_null());
    let toml = job("pascal--tpot_ms---40-")["meridian_toml"].as_str().expect("a text").to_owned();
    assert!(toml.contains("native:pascal") && toml.contains("tpot_ms = 40"), "{toml}");
    assert_eq!(job("stock")["requests"].as_array().map(Vec::len), Some(120));
    for command in [vec!["report", &save_text, "--out", &html_text], vec!["compare", &save_text, &save_text]] {
        let done = meridian(&folder, &[&["bench"], &command[..]].concat());
        assert_eq!(done.code, 0, "{command:?}: {}", done.stderr);
    }
    assert!(fs::read_to_string(&html).expect("it was drawn").contains("times were measured"));
    // The recorded options are the policy's own when the run is simulated.
    let recorded = out.join("kv-tight-1-pascal--tpot_ms---40-.json").display().to_string();
    let done = meridian(&folder, &["bench", "calibrate", &recorded]);
    assert!(done.stderr.contains("2 steps with tokens, expected at least 100"), "{}", done.stderr);
}

#[test]
fn a_run_that_fails_ends_it_with_its_own_word() {
    let folder = folder("vllm-fails");
    for (run, says) in [
        ("echo noise; echo 'error: the engine is on fire' >&2; exit 3", "stock: the engine is on fire\n"),
        ("echo one >&2; echo two >&2; exit 3", "  | one\n  | two\n"),
        ("echo '{}' > \"$2\"", "expected a run that `meridian bench vllm --out DIR` wrote"),
    ] {
        let done = bench(&python(&folder, run), &["--scenario", "loaded"]);
        assert_eq!((done.code, done.stdout.as_str()), (1, ""), "{}", done.stderr);
        assert!(done.stderr.contains(says), "{}", done.stderr);
    }
    let done = bench(Path::new("/nowhere/python"), &["--scenario", "loaded"]);
    assert!(done.code == 1 && done.stderr.contains("/nowhere/python: cannot be started"), "{}", done.stderr);
    fs::write(folder.join("no-model"), "#!/bin/sh\necho 'error: --model DIR is needed' >&2\nexit 1\n")
        .expect("written");
    let status = std::process::Command::new("chmod").arg("+x").arg(folder.join("no-model")).status();
    assert!(status.expect("chmod").success());
    let done = bench(&folder.join("no-model"), &["--scenario", "loaded"]);
    assert_eq!((done.code, done.stderr.as_str()), (2, "error: --model DIR is needed\n"));
}

#[test]
fn faults_and_requests_that_never_answered_are_said() {
    let folder = folder("vllm-faults");
    let faulty = document(3, |document| {
        document["meridian"]["faults"] = json!({"deadline": 2});
        document["rows"][1]["ttfo_ms"] = Value::Null;
        document["rows"][1]["think_forced_ok"] = json!(false);
    });
    fs::write(folder.join("answer.json"), faulty).expect("it can be written");
    let python = python(&folder, &format!("cp {}/answer.json \"$2\"", folder.display()));
    let args = ["--scenario", "kv-tight", "--without-stock", "--policy", "pascal", "--json"];
    let done = bench(&python, &args);
    assert_eq!(done.code, 1);
    assert!(done.stderr.ends_with("error: a policy faulted, see the notes\n"), "{}", done.stderr);
    let said: Value = serde_json::from_str(&done.stdout).expect("JSON");
    let comparison = &said["comparisons"][0];
    assert_eq!(comparison["runs"].as_array().map(Vec::len), Some(1));
    assert_eq!(comparison["runs"][0]["metrics"]["requests"], json!(2.0));
    let notes = comparison["notes"].to_string();
    assert!(notes.contains("1 requests did not end thinking") && notes.contains("faulted 2 times"), "{notes}");
}

#[test]
fn a_trace_is_sent_as_the_command_line_says() {
    let folder = folder("vllm-trace");
    fs::write(folder.join("answer.json"), document(2, |_| ())).expect("it can be written");
    let python = python(&folder, &format!("cp {}/answer.json \"$2\"", folder.display()));
    let trace = folder.join("t.csv");
    let rows = "arrival_s,prompt_tokens,think_tokens,output_tokens,session,turn\n0,1000,200,100,1,0\n4,100,0,50,,\n8,1,1,1,,\n";
    fs::write(&trace, rows).expect("it can be written");
    let (trace, out) = (trace.display().to_string(), folder.join("out").display().to_string());
    let args =
        ["--trace", &trace, "--requests", "2", "--scale-tokens", "0.5", "--scale-time", "2", "--policy", "stock"];
    let done = bench(&python, &[&args[..], &["--max-model-len", "400", "--out", &out]].concat());
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(done.stderr.contains("note: 1 of 2 requests clipped to 400 tokens"), "{}", done.stderr);
    assert!(done.stderr.contains("note: 1 requests are turns of a conversation"), "{}", done.stderr);
    let job = fs::read(folder.join("out/t.csv-1-stock.job.json")).expect("the job is kept");
    let job: Value = serde_json::from_slice(&job).expect("JSON");
    let of = |at: usize, field: &str| job["requests"][at][field].clone();
    assert_eq!(job["requests"].as_array().map(Vec::len), Some(2));
    assert_eq!(
        [of(1, "arrival_s"), of(1, "prompt_tokens"), of(1, "output_tokens")],
        [json!(8.0), json!(50), json!(25)]
    );
    let all: u64 =
        ["prompt_tokens", "think_tokens", "output_tokens"].map(|f| of(0, f).as_u64().expect("tokens")).iter().sum();
    assert!(all <= 384 && of(0, "session").is_null(), "{all}");
    assert_eq!((&job["realtime"], &job["max_model_len"]), (&json!(true), &json!(400)));
}

#[test]
fn a_scenario_comes_as_fast_and_as_long_as_the_command_line_says() {
    let folder = folder("vllm-rate");
    fs::write(folder.join("answer.json"), document(2, |_| ())).expect("it can be written");
    let python = python(&folder, &format!("cp {}/answer.json \"$2\"", folder.display()));
    let out = folder.join("out").display().to_string();
    let args = ["--scenario", "loaded", "--policy", "stock", "--requests", "40", "--rate", "5", "--out", &out];
    let done = bench(&python, &args);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let job = fs::read(folder.join("out/loaded-1-stock.job.json")).expect("the job is kept");
    let job: Value = serde_json::from_slice(&job).expect("JSON");
    let requests = job["requests"].as_array().expect("requests");
    let last = requests.last().expect("a request")["arrival_s"].as_f64().expect("seconds");
    assert_eq!((requests.len(), (last * 5.0).round()), (40, 40.0));
    for (args, says) in [
        (&["--scenario", "loaded", "--rate", "0"][..], "--rate 0: expected a number above 0"),
        (&["--scenario", "loaded", "--requests", "1000000"][..], "--requests 1000000: expected"),
        (&["--scenario", "multi-turn", "--rate", "3"][..], "multi-turn has chats: expected --sessions and --turns"),
    ] {
        let done = bench(&python, args);
        assert_eq!((done.code, done.stdout.as_str()), (2, ""), "{}", done.stderr);
        assert!(done.stderr.contains(says), "{}", done.stderr);
    }
}
