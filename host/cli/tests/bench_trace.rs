//! `meridian bench trace`, and commands that lose their reader.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;
use support::{Done, meridian};

use crate::support;

fn folder() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("bench-trace");
    std::fs::create_dir_all(&folder).expect("can be made");
    folder
}

fn file(name: &str, text: &str) {
    std::fs::write(folder().join(name), text).expect("can be written");
}

fn bench(args: &[&str]) -> Done {
    meridian(&folder(), &[&["bench"], args].concat())
}

fn chats(count: u32) -> String {
    let chat = |at: u32| {
        format!(
            "{{\"chat_id\": {at}, \"parent_chat_id\": -1, \"timestamp\": {}, \"input_length\": 40, \"output_length\": 132, \
             \"hash_ids\": [1, 2, {}]}}\n",
            61.5 + 1.5 * f64::from(at),
            at + 3
        )
    };
    (0..count).map(chat).collect()
}

#[test]
fn a_trace_is_shown_in_ten_lines() {
    file("chats.jsonl", &chats(41));
    let done = bench(&["trace", "chats.jsonl"]);
    assert_eq!(done.code, 0, "{}", done.stderr);
    let lines: Vec<&str> = done.stdout.lines().collect();
    assert_eq!(lines.len(), 10, "{}", done.stdout);
    assert_eq!(lines[1..5], ["format    bailian", "requests  41", "span      60.000 s", "rate      0.667 requests/s"]);
    assert_eq!(lines[5], "prompt    1640 tokens; mean 40, median 40, p95 40, longest 40");
    let json: Value = serde_json::from_str(&bench(&["--json", "trace", "chats.jsonl"]).stdout).expect("one object");
    assert_eq!(
        (json["requests"].as_u64(), json["format"].as_str(), json["ok"].as_bool()),
        (Some(41), Some("bailian"), Some(true))
    );
    assert!((json["reuse"].as_f64().expect("a share") - 40.0 * 32.0 / 1640.0).abs() < 1e-9, "{json}");
}

#[test]
fn a_trace_is_saved_as_ours_and_for_other_tools() {
    file("in.jsonl", &chats(20));
    let shown = |args: &[&str]| {
        let done = bench(&[&["trace"], args].concat());
        assert_eq!(done.code, 0, "{}", done.stderr);
        done.stdout.lines().skip(2).map(str::to_owned).collect::<Vec<_>>()
    };
    let before = shown(&["in.jsonl", "--save", "own.csv"]);
    assert_eq!(shown(&["own.csv"]), before);
    for (tool, unit) in [("aiperf", "ms"), ("guidellm", "s"), ("vllm", "s")] {
        let done = bench(&["trace", "own.csv", "--save", "out.jsonl", "--as", tool]);
        assert!(done.stderr.contains("replay it: ") && done.stderr.contains(tool), "{}", done.stderr);
        let done = bench(&["--json", "trace", "own.csv", "--save", "out.jsonl", "--as", tool]);
        let json: Value = serde_json::from_str(&done.stdout).expect("one object");
        assert!(json["replay"].as_str().is_some_and(|command| command.contains("out.jsonl")), "{json}");
        assert_eq!(shown(&["out.jsonl", "--unit", unit, "--trace-block-tokens", "16"]), before);
    }
    // Over the trace itself.
    shown(&["own.csv", "--save", "own.csv"]);
    assert_eq!(shown(&["own.csv"]), before);
}

#[test]
fn what_cannot_be_read_or_saved_is_said() {
    file("x.json", "{\"request_latency\": {\"avg\": 1.5}}");
    file(
        "agents.jsonl",
        "{\"id\": \"a\", \"block_size\": 64, \"requests\": [[0.0, 150, 20, 4.0, 0.0, \"\", 0, [[1, 2]]]]}\n",
    );
    file(
        "texts.json",
        "[{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"gpt\", \"value\": \"b\"}]}]",
    );
    for (args, says) in [
        (&["trace", "x.json"][..], "x.json: unknown format: it is a summary of AIPerf"),
        (&["replay", "--trace", "x.json"], "give profile_export.jsonl of the same run (formats: meridian"),
        (&["trace", "agents.jsonl", "--save", "o", "--as", "vllm"], "--as: agents.jsonl: has sessions in closed loop"),
        (&["trace", "texts.json"], "expected --tokenizer FILE, a tokenizer.json"),
        (&["trace", "texts.json", "--tokenizer", "x.json"], "--tokenizer: x.json: not a tokenizer.json"),
        (&["trace", "none.csv"], "none.csv: cannot be read"),
        (&["trace", "x.json", "--trace-block-tokens", "0"], "--trace-block-tokens 0: expected 1 to"),
        (&["trace", "x.json", "--columns", "prompt=a"], "expected output=COLUMN among them"),
        (&["trace", "x.json", "--unit", "h"], "expected s, ms, us or ns"),
    ] {
        let done = bench(args);
        assert_eq!(done.code, 2, "{args:?}: {}", done.stderr);
        assert!(done.stderr.contains(says), "{args:?}: {}", done.stderr);
    }
    let done = bench(&["trace", "agents.jsonl", "--save", "no/such/o"]);
    assert_eq!(done.code, 1);
    assert!(done.stderr.contains("--save no/such/o: cannot be written"), "{}", done.stderr);
}

/// As `meridian ... | head -0` is: nobody reads what is printed.
#[test]
fn a_closed_pipe_ends_a_command_quietly() {
    file("some.jsonl", &chats(20));
    for args in [
        &["bench", "trace", "some.jsonl"][..],
        &["--json", "models", "list"],
        &["models", "list"],
        &["config", "reference"],
    ] {
        let (read, write) = std::io::pipe().expect("a pipe");
        drop(read);
        let output = Command::new(env!("CARGO_BIN_EXE_meridian"))
            .args(args)
            .current_dir(folder())
            .env("HOME", folder())
            .stdout(write)
            .stderr(Stdio::piped())
            .output()
            .expect("the command was built");
        assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]), "{args:?}");
    }
}

/// What another process says has lines; none of them begins as the command's own do.
#[test]
fn an_error_has_lines_instead_of_escapes() {
    let done = meridian(&folder(), &["policy", "check", "a\nerror: b\u{1b}[2J.wasm"]);
    assert_ne!(done.code, 0);
    assert!(done.stderr.contains("a\n  error: b\\u{1b}[2J.wasm"), "{}", done.stderr);
    assert!(!done.stderr.contains("\\u{a}"), "{}", done.stderr);
}
