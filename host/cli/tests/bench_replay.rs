//! `meridian bench replay`, `calibrate` and `generate`, as a user runs them.

use std::path::PathBuf;

use meridian_bench::policies::{Choice, Loader, Policies};
use meridian_bench::results::Slo;
use meridian_bench::sim::{EngineConfig, Simulation};
use meridian_bench::trace::{Generator, Workload};
use meridian_core::MeridianConfig;
use meridian_engine::recording::{Recorder, RecorderSettings, SlotSetup};
use serde_json::Value;
use support::{Done, meridian};

use crate::support;

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
fn a_recording_is_replayed_like_a_trace() {
    let dir = folder().join("recorded");
    let _ = std::fs::remove_dir_all(&dir);
    let recorder = Recorder::start(RecorderSettings::new(dir, 64)).expect("the folder can be made");
    let choice = Choice { dispatch: "balanced".parse().expect("a policy"), eviction: None, budget: None, inject: None };
    let config = MeridianConfig::default();
    let setup = SlotSetup { targets: config.scheduler.targets(), deadline_ms: 2.0, memory_mib: 64 };
    let policies = Policies::load(&mut Loader::new(config), &choice, 1).expect("loads");
    let workload = Workload::named("reasoning-chat").expect("known");
    let requests: Vec<_> = Generator::new(&workload, 1).expect("valid").take(60).map(|one| one.clipped(900)).collect();
    Simulation::new(&EngineConfig::default(), vec![policies], Slo::default(), requests.len())
        .recorded_by(recorder, setup)
        .run(requests.into_iter(), |_| {});
    let results = json(&bench(&["replay", "--trace", "recorded", "--requests", "40", "--policy", "srpt", "--json"]));
    let runs = results["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 2);
    assert!(runs.iter().all(|run| run["metrics"]["requests"] == 40.0), "{runs:?}");
    let error = refused(&["replay", "--trace", "recorded", "--think", "bimodal"]);
    assert_eq!(error, "error: --think bimodal: a recording knows its phases, expected none\n");
    let error = refused(&["replay", "--trace", "none.arrow"]);
    assert!(error.starts_with("error: none.arrow: cannot be read"), "{error}");
}

/// Six sessions of four requests, each prompt the one before and four blocks.
fn sessions(file: &str) {
    let session = |id: u32| {
        let request = |turn: u32| {
            let blocks = 4 * (turn + 1);
            let gap = if turn == 0 { "0.0" } else { "0.5" };
            format!("[{turn}.0, {}, 6, 0.1, {gap}, \"tool_use\", 0, [[1, {blocks}]]]", blocks * 64 + 9)
        };
        let requests: Vec<String> = (0..4).map(request).collect();
        format!("{{\"id\": \"s{id}\", \"block_size\": 64, \"requests\": [{}]}}\n", requests.join(", "))
    };
    std::fs::write(folder().join(file), (0..6).map(session).collect::<String>()).expect("can be written");
}

#[test]
fn sessions_are_replayed_in_closed_loop() {
    sessions("agents.jsonl");
    let args = ["replay", "--trace", "agents.jsonl", "--block-tokens", "64", "--kv-blocks", "40", "--at-once", "3"];
    let policies = ["--policy", "dispatch=fcfs,eviction=next-use", "--policy", "dispatch=fcfs,eviction=belady"];
    let results = json(&bench(&[&args[..], &policies, &["--json"]].concat()));
    let runs = results["runs"].as_array().expect("runs");
    assert_eq!((runs.len(), &results["trace"]["requests"]), (3, &Value::from(24)));
    for run in runs {
        let of = |key: &str| run["metrics"][key].as_f64().unwrap_or_else(|| panic!("{key} in {run}"));
        assert_eq!((of("requests"), of("sessions"), of("refused")), (24.0, 6.0, 0.0));
        assert!(of("hit_rate") <= of("hit_rate_unlimited") && of("session_p50_s") > 1.5);
    }
    let table = bench(&[&args[..], &policies, &["--all"]].concat()).stdout;
    assert!(table.contains("session completion p50") && table.contains("evicted and needed blocks"), "{table}");
    let part = json(&bench(&[&args[..], &["--part", "2/3", "--shrink", "8", "--scale-gaps", "0", "--json"]].concat()));
    assert_eq!(part["runs"][0]["metrics"]["sessions"], 2.0);
    assert!(part["runs"][0]["metrics"]["session_p50_s"].as_f64().expect("seconds") < 1.5);
}

#[test]
fn what_sessions_cannot_be_is_refused() {
    sessions("refused.jsonl");
    let says = |args: &[&str], what: &str| {
        let said = refused(&[&["replay", "--trace", "refused.jsonl"], args].concat());
        assert!(said.contains(what), "{said}");
    };
    says(&["--rate", "2"], "--rate: sessions of refused.jsonl arrive when others end, expected --at-once instead");
    says(&["--shrink", "48"], "--shrink 48: expected a divisor of 64, the block size");
    says(&["--part", "3/2"], "3/2: expected K/N, K from 1 to N");
    says(&["--part", "9/9"], "--part 9/9: has no session, expected a smaller K");
    says(&["--at-once", "0"], "--at-once 0: expected 1 to");
    says(&["--scale-gaps=-1"], "--scale-gaps -1: expected a number from 0 to 1e6");
    says(&["--scale-user-gaps", "inf"], "--scale-user-gaps inf: expected a number from 0 to 1e6");
    let said = refused(&["tune", "--trace", "refused.jsonl"]);
    assert!(
        said.contains("refused.jsonl: has sessions in closed loop, which only `meridian bench replay` plays"),
        "{said}"
    );
    let said = refused(&["replay", "--requests", "20", "--policy", "eviction=belady"]);
    assert!(said.contains("eviction=belady: knows when sessions come back, expected --trace with sessions"), "{said}");
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
        "wa-lru",
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
        (&["replay", "--requests", "0"], "--requests 0: expected 1 to 2000000"),
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
fn a_set_names_the_policies_of_several_slots() {
    let args = [
        "replay",
        "--requests",
        "120",
        "--rate",
        "4",
        "--kv-blocks",
        "900",
        "--policy",
        "eviction=tiered-lru",
        "--policy",
        "eviction=prefix-value{\"cap\": 3}",
        "--policy",
        "dispatch=srpt,budget=eat-rpdi",
    ];
    let results = json(&bench(&[&args[..], &["--json"]].concat()));
    let runs = results["runs"].as_array().expect("runs");
    let names: Vec<_> = runs.iter().map(|run| run["policy"].as_str().expect("a name")).collect();
    assert_eq!(names, ["fcfs", "eviction tiered-lru", "eviction prefix-value{\"cap\": 3}", "srpt, budget eat-rpdi"]);
    let slots =
        |run: usize| ["dispatch", "eviction", "budget"].map(|slot| runs[run]["slots"][slot].as_str().expect("a name"));
    assert_eq!(slots(0), ["fcfs", "vLLM's own", "none"]);
    assert_eq!(slots(1), ["balanced", "tiered-lru", "none"]);
    assert_eq!(slots(2), ["balanced", "prefix-value{\"cap\": 3}", "none"]);
    assert_eq!(slots(3), ["srpt", "tiered-lru", "eat-rpdi"]);
    let count = |run: usize, key: &str| runs[run]["metrics"][key].as_f64().unwrap_or(-1.0);
    for (run, of) in runs.iter().enumerate().take(4).skip(1) {
        assert!(count(run, "eviction_by_policy") > 0.0 && count(run, "faults") == 0.0, "{}", of["metrics"]);
    }
    assert_eq!((count(0, "eviction_decisions"), count(0, "budget_decisions")), (-1.0, -1.0));
    assert!(count(3, "budget_by_policy") > 0.0 && count(2, "budget_decisions") < 0.0);
    let table = bench(&args).stdout;
    assert!(table.contains("eviction policy") && table.contains("budget policy"), "{table}");
    for (set, says) in [
        ("eviction=", "expected native:NAME"),
        ("dispatch=srpt,x=1", "x=1: expected dispatch=POLICY, eviction=POLICY, budget=POLICY or handoff=THINK:ANSWER"),
        ("dispatch=srpt,dispatch=edf", "dispatch is given twice"),
        ("handoff=2:0", "handoff=2:0: expected two numbers of engines from 1 on, such as 6:2"),
        ("handoff=1:1", "handoff=1:1: expected as many engines as --engines 1"),
    ] {
        let said = refused(&["replay", "--policy", set]);
        assert!(said.contains(says), "{set}: {said}");
    }
    let done = bench(&["replay", "--requests", "5", "--policy", "eviction=srpt"]);
    assert!(
        done.code == 1 && done.stderr.contains("native:srpt: unknown native policy, expected one of native:tiered-lru")
    );
}

#[test]
fn micro_times_every_slot_without_shipped_components() {
    let empty = folder().join("empty");
    std::fs::create_dir_all(&empty).expect("can be made");
    // The command is run from a copy, so that nothing lies beside it.
    let command = empty.join("bin").join("meridian");
    std::fs::create_dir_all(empty.join("bin")).expect("can be made");
    std::fs::copy(env!("CARGO_BIN_EXE_meridian"), &command).expect("can be copied");
    let run = |args: &[&str]| {
        let done = std::process::Command::new(&command)
            .args(["bench", "micro", "--candidates", "16", "--json"])
            .args(args)
            .current_dir(&empty)
            .env("HOME", &empty)
            .env_remove("MERIDIAN_CONFIG")
            .output()
            .expect("the command was built");
        let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
        (done.status.code(), text(done.stdout), text(done.stderr))
    };
    let (code, stdout, stderr) = run(&[]);
    assert!(code == Some(0) && stderr.contains("note: no shipped components"), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    let slots: Vec<_> = rows.iter().map(|row| (row["slot"].as_str(), row["default_ns"].as_f64() > Some(0.0))).collect();
    assert_eq!(slots, ["dispatch", "eviction", "budget"].map(|slot| (Some(slot), true)));
    assert!(rows.iter().all(|row| row["policy"].is_null()) && report["noop_call_ns"].is_null());
    let (code, _, stderr) = run(&["--policies", "nowhere"]);
    assert!(code == Some(2) && stderr.is_empty());

    std::fs::write(empty.join("m.toml"), "[policy.eviction]\nsource = 'native:prefix-value'\nconfig = { cap = 3 }\n")
        .expect("can be written");
    let (code, stdout, stderr) = run(&["--config", "m.toml"]);
    assert_eq!(code, Some(0), "{stderr}");
    let report: Value = serde_json::from_str(&stdout).expect("JSON");
    let policies: Vec<_> = report["rows"].as_array().expect("rows").iter().map(|row| row["policy"].as_str()).collect();
    assert_eq!(policies, [Some("balanced"), Some("prefix-value{\"cap\":3}"), Some("eat-rpdi")]);
    let (code, stdout, _) = run(&["--policy", "native:patience"]);
    assert!(code == Some(0) && stdout.contains("\"ratio\""), "{stdout}");
}

#[test]
fn micro_names_the_kind_of_a_fault() {
    let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus/component");
    for (component, kind) in [("trap.wasm", "trap"), ("wrong-length.wasm", "bad-answer")] {
        let path = corpus.join(component);
        let done = bench(&["micro", "--candidates", "16", "--policy", path.to_str().expect("UTF-8")]);
        assert_eq!(done.code, 1, "{component}: {}", done.stderr);
        let says = format!("error: {component} in the dispatch slot: faulted on a trial batch of 0 candidates");
        assert!(done.stderr.contains(&says) && done.stderr.contains(&format!(": {kind}: ")), "{}", done.stderr);
    }
    let done = bench(&["micro", "--policy", "native:outptu-first"]);
    assert!(done.code == 1 && done.stderr.contains("unknown native policy, expected one of native:balanced"));
}

/// Memory is taken for none of these: a slip of the keyboard must not take the machine with it.
#[test]
fn what_is_too_large_is_refused_by_its_name() {
    let engine = |field: &str, value: u64| {
        let mut text = "[step]\nfixed_ms = 1.0\n".to_owned();
        for (name, usual) in
            [("max_num_seqs", 8), ("max_num_batched_tokens", 512), ("kv_blocks", 64), ("block_tokens", 16)]
        {
            let value = if name == field { value } else { usual };
            text = format!("{name} = {value}\n{text}");
        }
        let file = format!("large-{field}.toml");
        std::fs::write(folder().join(&file), text).expect("can be written");
        file
    };
    let (blocks, seqs) = (engine("kv_blocks", 1 << 28), engine("max_num_seqs", u64::from(u32::MAX)));
    let wide = engine("block_tokens", 99_999_999_999_999_999);
    std::fs::write(folder().join("crowd.toml"), "[tenants]\ncount = 4294967295\n").expect("can be written");
    std::fs::write(folder().join("long.toml"), "requests_per_s = 99999999999999999999\n").expect("can be written");
    for (args, says) in [
        (&["replay", "--kv-blocks", "4294967295"][..], "--kv-blocks 4294967295: expected 2 to 4194304"),
        (&["replay", "--kv-blocks", "1"], "--kv-blocks 1: expected 2 to 4194304"),
        (&["replay", "--engines", "100000"], "--engines 100000: expected 1 to 1024"),
        (&["replay", "--engines", "1024"], "expected at most 8388608 in all"),
        (&["replay", "--max-num-seqs", "4294967295"], "--max-num-seqs 4294967295: expected 1 to 1048576"),
        (&["replay", "--max-num-batched-tokens", "4294967295"], "expected 1 to 16777216"),
        (&["replay", "--requests", "18446744073709551615"], "expected 1 to 2000000"),
        (&["generate", "--requests", "18446744073709551615", "--out", "o.csv"], "expected 1 to 2000000"),
        (&["replay", "--engine", &blocks], "large-kv_blocks.toml: kv_blocks: 268435456: expected 2 to 4194304"),
        (&["replay", "--engine", &seqs], "large-max_num_seqs.toml: max_num_seqs: 4294967295: expected 1 to 1048576"),
        (
            &["replay", "--engine", &wide],
            "large-block_tokens.toml: block_tokens: invalid value: integer `99999999999999999`",
        ),
        (&["replay", "--workload", "crowd.toml"], "tenants.count: got 4294967295"),
        (&["replay", "--workload", "long.toml"], "requests_per_s: 99999999999999999999: must fit"),
        (&["micro", "--candidates", "99999999999"], "--candidates 99999999999: expected 1 to 65536"),
    ] {
        let said = refused(args);
        assert!(said.contains(says), "{args:?}: {said}");
        assert_eq!(said.matches('\n').count(), 1, "{said}");
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

#[test]
fn tuning_shows_what_was_tried_and_the_flags_to_set() {
    let args = ["tune", "--workload", "plain-chat", "--requests", "120", "--rate", "8"];
    let found = json(&bench(&[&args[..], &["--json"]].concat()));
    let tried = found["tried"].as_array().expect("what was tried");
    assert!(tried.len() > 12, "every kind of flag: {}", tried.len());
    assert_eq!(tried[0]["flags"]["max_num_batched_tokens"], 8192, "the engine's own first");
    assert!(tried.iter().any(|tried| tried["flags"] == found["best"]));
    assert!(tried.iter().all(|tried| tried["metrics"]["8 req/s"]["goodput_rps"].is_number()));
    let said = bench(&args).stdout;
    assert!(said.contains("\nvllm serve --max-num-seqs ") && said.contains("best  "), "{said}");
    assert!(refused(&["tune", "--rate", "2", "--capacity"]).contains("--capacity"));
    assert!(refused(&["tune", "--sweep", "--capacity"]).contains("--capacity"));
    assert_eq!(refused(&["tune", "--slo-tpot-ms", "0"]), "error: --slo-tpot-ms 0: expected a number above 0\n");
}

/// An engine and requests that are simulated in no time: `small.toml` and `short.toml`; and a slow engine for few of them a
/// second, `slow.toml` and `tiny.toml`.
fn small_engine() {
    let engine = "max_num_seqs = 16\nmax_num_batched_tokens = 512\nkv_blocks = 2000\nblock_tokens = 16\n\
                  [step]\nfixed_ms = 2.0\nweights_ms = 4.0\ntoken_ms = 0.02\n";
    std::fs::write(folder().join("small.toml"), engine).expect("can be written");
    let workload =
        "preset = 'plain-chat'\nmost_generated_tokens = 20\nprompt.tail_share = 0.0\nprompt.median = 100.0\n";
    std::fs::write(folder().join("short.toml"), workload).expect("can be written");
    let slow = engine.replace("4.0", "40.0").replace("0.02", "0.2");
    std::fs::write(folder().join("slow.toml"), slow).expect("can be written");
    std::fs::write(folder().join("tiny.toml"), workload.replace("= 20", "= 3")).expect("can be written");
}

#[test]
fn advice_says_what_can_be_promised_and_how_to_configure_it() {
    small_engine();
    let level = ["--slo-ttfo-ms", "400", "--slo-tpot-ms", "200"];
    let args = [&["advise", "--engine", "slow.toml", "--workload", "tiny.toml"][..], &level].concat();
    let advice = json(&bench(&[&args[..], &["--json"]].concat()));
    let rates: Vec<_> = advice["capacities"].as_array().expect("capacities").iter().collect();
    assert_eq!(rates.len(), 3);
    assert!(rates.iter().all(|served| served["capacity"]["doubled"].as_f64().expect("a rate") > 1.0), "{rates:?}");
    assert_eq!(advice["loads"].as_array().map(Vec::len), Some(3));
    let in_time = advice["day"]["in_time"].as_object().expect("a day");
    let most = advice["day"]["most"].as_f64().expect("a bound");
    assert_eq!(in_time.len(), 4);
    assert!(in_time.values().all(|share| share.as_f64().expect("a share") <= most + 1e-9), "{in_time:?} {most}");
    let share = |name: &str| in_time[name].as_f64().expect("a share");
    assert!(share("meridian") > 1.5 * share("stock"), "more wait than a policy sees: {in_time:?}");
    let said = bench(&args).stdout;
    let (_, toml) = said.split_once("meridian.toml:\n").expect("the configuration");
    std::fs::write(folder().join("advised.toml"), toml).expect("can be written");
    let checked = meridian(&folder(), &["config", "check", "advised.toml"]);
    assert_eq!(checked.code, 0, "{}{}", checked.stdout, checked.stderr);
    assert!(refused(&["advise", "--slo-alone", "3"]).contains("--slo-alone 3: no level can promise it"));
}

#[test]
fn a_promise_changes_nothing_of_stock_vllm() {
    small_engine();
    let args = ["replay", "--engine", "slow.toml", "--workload", "tiny.toml", "--requests", "2000", "--rate", "60"];
    let of = |more: &[&str]| {
        let results = json(&bench(&[&args[..], &["--policy", "balanced", "--json"], more].concat()));
        let most = results["most_in_time"].as_f64();
        assert_eq!(most.is_some(), !more.is_empty());
        let metrics = [0, 1].map(|run: usize| results["runs"][run]["metrics"].clone());
        let in_time = |of: &Value| of["slo_attainment"].as_f64().expect("a share");
        assert!(metrics.iter().all(|of| in_time(of) <= most.unwrap_or(1.0)), "{most:?}");
        metrics
    };
    let [stock, _] = of(&[]);
    for late in ["--promise", "--promise=refuse"] {
        let [beside, promised] = of(&[late]);
        assert_eq!(stock, beside, "{late}");
        assert!(promised["slo_attainment"].as_f64() > stock["slo_attainment"].as_f64(), "{late}");
        assert_eq!(promised["turned_away"].as_f64().unwrap_or(0.0) > 0.0, late.ends_with("refuse"));
    }
}

#[test]
fn a_grid_holds_policies_against_every_opponent() {
    small_engine();
    let args = ["grid", "--engine", "small.toml", "--workload", "short.toml", "--loads", "0.95", "--bursts", "0.5"];
    let kept = [&args[..], &["--policy", "priority", "--save", "grid.json", "--html", "grid.html", "--json"]].concat();
    let found = json(&bench(&kept));
    let cells = found["cells"].as_array().expect("cells");
    assert_eq!(cells.len(), 2);
    let opponents = [
        ("stock", false),
        ("stock, best flags", false),
        ("stock, oracle flags", false),
        ("stock, chunks of 512", false),
        ("EDF, lengths known", false),
        ("SRPT, lengths known", false),
        ("priority", true),
    ];
    for (cell, (name, _)) in cells.iter().flat_map(|cell| opponents.map(|opponent| (cell, opponent))) {
        assert!(cell["contenders"][name]["metrics"]["goodput_rps"].is_number(), "{name}");
    }
    assert!(found["rows"][0]["capacity"]["rate"].as_f64().expect("a capacity") > 0.0);
    let against: Vec<_> =
        found["verdicts"].as_array().expect("verdicts").iter().map(|verdict| verdict["against"].clone()).collect();
    let expected: Vec<_> = opponents.iter().filter(|(_, is_policy)| !is_policy).map(|(name, _)| *name).collect();
    assert_eq!(against, expected);
    let page = std::fs::read_to_string(folder().join("grid.html")).expect("was written");
    assert!(page.contains("over every opponent") && page.ends_with("</html>\n"));
    assert!(!folder().join("grid.json.rows").exists(), "what an interrupted run would need goes");
    assert!(refused(&["grid"]).ends_with("expected at least one --trace or --workload\n"));
    assert!(refused(&["grid", "--workload", "plain-chat", "--loads", "0"]).contains("--loads 0: expected parts"));
    assert!(
        refused(&["grid", "--workload", "plain-chat", "--engine", "7b-tpu"])
            .contains("--engine 7b-tpu: unknown preset")
    );
}
