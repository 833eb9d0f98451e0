//! What readers say to files that are not right.

use meridian_bench::trace::{Format, ReadOptions, read_from};

#[track_caller]
fn says(name: &str, text: impl AsRef<[u8]>, format: Option<Format>, message: &str) {
    let got = read_from(name, text.as_ref(), format, &ReadOptions::default());
    assert_eq!(got.expect_err("a bad file").to_string(), message);
}

const OWN: &str = "arrival_s,prompt_tokens,think_tokens,output_tokens,session,turn";

#[track_caller]
fn own(row: &str, message: &str) {
    says("t.csv", format!("{OWN}\n0,1,2,3,,\n{row}\n"), None, message);
}

#[test]
fn own_rows() {
    own("x,1,2,3,,", "t.csv:3: column arrival_s: got \"x\", expected a finite number, not negative");
    own(",1,2,3,,", "t.csv:3: column arrival_s: got nothing, expected a value");
    own("-1,1,2,3,,", "t.csv:3: column arrival_s: got \"-1\", expected a finite number, not negative");
    own("NaN,1,2,3,,", "t.csv:3: column arrival_s: got \"NaN\", expected a finite number, not negative");
    own("inf,1,2,3,,", "t.csv:3: column arrival_s: got \"inf\", expected a finite number, not negative");
    own("1e308,1,2,3,,", "t.csv:3: column arrival_s: got \"1e308\", expected a number of at most 1e10");
    own("1e999,1,2,3,,", "t.csv:3: column arrival_s: got \"1e999\", expected a finite number, not negative");
    let tokens = "expected a whole number of tokens from";
    own("1,0,2,3,,", &format!("t.csv:3: column prompt_tokens: got \"0\", {tokens} 1 to 10000000"));
    own("1,1.5,2,3,,", &format!("t.csv:3: column prompt_tokens: got \"1.5\", {tokens} 1 to 10000000"));
    own("1,1,10000001,3,,", &format!("t.csv:3: column think_tokens: got \"10000001\", {tokens} 0 to 10000000"));
    own("1,1,2,1e308,,", &format!("t.csv:3: column output_tokens: got \"1e308\", {tokens} 1 to 10000000"));
    own("1,1,2,3,7,", "t.csv:3: column turn: got nothing, expected a value, as session has one");
    own("1,1,2,3,,0", "t.csv:3: column session: got nothing, expected a value, as turn has one");
    own("1,1,2,3,7,-1", "t.csv:3: column turn: got \"-1\", expected a whole number from 0");
    own("1,1,2,3,1e3,1", "t.csv:3: column session: got \"1e3\", expected a whole number");
    own("1,1", "t.csv:3: column (all): got \"2 fields\", expected 6 fields");
}

#[test]
fn sessions() {
    let bad = |field: &str, expected: &str| {
        let text = format!("{{\"id\": \"a\", \"block_size\": 64, \"requests\": [{field}]}}\n");
        says("a.jsonl", text, None, &format!("a.jsonl:1: column {expected}"));
    };
    bad("", "requests: got \"[]\", expected at least one request");
    bad(
        "7",
        "requests[0]: got \"7\", expected an object as published, or \
         [t_s, input tokens, output tokens, api_s, gap_s, stop, thinking, blocks]",
    );
    bad(
        "[0, -1, 2, 1, 0, \"\", 0, []]",
        "requests[0][1]: got \"-1\", expected a whole number of tokens from 0 to 10000000",
    );
    bad("[0, 1, 2, 1, -5, \"\", 0, []]", "requests[0][4]: got \"-5\", expected seconds from 0 to 1e10, or null");
    bad(
        "[0, 1, 2, 1, 0, 3, 0, []]",
        "requests[0][5]: got \"3\", expected a stop reason, such as \"tool_use\", or \"\"",
    );
    bad(
        "[0, 1, 2, 1, 0, \"\", 0, [[2, 1]]]",
        "requests[0][7]: got \"[[2,1]]\", expected ids of blocks, or [first, last] ranges of them",
    );
    bad(
        "[0, 70, 2, 1, 0, \"\", 0, [[1, 2]]]",
        "requests[0][7]: got \"[[1,2]]\", expected at most 1 blocks, as the prompt has",
    );
    for (field, expected) in [
        (r#"{"out": 1}"#, "in: got \"null\", expected a whole number of tokens from 0 to 10000000"),
        (r#"{"in": 9, "out": "x"}"#, "out: got \"\\\"x\\\"\", expected a whole number of tokens from 0 to 10000000"),
        (r#"{"in": 9, "t": -1}"#, "t: got \"-1\", expected seconds from 0 to 1e10, or null"),
        (r#"{"in": 9, "hash_ids": 7}"#, "hash_ids: got \"7\", expected an array of ids of blocks"),
        (r#"{"in": 99, "hash_ids": [0.5]}"#, "hash_ids: got \"0.5\", expected an id of a block, a whole number"),
        (r#"{"type": "subagent", "requests": 3}"#, "requests: got \"3\", expected an array of requests"),
        (
            r#"{"type": "subagent", "requests": [{"in": 1}, {"in": []}]}"#,
            "requests[1].in: got \"[]\", expected a whole number of tokens from 0 to 10000000",
        ),
    ] {
        bad(field, &format!("requests[0].{expected}"));
    }
    let line_of = |text: &str, place: &str| says("a.json", text, Some(Format::Agentic), &format!("a.json:{place}"));
    line_of(
        "\n\n{\"id\": 1,\n",
        "3: column (all): got \"{\\\"id\\\": 1,\\n\", expected a JSON object, which has an end",
    );
    line_of("{}\nx", "1: column block_size: got nothing, expected a value");
    line_of("\nx", "2: column (all): got \"x\", expected a JSON object");
    line_of("\n{1}", "2: column (all): got \"{1}\", expected a JSON object");
    let text = "{\"id\": \"a\", \"block_size\": 1, \"requests\": []}\n";
    let expected = "a.jsonl:1: column block_size: got \"1\", expected a whole number of tokens from 8 to 10000000";
    says("a.jsonl", text, None, expected);
}

#[test]
fn headers() {
    says(
        "t.csv",
        "arrival_s,prompt_tokens\n1,2\n",
        Some(Format::Meridian),
        "t.csv:1: column think_tokens: got \"arrival_s,prompt_tokens\", expected a header with \
         arrival_s,prompt_tokens,think_tokens,output_tokens",
    );
    says(
        "t.csv",
        "timestamp,input_tokens\n1,2\n",
        None,
        "t.csv:1: column output_tokens: got \"timestamp,input_tokens\", expected a header with \
         timestamp,input_tokens,output_tokens",
    );
}

#[test]
fn json_lines() {
    says(
        "t.jsonl",
        "{\"arrival_s\": 1\n",
        None,
        "t.jsonl:1: column (all): got \"{\\\"arrival_s\\\": 1\", expected one JSON object a line",
    );
    says(
        "t.jsonl",
        "{\"arrival_s\": 1, \"prompt_tokens\": [1]}",
        None,
        "t.jsonl:1: column prompt_tokens: got \"[1]\", expected a finite number, not negative",
    );
    says(
        "t.jsonl",
        "[]",
        Some(Format::Mooncake),
        "t.jsonl:1: column (all): got \"[]\", expected one JSON object a line",
    );
}

#[test]
fn other_formats() {
    says(
        "s.csv",
        "timestamp,input_tokens,output_tokens,reason_tokens\n1,2,3,4\n",
        None,
        "s.csv:2: column reason_tokens: got \"4\", expected at most the value of output_tokens",
    );
    says(
        "s.csv",
        "timestamp,input_tokens,output_tokens,reason_ratio\n1,2,3,1.5\n",
        None,
        "s.csv:2: column reason_ratio: got \"1.5\", expected a number of at most 1e0",
    );
    says(
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-30 00:00:00,1,1\n",
        None,
        "a.csv:2: column TIMESTAMP: got \"2023-02-30 00:00:00\", expected a time as in 2023-11-16 18:15:46.680590 or \
         with +00:00 after it",
    );
    let moon =
        |ids: &str| format!("{{\"timestamp\": 0, \"input_length\": 512, \"output_length\": 1, \"hash_ids\": {ids}}}");
    says("m.jsonl", moon("[-1]"), None, "m.jsonl:1: column hash_ids: got \"[-1]\", expected an array of whole numbers");
    says(
        "m.jsonl",
        moon("[1,2]"),
        None,
        "m.jsonl:1: column hash_ids: got \"[1,2]\", expected at most 1 blocks of 512 tokens, not 2; \
         --trace-block-tokens N sets another size",
    );
}

#[test]
fn vllm_results() {
    let without = "r.json:1: column input_lens: got nothing, expected an array: save the result with --save-detailed";
    says("r.json", "{\"request_rate\": 1}", None, without);
    says(
        "r.json",
        "{\"input_lens\": [1, 2], \"output_lens\": [1]}",
        None,
        "r.json:1: column output_lens: got \"1 values\", expected 2 values, as input_lens has",
    );
    says(
        "r.json",
        "{\"input_lens\": [1, -2], \"output_lens\": [1, 1]}",
        None,
        "r.json:2: column input_lens: got \"-2\", expected a whole number of tokens from 0 to 10000000",
    );
    says(
        "r.json",
        "{\"input_lens\": [1], \"output_lens\": [1], \"start_times\": [null]}",
        None,
        "r.json:1: column start_times: got \"null\", expected a finite number of seconds, not negative",
    );
}

#[test]
fn files_as_a_whole() {
    let known = "expected one of meridian, servegen, azure, mooncake, agentic, vllm-bench, bailian, burstgpt, copilot, \
                 aiperf-export, sharegpt, columns";
    says("t.csv", "a,b\n1,2\n", None, &format!("t.csv: unknown format, {known}"));
    says("t.csv", "", None, "t.csv: no requests, expected at least one row");
    says("t.csv", format!("{OWN}\n"), None, "t.csv: no requests, expected at least one row");
    says("t.csv", "", Some(Format::Meridian), "t.csv: no requests, expected at least one row");
    says(
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-03 00:00:00,1,0\n",
        None,
        "a.csv: no requests, expected at least one row (1 left out: no tokens)",
    );
    let error = "burst".parse::<Format>().expect_err("no such format").to_string();
    assert_eq!(error, format!("\"burst\": unknown format, {known}"));
}

#[test]
fn bytes_that_are_no_text() {
    let mut csv = format!("{OWN}\n").into_bytes();
    csv.extend(b"1,\xff,2,3,,\n");
    says("t.csv", &csv, None, "t.csv:2: column (all): got \"field 2\", expected text in UTF-8");
    let json = b"{\"arrival_s\": \"\xff\"}";
    says(
        "t.jsonl",
        json,
        None,
        "t.jsonl:1: column (all): got \"{\\\"arrival_s\\\": \\\"\u{fffd}\\\"}\", expected text in UTF-8",
    );
}

#[test]
fn a_huge_field_is_shown_short() {
    let field = "9".repeat(8 << 20);
    let digits = "9".repeat(60);
    says(
        "t.csv",
        format!("{OWN}\n{field},1,1,1,,\n"),
        None,
        &format!("t.csv:2: column arrival_s: got \"{digits}\"..., expected a finite number, not negative"),
    );
    let field = "9".repeat(100 << 20);
    says("t.csv", format!("{OWN}\n{field},1,1,1,,\n"), None, "t.csv: cannot be read");
    says(
        "t.jsonl",
        format!("{{\"arrival_s\": {field}}}"),
        None,
        "t.jsonl:1: column (all): got nothing, expected a line of less than 16 MiB",
    );
}
