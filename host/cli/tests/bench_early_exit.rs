//! `meridian bench vllm --scenario early-exit`, with a script in the place of Python that writes rows which were made up: what is
//! asked of each engine, and what becomes of its answer. The driver of the real engine is tested in python/tests/bench.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::{Done, meridian, meridian_with};

use crate::support;

const PROBLEMS: u32 = 30;
const RULES: [&str; 7] = ["eat", "eat-published", "level", "rpdi", "patience", "deer", "code-stop"];

/// A pass as `early_exit_run` writes it: of each problem one sample, all but each tenth right.
fn pass(budget: Option<u32>, tokens: u32, probes: u32) -> Value {
    let right =
        |at: u32| [u32::from(budget.map_or(!at.is_multiple_of(10), |most| most >= 40 && !at.is_multiple_of(3)))];
    json!({
        "budget": budget, "wall_s": 1.5, "generated_tokens": 90 * PROBLEMS, "unended": 0,
        "think_tokens": (0..PROBLEMS).map(|at| [budget.unwrap_or(999).min(tokens + at % 7)]).collect::<Vec<_>>(),
        "right": (0..PROBLEMS).map(right).collect::<Vec<_>>(),
        "counters": {
            "forced": {"eat": 3, "policy": 0}, "missed": 0, "probes": {"asked": probes, "done": probes, "dropped": 0},
            "probe_tokens": 2 * probes, "think_tokens": 7,
        },
    })
}

/// What each engine wrote, by its name.
fn rows() -> Vec<(&'static str, Value)> {
    let machine = json!({"vllm": "0.32.0", "cpu": "a processor", "cores": 2, "python": "3.12.0"});
    let thought = |at: u32| {
        let known = 3 + at % 6;
        let point = |line| {
            let (bits, answer) = if line < known { (4.5, line % 5) } else { (0.01, 7) };
            json!([6 * line, bits, answer, 1.0, if line < known { 0.1 } else { 0.999 }])
        };
        json!({"truth": 7, "end_tokens": 100, "end_right": true, "points": (1..=16).map(point).collect::<Vec<_>>()})
    };
    let recording = json!({"wall_s": 1.0, "counters": {}, "trajectories": (0..12).map(thought).collect::<Vec<_>>()});
    let solved = |passes: Value| json!({"machine": machine, "passes": passes, "faults": {"trap": 0, "deadline": 1}});
    let mut out = vec![
        ("tune", json!({"machine": machine, "recording": recording, "faults": {}})),
        ("fixed", solved(json!([pass(None, 100, 0), pass(Some(16), 100, 0), pass(Some(40), 100, 0)]))),
        ("probes", solved(json!([pass(None, 100, 500)]))),
    ];
    out.extend(RULES.map(|rule| (rule, solved(json!([pass(None, 40, if rule == "rpdi" { 0 } else { 500 })])))));
    out
}

/// A folder with those rows, and a script that answers as Python would, with `run` for each engine: `$out` is what is to be
/// written, `$name` the engine's name. What was asked is a line each in `asked`.
fn fake(name: &str, rows: &[(&str, Value)], run: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(folder.join("rows")).expect("can be made");
    for (name, row) in rows {
        fs::write(folder.join(format!("rows/{name}.json")), row.to_string()).expect("it can be written");
    }
    let shown = folder.display();
    let script = format!(
        "#!/bin/sh\nshift\ncase $1 in *.model) echo {shown}/reasoner; exit ;; esac\nshift 2\nout=$1\n\
         name=$(basename \"$out\" .json | sed s/early-exit-//)\necho \"$name $*\" >> {shown}/asked\n{run}\n"
    );
    fs::write(folder.join("python"), script).expect("the script can be written");
    let mut permissions = fs::metadata(folder.join("python")).expect("it is there").permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut permissions, 0o755);
    fs::set_permissions(folder.join("python"), permissions).expect("it is ours");
    folder
}

/// The script answers with the rows.
fn answering(name: &str, rows: &[(&str, Value)]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    fake(name, rows, &format!("cp {}/rows/$name.json \"$out\"", folder.display()))
}

fn bench(folder: &Path, args: &[&str]) -> Done {
    let python = folder.join("python").display().to_string();
    let all = [&["bench", "vllm", "--scenario", "early-exit"], args].concat();
    meridian_with(folder, &[("MERIDIAN_PYTHON", &python)], &all)
}

const SMALL: [&str; 6] = ["--problems", "30", "--tune", "12", "--budgets", "40,16"];

/// Arguments of a small trial that keeps everything in a folder.
fn small() -> Vec<&'static str> {
    [&SMALL[..], &["--out", "runs"]].concat()
}

#[test]
fn it_is_recorded_chosen_measured_and_written() {
    let folder = answering("early-exit-results", &rows());
    let done = bench(&folder, &[&SMALL[..], &["--seed", "3", "--out", "runs"]].concat());
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(
        done.stdout.contains("30 problems, T=0.6, float32, seed 3; thresholds chosen on 12 others"),
        "{}",
        done.stdout
    );
    assert!(done.stdout.contains("fixed budget 16") && done.stdout.contains("EAT as published"), "{}", done.stdout);
    assert!(done.stdout.contains("policy faults: 9 deadline\n"), "{}", done.stdout);
    assert!(done.stdout.ends_with("30 problems are a trial: a result needs at least 2,000\n"), "{}", done.stdout);
    for told in ["tune ...\n", "  12 thoughts, 100.0 % right", "  budget 16: ", "patience ...\n", "logs: runs\n"] {
        assert!(done.stderr.contains(told), "{told}: {}", done.stderr);
    }
    let out = folder.join("runs");
    let read = |name: &str| fs::read_to_string(out.join(name)).unwrap_or_else(|_| panic!("{name}"));
    let document: Value = serde_json::from_str(&read("early-exit.json")).expect("JSON");
    assert_eq!(
        (&document["scenario"], &document["seed"], &document["tune"]),
        (&json!("early-exit"), &json!(3), &json!(12))
    );
    assert_eq!(document["machine"]["python"], "3.12.0");
    assert_eq!(document["budgets"], json!([16, 40]));
    assert_eq!(document["settings"]["eat"]["forced"], json!({"eat": 3, "policy": 0}));
    assert_eq!(document["settings"]["none"]["difference"], json!({"value": 0.0, "low": 0.0, "high": 0.0}));
    assert!(read("early-exit.md").contains("| RPDI |") && read("early-exit.svg").contains("mean think tokens"));
    assert!(out.join("early-exit-level.log").is_file() && out.join("early-exit-tune.json").is_file());
}

#[test]
fn each_engine_is_asked_for_what_it_is_there_for() {
    let folder = answering("early-exit-asked", &rows());
    let done =
        bench(&folder, &[&SMALL[..], &["--temperature", "1", "--dtype", "bfloat16", "--no-plot", "--json"]].concat());
    assert_eq!(done.code, 0, "{}", done.stderr);
    let document: Value = serde_json::from_str(&done.stdout).expect("one object");
    assert_eq!((&document["temperature"], &document["dtype"]), (&json!(1.0), &json!("bfloat16")));
    let asked = fs::read_to_string(folder.join("asked")).expect("it was asked");
    let asked: Vec<&str> = asked.lines().collect();
    let names: Vec<&str> = asked.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(names, [&["tune", "fixed", "probes"][..], &RULES].concat());
    let of = |name: &str| *asked.iter().find(|line| line.starts_with(&format!("{name} "))).expect("asked");
    for (at, line) in asked.iter().enumerate() {
        let ours = format!("--model {}/reasoner --split {}", folder.display(), if at == 0 { "tune" } else { "report" });
        assert!(line.contains(&ours), "{line}");
        assert!(line.contains("--temperature 1 --tune 12 --problems 30 --repeats 1 --dtype bfloat16"), "{line}");
        assert!(line.contains(&format!("--engine-seed {}", 1000 + at)), "each has a seed of its own: {line}");
    }
    assert!(of("tune").ends_with("--record") && of("tune").contains("--set scheduler.min_think_tokens=1000000"));
    assert!(of("fixed").ends_with("--budget none --budget 16 --budget 40"), "{}", of("fixed"));
    assert!(of("fixed").contains("--set entropy.enabled=false") && of("eat").ends_with("--budget none"));
    let setting = &document["tuning"]["choices"]["eat"]["setting"];
    assert!(of("eat").contains(&format!("--set entropy.min_probes={} ", setting["min_probes"])), "{setting}");
    assert!(of("patience").contains("--set policy.budget.source=native:patience"));
    assert!(of("probes").contains("--set entropy.rpdi_threshold=inf"));
    assert!(!folder.join("runs").exists(), "nothing is kept without --out");
}

#[test]
fn bad_input_is_one_line_and_starts_no_engine() {
    let folder = answering("early-exit-input", &rows());
    fs::write(folder.join("file"), "").expect("it can be written");
    for (args, says) in [
        (&["--problems", "0"][..], "invalid value '0' for '--problems <N>': expected a whole number, 1 to 100000"),
        (&["--tune", "many"], "invalid value 'many' for '--tune <N>': expected a whole number, 1 to 100000"),
        (&["--repeats", "-1"], "invalid value '-1' for '--repeats <N>': expected a whole number, 1 to 1000000"),
        (&["--budgets", "16,x"], "invalid value 'x' for '--budgets <N>': expected a whole number, 1 to 100000"),
        (&["--budgets", "28,16,28"], "--budgets 28,16,28: expected different budgets"),
        (&["--temperature", "nan"], "invalid value 'nan' for '--temperature <T>': expected a number, 0 to 2"),
        (&["--seed", "-1"], "invalid value '-1' for '--seed <N>': expected a whole number, 0 to 4000000"),
        (&["--dtype", "int8"], "invalid value 'int8' for '--dtype <TYPE>': int8: expected bfloat16 or float32"),
        (&["--problems", "99999", "--repeats", "99"], "--problems times --repeats: 9899901: expected 1 to 1000000"),
        (&["--model", "/nowhere"], "--model /nowhere: no config.json there, expected a model's folder"),
        (&["--out", "file"], "--out file: is no folder, expected one"),
        (&["--pairs", "2"], "unexpected argument '--pairs' found"),
        (&["--trace", "x\u{1b}[2J.csv"], "unexpected argument '--trace' found"),
    ] {
        let done = bench(&folder, args);
        assert_eq!((done.code, done.stdout.as_str(), done.stderr), (2, "", format!("error: {says}\n")), "{args:?}");
    }
    let done = bench(&folder, &["\u{1b}[2J"]);
    assert!(done.code == 2 && !done.stderr.contains('\u{1b}'), "{}", done.stderr);
    let done = bench(&folder, &["--json", "--budgets", "8,8"]);
    assert_eq!((done.code, done.stdout.lines().count()), (2, 1), "{}", done.stderr);
    assert!(done.stdout.starts_with("{\"") && done.stdout.contains("expected different budgets"), "{}", done.stdout);
    assert!(!folder.join("asked").exists());
    let done = bench(&folder, &["--help"]);
    assert_eq!((done.code, done.stderr.as_str()), (0, ""));
    let others = meridian(&folder, &["bench", "vllm", "--help"]);
    assert!(others.stdout.contains("--scenario early-exit --help"), "{}", others.stdout);
    for says in
        ["Usage: meridian bench vllm --scenario early-exit [OPTIONS]", "--budgets <N>", "Example:", "Exit code: 0"]
    {
        assert!(done.stdout.contains(says), "{}", done.stdout);
    }
}

#[test]
fn a_run_that_fails_ends_it_with_its_own_word() {
    for (at, (run, says)) in [
        ("echo noise; echo 'error: the engine is on fire' >&2; exit 3", "error: tune: the engine is on fire\n"),
        ("echo one >&2; printf 'two\\033[2J\\n' >&2; exit 3", "  | one\n  | two\\u{1b}[2J\n"),
        ("[ $name = tune ] && cp rows/$name.json \"$out\" && exit; exit 3", "error: fixed: ended with exit status: 3"),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = fake(&format!("early-exit-fails-{at}"), &rows(), run);
        let done = bench(&folder, &small());
        assert_eq!((done.code, done.stdout.as_str()), (1, ""), "{}", done.stderr);
        assert!(done.stderr.contains(says) && !done.stderr.contains('\u{1b}'), "{}", done.stderr);
        assert!(folder.join("runs/early-exit-tune.log").is_file() && !folder.join("runs/early-exit.json").exists());
    }
    let folder = fake("early-exit-no-model", &[], "");
    fs::write(folder.join("python"), "#!/bin/sh\necho 'error: --model DIR is needed' >&2\nexit 1\n").expect("written");
    let done = bench(&folder, &[]);
    assert_eq!((done.code, done.stderr.as_str()), (2, "error: --model DIR is needed\n"));
    fs::remove_file(folder.join("python")).expect("it is ours");
    let done = bench(&folder, &[]);
    assert!(done.code == 1 && done.stderr.contains("cannot be started"), "{}", done.stderr);
}

type Change = fn(&mut Value);

/// One of the rows, with something else in its place.
fn with(name: &str, change: Change) -> Vec<(&'static str, Value)> {
    let mut rows = rows();
    rows.iter_mut().filter(|(known, _)| *known == name).for_each(|(_, row)| change(row));
    rows
}

#[test]
fn rows_that_are_not_what_was_asked_for_are_refused_in_one_line() {
    let cases: [(&str, Change, &str); 8] = [
        ("tune", |row| row["recording"]["trajectories"] = json!([]), "recording.trajectories: 0: expected 1 to"),
        ("tune", |row| row["recording"]["trajectories"][3]["truth"] = json!("7"), "expected u32"),
        ("fixed", |row| row["passes"][1]["budget"] = json!(17), "budgets none, 17, 40: expected none, 16, 40"),
        ("fixed", |row| row["passes"][2]["right"][4] = json!([2]), "passes[2].right: 2: expected 0 to 1"),
        (
            "fixed",
            |row| row["passes"][0]["think_tokens"] = json!([[1]]),
            "passes[0].think_tokens: 1 problems: expected 30",
        ),
        ("fixed", |row| row["passes"][0]["right"][7] = json!([1, 1]), "passes[0]: problem 7 has 2 samples: expected 1"),
        ("level", |row| row["passes"][0]["wall_s"] = json!(-1.0), "passes[0].wall_s -1: expected a time of at least 0"),
        ("rpdi", |row| row["machine"] = json!({}), "missing field `vllm`"),
    ];
    for (at, (name, change, says)) in cases.into_iter().enumerate() {
        let folder = answering(&format!("early-exit-rows-{at}"), &with(name, change));
        let done = bench(&folder, &small());
        let error = done.stderr.lines().last().unwrap_or_default();
        assert_eq!((done.code, done.stdout.as_str()), (1, ""), "{error}");
        assert!(error.starts_with(&format!("error: early-exit-{name}.json: ")) && error.contains(says), "{error}");
    }
    let no_probe: Change = |row| {
        for row in row["recording"]["trajectories"].as_array_mut().expect("thoughts") {
            row["points"] = json!([]);
        }
    };
    let done = bench(&answering("early-exit-no-probe", &with("tune", no_probe)), &small());
    assert_eq!(done.code, 1);
    assert!(done.stderr.contains("error: the recorded run has no probe: the model ends no line"), "{}", done.stderr);
    // Python writes it, and JSON does not have it.
    let folder = answering("early-exit-nan", &rows());
    let path = folder.join("rows/tune.json");
    let text = fs::read_to_string(&path).expect("rows").replacen("4.5", "NaN", 1);
    fs::write(&path, text).expect("it can be written");
    let done = bench(&folder, &small());
    assert_eq!(done.code, 1);
    assert!(
        done.stderr.ends_with('\n') && done.stderr.contains("early-exit-tune.json: expected thoughts"),
        "{}",
        done.stderr
    );
}
